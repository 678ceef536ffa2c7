"""Bad values of every parameter of every public callable: refused by name, or allowed."""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import attack_table
import attack_table_exec
import pytest
from attack import Outcome, attacks, call, outcome, parameters, sandbox
from bad_values import make_paths
from command_lines import COMMANDS, attack_option, options, texts
from command_lines import run as run_command
from exceptions import ALLOWED, ENDLESS, UNATTACKED
from public_names import public_values

import pipeexec as px
import pipeexec.cli
import pipesim.cli
from pipesim.utils.accessors import OwnerMethod, Subject

ROWS = {**attack_table.GOOD, **attack_table_exec.GOOD, **attack_table_exec.REFUSED}


MAINS = {"pipesim": pipesim.cli.main, "pipeexec": pipeexec.cli.main}


def public() -> Iterator[str]:
    """Yield the names of all public callables, methods included."""
    for name, thing in public_values():
        if inspect.ismodule(thing):
            yield from (f"{name}.{attribute}" for attribute in getattr(thing, "__all__", ())
                        if inspect.isroutine(getattr(thing, attribute)))  # fmt: skip
        elif inspect.isroutine(thing) or isinstance(thing, type):
            yield name
            if inspect.isclass(thing):
                yield from (f"{name}.{attribute}" for attribute in methods(thing))


def methods(kind: type) -> Iterator[str]:
    """Yield the public methods of a class that our packages define."""
    for name in dir(kind):
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        if name.startswith("_") or owner.__module__.partition(".")[0] not in MAINS:
            continue
        view = getattr(kind, name)  # a method that is registered takes its place at first use
        method = FunctionType | classmethod | staticmethod | OwnerMethod
        if isinstance(view, type) and issubclass(view, Subject):
            if "__call__" in vars(view):
                yield name
            yield from (f"{name}.{inner}" for inner in methods(view))
        elif isinstance(vars(owner)[name], method):
            yield name


def test_complete() -> None:
    """Every public callable is attacked, or says why not."""
    names = set(public())
    assert names - set(ROWS) - set(UNATTACKED) == set()
    assert (set(ROWS) | set(UNATTACKED)) - names == set()
    assert set(ROWS) & set(UNATTACKED) == set()


def callable_of(name: str) -> Any:
    """Return the callable of a name."""
    package, *path, last = name.split(".")
    owner = pkgutil.resolve_name(".".join([{"ps": "pipesim", "px": "pipeexec"}[package], *path]))
    value = getattr(owner, last)
    if isinstance(value, type) and issubclass(value, Subject):
        owner, last, value = value, "__call__", value.__call__
    static = isinstance(inspect.getattr_static(owner, last), staticmethod | classmethod)
    return value if static or not inspect.isclass(owner) else _with_self(value)


def _with_self(function: Any) -> Any:
    """Return a method whose first parameter is ``self``, as a function may name its own."""
    first, *others = inspect.signature(function).parameters.values()
    if first.name == "self":
        return function
    method = functools.wraps(function)(lambda self, *args, **named: function(self, *args, **named))
    parameters = [first.replace(name="self"), *others]
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


def close(name: str, result: object) -> None:
    """End the threads of what a constructor made."""
    if name == "px.Pipeline" and isinstance(result, px.Pipeline):
        result.close()


def outcomes(name: str, folder: Path) -> list[Outcome]:
    """Return what becomes of each bad value of each parameter of one callable."""
    function, make = callable_of(name), ROWS[name]
    end = functools.partial(close, name)
    slow = name in attack_table_exec.SLOW
    attack = functools.partial(outcome, name, close=end)
    paths = make_paths(folder)
    results = []
    if name not in attack_table_exec.REFUSED:
        end(call(function, make(folder)))
    with sandbox():
        for index, parameter in enumerate(parameters(function)):
            values = attacks(parameter, index + len(name), seldom=slow)
            if "Path" in str(parameter.annotation):
                values = values | {
                    path: functools.partial(paths.__getitem__, path) for path in paths
                }
            for value, make_bad in values.items():
                bad, arguments = make_bad(), make(folder)
                if not is_default(parameter, bad) and not is_long(parameter, value):
                    results.append(attack(function, arguments, parameter, value, bad))
    return results


def is_default(parameter: inspect.Parameter, value: object) -> bool:
    """Return whether a value is what a parameter has if nothing is given."""
    return type(value) is type(parameter.default) and bool(value == parameter.default)


def is_long(parameter: inspect.Parameter, value: str) -> bool:
    """Return whether a value asks for as much work as it says."""
    return parameter.name in ENDLESS and value.startswith("10**")


def allowed(result: Outcome) -> bool:
    """Return whether `ALLOWED` has it, or a callable that a test cannot call well refused it."""
    values, _ = ALLOWED.get((result.name, result.parameter), ((), ""))
    refused = result.kind == "unnamed" and result.name in attack_table_exec.REFUSED
    return refused or (result.kind == "accepted" and (result.value in values or "*" in values))


@pytest.mark.slow
@pytest.mark.usefixtures("few_messages")
@pytest.mark.parametrize("name", sorted(ROWS))
def test_bad_values(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is refused by name, or its value is documented."""
    monkeypatch.chdir(tmp_path)
    results = outcomes(name, tmp_path)
    wrong = [str(result) for result in results if not result.good and not allowed(result)]
    assert not wrong, f"{len(wrong)} of {len(results)} calls:\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.usefixtures("few_messages")
@pytest.mark.parametrize("name", COMMANDS)
def test_bad_options(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option with a bad text: exit status 2 and one line on stderr."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    main = MAINS[name.partition(" ")[0]]
    if name != "pipeexec show":
        assert run_command(main, COMMANDS[name], seconds=0)[0] == 0
    with sandbox():
        results = [
            attack_option(name, main, option, text, folder)
            for index, option in enumerate(options(main, name))
            for text in texts(name, option, index)
        ]  # fmt: skip
    wrong = [str(result) for result in results if not result.good]
    assert not wrong, f"{len(wrong)} of {len(results)} calls:\n" + "\n".join(wrong)
