"""Apply the dependency rules to all tasks of a graph.

A *kind* is all tasks that differ only in their micro-batch. Every task has a *cell*, a number: the
base of its kind, plus its micro-batch, plus 1, so that a task on a whole stage (micro-batch -1) has
one too. `kind_rules` turns the rules of `pipesim.graph.rules` into tables of the bases that a kind
needs. `_wire` adds the micro-batch of each task to find the cells of the tasks that it needs.
Overlapped actions and fetches need tasks beside those of the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.options import Prefetch, Tied, prefetch_by_device
from pipesim.graph.rules import (
    PAIRS,
    PARTED,
    RULES,
    Rule,
    Via,
    decode_rule,
    rule_of_edge,
    segment_rules,
)
from pipesim.graph.tasks import Kinds, ListedTasks
from pipesim.ops import EXPERT_EXCHANGES, FETCHES, INPUT_GRADS, SEGMENTED, Op, expert_exchange
from pipesim.scheduling.placement import Edges, follows_previous, skip_edges
from pipesim.utils.csr import CSR, Ints, ids_dtype
from pipesim.utils.jit import kernel

#: Padding for rules that have fewer `Via` than others: an operation that no kind has.
_NO_VIA = Via(op=-1)  # type: ignore[arg-type]
#: Tables of the last graphs, which others of the same kinds use again, and their largest number.
_kept: dict[tuple[object, ...], tuple[KindRules, int]] = {}
_MOST_KEPT = 32


class KindRules(NamedTuple):
    """The rules of each kind, as bases of cells; -1 for none.

    A rule of `RULES` is in the table once for each kind that it applies to. The rules of a kind
    have consecutive rows, in the order of `RULES`.
    """

    #: Base of each kind, and of the kind at the other end of a message; shape ``(n_kinds,)``.
    base: Ints
    pair: Ints
    #: Kind ``k`` has the rules ``ptr[k]`` to ``ptr[k + 1]``; shape ``(n_kinds + 1,)``.
    ptr: Ints
    #: Bases of the kinds needed in place of ``needs``, of which the first in the graph counts;
    #: shape ``(n_rules, most)``.
    via: Ints
    #: Bases of the needed kinds; shape ``(n_rules, 2)``.
    needs: Ints
    #: Which micro-batches are needed: 0 for the task's own, 1 for several, up to the task's. 2
    #: where the task of ``via`` is of several too, one for each ``group``. 3 for the slice before
    #: in the same sequence, 4 for the slice after, 5 for the slice before that of a decode step.
    #: Shape ``(n_rules,)``.
    every: Ints
    #: Number of those micro-batches: all of a mini-batch, or of a reduction; shape ``(n_rules,)``.
    span: Ints
    #: Micro-batches of one reduction of the task's stage, 0 for all of a mini-batch; shape
    #: ``(n_rules,)``.
    group: Ints
    #: Most tasks that one task of each kind needs; shape ``(n_kinds,)``.
    most: Ints


def kind_rules(
    kinds: Kinds,
    width: int,
    batch_size: int,
    groups: Ints | None,
    tied: Tied = (),
    has_slices: bool = False,
    decodes: bool = False,
    edges: Edges = (),
) -> tuple[KindRules, int]:
    """Return `RULES` as tables of bases for the kinds of a graph, and the number of cells.

    Parameters
    ----------
    width
        Cells of a kind: the number of micro-batches, and 1 for tasks on a whole stage.
    batch_size
        Micro-batches of a mini-batch.
    groups
        As `TaskGraph.reduction_groups`; None for 0.
    has_slices
        Whether micro-batches are slices of sequences. Otherwise the tables have no `Rule.slice`.
    decodes
        Whether later slices are decode steps.
    edges
        As `pipesim.Placement.edges`.

    Examples
    --------
    The rule "F needs F of the stage before, or its RECV_F instead", for two stages on two devices
    and 2 micro-batches. There are four kinds; with 3 cells each, their bases are 0, 3, 6 and 9 in
    the order of operation and stage.

    >>> import numpy as np
    >>> from pipesim.graph.tasks import StreamKind
    >>> op = np.array([Op.F, Op.F, Op.SEND_F, Op.RECV_F])
    >>> device = stage = np.array([0, 1, 0, 1])
    >>> kinds = Kinds(op, device, stage, np.zeros(4, int), np.full(4, StreamKind.COMPUTE))
    >>> tables, n_cells = kind_rules(kinds, 3, batch_size=2, groups=None)
    >>> tables.base.tolist(), n_cells
    ([0, 3, 6, 9], 12)

    Kind 0 (0F) has no rule, as no stage is before it. Kind 1 (1F) has this rule: it needs kind 0,
    or kind 3 (1RECV_F) instead if that is in the graph. The other columns of ``via`` are for
    exchanges, which these kinds lack.

    >>> tables.ptr.tolist()
    [0, 0, 1, 2, 2]
    >>> tables.needs[0].tolist(), tables.via[0].tolist()
    ([0, -1], [9, -1, -1, -1])

    The cell of task 1F1 is 3 + 1 + 1. It needs the task in cell 9 + 1 + 1: 1RECV_F1.
    """
    columns = [kinds.op, kinds.stage, kinds.replica, kinds.peer_stage, kinds.part]
    shared = None if groups is None else groups.tobytes()
    if tied or kinds.shares_stages or (kinds.op == Op.GRAD_NORM).any():
        columns.append(kinds.device)
    options = (width, batch_size, shared, tied, has_slices, decodes, edges)
    key = (*options, *(column.tobytes() for column in columns))
    tables = _kept.get(key)
    if tables is None:
        for oldest in list(_kept)[: max(0, len(_kept) - _MOST_KEPT + 1)]:  # threads share them
            _kept.pop(oldest, None)
        tables = _tables(kinds, width, batch_size, groups, tied, has_slices, decodes, edges)
        _kept[key] = tables
    return tables


def _tables(
    kinds: Kinds,
    width: int,
    batch_size: int,
    groups: Ints | None,
    tied: Tied,
    has_slices: bool,
    decodes: bool,
    edges: Edges,
) -> tuple[KindRules, int]:
    """Return `kind_rules`, made anew."""
    part = np.maximum(kinds.peer_stage, kinds.part)  # no kind has both
    n_peers = 1 + max(map(max, edges), default=-1)  # stages that a rule may name as peers
    if decodes:
        n_peers = int(kinds.stage.max()) + 1
    cells = _cells(kinds, part, width, n_peers)
    base = cells[kinds.op, kinds.replica, kinds.stage + 1, part]
    own_part = np.where(kinds.is_op(PARTED | SEGMENTED), part, -1)
    last = kinds.is_op(SEGMENTED) & (part >= 0) & kinds.completes
    cells[kinds.op[last], kinds.replica[last], kinds.stage[last] + 1, -1] = base[last]
    sums = kinds.part[kinds.op == Op.REDUCE_TIED]
    tied = tied[: 1 + int(sums.max(initial=-1))]
    rules = _expanded_rules(kinds, len(tied), has_slices, decodes, edges)
    applicable = np.zeros((len(rules), len(Op), cells.shape[-1]), dtype=bool)
    for k, (rule, _) in enumerate(rules):
        applicable[k, rule.ops, slice(None) if rule.part is None else rule.part] = True
        if rule.part is None:  # of segments, the first alone
            applicable[k, sorted(SEGMENTED), 1:-1] = False
    of_stage = np.array([rule.of_stage for rule, _ in rules], dtype=np.int64)[:, None]
    is_stage = (of_stage < 0) | (of_stage == kinds.stage)
    number, kind = np.nonzero(applicable[:, kinds.op, own_part] & is_stage)
    needs_columns, via_columns = _rule_columns([rule for rule, _ in rules])
    number, kind, replica, own_stage = _with_stages(kinds, rules, number, kind, tied)
    first_op, second_op, offset, needs_part = needs_columns[number].T
    stage = own_stage + 1
    via_op, via_offset, via_part = np.moveaxis(via_columns[number], 2, 0)
    needed = np.minimum(stage + offset, cells.shape[2] - 1)  # beyond the last stage is none
    via_stage = stage[:, None] + via_offset
    if edges:  # steps of the chain that are no edges; no kind has stage -1
        follows = np.pad(follows_previous(edges, int(kinds.stage.max()) + 1), (1, 1))
        needed[~follows[np.maximum(stage, needed)] & (abs(offset) == 1)] = 0
        other = np.maximum(stage[:, None], via_stage)
        via_stage[~follows[other] & (abs(via_offset) == 1)] = 0
    via = cells[via_op, replica[:, None], via_stage, via_part]
    needs = cells[np.stack([first_op, second_op]), replica, needed, needs_part].T
    if kinds.shares_stages:  # a reduction has the gradients of all replicas that share the stage
        whole = (kinds.op == Op.REDUCE_GRAD) & (kinds.part < 0)
        is_reduced = np.isin(own_stage, kinds.stage[whole])
        is_reduced &= (via_op == Op.REDUCE_GRAD).any(axis=1)
        needs[is_reduced & ~kinds.holds[replica, own_stage]] = -1
    skips = np.array([rule.skips and Op.RECV_F in rule.needs for rule, _ in rules], bool)[number]
    needs[skips & (needs_part >= own_stage)] = -1  # the token of a decode step is no skip
    every = np.array([rule.every for rule, _ in rules], dtype=np.int64)[number]
    reduces = np.array([Op.REDUCE_GRAD in rule.ops for rule, _ in rules], dtype=bool)[number]
    group = np.zeros_like(kind) if groups is None else groups[own_stage]
    # 2: the task of via is of each group of micro-batches too.
    every[(every > 0) & ~reduces & (group > 0)] = 2
    span = np.where(reduces & (group > 0), group, batch_size)
    to_slice = np.array([rule.slice for rule, _ in rules], dtype=np.int64)[number]
    every[to_slice < 0], every[to_slice > 0] = 3, 4
    every[np.array([rule.decode for rule, _ in rules], dtype=bool)[number]] = 5
    applies = np.flatnonzero((needs.max(axis=1) >= 0) | (via.max(axis=1) >= 0))
    by_kind = CSR.group(kind[applies], len(kinds))
    order = applies[by_kind.values]
    via, needs = map(np.ascontiguousarray, (via[order], needs[order]))
    every, span, group = every[order], span[order], group[order]
    most = np.maximum(
        (needs >= 0).sum(axis=1) * np.where((every == 1) | (every == 2), width - 1, 1),
        (via >= 0).any(axis=1) * np.where(every == 2, width - 1, 1),
    )
    most = np.bincount(kind[order], most, len(kinds)).astype(np.int64)
    tables = KindRules(
        base, _pairs(kinds, cells), by_kind.ptr, via, needs, every, span, group, most
    )
    return tables, int(cells.max(initial=-1)) + width


def peer_kinds(kinds: Kinds) -> Ints:
    """Return the kind at the other end of each kind of message, shape ``(n_kinds,)``.

    -1 for other kinds, and for messages whose other end is not in the graph.
    """
    part = np.maximum(kinds.peer_stage, kinds.part)
    cells = _cells(kinds, part, 1)
    kind = np.full(int(cells.max(initial=-1)) + 2, -1, dtype=np.int64)  # the last is for none
    kind[cells[kinds.op, kinds.replica, kinds.stage + 1, part]] = np.arange(len(kinds))
    return kind[_pairs(kinds, cells)]


def _cells(kinds: Kinds, part: Ints, width: int, n_peers: int = 0) -> NDArray[np.int64]:
    """Return the base of each operation, replica, stage + 1, and peer or part; -1 for no kind.

    Kinds that differ in device or stream share theirs. The last operation and the last part, -1,
    have no kind. Peers may be any of ``n_peers`` stages.
    """
    n_stages, n_replicas = (int(x.max(initial=0)) + 1 for x in (kinds.stage, kinds.replica))
    last = int(kinds.part[kinds.is_op(SEGMENTED)].max(initial=-1))
    of_experts = expert_exchange(EXPERT_EXCHANGES[0], last // 2 + 1)
    n_parts = max(int(part.max(initial=-1)) + 1, of_experts, n_peers)
    cells = np.zeros((len(Op) + 1, n_replicas, n_stages + 2, n_parts + 1), np.int64)
    cells[kinds.op, kinds.replica, kinds.stage + 1, part] = 1
    return np.where(cells > 0, (np.cumsum(cells).reshape(cells.shape) - 1) * width, -1)


def _with_stages(
    kinds: Kinds, rules: Sequence[tuple[Rule, int]], number: Ints, kind: Ints, tied: Tied
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return one row for each stage whose tasks a kind may need by a rule (`Rule.over`).

    ``number`` and ``kind`` are pairs of rule and kind. The result has the columns number, kind, and
    replica and stage of the needed tasks; to the stage, the offset of the rule is yet to be added.
    """
    alone = ["stage"] if kinds.shares_stages else ["stage", "sharers"]
    over = np.array([rule.over not in alone for rule, _ in rules], dtype=bool)[number]
    replica, stage = kinds.replica[kind], kinds.stage[kind]
    if not over.any():
        return number, kind, replica, stage
    homes = kinds.homes
    on_device = CSR.group(homes.ravel(), int(kinds.device.max()) + 1)
    counts = np.where(over, np.diff(on_device.ptr)[kinds.device[kind]], 1)
    row = np.repeat(np.arange(len(number)), counts)
    replicas, stages = replica[row], stage[row]
    cells = on_device.gather(kinds.device[kind[over]])
    replicas[over[row]], stages[over[row]] = np.divmod(cells, homes.shape[1])
    member = np.zeros((len(tied) + 1, homes.shape[1]), dtype=bool)  # of groups; none in the last
    for group, of_group in enumerate(tied):
        member[group, list(of_group)] = True
    numbers = np.array([group if rule.over == "group" else -1 for rule, group in rules])
    own = numbers[number[row]]
    in_group = member[own, stages] & member[own, stage[row]] & (replicas == replica[row])
    sharers = np.array([rule.over == "sharers" for rule, _ in rules], dtype=bool)[number[row]]
    kept = np.where(sharers, stages == stage[row], (own < 0) | in_group)
    return number[row][kept], kind[row][kept], replicas[kept], stages[kept]


def _expanded_rules(
    kinds: Kinds, n_tied: int, has_slices: bool, decodes: bool, edges: Edges
) -> list[tuple[Rule, int]]:
    """Return `RULES` and the group of tied stages of each, -1 for none.

    Rules between slices are left out unless ``has_slices``, that of decode steps unless
    ``decodes``.

    One rule for each skip, each bucket and each group stands in place of one for all. A rule for a
    skip or a bucket has its number as ``needs_part`` and as the part of its ``via``. With ``edges``
    there are none for skips, but one for each edge that is no step of the chain.
    """
    peers, buckets = (
        np.unique(column[(column >= 0) & kinds.is_op(ops)]).tolist()
        for column, ops in (
            (kinds.peer_stage, frozenset(Op)),
            (kinds.part, frozenset({Op.REDUCE_GRAD})),
        )
    )
    in_graph = set(kinds.op.tolist())
    rules: list[tuple[Rule, int]] = []
    segments = kinds.is_op(SEGMENTED) & (kinds.part >= 0)
    all_rules = RULES + segment_rules(1 + int(kinds.part[segments].max(initial=0)))
    n_stages = 1 + int(kinds.stage.max(initial=0))
    all_rules += (decode_rule(n_stages),) * (decodes and n_stages > 1)
    for rule, group in [pair for one in all_rules for pair in _rules_of_groups(one, n_tied)]:
        needs = {*rule.needs, *(via.op for via in rule.via)}
        is_absent = in_graph.isdisjoint(rule.ops) or in_graph.isdisjoint(needs)
        if is_absent or (rule.slice and not has_slices):
            continue
        if not (rule.skips or rule.buckets):
            rules.append((rule, group))
        if rule.stage:
            rules.extend((rule_of_edge(rule, *edge), group) for edge in skip_edges(edges))
        skips = peers if rule.skips and not edges else ()
        for number in [*skips, *(buckets if rule.buckets else ())]:
            via = tuple(x._replace(part=number) for x in rule.via)
            rules.append((rule._replace(needs_part=number, via=via), group))
    return rules


def _rules_of_groups(rule: Rule, n_tied: int) -> list[tuple[Rule, int]]:
    """Return a rule for each group of tied stages and its number; other rules with -1."""
    if not rule.tied:
        return [(rule, -1)]
    if Op.REDUCE_TIED in rule.ops:
        return [(rule._replace(part=group), group) for group in range(n_tied)]
    return [(rule._replace(needs_part=group), group) for group in range(n_tied)]


def _rule_columns(rules: Sequence[Rule]) -> tuple[Ints, Ints]:
    """Return the needs and the ``via`` of each rule as numbers.

    - Needs: two operations, of which -1 stands for none, then stage and part. Shape
      ``(n_rules, 4)``.
    - ``via``: the fields of each `Via`, with `_NO_VIA` for rules that have fewer. Shape
      ``(n_rules, n_via, 3)``.
    """
    n_via = max(len(rule.via) for rule in RULES)
    needs = [(*(*rule.needs, -1, -1)[:2], rule.stage, rule.needs_part) for rule in rules]
    vias = [(*rule.via, *[_NO_VIA] * n_via)[:n_via] for rule in rules]
    return (
        np.array(needs, dtype=np.int64).reshape(-1, 4),
        np.array(vias, dtype=np.int64).reshape(-1, n_via, 3),
    )


def _pairs(kinds: Kinds, cells: NDArray[np.int64]) -> Ints:
    """Return the base of the kind at the other end of each kind of message; -1 for other kinds."""
    pair = np.full(len(kinds), -1, dtype=np.int64)
    for recv, (send, offset) in PAIRS.items():
        for op, other, step in ((recv, send, offset), (send, recv, -offset)):
            kind = np.flatnonzero(kinds.op == op)
            stage, peer = kinds.stage[kind], kinds.peer_stage[kind]
            other_stage, other_peer = np.where(peer < 0, [stage + step, peer], [peer, stage])
            pair[kind] = cells[other, kinds.replica[kind], other_stage + 1, other_peer]
    return pair


def apply_rules(
    kinds: Kinds,
    kind: Ints,
    microbatch: Ints,
    batch_size: int,
    stream_of_kind: Ints,
    groups: Ints,
    tied: Tied = (),
    n_slices: int = 1,
    prompt_slices: int = 0,
    edges: Edges = (),
) -> tuple[CSR, Ints]:
    """Apply `RULES`; return the tasks that each task needs before it can start, and pairs.

    An overlapped F needs the dependencies of its B too. ``groups`` are as
    `TaskGraph.reduction_groups`; ``tied``, ``n_slices``, ``prompt_slices`` and ``edges`` as
    attributes of `TaskGraph`.
    """
    if not len(kind):
        return CSR(np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64)), np.empty(0, np.int64)
    n_microbatches = int(microbatch.max(initial=-1)) + 1
    rules, index, counts, _ = _indexed(
        kinds, kind, microbatch, n_microbatches, batch_size, groups, tied, n_slices > 1,
        prompt_slices > 0, edges,
    )  # fmt: skip
    most = int(counts @ rules.most)
    dtype = ids_dtype(max(len(kind), most))
    ptr, pair = np.zeros(len(kind) + 1, dtype=dtype), np.empty(len(kind), dtype=dtype)
    values = np.empty(most, dtype=dtype)
    slices = n_slices, prompt_slices
    total = _wire(kind, microbatch, index, n_microbatches, slices, rules, ptr, values, pair)
    return with_starts(CSR(ptr, values[:total]), kinds, kind, stream_of_kind), pair


def duplicate_task(
    kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32], n_microbatches: int
) -> int:
    """Return a task with the operation, stages, micro-batch and replica of another, or -1."""
    *_, duplicate = _indexed(kinds, kind, microbatch, n_microbatches)
    return duplicate


def _indexed(
    kinds: Kinds,
    kind: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    n_microbatches: int,
    batch_size: int = 1,
    groups: Ints | None = None,
    tied: Tied = (),
    has_slices: bool = False,
    decodes: bool = False,
    edges: Edges = (),
) -> tuple[KindRules, Ints, Ints, int]:
    """Return the rules of kinds, each cell's task, tasks of each kind, and a duplicate or -1."""
    rules, n_cells = kind_rules(
        kinds, n_microbatches + 1, batch_size, groups, tied, has_slices, decodes, edges
    )
    index = np.full(n_cells, -1, dtype=ids_dtype(len(kind)))
    counts = np.zeros(len(kinds), dtype=np.int64)
    return rules, index, counts, _index_tasks(kind, microbatch, rules.base, index, counts)


@kernel()
def _index_tasks(kind: Ints, microbatch: Ints, base: Ints, index: Ints, counts: Ints) -> int:
    """Fill ``index`` (comes in as -1) and ``counts`` (of each kind); return a duplicate or -1."""
    duplicate = -1
    for task in range(len(kind)):
        own = kind[task]
        counts[own] += 1
        cell = base[own] + microbatch[task] + 1
        if index[cell] < 0:
            index[cell] = task
        elif duplicate < 0:
            duplicate = index[cell]
    return duplicate


@kernel()
def _wire(
    kind: Ints,
    microbatch: Ints,
    index: Ints,
    n_microbatches: int,
    slices: tuple[int, int],
    rules: KindRules,
    ptr: Ints,
    values: Ints,
    pair: Ints,
) -> int:
    """Fill dependencies (CSR) and pairs; return the number of dependencies.

    - A task on a whole stage has the number of the last micro-batch of its mini-batch, or none if
      there is one mini-batch.
    - ``slices`` are ``n_slices`` and ``prompt_slices``. Slice ``j`` of a sequence has a number that
      leaves ``j`` when divided by ``n_slices``.

    It is one loop: compiled code counts references to each column that a helper gets, task by task.
    """
    total, (n_slices, prompt_slices) = 0, slices
    for task in range(len(kind)):
        own, column = kind[task], microbatch[task] + 1
        for rule in range(rules.ptr[own], rules.ptr[own + 1]):
            every = rules.every[rule]
            last, first = column + 1, column
            if every >= 3:
                offset = 1 if every == 4 else -1
                at_end = (microbatch[task] + (offset > 0)) % n_slices == 0
                if at_end or column + offset > n_microbatches:
                    continue
                if every == 5 and microbatch[task] % n_slices < prompt_slices:
                    continue
                last, first = last + offset, first + offset
            elif every:
                last = 1 + (n_microbatches if column == 0 else column)
                first = 1 if column == 0 else max(1, column - rules.span[rule] + 1)
            before = total
            source = first if every >= 3 else column
            for choice in range(rules.via.shape[1]) if every != 2 else range(0):
                if rules.via[rule, choice] >= 0 and total == before:
                    needed = index[rules.via[rule, choice] + source]
                    if needed >= 0:
                        values[total] = needed
                        total += 1
            if total > before:
                continue
            instead = rules.via[rule, 0] if every == 2 else -1
            size = max(1, rules.group[rule])
            # Reductions have the number of the last micro-batch of their group.
            for cell in range(first + size - 1, last, size) if instead >= 0 else range(0):
                if index[instead + cell] >= 0:
                    values[total] = index[instead + cell]
                    total += 1
            for choice in range(2):
                base = rules.needs[rule, choice]
                for cell in range(first, last) if base >= 0 else range(0):
                    ends = cell + (first - cell - 1) % size  # its group
                    if instead >= 0 and ends < last and index[instead + ends] >= 0:
                        continue
                    if index[base + cell] >= 0:
                        values[total] = index[base + cell]
                        total += 1
        ptr[task + 1] = total
        pair[task] = -1
        if rules.pair[own] >= 0:
            pair[task] = index[rules.pair[own] + column]
    return total


# Overlapped actions: an F and a B or I that run as one (``OVERLAP_F_B``), and their dependencies.
#
# They are two consecutive tasks on a stream. Both start when both can start, and the results of
# both are ready when both have ended.


def overlapped_pairs(kinds: Kinds, kind: Ints, stream_of_kind: Ints) -> tuple[Ints, Ints]:
    """Return the F and the backward halves of overlapped actions; incomplete if unpaired.

    The backward of an overlapped F is the B or I after it on its stream.
    """
    halves = np.flatnonzero((kinds.overlapped > 0)[kind])
    halves = halves[np.argsort(stream_of_kind[kind[halves]], kind="stable")]
    first, second = halves[:-1], halves[1:]
    is_pair = (
        (stream_of_kind[kind[first]] == stream_of_kind[kind[second]])
        & (kinds.op[kind[first]] == Op.F)
        & kinds.is_op(INPUT_GRADS)[kind[second]]
    )
    return first[is_pair], second[is_pair]


def with_starts(needs: CSR, kinds: Kinds, kind: Ints, stream_of_kind: Ints) -> CSR:
    """Add to each overlapped F the dependencies of its backward: it starts when both can."""
    if not kinds.overlapped.any():
        return needs
    forward, backward = overlapped_pairs(kinds, kind, stream_of_kind)
    rows = np.repeat(forward, np.diff(needs.ptr)[backward])
    return _joined(needs, rows, needs.gather(backward))


def with_ends(needs: CSR, kinds: Kinds, kind: Ints, stream_of_kind: Ints) -> CSR:
    """Add to each task that needs an overlapped F its backward: results come at the end."""
    if not kinds.overlapped.any():
        return needs
    forward, backward = overlapped_pairs(kinds, kind, stream_of_kind)
    end_of = np.full(len(kind), -1, dtype=np.int64)
    end_of[forward] = backward
    ends = end_of[needs.values]
    later = (ends >= 0) & (ends != needs.rows)
    return _joined(needs, needs.rows[later], ends[later])


def _joined(needs: CSR, rows: Ints, values: Ints) -> CSR:
    """Append values to rows of a CSR, without duplicates."""
    all_rows = np.concatenate([needs.rows, rows])
    all_values = np.concatenate([needs.values, values])
    _, first = np.unique(all_rows * np.int64(len(needs)) + all_values, return_index=True)
    first = np.sort(first)
    return CSR.from_pairs(all_rows[first], all_values[first], len(needs))


# Fetches: RELOAD and UNSHARD bring data that a compute task needs, and start shortly before it.
#
# A fetch with ``prefetch=k`` needs the compute task that comes k + 1 places before its consumer on
# the consumer's device. So it runs while the k tasks before the consumer run::
#
#     prefetch=1   compute | 0B2  1B0  0B3 |      0RELOAD3 needs 0B2,
#                  reload  |      0RELOAD3 |      and runs while 1B0 runs
#
# A fetch without such a task starts as soon as its stream and its other dependencies allow. An
# UNSHARD also needs the RESHARD of its stage before it, which frees the memory that it gathers
# into. UNSHARDs of a sharded optimizer are no fetches: their memory is there throughout.


def with_fetches(needs: CSR, kinds: Kinds, kind: Ints, prefetch: Prefetch) -> CSR:
    """Add to each fetch the compute task that its start waits for.

    ``needs`` are those by the rules. The consumer of a fetch is the first task that needs it.
    """
    if kinds.ops.isdisjoint(FETCHES):
        return needs
    is_fetch = ((kinds.op == Op.RELOAD) | kinds.gathers_shards)[kind]
    order = ListedTasks.by_device(kinds, kind)
    place = np.full(len(kind), -1, dtype=np.int64)
    place[order.tasks] = order.place
    tasks = order.first
    device = kinds.device[kind[tasks]]
    used = np.flatnonzero(is_fetch[needs.values] & (place[needs.rows] >= 0))
    consumer = np.full(len(kind), len(tasks), dtype=np.int64)
    np.minimum.at(consumer, needs.values[used], place[needs.rows[used]])
    rows = np.flatnonzero(consumer < len(tasks))
    home = device[consumer[rows]]
    before = consumer[rows] - 1
    before -= prefetch_by_device(prefetch, int(kinds.device.max()) + 1, len(kind))[home]
    same = before >= np.searchsorted(device, home)
    rows, before = rows[same], tasks[before[same]]
    gathers, frees = _freed_before(kinds, kind)
    return CSR.from_pairs(
        np.concatenate([needs.rows, rows, gathers]),
        np.concatenate([needs.values, before, frees]),
        len(kind),
    )


def _freed_before(kinds: Kinds, kind: Ints) -> tuple[Ints, Ints]:
    """Return the UNSHARDs that come after a RESHARD of their stage and replica, and the latter."""
    gathers = kinds.gathers_shards
    tasks = np.flatnonzero((gathers | (kinds.op == Op.RESHARD))[kind])
    own = kind[tasks]
    cell = kinds.replica[own] * (int(kinds.stage.max(initial=0)) + 1) + kinds.stage[own]
    order = np.argsort(cell, kind="stable")
    tasks, cell, own = tasks[order], cell[order], own[order]
    pairs = np.flatnonzero(gathers[own[1:]] & ~gathers[own[:-1]] & (cell[1:] == cell[:-1]))
    return tasks[pairs + 1], tasks[pairs]
