"""A second implementation of the rules in docs/time.md, to check every engine's answer.

Given a finished timeline, each start and end must be exactly what the rules make of the others.
This needs no event loop, so that it shares nothing with an engine but the rules.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np

import pipesim as ps
from pipesim.costs import TaskCosts
from pipesim.graph import Tasks
from pipesim.ops import EXCHANGES, LISTED, Action, Op


def dependencies(graph: ps.TaskGraph) -> list[set[int]]:
    """Return what each task of a lowered graph needs, from rules 3 and 4 alone.

    Of a bucket of gradients, this includes the backward that it needs a part of.
    """
    tasks = list(graph)
    size = graph.n_microbatches // graph.n_batches
    ids = {(task.replica, task.action): task.id for task in tasks}
    of_stage: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for task in tasks:
        of_stage[task.replica, task.stage].append(task)
    #: Tasks of the stage of each replica, and of all others that have it on the same device.
    of_shared = {
        (r, s): [t for other in range(graph.n_replicas) for t in of_stage[other, s]
                 if graph.homes[other, s] == graph.homes[r, s]]
        for r, s in list(of_stage)
    }  # fmt: skip
    needs: list[set[int]] = []
    for task in tasks:
        _, op, device, _, stage, m, replica, _, part = task

        def any_of(
            s: int, *ops: Op, m: int | None = m, r: int = replica, part: int = -1, peer: int = -1
        ) -> set[int]:
            actions = [(r, Action(s, op, m, peer, part)) for op in ops]
            return {ids[action] for action in actions if action in ids}

        def exchange(name: str, s: int, any_of: Any = any_of) -> set[int]:
            return any_of(s, Op.ALL_TO_ALL, part=EXCHANGES.index(name))

        def skipped(
            *ops: Op, m: int | None = m, r: int = replica, s: int = stage, later: bool = False
        ) -> set[int]:
            """Return messages of skips; RECV_F of ``later`` stages are tokens of decode steps."""
            return {
                t.id for t in of_stage[r, s]
                if t.microbatch == m and t.op in ops and t.peer_stage >= 0
                and (t.op != Op.RECV_F or (t.peer_stage > s) == later)
            }  # fmt: skip

        def of_batch(*ops: Op, m: int | None = m, r: int = replica, s: int = stage) -> set[int]:
            batch = range(graph.n_microbatches) if m is None else range(m + 1 - size, m + 1)
            last: dict[tuple[Op, int | None], int] = {}
            for t in of_shared.get((r, s), ()):
                if t.op in (Op.B, Op.W):  # of segments the last
                    last[t.op, t.microbatch] = max(t.part, last.get((t.op, t.microbatch), -1))
            return {
                t.id for t in of_shared.get((r, s), ())
                if t.op in ops and (t.microbatch is None or t.microbatch in batch)
                and t.part == last.get((t.op, t.microbatch), t.part)
            }  # fmt: skip

        def complete(r: int, s: int, of_batch: Any = of_batch) -> set[int]:
            needed = of_batch(Op.REDUCE_GRAD, r=r, s=s) or of_batch(Op.B, Op.W, r=r, s=s)
            if (graph.part[list(needed)] >= 0).any():  # buckets need a part of the backward
                needed = needed | of_batch(Op.B, Op.W, r=r, s=s)
            return needed

        def sums(
            of_stage: bool, device: int = device, r: int = replica, s: int = stage
        ) -> set[int]:
            return {
                t.id for t in tasks
                if t.op == Op.REDUCE_TIED and t.device == device
                and (not of_stage or (t.replica == r and s in graph.tied[t.part]))
            }  # fmt: skip

        def whole(s: int, *ops: Op, m: int | None = m, r: int = replica) -> set[int]:
            """Return the last segments of a stage's actions."""
            own = [t for t in of_stage[r, s] if t.op in ops and t.microbatch == m]
            last = max((t.part for t in own), default=-1)
            return {t.id for t in own if t.part == last}

        def reorder(name: str, s: int = stage, any_of: Any = any_of) -> set[int]:
            return any_of(s, Op.REORDER, part=EXCHANGES.index(name))

        def output_of(
            s: int, any_of: Any = any_of, exchange: Any = exchange, reorder: Any = reorder
        ) -> set[int]:
            return reorder("vectors", s) or exchange("vectors", s) or whole(s, Op.F)

        edges = graph.edges or [(s, s + 1) for s in range(graph.n_stages - 1)]
        arrived, gradient = set[int](), set[int]()
        for source, target in edges:
            peer_of = {source: target, target: source} if target > source + 1 else {}
            if target == stage:
                message = any_of(stage, Op.RECV_F, peer=peer_of.get(stage, -1))
                arrived |= message or output_of(source)
            if source == stage:
                message = any_of(stage, Op.RECV_B, peer=peer_of.get(stage, -1))
                gradient |= message or whole(target, Op.B, Op.I)
        if op in (Op.F, Op.B, Op.I) and part > 0:
            layer, second = divmod(part - 1, 2)
            kind = 4 * layer + second + (0 if op == Op.F else 2)
            needed = any_of(stage, Op.ALL_TO_ALL, part=len(EXCHANGES) + kind)
        elif op == Op.ALL_TO_ALL and part >= len(EXCHANGES):
            layer, kind = divmod(part - len(EXCHANGES), 4)
            before = (Op.F,) if kind < 2 else (Op.B, Op.I)
            needed = any_of(stage, *before, part=2 * layer + kind % 2)
        elif op == Op.F:
            needed = arrived | skipped(Op.RECV_F) | exchange("keys", stage)
            needed = needed | any_of(stage, Op.UNSHARD, part=0)
            if m % graph.n_slices:  # the slice before
                needed |= whole(stage, Op.F, m=m - 1)
            last = graph.n_stages - 1
            if not stage and 0 < graph.prompt_slices <= m % graph.n_slices:  # a decode step
                token = skipped(Op.RECV_F, m=m - 1, later=True)
                needed |= (
                    token if graph.homes[replica, last] != device else whole(last, Op.F, m=m - 1)
                )
        elif op == Op.ALL_TO_ALL:
            needed = {
                "counts": any_of(stage, Op.DISPATCH) or arrived,
                "keys": exchange("counts", stage),
                "vectors": whole(stage, Op.F),
                "gradients": reorder("gradients") or gradient,
                "accumulated": of_batch(Op.B, Op.W),
            }[EXCHANGES[part]]
        elif op == Op.DISPATCH:
            needed = arrived
        elif op == Op.REORDER:
            needed = {"vectors": exchange("vectors", stage), "gradients": gradient}[EXCHANGES[part]]
        elif op in (Op.B, Op.I):
            after = exchange("gradients", stage) or reorder("gradients") or gradient
            needed = after | whole(stage, Op.F) | any_of(stage, Op.R) | skipped(Op.RECV_B)
            needed |= any_of(stage, Op.RELOAD) | any_of(stage, Op.RELOAD, part=0)
            needed |= any_of(stage, Op.UNSHARD, part=1)
            if (m + 1) % graph.n_slices:  # the slice after
                needed |= whole(stage, Op.B, Op.I, m=m + 1)
        elif op == Op.R:
            needed = whole(stage, Op.F) | any_of(stage, Op.RELOAD)
            needed |= any_of(stage, Op.RELOAD, part=0) | any_of(stage, Op.UNSHARD, part=1)
        elif op == Op.W:
            needed = whole(stage, Op.I)
        elif op == Op.SEND_F:
            needed = output_of(stage)
        elif op == Op.SEND_B:
            needed = whole(stage, Op.B, Op.I)
        elif op == Op.STEP:
            needed = complete(replica, stage) | exchange("accumulated", stage) | sums(of_stage=True)
            needed |= {t.id for t in tasks if t.op == Op.GRAD_NORM and t.device == device}
        elif op == Op.REDUCE_TIED:
            local = [s for s in graph.tied[part] if graph.homes[replica, s] == device]
            needed = set().union(*(complete(replica, s) for s in local))
        elif op == Op.GRAD_NORM:
            needed = sums(of_stage=False)
            for r, s in np.argwhere(graph.homes == device).tolist():
                exchanged = any_of(s, Op.ALL_TO_ALL, r=r, part=EXCHANGES.index("accumulated"))
                needed |= complete(r, s) | exchanged
        elif op == Op.REDUCE_GRAD:
            sync = graph.grad_sync[stage] if isinstance(graph.grad_sync, tuple) else graph.grad_sync
            k = {"every": 1, "last": size, "bucketed": size}.get(sync, sync)
            needed = of_batch(Op.B, Op.W)
            if m is not None:
                needed = {task for task in needed if m - k < graph.microbatch[task] <= m}
        elif op == Op.UNSHARD and part < 0:
            needed = any_of(stage, Op.STEP)
        elif op == Op.OFFLOAD:
            needed = whole(stage, Op.F)
        elif op == Op.RELOAD:
            uses = any_of(stage, Op.R, Op.B, Op.I) | any_of(stage, Op.B, Op.I, part=0)
            needed = any_of(stage, Op.OFFLOAD, part=part) | _fetched_after(graph, uses)
        elif op == Op.UNSHARD:
            uses = any_of(stage, *((Op.F,) if part == 0 else (Op.R, Op.B, Op.I)))
            uses |= any_of(stage, *((Op.F,) if part == 0 else (Op.B, Op.I)), part=0)
            frees = [t.id for t in of_stage[replica, stage] if t.op == Op.RESHARD]
            before = max((free for free in frees if free < len(needs)), default=None)
            needed = _fetched_after(graph, uses) | ({before} - {None}) if frees else set()
        elif op == Op.RESHARD:
            needed = whole(stage, *((Op.F,) if part == 0 else (Op.B, Op.I)))
        else:
            needed = set()
        needs.append(needed)
    return _with_overlaps(graph, needs)


def _fetched_after(graph: ps.TaskGraph, uses: set[int]) -> set[int]:
    """Return the compute task that comes prefetch + 1 places before the first use of a fetch."""
    (device,) = {int(graph.device[use]) for use in uses}
    places = list[list[int]]()
    for task in np.flatnonzero(graph.is_op(LISTED) & (graph.device == device)).tolist():
        if graph.op[task] in (Op.B, Op.I) and graph.kinds.overlapped[graph.kind[task]]:
            places[-1].append(task)
        else:
            places.append([task])
    place = min(number for number, tasks in enumerate(places) if uses & set(tasks))
    prefetch = graph.prefetch
    before = place - 1 - (prefetch[device] if isinstance(prefetch, tuple) else prefetch)
    return {places[before][0]} if before >= 0 else set()


def _with_overlaps(graph: ps.TaskGraph, needs: list[set[int]]) -> list[set[int]]:
    """Halves of one action start together, and what they compute is there at its end."""
    halves = [k for k in range(len(graph)) if graph.kinds.overlapped[graph.kind[k]]]
    ends = {}
    for forward in (k for k in halves if graph.op[k] == Op.F):
        partners = [k for k in halves if graph.device[k] == graph.device[forward] and k > forward]
        ends[forward] = min(partners)
        needs[forward] = needs[forward] | needs[ends[forward]]
    return [
        needed | {end for forward, end in ends.items() if forward in needed and end != k}
        for k, needed in enumerate(needs)
    ]


def waited_for(graph: ps.TaskGraph) -> list[set[int]]:
    """Return the tasks whose events each task's stream waits for (rule 7)."""
    needs = dependencies(graph)
    for queue in (graph.queues[k].tolist() for k in range(len(graph.queues))):
        for before, task in itertools.pairwise(queue):
            needs[task].add(before)
    own = [set(needed) for needed in needs]
    for task in range(len(graph)):
        if graph.op[task] in (Op.RECV_F, Op.RECV_B):
            needs[task].add(int(graph.pair[task]))
        if graph.op[task] in (Op.SEND_F, Op.SEND_B) and graph.rendezvous:
            # A RECV needs no data but its message: that its stream reaches it.
            needs[task] |= own[graph.pair[task]]
        if graph.group[task] >= 0:
            members = np.flatnonzero(graph.group == graph.group[task]).tolist()
            needs[task] |= {member for member in members if member < task}
            needs[task] = needs[task].union(*(own[member] for member in members))
    return needs


def issue_times(graph: ps.TaskGraph, costs: TaskCosts) -> np.ndarray:
    """Return when its host has issued each task (rule 7)."""
    clock = {int(host): 0.0 for host in graph.host}
    issued = np.zeros(len(graph))
    before = waited_for(graph) if graph.host_threads else []
    for task in range(len(graph)):
        host = int(graph.host[graph.device[task]])
        for first in before[task] if graph.host_threads else ():
            if graph.host[graph.device[first]] != host:
                clock[host] = max(clock[host], issued[first])
        clock[host] += costs.launch[task]
        issued[task] = clock[host]
    return issued


def holders_with(graph: ps.TaskGraph, costs: TaskCosts, task: int) -> list[int]:
    """Return the tasks that hold links from one moment on, for which ``task`` asks; or none."""
    if graph.op[task] in (Op.SEND_F, Op.SEND_B, Op.OFFLOAD, Op.RELOAD):
        return [task] if costs.duration[task] > 0 else []
    if graph.group[task] < 0:
        return []
    members = np.flatnonzero(graph.group == graph.group[task])
    asks = task == members[0] and (costs.duration[members] > 0).all()
    return members.tolist() if asks else []


def assert_rules_hold(timeline: ps.Timeline, costs: TaskCosts) -> None:
    """Check every start and end with ``==``."""
    graph, start, end = timeline.graph, timeline.start, timeline.end
    n = len(graph)
    reached = issue_times(graph, costs)  # rule 7
    for queue in (graph.queues[k].tolist() for k in range(len(graph.queues))):
        for before, task in itertools.pairwise(queue):
            reached[task] = max(reached[task], end[before])  # rule 1
    for task in range(n):
        needed = graph.dependencies[task].tolist()
        free = {k: end[k] for k in needed}
        if graph.op[task] == Op.REDUCE_GRAD and graph.part[task] >= 0:  # rule 3
            last = max(needed)
            free[last] = start[last] + costs.share[task] * costs.duration[last]
        reached[task] = max([reached[task], *free.values()])  # rule 2
    wanted = reached.copy()
    for task in range(n):
        if graph.op[task] in (Op.SEND_F, Op.SEND_B) and graph.rendezvous:
            wanted[task] = max(reached[task], reached[graph.pair[task]])  # rule 6
        if graph.group[task] >= 0:
            wanted[task] = reached[graph.group == graph.group[task]].max()  # rule 9
    free: dict[int, float] = {}
    for task in sorted(range(n), key=lambda t: (wanted[t], t)):  # rule 8
        together = holders_with(graph, costs, task)
        links = {k: set(costs.links[k].tolist()) - {-1} for k in together}
        needed = set().union(*links.values())
        wanted[together] = max([wanted[task], *(free.get(link, 0.0) for link in needed)])
        for k in together:
            until = wanted[k] + costs.duration[k]
            free.update({link: max(until, free.get(link, 0.0)) for link in links[k]})
    for task in range(n):
        label = f"{graph.task(task)} (task {task})"
        if graph.op[task] in (Op.RECV_F, Op.RECV_B):  # rule 4
            send, latency = graph.pair[task], costs.latency[task]
            assert start[task] == max(reached[task], start[send] + latency), label
            assert end[task] == max(start[task], end[send] + latency), label
        else:
            assert start[task] == wanted[task], label
            assert end[task] == start[task] + costs.duration[task], label


def all_reduced(**options: Any) -> ps.TaskGraph:
    """Return two stages on two devices, whose gradients are reduced together at the end."""
    actions = ["0F0", "1F0", "1B0", "0B0", "0REDUCE_GRAD", "1REDUCE_GRAD"]
    parsed = [Action.parse(action) for action in actions]
    columns = (
        [int(a.op) for a in parsed],
        [a.stage for a in parsed],  # stage i is on device i
        [a.stage for a in parsed],
        [-1 if a.microbatch is None else a.microbatch for a in parsed],
        [0] * len(parsed),  # all on compute
    )
    tasks = Tasks(*(np.array(column, dtype=np.int64) for column in columns))
    return ps.TaskGraph.build(tasks, group=np.array([-1, -1, -1, -1, 7, 7]), **options)
