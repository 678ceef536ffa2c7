"""Figures of schedules, task graphs and timelines, and their HTML for notebooks.

A function that takes ``ax`` draws into these axes, or else into a new pyplot figure two columns
wide, and returns the axes. `panels` and `overlay` make a figure. None shows or saves anything;
`save` does. matplotlib is imported only when something is drawn.
"""

from pipesim.plot.accuracy_plot import accuracy
from pipesim.plot.charts import bars, memory
from pipesim.plot.comparisons import comparison, overlay
from pipesim.plot.dependency_plot import dependencies
from pipesim.plot.html import comparison_html, graph_html, schedule_html, timeline_html
from pipesim.plot.idle_chart import idle
from pipesim.plot.paper_figure import ONE_COLUMN, TWO_COLUMNS, figure, save
from pipesim.plot.paper_style import paper_style
from pipesim.plot.plan_front import plan_front
from pipesim.plot.style import PALETTE
from pipesim.plot.timelines import panels, timeline

__all__ = [
    "ONE_COLUMN",
    "PALETTE",
    "TWO_COLUMNS",
    "accuracy",
    "bars",
    "comparison",
    "comparison_html",
    "dependencies",
    "figure",
    "graph_html",
    "idle",
    "memory",
    "overlay",
    "panels",
    "paper_style",
    "plan_front",
    "save",
    "schedule_html",
    "timeline",
    "timeline_html",
]
