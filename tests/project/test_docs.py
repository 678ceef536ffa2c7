"""Documentation and Makefile name only files, make targets and public names that exist."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from public_names import public_values

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("[!_]*/*.md"), *DOCS.glob("*.md")])
PUBLIC = dict(public_values())
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
        if has(value, part):
            value = getattr(value, part)
            continue
        try:
            value = importlib.import_module(path)
        except ImportError:
            return True
    return False


def has(value: Any, name: str) -> bool:
    """Tell whether an object has an attribute, by a name that stays."""
    with warnings.catch_warnings(action="error", category=DeprecationWarning):
        return hasattr(value, name)


def test_reference() -> None:
    """It lists every public function and class; `pipesim.trace` has a page with all of its own."""
    listed = {
        prefix + name
        for page, prefix in {"pipesim": "ps.", "plot": "ps.plot.", "pipeexec": "px."}.items()
        for name in re.findall(r"^   ([\w.]+)$", (DOCS / f"reference/{page}.rst").read_text(), re.M)
    }
    public = [
        x for x, value in PUBLIC.items() if inspect.isroutine(value) or inspect.isclass(value)
    ]
    assert [x for x in public if x not in listed and not x.startswith("ps.trace.")] == []


def test_pages() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "time.md"} <= {p.name for p in PAGES}


def broken_links(page: Path) -> list[str]:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    return [x for x in targets if not exists(page.parent / x)]


def exists(path: Path) -> bool:
    """Tell whether a file exists, or is in a folder that the build of the site makes."""
    return path.exists() or any(path.resolve().is_relative_to(folder) for folder in BUILT)


def broken_anchors(page: Path) -> list[str]:
    """Return links to sections that the page linked to lacks, in GitHub's spelling."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    pages = [(page.parent / path if path else page, anchor) for path, anchor in links]
    return [f"{x.name}#{anchor}" for x, anchor in pages if anchor not in anchors(x)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_paths(page: Path) -> list[str]:
    """Return paths of no file; a path may begin with its room, such as ``graph/rules.py``."""
    text = page.read_text()
    paths = re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]*\w", text)
    rooms = re.findall(r"`([a-z_]+/[\w/]+\.py)`", text)
    places = [ROOT, ROOT / "pipesim", ROOT / "pipeexec"]
    return [x for x in {*paths, *rooms} if not any(exists(p / x) for p in places)]


def missing_names(page: Path) -> list[str]:
    text = OLD_NAMES.sub("", page.read_text())
    names = re.findall(r"`((?:pipesim|pipeexec|ps|px)(?:\.[A-Za-z_]\w*)+)", text)
    return [name for name in sorted(set(names)) if missing(name)]


def missing_make_targets(page: Path) -> list[str]:
    targets = re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return sorted(set(targets) - set(rules))


def unknown_arguments(page: Path) -> list[str]:
    """Return arguments of calls in prose that the public function or method does not have."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    unknown = []
    for code in re.findall(r"`([^`\n]+)`", text):
        for name, arguments in re.findall(r"((?:\w+\.)*\w+)\(([^()]*)\)", code):
            allowed = parameters(name)
            names = re.findall(r"(?:^|[ ,])([a-z_]\w*)=", arguments)
            unknown += [f"{name}({x}=)" for x in names if allowed is not None and x not in allowed]
    return unknown


def parameters(name: str) -> set[str] | None:
    """Return the parameters of a public function or method; None for others and ``**options``."""
    parts = re.sub(r"^(ps|px|pipesim|pipeexec)\.", "", name).split(".")
    for short, n in itertools.product(("ps", "px"), (1, 2)):  # a name may begin with its room
        value = PUBLIC.get(".".join([short, *parts[:n]]))
        if value is None:
            continue
        for part in parts[n:]:
            value = getattr(value, part, None)
        kinds = inspect.signature(value).parameters if callable(value) else {}
        if not any(x.kind is x.VAR_KEYWORD for x in kinds.values()):
            return set(kinds)
    return None


@pytest.mark.parametrize(
    "mistakes",
    [broken_links, broken_anchors, missing_paths, missing_names, missing_make_targets,
     unknown_arguments],
)  # fmt: skip
def test_mistakes_of_pages(mistakes: Callable[[Path], list[str]]) -> None:
    assert {str(page): wrong for page in PAGES if (wrong := mistakes(page))} == {}


def test_paths_of_make() -> None:
    """Commands such as ``make fuzz`` run files by their paths."""
    paths = re.findall(rf"(?:{FOLDERS})/[\w/]+\.py", (ROOT / "Makefile").read_text())
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


#: Texts that give errors of steps from data sheets, each from where its first claim must stand.
#: Other pages lead to the second.
CLAIMS = {
    "README.md": "## How sure are the numbers?",
    "docs/explanation/prediction_errors.md": "# How predictions err",
}


@pytest.mark.parametrize("path", CLAIMS)
def test_errors_of_data_sheets_come_first(path: str) -> None:
    """The first error a text gives is that of runs that were not at hand, the same everywhere."""
    text = " ".join((ROOT / path).read_text().split(CLAIMS[path], 1)[1].split())
    numbers = re.findall(r"\d[\d.]*(?: to \d[\d.]*)? %", text)
    assert numbers[:4] == ["20 %", "19.6 %", "14 to 28 %", "23 %"]
    assert "560 published runs that were not at hand" in text
    assert "23 % too long" in text
    assert "9.7 %" in text  # as in the table


def test_mean_error_is_that_of_the_sets() -> None:
    """The mean of 560 rows follows from the table of sets, within the rounding of its percents."""
    text = (ROOT / "docs/explanation/prediction_errors.md").read_text()
    table = text.split("### Runs that were not at hand", 1)[1].split("\n\n")[2]
    cells = [row.split("|")[2:4] for row in table.splitlines()[2:]]
    rows = [int(row) for row, _ in cells]
    errors = [float(error.rstrip(" %")) for _, error in cells]
    assert sum(rows) == 560 - 1
    assert (min(errors), max(errors)) == (14, 28)
    assert abs(sum(map(float.__mul__, map(float, rows), errors)) / 559 - 19.6) < 0.5


@pytest.mark.parametrize("package", ["pipesim", "pipeexec"])
def test_rooms(package: str) -> None:
    """CONTRIBUTING.md says what each room and each file beside them is for."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = {name for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
              for name in re.findall(r"`([^`]+)`", cell)}  # fmt: skip
    rooms = {f"{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")}
    files = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py", "__main__.py"}
    assert (rooms | files) - listed == set()
