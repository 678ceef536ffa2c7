"""Resolve names in docstrings that are shorter than their full ones, such as ``GraphError``.

Docstrings name classes, functions and methods as a reader of the same file knows them. A name that
Sphinx does not find is looked up by its last parts: `Timeline.busy` is `pipesim.Timeline.busy`.
A name that exists in the packages and has no page, such as that of an internal module, becomes code
without a link. Any other name stays an error.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from typing import Any

from sphinx.util.nodes import make_refnode

#: How the packages are imported in examples.
SHORT = {"ps.": "pipesim.", "px.": "pipeexec."}


def resolve(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Return a link to the object whose full name ends with the name of ``node``, or its text."""
    if node["refdomain"] != "py":
        return None
    target = node["reftarget"].removesuffix("()")
    for short, full in SHORT.items():
        if target.startswith(short):
            target = full + target.removeprefix(short)
    for accessor in ("memory", "plot", "why"):  # their classes have pages
        target = target.replace(f"Timeline.{accessor}.", f"Timeline{accessor.title()}.")
    objects = env.domains["py"].objects
    names = [name for name in objects if name == target or name.endswith(f".{target}")]
    owner = node.get("py:class") or ""
    # Of several, the one of the class that the docstring belongs to, or else the shortest.
    names.sort(key=lambda name: (f"{owner}.{target}" not in name, name.count("."), name))
    if names:
        entry = objects[names[0]]
        return make_refnode(
            app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, target
        )
    inner = target.removeprefix("pipesim.").removeprefix("pipeexec.")
    field = f"{owner.rpartition('.')[2]}.{target}"  # of the class whose docstring this is
    exists = target in PYTHON or not internal_names().isdisjoint([inner, target, field])
    return contnode if exists else None


#: Python's own names that docstrings mention.
PYTHON = frozenset(["print", "repr", "__getattr__"])


@functools.cache
def internal_names() -> frozenset[str]:
    """Return every suffix of the full name of each module, class, function, field and constant."""
    names: set[str] = set()
    for package in ("pipesim", "pipeexec"):
        top = importlib.import_module(package)
        names.add(package)
        for info in pkgutil.walk_packages(top.__path__, f"{package}."):
            if info.name.endswith("__main__"):
                continue
            module = importlib.import_module(info.name)
            names.update(_suffixes(info.name))
            for name, value in vars(module).items():
                if not name.startswith("__"):
                    names.update(_suffixes(f"{info.name}.{name}"))
                    names.update(_members(info.name, name, value))
    return frozenset(names)


def _members(module: str, name: str, value: Any) -> set[str]:
    """Return the names of a class's fields and methods."""
    if not inspect.isclass(value) or value.__module__ != module:
        return set()
    fields = {*vars(value), *getattr(value, "__annotations__", {})}
    return {x for field in fields for x in _suffixes(f"{module}.{name}.{field}") if "." in x}


def _suffixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


#: An annotation with the range or the advice that `pipesim.utils.checks` reads.
ANNOTATED = re.compile(
    r"~?(?:typing\.)?Annotated\[((?:[^\[\],]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])+), "
    r"(?:[^\[\]'\"]|'[^']*'|\"[^\"]*\")*\]"
)


def without_checks(app: Any, what: Any, name: str, obj: Any, options: Any, *signature: Any) -> Any:
    """Return a signature whose annotations are the types alone, and whose defaults are Python.

    Sphinx splits a signature at its commas, inside types too, if Python cannot parse it.
    """
    texts = (text and ANNOTATED.sub(r"\1", text) for text in signature)
    return tuple(text and text.replace("<factory>", "...") for text in texts)


#: A link from a page of source code to the page of an object.
SOURCE_LINK = re.compile(r'(href="[./]*(reference/generated/[^"#]+)\.html#)([^"]+)"')


def correct_anchors(app: Any, page: str, template: Any, context: dict[str, Any], *_: Any) -> None:
    """Correct the links of a page of source code, whose objects may be named by several rooms.

    Sphinx names all objects of a file by the module of the first one that it meets.
    """
    if not page.startswith("_modules/") or "body" not in context:
        return
    names: dict[str, list[str]] = {}
    for name, entry in app.env.domains["py"].objects.items():
        names.setdefault(entry.docname, []).append(name)

    def correct(link: re.Match[str]) -> str:
        known = set(_suffixes(link[3]))
        best = max(names.get(link[2], [link[3]]), key=lambda x: len(known & set(_suffixes(x))))
        return f'{link[1]}{best}"'

    context["body"] = SOURCE_LINK.sub(correct, context["body"])


def setup(app: Any) -> dict[str, Any]:
    """Connect the lookup to the build."""
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-signature", without_checks)
    app.connect("html-page-context", correct_anchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
