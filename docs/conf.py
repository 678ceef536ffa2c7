"""Settings of the documentation's builder, Sphinx. `make docs` runs it without a network."""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(DOCS / "_extensions")]

import pipesim  # noqa: E402

mpl.use("agg")
warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")

project = "pipesim"
author = "pipesim developers"
project_copyright = "pipesim developers, BSD-3-Clause"
version = release = pipesim.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "command_line",
    "short_names",
    "sphinxarg.ext",
]
root_doc = "index"
exclude_patterns = [
    "_build",
    "_extensions",
    "_templates",
    "examples",
    "gallery",
    "auto_gallery/**/*.ipynb",
    "**/sg_execution_times.rst",
    "sg_execution_times.rst",
]
nitpicky = True
#: Types of other libraries: their inventories would have to be fetched.
nitpick_ignore_regex = [
    (r"py:.*", r"(np|npt|numpy|pd|pandas|torch|nn|mpl|matplotlib|plt|collections|typing|os|io|enum"
               r"|dataclasses|functools|fractions|networkx|nx|anywidget|simpy|datetime|pathlib"
               r"|contextlib|threading)\..*"),
    (r"py:.*", r"(NDArray|DataFrame|Series|Axes|Figure|Tensor|Module|Path|Any|Callable|Iterator"
               r"|Iterable|Sequence|Mapping|Literal|Self|TextIO|BinaryIO|Buffer|Callable\[\.\.\."
               r"|PipelineStage|PipelineScheduleMulti|Schedule1F1B|ScheduleGPipe)"),
]  # fmt: skip
default_role = "py:obj"
templates_path = ["_templates"]
html_static_path = ["_static"]
suppress_warnings = [
    "config.cache",  # functions in `sphinx_gallery_conf`
    "myst.domains",  # that of sphinx-argparse has no links without a role
]

smartquotes = False  # "--" of an option stays as it is, and so do quotes of Python

# Reference
autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_typehints = "signature"
autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = (
    False  # functions that take the fields of a record have none in their source
)
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"  # beside the page, `load()` rather than `Timeline.load()`
python_maximum_signature_line_length = 90
maximum_signature_line_length = 90

# Pages and notebooks
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, Any] = {}  # a script from a server, for widgets that pages do not have

# Gallery
sphinx_gallery_conf = {
    "examples_dirs": ["gallery"],
    "gallery_dirs": ["auto_gallery"],
    "subsection_order": [
        "gallery/schedules",
        "gallery/time_and_memory",
        "gallery/comparison",
        "gallery/choices",
        "gallery/real_runs",
    ],
    "backreferences_dir": "reference/backreferences",
    "doc_module": ("pipesim", "pipeexec"),
    "reference_url": {"pipesim": None, "pipeexec": None},
    "filename_pattern": r"/plot_",
    "image_scrapers": ("checked_figures.keep",),
    "image_srcset": ["2x"],
    "min_reported_time": 1_000,
    "show_signature": False,
    "remove_config_comments": True,
    "download_all_examples": False,
    "only_warn_on_example_error": False,
    "abort_on_example_error": True,
    "matplotlib_animations": False,
    "capture_repr": (),  # such as `<Axes ...>`
    "parallel": 2,
}

# Looks
html_theme = "pydata_sphinx_theme"
html_title = f"pipesim {version}"
html_show_sourcelink = False
html_copy_source = False
html_css_files = ["site.css"]
html_theme_options = {
    "navbar_align": "left",
    "show_prev_next": True,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "start/*": []}

#: Links of the changelog, which are relative to the repository's root.
_FROM_ROOT = re.compile(r"\]\((?!https?:|#)(docs/)?")
#: Links of a page in the repository to a notebook, and of a notebook to a page.
_TO_NOTEBOOK = re.compile(r"\]\((?:\.\./)+notebooks/([\w.]+)\.ipynb")
_TO_PAGE = re.compile(r"\]\(\.\./docs/([\w/]+)\.md")


def copy_notebooks(app: Any) -> None:
    """Put the notebooks among the sources, with links that hold there."""
    folder = DOCS / "tutorials" / "notebooks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = _TO_PAGE.sub(r"](../../\1.md", notebook.read_text())
        text = text.replace("](../results/", "](../../../results/")
        (folder / notebook.name).write_text(text)
    shutil.copytree(ROOT / "notebooks" / "pictures", folder / "pictures")


def copy_changelog(app: Any) -> None:
    """Put the changelog among the sources, with links that hold there."""
    text = (ROOT / "CHANGELOG.md").read_text()
    text = _FROM_ROOT.sub(lambda match: "](../" if match[1] else "](../../", text)
    unlinked = r"\[([^]]*)\]\([./]*(?:results/ablation|CONTRIBUTING\.md)\)"  # they are no pages
    text = re.sub(unlinked, r"\1", text)
    (DOCS / "reference" / "changelog.md").write_text(text)


def link_notebooks(app: Any, docname: str, source: list[str]) -> None:
    """Let links to notebooks lead to their pages."""
    source[0] = _TO_NOTEBOOK.sub(r"](/tutorials/notebooks/\1.ipynb", source[0])


def setup(app: Any) -> None:
    """Connect the functions above to the build."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("builder-inited", copy_changelog)
    app.connect("source-read", link_notebooks)
