"""Check the figures of the gallery as sphinx-gallery draws them, so that a build runs them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gallery  # tools/gallery.py
import matplotlib.pyplot as plt
from matplotlib.animation import Animation
from sphinx.errors import ExtensionError
from sphinx_gallery.scrapers import figure_rst, matplotlib_scraper

#: Dots an inch of animations: their frames are not compressed well.
DPI = 100


def keep(block: Any, variables: dict[str, Any], conf: dict[str, Any]) -> str:
    """Return the page's text for the figure of a script, as sphinx-gallery writes it.

    Of an animation, the page has a GIF, which needs neither ffmpeg nor scripts from a server; its
    first frame is the picture in the list.

    Raises
    ------
    ExtensionError
        The script has no figure, or one that a paper could not print.
    """
    figures = [plt.figure(number) for number in plt.get_fignums()]
    problems = [x for figure in figures for x in gallery.problems_of_figure(figure)]
    if not figures:
        problems.append("no figure")
    if problems:
        raise ExtensionError(f"{variables['src_file']}: {'; '.join(problems)}")
    text = str(matplotlib_scraper(block, variables, conf))
    for value in variables["example_globals"].values():
        if isinstance(value, Animation):
            path = Path(variables["image_path_iterator"].paths[-1]).with_suffix(".gif")
            value.save(path, writer="pillow", dpi=DPI)
            text = str(figure_rst([str(path)], conf["src_dir"]))
    return text
