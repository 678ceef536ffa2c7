"""Figures of schedules, task graphs and timelines, and their HTML for notebooks.

A function that takes ``ax`` draws into these axes, or else into a new pyplot figure two columns
wide, and returns the axes. `panels` and `overlay` make a figure. None shows or saves anything;
`save` does. matplotlib is imported only when something is drawn.
"""

from pipesim.analysis.compare import Comparison
from pipesim.costs.costs import Costs
from pipesim.graph.autograd_graph import AutogradGraph
from pipesim.graph.graph import TaskGraph
from pipesim.models.gpu import GPU
from pipesim.models.layers import Layers
from pipesim.models.transformer import Transformer
from pipesim.network.network import Network
from pipesim.network.parallel_layout import Layout
from pipesim.plot.autograd_plot import autograd_graph, autograd_graph_html
from pipesim.plot.charts import accuracy, bars, idle, memory, plan_front
from pipesim.plot.dependency_plot import dependencies
from pipesim.plot.exchange_plot import exchange
from pipesim.plot.figure_style import ONE_COLUMN, TWO_COLUMNS, Style, paper_style, style
from pipesim.plot.html import comparison_html, graph_html, schedule_html, timeline_html
from pipesim.plot.page.save import to_html
from pipesim.plot.palette import PALETTE
from pipesim.plot.paper_figure import figure, save
from pipesim.plot.timelines import comparison, overlay, panels, timeline
from pipesim.plot.widget.make_widget import widget
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline
from pipesim.utils.accessors import add_methods

__all__ = [
    "ONE_COLUMN",
    "PALETTE",
    "TWO_COLUMNS",
    "Style",
    "accuracy",
    "autograd_graph",
    "autograd_graph_html",
    "bars",
    "comparison",
    "comparison_html",
    "dependencies",
    "exchange",
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
    "style",
    "timeline",
    "timeline_html",
    "to_html",
    "widget",
]

add_methods(Timeline, plot="pipesim.plot.accessors:TimelinePlot")
add_methods(Comparison, plot="pipesim.plot.timelines:comparison")
add_methods(TaskGraph, plot="pipesim.plot.dependency_plot:dependencies")
add_methods(
    AutogradGraph,
    plot="pipesim.plot.autograd_plot:autograd_graph",
    to_html="pipesim.plot.autograd_plot:autograd_graph_to_html",
)
for _kind, _function in {
    Timeline: "html:timeline_html",
    Comparison: "html:comparison_html",
    TaskGraph: "html:graph_html",
    AutogradGraph: "autograd_plot:autograd_graph_html",
    Schedule: "html:schedule_html",
    Costs: "html_tables:costs_html",
    GPU: "html_tables:gpu_html",
    Layers: "html_tables:layers_html",
    Layout: "html_tables:layout_html",
    Network: "html_tables:network_html",
    Placement: "html_tables:placement_html",
    Transformer: "html_tables:transformer_html",
}.items():
    add_methods(_kind, _repr_html_=f"pipesim.plot.{_function}")
for _kind in (Timeline, Comparison):
    add_methods(_kind, _repr_mimebundle_="pipesim.plot.html:mimebundle")
for _kind in (Timeline, Comparison, TaskGraph, Schedule):
    add_methods(_kind, to_html="pipesim.plot.page.save:item_to_html")
del _kind, _function
