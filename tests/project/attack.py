"""Call with one bad value at a time, and say what became of each call."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

from bad_values import SELDOM, VALUES, allowed_by
from case_choice import EVERY_CASE

from pipesim.errors import CapacityError, PipeError, PipeWarning
from pipesim.graph.options import LoweringOptions

#: Seconds of one call, which none comes near but on a machine with much other work, and bytes that
#: the process may take besides what it has.
SECONDS, ROOM = 20.0, 3 * 2**30
#: Characters of a message that can still be read.
LONGEST = 2000
#: Other words with which messages name a parameter.
SYNONYMS = {
    "path": ("cannot read", "cannot write", "file", "folder", "directory"),
    "prefix": ("cannot write",),
    "toml": ("cannot read",),
    "paths": ("cannot read", "cannot write", "file", "folder", "directory"),
    "directory": ("cannot make",),
    "algorithm": ("unknown all-reduce".replace("-", " "), "unknown collective"),
    "configurations": ("sweep takes", "row 0", "grid: unknown key", "nothing to sweep"),
    "graph": ("TaskGraph",),
    "changes": ("unknown attribute", "surprise"),
    "name": (
        "unknown schedule",
        "unknown cost",
        "unknown machine",
        "unknown GPU",
        "unknown framework",
        "unknown transformer",
    ),
    "nbytes": ("bytes",),
    "others": ("paths",),
    "device_of": ("placement", "the device of stage"),
    "batch_size": ("microbatch_size",),
    "orders": ("needs at least one action", "device 0"),
    "schedule": ("order",),
    "first": ("rank",),
    "second": ("rank",),
    "seconds": ("layers cannot be split",),
    "options": ("surprise",),
    "settings": ("surprise",),
    "fields": ("surprise",),
    "labels": ("surprise",),
}


class Overdue(BaseException):
    """A call has taken too long; no `except Exception` may hide it."""


class Outcome(NamedTuple):
    """The outcome of a call."""

    name: str
    parameter: str
    value: str
    kind: str  # refused, allowed, accepted, raised, unnamed, slow, warned
    text: str

    @property
    def good(self) -> bool:
        return self.kind in ("refused", "allowed")

    def __str__(self) -> str:
        return f"{self.name}({self.parameter}={self.value}): {self.kind}: {self.text}"


def _overdue(_: int, __: FrameType | None) -> None:
    raise Overdue


@contextlib.contextmanager
def sandbox() -> Iterator[None]:
    """Limit memory of this process, and let `SIGALRM` end a call, for the time of a test."""
    before = signal.signal(signal.SIGALRM, _overdue)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, hard))
    standard = {number: os.dup(number) for number in range(3)}  # 0 as a path would close it
    try:
        yield
    finally:
        for number, kept in standard.items():
            os.dup2(kept, number)
            os.close(kept)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


#: Callables whose ``**options`` are the fields of a record.
RECORDS = {"TaskGraph.build": LoweringOptions, "TaskGraph.wire": LoweringOptions}


@cache
def _signature(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, which are looked at in each of its many calls."""
    own = list(inspect.signature(function).parameters.values())
    record = RECORDS.get(getattr(function, "__qualname__", ""))
    if record is None:
        return own
    options = inspect.signature(record).parameters.values()
    return own + [
        x.replace(kind=x.KEYWORD_ONLY) for x in options if x.name not in ("source", "n_equal")
    ]


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a user gives."""
    return [p for p in _signature(function) if p.name != "self"]


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> object:
    """Call with arguments by name, and take the first things that a result yields."""
    args, named = [], dict(arguments)
    takes_several = any(p.kind is p.VAR_POSITIONAL for p in _signature(function))
    for parameter in _signature(function):
        several = parameter.kind is parameter.VAR_POSITIONAL
        if parameter.name not in named:
            continue
        if several or parameter.kind is parameter.POSITIONAL_ONLY or parameter.name == "self":
            value = named.pop(parameter.name)
            args += value if several else [value]
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name)
        elif takes_several and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            args.append(named.pop(parameter.name))
    result = function(*args, **named)
    if isinstance(result, contextlib.AbstractContextManager) and hasattr(result, "gen"):
        result.__enter__()  # alone: the block of a user would go on here
    elif isinstance(result, GeneratorType):
        next(result, None)
    return result


def _mentions(message: str, names: set[str]) -> bool:
    """Return whether a message has one of some names, their words apart or not."""
    text = re.sub(r"[-_\s]+", " ", message).lower()
    return any(re.search(rf"\b{re.escape(name.replace('_', ' ').lower())}", text) for name in names)


def _names(function: Callable[..., Any], parameter: inspect.Parameter) -> set[str]:
    """Return the words that name a parameter: its own, and those that `SYNONYMS` adds.

    With a single parameter, no message can be mistaken for another parameter's.
    """
    if len(parameters(function)) == 1:
        return {""}
    name = parameter.name
    return {name, name.removeprefix("n_"), name.removesuffix("s"), *SYNONYMS.get(name, ())}


def outcome(
    name: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    parameter: inspect.Parameter,
    value: str,
    bad: object,
    *,
    close: Callable[[object], None] = lambda _: None,
) -> Outcome:
    """Call with a bad value of one parameter."""
    if parameter.kind is parameter.VAR_KEYWORD:
        bad = {"surprise": bad}
    elif parameter.kind is parameter.VAR_POSITIONAL:
        bad = (bad,)

    def verdict(kind: str, text: object = "") -> Outcome:
        return Outcome(name, parameter.name, value, kind, f"{text}"[:300])

    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("always")
            result = call(function, {**arguments, parameter.name: bad})
        signal.setitimer(signal.ITIMER_REAL, 0)
        close(result)
    except Overdue:
        return verdict("slow", f"more than {SECONDS} s")
    except CapacityError as error:  # many parameters together are too much
        return verdict("refused", f"{type(error).__name__}: {error}")
    except PipeError as error:
        if len(str(error)) > LONGEST:
            return verdict("endless", f"{len(str(error)):,} characters: {error}")
        named = _mentions(str(error), _names(function, parameter) | {"no argument 'surprise'"})
        return verdict("refused" if named else "unnamed", f"{type(error).__name__}: {error}")
    except TypeError as error:
        # Python's own words for an option that there is not name it.
        refused = "unexpected keyword argument 'surprise'" in str(error)
        return verdict("refused" if refused else "raised", f"TypeError: {error}")
    except BaseException as error:
        return verdict("raised", f"{type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if time.monotonic() - began > SECONDS:
        return verdict("slow", f"{time.monotonic() - began:.1f} s")
    for warning in caught:
        if issubclass(warning.category, RuntimeWarning):
            return verdict("warned", warning.message)
    if any(issubclass(warning.category, PipeWarning) for warning in caught):
        return verdict("allowed", "warned")
    if allowed_by(str(parameter.annotation), value, bad):
        return verdict("allowed", "type")
    return verdict("accepted", type(result).__name__)


def attacks(
    parameter: inspect.Parameter, index: int, *, seldom: bool
) -> dict[str, Callable[[], object]]:
    """Return the values to attack a parameter with: by default every twelfth, from its index on.

    Of those for slow callables, which are few, every sixth.
    """
    names = list(SELDOM if seldom else VALUES)
    if not EVERY_CASE:
        step = 6 if seldom else 12
        names = names[index % step :: step]
    return {name: VALUES[name] for name in names}
