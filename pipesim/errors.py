"""All errors that users can get, in one tree, and the checks that raise the commonest of them.

A message says what is wrong, where, which value was given, which are allowed, and what to do next.
"""

from __future__ import annotations

import difflib
import math
import numbers
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
#: Characters of a line of a message that are shown: of a longer one, the beginning and the end.
_LINE = 1000


class PipeError(Exception):
    """Base of every error that pipesim and pipeexec raise on purpose.

    A line of the message that quotes a very long value is shortened in its middle.
    """

    def __str__(self) -> str:
        return "\n".join(map(_shortened, super().__str__().split("\n")))


class ArgumentError(PipeError, ValueError):
    """An argument is of the wrong kind or out of range."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of the wrong type, or none of those that the function takes."""


class TooFewDevicesError(ArgumentError, IndexError):
    """Fewer devices than partitions."""


class UnknownNameError(ArgumentError):
    """An unknown name (of a schedule, an engine, a model, an option)."""


class CostsError(PipeError, ValueError):
    """Costs that are not finite, negative, of the wrong length, or missing for an operation."""


class NetworkError(PipeError, ValueError):
    """A network with an impossible link, or one that names devices which do not exist."""


class ScheduleError(PipeError, ValueError):
    """A schedule with a missing, duplicate, misplaced or impossible action."""


class GraphError(PipeError, ValueError):
    """A task graph that breaks an invariant."""


class DeadlockError(ScheduleError, GraphError):
    """An order in which devices wait for each other for ever."""


class TimelineError(PipeError, ValueError):
    """A timeline that cannot be read, or that lacks the requested data."""


class CapacityError(PipeError, MemoryError):
    """The request needs more memory than the machine has."""


class RunDirectoryError(PipeError):
    """A run directory that cannot be written, or was truncated or edited."""


class CheckpointError(PipeError, ValueError):
    """A checkpoint that cannot be written, was cut or edited, or is that of another model."""


class ExecutionError(PipeError, RuntimeError):
    """A step that could not be run; ``timeline`` holds the tasks that ran before, if any."""

    timeline: object | None = None


class StageError(ExecutionError):
    """A stage, or the loss, raised; the original exception is ``__cause__``."""


class SkipError(PipeError, RuntimeError, TypeError):
    """A skip that is not stashed once and popped once, as its layers declare."""


class StallError(ExecutionError):
    """No task has ended for as long as the timeout, or a process does not answer."""


class PeerError(ExecutionError):
    """Another process of the pipeline failed, was lost, or sent something unexpected."""


class PipeWarning(UserWarning):
    """Base of the warnings: results are right, but may differ from what the user intends."""


class OversubscriptionWarning(PipeWarning):
    """More CPU devices than cores: tasks slow each other down."""


class SharedSlicesWarning(PipeWarning):
    """Slices of a GPU share its multiprocessors: stages slow each other down."""


class AccuracyWarning(PipeWarning):
    """Measured tasks are too short, or too noisy, for a good prediction."""


class CalibrationWarning(PipeWarning):
    """Constants fitted to measured steps are not determined, or hardly suit the steps."""


class CostsWarning(PipeWarning):
    """Costs may describe something else than they are used for."""


class MemoryLimitWarning(PipeWarning):
    """A device would hold more bytes than it may."""


class LegibilityWarning(PipeWarning):
    """A figure is too small for texts that it should have."""


class EngineWarning(PipeWarning):
    """Another engine runs than the one requested."""


class BatchWarning(PipeWarning):
    """A tensor of a batch is split into micro-batches, but may be none of samples."""


class LossWarning(PipeWarning):
    """The losses of micro-batches do not combine to that of the whole batch, or train no stage."""


class NanLossWarning(PipeWarning):
    """The loss of a micro-batch is not a number."""


class ResumeWarning(PipeWarning):
    """A training that is continued differs from one that was not interrupted."""


class BatchNormWarning(PipeWarning):
    """Batch norms see micro-batches: gradients are not those of the whole batch."""


class RandomnessWarning(PipeWarning):
    """A stage drew random numbers in a way that is not repeatable across schedules."""


class SplitBackwardWarning(PipeWarning):
    """A split backward computes the gradients of weights together with that of the input."""


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'gpipe'?"`` for the nearest known name, or an empty string.

    The nearest are those of another spelling, or those that begin with ``name``, if it has two
    letters or more.
    """
    name, names = str(name), list(choices)
    nearest = _same_words(name, names) or [
        choice for choice in names if len(name) > 1 and choice.startswith(name)
    ]
    # No name is near one of more than three times its length, which takes long to compare.
    if not nearest and len(name) <= 3 * max(map(len, names), default=0):
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, nearest[:3]))}?" if nearest else ""


def check_name(kind: str, name: object, choices: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``choices``."""
    choices = choices if isinstance(choices, Collection) else list(choices)
    if isinstance(name, str) and name in choices:
        return name
    names = sorted(choices)
    raise UnknownNameError(
        f"unknown {kind} {name!r}{suggestion(str(name), names)} (known: {', '.join(names)})"
    )


def find_name(kind: str, name: object, choices: Iterable[str]) -> str:
    """Return the one of ``choices`` that is ``name``, or another spelling of it.

    Spellings differ in capitals, spaces, hyphens, underscores, dots and the order of words, as
    ``"Interleaved 1F1B"`` and ``"1F1B-interleaved"`` do from ``"interleaved_1f1b"``.
    """
    choices = choices if isinstance(choices, Collection) else list(choices)
    if isinstance(name, str) and name not in choices:
        spellings = _same_words(name, choices)
        if len(spellings) == 1:
            return spellings[0]
    return check_name(kind, name, choices)


def _same_words(name: str, choices: Iterable[str]) -> list[str]:
    """Return the choices with the same letters and digits, or with the same words."""
    words = re.findall(r"[^\s._-]+", name.lower())
    lowered = {choice: re.findall(r"[^\s._-]+", choice.lower()) for choice in choices}
    return [choice for choice, own in lowered.items() if "".join(own) == "".join(words)] or [
        choice for choice, own in lowered.items() if sorted(own) == sorted(words)
    ]


def _shortened(line: str) -> str:
    """Return a line without its middle, where it is long; the advice at its end stays."""
    if len(line) <= _LINE:
        return line
    half = _LINE // 2
    left_out = len(line) - 2 * half
    return f"{line[:half]} [... {left_out:,} characters left out ...] {line[-half:]}"


def check_type(name: str, value: object, kind: type[T], advice: str = "") -> T:
    """Return ``value`` if it is a ``kind``.

    Parameters
    ----------
    name
        Name of the argument.
    value
        The value given.
    kind
        A class of ours, or of another package.
    advice
        Advice: a valid alternative.
    """
    if isinstance(value, kind):
        return value
    raise wrong_type(name, f"a {public_name(kind)}", value, f"; {advice}" if advice else "")


def public_name(kind: type) -> str:
    """Return a class with the package, or the room of ours, that users import it from."""
    package, *rooms = kind.__module__.split(".")
    if package == "builtins":
        return kind.__name__
    is_ours = package in ("pipesim", "pipeexec")
    if is_ours and kind.__name__ not in sys.modules[package].__all__:
        package = ".".join([package, *rooms[:1]])
    return f"{package}.{kind.__name__}"


def wrong_type(name: str, wanted: str, value: object, advice: str = "") -> ArgumentTypeError:
    """Return the error of a value of another type than ``wanted``."""
    got = f"{value_text(value)} ({type(value).__name__})"
    return ArgumentTypeError(f"{name} must be {wanted}, got {got}{advice}")


def check_text(name: str, value: object) -> str:
    """Return ``value`` if it is a text."""
    if isinstance(value, str):
        return value
    raise wrong_type(name, "a text", value)


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False: a text such as "no" would count as True.

    A bool of NumPy, as tables of pandas have them, is returned as Python's.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise wrong_type(name, "True or False", value)


def check_function(name: str, value: object, form: str) -> None:
    """Raise unless ``value`` can be called; ``form`` is an example of a call."""
    if not callable(value):
        raise wrong_type(name, f"a function, called as {form}", value)


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """Return ``value`` as an int if it is a whole number of at least ``minimum``."""
    if type(value) is int and value >= minimum:  # most values, which need no slower check
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentError(
            f"{name} must be a whole number, got {value!r} ({type(value).__name__}); "
            f"give an int of at least {minimum}"
        )
    if value < minimum:
        raise ArgumentError(f"{name} must be at least {minimum}, got {value_text(value)}")
    return int(value)


def check_list(name: str, values: object, allowed: str) -> list[Any]:
    """Return the values of a sequence, which is neither text nor a mapping, as a list."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ArgumentTypeError(f"{name} must be a list, got {values!r:.60}; give {allowed}")
    return list(values)


def check_numbers(name: str, values: object) -> list[float]:
    """Return the numbers of a sequence as floats; NaN is one."""
    items = check_list(name, values, "numbers, such as [1.0, 2.5]")
    if not all(isinstance(x, numbers.Real) and not isinstance(x, bool) for x in items):
        raise ArgumentTypeError(f"{name} must be numbers, got {values!r:.60}")
    try:
        return [float(x) for x in items]
    except OverflowError as error:
        raise ArgumentTypeError(f"{name} must fit in a float, got {values!r:.60}") from error


def number(value: object) -> float | None:
    """Return ``value`` as a float, or None where it is no real number, a boolean, or too large."""
    if type(value) is float:  # most values
        return None if math.isnan(value) else value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        got = float(value)
    except OverflowError:  # an integer or a fraction beyond the largest float
        return None
    return None if math.isnan(got) else got


def value_text(value: object) -> str:
    """Return a value for a message; Python writes no whole numbers of thousands of digits."""
    is_short = not isinstance(value, int) or abs(value) < 10**30
    return f"{value!r:.60}" if is_short else "a number of more than 30 digits"
