"""Names of torch and of the CUDA driver in the sources, found by parsing, and whether they exist.

There is no list of names to keep up to date. Every dotted name that begins with an import of torch
is looked up in the installed torch. Every call of one is bound to its signature, with as many
arguments as the source gives. Methods are found where the source says the class: an annotation, or
an assignment of a call. The driver's functions are those that
`pipeexec.devices.green_contexts` calls by name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from places import ROOT

#: What is returned by functions of torch whose results the sources go on to use.
_RETURNS = {
    "torch.cuda.current_stream": "torch.cuda.Stream",
    "torch.cuda.default_stream": "torch.cuda.Stream",
}
#: Classes whose objects are followed: their methods are attributes of the class.
_CLASSES = re.compile(r"torch\.Tensor|torch\.cuda\.(\w+\.)*_?[A-Z]\w*")
#: Methods that no class of this project has, so that they are torch's on any object.
_METHODS = {
    "elapsed_time": "torch.cuda.Event",
    "record_stream": "torch.Tensor",
    "wait_stream": "torch.cuda.Stream",
}
#: Classes from which these derive in a torch built for CUDA, and not in others.
_BASES = {"torch.cuda.Stream": "torch.Stream", "torch.cuda.Event": "torch.Event"}
#: Names that only a torch built for CUDA has.
_CUDA_BUILDS = re.compile(r"torch\._C\._[cC]uda")
_DRIVER_FUNCTION = re.compile(r"cu[A-Z]\w+")


class Use(NamedTuple):
    """A dotted name in a source file.

    Attributes
    ----------
    where
        File and line.
    name
        As torch has it, whatever the source imports it as.
    n_arguments, keywords
        Of a call: positional arguments, the object of a method included, and names. None and
        nothing where the name is not called.
    partial
        Whether the call may have more arguments than these.
    """

    where: str
    name: str
    n_arguments: int | None = None
    keywords: tuple[str, ...] = ()
    partial: bool = False


def sources() -> list[Path]:
    """Return the Python files that use torch, and of the tests those that use CUDA.

    Other tests run where there is no GPU, and fail by themselves.
    """
    code = [path for folder in ("pipeexec", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "torch.cuda" in path.read_text()]
    return sorted(code + tests)


def torch_uses(path: Path, text: str | None = None) -> list[Use]:
    """Return the uses of torch in a file, or in a text in its place."""
    text = path.read_text() if text is None else text
    if not any(word in text for word in ("torch", *_METHODS)):
        return []
    tree, visitor = ast.parse(text), _Uses(path.relative_to(ROOT))
    for _ in range(2):  # the first time finds what attributes of self are
        visitor.uses.clear()
        visitor.visit(tree)
        if not any(name.startswith("self.") for name in visitor.names):
            break
    return visitor.uses


def driver_uses(path: Path) -> Iterator[Use]:
    """Yield the functions of the CUDA driver that ``_call_driver(driver, name)`` calls by name.

    Other mentions of the driver's functions come without arguments.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and _dotted(node.func) == "_call_driver":
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield Use(where, str(name.value), len(node.args) - 2)
        if isinstance(node, ast.Attribute) and _DRIVER_FUNCTION.fullmatch(node.attr):
            yield Use(where, node.attr)


def problem(use: Use, root: Any = None) -> str | None:
    """Return what is wrong with a use under what is installed, or None.

    Parameters
    ----------
    use
        A name, perhaps called.
    root
        The object whose attribute the name is; None for a name that begins with a module.
    """
    if _CUDA_BUILDS.match(use.name) and not torch.backends.cuda.is_built():
        return None
    try:
        target = _find(use.name) if root is None else getattr(root, use.name)
    except (ImportError, AttributeError) as error:
        return f"{use.where}: there is no {use.name} ({error})"
    if use.n_arguments is None:
        return None
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # written in C
        return None
    bind = signature.bind_partial if use.partial else signature.bind
    try:
        bind(*[None] * use.n_arguments, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return f"{use.where}: {use.name}{signature}: {error}"
    return None


def _find(name: str) -> Any:
    """Return the object of a dotted name, importing its modules."""
    module, *rest = name.split(".")
    value: Any = importlib.import_module(module)
    for part in rest:
        if value is None:  # filled in while torch runs
            return None
        if inspect.ismodule(value) and not hasattr(value, part):
            # A module may delete the names of its own modules, as torch.optim does.
            value = importlib.import_module(f"{value.__name__}.{part}")
            continue
        base = _BASES.get(f"torch.cuda.{getattr(value, '__name__', '')}")
        is_bare = inspect.isclass(value) and base is not None and not hasattr(value, part)
        value = getattr(_find(base) if is_bare and base else value, part)
    return value


def _dotted(node: ast.AST) -> str:
    """Return a name or an attribute of one as the source has it; nothing for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = _dotted(node.value)
        return value and f"{value}.{node.attr}"
    return ""


class _Uses(ast.NodeVisitor):
    """Collects the uses of a file.

    ``names`` has what each local name is: a dotted name of torch, with ``()`` at the end for an
    object of that class.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uses: list[Use] = []
        self.names: dict[str, str] = {}

    def note(self, node: ast.AST, name: str, *call: Any) -> None:
        line = getattr(node, "lineno", 0)
        self.uses.append(Use(f"{self.path}:{line}", name.replace("()", ""), *call))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self.note(node, alias.name)
                self.names[alias.asname or "torch"] = alias.name if alias.asname else "torch"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                self.note(node, name)
                self.names[alias.asname or alias.name] = name

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = dict(self.names)
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self.names.pop(argument.arg, None)
            if argument.annotation is not None:
                self.bind(argument.arg, self.annotated(argument.annotation))
        self.generic_visit(node)
        fields = {name: kind for name, kind in self.names.items() if name.startswith("self.")}
        self.names = outer | fields

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self.bind(_dotted(target), self.resolve(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        kind = self.resolve(node.value) if node.value is not None else None
        self.bind(_dotted(node.target), kind or self.annotated(node.annotation))

    def bind(self, target: str, kind: str | None) -> None:
        self.names.pop(target, None)
        if target and kind is not None:
            self.names[target] = kind

    def annotated(self, annotation: ast.AST) -> str | None:
        """Return what an object with this annotation is."""
        kind = self.resolve(annotation)
        return f"{kind}()" if kind is not None and _CLASSES.fullmatch(kind) else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.resolve(node)
        if name is not None:
            self.note(node, name)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function, arguments = node.func, list(node.args)
        is_partial = isinstance(function, ast.Name) and function.id == "partial"
        delayed = is_partial and bool(arguments)
        if delayed:
            function = arguments.pop(0)
        name = self.resolve(function)
        if name is None:
            return
        if name.endswith("()"):
            name += ".__call__"
        more = any(isinstance(a, ast.Starred) for a in arguments) or any(
            keyword.arg is None for keyword in node.keywords
        )
        positional = [a for a in arguments if not isinstance(a, ast.Starred)]
        keywords = tuple(k.arg for k in node.keywords if k.arg is not None)
        self.note(node, name, len(positional) + ("()" in name), keywords, delayed or more)

    def resolve(self, node: ast.AST | None) -> str | None:
        """Return what an expression is, as in ``names``; None if that is not torch's."""
        if isinstance(node, ast.Call):
            function = self.resolve(node.func)
            if function in _RETURNS:
                return f"{_RETURNS[function]}()"
            followed = function is not None and _CLASSES.fullmatch(function)
            return f"{function}()" if followed else None
        if isinstance(node, (ast.Name, ast.Attribute)):
            kind = self.names.get(_dotted(node))
            if kind is not None or isinstance(node, ast.Name):
                return kind
            value = self.resolve(node.value)
            if value is None and node.attr in _METHODS:
                value = f"{_METHODS[node.attr]}()"
            # An attribute of an object's attribute cannot be found in the class.
            followed = value is not None and "()." not in value
            return f"{value}.{node.attr}" if followed else None
        return None
