"""Figures of schedules, task graphs and timelines, and their HTML for notebooks.

A function that takes ``ax`` draws into these axes, or else into a new pyplot figure two columns
wide, and returns the axes. `panels` and `overlay` make a figure. None shows or saves anything;
`save` does. matplotlib is imported only when something is drawn.
"""

from pipesim.plot.charts import accuracy, bars, idle, memory, plan_front
from pipesim.plot.dependency_plot import dependencies
from pipesim.plot.html import comparison_html, graph_html, schedule_html, timeline_html
from pipesim.plot.paper_figure import ONE_COLUMN, TWO_COLUMNS, figure, paper_style, save
from pipesim.plot.style import PALETTE
from pipesim.plot.timelines import comparison, overlay, panels, timeline

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
