"""`checked`: annotations of a function or of a dataclass check its arguments, once, at the door.

`checked_names` refuses unknown names of arguments alone, where the door checks values itself.

Annotations that are checked: `bool`, `str`, classes, `Literal`, `Callable`, `Mapping`, the aliases
below, and unions and lists of these. All others, such as plain `int` and `float`, sequences, arrays
and paths, are left to the function, and so are classes that are imported for type checking alone.

The check is one more frame, which warnings skip (`pipesim.utils.caller_warnings.warn_caller`).
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    PipeError,
    check_count,
    check_flag,
    check_name,
    check_text,
    check_type,
    number,
    suggestion,
    value_text,
    wrong_type,
)

Door = TypeVar("Door", bound=Callable[..., Any])
_MAX = sys.float_info.max


class Range(NamedTuple):
    """Numbers from ``low``, or above it, to ``high``; by default all finite ones."""

    low: float = -_MAX
    high: float = _MAX
    above: bool = False
    #: Reads a text, such as "80GiB", as a number; None if it is none.
    parse: Callable[[str], float | None] | None = None

    def text(self, kind: type) -> str:
        """Return the description of the allowed numbers of a type."""
        finite = "" if math.inf in (-self.low, self.high) else "finite "
        low = f"{'above' if self.above else 'at least'} {_digits(self.low)}" * (self.low > -_MAX)
        high = f"at most {_digits(self.high)}" * (self.high < _MAX)
        limits = ", ".join(filter(None, [low, high]))
        words = "whole " if kind is int else finite
        return f"a {words}number ({limits})" if limits else f"a {words}number"


def _digits(number: float) -> str:
    """Return the shortest text of a limit: 1e+15, but 1048577."""
    text = f"{number:g}"
    return text if float(text) == number else f"{number:.17g}"


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
NotNegative = Annotated[float, Range(0)]
Seconds = NotNegative
Positive = Annotated[float, Range(0, above=True)]
Fraction = Annotated[float, Range(0, 1)]
#: Bytes or FLOP/s up to which no product in a formula overflows.
LARGEST_AMOUNT = 1e100
Amount = Annotated[float, Range(0, LARGEST_AMOUNT)]


class Check(NamedTuple):
    """Check of the values of one annotation."""

    #: Takes the name of an argument and its value. Returns the value, of the annotated type, or
    #: raises `ArgumentError`.
    run: Callable[[str, Any], Any]
    #: Allowed values, for the message of a union.
    wanted: str
    #: A union refuses a value of this type with the message of this check.
    kind: type = NoneType


def checked(door: Door) -> Door:
    """Return a function, or the dataclass itself, that checks its arguments by their annotations.

    A text in ``Annotated`` is advice for the message: ``Annotated[Costs, "give ps.Costs(...)"]``;
    for a function, an example of a call: ``Annotated[Callable[..., Any], "loss_fn(output)"]``; for
    `str`, `bool` and lists, the allowed values: ``Annotated[str, "a folder"]`` is one that is not
    empty.
    """
    return checked_as(ArgumentError)(door)


def checked_as(error: type[PipeError]) -> Callable[[Door], Door]:
    """Return `checked` that raises an error of this class instead of `ArgumentError`."""

    def decorate(door: Door) -> Door:
        if not isinstance(door, type):
            return cast(Door, _checked_call(door, (door,), error))
        init = vars(door)["__init__"]
        setattr(door, "__init__", _checked_call(init, door.__mro__[::-1], error))  # noqa: B010
        return cast(Door, door)

    return decorate


def checked_names(door: Door) -> Door:
    """Return a function, or the class itself, that refuses arguments by unknown names."""
    if isinstance(door, type):
        setattr(door, "__init__", checked_names(vars(door)["__init__"]))  # noqa: B010
        return cast(Door, door)
    names = frozenset(inspect.signature(door).parameters)

    @functools.wraps(door)
    def call(*args: Any, **named: Any) -> Any:
        if not names.issuperset(named):
            raise _unknown_argument(door, next(x for x in named if x not in names))
        return door(*args, **named)

    return cast(Door, call)


def _unknown_argument(function: Callable[..., Any], name: str) -> ArgumentTypeError:
    """Return the error of an argument that a function, or the class of an ``__init__``, lacks."""
    owner = function.__qualname__.removesuffix(".__init__")
    names = [x for x in inspect.signature(function).parameters if x not in ("self", "cls")]
    advice = suggestion(name, names) or f"; it takes {', '.join(names)}"
    takers = [
        f"{package}.{x}"
        for package in ("pipesim", "pipeexec")
        if package in sys.modules
        for x in sys.modules[package].__all__
        if callable(door := getattr(sys.modules[package], x))
        and name in inspect.signature(door).parameters
    ]
    if 1 <= len(takers) <= 3:
        advice += f" ({' and '.join(takers)} {'takes' if len(takers) == 1 else 'take'} {name!r})"
    return ArgumentTypeError(f"{owner} takes no argument {name!r}{advice}")


def _checked_call(
    function: Callable[..., Any], owners: tuple[Any, ...], error: type[PipeError]
) -> Callable[..., Any]:
    """Return a function that checks its arguments by the annotations of the owners."""
    parameters = inspect.signature(function).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    usual = {x.name: x.default for x in parameters if x.kind not in several}
    takes_any = any(x.kind == inspect.Parameter.VAR_KEYWORD for x in parameters)
    names = frozenset(usual)
    by_position = [x.name for x in parameters if x.kind <= x.POSITIONAL_OR_KEYWORD]

    @functools.cache  # at the first call: modules may import each other while they are loaded
    def checks() -> dict[str, tuple[Callable[[str, Any], Any], Any]]:
        every = {name: x for owner in owners for name, x in checks_of(owner).items()}
        return {name: (x.run, usual[name]) for name, x in every.items() if x and name in usual}

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        find, values = checks().get, list(args)
        if not (takes_any or names.issuperset(named)):
            raise _unknown_argument(function, next(x for x in named if x not in names))
        try:
            for k, (name, value) in enumerate(zip(by_position, args, strict=False)):
                if (check := find(name)) and value is not check[1]:
                    values[k] = check[0](name, value)
            for name, value in named.items():
                if (check := find(name)) and value is not check[1]:
                    named[name] = check[0](name, value)
        except ArgumentError as wrong:
            if error is ArgumentError:
                raise
            raise error(*wrong.args) from None
        return function(*values, **named)

    return call


def checks_of(owner: Any) -> dict[str, Check | None]:
    """Return the check of each annotation of a function or class itself; None without one."""
    checks: dict[str, Check | None] = {}
    for name, annotation in inspect.get_annotations(owner).items():
        alone = SimpleNamespace(__annotations__={name: annotation})
        module = vars(sys.modules[owner.__module__])
        try:
            checks[name] = check_of(get_type_hints(alone, module, include_extras=True)[name])
        except NameError:  # imported for type checking alone
            checks[name] = None
    return checks


def check_of(hint: Any) -> Check | None:
    """Return the check of a type; None if it has none."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        details = hint.__metadata__
        limits = [x for x in details if isinstance(x, Range)]
        if limits:
            return _of_range(parts[0], limits[0])
        return _of_class(parts[0], *details) or check_of(parts[0])
    if origin is Literal:
        choices = " or ".join(map(repr, parts))
        return Check(lambda name, value: check_name(name, value, parts), choices, str)
    return _of_union(parts) if origin in (Union, UnionType) else _of_class(hint)


#: Types that need another check than `isinstance`, or none.
_PLAIN: dict[Any, Check | None] = {
    bool: Check(check_flag, "True or False"),
    str: Check(check_text, "a text", str),
    **dict.fromkeys((object, Any, int, float), None),
}


def _of_class(hint: Any, advice: str = "") -> Check | None:
    """Return the check of a class, a function or a mapping."""
    kind: Any = get_origin(hint) or hint
    if kind is list:
        return _of_list(get_args(hint)[0], advice)
    if kind in (str, bool) and advice:
        return Check(lambda name, x: _described(name, x, kind, advice), advice, kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in (Mapping, Callable):
        word, example = ("mapping", "such") if kind is Mapping else ("function", "called")
        wanted = f"a {word}, {example} as {advice}" if advice else f"a {word}"

        def run(name: str, value: Any) -> Any:
            if isinstance(value, kind):
                return value
            raise wrong_type(name, wanted, value)

        return Check(run, wanted, kind)
    if not isinstance(hint, type) or getattr(hint, "_is_protocol", False):
        return None
    return Check(lambda name, x: check_type(name, x, kind, advice), f"a {kind.__name__}", kind)


def _described(name: str, value: Any, kind: type, wanted: str) -> Any:
    if isinstance(value, kind) and value != "":
        return value
    raise wrong_type(name, wanted, value)


def _of_list(hint: Any, advice: str) -> Check | None:
    """Return the check of a list of values of a type."""
    values = check_of(hint)
    if values is None:
        return None
    wanted = f"a list of {advice}" if advice else f"a list, each {values.wanted}"

    def run(name: str, value: Any) -> Any:
        try:
            if isinstance(value, list) and (value or not advice):
                return [values.run(name, x) for x in value]
        except ArgumentError:
            pass
        raise wrong_type(name, wanted, value)

    return Check(run, wanted)


def _of_range(kind: type, allowed: Range) -> Check:
    """Return the check of whole numbers, or of real ones, within a range."""
    wanted = allowed.text(kind)
    high = math.inf if kind is int and allowed.high == _MAX else allowed.high

    def run(name: str, value: Any) -> Any:
        if isinstance(value, str) and allowed.parse:
            value = value if (parsed := allowed.parse(value)) is None else parsed
        result = check_count(name, value, int(allowed.low)) if kind is int else number(value)
        if result is None:
            raise wrong_type(name, wanted, value)
        if allowed.high < result and allowed.high < _MAX:
            most = _digits(allowed.high)
            raise ArgumentError(f"{name} must be at most {most}, got {value_text(value)}")
        if not allowed.low <= result <= high or (allowed.above and result == allowed.low):
            raise ArgumentError(f"{name} must be {wanted}, got {value_text(value)}")
        return result

    return Check(run, wanted, kind)


def _of_union(parts: tuple[Any, ...]) -> Check | None:
    """Return the check of a union, whose first part that accepts a value returns it."""
    names = tuple(x for part in parts if get_origin(part) is Literal for x in get_args(part))
    types = [part for part in parts if get_origin(part) is not Literal and part is not NoneType]
    checks = [check_of(hint) for hint in [*([Literal[names]] if names else []), *types]]
    judges = [check for check in checks if check]
    if len(judges) < len(checks):
        return None
    is_optional = NoneType in parts
    wanted = " or ".join([*(check.wanted for check in judges), *["None"] * is_optional])

    def run(name: str, value: Any) -> Any:
        if value is None and is_optional:
            return None
        error = None
        for check in judges:
            try:
                return check.run(name, value)
            except ArgumentError as wrong:
                error = wrong if len(judges) == 1 or isinstance(value, check.kind) else error
        raise error or wrong_type(name, wanted, value)

    return Check(run, wanted, judges[0].kind)
