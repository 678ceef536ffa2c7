"""Methods and accessors that a higher room adds to a lower class, as pandas registers ``.plot``.

The ``__init__`` of the room registers the place of each function, whose file is imported at first
use. The class declares the same names under ``TYPE_CHECKING``, for type checkers and editors; a
test compares the two. Signature and docstring are those of the function alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from pipesim.utils.caller_warnings import warn_caller

T = TypeVar("T")
View = TypeVar("View")
P = ParamSpec("P")
R = TypeVar("R")


def add_methods(kind: type, **places: str) -> None:
    """Register methods of a class, each by name and place, such as ``"pipesim.plot.html:f"``.

    The place of a subclass of `Subject` is that of an accessor.
    """
    wrap = OwnerMethod if issubclass(kind, Subject) else lambda function: function
    for name, place in places.items():
        setattr(kind, name, Late(kind, name, place, wrap))


def add_constructors(kind: type, **places: str) -> None:
    """Register functions that return an object of a class, as static methods of it."""
    for name, place in places.items():
        setattr(kind, name, Late(kind, name, place, staticmethod))


class Late:
    """Attribute of a class that is imported at first use, and then stands in its place."""

    def __init__(self, kind: type, name: str, place: str, wrap: Callable[[Any], Any]) -> None:
        self.kind, self.name, self.place, self.wrap = kind, name, place, wrap

    def __get__(self, instance: object, owner: type) -> Any:
        module, _, name = self.place.partition(":")
        value = getattr(import_module(module), name)
        attribute = Accessor(value) if isinstance(value, type) else self.wrap(value)
        setattr(self.kind, self.name, attribute)
        return attribute.__get__(instance, owner)


class Accessor(Generic[T, View]):
    """Attribute of a class that gives its objects ``view(object)``: results of one subject."""

    def __init__(self, view: Callable[[T], View]) -> None:
        self.view = view

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[[T], View]: ...
    @overload
    def __get__(self, instance: T, owner: type) -> View: ...
    def __get__(self, instance: T | None, owner: type) -> Callable[[T], View] | View:
        return self.view if instance is None else self.view(instance)


class Subject(Generic[T]):
    """Base class of the views that accessors give."""

    def __init__(self, owner: T) -> None:
        self._owner = owner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._owner!r}>"


class OwnerMethod(Generic[T, P, R]):
    """Method of a view that calls a function with the object of the view."""

    def __init__(self, function: Callable[Concatenate[T, P], R]) -> None:
        self.function = function

    @overload
    def __get__(self, view: None, kind: type) -> Callable[Concatenate[T, P], R]: ...
    @overload
    def __get__(self, view: Subject[T], kind: type) -> Callable[P, R]: ...
    def __get__(self, view: Subject[T] | None, kind: type) -> Callable[..., R]:
        return self.function if view is None else MethodType(self.function, view._owner)


def keep_old_names(kind: type, names: Mapping[str, str]) -> None:
    """Let objects of a class have attributes by old names too, with a `DeprecationWarning`.

    The new names may have dots. The old ones are listed nowhere, such as by ``dir``.
    """

    def old_attribute(self: object, name: str) -> Any:
        if name not in names:
            return object.__getattribute__(self, name)  # raises the usual error
        new = names[name]
        warn_caller(f"{kind.__name__}.{name} is now {kind.__name__}.{new}", DeprecationWarning)
        return attrgetter(new)(self)

    setattr(kind, "__getattr__", old_attribute)  # noqa: B010 - type checkers know the new names alone
