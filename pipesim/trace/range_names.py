"""Ranges in traces: parse action and rank from a range's name, or from fields of its event."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    TimelineError,
    check_name,
    check_text,
    suggestion,
)
from pipesim.ops import COPIES, OF_STAGES, Action, Op, Overlapped, parse_action
from pipesim.trace.chrome_json import complete_events, row_labels

# Names

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
    """Return ``pattern``, a regular expression with the groups that are needed."""
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

    ``where`` is the file and the range, for messages. ``ops`` come before our own words. ``stage``,
    ``microbatch`` and ``peer`` are whole numbers as texts; -1 for none.
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
    if "stage" not in re.compile(pattern).groupindex:
        raise TimelineError(
            f"{path}: range {name!r} is of several stages, but pattern {pattern!r} says that each "
            "rank has one; give it a group (?P<stage>...)"
        )
    try:
        return parse_action(name.removeprefix("PP:"))
    except ArgumentError as error:
        raise TimelineError(f"{path}: range {name!r}: {error}") from error


# Fields of events

Event = Mapping[str, Any]
_Labels = Mapping[tuple[str, str, str], object]

#: Fields of a range; the first two are needed.
FIELDS = ("op", "microbatch", "stage", "rank")
_PLACES = ("name", "cat", "pid", "tid", "process_name", "thread_name")
_ADVICE = "such as {'op': 'name', 'microbatch': 'args.micro_batch', 'stage': 'pid'}"


class Place(NamedTuple):
    """A place in an event: its ``path``, and a regular expression for the ``part`` of its text."""

    path: str
    part: re.Pattern[str] | None

    def __str__(self) -> str:
        return self.path if self.part is None else f"{self.path} ({self.part.pattern!r})"

    def text(self, event: Event, labels: _Labels) -> str | None:
        """Return the text at this place of an event; None if there is none."""
        key, _, rest = self.path.partition(".")
        value: Any = event.get(key)
        if key.endswith("_name"):
            thread = str(event.get("tid")) if key == "thread_name" else ""
            value = labels.get((key, str(event.get("pid")), thread))
        elif rest and isinstance(value, dict) and rest in value:  # a key with a dot
            value = value[rest]
        elif rest:
            for part in rest.split("."):
                value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, float):  # tables with missing values have 3.0 for 3, and NaN for none
            value = int(value) if value.is_integer() else None if value != value else value
        if value is None or self.part is None:
            return None if value is None else str(value)
        match = self.part.search(str(value))
        return match and match[1]


@dataclass(frozen=True)
class RangeRules:
    """Arguments of `Timeline.from_chrome` that say which events are ranges, and of which action.

    ``patterns`` are regular expressions for names, tried in order; none with ``fields``, places of
    the fields of a range. ``ops`` has operations by the words of the file, ``only`` the texts that
    events must have at places.
    """

    patterns: tuple[str, ...]
    fields: Mapping[str, Place]
    ops: Mapping[str, Op | None]
    only: Mapping[Place, str]

    @classmethod
    def checked(cls, pattern: str | None, fields: object, ops: object, only: object) -> RangeRules:
        """Return the rules of arguments as a user gives them; None for those not given."""
        words = {} if ops is None else check_ops(ops)
        values = {} if only is None else check_mapping("only", only, "such as {'pid': 0}")
        selected = {_check_place("only", path): str(value) for path, value in values.items()}
        if fields is None:
            patterns = PATTERNS if pattern is None else (check_pattern(pattern),)
            return cls(patterns, {}, words, selected)
        if pattern is not None:
            raise ArgumentError(
                "got both pattern and fields; give pattern if the names of ranges tell all, else "
                "fields, in which a place may have a regular expression of its own"
            )
        places = {}
        for field, place in check_mapping("fields", fields, _ADVICE).items():
            places[check_name("field of fields", field, FIELDS)] = _check_place("fields", place)
        for field in FIELDS[:2]:
            if field not in places:
                raise ArgumentError(f"fields has no {field!r}; give its place, {_ADVICE}")
        return cls((), places, words, selected)


def _check_place(argument: str, place: object) -> Place:
    """Return a place; with a regular expression if ``place`` is a pair."""
    pair: Any = place if isinstance(place, tuple | list) and len(place) == 2 else None
    path: Any
    part: Any
    path, part = pair or (place, None)
    if not (isinstance(path, str) and re.fullmatch(r"args(\.[^.]+)+", path)):
        check_name(f"place of {argument}", path, [*_PLACES, "args.KEY"])
    if pair is None:
        return Place(path, None)
    try:
        expression = re.compile(part)
    except (re.error, TypeError) as error:
        raise ArgumentError(
            f"{argument}: {part!r:.200}, for {path}, is no regular expression: {error}"
        ) from error
    if expression.groups != 1 or not isinstance(part, str):
        raise ArgumentError(
            f"{argument}: {part!r:.200}, for {path}, must be a text with one group, such as "
            r"('thread_name', r'stage (\d+)')"
        )
    return Place(path, expression)


class RangeReader(NamedTuple):
    """Functions of an event: its action, if any; its rank or process; whether it is to be read.

    With ``rank_is_stage``, actions have stage 0, and their stage is their rank.
    """

    action: Callable[[Event], Action | Overlapped | None]
    rank: Callable[[Event], str]
    is_selected: Callable[[Event], bool]
    rank_is_stage: bool


def range_readers(path: Path, content: Event, rules: RangeRules) -> list[RangeReader]:
    """Return the ways of reading the ranges of a file, in the order in which to try them."""
    labels = row_labels(content)

    def is_selected(event: Event, missing: str | None = None) -> bool:
        texts = ((place.text(event, labels), value) for place, value in rules.only.items())
        return all(text in (missing, value) for text, value in texts)

    def is_range(event: Event) -> bool:
        return is_selected(event, "")  # calls of drivers may lack the places, ranges not

    def by_name(pattern: str) -> RangeReader:
        parse = action_parser(path, pattern, rules.ops)
        rank_is_stage = "stage" not in re.compile(pattern).groupindex
        return RangeReader(
            lambda event: parse(str(event.get("name", ""))) if is_range(event) else None,
            lambda event: str(event.get("pid")),
            is_selected,
            rank_is_stage,
        )

    if not rules.fields:
        return [by_name(pattern) for pattern in rules.patterns]

    def action(event: Event) -> Action | None:
        texts = {field: place.text(event, labels) for field, place in rules.fields.items()}
        word, microbatch = texts["op"], texts.pop("microbatch")
        # Many other events have a name and a process, but no micro-batch.
        if word is None or None in texts.values() or (microbatch is None and word not in rules.ops):
            return None
        if not is_range(event):
            return None
        where = f"{path}: event {str(event.get('name'))!r:.80} at {event.get('ts')} us"
        op = rules.ops.get(word)
        if microbatch is None and op is not None and op not in OF_STAGES:
            args = event.get("args")
            keys = (
                [f"args.{key}" for key, value in args.items() if value is not None]
                if isinstance(args, dict)
                else []
            )
            place = rules.fields["microbatch"]
            raise TimelineError(
                f"{where}, {op}, has no micro-batch at {place}{suggestion(place.path, keys)} "
                f"(it has {', '.join(keys) or 'no args'})"
            )
        stage = texts.get("stage") or "0"
        return named_action(where, rules.ops, word, stage=stage, microbatch=microbatch or "-1")

    if "rank" not in rules.fields:
        rank = by_name(PATTERNS[0]).rank
    else:
        rank = _rank_reader(path, content, rules.fields["rank"], labels, action)
    return [RangeReader(action, rank, is_selected, "stage" not in rules.fields)]


def _rank_reader(
    path: Path,
    content: Event,
    place: Place,
    labels: _Labels,
    action: Callable[[Event], Action | None],
) -> Callable[[Event], str]:
    """Return the function from an event to its rank at ``place``.

    An event without that place has the rank of the ranges of its process. Raise if an action of a
    rank is in several processes.
    """
    ranks: dict[str, set[str]] = defaultdict(set)  # of each process
    process_of: dict[tuple[str, Action], str] = {}
    for _, event in complete_events(path, content):
        rank, process = place.text(event, labels), str(event.get("pid"))
        if rank is None or (item := action(event)) is None:
            continue
        ranks[process].add(rank)
        # Replicas that do not run at the same time would look like steps.
        if (first := process_of.setdefault((rank, item), process)) != process:
            raise TimelineError(
                f"{path}: rank {rank} has {item} in processes {first} and {process}; choose one "
                f"replica, such as only={{'pid': {first!r}}}, or give ranks a place with the "
                "process"
            )

    def rank_of(event: Event) -> str:
        process = str(event.get("pid"))
        rank = place.text(event, labels)
        if rank is not None:
            return rank
        candidates = ranks.get(process, {process})
        args = event.get("args")
        works = event.get("cat") == "cpu_op" or (isinstance(args, dict) and "correlation" in args)
        if len(candidates) > 1 and works:
            raise TimelineError(
                f"{path}: event {str(event.get('name'))!r:.80} at {event.get('ts')} us has no rank "
                f"at {place}, and its process {process} has ranges of several; give one file a rank"
            )
        return min(candidates)

    return rank_of
