"""Documentation and Makefile name only files, make targets and public names that exist."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("[!_]*/*.md"), *DOCS.glob("*.md")])
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
#: Folders whose files are not made by a command.
FOLDERS = "pipesim|pipeexec|tests|benchmarks|docs|notebooks|tools"
#: The build of the site makes these.
BUILT = (DOCS / "_build", DOCS / "auto_gallery", DOCS / "tutorials" / "notebooks")
#: The first column of a table of moved modules has names of the past.
OLD_NAMES = re.compile(r"^  \| `.*?` \| ", re.MULTILINE)


def missing(name: str) -> bool:
    """Tell whether a dotted name is neither a module nor an attribute of one."""
    names = {"ps": "pipesim", "px": "pipeexec"}
    first, *rest = name.split(".")
    path = names.get(first, first)
    value = importlib.import_module(path)
    for part in rest:
        path += f".{part}"
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        try:
            value = importlib.import_module(path)
        except ImportError:
            return True
    return False


def test_pages() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "time.md"} <= {p.name for p in PAGES}


@pages
def test_links(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [x for x in targets if not exists(page.parent / x)] == []


def exists(path: Path) -> bool:
    """Tell whether a file exists, or is in a folder that the build of the site makes."""
    return path.exists() or any(path.resolve().is_relative_to(folder) for folder in BUILT)


@pages
def test_anchors(page: Path) -> None:
    """A link to a section names one that its page has, in GitHub's spelling."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    pages = [(page.parent / path if path else page, anchor) for path, anchor in links]
    assert [f"{x.name}#{anchor}" for x, anchor in pages if anchor not in anchors(x)] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_paths(page: Path) -> None:
    """A path may begin with its room, such as ``graph/rules.py``."""
    text = page.read_text()
    paths = re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]*\w", text)
    rooms = re.findall(r"`([a-z_]+/[\w/]+\.py)`", text)
    places = [ROOT, ROOT / "pipesim", ROOT / "pipeexec"]
    assert [x for x in {*paths, *rooms} if not any(exists(p / x) for p in places)] == []


@pages
def test_names(page: Path) -> None:
    text = OLD_NAMES.sub("", page.read_text())
    names = re.findall(r"`((?:pipesim|pipeexec|ps|px)(?:\.[A-Za-z_]\w*)+)", text)
    assert [name for name in sorted(set(names)) if missing(name)] == []


@pages
def test_make_targets(page: Path) -> None:
    targets = re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(set(targets) - set(rules)) == []


def test_paths_of_make() -> None:
    """Commands such as ``make fuzz`` run files by their paths."""
    paths = re.findall(rf"(?:{FOLDERS})/[\w/]+\.py", (ROOT / "Makefile").read_text())
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pages
def test_arguments(page: Path) -> None:
    """A call in the prose of a page names arguments that the public function or method has."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    unknown = []
    for code in re.findall(r"`([^`\n]+)`", text):
        for name, arguments in re.findall(r"((?:\w+\.)*\w+)\(([^()]*)\)", code):
            known = parameters(name)
            names = re.findall(r"(?:^|[ ,])([a-z_]\w*)=", arguments)
            unknown += [f"{name}({x}=)" for x in names if known is not None and x not in known]
    assert not unknown


def parameters(name: str) -> set[str] | None:
    """Return the parameters of a public function or method; None for others and ``**options``."""
    for package in ("pipesim", "pipeexec"):
        value: Any = importlib.import_module(package)
        first, *rest = re.sub(r"^(ps|px|pipesim|pipeexec)\.", "", name).split(".")
        if first not in value.__all__:
            continue
        for part in (first, *rest):
            value = getattr(value, part, None)
        kinds = inspect.signature(value).parameters if callable(value) else {}
        if not any(x.kind is x.VAR_KEYWORD for x in kinds.values()):
            return set(kinds)
    return None
