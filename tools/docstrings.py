"""List public names whose docstring lacks its summary, a parameter or the result.

``python tools/docstrings.py [--count] [PREFIX...]`` prints a line for each missing part of names
that begin with a prefix, such as ``px.`` or ``ps.Timeline``; of all names by default. Exits with 1
if there is any. With ``--count`` it prints the number of names that lack each part.

Public names are those of ``__all__`` of both packages and of their rooms, and the public methods
and properties of their classes. A property needs a summary alone. Any other
name needs a description of each parameter and of its result. Other sections are not owed.
"""

from __future__ import annotations

import argparse
import enum
import functools
import importlib
import inspect
import pkgutil
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from numpydoc.docscrape import NumpyDocString

import pipeexec
import pipesim
from pipesim.utils.accessors import OwnerMethod, Subject

PACKAGES = {"ps": pipesim, "px": pipeexec}
ROOTS = tuple(package.__name__ for package in PACKAGES.values())
#: Parts of a docstring, in the order of reports.
PARTS = ("summary", "Parameters", "Returns")
#: Rooms of the commands, and of parts of searches.
INNER = ("cli", "order_search")


def exported() -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the object of each name that a package or a room exports, once."""
    for short, package in PACKAGES.items():
        yield from ((f"{short}.{name}", getattr(package, name)) for name in sorted(package.__all__))
        for info in pkgutil.iter_modules(package.__path__):
            if info.name[0] != "_" and info.name not in INNER:
                room = importlib.import_module(f"{package.__name__}.{info.name}")
                for name in sorted({*getattr(room, "__all__", ())} - {*package.__all__}):
                    yield f"{short}.{info.name}.{name}", getattr(room, name)


#: Names of public classes; a member that another class inherits from one is reported once.
PUBLIC = frozenset(name.rpartition(".")[2] for name, _ in exported())


def public_names() -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the object of each public name, with those of methods."""
    for name, value in exported():
        yield from _with_members(name, value)


def _with_members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if inspect.ismodule(value):
        for member in sorted(getattr(value, "__all__", ())):
            yield from _with_members(f"{name}.{member}", getattr(value, member))
    elif isinstance(value, type) and not isinstance(value, types.GenericAlias):
        yield name, value
        for key in sorted(dir(value)):
            owner = next(base for base in value.__mro__ if key in base.__dict__ or base is object)
            is_own = owner is value or owner.__name__ not in PUBLIC
            if key[0] != "_" and owner.__module__.startswith(ROOTS) and is_own:
                attribute = getattr(
                    value, key
                )  # imports a registered method, which takes its place
                member = inspect.getattr_static(value, key)
                if _is_view(attribute):
                    yield from _with_members(f"{name}.{key}", attribute)
                elif _is_property(member):
                    yield f"{name}.{key}", member
                elif callable(attribute):
                    is_method = isinstance(member, (types.FunctionType, OwnerMethod))
                    yield (
                        f"{name}.{key}",
                        types.MethodType(attribute, value) if is_method else attribute,
                    )
    elif inspect.isroutine(value):
        yield name, value


def _is_view(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Subject)


def _is_property(value: Any) -> bool:
    return isinstance(value, (property, functools.cached_property))


def missing_parts(name: str, value: Any) -> list[tuple[str, str]]:
    """Return each part that a docstring lacks, and what of it."""
    doc = inspect.getdoc(value) or ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sections that numpydoc does not have are no parts
        sections = NumpyDocString(doc)
    summary = sections["Summary"]
    missing = []
    if len(summary) != 1 or not summary[0].endswith("."):
        missing.append(("summary", "one line that ends with a full stop"))
    if _is_property(value):
        return missing
    undocumented = _parameters(value) - _described(sections)
    if undocumented:
        missing.append(("Parameters", ", ".join(sorted(undocumented))))
    if _returns_something(value) and not (sections["Returns"] or sections["Yields"]):
        missing.append(("Returns", ""))
    return missing


def _parameters(function: Any) -> set[str]:
    if isinstance(function, enum.EnumType) or _is_view(function):
        return set()
    names = inspect.signature(function).parameters.keys() - _fields_of_record(function)
    return {name for name in names if name not in ("self", "cls") and name[0] != "_"}


def _fields_of_record(function: Any) -> set[str]:
    """Return the parameters of a record that its own docstring describes.

    A class inherits its fields, and a function shows them in place of ``**settings``.
    """
    records = function.__mro__[1:] if isinstance(function, type) else [vars(function).get("record")]
    return {
        x.name
        for record in records
        if is_dataclass(record)
        for x in fields(record)
        if x.name in _described(NumpyDocString(inspect.getdoc(record) or ""))
    }


def _described(sections: NumpyDocString) -> set[str]:
    """Return the parameters that have a description; the fields of a dataclass are attributes."""
    entries = [
        entry
        for section in ("Parameters", "Other Parameters", "Attributes")
        for entry in sections[section]
        if "".join(entry.desc).strip()
    ]
    return {name.strip(" *") for entry in entries for name in entry.name.split(",")}


def _returns_something(function: Any) -> bool:
    if isinstance(function, type):
        return False
    annotation = getattr(function, "__annotations__", {}).get("return")
    return annotation not in (None, "None", "NoReturn", types.NoneType)


def main(arguments: list[str]) -> int:
    """Print what is missing; return the exit status."""
    parser = argparse.ArgumentParser(description="list public names whose docstring lacks a part")
    parser.add_argument("--count", action="store_true", help="print totals alone")
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX")
    options = parser.parse_args(arguments)
    names = [
        (name, value)
        for name, value in public_names()
        if not options.prefixes or name.startswith(tuple(options.prefixes))
    ]
    lines = [
        (name, part, detail) for name, value in names for part, detail in missing_parts(name, value)
    ]
    if options.count:
        counts = Counter(part for _, part, _ in lines)
        print(f"{len(names)} names; without " + ", ".join(f"{x}: {counts[x]}" for x in PARTS))
    else:
        for name, part, detail in lines:
            print(f"{name}: {part}{f' ({detail})' if detail else ''}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
