"""`RateSeconds`: seconds of a transformer's stages as FLOPs over one rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipesim.models.experts.expert_exchange import expert_fields
from pipesim.models.experts.model_sizes import expert_matrix
from pipesim.models.stage_layers import mean_layer, per_stage

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


@dataclass(frozen=True)
class RateSeconds:
    """Seconds as FLOPs over one rate, ``flops_per_second`` of each GPU; see `Shard.stages`."""

    shard: Shard
    flops_per_second: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of F and B of a layer, of the embedding (0), and of the head."""
        model, b = self.shard.model, self.shard.microbatch_size
        layer = mean_layer(model, self._both(experts=False), self._both(experts=True))
        return layer / self._rate, 0.0, 3 * model.head_flops(b) / self._rate

    @property
    def layers(self) -> list[float]:
        """Seconds of F and B of each layer."""
        model = self.shard.model
        dense = [self._both(experts=False) / self._rate] * (model.n_layers - model.n_expert_layers)
        return dense + [self._both(experts=True) / self._rate] * model.n_expert_layers

    def stages(self, sizes: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return the fields of `Costs` in seconds; see `StageSeconds`."""
        model, b, rate = self.shard.model, self.shard.microbatch_size, self._rate
        head = model.head_flops(b) / rate

        def stage_values(cores: int, linears: int, last: float, again: bool) -> tuple[float, ...]:
            """Return seconds of so many passes of cores and of linear maps, and of the head."""
            dense, expert = (
                (linears * linear + cores * core + again * recomputed) / rate
                for linear, core, recomputed in map(self._flops, (False, True))
            )
            return per_stage(model, sizes, dense, last=last, experts=expert)

        forward = stage_values(1, 1, head, again=False)
        return {
            "forward": forward,
            "backward": stage_values(2, 2, 2 * model.head_flops(b) / rate, again=True),
            "input_grad": stage_values(2, 1, head, again=True),
            "weight_grad": stage_values(0, 1, head, again=False),
            "recompute": forward,
            **expert_fields(self.shard, sizes, None),
        }

    def _both(self, *, experts: bool) -> float:
        """Return the FLOPs of F and B of a layer, which its busiest GPU computes."""
        linear, core, recomputed = self._flops(experts)
        return 3 * (linear + core) + recomputed

    def _flops(self, experts: bool) -> tuple[float, float, float]:
        """Return FLOPs of linear maps, of the core, and of the recompute of a layer.

        They are those of all GPUs of a device as if each were its busiest.
        """
        shard, model, b = self.shard, self.shard.model, self.shard.microbatch_size
        core: float = model.core_flops(b)
        if shard.causal_share != 1:
            core *= shard.causal_share
        if shard.attended != 1:
            core *= shard.attended
        if not experts:
            linear: float = model.linear_flops(b)
        else:
            linear = model.expert_layer_flops(b) - model.core_flops(b) if model.n_experts else 0
            routed = 2 * b * model.sequence_length * model.experts_per_token * expert_matrix(model)
            if shard.imbalance != 1:
                linear += routed * (shard.imbalance - 1)
        recomputed = {"none": 0, "selective": core, "full": core + linear}[shard.recompute]
        return linear, core, recomputed

    @property
    def without_launches(self) -> RateSeconds:
        """The same: a rate has no launches."""
        return self

    @property
    def _rate(self) -> float:
        """FLOP/s of all GPUs of the group."""
        return self.shard.n_gpus * self.flops_per_second
