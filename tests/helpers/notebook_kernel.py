"""A kernel of Jupyter, to be forked where torch and matplotlib are loaded already.

``notebook_kernel.py FOLDER ...`` runs in a folder; what follows are the options of ipykernel.
Scripts that the notebook starts as ranks are forked too. Calibrations time few messages. Figures
are laid out once, when they are shown, which raises what drawing would raise. They are shown as one
pixel: pixels take longest.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from base64 import b64encode
from typing import Any

import matplotlib as mpl
from few_messages import few_messages
from forked import fork_scripts
from IPython.core import pylabtools
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine


def _pixel() -> str:
    """Return an image as cells hold it."""
    image = io.BytesIO()
    Figure(figsize=(0.01, 0.01), dpi=100).savefig(image)
    return b64encode(image.getvalue()).decode()


def _laid_out(figure: Figure, *_: Any, **__: Any) -> str:
    """Lay out a figure that a cell shows; return its image."""
    figure.draw_without_rendering()
    return _PIXEL


if __name__ == "__main__":
    fork_scripts()
    few = few_messages()
    few.__enter__()
    os.chdir(sys.argv.pop(1))
    _PIXEL = _pixel()
    pylabtools.print_figure = _laid_out
    ConstrainedLayoutEngine.execute = lambda *_: None  # each legend lays out all panels of a figure
    mpl.rcParams["backend"] = "module://matplotlib_inline.backend_inline"  # figures go into cells
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
