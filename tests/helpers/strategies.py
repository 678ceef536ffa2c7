"""Hypothesis strategies that the tests share: schedules, graphs, costs, networks and noise."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

import pipesim as ps
from pipesim.costs.rows import MEASURED, STAGE_ROWS
from pipesim.errors import ArgumentError, PipeError
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.options import GRAD_SYNC
from pipesim.lowering.issue_order import ISSUE_ORDERS
from pipesim.ops import EXCHANGES, INPUT_GRADS, SENDS, TRANSFERS, Action, Op, Overlapped
from pipesim.scheduling.placement import LAYOUTS, Placement
from pipesim.scheduling.registry import schedule_info
from pipesim.scheduling.schedule import VERSIONS
from pipesim.simulation import Empirical, Failures, LogNormal, Normal

NAMES = sorted(ps.schedules().index)
#: Named schedules, and options that give their orders other kinds of tasks.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("1f1b", {"merged": True}),
    ("1f1b", {"merged": "delayed_w"}),
    ("interleaved_1f1b", {"merged": True}),
    ("interleaved_1f1b", {"merged": "delayed_w", "group_size": 3}),
]
#: Whole numbers make ties. The others are coarse enough that adding one always changes a time,
#: so that "the same moment" means one thing.
seconds = st.one_of(
    st.integers(0, 4).map(float),
    st.floats(1e-3, 1e3, allow_nan=False).map(lambda x: round(x, 9)),
)
#: One device has no messages, so that it is drawn more rarely than the rest.
device_counts = st.sampled_from([2, 3, 4, 2, 3, 4, 1])
replica_counts = st.sampled_from([1, 1, 1, 2, 3])
launches = st.sampled_from([0.0, 0.25, 1.0])
issue_orders = st.sampled_from(["clock_cycle", *ISSUE_ORDERS])
#: Fields of `Costs` that replace what the network says of collectives.
COLLECTIVE_SECONDS = tuple(MEASURED.values())
#: Options of `pipesim.lower` that are for sharded stages.
EXCHANGE_OPTIONS = ("exchange_work", "sparse_grad_sync", "prefetch_keys")
sizes = st.one_of(st.just(0.0), st.integers(1, 64).map(float))


def actions() -> st.SearchStrategy[Action]:
    """Any action: on a whole stage, messages of skips, buckets and exchanges included."""
    stages, microbatches = st.integers(0, 999), st.one_of(st.none(), st.integers(0, 9999))
    none, reduce, exchange = st.just(-1), st.just(Op.REDUCE_GRAD), st.just(Op.ALL_TO_ALL)
    return st.one_of(
        st.builds(Action, stages, st.sampled_from(Op), microbatches, none, none),
        st.builds(Action, stages, st.sampled_from(sorted(TRANSFERS)), microbatches, stages, none),
        st.builds(Action, stages, reduce, microbatches, none, st.integers(0, 99)),
        st.builds(Action, stages, st.just(Op.REDUCE_TIED), microbatches, none, st.integers(0, 99)),
        st.builds(Action, stages, exchange, microbatches, none, st.integers(0, 4)),
        st.builds(Action, stages, st.just(Op.REORDER), microbatches, none, st.integers(2, 3)),
        st.builds(
            Action,
            stages,
            st.sampled_from([Op.UNSHARD, Op.RESHARD]),
            microbatches,
            none,
            st.integers(0, 1),
        ),
        st.builds(
            Action, stages, st.sampled_from([Op.OFFLOAD, Op.RELOAD]), microbatches, none, st.just(0)
        ),
    )


def named_schedules(max_microbatches: int = 6) -> st.SearchStrategy[ps.Schedule]:
    """Every registered schedule, in small sizes that it allows."""
    counts = st.tuples(st.sampled_from(VARIANTS), device_counts, st.integers(1, max_microbatches))
    return counts.filter(lambda c: schedule_info(c[0][0]).allows(*c[1:], **c[0][1])).map(
        lambda c: ps.schedule(c[0][0], *c[1:], **c[0][1])
    )


@st.composite
def edges(draw: st.DrawFn, n_stages: int) -> list[tuple[int, int]] | None:
    """Edges that leave no stage alone; None, those of a chain, if there are few stages."""
    if n_stages < 3:
        return None
    source = [draw(st.integers(0, stage - 1)) for stage in range(1, n_stages)]
    pairs = {(a, b) for b, a in enumerate(source, 1) if draw(st.sampled_from([True, True, False]))}
    more = st.tuples(st.integers(0, n_stages - 2), st.integers(1, n_stages - 1))
    pairs |= {pair for pair in draw(st.lists(more, max_size=3)) if pair[0] < pair[1]}
    for stage in set(range(n_stages)).difference(*pairs):  # a stage alone
        pairs.add((stage, n_stages - 1) if stage < n_stages - 1 else (0, stage))
    return draw(st.permutations(sorted(pairs)))


@st.composite
def placements(draw: st.DrawFn, only_chains: bool = False) -> Placement:
    """Any placement; unless ``only_chains``, some have edges, most of those that share stages."""
    placement = draw(_chains())
    is_chain = only_chains or draw(st.sampled_from([True, not placement.shares_stages, False]))
    pairs = None if is_chain else draw(edges(placement.n_stages))
    return Placement(*placement.paths, edges=pairs)


@st.composite
def _chains(draw: st.DrawFn) -> Placement:
    """Linear, looped, V and bidirectional ones, and any other that leaves no device empty."""
    kind = draw(st.sampled_from(["linear", "looped", "v", "any", "bidirectional", "shared"]))
    n_devices = draw(device_counts)
    if kind == "linear":
        return ps.Placement.linear(n_devices)
    if kind == "looped":
        return ps.Placement.looped(n_devices, draw(st.integers(1, 2)))
    if kind == "v":
        return ps.Placement.v_shaped(n_devices)
    if kind == "bidirectional":
        return ps.Placement.bidirectional(2 * draw(st.integers(1, 2)))
    if kind == "shared":  # two or three paths, which share any stages
        number = st.integers(0, n_devices - 1)
        paths = [[draw(number) for _ in range(draw(st.sampled_from([3, 4, 3, 2, 1])))]]
        paths += [[draw(number) for _ in paths[0]] for _ in range(draw(st.integers(1, 2)))]
        names = sorted({device for path in paths for device in path})
        return Placement(*([names.index(device) for device in path] for path in paths))
    others = draw(st.lists(st.integers(0, n_devices - 1), max_size=3))
    return Placement(draw(st.permutations([*range(n_devices), *others])))


def needs(
    action: Action, halves: set[tuple[int, int]], placement: Placement, n_slices: int = 1
) -> list[Action]:
    """Return what a compute action needs (rule 3), implemented a second time on purpose."""
    stage, op, microbatch, *_ = action
    pairs = placement.edges or [(s, s + 1) for s in range(placement.n_stages - 1)]

    def gradient(stage: int, microbatch: int = microbatch) -> Action:
        return Action(stage, Op.I if (stage, microbatch) in halves else Op.B, microbatch)

    if op == Op.F:
        before = [Action(stage, Op.F, microbatch - 1)] if microbatch % n_slices else []
        return [*before, *(Action(a, Op.F, microbatch) for a, b in pairs if b == stage)]
    if op == Op.W:
        return [Action(stage, Op.I, microbatch)]
    if op == Op.R:
        return [Action(stage, Op.F, microbatch)]
    after = [gradient(b) for a, b in pairs if a == stage]
    after += [gradient(stage, microbatch + 1)] if (microbatch + 1) % n_slices else []
    return [Action(stage, Op.F, microbatch), *after]


@st.composite
def custom_schedules(
    draw: st.DrawFn,
    max_microbatches: int = 3,
    recomputes: bool = False,
    only_chains: bool = False,
) -> ps.Schedule:
    """Draw orders that can run: one order of all actions that breaks no rule, split by device.

    Each stage and micro-batch has its own choice of a whole backward (B) or a split one (I, W), and
    with ``recomputes`` of an R. Some have sequences of two slices.
    """
    placement = draw(placements(only_chains))
    n_microbatches = draw(st.integers(placement.n_paths, max_microbatches))
    n_slices = draw(st.sampled_from([1, 1, 1, 2]))
    if n_slices > 1:
        n_microbatches = n_slices * draw(st.integers(placement.n_paths, max(2, placement.n_paths)))
    path = placement.path_of(n_microbatches)
    cells = [(s, m) for s in range(placement.n_stages) for m in range(n_microbatches)]
    split = draw(st.sampled_from(["none", "all", "some"]))
    halves = set(cells if split == "all" else [])
    if split == "some":
        halves = {cell for cell in cells if draw(st.booleans())}
    again = {cell for cell in cells if draw(st.booleans())} if recomputes else set()
    everything = [
        Action(s, op, m)
        for s, m in cells
        for op in ((Op.F, Op.I, Op.W) if (s, m) in halves else (Op.F, Op.B))
    ] + [Action(s, Op.R, m) for s, m in sorted(again)]
    rank = {action: k for k, action in enumerate(draw(st.permutations(everything)))}
    waiting = {a: set(needs(a, halves, placement, n_slices)) for a in everything}
    for s, m in again:
        waiting[Action(s, Op.I if (s, m) in halves else Op.B, m)].add(Action(s, Op.R, m))
    ready = [(rank[a], a) for a in everything if not waiting[a]]
    heapq.heapify(ready)
    orders: list[list[Action]] = [[] for _ in range(placement.n_devices)]
    while ready:
        _, action = heapq.heappop(ready)
        orders[placement.paths[path[action.microbatch]][action.stage]].append(action)
        for other in everything:
            if action in waiting[other]:
                waiting[other].remove(action)
                if not waiting[other]:
                    heapq.heappush(ready, (rank[other], other))
    sizes = {"placement": placement, "n_microbatches": n_microbatches}
    schedule = ps.Schedule.from_orders(orders, **sizes).with_slices(n_slices)
    pick = draw(st.sampled_from(["plain", "overlapped", "batches"]))
    if pick == "overlapped":
        other = ps.Schedule.from_orders([draw(overlaps(order)) for order in orders], **sizes)
        other = other.with_slices(n_slices)
    elif pick == "batches":
        n_batches = draw(st.sampled_from([k for k in (1, 2, 3) if n_microbatches % k == 0]))
        other = schedule.with_updates(n_batches, draw(st.sampled_from(VERSIONS)))
    else:
        return schedule
    try:
        ps.verify(other)
    except PipeError:  # not every one can run
        return schedule
    return other


@st.composite
def overlaps(draw: st.DrawFn, order: list[Action]) -> list[Action | Overlapped]:
    """Overlap some of the Fs of an order with the B or I right after them."""
    joined: list[Action | Overlapped] = []
    for action in order:
        before = joined[-1] if joined else None
        pair = isinstance(before, Action) and before.op == Op.F and action.op in INPUT_GRADS
        if pair and draw(st.booleans()):
            joined[-1] = Overlapped(joined[-1], action)
        else:
            joined.append(action)
    return joined


def schedules(
    recomputes: bool = False, only_chains: bool = False
) -> st.SearchStrategy[ps.Schedule]:
    """Named and custom schedules; with ``recomputes`` some list R."""
    others = [custom_schedules(recomputes=True, only_chains=only_chains)] if recomputes else []
    return st.one_of(named_schedules(), custom_schedules(only_chains=only_chains), *others)


@st.composite
def lower_options(draw: st.DrawFn, schedule: ps.Schedule) -> dict[str, Any]:
    """Every mode of `pipesim.lower`, but for rendezvous on compute streams, which may deadlock."""
    overlap = draw(st.booleans())
    options = draw(replicated(schedule))
    may_end = schedule.n_batches == 1 or options["n_replicas"] == 1
    step = draw(st.sampled_from(["flush", "none"] if may_end else ["flush"]))
    forward_only = draw(st.sampled_from([False, False, False, True]))
    if forward_only and overlap and schedule.placement.n_paths == 1:
        options |= draw(decode_steps(schedule, options.get("sharded", [])))
    return {
        "recompute": draw(st.sampled_from(["listed", "never", "always", "except_last"])),
        "overlap": overlap,
        "streams": draw(st.sampled_from(["per_peer", "single", "per_microbatch"])),
        "rendezvous": overlap and draw(st.booleans()),
        "hosts": draw(hosts(schedule.n_devices * options["n_replicas"])),
        "host_threads": draw(st.booleans()),
        "issue_order": draw(issue_orders),
        "forward_only": forward_only,
        "step": step,
        "prefetch": draw(prefetches(schedule.n_devices)),
        **options,
        **draw(device_collectives(schedule, step, options)),
        **draw(experts(schedule, options)),
        **draw(offloads(schedule, options.get("sharded", []))),
    }


@st.composite
def decode_steps(
    draw: st.DrawFn, schedule: ps.Schedule, sharded: list[int] | int
) -> dict[str, Any]:
    """Slices of a prompt before decode steps, if sequences have slices and the order can run."""
    if sharded or schedule.n_slices == 1:
        return {}
    options = {"prompt_slices": draw(st.integers(0, 2))}
    try:
        ps.lower(schedule, forward_only=True, **options)
    except PipeError:
        return {}
    return options


@st.composite
def experts(draw: st.DrawFn, schedule: ps.Schedule, options: dict[str, Any]) -> dict[str, Any]:
    """Layers with experts of some stages, and replicas that exchange their tokens."""
    if schedule.placement.has_replicas or draw(st.booleans()):
        return {}
    counts = [st.just(0) if s in options.get("sharded", []) else st.sampled_from([0, 1, 2])
              for s in range(schedule.n_stages)]  # fmt: skip
    n = options["n_replicas"]
    groups = st.sampled_from([None, *(k for k in range(1, n + 1) if n % k == 0)])
    return {"expert_layers": [draw(count) for count in counts], "expert_replicas": draw(groups)}


def prefetches(n_devices: int) -> st.SearchStrategy[int | list[int]]:
    """Compute tasks that fetches run beside, of all devices or one number each."""
    one = st.sampled_from([1, 0, 2, 3])
    return st.one_of(one, st.lists(one, min_size=n_devices, max_size=n_devices))


@st.composite
def offloads(draw: st.DrawFn, schedule: ps.Schedule, sharded: list[int]) -> dict[str, Any]:
    """Activations to offload, in each form that `lower` takes, if any live long enough."""
    if draw(st.sampled_from([True, True, False])):
        return {}
    stages = [s for s in range(schedule.n_stages) if s not in sharded]
    one = st.sampled_from(["all", 0.25, 0.5, "longest:0.5", "above:2"])
    some = st.dictionaries(st.sampled_from(stages), one, min_size=1)
    options = {
        "offload": draw(st.one_of(one, some)),
        "prefetch": draw(prefetches(schedule.n_devices)),
        "offload_to": draw(st.sampled_from(["host", "peer"])),
    }
    for recompute in ("listed", "never", "always", "except_last"):
        try:
            ps.lower(schedule, recompute=recompute, sharded=sharded, **options)
        except ArgumentError:  # nothing lives long enough
            return {}
    return options


@st.composite
def device_collectives(
    draw: st.DrawFn, schedule: ps.Schedule, step: str, replicas: dict[str, Any]
) -> dict[str, Any]:
    """Groups of tied stages, and the norm of the gradients, that suit the schedule."""
    if schedule.n_batches > 1 or draw(st.booleans()):
        return {}
    dense = sorted(set(range(schedule.n_stages)) - set(replicas.get("sharded", [])))
    options: dict[str, Any] = {"grad_norm": step == "flush" and draw(st.booleans())}
    separate = not schedule.placement.shares_stages
    if len(dense) > 1 and separate and replicas.get("shard_parameters", "none") == "none":
        group = st.sets(st.sampled_from(dense), min_size=2, max_size=3).map(sorted)
        options["tied"] = draw(st.lists(group, max_size=2))
    return options


@st.composite
def hosts(draw: st.DrawFn, n_devices: int) -> str | list[int]:
    """One host, one a device, and sometimes fewer, in any order."""
    kind = draw(st.sampled_from(["one", "per_device", "some"]))
    if kind != "some":
        return kind
    drawn = draw(st.lists(st.integers(0, 2), min_size=n_devices, max_size=n_devices))
    return [sorted(set(drawn)).index(number) for number in drawn]


@st.composite
def replicated(draw: st.DrawFn, schedule: ps.Schedule) -> dict[str, Any]:
    """Number of replicas, and every way in which they work together that suits the schedule."""
    n_replicas, one_path = draw(replica_counts), schedule.placement.n_paths == 1
    options = {"n_replicas": n_replicas, "grad_sync": draw(grad_syncs(schedule))}
    if "bucketed" in str(options["grad_sync"]):
        options["n_buckets"] = draw(st.integers(1, 3))
    if n_replicas == 1:
        return options
    options["layout"] = draw(st.sampled_from(LAYOUTS))
    if schedule.n_batches == 1:
        options["shard_optimizer"] = draw(st.booleans())
        if options["shard_optimizer"] and one_path:
            times = ["after_step", "before_forward"]
            options["gather_parameters"] = draw(st.sampled_from(times))
    shards_rows = schedule.n_batches == 1 and one_path and not schedule.placement.edges
    if shards_rows and schedule.n_stages > 1 and draw(st.booleans()):
        stages = st.integers(0, schedule.n_stages - 2)
        options["sharded"] = sorted(draw(st.sets(stages, max_size=2)))
        if isinstance(options["grad_sync"], dict):  # what is sharded has none
            named = {k: v for k, v in options["grad_sync"].items() if k not in options["sharded"]}
            options["grad_sync"] = named or "last"
        if options["sharded"]:
            options["exchange_work"] = draw(st.sampled_from(["collective", "compute"]))
            options["sparse_grad_sync"] = draw(st.sampled_from(["every", "last"]))
            options["prefetch_keys"] = 0 in options["sharded"] and draw(st.booleans())
    shards = st.sampled_from(["none", "every", 1, 2, "step"])
    if schedule.n_batches == 1 and one_path and "bucketed" not in str(options["grad_sync"]):
        options["shard_parameters"] = "none" if options["shard_optimizer"] else draw(shards)
    return options


def grad_syncs(schedule: ps.Schedule) -> st.SearchStrategy[Any]:
    """When gradients are reduced: alike in all stages, or not, in each form that `lower` takes."""
    size = schedule.n_microbatches // schedule.n_batches
    every_k = [k for k in range(1, size + 1) if size % k == 0]
    if schedule.placement.n_paths > 1:
        every_k = [size]
    modes = [sync for sync in GRAD_SYNC if schedule.placement.n_paths == 1 or sync != "every"]
    one = st.sampled_from([*modes, *every_k])
    stages = st.integers(0, schedule.n_stages - 1)
    some = st.lists(one, min_size=schedule.n_stages, max_size=schedule.n_stages)
    return st.one_of(st.sampled_from(modes), one, some, st.dictionaries(stages, one, min_size=1))


#: A schedule, and how it is lowered.
Lowering = tuple[ps.Schedule, dict[str, Any]]


@st.composite
def lowerings(draw: st.DrawFn, only_chains: bool = False) -> Lowering:
    """Draw a schedule, and options of `pipesim.lower` that suit it."""
    schedule = draw(schedules(recomputes=True, only_chains=only_chains))
    return schedule, draw(lower_options(schedule))


@st.composite
def graphs(draw: st.DrawFn, only_chains: bool = False, **fixed: Any) -> ps.TaskGraph:
    """Lowered schedules; some options may be ``fixed``."""
    schedule, options = draw(lowerings(only_chains))
    return ps.lower(schedule, **with_fixed(options, fixed))


def with_fixed(options: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return options with some that are fixed, and without those that then do not apply.

    A list of hosts is for the replicas drawn; without sharded stages nothing says how they
    exchange. Sharded parameters do not suit one replica, buckets and tied stages. Replicas that
    have all experts together divide all. A whole optimizer gathers no parameters. Only forwards
    have decode steps.
    """
    if fixed.keys() & {"n_replicas", "grad_sync", "tied", "shard_optimizer"}:
        options = {**options, "shard_parameters": "none"}
    if "n_replicas" in fixed and isinstance(options["hosts"], list):
        options = {**options, "hosts": "per_device"}
    if fixed.get("n_replicas", 1) % (options.get("expert_replicas") or 1):
        options = {**options, "expert_replicas": None}
    options = {**options, **fixed}
    if not options.get("shard_optimizer"):
        options.pop("gather_parameters", None)
    if not options["forward_only"]:
        options.pop("prompt_slices", None)
    how = () if options.get("sharded") else EXCHANGE_OPTIONS
    return {name: value for name, value in options.items() if name not in how or name in fixed}


@st.composite
def linked_networks(draw: st.DrawFn, n_devices: int) -> ps.Network:
    """Uniform networks, and some in which links are shared by up to all pairs."""
    pairs = [(a, b) for a in range(n_devices) for b in range(n_devices) if a != b]
    owner = [draw(st.integers(-2, 1)) for _ in pairs]  # below 0: a link of its own
    groups = [[p for p, o in zip(pairs, owner, strict=True) if o == k] for k in (0, 1)]
    links = [ps.Link(draw(seconds), draw(bandwidths()), tuple(g)) for g in groups if g]
    return ps.Network(
        draw(seconds), draw(bandwidths()), tuple(links), host=draw(host_links()),
        interleaves=draw(st.booleans()),
    )  # fmt: skip


def host_links() -> st.SearchStrategy[ps.HostLink]:
    """Links to host memory, some of several devices."""
    return st.builds(ps.HostLink, st.sampled_from([0.0, 1.0]), bandwidths(), st.integers(1, 3))


@st.composite
def clusters(draw: st.DrawFn, n_devices: int = 3) -> ps.Network:
    """Draw nodes of one to four devices, and sometimes a link beside them."""
    per_node = draw(st.sampled_from([2, 1, 4]))
    speed = st.sampled_from([1.0, 2.0, 8.0, math.inf])
    nodes = ps.Nodes(
        per_node,
        port_latency=draw(st.sampled_from([0.0, 1.0])),
        port_bandwidth=draw(speed),
        nic_latency=draw(st.sampled_from([0.0, 3.0])),
        nic_bandwidth=draw(speed),
        n_nics=draw(st.sampled_from([k for k in (1, 2, 4) if per_node % k == 0])),
        collectives=draw(st.sampled_from([None, ps.NodeCollectives(2, 1, bandwidth=4, loss=0.5)])),
    )
    links = (ps.Link(5, 0.5, ((0, 1), (1, 2))),) if n_devices > 2 and draw(st.booleans()) else ()
    return ps.Network(links=links, nodes=nodes, host=draw(host_links()))


def networks(n_devices: int) -> st.SearchStrategy[ps.Network]:
    """Links of pairs, and nodes with ports and NICs."""
    return st.one_of(linked_networks(n_devices), clusters(n_devices))


def bandwidths() -> st.SearchStrategy[float]:
    """Endless, and such that messages last about as long as tasks."""
    return st.one_of(st.just(math.inf), st.sampled_from([1.0, 2.0, 3.0, 16.0, 100.0]))


@st.composite
def costs(draw: st.DrawFn, n_stages: int, n_devices: int) -> ps.Costs:
    """Costs of every operation, one for all stages or one a stage, with and without ties."""

    def values(one: st.SearchStrategy[float]) -> float | tuple[float, ...]:
        if draw(st.booleans()):
            return draw(one)
        return tuple(draw(one) for _ in range(n_stages))

    times = [name for name, row in STAGE_ROWS.items() if row.computes and not row.is_rare]
    limited = ("expert", "offload", "gradient")  # parts of others; or drawn below
    nbytes = [
        name
        for name, row in STAGE_ROWS.items()
        if row.unit == "bytes" and not name.startswith(limited)
    ]
    return ps.Costs(
        **{name: values(seconds) for name in times},
        **{name: values(sizes) for name in nbytes},
        **{name: values(seconds) for name in draw(st.sets(st.sampled_from(COLLECTIVE_SECONDS)))},
        launch=values(launches) if draw(st.booleans()) else 0.0,
        launch_by_op=draw(st.sampled_from([None, {"messages": 0.0, "STEP": 0.25}])),
        output_seconds=values(seconds) if draw(st.booleans()) else 0.0,
        gradient_bytes=values(sizes) if draw(st.booleans()) else None,
        network=draw(networks(n_devices)),
        all_reduce=draw(st.sampled_from(["ring", "tree", "fastest"])),
    )


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> tuple[ps.TaskGraph, ps.Costs]:
    """Return a graph, and costs that suit it; some options of `pipesim.lower` may be ``fixed``."""
    graph = draw(graphs(**fixed))
    drawn = draw(costs(graph.n_stages, graph.n_devices))
    if graph.tied:
        drawn = replace(drawn, tied_bytes=draw(sizes))
    if graph.sharded and draw(st.booleans()):
        drawn = replace(drawn, exchange_bytes=draw(uneven_bytes(graph)))
    n_buckets = int(graph.part[graph.op == Op.REDUCE_GRAD].max(initial=-1)) + 1
    if not n_buckets or draw(st.booleans()):
        return graph, drawn
    shares = st.sampled_from([0.0, 0.25, 0.3, 1.0])
    of_stage = [(1 / n_buckets, draw(shares)) for _ in range(n_buckets)]
    return graph, replace(drawn, buckets=[of_stage] * graph.n_stages)


@st.composite
def unequal_cases(draw: st.DrawFn, **fixed: Any) -> tuple[ps.TaskGraph, ps.Costs]:
    """Return a case whose micro-batches differ, or those of all replicas, in some fields."""
    graph, drawn = draw(cases(**fixed))
    n_copies = 1 + int(copy_of_replicas(graph.homes).max())
    n = graph.n_microbatches * draw(st.sampled_from([1, n_copies]))
    rows = draw(st.sampled_from([1, graph.n_stages]))
    names = st.sampled_from([name for name, row in STAGE_ROWS.items() if row.varies])
    changed = {}
    for name in draw(st.sets(names, min_size=1, max_size=4)):
        values = st.lists(sizes if name.endswith("bytes") else seconds, min_size=n, max_size=n)
        changed[name] = [draw(values) for _ in range(rows)]
    if "offload_bytes" in changed:  # at most the activations
        changed["activation_bytes"] = changed["offload_bytes"]
    return graph, replace(drawn, **changed)


@st.composite
def uneven_bytes(draw: st.DrawFn, graph: ps.TaskGraph) -> dict[int, dict[str, np.ndarray]]:
    """Bytes from replica to replica of some exchanges of the sharded stages."""
    n = graph.n_replicas
    matrices = st.lists(sizes, min_size=n * n, max_size=n * n).map(
        lambda values: np.reshape(values, (n, n))
    )
    names = st.sets(st.sampled_from(EXCHANGES))
    return {s: {name: draw(matrices) for name in draw(names)} for s in graph.sharded}


@st.composite
def skipping_cases(draw: st.DrawFn, **fixed: Any) -> tuple[ps.TaskGraph, ps.Costs]:
    """Return a graph with skip connections, and costs that suit it; options may be ``fixed``."""
    schedule = draw(schedules(only_chains=True))
    n = schedule.n_stages
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    some = st.lists(st.sampled_from(pairs), unique=True, max_size=4) if pairs else st.just([])
    skips = draw(some)
    portals = draw(st.booleans())
    options = with_fixed(draw(lower_options(schedule)), fixed)
    graph = ps.lower(schedule, skips=skips, portals=portals, **options)
    nbytes = draw(st.one_of(sizes, st.fixed_dictionaries(dict.fromkeys(skips, sizes))))
    return graph, replace(draw(costs(n, graph.n_devices)), skip_bytes=nbytes)


def distributions() -> st.SearchStrategy[Any]:
    """Every kind of distribution; some draw 0 now and then, which takes no time at all."""
    return st.one_of(
        st.sampled_from([0.0, 0.02, 0.5]).map(Normal),
        st.sampled_from([0.0, 0.02, 0.5]).map(LogNormal),
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=4)
        .filter(any)
        .map(Empirical),
    )


@st.composite
def noises(draw: st.DrawFn, graph: ps.TaskGraph) -> ps.Noise:
    """Noise of tasks, devices and messages, slow devices and links, and failures."""
    maybe = st.one_of(st.none(), distributions())
    by_op = st.dictionaries(st.sampled_from(["F", "B", "I", "W", "R", "STEP"]), distributions())
    devices, factors = st.integers(0, graph.n_devices - 1), st.sampled_from([0.5, 1.5, 2.0])
    sends = np.flatnonzero(graph.is_op(SENDS))
    ends = zip(graph.device[sends].tolist(), graph.device[graph.pair[sends]].tolist(), strict=True)
    pairs = sorted(set(ends))
    links = st.dictionaries(st.sampled_from(pairs), factors, max_size=3) if pairs else st.just({})
    return ps.Noise(
        seed=draw(st.integers(0, 2**64)),
        task=draw(st.one_of(maybe, by_op)),
        device=draw(maybe),
        message=draw(maybe),
        gpus_per_device=draw(st.sampled_from([1, 2, 8])),
        slow_devices=draw(st.dictionaries(devices, factors, max_size=2)),
        slow_links=draw(links),
        failures=draw(st.sampled_from([None, Failures(every=8, pause=5)])),
    )
