"""`StageKey`: the layers of a stage, without and with experts, and sums over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pipesim.models.transformer import Transformer


class StageKey(NamedTuple):
    """Layers of a stage on which its values depend.

    Attributes
    ----------
    n_dense, n_experts
        Number of layers without and with experts.
    is_first, is_last
        Whether it has the embedding, and the LM head.
    """

    n_dense: int
    n_experts: int
    is_first: bool
    is_last: bool

    def total(
        self, layer: float, first: float = 0.0, last: float = 0.0, experts: float = 0.0
    ) -> float:
        """Return the sum over layers and ends, of which each has the given value."""
        dense = self.n_dense * layer + first * self.is_first + last * self.is_last
        return dense + self.n_experts * experts if self.n_experts else dense


def stage_keys(model: Transformer, sizes: Sequence[int]) -> list[StageKey]:
    """Return the layers of each stage, given their number; the model's first ones are dense."""
    end, keys, dense = len(sizes) - 1, [], model.n_layers - model.n_expert_layers
    for stage, n in enumerate(sizes):
        n_dense = min(n, dense)
        dense -= n_dense
        keys.append(StageKey(n_dense, n - n_dense, stage == 0, stage == end))
    return keys


def per_stage(
    model: Transformer,
    sizes: Sequence[int],
    layer: float,
    first: float = 0.0,
    last: float = 0.0,
    *,
    experts: float = 0.0,
) -> tuple[float, ...]:
    """Return the value of each stage: the sum over its layers, plus ``first`` or ``last``.

    ``layer`` is the value of a dense layer, and ``experts`` that of a layer with experts.
    """
    return tuple(key.total(layer, first, last, experts) for key in stage_keys(model, sizes))


def mean_layer(model: Transformer, layer: float, experts: float) -> float:
    """Return the mean of a value over the layers of a model."""
    if not model.n_expert_layers:
        return layer
    n_dense = model.n_layers - model.n_expert_layers
    return (n_dense * layer + model.n_expert_layers * experts) / model.n_layers
