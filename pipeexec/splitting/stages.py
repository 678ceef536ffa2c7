"""`Stages`: a model as stages, what flows between them, and a report of their sizes and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipeexec.nesting import tensors_in
from pipeexec.splitting.cuts import Seconds, detached, measured_seconds
from pipeexec.splitting.model_state import unchanged
from pipeexec.splitting.operations import line_of_error
from pipeexec.splitting.split_facts import SplitFacts, TiedGroup
from pipeexec.splitting.split_stage import SplitStage
from pipeexec.stages.activations import ActivationMeter
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, ExecutionError, check_count, check_function, check_list
from pipesim.list_scheduling.order_by import order_by
from pipesim.lowering.lower import lower
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import schedule
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import simulate
from pipesim.utils.checks import checked_names
from pipesim.utils.texts import align_columns, format_bytes, format_time, significant

if TYPE_CHECKING:
    import pandas as pd


class StageRow(NamedTuple):
    """Sizes and seconds of one stage, for the sample as a micro-batch."""

    modules: str  # the first and the last
    layers: int  # calls of blocks
    parameters: int  # copies of tied ones count in each stage
    flops: int  # of a forward
    forward: float  # measured seconds on one thread, medians of some runs
    backward: float
    activation_bytes: int  # held from forward to backward, inputs included
    message_bytes: int  # to the next stage; 0 for the last one
    parameter_bytes: int


@dataclass(frozen=True, eq=False)
class StagesReport:
    """Sizes and seconds of the stages of a split.

    Seconds are measured on this machine, for the sample as a micro-batch, with one thread a stage.
    Printing a report gives a table with units.

    Attributes
    ----------
    costs
        Measured seconds and bytes, for `pipesim.simulate`. I and W take half of B each. Links are
        ideal; ``dataclasses.replace(costs, network=...)`` has others.
    makespans
        Predicted seconds of a step by schedule, with these costs.
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
        from pipesim.plot.html_tables import note_html, table_html

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
    facts: SplitFacts,
    blocks: Sequence[str],
    batch: Any,
    schedules: Sequence[str | Schedule] | None,
    n_microbatches: int,
) -> StagesReport:
    """Measure stages, and predict steps of them; see `pipeexec.Stages.report`.

    ``blocks`` count as layers.
    """
    placement = Placement(range(len(stages)), edges=facts.edges)
    if schedules is None and facts.edges:
        schedules = [order_by(placement, n_microbatches, name="order_by")]
    elif schedules is None:
        schedules = "gpipe", "1f1b"
    orders = _orders(schedules, n_microbatches, placement)
    rows = _stage_rows(stages, facts, frozenset(blocks), batch)
    costs = _row_costs(rows)
    makespans = {name: simulate(lower(order), costs).makespan for name, order in orders.items()}
    n_devices = {name: order.n_devices for name, order in orders.items()}
    devices = dict.fromkeys(_device(stage).type for stage in stages)
    return StagesReport(
        title, tuple(rows), costs, makespans, n_devices, n_microbatches, ", ".join(devices)
    )


def _stage_rows(
    stages: Sequence[SplitStage], facts: SplitFacts, blocks: frozenset[str], batch: Any
) -> list[StageRow]:
    """Return a row for each stage."""
    rows, outputs = [], list[tuple[Tensor, ...]]()
    with unchanged(*stages):
        for number, stage in enumerate(stages):
            device = _device(stage)
            values = facts.stage_inputs(number, batch, outputs)
            inputs = tuple(x.to(device) for x in detached(values))
            try:
                row, output = _stage_row(stage, inputs, blocks)
            except Exception as error:  # of the user's code
                text = f"{type(error).__name__}: {str(error).strip():.150}{line_of_error(error)}"
                raise ExecutionError(
                    f"stage {number} fails: {text}; give a batch that the model takes"
                ) from error
            rows.append(row)
            outputs.append(output)
    rows[-1] = rows[-1]._replace(message_bytes=0)
    return rows


def _stage_row(
    stage: SplitStage, inputs: tuple[Tensor, ...], blocks: frozenset[str]
) -> tuple[StageRow, tuple[Tensor, ...]]:
    """Return the row of a stage that sends its output, and this output."""
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
        layers=sum(name in blocks for name in names),
        parameters=sum(p.numel() for p in parameters),
        flops=int(counter.get_total_flops()),
        forward=seconds.forward,
        backward=seconds.backward,
        activation_bytes=meter.peak,
        message_bytes=sum(x.nbytes for x in output),
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
    schedules: Sequence[str | Schedule], n_microbatches: int, placement: Placement
) -> dict[str, Schedule]:
    """Return schedules of stages, placed each on a device of its own, by their names."""
    orders, n_stages, edges = {}, placement.n_stages, placement.edges
    for x in check_list("schedules", schedules, "names of schedules, or schedules"):
        order = x if isinstance(x, Schedule) else _named(x, n_stages, n_microbatches)
        if order.placement.edges != edges:
            raise ArgumentError(
                f"schedule {order.name!r} has the edges {list(order.placement.edges)}, and the "
                f"stages have {list(edges)}; give a schedule of their graph, such as "
                "pipesim.order_by(Placement(..., edges=stages.edges), n_microbatches)"
            )
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
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= size:
            return f"{significant(flops / size)} {unit}"
    return f"{flops:.0f}"


@checked_names
class Stages(Sequence[SplitStage | None]):
    """Stages of a model, in order; `pipeexec.split` makes them.

    They share their parameters with the model, and have the modules of its forward in order. Stages
    of other processes are None. Each takes the output of the stage before, or outputs of all stages
    with one of the `edges` to it. The first one takes `arguments` of a batch, the last one returns
    the model's output.

    Parameters
    ----------
    stages
        Module of each stage; None for stages of other processes.
    facts
        Facts about the split.
    sample
        The sample that the model was cut with.

    Attributes
    ----------
    model
        The model.
    modules
        Names of the modules of each stage, in the order of their calls.
    tied
        Parameters that several stages have, and train: a group each, of pairs of a stage and the
        parameter's name in the stage's module. The first one is the model's own, others are copies.
    blocks
        Names of the modules between which stages are cut, one for each call, in their order.
    way
        How these modules were found:

        - ``"nn.Sequential"``: those of the model, which is one;
        - ``"blocks of transformer.h"``: a list, each module of which takes an output of the one
          before; or several lists;
        - ``"base_model_pp_plan of the configuration"``: Hugging Face's plan for pipelines;
        - ``"calls of block"``: calls of one module, each of which takes an output of the last;
        - ``"modules that the forward calls"``: the largest ones;
        - ``"torch.export"``: functions with parameters, of a model that calls no two modules;
        - ``"torch.export, ..."``: one of these, for the graph that ``way="graph"`` cuts.
    ways_failed
        Ways that were tried before: pairs of a name, and why it was not taken.
    differences
        Largest difference of `check` for the sample, by mode: ``"training"`` and ``"evaluation"``.
        Empty without a check.
    not_checked
        Modes that could not be checked, and why.
    check_seconds
        Seconds of these checks.

    See Also
    --------
    pipeexec.split : Cut a model into stages.
    pipeexec.Pipeline : Run the stages on devices.
    pipeexec.read_checkpoint : Read a checkpoint for the model.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    >>> stages = px.split(model, 2, sample=torch.ones(8, 4))
    >>> len(stages), stages.modules, stages.way
    (2, (('0', '1'), ('2', '3')), 'nn.Sequential')
    >>> torch.equal(stages(torch.ones(8, 4)), model(torch.ones(8, 4)))
    True
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[SplitStage | None],
        modules: Sequence[tuple[str, ...]],
        facts: SplitFacts,
        blocks: tuple[str, ...],
        *,
        way: str,
        ways_failed: tuple[tuple[str, str], ...],
        sample: Any,
    ) -> None:
        self.model, self.modules, self.blocks = model, tuple(modules), blocks
        self.tied: tuple[TiedGroup, ...] = facts.tied
        self.way, self.ways_failed = way, ways_failed
        self._stages, self._facts, self._batch = tuple(stages), facts, sample
        self.differences: dict[str, float] = {}
        self.not_checked: dict[str, str] = {}
        self.check_seconds = 0.0

    @overload
    def __getitem__(self, index: int) -> SplitStage | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SplitStage | None, ...]: ...
    def __getitem__(self, index: int | slice) -> SplitStage | tuple[SplitStage | None, ...] | None:
        return self._stages[index]

    def __len__(self) -> int:
        return len(self._stages)

    def __iter__(self) -> Iterator[SplitStage | None]:
        return iter(self._stages)

    def __repr__(self) -> str:
        parts = (
            f"{names[0]} to {names[-1]}"
            + ("" if stage is None else f" ({sum(p.numel() for p in stage.parameters()):,})")
            for names, stage in zip(self.modules, self, strict=True)
        )
        text = f"<Stages of {type(self.model).__name__}, by {self.way}: {'; '.join(parts)}"
        if self.differences:
            rows = ", ".join(f"{mode} {x:.1g}" for mode, x in self.differences.items())
            text += f"; differences in {self.check_seconds:.2g} s: {rows}"
        return f"{text}>"

    def _repr_html_(self) -> str:
        from pipesim.plot.html_tables import note_html, table_html

        title = f"{len(self)} stages of {type(self.model).__name__}, by {self.way}"
        counts = [
            "in another process" if x is None else f"{sum(p.numel() for p in x.parameters()):,}"
            for x in self
        ]
        rows = [
            [str(k), f"{names[0]} to {names[-1]}", count]
            for k, (names, count) in enumerate(zip(self.modules, counts, strict=True))
        ]
        table = table_html(["stage", "modules", "parameters"], rows)
        tied = [" = ".join(f"{name} (stage {k})" for k, name in group) for group in self.tied]
        return note_html(title) + table + (note_html("Tied: " + "; ".join(tied)) if tied else "")

    @property
    def tied_stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each group of `tied`, as `pipesim.lower` takes them; each set of stages once.

        Such as ``((0, 3),)``, if the first of four stages has the embedding, and the last the head.
        """
        return tuple(sorted({tuple(stage for stage, _ in group) for group in self.tied}))

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Edges between stages, as `pipesim.Placement` takes them; empty for a chain.

        Such as ``((0, 2), (1, 2))``, if the third stage takes outputs of two others.
        """
        return self._facts.edges

    def arguments(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a batch, as the first stage takes them.

        Parameters
        ----------
        batch
            A batch, nested as the sample was.

        Returns
        -------
        tuple of torch.Tensor
            The tensors, in the order of the first stage's arguments.
        """
        return tensors_in(self._facts.ordered(batch))

    def ordered(self, batch: Any) -> Any:
        """Return a batch whose tensors are in the order of `arguments`.

        Parameters
        ----------
        batch
            A batch, nested as the sample was.

        Returns
        -------
        object
            The batch, in the order of the sample; for example, a dict with its keys in this order.
        """
        return self._facts.ordered(batch)

    def __call__(self, batch: Any) -> Any:
        """Return the output of all stages, one after the other."""
        return self._facts.run(self._local(), batch)

    def _local(self) -> list[SplitStage]:
        """Return all stages, if they are in this process."""
        stages = [stage for stage in self if stage is not None]
        if len(stages) < len(self):
            raise ExecutionError(
                f"stages {[k for k, x in enumerate(self) if x is None]} are those of other "
                "processes; only a pipeexec.Pipeline of all processes can run them"
            )
        return stages

    def report(
        self,
        batch: Any = None,
        *,
        schedules: Sequence[str | Schedule] | None = None,
        n_microbatches: int = 8,
    ) -> StagesReport:
        """Measure the stages, and predict steps of them.

        Each stage runs some forwards and backwards on one thread of this machine. Parameters,
        gradients, buffers and random numbers stay as they were.

        Parameters
        ----------
        batch
            A micro-batch, nested as the sample was. By default the sample.
        schedules
            Names of schedules, or schedules of as many stages and with the same `edges`. A name
            gets as many stages a device as it has by default. By default GPipe and 1F1B, and the
            orders of `pipesim.order_by` for stages with edges.
        n_microbatches
            Micro-batches of a step of the named schedules.

        Returns
        -------
        StagesReport
            ``table`` has a row a stage: modules, layers, parameters, FLOPs, seconds and bytes.
            ``makespans`` has seconds by schedule, predicted from ``costs``.

        Raises
        ------
        ExecutionError
            If stages are those of other processes, or if one fails.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> stages = px.split(model, 2, sample=torch.ones(8, 4))
        >>> report = stages.report(schedules=["1f1b"])
        >>> report.table["parameters"].tolist(), list(report.makespans)
        ([40, 40], ['1f1b'])
        """
        check_count("n_microbatches", n_microbatches)
        batch = self._batch if batch is None else batch
        title = f"{len(self)} stages of {type(self.model).__name__}, by {self.way}"
        return stages_report(
            title, self._local(), self._facts, self.blocks, batch, schedules, n_microbatches
        )

    def check(self, batch: Any, loss_fn: Callable[[Any], Tensor] | None = None) -> float:
        """Compare loss and gradients of the stages with those of the model, for one batch.

        Model and stages run one after the other in this thread, in the mode (training or not) that
        they have. Dropout draws the same numbers for both. Parameters, gradients, buffers and the
        states of torch's random numbers stay as they were.

        Parameters
        ----------
        batch
            A batch, nested as the sample was.
        loss_fn
            Called with the model's output; returns the loss. By default the sum of squares of all
            floating-point values of the output.

        Returns
        -------
        float
            Largest difference of an output, of the loss, or of a buffer, relative to its largest
            element, or of a gradient, relative to the largest element of all. 0 means equal to the
            last bit.

        Raises
        ------
        ExecutionError
            If ``loss_fn`` fails, or returns no loss; and if stages are those of other processes.
        """
        if loss_fn is not None:
            check_function("loss_fn", loss_fn, "loss_fn(output), which returns a tensor")
        self.arguments(batch)  # before the model runs
        return self._facts.compared(self._local(), batch, loss_fn).largest

    def _check_all_modes(
        self, refused: Collection[tuple[bool, bool]], *, must_compare: bool
    ) -> None:
        """Compare the stages with the model for the sample, in the modes that are not refused.

        ``must_compare`` tells whether stages that cannot be compared are an error.
        """
        began, stages = time.perf_counter(), self._local()
        for training, mode in ((True, "training"), (False, "evaluation")):
            if (training, True) in refused:
                continue
            try:
                self.differences[mode] = self._facts.check(stages, self._batch, training=training)
            except ArgumentError as error:  # they cannot be compared
                if must_compare:
                    raise
                self.not_checked[mode] = str(error)
        self.check_seconds = time.perf_counter() - began
