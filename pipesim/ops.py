"""Operations, sets of operations, and `Action`: one operation of one stage on one micro-batch.

`Overlapped` is two actions that run as one.

The letters and the text form are those of torch.distributed.pipelining. Beware: papers on zero
bubble write B for the gradient of the input alone, which is ``I`` here and in torch.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

from pipesim.errors import ArgumentError, suggestion

__all__ = [
    "COLLECTIVES",
    "COMPUTE",
    "EXCHANGES",
    "IN_REPLICA",
    "LISTED",
    "NUMBERED",
    "OF_DEVICES",
    "OF_STAGES",
    "RECVS",
    "REORDERED",
    "SCHEDULED",
    "SENDS",
    "TRANSFERS",
    "Action",
    "Op",
    "Overlapped",
    "parse_action",
]


class Op(IntEnum):
    """The operation of a task. Graphs store its value in their ``op`` column."""

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

    def __str__(self) -> str:
        return self.name


#: Operations that a schedule lists for every stage and micro-batch.
SCHEDULED = frozenset({Op.F, Op.B, Op.I, Op.W})
#: Operations that a schedule may list; `pipesim.lower` adds all others.
LISTED = SCHEDULED | {Op.R}
#: Operations on a device's compute stream.
COMPUTE = LISTED | {Op.STEP, Op.DISPATCH, Op.REORDER}
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECVS = frozenset({Op.RECV_F, Op.RECV_B})
TRANSFERS = SENDS | RECVS
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
#: The exchanges whose values a REORDER puts in order: its `part`, numbered as they are.
REORDERED = ("vectors", "gradients")
#: Operations whose `part` is any number from 0: buckets of gradients, groups of tied stages.
NUMBERED = frozenset({Op.REDUCE_GRAD, Op.REDUCE_TIED})

_ACTION = re.compile(
    r"\s*([0-9]+)([A-Z](?:[A-Z_]*[A-Z])?)([0-9]*)(?:([<>])([0-9]+)|\.([0-9]+|[a-z]+))?\s*"
)
_OVERLAPPED = re.compile(r"\s*\(([^();]*);([^();]*)\)OVERLAP_F_B\s*")


class Action(NamedTuple):
    """One operation of one stage on one micro-batch; ``str`` and `parse` are inverse.

    ``microbatch`` is None for operations on a whole stage, such as ``STEP``. ``peer_stage`` is the
    stage at the other end of a message of skip connections, -1 for any other action. ``part`` is
    the bucket of a REDUCE_GRAD that has several, the group of tied stages of a REDUCE_TIED, which
    of `EXCHANGES` an ALL_TO_ALL is, or of which a REORDER puts values in order, else -1.

    >>> str(Action(2, Op.F, 0)), str(Action(0, Op.SEND_F, 3, 2)), str(Action(2, Op.RECV_F, 3, 0))
    ('2F0', '0SEND_F3>2', '2RECV_F3<0')
    >>> str(Action(2, Op.REDUCE_GRAD, part=1)), str(Action(0, Op.ALL_TO_ALL, 3, part=1))
    ('2REDUCE_GRAD.1', '0ALL_TO_ALL3.keys')
    >>> Action.parse("1SEND_F3")
    Action(stage=1, op=<Op.SEND_F: 5>, microbatch=3, peer_stage=-1, part=-1)
    """

    stage: int
    op: Op
    microbatch: int | None = None
    peer_stage: int = -1
    part: int = -1

    def __str__(self) -> str:
        text = f"{self.stage}{self.op.name}{'' if self.microbatch is None else self.microbatch}"
        if self.part >= 0:
            exchanges = self.op in (Op.ALL_TO_ALL, Op.REORDER) and self.part < len(EXCHANGES)
            return f"{text}.{EXCHANGES[self.part] if exchanges else self.part}"
        if self.peer_stage < 0:
            return text
        return f"{text}{'>' if self.op in SENDS else '<'}{self.peer_stage}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action from its text form.

        Raises
        ------
        ArgumentError
            If the text is no action, naming the text and the nearest operation.
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
        names = {Op.ALL_TO_ALL.name: EXCHANGES, Op.REORDER.name: REORDERED}.get(op, ())
        if part and part not in names and (Op[op] not in NUMBERED or not part.isdigit()):
            raise ArgumentError(
                f"{text!r} is not an action; only buckets, such as '2REDUCE_GRAD.1', groups of "
                "tied stages, such as '0REDUCE_TIED.0', and exchanges "
                f"({', '.join(EXCHANGES)}), such as '0ALL_TO_ALL3.keys', are parts: write '2F0'"
            )
        number = part if part is None or part not in names else EXCHANGES.index(part)
        try:
            numbers = int(microbatch) if microbatch else None, int(peer) if peer else -1
            return cls(int(stage), Op[op], *numbers, -1 if number is None else int(number))
        except ValueError as error:  # more digits than Python reads
            raise ArgumentError(
                f"{text!r:.40}... of {len(text)} characters is not an action; "
                "number stages and micro-batches from 0"
            ) from error


class Overlapped(NamedTuple):
    """The F of one micro-batch and the B of another, which a device runs as one compute action.

    It starts when both can, lasts as long as `pipesim.Costs.overlapped` says, and the results of
    both come at its end (DualPipe, DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

    >>> str(Overlapped(Action(0, Op.F, 4), Action(7, Op.B, 1)))
    '(0F4;7B1)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


def parse_action(text: str) -> Action | Overlapped:
    """Read an action, or two that overlap, from the text form.

    Raises
    ------
    ArgumentError
        If the text is no action, or those that overlap are not an F and a B.
    """
    match = _OVERLAPPED.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return Action.parse(text)
    forward, backward = (Action.parse(part) for part in match.groups())
    if forward.op != Op.F or backward.op != Op.B:
        raise ArgumentError(
            f"{text!r} overlaps {forward.op} with {backward.op}; write the F first and the B "
            "second, such as '(0F4;7B1)OVERLAP_F_B'"
        )
    return Overlapped(forward, backward)
