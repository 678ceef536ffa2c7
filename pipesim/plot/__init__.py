"""Figures of schedules, task graphs and timelines."""

from pipesim.plot.timelines import (
    ONE_COLUMN,
    PALETTE,
    TWO_COLUMNS,
    bars,
    comparison,
    comparison_html,
    dependencies,
    figure,
    graph_html,
    idle,
    memory,
    overlay,
    save,
    schedule_html,
    timeline,
    timeline_html,
)

__all__ = [
    "ONE_COLUMN",
    "PALETTE",
    "TWO_COLUMNS",
    "bars",
    "comparison",
    "comparison_html",
    "dependencies",
    "figure",
    "graph_html",
    "idle",
    "memory",
    "overlay",
    "save",
    "schedule_html",
    "timeline",
    "timeline_html",
]
