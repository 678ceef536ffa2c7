"""The dependency rules: which tasks need the end of which other tasks (rule 3 of docs/time.md).

This is the only copy. `pipesim.graph.dependencies` applies `RULES` to all tasks of a graph. The
executor derives the input of each task from `data_sources`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pipesim.ops import (
    EXCHANGES,
    EXPERT_EXCHANGES,
    KEPT,
    PASSES,
    Op,
    expert_exchange,
    is_expert_exchange,
)
from pipesim.scheduling.placement import Edges, skip_edges

#: The stages of the needed tasks: the one at the offset ``stage``, of the task's replica; those of
#: the task's group of tied stages on its device, of its replica; all those on its device, of all
#: replicas; the one at the offset, of all replicas that have it on the task's device.
Over = Literal["stage", "group", "device", "sharers"]


class Via(NamedTuple):
    """A task that delivers the result of another: a message, a reduction, an exchange.

    ``stage`` is an offset from the stage of the task that needs the result, as that of `Rule`.
    ``part`` is that of the delivering task, -1 if it has none.
    """

    op: Op
    stage: int = 0
    part: int = -1


class Rule(NamedTuple):
    """Tasks of ``ops`` need tasks of ``needs`` of the same replica and micro-batch."""

    ops: tuple[Op, ...]
    #: Alternatives, of which those in the graph apply.
    needs: tuple[Op, ...]
    #: Offset of the needed task's stage from that of the task: 0, -1 for the stage before, +1 for
    #: the stage after. Stages that are a graph may have several before and after, or none: the rule
    #: then stands for one rule an edge (`rule_of_edge`).
    stage: int = 0
    #: If one of these tasks is in the graph, the task needs it instead of ``needs``: the first in
    #: the graph counts. Other rules have the needs of the task of ``via``.
    via: tuple[Via, ...] = ()
    #: Whether the tasks of all micro-batches of the mini-batch are needed, or of the reduction if
    #: the stage reduces its gradients after every k micro-batches.
    every: bool = False
    #: Whether the rule stands for one rule a skip connection: the messages of all skips that reach
    #: the stage are needed. Stages that are a graph have no skips beside their edges.
    skips: bool = False
    #: Whether the rule stands for one a bucket of gradients: all buckets of ``via`` are needed.
    buckets: bool = False
    #: Stages, beside its own, whose tasks are needed by the task.
    over: Over = "stage"
    #: Whether the rule stands for one rule a group of tied stages. Its number is the part of
    #: REDUCE_TIED, in ``ops`` or ``needs``.
    tied: bool = False
    #: Part of the tasks that the rule is for, -1 for those without. None for tasks of any part, but
    #: of F, B and I only the first segment.
    part: int | None = None
    #: Part of the needed task; -1 if it has none, or for its last segment.
    needs_part: int = -1
    #: Whether the rule is a data edge: the result of the needed task, or of the task of ``via`` in
    #: its place, is the input of the task. Other rules only order tasks, or the task uses data of
    #: its stage or replica: activations, gradients, parameters. If two data edges apply to a task,
    #: the later rule in `RULES` delivers its input: F of a sharded stage needs the output of the
    #: stage before, but its input is the keys of its exchange.
    carries: bool = False
    #: Offset of the needed task's slice from that of the task: -1 for the slice before in the same
    #: sequence, +1 for the slice after; 0 for rules that need no other slice. Rules with an offset
    #: hold in graphs of several slices a sequence; the first or last slice needs none.
    slice: int = 0
    #: The only stage whose tasks have the need; -1 for all.
    of_stage: int = -1
    #: Whether the rule holds for decode steps alone: slices behind those of the prompt.
    decode: bool = False


_COUNTS, _KEYS, _VECTORS, _GRADIENTS, _ACCUMULATED = range(len(EXCHANGES))
_FORWARD, _BACKWARD = range(len(PASSES))
(_INPUT,) = range(len(KEPT))
#: The tasks that deliver the output of the stage before.
_OUTPUT = (
    Via(Op.RECV_F),
    Via(Op.REORDER, -1, _VECTORS),
    Via(Op.ALL_TO_ALL, -1, _VECTORS),
)
#: Rule 3 of docs/time.md.
RULES = (
    Rule((Op.F, Op.DISPATCH), (Op.F,), -1, _OUTPUT, carries=True),
    Rule(
        (Op.B, Op.I),
        (Op.B, Op.I),
        +1,
        (
            Via(Op.ALL_TO_ALL, 0, _GRADIENTS),
            Via(Op.REORDER, 0, _GRADIENTS),
            Via(Op.RECV_B),
        ),
        carries=True,
    ),
    Rule((Op.F,), (Op.RECV_F,), skips=True),
    Rule((Op.B, Op.I), (Op.RECV_B,), skips=True),
    Rule((Op.B, Op.I, Op.R), (Op.F,)),
    Rule((Op.B, Op.I), (Op.R,)),
    Rule((Op.W,), (Op.I,)),
    Rule(
        (Op.SEND_F,),
        (Op.F,),
        0,
        (Via(Op.REORDER, 0, _VECTORS), Via(Op.ALL_TO_ALL, 0, _VECTORS)),
        carries=True,
    ),
    Rule((Op.SEND_B,), (Op.B, Op.I), carries=True),
    Rule(
        (Op.ALL_TO_ALL,),
        (Op.F,),
        -1,
        (Via(Op.DISPATCH), *_OUTPUT),
        part=_COUNTS,
        carries=True,
    ),
    Rule((Op.ALL_TO_ALL,), (Op.ALL_TO_ALL,), part=_KEYS, needs_part=_COUNTS, carries=True),
    Rule((Op.F,), (Op.ALL_TO_ALL,), needs_part=_KEYS, carries=True),
    Rule((Op.ALL_TO_ALL,), (Op.F,), part=_VECTORS, carries=True),
    Rule((Op.REORDER,), (Op.ALL_TO_ALL,), part=_VECTORS, needs_part=_VECTORS, carries=True),
    Rule((Op.REORDER,), (Op.B, Op.I), +1, (Via(Op.RECV_B),), part=_GRADIENTS, carries=True),
    Rule(
        (Op.ALL_TO_ALL,),
        (Op.B, Op.I),
        +1,
        (Via(Op.REORDER, 0, _GRADIENTS), Via(Op.RECV_B)),
        part=_GRADIENTS,
        carries=True,
    ),
    Rule((Op.ALL_TO_ALL,), (Op.B, Op.W), every=True, part=_ACCUMULATED),
    Rule((Op.STEP,), (Op.ALL_TO_ALL,), needs_part=_ACCUMULATED),
    Rule((Op.REDUCE_GRAD,), (Op.B, Op.W), every=True, over="sharers"),
    Rule((Op.STEP,), (Op.B, Op.W), 0, (Via(Op.REDUCE_GRAD),), every=True, over="sharers"),
    Rule((Op.STEP,), (), 0, (Via(Op.REDUCE_GRAD),), buckets=True),
    Rule(
        (Op.REDUCE_TIED,),
        (Op.B, Op.W),
        0,
        (Via(Op.REDUCE_GRAD),),
        every=True,
        over="group",
        tied=True,
    ),
    Rule((Op.REDUCE_TIED,), (), 0, (Via(Op.REDUCE_GRAD),), buckets=True, over="group", tied=True),
    Rule((Op.STEP,), (Op.REDUCE_TIED,), over="group", tied=True),
    Rule((Op.GRAD_NORM,), (Op.B, Op.W), 0, (Via(Op.REDUCE_GRAD),), every=True, over="device"),
    Rule((Op.GRAD_NORM,), (), 0, (Via(Op.REDUCE_GRAD),), buckets=True, over="device"),
    Rule((Op.GRAD_NORM,), (Op.ALL_TO_ALL,), over="device", needs_part=_ACCUMULATED),
    Rule((Op.GRAD_NORM,), (Op.REDUCE_TIED,), over="device", tied=True),
    Rule((Op.STEP,), (Op.GRAD_NORM,), over="device"),
    Rule((Op.UNSHARD,), (Op.STEP,), part=-1),
    Rule((Op.F,), (Op.UNSHARD,), needs_part=_FORWARD),
    Rule((Op.R, Op.B, Op.I), (Op.UNSHARD,), needs_part=_BACKWARD),
    Rule((Op.RESHARD,), (Op.F,), part=_FORWARD),
    Rule((Op.RESHARD,), (Op.B, Op.I), part=_BACKWARD),
    Rule((Op.OFFLOAD,), (Op.F,)),
    Rule((Op.RELOAD,), (Op.OFFLOAD,), part=-1),
    Rule((Op.RELOAD,), (Op.OFFLOAD,), part=_INPUT, needs_part=_INPUT),
    Rule((Op.R, Op.B, Op.I), (Op.RELOAD,)),
    Rule((Op.R, Op.B, Op.I), (Op.RELOAD,), needs_part=_INPUT),
    Rule((Op.F,), (Op.F,), slice=-1),
    Rule((Op.B, Op.I), (Op.B, Op.I), slice=+1),
)


def segment_rules(n_segments: int) -> tuple[Rule, ...]:
    """Return the rules of stages with experts, whose F, B and I have at most so many segments.

    A segment needs the exchange before it, which needs the segment before that. The first segment
    has the rules of its operation, and tasks that need the operation need its last segment.
    """
    rules: list[Rule] = []
    for before in range(n_segments - 1):
        layer, second = divmod(before, 2)
        forward, backward = (
            expert_exchange(names[second], layer)
            for names in (EXPERT_EXCHANGES[:2], EXPERT_EXCHANGES[2:])
        )
        for op, exchange in ((Op.F, forward), (Op.B, backward), (Op.I, backward)):
            via = (Via(Op.ALL_TO_ALL, 0, exchange),)
            rules.append(
                Rule((op,), (op,), 0, via, part=before + 1, needs_part=before, carries=True)
            )
        for needs, exchange in (((Op.F,), forward), ((Op.B, Op.I), backward)):
            rules.append(
                Rule((Op.ALL_TO_ALL,), needs, part=exchange, needs_part=before, carries=True)
            )
    return tuple(rules)


def decode_rule(n_stages: int) -> Rule:
    """Return the rule that a decode step needs the token that the last stage has computed before.

    On another device the token comes as a message of the last stage to the first.
    """
    last = n_stages - 1
    via = (Via(Op.RECV_F, 0, last),)
    return Rule((Op.F,), (Op.F,), last, via, slice=-1, decode=True)


def rule_of_edge(rule: Rule, source: int, target: int) -> Rule:
    """Return a rule with a stage offset for an edge that is no step of a chain.

    It is for one stage: the target if the rule needs a stage before, the source if it needs one
    after. Such an edge has messages of its own, as a skip connection: their part is the stage at
    the other end.

    >>> rule = rule_of_edge(RULES[0], 0, 2)  # F needs F
    >>> rule.of_stage, rule.stage, rule.via[0]
    (2, -2, Via(op=<Op.RECV_F: 6>, stage=0, part=0))
    """
    stage, other = (target, source) if rule.stage < 0 else (source, target)
    via = tuple(
        x._replace(part=other)
        if x.op in PAIRS
        else x._replace(stage=other - stage if x.stage else 0)
        for x in rule.via
    )
    return rule._replace(stage=other - stage, via=via, of_stage=stage)


#: Operations whose parts have rules of their own.
PARTED = frozenset({Op.ALL_TO_ALL, Op.REORDER, Op.REDUCE_TIED, Op.UNSHARD, Op.RESHARD, Op.RELOAD})
#: The message that a RECV receives: ``(SEND, stage offset of its sender)``. The sender of a skip's
#: message is the peer stage.
PAIRS = {Op.RECV_F: (Op.SEND_F, -1), Op.RECV_B: (Op.SEND_B, +1)}


def data_sources(
    op: Op, part: int = -1, stage: int = 0, edges: Edges = ()
) -> tuple[tuple[tuple[Op, int, int], ...], ...]:
    """Return the tasks that can deliver a task's input, the preferred one first.

    The input is the result of the first of these tasks that is among the task's dependencies and
    has its micro-batch. The result has the operation of each, the offset of its stage from that of
    the task, and the stage at the other end of a message of an edge that is no step of a chain (-1
    for others). It is empty for RECV, which takes the result of its SEND (`PAIRS`), no dependency,
    and for operations that use data of their stage: R, W, STEP, UNSHARD, reductions, and exchanges
    of accumulated gradients.

    Stages that are a graph have ``edges``. The result then has one row an edge that brings a part
    of the input to the task's ``stage``, else a single row.

    >>> data_sources(Op.SEND_B)
    (((<Op.B: 1>, 0, -1), (<Op.I: 2>, 0, -1)),)
    """
    part = part if op in PARTED else -1
    own: tuple[Rule, ...] = RULES
    if is_expert_exchange(op, part):
        layer = (part - len(EXCHANGES)) // len(EXPERT_EXCHANGES)
        own = segment_rules(2 * layer + 3)
    rules = [r for r in own if r.carries and op in r.ops and r.part in (None, part)]
    rows = [rules]
    if edges:  # an edge is one to the stage if a rule needs a stage before, else one from it
        apart = skip_edges(edges)
        ends = {int(rule.stage < 0) for rule in rules if rule.stage}
        rows = [
            [rule_of_edge(r, *edge) if r.stage and edge in apart else r for r in rules]
            for edge in edges
            if any(edge[end] == stage for end in ends)
        ] or [[rule for rule in rules if not rule.stage]]
    return tuple(
        tuple(dict.fromkeys(
            source
            for rule in reversed(row)
            for source in (
                *((via.op, via.stage, via.part if via.op in PAIRS else -1) for via in rule.via),
                *((needed, rule.stage, -1) for needed in rule.needs),
            )
        ))
        for row in rows
    )  # fmt: skip
