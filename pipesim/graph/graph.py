"""`TaskGraph`: every task of a step, their dependencies and the queues of streams, as columns.

A graph is arrays: one entry a task in each column, dependencies and stream queues as CSR (the
entries of row ``i`` are ``values[ptr[i]:ptr[i + 1]]``). Task ids are the issue order, and a
topological order: every task that a task waits for has a smaller id. A task is stored as its kind
and its micro-batch; the other columns and `Task` objects are made on demand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count, check_text
from pipesim.graph.copies import (
    FirstCopy,
    copies_of_kinds,
    default_collectives,
    first_copy,
    group_members,
    partial_dependencies,
)
from pipesim.graph.dependencies import apply_rules, peer_kinds, with_ends, with_fetches
from pipesim.graph.options import (
    GradSyncs,
    Hosts,
    LoweringOptions,
    OffloadTarget,
    Prefetch,
    Tied,
    group_sizes,
    host_of_devices,
    paired_devices,
)
from pipesim.graph.precedence import issued_first, levels, precedence, stable_topological_order
from pipesim.graph.skips import Skip
from pipesim.graph.tasks import Kinds, StreamKind, Task, Tasks, checked_tasks
from pipesim.ops import Op, is_expert_exchange
from pipesim.scheduling.memory_checks import BYTES_PER_TASK, FEWER_TASKS
from pipesim.scheduling.placement import Edges
from pipesim.scheduling.schedule import Versions
from pipesim.utils.checks import checked_names
from pipesim.utils.csr import CSR, Ints, ids_dtype
from pipesim.utils.host_memory import check_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    import networkx  # type: ignore[import-untyped]
    import pandas as pd

    from pipesim.plot.dependency_plot import dependencies
    from pipesim.plot.page.save import item_to_html


_NO_OPTIONS = LoweringOptions()
Value = TypeVar("Value")


class _Option(property, Generic[Value]):
    """A field of `LoweringOptions` as an attribute of the graph."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(attrgetter(f"options.{name}"))
        self.__doc__ = f"{text} See `LoweringOptions`."

    if TYPE_CHECKING:  # a property of any type would be `Any`

        def __get__(self, graph: object, owner: type | None = None) -> Value: ...  # type: ignore[override]


@checked_names
@dataclass(frozen=True, eq=False, repr=False)
class TaskGraph:
    """All tasks of a step, their dependencies, and the order of each stream.

    `pipesim.lower` makes a graph from a schedule, `build` from the user's columns. Fields are not
    checked: `pipesim.verify` does that.

    Attributes
    ----------
    name
        Name in tables and plots.
    n_devices, n_stages, n_microbatches, n_replicas
        Counts. Replicas are copies of the model; gradients are reduced over all of them. They are
        the paths of a bidirectional pipeline, on the same devices, and data-parallel replicas, each
        on its own devices.
    kinds
        Operation, stage, replica, device and stream of each kind of task.
    kind, microbatch
        One entry a task; ``microbatch`` is -1 for operations on a whole stage. `op`, `device`,
        `stage`, `replica`, `stream`, `peer_stage` and `part` are columns too.
    streams
        ``(device, name)`` of each stream.
    stream_of_kind
        Index into ``streams`` of the stream of each kind.
    dependencies
        CSR: for each task, the tasks that must end before its start (rule 3).
    partial_dependency
        For a bucket of gradients, the last backward of its stage. It completes the bucket before
        its own end, so that the bucket needs only a part of this dependency. -1 for other tasks.
        Empty without buckets.
    pair
        The SEND of a RECV and the RECV of a SEND, else -1 (rule 4).
    collectives
        CSR: the members of each collective (rule 9).
    host
        Number of the host that issues a device's tasks; shape ``(n_devices,)`` (rule 7).
    options
        Options of the lowering. The graph has them as attributes too: `edges`, `recompute`,
        `overlap`, `rendezvous`, `host_threads`, `n_batches`, `n_slices`, `prompt_slices`,
        `grad_sync`, `weight_versions`, `skips`, `portals`, `forward_only`, `tied`, `prefetch`,
        `expert_replicas`, `offload_shares` and `offload_to`.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", n_devices=2, n_microbatches=2))
    >>> graph
    <TaskGraph gpipe: 18 tasks, 2 devices, 2 stages, 2 micro-batches, recompute=never>
    >>> graph.streams[:3]
    ((0, 'compute'), (0, 'send:1'), (0, 'recv:1'))
    >>> str(graph[4]), [str(graph[k]) for k in graph.dependencies[4]]
    ('1F0', ['1RECV_F0'])
    >>> " ".join(str(task) for task in graph if task.device == 1)
    '1RECV_F0 1F0 1RECV_F1 1F1 1B1 1SEND_B1 1B0 1SEND_B0 1STEP'
    """

    name: str
    n_devices: int
    n_stages: int
    n_microbatches: int
    n_replicas: int
    kinds: Kinds
    kind: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    streams: tuple[tuple[int, str], ...]
    stream_of_kind: Ints
    dependencies: CSR
    partial_dependency: Ints
    pair: Ints
    collectives: CSR
    host: Ints
    options: LoweringOptions = _NO_OPTIONS

    @classmethod
    def build(
        cls,
        tasks: Tasks,
        *,
        name: str = "custom",
        group: Ints | None = None,
        hosts: Hosts = "one",
        **options: Any,
    ) -> TaskGraph:
        """Wire tasks, given in issue order, into a graph; streams run them in this order.

        An order that is not topological is changed as little as needed. Tasks that wait for each
        other in a circle have no topological order: the graph then keeps the given order, and
        `pipesim.verify` reports these tasks.

        Parameters
        ----------
        tasks
            Columns: arrays, or lists, of integers.
        group
            One number a task. Tasks with equal numbers, other than -1, are the members of one
            collective. By default, the members are the tasks of one collective operation, stage,
            part and micro-batch over all replicas; for REDUCE_TIED, those of a part and replica,
            and for GRAD_NORM all.
        name, hosts
            As the attribute and `pipesim.lower` describe.
        **options
            Fields of `pipesim.graph.options.LoweringOptions`, in any form that `pipesim.lower`
            takes. With several mini-batches, operations on whole stages have the number of the last
            micro-batch of their mini-batch. By default, ``skips`` are the pairs of stages that
            ``peer_stage`` of the tasks names; give them for messages that carry several, or for
            skips that need no message. A REDUCE_TIED has the number of its group in ``tied`` as
            ``part``.

        Returns
        -------
        TaskGraph
            Graph of the tasks, not verified.

        Raises
        ------
        GraphError
            For columns that hold no integers, differ in length or have a value out of range,
            naming column and row.
        CapacityError
            If the graph would not fit in memory.

        Examples
        --------
        F and B of one stage on one device. Dependencies follow from the operations:

        >>> import pipesim as ps
        >>> from pipesim.graph import Tasks
        >>> columns = {"device": [0, 0], "stage": [0, 0], "microbatch": [0, 0], "stream": [0, 0]}
        >>> graph = ps.TaskGraph.build(Tasks(op=[ps.Op.F, ps.Op.B], **columns))
        >>> graph.dependencies[1].tolist()
        [0]
        >>> ps.simulate(graph, ps.Costs(forward=1, backward=2)).makespan
        3.0
        """
        graph = cls.wire(tasks, group=group, name=name, hosts=hosts, **options)
        return graph.in_topological_order()

    @classmethod
    def wire(
        cls,
        tasks: Tasks,
        *,
        group: Ints | None = None,
        name: str = "custom",
        hosts: Hosts = "one",
        **options: Any,
    ) -> TaskGraph:
        """Wire tasks like `build`, but keep the ids as they are given, topological or not.

        Parameters
        ----------
        tasks, group, name, hosts
            As in `build`.
        **options
            Further options of `build`.

        Returns
        -------
        TaskGraph
            Graph of the tasks, not verified.
        """
        check_text("name", name)
        tasks, group = checked_tasks(tasks, group, decodes=options.get("prompt_slices"))
        kinds, kind = tasks.kinds()
        microbatch = tasks.microbatch.astype(np.int32)
        n_microbatches = int(microbatch.max(initial=-1)) + 1
        return cls.of_kinds(
            kinds,
            kind,
            microbatch,
            group=group,
            name=name,
            host=host_of_devices(hosts, int(kinds.device.max(initial=0)) + 1),
            options=LoweringOptions.checked(kinds, n_microbatches, **options),
        )

    @classmethod
    def of_kinds(
        cls,
        kinds: Kinds,
        kind: NDArray[np.int32],
        microbatch: NDArray[np.int32],
        *,
        group: Ints | None = None,
        name: str = "custom",
        host: Ints | None = None,
        options: LoweringOptions = _NO_OPTIONS,
    ) -> TaskGraph:
        """Wire tasks into a graph, given the kind of each task.

        Parameters
        ----------
        kinds, kind, microbatch, name, options
            As the attributes.
        group
            As in `build`.
        host
            As the attribute; None for one host.

        Returns
        -------
        TaskGraph
            Graph of the tasks, with ids as they are given.
        """
        check_memory(f"a graph of {len(kind):,} tasks", len(kind) * BYTES_PER_TASK, FEWER_TASKS)
        n_devices = int(kinds.device.max(initial=0)) + 1
        n_replicas, n_stages = kinds.homes.shape
        n_microbatches = int(microbatch.max(initial=-1)) + 1
        streams, stream_of_kind = kinds.streams
        stream_of_kind = stream_of_kind.copy()  # loops are compiled for arrays that can be written
        needs, pair = apply_rules(
            kinds,
            kind,
            microbatch,
            n_microbatches // options.n_batches,
            stream_of_kind,
            group_sizes(options.grad_sync, n_stages),
            options.tied,
            options.n_slices,
            options.prompt_slices,
            options.edges,
        )
        needs = with_fetches(needs, kinds, kind, options.prefetch)
        dependencies = with_ends(needs, kinds, kind, stream_of_kind)
        graph = cls(
            name=name,
            n_devices=n_devices,
            n_stages=n_stages,
            n_microbatches=n_microbatches,
            n_replicas=n_replicas,
            kinds=kinds,
            kind=kind,
            microbatch=microbatch,
            streams=streams,
            stream_of_kind=stream_of_kind,
            dependencies=dependencies,
            partial_dependency=partial_dependencies(kinds, kind, dependencies),
            pair=pair,
            collectives=(
                default_collectives(kinds, kind, microbatch, options.expert_replicas)
                if group is None
                else group_members(group)
            ),
            host=np.zeros(n_devices, dtype=np.int64) if host is None else host,
            options=options,
        )
        graph.__dict__["_wired"] = True
        return graph

    def in_topological_order(self) -> TaskGraph:
        """Return the same tasks, moved as little as needed for ids to be a topological order.

        Returns
        -------
        TaskGraph
            A graph with other ids; this one if they are in order already, or if no order is
            topological.
        """
        waits = self.precedence
        if (waits.values < waits.rows).all():
            return self
        order = stable_topological_order(waits)
        return self if len(order) < len(self) else reordered(self, order)

    @property
    def during(self) -> Ints:
        """`partial_dependency`, under its earlier name."""
        return self.partial_dependency

    recompute = _Option[str]("recompute", "Micro-batches that are recomputed.")
    overlap = _Option[bool]("overlap", "Whether transfers overlap compute.")
    rendezvous = _Option[bool]("rendezvous", "Whether a SEND waits for its RECV (rule 6).")
    host_threads = _Option[bool]("host_threads", "Whether hosts are threads (rule 7).")
    n_batches = _Option[int]("n_batches", "Number of mini-batches.")
    n_slices = _Option[int]("n_slices", "Number of slices of a sequence; 1 without slices.")
    grad_sync = _Option[GradSyncs]("grad_sync", "Times of gradient reductions.")
    weight_versions = _Option[Versions]("weight_versions", "Versions of the weights that F uses.")
    skips = _Option[tuple[Skip, ...]]("skips", "Stages ``(source, target)`` of each skip.")
    edges = _Option[Edges]("edges", "Stages ``(source, target)`` of each edge; empty for a chain.")
    portals = _Option[bool]("portals", "Whether each skip has its own message.")
    forward_only = _Option[bool]("forward_only", "Whether this is an evaluation.")
    prompt_slices = _Option[int]("prompt_slices", "Slices of a prompt; 0 without decode steps.")
    tied = _Option[Tied]("tied", "Stages of each group with copies of one parameter.")
    prefetch = _Option[Prefetch]("prefetch", "Compute tasks that a fetch may run beside.")
    offload_to = _Option[OffloadTarget]("offload_to", "Where OFFLOADs move activations.")
    expert_replicas = _Option[int]("expert_replicas", "Replicas that exchange tokens; 0: all.")

    @cached_property
    def is_decode_step(self) -> NDArray[np.bool_]:
        """Whether each micro-batch is a decode step, a slice behind a prompt."""
        place = np.arange(self.n_microbatches) % self.n_slices
        return (place >= self.prompt_slices) & (self.prompt_slices > 0)

    @property
    def offload_shares(self) -> NDArray[np.float64]:
        """Share of the bytes of activations that OFFLOADs move; shape ``(n_stages,)``."""
        shares = self.options.offload_shares
        return np.array(shares) if shares else np.ones(self.n_stages)

    @cached_property
    def offload_peers(self) -> Ints:
        """Device that holds what each device offloads; -1 if it is the host. One a device."""
        if self.options.offload_to == "host":
            return np.full(self.n_devices, -1)
        return paired_devices(self.homes)

    @cached_property
    def has_grad_norm(self) -> bool:
        """Whether the norm of all gradients is computed before the optimizer steps."""
        return bool((self.kinds.op == Op.GRAD_NORM).any())

    @property
    def verified(self) -> bool:
        """Whether `pipesim.verify` accepted this graph, or `pipesim.lower` made it."""
        return bool(self.__dict__.get("_verified", False))

    def as_verified(self) -> TaskGraph:
        """Mark the graph as `verified`, without a check; a changed copy is not verified.

        Returns
        -------
        TaskGraph
            The graph itself.
        """
        self.__dict__["_verified"] = True
        return self

    if TYPE_CHECKING:  # registered by the rooms that have them
        plot = dependencies
        to_html = item_to_html

    @property
    def wired(self) -> bool:
        """Whether `of_kinds` made this graph, so that dependencies follow from kinds and order."""
        return bool(self.__dict__.get("_wired", False))

    def __len__(self) -> int:
        return len(self.kind)

    def __iter__(self) -> Iterator[Task]:
        return map(self.task, range(len(self)))

    def __getitem__(self, index: int) -> Task:
        return self.task(index)

    def __repr__(self) -> str:
        replicas = f"{self.n_replicas} replicas, " if self.n_replicas > 1 else ""
        return (
            f"<TaskGraph {self.name}: {len(self)} tasks, {replicas}{self.n_devices} devices, "
            f"{self.n_stages} stages, {self.n_microbatches} micro-batches, "
            f"recompute={self.recompute}>"
        )

    @cached_property
    def op(self) -> NDArray[np.int8]:
        """Operation of each task."""
        return self.kinds.op.astype(np.int8)[self.kind]

    @cached_property
    def device(self) -> NDArray[np.int32]:
        """Device of each task."""
        return self.kinds.device.astype(np.int32)[self.kind]

    @cached_property
    def stage(self) -> NDArray[np.int32]:
        """Stage of each task."""
        return self.kinds.stage.astype(np.int32)[self.kind]

    @cached_property
    def replica(self) -> NDArray[np.int32]:
        """Data-parallel replica of each task."""
        return self.kinds.replica.astype(np.int32)[self.kind]

    @cached_property
    def peer_stage(self) -> NDArray[np.int32]:
        """Stage at the other end of each message of skips, -1 for other tasks."""
        return self.kinds.peer_stage.astype(np.int32)[self.kind]

    @cached_property
    def part(self) -> NDArray[np.int32]:
        """Bucket of a REDUCE_GRAD, exchange of an ALL_TO_ALL, group of a REDUCE_TIED; else -1."""
        return self.kinds.part.astype(np.int32)[self.kind]

    @cached_property
    def stream(self) -> NDArray[np.int32]:
        """Index into ``streams`` of each task's."""
        stream: NDArray[np.int32] = self.stream_of_kind[self.kind]
        return stream

    @cached_property
    def queues(self) -> CSR:
        """Tasks of each stream in execution order, which is the order of their ids; CSR."""
        return CSR.group(self.kind, len(self.streams), self.stream_of_kind)

    @cached_property
    def group(self) -> NDArray[np.int32]:
        """Number of the collective that each task is a member of, or -1."""
        group = np.full(len(self), -1, dtype=np.int32)
        group[self.collectives.values] = self.collectives.rows
        return group

    @property
    def frame(self) -> pd.DataFrame:
        """The tasks, one row each, indexed by task id.

        Columns: ``device``, ``stream``, ``op``, ``stage``, ``microbatch`` (-1 for operations on a
        whole stage). `Timeline.frame` has times and bytes too.

        Further columns, each only if the graph has such tasks:

        - ``replica``;
        - ``overlapped``: 1 for the halves of overlapped actions;
        - ``peer_stage``: the stage at the other end of a message of skip connections, else -1;
        - ``part``: the bucket of a REDUCE_GRAD, or the exchange of an ALL_TO_ALL, else -1.

        Examples
        --------
        >>> import pipesim as ps
        >>> print(ps.lower(ps.schedule("gpipe", 2, 2)).frame.query("device == 1").head(3))
              device   stream      op  stage  microbatch
        task
        2          1   recv:0  RECV_F      1           0
        4          1  compute       F      1           0
        6          1   recv:0  RECV_F      1           1
        """
        from pipesim.utils.packages import pandas as pd

        columns = {
            "device": self.device,
            "stream": np.array([name for _, name in self.streams], dtype=object)[self.stream],
            "op": np.array([op.name for op in Op], dtype=object)[self.op],
            "stage": self.stage,
            "microbatch": self.microbatch,
        }
        if self.n_replicas > 1:
            columns["replica"] = self.replica
        if self.kinds.overlapped.any():
            columns["overlapped"] = self.kinds.overlapped[self.kind]
        if (self.kinds.peer_stage >= 0).any():
            columns["peer_stage"] = self.peer_stage
        if (self.kinds.part >= 0).any():
            columns["part"] = self.part
        return pd.DataFrame(columns, index=pd.RangeIndex(len(self), name="task"))

    def task(self, index: int) -> Task:
        """Return a view of one task, as ``graph[index]`` does; a graph iterates over all.

        Parameters
        ----------
        index
            Id of the task, from 0 to ``len(graph) - 1``.

        Returns
        -------
        Task
            Its columns as a named tuple.

        Examples
        --------
        >>> import pipesim as ps
        >>> task = ps.lower(ps.schedule("gpipe", 2, 2)).task(1)
        >>> str(task), task.device, task.stream
        ('0SEND_F0', 0, 'send:1')
        """
        index = check_count("task id", index, minimum=0)
        if index >= len(self):
            raise ArgumentError(f"there is no task {index} in a graph of {len(self)} tasks")
        kind, microbatch = int(self.kind[index]), int(self.microbatch[index])
        return Task(
            index,
            Op(self.kinds.op[kind]),
            int(self.kinds.device[kind]),
            self.streams[self.stream_of_kind[kind]][1],
            int(self.kinds.stage[kind]),
            None if microbatch < 0 else microbatch,
            int(self.kinds.replica[kind]),
            int(self.kinds.peer_stage[kind]),
            int(self.kinds.part[kind]),
        )

    def save_torch_csv(self, path: Path | str) -> None:
        """Write the CSV that torch.distributed.pipelining reads with ``compute_comms``.

        A row a device, in issue order, with the messages. Torch's runtime runs the rows as they
        stand. FSDP's ``UNSHARD`` is not among them: for stages sharded by it, save the schedule
        (`Schedule.save`), which torch lowers itself. `Schedule.load` reads either. One cell has a
        checksum behind its action, which torch passes over.

        Parameters
        ----------
        path
            File to write; an existing one is replaced.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> import pipesim as ps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ps.lower(ps.schedule("gpipe", 2, 1)).save_torch_csv(f"{folder}/actions.csv")
        ...     print(pathlib.Path(f"{folder}/actions.csv").read_text())
        0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD
        1RECV_F0,1F0,1B0,1REDUCE_GRAD,1SEND_B0 sha256:...
        """
        from pipesim.graph.exports import write_torch_csv

        write_torch_csv(self, path)

    def to_networkx(self) -> networkx.DiGraph[int]:
        """Return the tasks and their `precedence` as a graph of networkx.

        networkx must be installed: ``pip install 'pipesim[networkx]'``.

        Returns
        -------
        networkx.DiGraph
            - A node is a task id. It has ``op`` (name), ``device``, ``stream`` (name), ``stage``,
              ``microbatch`` (-1 for operations on a whole stage), ``replica``, ``peer_stage``,
              ``part``, and ``label``, the text form of the action.
            - An edge leads from a task to one that waits for it. Its ``kind`` is ``"dependency"``,
              ``"stream"`` (the task before it on its stream), ``"message"`` (from a SEND to its
              RECV), ``"rendezvous"`` (from the task before a RECV to the SEND) or ``"group"`` (to a
              member of a collective, from a task that another member waits for): the first of them
              that applies. A task of a ``"message"`` or of a `partial_dependency` waits for the
              start of the other one, not for its end.
            - The graph has ``name``, ``n_devices``, ``n_stages``, ``n_microbatches`` and
              ``n_replicas``.

        Examples
        --------
        >>> import networkx
        >>> import pipesim as ps
        >>> graph = ps.lower(ps.schedule("gpipe", 2, 1)).to_networkx()
        >>> path = networkx.dag_longest_path(graph)
        >>> [graph.nodes[task]["label"] for task in path][:4]
        ['0F0', '0SEND_F0', '1RECV_F0', '1F0']
        """
        from pipesim.graph.exports import networkx_graph

        directed: networkx.DiGraph[int] = networkx_graph(self)
        return directed

    def with_name(self, name: str) -> TaskGraph:
        """Return the same graph under another name.

        Parameters
        ----------
        name
            Name in tables and plots.

        Returns
        -------
        TaskGraph
            A copy with this name; `verified` if this graph is.
        """
        graph = replace(self, name=check_text("name", name))
        graph.__dict__["_wired"] = self.wired
        return graph.as_verified() if self.verified else graph

    def is_op(self, ops: frozenset[Op]) -> NDArray[np.bool_]:
        """Mark the tasks whose operation is one of ``ops``.

        Parameters
        ----------
        ops
            Operations, as a frozenset of `pipesim.Op`.

        Returns
        -------
        numpy.ndarray
            True for each such task; shape ``(len(graph),)``.
        """
        marked: NDArray[np.bool_] = self.kinds.is_op(ops)[self.kind]
        return marked

    @cached_property
    def on_compute(self) -> NDArray[np.bool_]:
        """Mark the tasks that occupy their device's compute stream."""
        marked: NDArray[np.bool_] = (self.kinds.stream == StreamKind.COMPUTE)[self.kind]
        return marked

    @cached_property
    def queue_predecessor(self) -> Ints:
        """The task before each on its stream, or -1."""
        before = np.full(len(self), -1, dtype=ids_dtype(len(self)))
        follows = np.ones(len(self), dtype=bool)
        starts = self.queues.ptr[:-1]
        follows[starts[starts < len(self)]] = False
        position = np.flatnonzero(follows)
        before[self.queues.values[position]] = self.queues.values[position - 1]
        return before

    @property
    def homes(self) -> Ints:
        """Device that holds each replica's stages; shape ``(n_replicas, n_stages)``."""
        return self.kinds.homes

    @cached_property
    def sharded(self) -> tuple[int, ...]:
        """Stages with rows spread over the replicas: those with exchanges."""
        exchanges = self.kinds.op == Op.ALL_TO_ALL
        exchanges &= ~is_expert_exchange(self.kinds.op, self.kinds.part)
        stages = self.kinds.stage[exchanges]
        return tuple(np.unique(stages).tolist())

    @cached_property
    def reduction_groups(self) -> Ints:
        """Number of micro-batches after which each stage reduces its gradients.

        0 for once a mini-batch. Shape ``(n_stages,)``.
        """
        return group_sizes(self.grad_sync, self.n_stages)

    @cached_property
    def optimizer_shares(self) -> Ints:
        """Number of replicas that share each stage's optimizer.

        Each steps its share of the parameters. The others are gathered: after the step, or before
        they are used.

        1 for a stage without UNSHARD; shape ``(n_stages,)``.
        """
        return self._shares(self.kinds.op == Op.UNSHARD)

    @cached_property
    def parameter_shares(self) -> Ints:
        """Number of replicas that share each stage's parameters and gradients, as in FSDP.

        1 for a stage whose parameters are not freed; shape ``(n_stages,)``.
        """
        return self._shares(self.kinds.gathers_shards)

    def _shares(self, own: NDArray[np.bool_]) -> Ints:
        """Return the number of replicas of each stage with one of some kinds, at least 1."""
        gathers = np.zeros((self.n_replicas, self.n_stages), dtype=bool)
        gathers[self.kinds.replica[own], self.kinds.stage[own]] = True
        shares: Ints = np.maximum(1, gathers.sum(axis=0) * self.options.n_equal)
        return shares

    @cached_property
    def peer_of_kind(self) -> Ints:
        """The kind at the other end of each kind of message, else -1; shape ``(len(kinds),)``."""
        return peer_kinds(self.kinds)

    @property
    def device_of_stage(self) -> Ints:
        """Device that holds each stage, of the first replica; shape ``(n_stages,)``."""
        first: Ints = self.homes[0]
        return first

    @cached_property
    def copies(self) -> Ints | None:
        """Kinds of each copy of the pipeline, in one order; None unless there are several copies.

        Kinds in a column differ in device, replica and stream alone. Shape ``(n_copies, n)``.
        """
        return copies_of_kinds(self)

    @cached_property
    def first_copy(self) -> FirstCopy | None:
        """The first of several copies alone, and the twin of each task; None if they differ."""
        return first_copy(self)

    @cached_property
    def precedence(self) -> CSR:
        """All tasks that must have begun or ended before a task can start, as CSR.

        - Dependencies, and the predecessor on the stream.
        - For a RECV, its SEND. With rendezvous, for a SEND, the predecessor of its RECV.
        - For a member of a collective, the tasks that the other members wait for: of each
          stream the last one.
        """
        return precedence(self)

    @cached_property
    def issued_first(self) -> CSR:
        """The tasks of other hosts that have to be issued before each, by threads (rule 7), as CSR.

        A stream can only wait for recorded events: those of the tasks of `precedence`, and of the
        earlier members of a collective.
        """
        return issued_first(self)

    @cached_property
    def levels(self) -> Ints:
        """Distance of each task from the first, in tasks; -1 for tasks that can never start."""
        return levels(self)


def reordered(graph: TaskGraph, order: Ints) -> TaskGraph:
    """Return the same tasks in the order of ``order``, which must be topological."""
    return TaskGraph.of_kinds(
        graph.kinds,
        graph.kind[order],
        graph.microbatch[order],
        group=graph.group[order],
        name=graph.name,
        host=graph.host,
        options=graph.options,
    )
