"""`StagesReport`: sizes and measured seconds of stages, and predicted makespans of schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeexec.nesting import tensors_in
from pipeexec.splitting.balance.call_weights import Seconds, detached, measured_seconds
from pipeexec.splitting.model_state import unchanged
from pipeexec.splitting.split_stage import SplitStage
from pipeexec.splitting.tracing.code_lines import line_of_error
from pipeexec.stages.activation_bytes import ActivationMeter
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, ExecutionError, check_list
from pipesim.lowering.lower import lower
from pipesim.scheduling.registry import schedule
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import simulate
from pipesim.utils.text_tables import align_columns
from pipesim.utils.units import format_bytes, format_time, significant

if TYPE_CHECKING:
    import pandas as pd


_FLOP_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class StageRow(NamedTuple):
    """Sizes and seconds of one stage, for the sample as a micro-batch.

    Attributes
    ----------
    modules
        First and last module.
    layers
        Calls of blocks.
    parameters
        Number of parameters; copies of tied ones count in each stage.
    flops
        FLOPs of a forward.
    forward, backward
        Measured seconds on one thread, medians of some runs.
    activation_bytes
        Bytes held from forward to backward, inputs included.
    message_bytes
        Bytes of the output to the next stage; 0 for the last one.
    parameter_bytes
        Bytes of parameters.
    """

    modules: str
    layers: int
    parameters: int
    flops: int
    forward: float
    backward: float
    activation_bytes: int
    message_bytes: int
    parameter_bytes: int


@dataclass(frozen=True, eq=False)
class StagesReport:
    """Sizes and seconds of the stages of a split.

    Seconds are measured on this machine, for the sample as a micro-batch, with one thread a stage.
    Printing a report gives a table with units.

    Attributes
    ----------
    title
        Model, and way of the split.
    rows
        One row a stage.
    costs
        Measured seconds and bytes, for `pipesim.simulate`. I and W take half of B each. Links are
        ideal; ``dataclasses.replace(costs, network=...)`` has others.
    makespans
        Predicted seconds of a step by schedule, with these costs.
    n_devices
        Devices of each schedule.
    n_microbatches
        Micro-batches of steps of named schedules.
    device
        Device of the measured stages.
    """

    title: str
    rows: tuple[StageRow, ...]
    costs: Costs
    makespans: Mapping[str, float]
    n_devices: Mapping[str, int]
    n_microbatches: int
    device: str

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a stage, with the fields of `StageRow` (s, bytes)."""
        from pipesim.utils.packages import pandas as pd

        index = pd.RangeIndex(len(self.rows), name="stage")
        return pd.DataFrame(list(self.rows), columns=StageRow._fields, index=index)

    def __str__(self) -> str:
        columns = self._columns()
        table = align_columns(columns, align="<" + ">" * (len(columns) - 2))
        return "\n".join([self.title, table, *self._notes()])

    def _repr_html_(self) -> str:
        from pipesim.plot.html_parts import note_html, table_html

        columns = self._columns()
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        notes = "".join(note_html(note) for note in self._notes())
        return note_html(self.title) + table_html(list(columns), rows) + notes

    def _columns(self) -> dict[str, list[str]]:
        """Return the columns of the table with units."""
        return {
            "stage": [str(k) for k in range(len(self.rows))],
            "modules": [row.modules for row in self.rows],
            "layers": [str(row.layers) for row in self.rows],
            "parameters": [f"{row.parameters:,}" for row in self.rows],
            "FLOPs": [_format_flops(row.flops) for row in self.rows],
            "forward": [format_time(row.forward) for row in self.rows],
            "backward": [format_time(row.backward) for row in self.rows],
            "activations": [format_bytes(row.activation_bytes) for row in self.rows],
            "message": [format_bytes(row.message_bytes) for row in self.rows],
        }

    def _notes(self) -> list[str]:
        """Return how seconds were measured, and the predicted steps."""
        notes = [
            f"Forward and backward: measured on {self.device} of this machine, one thread, for the "
            "sample as a micro-batch."
        ]
        if self.makespans:
            steps = ", ".join(
                f"{name} {format_time(x)} on {self.n_devices[name]} devices"
                for name, x in self.makespans.items()
            )
            notes.append(
                f"Predicted step of {self.n_microbatches} micro-batches, ideal links: {steps}."
            )
        return notes

    __repr__ = __str__


def stages_report(
    title: str,
    stages: Sequence[SplitStage],
    blocks: Sequence[str],
    values: Sequence[Tensor],
    schedules: Sequence[str | Schedule],
    n_microbatches: int,
) -> StagesReport:
    """Measure stages, and predict steps of them; see `pipeexec.Stages.report`.

    Parameters
    ----------
    title
        Model, and way of the split.
    stages
        The stages.
    blocks
        Names of modules that count as layers.
    values
        Tensors that the first stage takes.
    schedules, n_microbatches
        Schedules of the predicted steps.
    """
    orders = _orders(schedules, n_microbatches, len(stages))
    rows = _stage_rows(stages, frozenset(blocks), values)
    costs = _row_costs(rows)
    makespans = {name: simulate(lower(order), costs).makespan for name, order in orders.items()}
    n_devices = {name: order.n_devices for name, order in orders.items()}
    devices = dict.fromkeys(_device(stage).type for stage in stages)
    return StagesReport(
        title, tuple(rows), costs, makespans, n_devices, n_microbatches, ", ".join(devices)
    )


def _stage_rows(
    stages: Sequence[SplitStage], blocks: frozenset[str], values: Sequence[Tensor]
) -> list[StageRow]:
    """Return a row for each stage; ``values`` are what the first one takes."""
    rows = []
    with unchanged(*stages):
        for number, stage in enumerate(stages):
            device = _device(stage)
            inputs = tuple(x.to(device) for x in detached(tuple(values)))
            try:
                row, values = _stage_row(stage, inputs)
            except Exception as error:  # of the user's code
                text = f"{type(error).__name__}: {str(error).strip():.150}{line_of_error(error)}"
                raise ExecutionError(
                    f"stage {number} fails: {text}; give a batch that the model takes"
                ) from error
            is_last = number + 1 == len(stages)
            rows.append(
                row._replace(
                    layers=sum(name in blocks for name in stage.call_names),
                    message_bytes=0 if is_last else sum(x.nbytes for x in values),
                )
            )
    return rows


def _stage_row(
    stage: SplitStage, inputs: tuple[Tensor, ...]
) -> tuple[StageRow, tuple[Tensor, ...]]:
    """Return the row of a stage, without layers and message, and its output."""
    meter = ActivationMeter([*stage.parameters(), *stage.buffers()])
    for x in inputs:
        meter.acquire(x)
    with torch.enable_grad(), meter.saved_tensors():
        output = tensors_in(stage(*inputs))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        stage(*detached(inputs))
    seconds: Seconds = measured_seconds(stage, inputs, {})
    names, parameters = stage.call_names, list(stage.parameters())
    row = StageRow(
        modules=names[0] if len(set(names)) == 1 else f"{names[0]} to {names[-1]}",
        layers=0,
        parameters=sum(p.numel() for p in parameters),
        flops=int(counter.get_total_flops()),
        forward=seconds.forward,
        backward=seconds.backward,
        activation_bytes=meter.peak,
        message_bytes=0,
        parameter_bytes=sum(p.nbytes for p in parameters),
    )
    return row, output


def _row_costs(rows: Sequence[StageRow]) -> Costs:
    """Return the costs of stages; I and W take half of B each."""
    half = tuple(row.backward / 2 for row in rows)
    return Costs(
        forward=tuple(row.forward for row in rows),
        backward=tuple(row.backward for row in rows),
        input_grad=half,
        weight_grad=half,
        output_bytes=tuple(float(row.message_bytes) for row in rows),
        activation_bytes=tuple(float(row.activation_bytes) for row in rows),
        parameter_bytes=tuple(float(row.parameter_bytes) for row in rows),
    )


def _orders(
    schedules: Sequence[str | Schedule], n_microbatches: int, n_stages: int
) -> dict[str, Schedule]:
    """Return schedules by their names."""
    orders = {}
    for x in check_list("schedules", schedules, "names of schedules, or schedules"):
        order = x if isinstance(x, Schedule) else _named(x, n_stages, n_microbatches)
        if order.n_stages != n_stages:
            raise ArgumentError(
                f"schedule {order.name!r} has {order.n_stages} stages, and the split {n_stages}; "
                "give a schedule of as many stages, or split into as many"
            )
        orders[order.name] = order
    return orders


def _named(name: str, n_stages: int, n_microbatches: int) -> Schedule:
    """Return a named schedule of some stages, with as many a device as it has by default."""
    n_chunks = schedule(name, n_stages, n_stages).n_stages // n_stages
    return schedule(name, max(n_stages // n_chunks, 1), n_microbatches)


def _device(stage: SplitStage) -> torch.device:
    """Return the device of a stage's parameters."""
    return next((p.device for p in stage.parameters()), torch.device("cpu"))


def _format_flops(flops: float) -> str:
    """Return FLOPs in a fitting unit."""
    for size, unit in _FLOP_UNITS:
        if flops >= size:
            return f"{significant(flops / size)} {unit}"
    return f"{flops:.0f}"
