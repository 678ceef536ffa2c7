"""Methods that higher rooms register at lower classes, and accessors."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pipesim as ps
from pipesim.old_names import TIMELINE
from pipesim.utils.accessors import Accessor, OwnerMethod, Subject, add_methods

PACKAGE = Path(ps.__file__).parent
#: Registrations of a fresh interpreter, in which none is in use yet: class, name, place and form.
CODE = """
import importlib, sys
import pipesim
from pipesim.utils.accessors import Late
for module in [m for n, m in sys.modules.items() if n.startswith("pipesim.")]:
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            for name, value in vars(kind).items():
                if isinstance(value, Late):
                    target = getattr(importlib.import_module(value.place.split(":")[0]),
                                     value.place.split(":")[1])
                    form = "Accessor" if isinstance(target, type) else value.wrap.__name__
                    print(module.__name__, kind.__name__, name, value.place, form)
"""


def timeline() -> ps.Timeline:
    costs = ps.Costs(forward=1, backward=2, activation_bytes=1)
    return ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs, memory_limit=3)


def declared() -> Iterator[tuple[str, ...]]:
    """Yield what classes declare under ``TYPE_CHECKING``: class, name, place and form."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        places = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for kind in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
            if kind.name.startswith("_"):
                continue
            for block in kind.body:
                if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
                    for line in block.body:
                        assert isinstance(line, ast.Assign)
                        form, _, name = ast.unparse(line.value).rstrip(")").rpartition("(")
                        target = ast.unparse(line.targets[0])
                        yield module, kind.name, target, places[name], form or "<lambda>"


@pytest.mark.slow
def test_declared_names_are_registered() -> None:
    """Type checkers and the interpreter know the same methods; private ones need no declaration."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    registered = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert len(registered) > 30
    assert {row for row in registered if row[2][0] != "_"} == set(declared())


def test_access_on_the_class_gives_the_function() -> None:
    """So its signature and docstring stand once, in the file that has it."""
    from pipesim.plot.page.save import item_to_html
    from pipesim.trace.measured_table import timeline_from_table

    for kind in (ps.Timeline, ps.Comparison, ps.TaskGraph, ps.Schedule):
        assert kind.to_html is item_to_html
    assert ps.Timeline.from_table is timeline_from_table
    assert timeline().from_table is timeline_from_table
    assert next(iter(inspect.signature(timeline().to_html).parameters)) == "path"
    assert "why" in dir(timeline())


def test_accessor() -> None:
    """Its methods are bound to the object; its class has the functions."""
    from pipesim.plot.charts import idle

    measured = timeline()
    assert measured.plot.idle.__self__ is measured
    assert ps.Timeline.plot.idle is idle
    assert list(inspect.signature(measured.plot.idle).parameters)[:2] == ["ax", "legend"]
    assert list(inspect.signature(measured.plot).parameters)[:2] == ["ax", "transfers"]
    assert repr(measured.why) == f"<TimelineWhy of {measured!r}>"


def test_copies_pickles_and_subclasses() -> None:
    """All have the accessors, and the values of the object that they belong to."""

    class Named(ps.Timeline):
        @property
        def makespan(self) -> float:
            return 12.0

    first = timeline()
    for other in (copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):  # noqa: S301
        assert other.why.lower_bound == first.why.lower_bound == 9
        assert other.memory.peak.tolist() == [2, 2]
    named = Named(first.graph, first.start, first.end, costs=first.costs)
    assert named.memory.peak.tolist() == [2, 2]
    assert named.plot.idle.__self__ is named
    assert Named.plot is ps.Timeline.plot


def test_lower_bound_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although `Timeline.why` is made anew at each access."""
    from pipesim.analysis import why

    calls: list[ps.Timeline] = []
    monkeypatch.setattr(why, "timeline_bound", lambda x: calls.append(x) or 5.0)
    first = timeline()
    assert first.why.lower_bound == first.why.lower_bound == 5
    assert calls == [first]


def test_register_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method is imported at first use, an accessor's method gets the object of the accessor."""
    module = types.ModuleType("late_module")
    vars(module)["length"] = lambda words, more=0: len(words) + more

    class Words(list[str]):
        pass

    class WordCounts(Subject[Words]):
        exact = OwnerMethod(lambda words: len(set(words)))

    vars(module)["WordCounts"] = WordCounts
    add_methods(Words, length="late_module:length", counts="late_module:WordCounts")
    add_methods(WordCounts, all="late_module:length")
    words = Words("aab")
    with pytest.raises(ModuleNotFoundError, match="late_module"):
        words.length()
    monkeypatch.setitem(sys.modules, "late_module", module)
    assert words.length(more=1) == 4
    assert words.counts.exact() == 2
    assert words.counts.all(more=2) == 5
    assert isinstance(vars(Words)["counts"], Accessor)


@pytest.mark.parametrize("name", TIMELINE)
def test_old_names(name: str) -> None:
    """Each gives the value of the new name, and warns at the caller's line."""
    first = timeline()
    with pytest.warns(
        DeprecationWarning, match=rf"{name} is now Timeline.{TIMELINE[name]}"
    ) as warned:
        old: Any = getattr(first, name)
    assert warned[0].filename == __file__
    new: Any = first
    for part in TIMELINE[name].split("."):
        new = getattr(new, part)
    assert str(old) == str(new)
    assert name not in dir(first)


def test_unknown_names_are_refused_as_usual() -> None:
    """An error within a property names what is missing there."""

    class Broken(ps.Timeline):
        @property
        def broken(self) -> int:
            return self.start.missing  # type: ignore[attr-defined,no-any-return]

    first = timeline()
    with pytest.raises(AttributeError, match=r"'Timeline' object has no attribute 'peaks'"):
        first.peaks  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"ndarray' object has no attribute 'missing'"):
        Broken(first.graph, first.start, first.end).broken  # noqa: B018
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hasattr(first, "__missing__")
