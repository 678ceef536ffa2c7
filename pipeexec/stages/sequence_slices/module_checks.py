"""Refuse modules that compute something else in slices than with the whole sequence.

Modules are refused before the first step where their type shows it. The first forward of a second
slice also watches torch's attention. No check can find attention that is written out by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeexec.stages.sequence_slices.key_value_cache import KeyValueCache
from pipesim.errors import ArgumentError, ExecutionError

_CACHE = "call pipeexec.KeyValueCache.attend in its place"
_STATE = (
    "begins every slice with a new state",
    "carry no state along the sequence, or run a schedule without slices",
)
_OWN_SLICE = "attends to the positions of its own slice alone", _CACHE
#: What a module does in slices, and what to do; the first type that matches counts.
_REFUSED: tuple[tuple[type[nn.Module], tuple[str, str]], ...] = (
    (nn.MultiheadAttention, _OWN_SLICE),
    (nn.TransformerEncoderLayer, _OWN_SLICE),
    (nn.TransformerDecoderLayer, _OWN_SLICE),
    (nn.RNNBase, _STATE),
)
_TWO_WAYS = (
    "has causal=False: its positions attend to later ones, whose keys do not exist when the first "
    "slice runs",
    "run a schedule without slices, such as 1f1b, or use causal attention",
)


def check_sliceable(modules: Sequence[nn.Module], n_stages: int, n_slices: int) -> None:
    """Check that modules can run sequences in slices.

    Parameters
    ----------
    modules
        Module of each stage, replica after replica.
    n_stages, n_slices
        Those of the graph.
    """
    for slot, module in enumerate(modules[:n_stages]):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ArgumentError(
                f"stage {slot} is DistributedDataParallel, which counts one backward from the "
                "output of each micro-batch, but a slice's begins at keys and values too; lower "
                "with n_replicas, which reduces gradients itself"
            )
        for name, part in module.named_modules():
            reason = _refusal(part)
            if reason is not None:
                raise ArgumentError(
                    f"{name or 'the module'} of stage {slot} ({type(part).__name__}) cannot run "
                    f"sequences in {n_slices} slices: it {reason[0]}; {reason[1]}"
                )


def _refusal(module: nn.Module) -> tuple[str, str] | None:
    """Return why a module is refused, and what to do; None if it is not."""
    if isinstance(module, KeyValueCache):
        return None if module.causal else _TWO_WAYS
    return next((reason for kind, reason in _REFUSED if isinstance(module, kind)), None)


class AttentionWatch(TorchFunctionMode):
    """Raises for calls of torch's attention that see the positions of one slice alone.

    Parameters
    ----------
    stage
        Number of the stage, for the message.
    """

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

        Raises
        ------
        ExecutionError
            For attention with as many keys as queries, or whose mask aligns the slice with the
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
