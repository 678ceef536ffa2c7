"""`Projection`: profiled layers of a model, and predictions of steps on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeexec.projection.files import load_parts, save_parts
from pipeexec.projection.priced_step import priced_step, schedule_name, warn_of_short_tasks
from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import Split
from pipesim.errors import ArgumentError, check_count, check_list
from pipesim.models.layers import Layers
from pipesim.models.splits.placed_split import Placed
from pipesim.planning.cluster import Cluster
from pipesim.planning.configurations.plan import plan
from pipesim.planning.configurations.plans import Plans
from pipesim.scheduling.registry import schedule_info
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline, simulate
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


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

    See Also
    --------
    pipeexec.project : Make a projection.
    pipesim.Layers : Seconds and bytes of layers.
    pipesim.plan : Search configurations of a model.

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
        from pipeexec.projection.html import projection_html

        return projection_html(repr(self)[1:-1], self.table)

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

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px, pipesim as ps
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
        >>> cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
        >>> projection = px.project(model, torch.ones(8, 64), cluster, n_steps=1)
        >>> len(projection.costs([1, 3]).forward)
        2
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

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px, pipesim as ps
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
        >>> cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
        >>> projection = px.project(model, torch.ones(8, 64), cluster, n_steps=1)
        >>> projection.tied_stages([1, 3])
        ()
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

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px, pipesim as ps
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
        >>> cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
        >>> projection = px.project(model, torch.ones(8, 64), cluster, n_steps=1)
        >>> stages = px.split(model, projection.blocks([1, 3]), sample=torch.ones(8, 64))
        >>> stages.modules
        (('0',), ('1', '2', '3'))
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

        `Timeline.fits` tells whether it fits in the memory of its GPUs, and ``timeline.graph`` is
        the graph that a `pipeexec.Pipeline` runs.

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

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px, pipesim as ps
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
        >>> cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
        >>> projection = px.project(model, torch.ones(8, 64), cluster, n_steps=1)
        >>> timeline = projection.predict("1f1b", n_devices=2, n_microbatches=4, split=[2, 2])
        >>> timeline.n_devices, timeline.fits
        (2, True)
        """
        graph, costs = priced_step(
            self, schedule, n_devices, n_microbatches, split, n_chunks, lowering
        )
        warn_of_short_tasks(self.device, costs, graph.n_stages, stacklevel=3)
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

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px, pipesim as ps
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
        >>> cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
        >>> projection = px.project(model, torch.ones(8, 64), cluster, n_steps=1)
        >>> table = projection.compare(["gpipe", "1f1b"], n_devices=2, n_microbatches=4)
        >>> table.index.tolist(), table["fits"].tolist()
        (['gpipe', '1f1b'], [True, True])
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
                    "peak_memory": float(timeline.peak_memory.max()),
                    "fits": timeline.fits,
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

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px, pipesim as ps
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
        >>> cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
        >>> projection = px.project(model, torch.ones(8, 64), cluster, n_steps=1)
        >>> plans = projection.plan(32)
        >>> plans.complete, plans.table["microbatch_size"].unique().tolist()
        (True, [8])
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

        Raises
        ------
        RunDirectoryError
            If it cannot be written, ``path`` exists and is no run directory, or another process is
            writing it.

        Examples
        --------
        >>> import tempfile, torch
        >>> import pipeexec as px, pipesim as ps
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
        >>> cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
        >>> projection = px.project(model, torch.ones(8, 64), cluster, n_steps=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     projection.save(f"{folder}/layers", record={"seed": 0})
        ...     px.Projection.load(f"{folder}/layers").modules == projection.modules
        True
        """
        save_parts(path, self, record)

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

        Examples
        --------
        >>> import tempfile, torch
        >>> import pipeexec as px, pipesim as ps
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
        >>> cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
        >>> projection = px.project(model, torch.ones(8, 64), cluster, n_steps=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     projection.save(f"{folder}/layers")
        ...     px.Projection.load(f"{folder}/layers").cluster.n_gpus
        2
        """
        return cls(**load_parts(path))
