"""Check the figures of the gallery as sphinx-gallery draws them, so that a build runs them once."""

from __future__ import annotations

from typing import Any

import gallery  # tools/gallery.py
import matplotlib.pyplot as plt
from sphinx.errors import ExtensionError
from sphinx_gallery.scrapers import matplotlib_scraper


def keep(block: Any, variables: dict[str, Any], conf: dict[str, Any]) -> str:
    """Return the page's text for the figure of a script, as sphinx-gallery writes it.

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
    return str(matplotlib_scraper(block, variables, conf))
