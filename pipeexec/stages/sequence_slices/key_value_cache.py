"""`KeyValueCache`: causal attention over the slices of a sequence, for use in a stage's modules.

A pipeline may run a sequence in slices (``schedule.n_slices``), one task each. The queries of a
slice attend to the keys of its own positions and of all slices before it. So a stage keeps the keys
and values of each slice until its last reader has run:

1. F of slice 1 reads those of slice 0, as leaves of its graph, and keeps its own.
2. B of slice 1 leaves gradients on the leaves of slice 0.
3. B of slice 0 starts from its output and from its keys and values, with these gradients.

`pipeexec.stages.sequence_slices.stage_slices` does the bookkeeping. Outside of a pipeline with
slices, a cache keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_count,
    check_flag,
)

_T = TypeVar("_T")

#: Masks by number of queries, number of keys, type and device.
Masks = dict[tuple[int, int, torch.dtype, torch.device], Tensor]


#: Options of torch's attention that `KeyValueCache.attend` passes on.
_OPTIONS = ("dropout_p", "scale", "enable_gqa")


@dataclass
class KeysValues:
    """Keys and values of one slice in one call of a cache.

    Attributes
    ----------
    leaves
        Keys and values that later slices read, without the graph that made them; their gradients
        add up here.
    outputs
        The same tensors in the graph of the slice; empty if that graph is not kept.
    """

    leaves: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()


@dataclass
class SliceCall:
    """One forward of a slice, for one cache.

    Attributes
    ----------
    earlier
        Calls of the earlier slices of the sequence, the first slice first.
    keeps
        Whether later slices read the keys and values of this one.
    owns_copies
        Whether to copy what is kept: the graph of the forward is dropped, and with it the larger
        tensors of which keys and values may be views.
    calls
        Keys and values of each call of `KeyValueCache.append`, in order.
    counts
        Positions of each call of `KeyValueCache.offset`, in order.
    masks
        Masks of `KeyValueCache.attend`, which all caches share in one forward.
    """

    earlier: list[SliceCall] = field(default_factory=list)
    keeps: bool = False
    owns_copies: bool = False
    calls: list[KeysValues] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    masks: Masks = field(default_factory=dict)


class KeyValueCache(nn.Module):
    """Keys and values of the earlier slices of a sequence, for causal attention in a stage.

    A module has one cache for each of its attentions, and calls `attend`, or `append` before its
    own attention. A module that adds positions asks `offset` for the first one. The cache has no
    parameters, and without slices it changes nothing.

    Parameters
    ----------
    causal
        Whether positions attend to earlier positions alone. False marks attention in both
        directions, which no pipeline runs in slices: the first slice would need keys of the last.

    See Also
    --------
    pipeexec.Pipeline : Its ``slice_dim`` is the dimension that is cut.
    pipesim.lower : Lower a schedule of several slices a sequence.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> class Attention(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.cache = px.KeyValueCache()
    ...     def forward(self, query, key, value):  # (batch, heads, positions, width)
    ...         return self.cache.attend(query, key, value)
    >>> Attention()(*torch.ones(3, 1, 2, 5, 4)).shape
    torch.Size([1, 2, 5, 4])
    """

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = check_flag("causal", causal)
        self._call: SliceCall | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_call": None}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the attention of the slice's queries to its own and all earlier positions.

        Parameters
        ----------
        query, key, value
            Those of the slice, shape ``(..., positions, width)``.
        **options
            ``dropout_p``, ``scale`` and ``enable_gqa`` of
            `torch.nn.functional.scaled_dot_product_attention`.

        Returns
        -------
        torch.Tensor
            Shape of the queries, with the width of the values.

        Examples
        --------
        Outside of a pipeline with slices, it is torch's causal attention:

        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> import pipeexec as px
        >>> query, key, value = torch.randn(3, 1, 2, 5, 4)  # one sequence, 2 heads, 5 positions
        >>> output = px.KeyValueCache().attend(query, key, value)
        >>> expected = scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> torch.allclose(output, expected)
        True
        """
        for name in options:
            if name not in _OPTIONS:
                raise ArgumentError(
                    f"KeyValueCache.attend takes no {name}, but {', '.join(_OPTIONS)}: its mask is "
                    "causal over all slices; for another one call append, and use keys and values "
                    "in your own attention"
                )
        _check_positions(query=query, key=key, value=value)
        own = query.shape[-2]
        keys, values = self.append(key, value)
        n_keys = keys.shape[-2]
        if self._call is None or not self._call.earlier or not self.causal:
            return F.scaled_dot_product_attention(
                query, keys, values, is_causal=self.causal, **options
            )
        form = own, n_keys, query.dtype, query.device
        mask = self._call.masks.get(form)
        if mask is None:
            mask = self._call.masks[form] = _causal_mask(*form)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **options)

    forward = attend

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all slices so far, this one included.

        The queries of the slice are those of the last positions: query ``i`` of ``n`` may attend to
        the first ``keys.shape[-2] - n + i + 1`` keys.

        Parameters
        ----------
        key, value
            Those of the slice, shape ``(..., positions, width)``. If keys depend on their
            positions, as rotary ones do, give them so, with `offset` as first position.

        Returns
        -------
        tuple of torch.Tensor
            Keys and values; shape ``(..., positions so far, width)``.

        Examples
        --------
        Outside of a pipeline with slices, there are no earlier slices:

        >>> import torch
        >>> import pipeexec as px
        >>> key, value = torch.randn(2, 1, 2, 5, 4)
        >>> keys, values = px.KeyValueCache().append(key, value)
        >>> torch.equal(keys, key)
        True
        """
        _check_positions(key=key, value=value)
        call = self._call
        if call is None:
            return key, value
        number = len(call.calls)
        call.calls.append(_kept(call, key, value))
        earlier = [_same_call(slice_.calls, number).leaves for slice_ in call.earlier]
        if not earlier:
            return key, value
        keys, values = zip(*earlier, strict=True)
        return torch.cat([*keys, key], dim=-2), torch.cat([*values, value], dim=-2)

    def offset(self, n_positions: int) -> int:
        """Return the position in its sequence at which the slice begins, and note its length.

        Parameters
        ----------
        n_positions
            Number of positions of the slice.

        Returns
        -------
        int
            Number of positions of all earlier slices; 0 for the first, and outside of a pipeline
            with slices.

        Examples
        --------
        >>> import pipeexec as px
        >>> px.KeyValueCache().offset(5)
        0
        """
        n_positions = check_count("n_positions", n_positions, 0)
        call = self._call
        if call is None:
            return 0
        number = len(call.counts)
        call.counts.append(n_positions)
        return sum(_same_call(slice_.counts, number) for slice_ in call.earlier)

    def extra_repr(self) -> str:
        """Return the options, for torch's text of a module.

        Returns
        -------
        str
            The text between the parentheses of `repr`; empty for a causal cache.

        Examples
        --------
        >>> import pipeexec as px
        >>> px.KeyValueCache(causal=False).extra_repr()
        'causal=False'
        """
        return "" if self.causal else "causal=False"


def _check_positions(**tensors: Tensor) -> None:
    """Raise unless all are tensors of shape (..., positions, width), of as many positions."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dim() < 2:
            form = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else None
            raise ArgumentTypeError(
                f"{name} must be a tensor of shape (..., positions, width), got "
                f"{form or type(tensor).__name__}"
            )
        sizes[name] = tensor.shape[-2]
    if len(set(sizes.values())) > 1:
        raise ArgumentError(
            f"{', '.join(f'{name} has {n}' for name, n in sizes.items())} positions; give those of "
            "one slice"
        )


def _causal_mask(n_queries: int, n_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what is added to the scores: -inf for keys behind a query, else 0.

    torch's ``is_causal`` aligns the first query with the first key, this mask the last ones.
    """
    scores = torch.full((n_queries, n_keys), -torch.inf, dtype=dtype, device=device)
    return scores.triu_(n_keys - n_queries + 1)


def _same_call(calls: Sequence[_T], number: int) -> _T:
    """Return the call of an earlier slice with the number of this one.

    Raises
    ------
    ExecutionError
        If the earlier slice has called the cache less often.
    """
    if number >= len(calls):
        raise ExecutionError(
            f"a module has called a KeyValueCache {number + 1} times for a slice, but "
            f"{len(calls)} times for an earlier one of its sequence; call it equally often for "
            "each, or have one cache for each attention"
        )
    return calls[number]


def _kept(call: SliceCall, key: Tensor, value: Tensor) -> KeysValues:
    """Return what a slice keeps of its keys and values."""
    if not call.keeps:
        return KeysValues()
    leaves = tuple(x.detach().clone() if call.owns_copies else x.detach() for x in (key, value))
    trains = torch.is_grad_enabled() or call.owns_copies
    for leaf in leaves:
        leaf.requires_grad_(trains and leaf.is_floating_point())
    return KeysValues(leaves, (key, value) if torch.is_grad_enabled() else ())
