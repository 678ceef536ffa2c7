"""`Costs`: how long each operation takes and how many bytes it moves or holds, stage by stage."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import CostsError, check_name, number
from pipesim.files import write_whole
from pipesim.graph import TaskGraph
from pipesim.network import Network
from pipesim.ops import RECVS, SENDS, Op

__all__ = ["Costs", "TaskCosts"]

PerStage = float | tuple[float, ...]
_OPTIONAL = ("forward", "backward", "input_grad", "weight_grad", "recompute")


@dataclass(frozen=True)
class TaskCosts:
    """What an engine needs of each task; arrays of shape ``(len(graph),)``.

    Attributes
    ----------
    duration
        Seconds that the task holds its stream; for a SEND ``nbytes / bandwidth``. Unused for a
        RECV, whose times follow from its SEND (rule 4).
    latency
        Seconds, of transfers.
    link
        Number of the link that a SEND holds; tasks with ``duration`` 0 hold none. -1 elsewhere.
    launch
        Seconds that the host needs to issue the task (rule 7).
    nbytes
        Bytes of each message; 0 elsewhere.
    costs
        Where the values come from, or None.
    """

    duration: NDArray[np.float64]
    latency: NDArray[np.float64]
    link: NDArray[np.int64]
    launch: NDArray[np.float64]
    nbytes: NDArray[np.float64]
    costs: Costs | None = None


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of each operation: one number for all stages, or one a stage.

    Attributes
    ----------
    forward, backward
        Seconds of F and of B.
    input_grad, weight_grad
        Seconds of I and of W. ``backward`` defaults to their sum.
    recompute
        Seconds of R; defaults to ``forward``.
    optimizer_step, launch
        Seconds of STEP, and of the host to issue one task of the stage.
    output_bytes
        Bytes of a stage's output for one micro-batch: the message to the next stage, and its
        gradient on the way back.
    activation_bytes
        Bytes that a stage holds from F to B for one micro-batch, its input included.
    weight_grad_bytes
        Of those, the bytes that are still held between I and W.
    parameter_bytes, optimizer_bytes
        Bytes of a stage's parameters (its gradients are as many again) and optimizer state.
    network
        Links between devices.

    Raises
    ------
    CostsError
        For values that are negative, NaN, infinite, None or no numbers, naming field and stage.
    """

    forward: PerStage | None = None
    backward: PerStage | None = None
    input_grad: PerStage | None = None
    weight_grad: PerStage | None = None
    recompute: PerStage | None = None
    optimizer_step: PerStage = 0.0
    launch: PerStage = 0.0
    output_bytes: PerStage = 0.0
    activation_bytes: PerStage = 0.0
    weight_grad_bytes: PerStage = 0.0
    parameter_bytes: PerStage = 0.0
    optimizer_bytes: PerStage = 0.0
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        if not isinstance(self.network, Network):
            raise CostsError(f"network must be a pipesim.Network, got {self.network!r}")
        for name in VALUE_FIELDS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, _checked(name, value))
        if self.forward is None:
            raise CostsError("forward is missing; give the seconds of F, one or one a stage")

    def per_stage(self, name: str, n_stages: int) -> NDArray[np.float64]:
        """Return a field as one value a stage, shape ``(n_stages,)``.

        Raises
        ------
        CostsError
            If it was given for another number of stages, or not at all.
        """
        value = getattr(self, check_name("cost", name, VALUE_FIELDS))
        if value is None and name == "recompute":
            return self.per_stage("forward", n_stages)
        if value is None and name == "backward":
            if self.input_grad is None or self.weight_grad is None:
                raise CostsError(
                    "backward is missing, and so is input_grad or weight_grad; give the seconds "
                    "of B, or of both I and W"
                )
            return self.per_stage("input_grad", n_stages) + self.per_stage("weight_grad", n_stages)
        if value is None:
            raise CostsError(f"{name} is missing, but the graph has tasks that need it")
        if isinstance(value, float):
            return np.full(n_stages, value)
        if len(value) != n_stages:
            raise CostsError(
                f"{name} has {len(value)} values for {n_stages} stages; give one, or one a stage"
            )
        return np.array(value)

    def of(self, graph: TaskGraph) -> TaskCosts:
        """Return the costs of each task of ``graph``."""
        duration = np.zeros(len(graph))
        for op, name in _DURATION_OF.items():
            of_op = graph.op == op
            if of_op.any():
                duration[of_op] = self.per_stage(name, graph.n_stages)[graph.stage[of_op]]
        reduces = np.flatnonzero(graph.op == Op.REDUCE_GRAD)
        nbytes = message_bytes(graph, self.per_stage("output_bytes", graph.n_stages))
        gradients = self.per_stage("parameter_bytes", graph.n_stages)
        for task in reduces:
            members = int((graph.group == graph.group[task]).sum()) if graph.group[task] >= 0 else 1
            duration[task] = self.network.all_reduce(gradients[graph.stage[task]], members)
        sends = np.flatnonzero(graph.is_op(SENDS))
        recvs = graph.pair[sends]
        link = np.full(len(graph), -1, dtype=np.int64)
        latency = np.zeros(len(graph))
        link[sends], latency[sends], bandwidth = self.network.resolve(
            graph.device[sends], graph.device[recvs], graph.n_devices
        )
        link[recvs], latency[recvs] = link[sends], latency[sends]
        duration[sends] = nbytes[sends] / bandwidth
        launch = self.per_stage("launch", graph.n_stages)[graph.stage]
        return TaskCosts(duration, latency, link, launch, nbytes, self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or TOML; unset fields are left out."""
        values = {name: getattr(self, name) for name in VALUE_FIELDS}
        return {
            **{name: value for name, value in values.items() if value is not None},
            "network": self.network.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """Read what `to_dict` wrote.

        Raises
        ------
        CostsError
            Naming an unknown key and the nearest known one.
        """
        for key in values:
            check_name("cost", key, (*VALUE_FIELDS, "network"))
        network = Network.from_dict(values.get("network", {}))
        return cls(**{**values, "network": network})

    def save(self, path: Path | str) -> None:
        """Write the costs as JSON, whole or not at all."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        write_whole(Path(path), lambda file: file.write_text(text))

    @classmethod
    def load(cls, path: Path | str) -> Costs:
        """Read the JSON that `save` wrote.

        Raises
        ------
        CostsError
            Naming the file, if it is missing or holds something else.
        """
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise CostsError(f"cannot read costs from {path}: {error}") from error
        if not isinstance(values, dict):
            raise CostsError(f"{path} holds no costs, but {type(values).__name__}")
        return cls.from_dict(values)


#: Every field of `Costs` that is a number or one number a stage.
VALUE_FIELDS = tuple(f.name for f in fields(Costs) if f.name != "network")

#: Field that says how long an operation takes; messages and collectives ask the network.
_DURATION_OF = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input_grad",
    Op.W: "weight_grad",
    Op.R: "recompute",
    Op.STEP: "optimizer_step",
}


def message_bytes(graph: TaskGraph, output_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return bytes of each message: a stage's output, or the gradient of its input."""
    nbytes = np.zeros(len(graph))
    of_op = {op: graph.op == op for op in SENDS | RECVS}
    for op, offset in ((Op.SEND_F, 0), (Op.RECV_F, -1), (Op.SEND_B, -1), (Op.RECV_B, 0)):
        nbytes[of_op[op]] = output_bytes[graph.stage[of_op[op]] + offset]
    return nbytes


def _checked(name: str, value: object) -> PerStage:
    """Return a float, or a tuple of them."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, (tuple, list)):
        return _checked_number(name, value, "")
    if not value:
        raise CostsError(f"{name} is empty; give one value, or one a stage")
    return tuple(_checked_number(name, v, f" of stage {s}") for s, v in enumerate(value))


def _checked_number(name: str, value: object, where: str) -> float:
    got = number(value)
    if got is None or got < 0 or math.isinf(got):
        unit = "bytes" if name.endswith("bytes") else "seconds"
        raise CostsError(f"{name}{where} must be finite {unit} >= 0, got {value!r}")
    return got
