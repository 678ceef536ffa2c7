"""`Projection`: profiled layers of a model, and predictions of steps on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeexec.profiling.calibration import SHORTEST, short_task_text
from pipeexec.run_directory import (
    checked_record,
    command,
    listed_file,
    read_record,
    write_directory,
)
from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import Split
from pipesim.errors import (
    AccuracyWarning,
    ArgumentError,
    PipeError,
    RunDirectoryError,
    check_count,
    check_list,
    check_type,
)
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.models.layers import Layers
from pipesim.models.placed_split import Placed
from pipesim.planning.cluster import Cluster
from pipesim.planning.plan import plan
from pipesim.planning.plans import Plans
from pipesim.plot.html_tables import note_html, table_html
from pipesim.scheduling.registry import schedule as named_schedule
from pipesim.scheduling.registry import schedule_info
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline, simulate
from pipesim.timeline.timeline import Timeline
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.files import check_path
from pipesim.utils.texts import format_bytes, format_time

if TYPE_CHECKING:
    import pandas as pd


#: Files of the columns of the layers, and of the activation bytes of stages.
_LAYERS, _JOINT = "layers.csv", "joint.csv"
#: Key of the record with the other values.
_KEY = "projection"
#: Most layers that are shown in a notebook, and their columns.
_MAX_LAYERS = 16
_SECONDS = ("forward", "backward", "optimizer_step")
_BYTES = ("parameter_bytes", "activation_bytes", "output_bytes")


@dataclass(frozen=True, eq=False)
class Projection:
    """Profiled layers of a model, and predictions of steps on a cluster; `project` makes it.

    Attributes
    ----------
    layers
        Seconds and bytes of each layer for one micro-batch. `pipesim.plan` and
        `pipesim.Costs.from_layers` take them, too.
    modules
        Names of the modules of each layer, in the order of their calls.
    n_blocks
        Blocks of each layer, as `pipeexec.split` counts them: 0 of a layer of the modules before
        the first block or after the last one, else 1.
    cluster
        Network, memory and number of devices.
    microbatch_size
        Samples of the profiled micro-batch. All predictions are for this size.
    device
        Name of the device that the layers ran on.
    launch
        Seconds of the host to issue a task.
    spread
        For each layer, the largest standard deviation of an operation's mean from step to step,
        over the mean.
    tied
        Parameters of which several layers have copies: these layers, and bytes.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px, pipesim as ps
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    >>> gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
    >>> cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
    >>> projection = px.project(model, torch.ones(8, 64), cluster, n_steps=1)
    >>> len(projection.layers), projection.modules
    (4, (('0',), ('1',), ('2',), ('3',)))
    """

    layers: Layers
    modules: tuple[tuple[str, ...], ...]
    n_blocks: tuple[int, ...]
    cluster: Cluster
    microbatch_size: int
    device: str
    launch: float
    spread: tuple[float, ...]
    tied: tuple[tuple[tuple[int, ...], float], ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Projection of {len(self.layers)} layers ({self.modules[0][0]} to "
            f"{self.modules[-1][-1]}) on {self.device}, {self.microbatch_size} samples a "
            f"micro-batch, for {self.cluster!r}>"
        )

    def _repr_html_(self) -> str:
        table = self.table
        formats: dict[str, Callable[[float], str]] = dict.fromkeys(_SECONDS, format_time)
        formats |= dict.fromkeys(_BYTES, format_bytes)
        formats = {name: form for name, form in formats.items() if name in table}
        head = ["layer", "modules", *(name.replace("_", " ") for name in formats)]
        rows = [
            [str(k), f"{row['modules']:.60}", *(form(row[name]) for name, form in formats.items())]
            for k, row in table.head(_MAX_LAYERS).iterrows()
        ]
        omitted = len(table) - len(rows)
        more = note_html(f"{omitted} more layers: see .table") if omitted else ""
        return note_html(repr(self)[1:-1]) + table_html(head, rows) + more

    @property
    def table(self) -> pd.DataFrame:
        """One row a layer: its modules, the columns of `layers` in seconds and bytes, `spread`."""
        from pipesim.utils.packages import pandas as pd

        names = [", ".join(names) for names in self.modules]
        columns = {"modules": names, **self.layers.columns, "spread": self.spread}
        return pd.DataFrame(columns).rename_axis("layer")

    def costs(self, split: Split, *, placement: Placed | None = None) -> Costs:
        """Return the costs of stages on the cluster.

        Parameters
        ----------
        split, placement
            As in `pipesim.Layers.costs`: layers of each stage, or the number of stages.

        Returns
        -------
        Costs
            Seconds and bytes of each stage, the network of the cluster, and bytes of tied
            parameters.
        """
        network = self.cluster.network()
        sizes = self.layers.split(split, placement=placement, network=network)
        costs = self.layers.costs(sizes, launch=self.launch, network=network)
        nbytes = tuple(self._tied_groups(sizes).values())
        return replace(costs, tied_bytes=nbytes) if nbytes else costs

    def tied_stages(
        self, split: Split, *, placement: Placed | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the groups of stages with copies of a parameter.

        Parameters
        ----------
        split, placement
            As for `costs`.

        Returns
        -------
        tuple of tuple of int
            Stages of each group, as ``tied`` of `pipesim.lower` takes them; each set of stages
            once.
        """
        return tuple(self._tied_groups(self.layers.split(split, placement=placement)))

    def _tied_groups(self, sizes: Sequence[int]) -> dict[tuple[int, ...], float]:
        """Return the bytes that each group of tied stages has copies of."""
        stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        groups: dict[tuple[int, ...], float] = {}
        for layers, nbytes in self.tied:
            stages = tuple(sorted({stage_of[layer] for layer in layers}))
            if len(stages) > 1:
                groups[stages] = groups.get(stages, 0.0) + nbytes
        return dict(sorted(groups.items()))

    def blocks(self, split: Split, *, placement: Placed | None = None) -> list[int]:
        """Return the blocks of each stage, for `pipeexec.split`.

        Parameters
        ----------
        split, placement
            As for `costs`.

        Returns
        -------
        list of int
            Number of blocks of each stage.
        """
        sizes = self.layers.split(split, placement=placement)
        ends = list(accumulate(sizes))
        return [sum(self.n_blocks[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def predict(
        self,
        schedule: Schedule | str,
        n_devices: int | None = None,
        n_microbatches: int | None = None,
        *,
        split: Split = "balanced",
        n_chunks: int | None = None,
        **lowering: Any,
    ) -> Timeline:
        """Return the predicted timeline of a step on devices of the cluster.

        `Timeline.memory.fits` tells whether it fits in the memory of its GPUs, and
        ``timeline.graph`` is the graph that a `pipeexec.Pipeline` runs.

        Parameters
        ----------
        schedule
            Name of a schedule; or a `pipesim.Schedule`, which has its own counts and options.
        n_devices, n_microbatches
            Counts of a named schedule. With ``n_replicas``, those of one replica.
        split
            Layers of each stage, or ``"balanced"`` (the default) or ``"even"``, as in
            `pipesim.Layers.costs`. Balanced: the busiest device has as little work as possible.
        n_chunks
            Stages of each device, for named schedules with chunks.
        **lowering
            Options of `pipesim.lower`, such as ``recompute="always"`` and ``n_replicas=2``. By
            default ``tied`` is that of the stages.

        Returns
        -------
        Timeline
            Start and end of each task (s), and the memory of each device (bytes).

        Warns
        -----
        AccuracyWarning
            If F or B of a stage takes less than 1 ms on CPU workers.
        MemoryLimitWarning
            If a device needs more bytes than it has.
        """
        graph, costs = priced_step(
            self, schedule, n_devices, n_microbatches, split, n_chunks, lowering
        )
        warn_of_short_tasks(self.device, costs, graph.n_stages)
        return simulate(graph, costs, memory_limit=self.cluster.memory).with_name(
            schedule_name(schedule)
        )

    def compare(
        self,
        schedules: Sequence[Schedule | str],
        n_devices: int | None = None,
        n_microbatches: int | None = None,
        *,
        split: Split = "balanced",
        n_chunks: int | None = None,
        **lowering: Any,
    ) -> pd.DataFrame:
        """Return predictions of several schedules, a row each.

        Parameters
        ----------
        schedules
            Names of schedules, and `pipesim.Schedule` objects, which have their own counts and
            options.
        n_devices, n_microbatches, n_chunks
            Counts of the named schedules that take them; as for `predict`.
        split
            As for `predict`.
        **lowering
            Options of `pipesim.lower`, as for `predict`.

        Returns
        -------
        pandas.DataFrame
            Indexed by schedule: ``makespan`` (s), ``samples_per_second``, ``bubble`` (idle share of
            the devices), ``peak_memory`` (bytes of the fullest device), ``fits``, ``split``.
        """
        from pipesim.utils.packages import pandas as pd

        numbers = {"n_devices": n_devices, "n_microbatches": n_microbatches, "n_chunks": n_chunks}
        for name, count in numbers.items():
            if count is not None:
                check_count(name, count)
        rows = []
        for one in check_list("schedules", schedules, 'names such as ["gpipe", "1f1b"]'):
            counts = (None, None) if isinstance(one, Schedule) else (n_devices, n_microbatches)
            takes_chunks = isinstance(one, str) and "n_chunks" in schedule_info(one).options
            chunks = n_chunks if takes_chunks else None
            graph, costs = priced_step(self, one, *counts, split, chunks, lowering)
            timeline = predict_timeline(graph, costs, memory_limit=self.cluster.memory)
            samples = self.microbatch_size * graph.n_microbatches * graph.n_replicas
            rows.append(
                {
                    "schedule": schedule_name(one),
                    "makespan": timeline.makespan,
                    "samples_per_second": samples / timeline.makespan,
                    "bubble": timeline.bubble_fraction,
                    "peak_memory": float(timeline.memory.peak.max()),
                    "fits": timeline.memory.fits,
                }
            )
        if not rows:
            raise ArgumentError('schedules is empty; give names such as ["gpipe", "1f1b"]')
        return pd.DataFrame(rows).set_index("schedule")

    def plan(self, global_batch: int, **options: Any) -> Plans:
        """Return the best configurations for a batch of so many samples on all GPUs of the cluster.

        Parameters
        ----------
        global_batch
            Samples of a step, of all replicas.
        **options
            Of `pipesim.plan`.

        Returns
        -------
        Plans
            All configurations: simulated ones by rank, and why the others were ruled out.
        """
        size = options.pop("microbatch_size", self.microbatch_size)
        if size != self.microbatch_size:
            raise ArgumentError(
                f"microbatch_size={size!r:.30}, but layers were profiled with "
                f"{self.microbatch_size} samples a micro-batch; their seconds do not grow in "
                "proportion: make another projection from a sample of this size"
            )
        return plan(self.layers, self.cluster, global_batch=global_batch,
                    microbatch_size=self.microbatch_size, **options)  # fmt: skip

    def save(self, path: Path | str, *, record: Mapping[str, Any] | None = None) -> None:
        """Write a complete run directory, or nothing.

        Its files are ``run.json``, ``layers.csv`` and ``joint.csv``.

        Parameters
        ----------
        path
            Folder to write. An older run directory at this path is replaced.
        record
            Further entries of ``run.json``, which JSON can hold.
        """
        from pipesim.utils.packages import pandas as pd

        values = {
            "modules": self.modules,
            "n_blocks": self.n_blocks,
            "cluster": self.cluster.to_dict(),
            "microbatch_size": self.microbatch_size,
            "device": self.device,
            "launch": self.launch,
            "spread": self.spread,
            "tied": self.tied,
        }
        with write_directory(
            check_path("path", path, "write"),
            {"command": command(), **checked_record(record), _KEY: values},
        ) as folder:
            names = [", ".join(names) for names in self.modules]
            columns = {"layer": names, **self.layers.columns}
            pd.DataFrame(columns).to_csv(folder / _LAYERS, index=False)
            joint = self.layers.joint_activation_bytes
            pd.DataFrame(joint).to_csv(folder / _JOINT, index=False, header=False)

    @classmethod
    def load(cls, path: Path | str) -> Projection:
        """Read a run directory of `save`.

        Parameters
        ----------
        path
            Run directory.

        Returns
        -------
        Projection
            The projection that was saved.

        Raises
        ------
        RunDirectoryError
            If a file is missing, truncated or edited, or the run is no projection.
        """
        from pipesim.utils.packages import pandas as pd

        path = check_path("path", path)
        record = read_record(path)
        values = record.get(_KEY)
        if not isinstance(values, Mapping):
            raise RunDirectoryError(
                f"{path} holds no projection; write one with Projection.save, and read other runs "
                "with pipeexec.load_run or pipeexec.profiling.Profile.load"
            )
        try:
            joint = pd.read_csv(listed_file(path, record, _JOINT), header=None)
            columns = Layers.read(listed_file(path, record, _LAYERS)).columns
            parts: dict[str, Any] = {
                "layers": Layers(columns, "projection", joint.to_numpy(float).tolist()),
                "modules": tuple(tuple(map(str, names)) for names in values["modules"]),
                "n_blocks": tuple(map(int, values["n_blocks"])),
                "cluster": Cluster.from_dict(values["cluster"]),
                "microbatch_size": int(values["microbatch_size"]),
                "device": str(values["device"]),
                "launch": float(values["launch"]),
                "spread": tuple(map(float, values["spread"])),
                "tied": tuple((tuple(map(int, a)), float(b)) for a, b in values["tied"]),
            }
        except (OSError, KeyError, TypeError, ValueError, PipeError) as error:
            raise RunDirectoryError(
                f"{path} holds no whole projection: {type(error).__name__}: {error!s:.200}; make "
                "it again with pipeexec.project"
            ) from error
        return cls(**parts)


def priced_step(
    projection: Projection,
    schedule: Schedule | str,
    n_devices: int | None,
    n_microbatches: int | None,
    split: Split,
    n_chunks: int | None,
    lowering: dict[str, Any],
) -> tuple[TaskGraph, Costs]:
    """Return the graph of a schedule, and the costs of its stages."""
    options = {} if n_chunks is None else {"n_chunks": check_count("n_chunks", n_chunks)}
    counts = {"n_devices": n_devices, "n_microbatches": n_microbatches} | options
    if isinstance(schedule, str):
        checked = [check_count(name, counts[name]) for name in ("n_devices", "n_microbatches")]
        order = named_schedule(schedule, *checked, **options)
        costs, tied = _stage_costs(projection, order, split)
        if "costs" in schedule_info(schedule).options:
            order = named_schedule(schedule, *checked, **options, costs=costs)
    else:
        order = check_type("schedule", schedule, Schedule, 'give such as "1f1b"')
        doubled = [name for name, value in counts.items() if value is not None]
        if doubled:
            raise ArgumentError(
                f"{doubled[0]} is given, but the schedule has its own; leave it out, or give "
                "the name of a schedule"
            )
        costs, tied = _stage_costs(projection, order, split)
    graph = lower(order, **({"tied": tied} | lowering))
    if graph.n_devices > projection.cluster.n_gpus:
        raise ArgumentError(
            f"the graph has {graph.n_devices} devices, but the cluster {projection.cluster.n_gpus} "
            "GPUs; give fewer devices or replicas, or a larger cluster"
        )
    return graph, costs


def _stage_costs(
    projection: Projection, order: Schedule, split: Split
) -> tuple[Costs, tuple[tuple[int, ...], ...]]:
    """Return the costs of the stages of a schedule, and the groups of tied ones."""
    if order.n_slices > 1:
        raise ArgumentError(
            f"schedule {order.name!r} runs slices of sequences, but layers were profiled with "
            "whole micro-batches; give a schedule of these, or measure the slices of the stages "
            "with pipeexec.profile"
        )
    n_stages = order.placement.n_stages
    if n_stages > len(projection.layers):
        raise ArgumentError(
            f"the schedule has {n_stages} stages, but the model {len(projection.layers)} layers; "
            "give fewer devices or chunks"
        )
    placement = order.placement if isinstance(split, str) else None
    sizes = projection.layers.split(split, placement=placement)
    costs = projection.costs(sizes)
    costs.per_stage("forward", n_stages)  # refuses a split into another number of stages
    return costs, tuple(projection.tied_stages(sizes))


def warn_of_short_tasks(device: str, costs: Costs, n_stages: int) -> None:
    """Warn of the shortest task of CPU workers, if it is below 1 ms."""
    seconds, op, stage = min(
        (float(x), op, stage)
        for op, name in (("F", "forward"), ("B", "backward"))
        for stage, x in enumerate(costs.per_stage(name, n_stages))
    )
    if device.startswith("cpu") and seconds < SHORTEST:
        text = short_task_text(f"{op} of stage {stage}", seconds)
        warn_caller(text, AccuracyWarning)


def schedule_name(schedule: Schedule | str) -> str:
    """Return the name of a schedule."""
    return schedule if isinstance(schedule, str) else schedule.name
