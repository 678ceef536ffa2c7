"""The gallery of the documentation: texts of its scripts, and the checker of their figures.

``python tools/gallery.py`` runs all scripts, which takes a minute or two.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes

from pipesim import plot

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "docs" / "gallery").glob("*/plot_*.py"))


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "tools" / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_scripts_have_the_form_of_the_gallery(gallery: ModuleType) -> None:
    assert {p.stem: wrong for p in SCRIPTS if (wrong := list(gallery.problems_of_text(p)))} == {}


def test_sections_have_a_title_and_figures() -> None:
    folders = {path.parent for path in SCRIPTS}
    assert len(SCRIPTS) >= 28
    for folder in folders | {ROOT / "docs" / "gallery"}:
        title, line, *_ = (folder / "README.rst").read_text().splitlines()
        assert line == "=" * len(title)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('"""Title\n=====\n\nText."""\n' + "x = 1\n" * 40, "44 lines"),
        ('"""No title."""\n', "title"),
        ('"""\nTitle\n==\n\nText.\n"""\n', "title"),
        (
            '"""\nTitle\n=====\n\nText.\n"""\nfrom pipesim.graph.graph import TaskGraph\n',
            "pipesim.graph.graph",
        ),
    ],
)
def test_faults_of_scripts_are_named(
    gallery: ModuleType, tmp_path: Path, source: str, problem: str
) -> None:
    path = tmp_path / "plot_example.py"
    path.write_text(source)
    assert problem in " ".join(gallery.problems_of_text(path))


def good(ax: Axes) -> None:
    """Two curves with a legend."""
    ax.plot([1, 2], label="one")
    ax.plot([2, 1], label="two")
    ax.set(xlabel="x", ylabel="y", title="title")
    ax.legend(loc="lower center")


def alike(ax: Axes) -> None:
    for k, colour in enumerate(("#74B9E7", "#CC79A7")):
        ax.plot([k, 1], color=colour, marker="", linestyle="-", label=str(k))


#: Faults of a figure, and a part of the message.
FAULTS: dict[str, tuple[Callable[[Axes], object], str]] = {
    "small": (lambda ax: ax.text(0.5, 0.5, "tiny", fontsize=5), "'tiny' has 5.0 points"),
    "cut": (lambda ax: ax.text(1.2, 0.5, "outside", in_layout=False), "'outside' is cut"),
    "over": (lambda ax: [ax.text(0.4, 0.4, text) for text in ("one", "two")], "overlap"),
    "alike": (alike, "look alike in grey"),
    "width": (lambda ax: ax.figure.set_size_inches(5, 2), "5 inches wide"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_figures_are_named(gallery: ModuleType, fault: str) -> None:
    spoil, message = FAULTS[fault]
    with plt.rc_context(plot.paper_style()):
        figure, ax = plt.subplots()
        spoil(ax)
        assert message in " ".join(gallery.problems_of_figure(figure))


@pytest.mark.slow
def test_a_figure_without_fault_passes_and_fonts_of_type_3_do_not(gallery: ModuleType) -> None:
    with plt.rc_context(plot.paper_style()):
        figure, ax = plt.subplots()
        good(ax)
        assert list(gallery.problems_of_figure(figure)) == []
        with mpl.rc_context({"pdf.fonttype": 3}):
            assert "type 42" in " ".join(gallery.problems_of_figure(figure))
