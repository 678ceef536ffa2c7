"""Operations, sets of operations, and `Action`: one operation of one stage on one micro-batch.

`Overlapped` is two actions that run as one.

The letters and the text form are those of torch.distributed.pipelining. Beware: papers on zero
bubble write B for the gradient of the input alone, which is ``I`` here and in torch. Over 300
lines: sets with their reasons and docstrings are most of it.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any, NamedTuple

from pipesim.errors import ArgumentError, suggestion


class Op(IntEnum):
    """The operation of a task. Graphs store its value in their ``op`` column.

    Attributes
    ----------
    F
        Forward of one micro-batch through one stage.
    B
        Full backward: gradients of input and weights.
    I, W
        Split backward: gradient of the input, and gradients of the weights.
    R
        Recompute of a forward whose activations were dropped.
    SEND_F, RECV_F
        Message with the output of a stage, to the next stage or along a skip connection.
    SEND_B, RECV_B
        Message with the gradient of the input of a stage, to the previous stage.
    REDUCE_GRAD
        Reduction of the gradients of a stage over its replicas.
    ALL_TO_ALL
        Exchange of a sharded embedding, or of experts' tokens.
    STEP
        Optimizer step of one stage.
    UNSHARD, RESHARD
        Gather, and free, the parameters of a sharded stage.
    DISPATCH
        Keys of a sharded embedding are grouped by owner.
    REORDER
        Vectors of a sharded embedding are put in order, or gradients of each key are summed.
    REDUCE_TIED
        Sum of the gradients of tied stages.
    GRAD_NORM
        Norm of all gradients.
    OFFLOAD, RELOAD
        Copy of activations of one micro-batch to host memory or another device, and back.

    See Also
    --------
    pipesim.Action : Operation of one stage on one micro-batch.
    pipesim.TaskGraph.is_op : Tasks of some operations.

    Examples
    --------
    >>> import pipesim as ps
    >>> ps.Op.F, str(ps.Op["SEND_F"]), int(ps.Op.B)
    (<Op.F: 0>, 'SEND_F', 1)
    """

    F = 0
    B = 1
    I = 2  # noqa: E741 - torch's letter for the gradient of the input
    W = 3
    R = 4
    SEND_F = 5
    RECV_F = 6
    SEND_B = 7
    RECV_B = 8
    REDUCE_GRAD = 9
    ALL_TO_ALL = 10
    STEP = 11
    UNSHARD = 12
    DISPATCH = 13
    REORDER = 14
    REDUCE_TIED = 15
    GRAD_NORM = 16
    RESHARD = 17
    OFFLOAD = 18
    RELOAD = 19

    def __str__(self) -> str:
        return self.name


#: Operations that a schedule lists for every stage and micro-batch.
SCHEDULED = frozenset({Op.F, Op.B, Op.I, Op.W})
#: Operations that add to the gradients of the weights.
WEIGHT_GRADS = frozenset({Op.B, Op.W})
#: Operations that compute the gradient of a stage's input.
INPUT_GRADS = frozenset({Op.B, Op.I})
#: Operations that a schedule may list; `pipesim.lower` adds all others.
LISTED = SCHEDULED | {Op.R}
#: Operations on a device's compute stream.
COMPUTE = LISTED | {Op.STEP, Op.DISPATCH, Op.REORDER, Op.RESHARD}
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECVS = frozenset({Op.RECV_F, Op.RECV_B})
TRANSFERS = SENDS | RECVS
#: Copies of activations to the memory of the host or of another device, and back.
COPIES = frozenset({Op.OFFLOAD, Op.RELOAD})
#: Operations that bring data which a compute task needs. They start a number of compute tasks
#: before it (`pipesim.graph.dependencies`).
FETCHES = frozenset({Op.UNSHARD, Op.RELOAD})
#: Operations of several devices together: all start when the last device is ready (rule 9).
COLLECTIVES = frozenset({Op.REDUCE_GRAD, Op.ALL_TO_ALL, Op.UNSHARD, Op.REDUCE_TIED, Op.GRAD_NORM})
#: Collectives with one member a device, which stands for several stages: REDUCE_TIED for those of a
#: group of tied stages, of one replica; GRAD_NORM for all stages of the device. The member has the
#: number of the lowest of these stages. GRAD_NORM has the lowest replica of its device.
OF_DEVICES = frozenset({Op.REDUCE_TIED, Op.GRAD_NORM})
#: Collectives between devices of one replica. The members of others are of all replicas.
IN_REPLICA = frozenset({Op.REDUCE_TIED})
#: Operations that may be on a whole stage, without a micro-batch.
OF_STAGES = COLLECTIVES | {Op.STEP}
#: Contents of an ALL_TO_ALL of a sharded embedding, by its `part`, in this order for each
#: micro-batch. "accumulated", once a mini-batch, replaces the "gradients" of all micro-batches.
EXCHANGES = ("counts", "keys", "vectors", "gradients", "accumulated")
#: Exchanges of experts' tokens, further parts of ALL_TO_ALL, with a number from 0 for each layer in
#: the order in which they run: before and after the experts of a layer, forward; and those of the
#: gradients of both, backward.
EXPERT_EXCHANGES = ("dispatch", "combine", "combine_grad", "dispatch_grad")
#: Operations that a stage with experts runs in segments, numbered from 0 as their `part`. Exchanges
#: of experts lie between them.
SEGMENTED = frozenset({Op.F, Op.B, Op.I})
#: The exchanges whose values a REORDER puts in order: its `part`, numbered as they are.
REORDERED = ("vectors", "gradients")
#: Uses of the parameters that an UNSHARD gathers for one micro-batch and a RESHARD frees, by their
#: `part`: F, or the backward. An UNSHARD without part follows a sharded STEP.
PASSES = ("forward", "backward")
#: Activations that an OFFLOAD or a RELOAD moves, by its `part`: the input alone, of a micro-batch
#: that is recomputed. Without part it moves the stage's share of all of them.
KEPT = ("input",)
#: Operations whose `part` is any number from 0: buckets of gradients, groups of tied stages,
#: segments.
NUMBERED = frozenset({Op.REDUCE_GRAD, Op.REDUCE_TIED}) | SEGMENTED

#: Names of the parts of operations, by `part`; parts of others are numbers.
PART_NAMES = {
    Op.ALL_TO_ALL: EXCHANGES,
    Op.REORDER: EXCHANGES,
    Op.UNSHARD: PASSES,
    Op.RESHARD: PASSES,
    Op.OFFLOAD: KEPT,
    Op.RELOAD: KEPT,
}
_ACTION = re.compile(
    r"\s*([0-9]+)([A-Z](?:[A-Z_]*[A-Z])?)([0-9]*)(?:([<>])([0-9]+)|\.([0-9]+|[a-z_]+[0-9]*))?\s*"
)
_OVERLAPPED = re.compile(r"\s*\(([^();]*);([^();]*)\)OVERLAP_F_B\s*")


class Action(NamedTuple):
    """One operation of one stage on one micro-batch; ``str`` and `parse` are inverse.

    Attributes
    ----------
    stage
        Number of the stage, from 0.
    op
        Operation.
    microbatch
        Number of the micro-batch, from 0; None for operations on a whole stage, such as ``STEP``.
    peer_stage
        Stage at the other end of a message of skip connections; -1 for any other action.
    part
        Part of an operation that has several, else -1:

        - the bucket of a REDUCE_GRAD, and the group of tied stages of a REDUCE_TIED;
        - which of `EXCHANGES` an ALL_TO_ALL is, or of which a REORDER puts values in order;
        - which of `PASSES` an UNSHARD or a RESHARD of one micro-batch is for;
        - which of `KEPT` an OFFLOAD or a RELOAD moves;
        - the segment of F, B or I of a stage with experts.

    See Also
    --------
    pipesim.Op : The operations.
    pipesim.scheduling.Overlapped : Two actions that run as one.
    pipesim.Schedule.from_orders : Make a schedule from actions.

    Examples
    --------
    >>> import pipesim as ps
    >>> F, SEND_F, RECV_F = ps.Op.F, ps.Op.SEND_F, ps.Op.RECV_F
    >>> str(ps.Action(2, F, 0)), str(ps.Action(0, SEND_F, 3, 2)), str(ps.Action(2, RECV_F, 3, 0))
    ('2F0', '0SEND_F3>2', '2RECV_F3<0')
    >>> str(ps.Action(2, ps.Op.REDUCE_GRAD, part=1)), str(ps.Action(0, ps.Op.ALL_TO_ALL, 3, part=1))
    ('2REDUCE_GRAD.1', '0ALL_TO_ALL3.keys')
    """

    stage: int
    op: Op
    microbatch: int | None = None
    peer_stage: int = -1
    part: int = -1

    def __str__(self) -> str:
        text = f"{self.stage}{self.op.name}{'' if self.microbatch is None else self.microbatch}"
        if self.part >= 0:
            return f"{text}.{part_name(self.op, self.part)}"
        if self.peer_stage < 0:
            return text
        return f"{text}{'>' if self.op in SENDS else '<'}{self.peer_stage}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action from its text form.

        Parameters
        ----------
        text
            Stage, operation and micro-batch, such as ``"2F0"``; spaces around them are ignored.

        Returns
        -------
        Action
            The action.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Action.parse("1SEND_F3")
        Action(stage=1, op=<Op.SEND_F: 5>, microbatch=3, peer_stage=-1, part=-1)
        """
        match = _ACTION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ArgumentError(
                f"{text!r} is not an action; write stage, operation, micro-batch, such as '2F0'"
            )
        stage, op, microbatch, sign, peer, part = match.groups()
        if op not in Op.__members__:
            raise ArgumentError(
                f"{text!r} names no operation: {op!r}{suggestion(op, Op.__members__)} "
                f"(known: {', '.join(Op.__members__)})"
            )
        if sign and Op[op] not in (SENDS if sign == ">" else RECVS):
            raise ArgumentError(
                f"{text!r} is not an action: only messages of skip connections name another "
                "stage, such as '0SEND_F3>2' and '2RECV_F3<0'"
            )
        number = None if part is None else _part_number(Op[op], part)
        if part and number is None:
            raise ArgumentError(
                f"{text!r} is not an action; only buckets, such as '2REDUCE_GRAD.1', groups of "
                "tied stages, such as '0REDUCE_TIED.0', exchanges "
                f"({', '.join(EXCHANGES)}; {', '.join(EXPERT_EXCHANGES)} of a layer), such as "
                "'0ALL_TO_ALL3.keys' and '0ALL_TO_ALL3.combine1', passes "
                f"({', '.join(PASSES)}), such as '0UNSHARD3.forward', the input of a stage, such "
                "as '0OFFLOAD3.input', and segments between exchanges, such as '2F0.1', are "
                "parts: write '2F0'"
            )
        try:
            numbers = int(microbatch) if microbatch else None, int(peer) if peer else -1
            return cls(int(stage), Op[op], *numbers, -1 if number is None else number)
        except ValueError as error:  # more digits than Python reads
            raise ArgumentError(
                f"{text!r:.40}... of {len(text)} characters is not an action; "
                "number stages and micro-batches from 0"
            ) from error


def expert_exchange(name: str, layer: int) -> int:
    """Return the part of ALL_TO_ALL that is one of `EXPERT_EXCHANGES` of a layer with experts."""
    return len(EXCHANGES) + layer * len(EXPERT_EXCHANGES) + EXPERT_EXCHANGES.index(name)


def is_expert_exchange(op: Any, part: Any) -> Any:
    """Return whether a task is an exchange of experts' tokens; for numbers or for arrays."""
    return (op == Op.ALL_TO_ALL) & (part >= len(EXCHANGES))


def part_name(op: Op, part: int) -> str:
    """Return the text of a part of an operation.

    >>> part_name(Op.ALL_TO_ALL, 1), part_name(Op.ALL_TO_ALL, 10), part_name(Op.REDUCE_GRAD, 1)
    ('keys', 'combine1', '1')
    """
    if is_expert_exchange(op, part):
        layer, exchange = divmod(part - len(EXCHANGES), len(EXPERT_EXCHANGES))
        return f"{EXPERT_EXCHANGES[exchange]}{layer}"
    names = PART_NAMES.get(op, ())
    return names[part] if part < len(names) else str(part)


def part_letter(op: Op, part: int) -> str:
    """Return the short text of a part, for boxes and nodes, after the number of the micro-batch.

    It is the first letter of a name, upper case for exchanges of experts' gradients; ``.1`` for a
    number; and nothing for a segment, which the exchanges around it tell apart.
    """
    if op in SEGMENTED:
        return ""
    if is_expert_exchange(op, part):
        name = part_name(op, part)
        return name[0].upper() if "grad" in name else name[0]
    names = PART_NAMES.get(op, ())
    return names[part][0] if part < len(names) else f".{part}"


def _part_number(op: Op, text: str) -> int | None:
    """Return the part of an operation that `part_name` writes as a text; None if there is none."""
    if op in NUMBERED and text.isdigit():
        return int(text) if len(text) < 19 else None
    if text in (REORDERED if op == Op.REORDER else PART_NAMES.get(op, ())):
        return PART_NAMES[op].index(text)
    name = text.rstrip("0123456789")
    if op == Op.ALL_TO_ALL and name in EXPERT_EXCHANGES and 0 < len(text) - len(name) < 9:
        return expert_exchange(name, int(text[len(name) :]))
    return None


class Overlapped(NamedTuple):
    """The F of one micro-batch and the B or I of another, run as one compute action of a device.

    It starts when both can, lasts as long as ``overlapped`` of `pipesim.Costs` says, and the
    results of both come at its end (DualPipe, DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

    Attributes
    ----------
    forward
        The F.
    backward
        The B or I, of another stage or micro-batch of the same device.

    Raises
    ------
    ScheduleError
        Not here, but by `pipesim.verify`, if they are not an F and a B or I.

    See Also
    --------
    pipesim.Action : One operation of one stage on one micro-batch.
    pipesim.Schedule.from_orders : Make a schedule from actions.

    Examples
    --------
    >>> import pipesim as ps
    >>> from pipesim.scheduling import Overlapped
    >>> str(Overlapped(ps.Action(0, ps.Op.F, 4), ps.Action(7, ps.Op.B, 1)))
    '(0F4;7B1)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


def parse_action(text: str) -> Action | Overlapped:
    """Read an action, or two that overlap, from the text form."""
    match = _OVERLAPPED.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return Action.parse(text)
    forward, backward = (Action.parse(part) for part in match.groups())
    if forward.op != Op.F or backward.op not in INPUT_GRADS:
        raise ArgumentError(
            f"{text!r} overlaps {forward.op} with {backward.op}; write the F first and the B or I "
            "second, such as '(0F4;7B1)OVERLAP_F_B'"
        )
    return Overlapped(forward, backward)
