"""`CallPlan`: the tasks of a forward and its backward, planned once for all calls of one form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeexec.executor.plan import plan
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.gpipe.arguments import Switches
from pipeexec.gpipe.backward_order import PartitionTask
from pipeexec.gpipe.partition import Runtime
from pipeexec.gpipe.partition_tasks import PARTITIONS
from pipeexec.gpipe.skip import Key
from pipeexec.stages.microbatches import BatchShares
from pipesim.graph.graph import TaskGraph
from pipesim.graph.skips import border_crossings
from pipesim.lowering.lower import lower
from pipesim.ops import RECVS, SENDS, Action, Op
from pipesim.scheduling.autograd_engine import newest_first
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule

#: Names of streams that compute: a separate stream of the device, or the calling thread.
COMPUTE, CALLER = "compute", "caller"


class Message(NamedTuple):
    """The RECV of a SEND, and the skips that it carries; None for outputs or their gradients."""

    recv: PlannedTask
    skips: frozenset[Key] | None


class CallPlan(NamedTuple):
    """Planned tasks of a forward and its backward.

    Attributes
    ----------
    graph
        A graph of these tasks. Its order does not count: streams run tasks as they are issued.
    forward
        F and its messages, in the order in which the host issues them.
    issued
        Each F, R and B, followed by the SENDs of its results.
    received
        The RECVs that each F, R and B waits for.
    messages, senders
        What each SEND sends, by its number; the partition that sends to each RECV, by its number.
    """

    graph: TaskGraph
    forward: Sequence[PlannedTask]
    issued: dict[PartitionTask, list[PlannedTask]]
    received: dict[PartitionTask, list[PlannedTask]]
    messages: dict[int, Message]
    senders: dict[int, int]


def make_call_plan(
    runtime: Runtime, recomputed: Sequence[bool], tracked: Sequence[int], stream: str
) -> CallPlan:
    """Return the plan of calls whose tasks compute on the stream of each device of that name."""
    switches, n = runtime.switches, len(runtime.stages)
    graph = forward_backward_graph(n, recomputed, [], runtime.skips.values(), switches)
    shares = BatchShares(graph, runtime.devices)
    planned = plan(graph, runtime.stages, runtime.devices, shares, [PARTITIONS])
    if stream == CALLER:  # it runs all tasks and messages as they are issued
        planned = [x._replace(stream=x.device.stream(CALLER), waits=()) for x in planned]
    ends = border_crossings(runtime.skips.values(), switches.portals)
    keys = list(runtime.skips)
    skips = {hop: frozenset(keys[k] for k in members) for hop, members in ends.items()}
    issued: dict[PartitionTask, list[PlannedTask]] = {}
    received: dict[PartitionTask, list[PlannedTask]] = {}
    for task in planned:
        op = Op(graph.op[task.id])
        if op not in SENDS | RECVS:
            cell = op, task.microbatch, task.stage.index
            issued[cell] = [task]
            needed = sorted(graph.dependencies[task.id].tolist())
            received[cell] = [planned[t] for t in needed if graph.op[t] in RECVS]
    for op, i, j in received if switches.recompute_waits else ():
        if op == Op.R:  # its stream receives the gradient first
            received[op, i, j] = received[Op.B, i, j]
    messages: dict[int, Message] = {}
    for task in planned:
        if (op := Op(graph.op[task.id])) in SENDS:
            recv, j = planned[graph.pair[task.id]], task.stage.index
            if op == Op.SEND_B and recv.stage.index not in tracked:
                continue
            hop = min(j, recv.stage.index), max(j, recv.stage.index)
            has_skips = graph.peer_stage[task.id] >= 0
            messages[task.id] = Message(recv, skips[hop] if has_skips else None)
            issued[Op.F if op == Op.SEND_F else Op.B, task.microbatch, j].append(task)
    senders = {message.recv.id: int(graph.stage[send]) for send, message in messages.items()}
    forward = [task for task in planned if graph.op[task.id] in (Op.F, Op.SEND_F, Op.RECV_F)]
    return CallPlan(graph, forward, issued, received, messages, senders)


def forward_backward_graph(
    n_partitions: int,
    recomputed: Sequence[bool],
    backward: Iterable[PartitionTask],
    skips: Iterable[tuple[int, int]],
    switches: Switches,
) -> TaskGraph:
    """Return the tasks of a forward and a backward, its R and B in the order of ``backward``.

    A partition without tasks needs no gradient. It gets the tasks of the order that the
    dependencies give.
    """
    microbatches = range(len(recomputed))
    orders: list[list[Action]] = [[] for _ in range(n_partitions)]
    for op, i, j in backward:
        orders[j].append(Action(j, op, i))
    default = newest_first([(i, 0) for i in microbatches], recomputed)
    schedule = Schedule.from_orders(
        [
            [Action(j, Op.F, i) for i in microbatches]
            + (order or [Action(j, op, i) for op, i, _ in default])
            for j, order in enumerate(orders)
        ],
        placement=Placement.linear(n_partitions),
        name="gpipe",
    )
    pairs = set(skips)
    return lower(
        schedule,
        overlap=switches.copy_streams,
        # Both ends of a skip's message could wait for ever: other messages come between.
        rendezvous=not switches.copy_streams and not (switches.portals and pairs),
        streams=switches.streams,
        hosts=switches.hosts,
        host_threads=switches.hosts != "one",
        step="none",
        skips=pairs,
        portals=switches.portals,
        recompute_waits=switches.recompute_waits,
    )
