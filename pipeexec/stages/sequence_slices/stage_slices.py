"""`StageSlices`: the keys and values that a stage keeps for the slices of its sequences.

`pipeexec.stages.sequence_slices.key_value_cache` says what happens to them in F and B.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeexec.stages.activation_bytes import ActivationMeter, CountedTensor
from pipeexec.stages.sequence_slices.key_value_cache import KeyValueCache, Masks, SliceCall
from pipeexec.stages.sequence_slices.module_checks import AttentionWatch

#: Forward that a slice runs: one whose graph is kept; one that is recomputed later, and its
#: recompute; one without a backward.
Mode = Literal["train", "drop", "recompute", "evaluate"]


@dataclass
class _Slice:
    """Calls of one slice, one a cache; and where its backward starts besides its output."""

    calls: list[SliceCall]
    edges: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    counted: list[CountedTensor] = field(default_factory=list)


class StageSlices:
    """Keys and values of the slices in flight in one stage.

    Parameters
    ----------
    module, index
        Module of the stage, in which caches are found, and number of the stage.
    n_slices
        Slices of a sequence.
    """

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
        if meter is not None and mode != "recompute":
            own.counted = [CountedTensor(meter, x) for x in _leaves(own.calls)]
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


def _leaves(calls: list[SliceCall]) -> Iterator[Tensor]:
    for call in calls:
        yield from itertools.chain.from_iterable(x.leaves for x in call.calls)


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
