"""Names of ranges in traces: parse the action that a range carried out."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from pipesim.errors import ArgumentError, TimelineError, suggestion
from pipesim.ops import COPIES, OF_STAGES, Action, Op, Overlapped, parse_action

__all__ = ["PATTERNS", "WORDS", "action_parser", "check_pattern"]

#: Patterns for the names of ranges, tried in this order:
#: 1. torch.distributed.pipelining, for all schedules that it runs from lists of actions;
#: 2. its GPipe, where the rank is the stage (its 1F1B names no ranges: annotate the stages);
#: 3. `pipesim.trace.save`.
PATTERNS = (
    r"PP:(?P<stage>[0-9]+)(?P<op>[A-Z](?:[A-Z_]*[A-Z])?)(?P<microbatch>[0-9]*)"
    r"(?:[<>](?P<peer>[0-9]+))?",
    r"(?P<op>Forward|Backward) (?P<microbatch>[0-9]+)",
    rf"(?P<stage>[0-9]+)(?P<op>{'|'.join(Op.__members__)})(?P<microbatch>[0-9]*)"
    r"(?:[<>](?P<peer>[0-9]+))?",
)
#: Names that `pipesim.trace.save` writes and that tell too little to build a graph: of parts, such
#: as segments of stages with experts, and of copies to host memory. Only the saved timeline of the
#: same file has them.
_UNREAD = re.compile(
    rf"[0-9]+(?:(?:{'|'.join(Op.__members__)})[0-9]*\.[a-z0-9_]+"
    rf"|(?:{'|'.join(op.name for op in sorted(COPIES))})[0-9]+)"
)
#: Other words for an operation, in capitals.
WORDS = {
    **Op.__members__,
    **dict.fromkeys(("FORWARD", "FWD"), Op.F),
    **dict.fromkeys(("BACKWARD", "BWD"), Op.B),
    **dict.fromkeys(("RECOMPUTE",), Op.R),
    **dict.fromkeys(("OPTIMIZER", "OPTIMIZER_STEP"), Op.STEP),
    # Megatron-LM's timers (megatron/training/training.py and core/pipeline_parallel).
    "FORWARD_COMPUTE": Op.F,
    "BACKWARD_COMPUTE": Op.B,
    "FORWARD_SEND": Op.SEND_F,
    "FORWARD_RECV": Op.RECV_F,
    "BACKWARD_SEND": Op.SEND_B,
    "BACKWARD_RECV": Op.RECV_B,
    "GRADS_REDUCE_SCATTER": Op.REDUCE_GRAD,
    "PARAMS_ALL_GATHER": Op.UNSHARD,
    "EMBEDDING_GRADS_ALL_REDUCE": Op.REDUCE_TIED,
    "OPTIMIZER_CLIP_MAIN_GRAD": Op.GRAD_NORM,
}
#: Actions of torch that pipesim leaves out: they gather and free parameters.
_IGNORED = frozenset({"UNSHARD", "RESHARD"})


def check_pattern(pattern: str) -> str:
    """Return ``pattern``, a regular expression with the groups that are needed.

    Raises
    ------
    TimelineError
        If it is no regular expression, or lacks a group.
    """
    try:
        groups = re.compile(pattern).groupindex
    except (re.error, TypeError) as error:
        raise TimelineError(
            f"pattern {pattern!r} is no regular expression: {error}; write such as {PATTERNS[0]!r}"
        ) from error
    missing = [group for group in ("op", "microbatch") if group not in groups]
    if missing:
        raise TimelineError(
            f"pattern {pattern!r} has no group {missing[0]!r}; it needs (?P<op>...) and "
            f"(?P<microbatch>...), and (?P<stage>...) unless each rank has one stage, such as "
            f"{PATTERNS[0]!r}"
        )
    return pattern


def action_parser(path: Path, pattern: str) -> Callable[[str], Action | Overlapped | None]:
    """Return a function from the name of a range to its action, or to None if it has none.

    Overlapped actions have torch's name, with any pattern. The function raises a `TimelineError`
    for a name that matches the pattern and is no action of pipesim; ``path`` is the file to name.
    Each name is matched once, however often it comes. The pattern decides how long that takes.
    """
    matches = re.compile(pattern).fullmatch

    @cache
    def single(name: str) -> Action | None:
        if pattern == PATTERNS[-1] and _UNREAD.fullmatch(name):
            raise TimelineError(
                f"{path}: range {name!r} is of a copy to host memory, or of a part of an operation "
                "or collective; such a trace is read only as pipesim.trace.save wrote it, with "
                "Timeline.from_chrome(path) and no argument but name"
            )
        match = matches(name)
        if match is None:
            return None
        groups = match.groupdict()
        word = (groups["op"] or "").upper()
        if word in _IGNORED:
            return None
        if word not in WORDS:
            raise TimelineError(
                f"{path}: range {name!r} names no operation: {groups['op']!r}"
                f"{suggestion(word, WORDS)} (known: {', '.join(WORDS)})"
            )
        numbers = (groups.get("stage") or "0", groups["microbatch"] or "-1")
        try:
            stage, microbatch = map(int, numbers)
            peer = int(groups.get("peer") or "-1")  # of a skip's message
        except ValueError:
            raise TimelineError(
                f"{path}: range {name!r} has stage and micro-batch {' and '.join(numbers)}, which "
                "are no whole numbers; have the groups match digits alone"
            ) from None
        op = WORDS[word]
        if microbatch < 0 and op not in OF_STAGES:
            raise TimelineError(f"{path}: range {name!r} names no micro-batch, but {op} is of one")
        return Action(stage, op, None if op in OF_STAGES else microbatch, peer)

    def parse(name: str) -> Action | Overlapped | None:
        # The halves of a range share one pair object, which no other range may share: no cache.
        return _parse_pair(path, pattern, name) if name.startswith("PP:(") else single(name)

    return parse


def _parse_pair(path: Path, pattern: str, name: str) -> Action | Overlapped:
    """Parse the name of a range that covers two actions."""
    if "stage" not in re.compile(pattern).groupindex:
        raise TimelineError(
            f"{path}: range {name!r} is of several stages, but pattern {pattern!r} says that each "
            "rank has one; give it a group (?P<stage>...)"
        )
    try:
        return parse_action(name.removeprefix("PP:"))
    except ArgumentError as error:
        raise TimelineError(f"{path}: range {name!r}: {error}") from error
