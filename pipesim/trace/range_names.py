"""Names of ranges in traces: parse the action that a range carried out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    TimelineError,
    check_name,
    check_text,
    suggestion,
)
from pipesim.ops import COPIES, OF_STAGES, Action, Op, Overlapped, parse_action

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
#: Operations by their words, in capitals.
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
#: Actions that are left out of traces: they gather and free parameters, before a step or in it.
_IGNORED: dict[str, None] = dict.fromkeys(("UNSHARD", "RESHARD", "PARAMS_ALL_GATHER"))

#: Operations by their words in a file; None for words to leave out.
Ops = Mapping[str, Op | None]


def check_mapping(name: str, value: object, advice: str) -> Mapping[Any, Any]:
    """Return ``value``, that of an argument, if it is a mapping."""
    if isinstance(value, Mapping):
        return value
    raise ArgumentTypeError(f"{name} must be a mapping, got {value!r:.60}; give one {advice}")


def check_ops(ops: object) -> dict[str, Op | None]:
    """Return the operation of each word of a file, or None to leave its events out."""
    words = check_mapping("ops", ops, "such as {'forward-compute': 'F', 'gc': None}")
    checked: dict[str, Op | None] = {}
    for word, op in words.items():
        name = op.upper() if isinstance(op, str) else op
        checked[check_text("a word of ops", word)] = (
            op if op is None or isinstance(op, Op)
            else WORDS[check_name(f"operation of ops[{word!r:.60}]", name, WORDS)]
        )  # fmt: skip
    return checked


def word_key(word: str, words: Ops) -> str:
    """Return a word as it is among ``words``: as it is, or in capitals with ``_`` for ``-``."""
    return word if word in words else word.upper().replace("-", "_")


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


def action_parser(
    path: Path, pattern: str, ops: Ops
) -> Callable[[str], Action | Overlapped | None]:
    """Return a function from the name of a range to its action, or to None if it has none.

    ``ops`` is as `named_action` takes it. Overlapped actions have torch's name, with any pattern.
    The function raises a `TimelineError` for a name that matches the pattern and is no action of
    pipesim; ``path`` is the file to name. Each name is matched once, however often it comes. The
    pattern decides how long that takes.
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
        return named_action(
            f"{path}: range {name!r}",
            ops,
            groups["op"] or "",
            stage=groups.get("stage") or "0",
            microbatch=groups["microbatch"] or "-1",
            peer=groups.get("peer") or "-1",  # of a skip's message
        )

    def parse(name: str) -> Action | Overlapped | None:
        # The halves of a range share one pair object, which no other range may share: no cache.
        return _parse_pair(path, pattern, name) if name.startswith("PP:(") else single(name)

    return parse


def named_action(
    where: str, ops: Ops, word: str, *, stage: str, microbatch: str, peer: str = "-1"
) -> Action | None:
    """Return the action of a range, or None if its operation is left out.

    Parameters
    ----------
    where
        File and range, for messages.
    ops
        Operations by the words of the file, which come before our own words.
    word
        Operation.
    stage, microbatch, peer
        Whole numbers as texts; -1 for none.

    Raises
    ------
    TimelineError
        For an unknown operation, numbers that are none, and a micro-batch that is missing.
    """
    words: Ops = {**WORDS, **_IGNORED, **ops}
    key = word_key(word, words)
    if key not in words:
        near = suggestion(word, words) or suggestion(key, words)
        raise TimelineError(
            f"{where} names no operation: {word!r:.60}{near} (known: {', '.join(words)}); "
            f"ops={{{word!r:.60}: None}} leaves it out"
        )
    op = words[key]
    if op is None:
        return None
    try:
        stage_number, microbatch_number, peer_number = map(int, (stage, microbatch, peer))
    except ValueError:
        raise TimelineError(
            f"{where} has stage and micro-batch {stage} and {microbatch}, which are no whole "
            "numbers; have the groups of the regular expression match digits alone"
        ) from None
    if op in OF_STAGES:
        return Action(stage_number, op, None, peer_number)
    if microbatch_number < 0:
        raise TimelineError(f"{where} names no micro-batch, but {op} is of one")
    return Action(stage_number, op, microbatch_number, peer_number)


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
