"""`MicrobatchState`: what a stage with experts keeps of a micro-batch between its segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeexec.devices.device import Values
from pipeexec.experts.layer import Routed
from pipeexec.experts.token_exchange import RowNumbers
from pipeexec.stages.activation_bytes import CountedTensor
from pipeexec.stages.deferred_weight_grads import DeferredGradients
from pipeexec.stages.module_call import Seed


@dataclass
class Segment:
    """Activations of a segment: inputs as leaves, outputs as graph edges."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[GradientEdge | None, ...]
    counted: tuple[CountedTensor, ...]


@dataclass
class MicrobatchState:
    """What a stage keeps of a micro-batch between its segments.

    Attributes
    ----------
    segments
        Segments that have run forward, without those that have run backward.
    numbers
        Numbers of rows of the dispatch of each layer, without those whose experts have run
        backward.
    counts
        Number of rows from each member for each expert, in the latest dispatch.
    routed
        The latest layer's tokens, without rows; its tensors are leaves of the next segment but one.
    kept_gradients
        Gradients of the tensors kept by the segment before the experts; set by the one after them.
    deferred
        Weight gradients that I leaves for W.
    random_state
        State of the random numbers of the next segment.
    drew
        Whether a segment drew any.
    """

    deferred: DeferredGradients | None
    random_state: Seed
    segments: list[Segment] = field(default_factory=list)
    numbers: list[RowNumbers] = field(default_factory=list)
    counts: Tensor | None = None
    routed: Routed | None = None
    kept_gradients: Values = ()
    drew: bool = False


def kept_tensors(routed: Routed | None) -> tuple[Tensor, ...]:
    """Return the tensors that the segment after the experts needs from the one before them."""
    if routed is None:
        return ()
    return (routed.weights,) if routed.kept is None else (routed.weights, routed.kept)


def with_kept(routed: Routed, kept: Sequence[Tensor]) -> Routed:
    """Return routed tokens with other tensors in place of `kept_tensors`."""
    weights, *others = kept
    return routed._replace(weights=weights, kept=others[0] if others else None)
