"""Functions that a configuration names: import them, check their arguments, and call them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeexec.training.config.read_config import Config
from pipesim.errors import ArgumentError, ExecutionError, suggestion


def imported(name: str, folder: Path) -> Callable[..., Any]:
    """Import a function by ``"package.module:function"``, also from modules in a folder.

    Importing a module runs its code: it is the user's own, named in the user's own file.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not all(x.isidentifier() for x in [*module_name.split("."), function_name]):
        raise ArgumentError(
            f"a function is named 'package.module:function', got {name!r}; the module is imported, "
            "from the folder of the configuration too"
        )
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"cannot import {module_name!r} of {name!r}: {error}; put it beside the configuration, "
            "or install its package"
        ) from error
    except Exception as error:  # of the user's code
        raise ExecutionError(
            f"importing {module_name!r} raised {type(error).__name__}: {error!s:.300}"
        ) from error
    finally:
        sys.path.remove(str(folder))
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [x for x in vars(module) if not x.startswith("_") and callable(vars(module)[x])]
        raise ArgumentError(
            f"{module_name!r} has no function {function_name!r}{suggestion(function_name, names)}"
        )
    result: Callable[..., Any] = function
    return result


def named_class(name: str, module: Any, base: type) -> type:
    """Return a class of a module by its name."""
    value = vars(module).get(name)
    if isinstance(value, type) and issubclass(value, base) and value is not base:
        return value
    classes = (x for x in vars(module).values() if isinstance(x, type) and issubclass(x, base))
    names = sorted(x.__name__ for x in classes if x is not base and not x.__name__.startswith("_"))
    raise ArgumentError(
        f"{module.__name__} has no {name!r}{suggestion(name, names)} (known: {', '.join(names)})"
    )


def parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of a function's keyword parameters, and whether it takes any other."""
    values = inspect.signature(function).parameters.values()
    names = [x.name for x in values if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    return names, any(x.kind is x.VAR_KEYWORD for x in values)


def call(
    config: Config,
    section: str,
    name: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *positional: Any,
) -> Any:
    """Call a function with the arguments of a section.

    Raises
    ------
    ExecutionError
        If it raises another error than one of this package.
    """
    names, takes_any = parameters(function)
    names = names[len(positional) :]
    unknown = [x for x in arguments if x not in names]
    if unknown and not takes_any:
        raise config.argument_error(section, unknown[0], names, name)
    try:
        return function(*positional, **arguments)
    except ArgumentError:
        raise
    except Exception as error:  # of the user's code, or of torch
        raise ExecutionError(
            f"{config.path}: [{section}] {name} raised {type(error).__name__}: {error!s:.300}"
        ) from error
