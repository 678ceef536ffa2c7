"""Predict steps of `pipeexec.GPipe` modules, run them, and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeexec.gpipe.gpipe import GPipe
from pipeexec.stages.batches import Batch
from pipeexec.stages.loss_function import Loss, combined_loss
from pipeexec.stages.restore import restore_afterwards, temporary_attribute
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError
from pipesim.network.network import Network
from pipesim.timeline.task_bytes import static
from pipesim.timeline.timeline import Timeline

__all__ = [
    "GPipeCalibration",
    "GPipeStep",
    "GPipeSteps",
    "check_backward",
    "check_models",
]

#: Costs of a step that are durations; others are the same in every step.
_SECONDS = ("forward", "backward", "recompute")


def check_models(models: Mapping[str, object]) -> dict[str, GPipe]:
    """Return modules by name, which are cut alike, so that one set of costs is of all of them.

    Raises
    ------
    ArgumentError
        For no modules, and for such that differ in balance or micro-batches.
    """
    if not models:
        raise ArgumentError("validate needs at least one GPipe")
    found: dict[str, GPipe] = {}
    for name, model in models.items():
        if not isinstance(model, GPipe):
            raise ArgumentError(
                f"stages: {name!r} is no GPipe, got {type(model).__name__}; give a GPipe or GPipes "
                "by name"
            )
        found[name] = model
        first = next(iter(found.values()))
        if (model.balance, model.chunks) != (first.balance, first.chunks):
            raise ArgumentError(
                f"{name!r} has balance {model.balance} and {model.chunks} chunks, the first "
                f"{first.balance} and {first.chunks}: costs hold for one cut and one size of "
                "micro-batch; validate modules of as many"
            )
    return found


def check_backward(models: Mapping[str, GPipe], inputs: Batch) -> None:
    """Raise `ArgumentError` if a partition needs no gradient: then not all tasks of a graph run."""
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    if any(x.requires_grad for x in given):
        return
    for name, model in models.items():
        if not any(p.requires_grad for p in model.partitions[0].parameters()):
            raise ArgumentError(
                f"{name!r}: partition 0 has no parameter that needs a gradient, and so no "
                "backward, which its graph has; give inputs that need one (requires_grad_()), or "
                "a balance whose first partition has such parameters"
            )


class GPipeStep(NamedTuple):
    """A measured step; ``host_seconds`` are not told apart from those of the devices."""

    loss: Tensor
    timeline: Timeline
    host_seconds: float = 0.0
    host_times: None = None


class GPipeSteps:
    """Runs training steps of a module, one at a time.

    Parameters
    ----------
    model
        In training mode. On CPUs its partitions compute in threads of their own, however short.
    loss_fn, optimizer
        As for `pipeexec.Pipeline`; the optimizer steps after the time is taken.
    """

    def __init__(
        self,
        model: GPipe,
        loss_fn: Loss,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.optimizer = None if optimizer is None else optimizer(model.parameters())

    def step(self, inputs: Batch, targets: Any) -> GPipeStep:
        """Run forward, loss and backward, and let the optimizer step; gradients end as None."""
        targets = self._moved(targets)  # first: a copy to a GPU waits for what its stream has
        with temporary_attribute(self.model, "threads", True):
            loss = combined_loss(self.loss_fn(self.model(inputs), targets))
            loss.backward()
        timeline = self.model.timeline()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return GPipeStep(loss.detach(), timeline)

    def step_costs(self, inputs: Batch, targets: Any) -> Costs:
        """Return what a step that leaves no trace cost."""
        with restore_afterwards([self.model], [self.optimizer]):
            timeline = self.step(inputs, targets).timeline
        return Costs.from_timeline(timeline, skip_bytes=self.model.skip_bytes())

    def with_bytes(self, costs: Costs, inputs: Batch, targets: Any) -> Costs:
        """Return costs with the bytes of parameters and optimizer, and of activations."""
        model = self.model
        with temporary_attribute(model, "checkpoint", "never"):
            held = self.activation_bytes(inputs, targets)
        first = inputs[0] if isinstance(inputs, tuple) else inputs
        m = len(first.chunk(model.chunks))
        state = self.optimizer.state if self.optimizer is not None else {}
        return replace(
            costs,
            activation_bytes=tuple(each / m for each in held),
            parameter_bytes=tuple(
                float(sum(p.nbytes for p in part.parameters())) for part in model.partitions
            ),
            optimizer_bytes=tuple(
                float(sum(_nbytes(state.get(p, {})) for p in part.parameters()))
                for part in model.partitions
            ),
        )

    def measure(self, inputs: Batch, targets: Any) -> GPipeStep:
        """Run a step; every step is measured."""
        return self.step(inputs, targets)

    def held_bytes(
        self, costs: Costs, inputs: Batch, targets: Any, timeline: Timeline
    ) -> NDArray[np.float64]:
        """Return the peak bytes of each device; activations are counted in a step."""
        activations = np.array(self.activation_bytes(inputs, targets))
        return np.asarray(static(timeline.graph, costs) + activations)

    def activation_bytes(self, inputs: Batch, targets: Any) -> list[int]:
        """Return the most bytes of activations that each partition holds, counted in a step."""
        with restore_afterwards([self.model], [self.optimizer]), self.model.metered() as meters:
            self.step(inputs, targets)
            return [meter.peak for meter in meters]

    def _moved(self, targets: Any) -> Any:
        """Return targets where the outputs are."""
        return targets.to(self.model.devices[-1]) if isinstance(targets, Tensor) else targets


class GPipeCalibration:
    """Calibration steps of a module."""

    def __init__(self, steps: GPipeSteps) -> None:
        self._steps = steps
        self._costs: list[Costs] = []

    def warm_up(self) -> None:
        """Run nothing: the steps that are measured warm the module up."""

    def calibrate(self, inputs: Batch, targets: Any) -> None:
        """Measure the costs of a step that leaves no trace."""
        self._costs.append(self._steps.step_costs(inputs, targets))

    def result(self, inputs: Batch, targets: Any) -> tuple[Costs, None]:
        """Return the mean costs, with bytes counted on a batch; there is no profile."""
        return self._steps.with_bytes(_mean_costs(self._costs), inputs, targets), None


def _nbytes(state: Mapping[str, Any]) -> int:
    return sum(x.nbytes for x in state.values() if isinstance(x, Tensor))


def _mean_costs(costs: Sequence[Costs]) -> Costs:
    """Return costs whose durations, latency and bandwidth are means over steps."""
    first = costs[0]
    changed: dict[str, Any] = {}
    for name in _SECONDS:
        values = [getattr(each, name) for each in costs]
        if values[0] is not None:
            changed[name] = tuple(np.mean(values, axis=0).tolist())
    per_byte = float(np.mean([1 / each.network.bandwidth for each in costs]))
    network = Network(
        latency=float(np.mean([each.network.latency for each in costs])),
        bandwidth=1 / per_byte if per_byte else float("inf"),
    )
    return replace(first, **changed, network=network)
