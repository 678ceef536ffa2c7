"""Old names of attributes and exports, which go on in this release and warn."""

from pipesim.timeline.timeline import Timeline
from pipesim.utils.accessors import keep_old_names

#: Names that the package exported, by the module or class that has them.
EXPORTS = {
    "pipesim.Placement": "bidirectional linear looped v_shaped waves",
    "pipesim.analysis": "AutogradOrders",
    "pipesim.costs": "CostTable TaskCosts Workload read_layout write_layout",
    "pipesim.graph": "Task Tasks",
    "pipesim.models": "Shard",
    "pipesim.network": "Routes",
    "pipesim.planning": "OptimizedSchedule Plan PlanChoice Plans TrainerSettings",
    "pipesim.plot": "to_html widget",
    "pipesim.scheduling": "Counts Overlapped",
    "pipesim.simulation": "Empirical Failures LogNormal Normal Scenarios",
    "pipesim.trace": "chakra hta",
}
#: New name of each attribute of timelines, by its old name.
TIMELINE = {
    "peak_memory": "memory.peak",
    "memory_limit": "memory.limit",
    "fits": "memory.fits",
    "memory_breakdown": "memory.breakdown",
    "host_memory": "memory.host",
    "peak_host_memory": "memory.peak_host",
    "changes_that_fit": "memory.changes_that_fit",
    "critical_path": "why.critical_path",
    "idle_by_cause": "why.idle_by_cause",
    "lower_bound": "why.lower_bound",
    "gap": "why.gap",
    "plot_idle": "plot.idle",
}

keep_old_names(Timeline, TIMELINE)
