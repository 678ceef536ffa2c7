"""Task graphs: tasks, the dependency rules, the order of streams, and their verification."""

from pipesim.graph.autograd_graph import AutogradEdge, AutogradGraph, AutogradNode
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Task, Tasks
from pipesim.graph.verify import verify

__all__ = [
    "AutogradEdge",
    "AutogradGraph",
    "AutogradNode",
    "Task",
    "TaskGraph",
    "Tasks",
    "verify",
]
