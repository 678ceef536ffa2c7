"""Resolve names in docstrings that are shorter than their full ones, such as ``GraphError``.

Docstrings name classes, functions and methods as a reader of the same file knows them. A name that
Sphinx does not find is looked up by its last parts: `Timeline.fits` is `pipesim.Timeline.fits`.
A name with no match, or with several, stays an error.
"""

from __future__ import annotations

from typing import Any

from sphinx.util.nodes import make_refnode

#: How the packages are imported in examples.
SHORT = {"ps.": "pipesim.", "px.": "pipeexec."}


def resolve(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Return a link to the one object whose full name ends with the name of ``node``."""
    if node["refdomain"] != "py":
        return None
    target = node["reftarget"].removesuffix("()")
    for short, full in SHORT.items():
        if target.startswith(short):
            target = full + target.removeprefix(short)
    objects = env.domains["py"].objects
    names = {name for name in objects if name == target or name.endswith(f".{target}")}
    canonical = {objects[name].docname + "#" + objects[name].node_id for name in names}
    if len(canonical) > 1:  # of the class that the docstring belongs to, or of the package
        owner = node.get("py:class") or ""
        names = {x for x in names if owner and f"{owner}.{target}" in x} or {
            x for x in names if x.count(".") == 1 + target.count(".")
        }
    if len(names) != 1:
        return None
    found = objects[names.pop()]
    return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, contnode, target)


def setup(app: Any) -> dict[str, Any]:
    """Connect the lookup to the build."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
