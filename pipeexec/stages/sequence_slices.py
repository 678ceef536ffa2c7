"""Run a sequence in slices: cut a batch along it, and keep keys and values in the stages.

A pipeline may run a sequence in slices (``schedule.n_slices``), one task each. The queries of a
slice attend to the keys of its own positions and of all slices before it. So a stage keeps the keys
and values of each slice until its last reader has run:

1. F of slice 1 reads those of slice 0, as leaves of its graph, and keeps its own.
2. B of slice 1 leaves gradients on the leaves of slice 0.
3. B of slice 0 starts from its output and from its keys and values, with these gradients.

`StageSlices` does the bookkeeping. Modules use a `KeyValueCache`, which keeps nothing outside of a
pipeline with slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from pipeexec.devices.device import Values
from pipeexec.nesting import Leaf, leaves
from pipeexec.stages.activations import ActivationMeter, CountedTensor, counted_tensors
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_count,
    check_flag,
    check_list,
)
from pipesim.graph import TaskGraph
from pipesim.utils.checks import checked_names


class SequenceCut(NamedTuple):
    """Number of slices of a sequence, the dimension of its positions, and positions of each slice.

    Without ``sizes``, numbers of positions differ by one at most.
    """

    n_slices: int = 1
    dim: int = 1
    sizes: tuple[int, ...] = ()

    @classmethod
    def of_graph(cls, graph: TaskGraph, dim: int, sizes: tuple[int, ...]) -> SequenceCut:
        """Return the cut of a graph's sequences, if any; ``sizes`` must suit its slices.

        Of sequences with decode steps, it is that of the prompts.
        """
        n_slices = graph.prompt_slices or graph.n_slices
        if sizes and n_slices not in (1, len(sizes)):
            option = "prompt_slices" if graph.prompt_slices else "n_slices"
            raise ArgumentError(
                f"slice_sizes has {len(sizes)} slices, but graph {graph.name!r} has "
                f"{option}={n_slices}; give the positions of each slice, or leave it out"
            )
        return cls(n_slices, dim, sizes if n_slices > 1 else ())

    def positions(self, size: int) -> list[int]:
        """Return the number of positions of each slice of a sequence of ``size`` positions."""
        if self.sizes:
            return list(self.sizes)
        least, n_larger = divmod(size, self.n_slices)
        return [least + (k < n_larger) for k in range(self.n_slices)]


NO_SLICES = SequenceCut()


def check_slice_dim(slice_dim: object) -> int:
    """Return the dimension of the positions."""
    if not isinstance(slice_dim, int) or isinstance(slice_dim, bool) or slice_dim < 0:
        raise ArgumentTypeError(
            f"slice_dim must be the dimension of the sequence's positions, at least 0, got "
            f"{slice_dim!r:.80}; 1 for tensors of (batch, positions, ...)"
        )
    return slice_dim


def check_slice_sizes(sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the positions of each slice; empty for equal slices."""
    if sizes is None:
        return ()
    listed = check_list("slice_sizes", sizes, "the positions of each slice, or None")
    return tuple(check_count(f"slice_sizes[{k}]", size) for k, size in enumerate(listed))


def n_positions(
    inputs: Any, targets: Any, dims: Sequence[Sequence[int | None]], cut: SequenceCut
) -> int:
    """Return the number of positions of the sequences of a batch.

    ``dims`` is the dimension of the samples in each tensor of inputs and targets; None for shared
    ones. Either of them may be None.
    """
    first: tuple[str, int] | None = None
    for name, batch, row in zip(("inputs", "targets"), (inputs, targets), dims, strict=True):
        tensors = [x for x in leaves(batch, name) if isinstance(x.value, Tensor)]
        for (path, tensor), dim in zip(tensors if batch is not None else (), row, strict=True):
            if dim is None:
                continue
            size = _size(path, tensor, dim, cut)
            if first is None:
                first = path, size
            elif size != first[1]:
                raise ArgumentError(
                    f"{path} have {size} positions in dimension {cut.dim}, and {first[0]} "
                    f"{first[1]}: slices of one sequence need as many of each; give tensors of "
                    "equal length, or name the dimension of the positions in slice_dim"
                )
    size = 0 if first is None else first[1]
    if size < cut.n_slices:
        raise ArgumentError(
            f"sequences of {size} positions cannot be cut into {cut.n_slices} slices; give longer "
            "sequences, or a schedule of fewer slices"
        )
    if cut.sizes and size != sum(cut.sizes):
        raise ArgumentError(
            f"sequences have {size} positions, but slice_sizes sum to {sum(cut.sizes)}; give "
            "sequences of that length, or other slice_sizes"
        )
    return size


def _size(path: str, tensor: Tensor, dim: int, cut: SequenceCut) -> int:
    """Return the number of positions of a tensor with samples."""
    if tensor.dim() <= cut.dim or dim % tensor.dim() == cut.dim:
        raise ArgumentError(
            f"{path} have shape {tuple(tensor.shape)}, samples in dimension {dim}, and no "
            f"positions in dimension {cut.dim}, along which slices are cut; give "
            "tensors of (batch, positions, ...), name the dimension of the positions in slice_dim "
            "of Pipeline, or run a schedule without slices"
        )
    return tensor.shape[cut.dim]


def cut_parts(
    parts: Sequence[Values], dims: Sequence[int | None], size: int, cut: SequenceCut
) -> list[Values]:
    """Return the slices of micro-batches of ``size`` positions, those of the first sequence first.

    - A tensor with samples is cut along the dimension of its positions.
    - A tensor that all micro-batches share, such as positions of shape (1, n), is cut if it has as
      many entries there as the sequence has positions. Otherwise every slice gets it whole.
    """

    def pieces(x: Tensor | None, dim: int | None) -> Sequence[Tensor | None]:
        is_whole = x is None or x.dim() <= cut.dim or (dim is None and x.shape[cut.dim] != size)
        if x is None or is_whole:
            return [x] * cut.n_slices
        return x.split_with_sizes(cut.positions(size), cut.dim)

    slices: list[Values] = []
    for part in parts:
        columns = [pieces(x, dim) for x, dim in zip(part, dims, strict=True)]
        slices += list(zip(*columns, strict=True)) if columns else [()] * cut.n_slices
    return slices


def positions_of(row: Sequence[Leaf], dim: int) -> int:
    """Return the positions of the first tensor of an output that has the dimension; else 0."""
    sizes = (x.value.shape[dim] for x in row if isinstance(x.value, Tensor) and x.value.dim() > dim)
    return next(sizes, 0)


_T = TypeVar("_T")

#: Masks by number of queries, number of keys, type and device.
Masks = dict[tuple[int, int, torch.dtype, torch.device], Tensor]

#: Options of torch's attention that `KeyValueCache.attend` passes on.
_OPTIONS = ("dropout_p", "scale", "enable_gqa")


@dataclass
class KeysValues:
    """Keys and values of one slice in one call of a cache.

    Later slices read the leaves, on which their gradients add up. The outputs are the same tensors
    in the graph of the slice; empty if that graph is not kept.
    """

    leaves: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()


@dataclass
class SliceCall:
    """One forward of a slice, for one cache."""

    earlier: list[SliceCall] = field(default_factory=list)  # of the sequence, first slice first
    keeps: bool = False  # whether later slices read the keys and values of this one
    #: Whether to copy what is kept: the graph of the forward is dropped, and with it the larger
    #: tensors of which keys and values may be views.
    owns_copies: bool = False
    calls: list[KeysValues] = field(default_factory=list)  # of each `KeyValueCache.append`
    counts: list[int] = field(default_factory=list)  # positions of each `KeyValueCache.offset`
    masks: Masks = field(default_factory=dict)  # which all caches share in one forward


@checked_names
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
            # torch's ``is_causal`` aligns the first query with the first key, this the last ones.
            scores = torch.full((own, n_keys), -torch.inf, dtype=query.dtype, device=query.device)
            mask = self._call.masks[form] = scores.triu_(n_keys - own + 1)
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


def _same_call(calls: Sequence[_T], number: int) -> _T:
    """Return the call of an earlier slice with the number of this one."""
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


# Refuse modules that compute something else in slices than with the whole sequence.
#
# Modules are refused before the first step where their type shows it. The first forward of a
# second slice also watches torch's attention. No check can find attention that is written out by
# hand.

_CACHE = "call pipeexec.KeyValueCache.attend in its place"
_OWN_SLICE = "attends to the positions of its own slice alone", _CACHE
#: What a module does in slices, and what to do; the first type that matches counts.
_REFUSED: tuple[tuple[type[nn.Module], tuple[str, str]], ...] = (
    (nn.MultiheadAttention, _OWN_SLICE),
    (nn.TransformerEncoderLayer, _OWN_SLICE),
    (nn.TransformerDecoderLayer, _OWN_SLICE),
    (
        nn.RNNBase,
        (
            "begins every slice with a new state",
            "carry no state along the sequence, or run a schedule without slices",
        ),
    ),
)
_TWO_WAYS = (
    "has causal=False: its positions attend to later ones, whose keys do not exist when the first "
    "slice runs",
    "run a schedule without slices, such as 1f1b, or use causal attention",
)


def check_sliceable(modules: Sequence[nn.Module], n_stages: int, n_slices: int) -> None:
    """Check that the modules of stages, replica after replica, can run sequences in slices."""
    for slot, module in enumerate(modules[:n_stages]):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ArgumentError(
                f"stage {slot} is DistributedDataParallel, which counts one backward from the "
                "output of each micro-batch, but a slice's begins at keys and values too; lower "
                "with n_replicas, which reduces gradients itself"
            )
        for name, part in module.named_modules():
            reason = next((why for kind, why in _REFUSED if isinstance(part, kind)), None)
            if isinstance(part, KeyValueCache):
                reason = None if part.causal else _TWO_WAYS
            if reason is not None:
                raise ArgumentError(
                    f"{name or 'the module'} of stage {slot} ({type(part).__name__}) cannot run "
                    f"sequences in {n_slices} slices: it {reason[0]}; {reason[1]}"
                )


class AttentionWatch(TorchFunctionMode):
    """Raises for calls of torch's attention that see the positions of one slice alone."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, if it is no attention that a slice must not call.

        That is attention with as many keys as queries, or whose mask aligns the slice with the
        first keys of the sequence.
        """
        options = kwargs or {}
        if func is F.scaled_dot_product_attention:
            tensors = [*args, *(options[x] for x in ("query", "key") if x in options)]
            self._check(tensors, bool(options.get("is_causal") or (len(args) > 5 and args[5])))
        return func(*args, **options)

    def _check(self, tensors: Sequence[Any], is_causal: bool) -> None:
        if len(tensors) < 2 or not all(isinstance(x, Tensor) and x.dim() > 1 for x in tensors[:2]):
            return  # torch refuses it
        if tensors[0].is_meta:
            return  # a module of another stage, whose shapes a stage of pipeexec.split computes
        n_queries, n_keys = (x.shape[-2] for x in tensors[:2])
        if n_keys == n_queries:
            raise ExecutionError(
                f"stage {self.stage} calls scaled_dot_product_attention with the {n_keys} "
                f"positions of one slice, so that it does not attend to the slices before; {_CACHE}"
            )
        if is_causal:
            raise ExecutionError(
                f"stage {self.stage} calls scaled_dot_product_attention(is_causal=True) with "
                f"{n_queries} queries and {n_keys} keys: torch then aligns the first query with "
                f"the first key, not the last ones; {_CACHE}"
            )


#: Forward that a slice runs: one whose graph is kept; one that is recomputed later, and its
#: recompute; one without a backward.
Mode = Literal["train", "drop", "recompute", "evaluate"]


@dataclass
class _Slice:
    """Calls of one slice, one a cache; and where its backward starts besides its output."""

    calls: list[SliceCall]
    edges: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    counted: tuple[CountedTensor, ...] = ()


class StageSlices:
    """Keys and values of the slices in flight in one stage, whose module has the caches."""

    def __init__(self, module: nn.Module, index: int, n_slices: int) -> None:
        self.caches = [x for x in module.modules() if isinstance(x, KeyValueCache)]
        self.n_slices = n_slices
        self._watch: AttentionWatch | None = AttentionWatch(index)
        self._slices: dict[int, _Slice] = {}

    @contextmanager
    def forward(
        self, microbatch: int, mode: Mode, meter: ActivationMeter | None = None
    ) -> Iterator[None]:
        """Let the caches serve a slice in a block, in which the module runs its forward."""
        number = microbatch % self.n_slices
        is_last = number == self.n_slices - 1
        earlier = [self._slices[k].calls for k in range(microbatch - number, microbatch)]
        masks: Masks = {}
        own = _Slice([
            SliceCall([calls[k] for calls in earlier], not is_last, mode == "drop", masks=masks)
            for k in range(len(self.caches))
        ])  # fmt: skip
        for cache, call in zip(self.caches, own.calls, strict=True):
            cache._call = call
        try:
            with self._watched(number):
                yield
        finally:
            for cache, call in zip(self.caches, own.calls, strict=True):
                cache._call, call.earlier = None, []
            masks.clear()
        if mode == "recompute":
            own = self._with_leaves(self._slices[microbatch], own)
        self._slices[microbatch] = own
        if mode in ("train", "recompute"):
            own.edges = list(_edges(own.calls))
        if mode != "recompute":
            kept = (x for call in own.calls for x in call.calls)
            own.counted = counted_tensors(meter, (leaf for x in kept for leaf in x.leaves))
        if mode == "evaluate" and is_last:
            self.forget_sequence(microbatch)

    @contextmanager
    def _watched(self, number: int) -> Iterator[None]:
        """Watch the attention of the first forward of a slice that has one before it."""
        if self._watch is None or number == 0:
            yield
            return
        with self._watch:
            yield
        self._watch = None

    def gradients(self, microbatch: int) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the edges of keys and values of a slice, and the gradients that others left.

        Its backward starts from them too. The slice is forgotten.
        """
        own = self._slices.pop(microbatch)
        pairs = [(edge, leaf.grad) for edge, leaf in own.edges if leaf.grad is not None]
        return [edge for edge, _ in pairs], [x for _, x in pairs if x is not None]

    def forget(self, microbatch: int) -> None:
        """Drop a slice, if it is held."""
        self._slices.pop(microbatch, None)

    def forget_sequence(self, microbatch: int) -> None:
        """Drop all slices of the sequence of a slice."""
        first = microbatch - microbatch % self.n_slices
        for number in range(first, first + self.n_slices):
            self.forget(number)

    def clear(self) -> None:
        """Drop all slices."""
        self._slices.clear()

    @staticmethod
    def _with_leaves(before: _Slice, again: _Slice) -> _Slice:
        """Return a recomputed slice with the leaves of its F, which later slices have read."""
        for old, new in zip(before.calls, again.calls, strict=True):
            for first, fresh in zip(old.calls, new.calls, strict=True):
                fresh.leaves = first.leaves
        again.counted = before.counted
        return again


def _edges(calls: list[SliceCall]) -> Iterator[tuple[GradientEdge, Tensor]]:
    """Yield the edge of each key and value in the slice's graph, with the leaf of others' graphs.

    The tensors themselves are dropped, so that only the graph holds them.
    """
    for call in calls:
        for kept in call.calls:
            for output, leaf in zip(kept.outputs, kept.leaves, strict=True):
                if output.requires_grad:
                    yield get_gradient_edge(output), leaf
            kept.outputs = ()
