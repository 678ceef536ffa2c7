"""Simulate schedules of pipeline-parallel training; `pipeexec` runs the same task graphs.

A `Schedule` is lowered to a `TaskGraph`. Simulating the graph with `Costs` gives a `Timeline`:

>>> import pipesim as ps
>>> schedule = ps.schedule("1f1b", n_devices=4, n_microbatches=8)
>>> timeline = ps.simulate(ps.lower(schedule), ps.Costs(forward=1, backward=2))
>>> float(timeline.makespan)
33.0
"""

from pipesim import calibration as calibration
from pipesim import trace
from pipesim._version import __version__ as __version__
from pipesim.analysis.audit import audit
from pipesim.analysis.autograd_orders import AutogradOrders, autograd_orders
from pipesim.analysis.compare import Comparison
from pipesim.analysis.lower_bounds.lower_bound import lower_bound
from pipesim.analysis.replay import replay
from pipesim.costs.cost_fields import Workload
from pipesim.costs.costs import Costs
from pipesim.costs.keys import Keys
from pipesim.costs.layer_split import balanced_split, read_layout, write_layout
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Task, Tasks
from pipesim.graph.verify import verify
from pipesim.list_scheduling.order_by import order_by
from pipesim.lowering.lower import lower
from pipesim.models.data_sheets import gpus
from pipesim.models.gpu import GPU
from pipesim.models.layers import Layers
from pipesim.models.parallel import Parallel
from pipesim.models.published_models import transformers
from pipesim.models.routing import Routing
from pipesim.models.shard import Shard
from pipesim.models.transformer import Transformer
from pipesim.network.links import HostLink, Link, Nodes
from pipesim.network.network import Network
from pipesim.network.parallel_layout import Layout
from pipesim.network.routes import Routes
from pipesim.network.sources import machines
from pipesim.ops import Action, Op, Overlapped
from pipesim.planning.choice import PlanChoice
from pipesim.planning.cluster import Cluster
from pipesim.planning.framework_settings import TrainerSettings
from pipesim.planning.megatron import read_megatron
from pipesim.planning.optimize import OptimizedSchedule, optimize
from pipesim.planning.plan import plan
from pipesim.planning.plans import Plan, Plans
from pipesim.planning.torchtitan import read_torchtitan
from pipesim.plot.page.save import to_html
from pipesim.plot.widget.make_widget import widget
from pipesim.scheduling.placement import Placement, bidirectional, linear, looped, v_shaped, waves
from pipesim.scheduling.registry import ClosedForm, Counts, register, schedule, schedules
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.distributions import Empirical, Failures, LogNormal, Normal
from pipesim.simulation.noise import Noise
from pipesim.simulation.scenarios import Scenarios, simulate_many
from pipesim.simulation.simulate import simulate
from pipesim.sweeps.compare import compare
from pipesim.sweeps.sweep import sweep
from pipesim.timeline.timeline import Timeline
from pipesim.trace import chakra, hta

from pipesim import named_schedules as named_schedules  # isort: skip  # registers them
from pipesim import old_names as old_names  # isort: skip

__all__ = [
    "GPU",
    "Action",
    "AutogradOrders",
    "ClosedForm",
    "Cluster",
    "Comparison",
    "CostTable",
    "Costs",
    "Counts",
    "Empirical",
    "Failures",
    "HostLink",
    "Keys",
    "Layers",
    "Layout",
    "Link",
    "LogNormal",
    "Network",
    "Nodes",
    "Noise",
    "Normal",
    "Op",
    "OptimizedSchedule",
    "Overlapped",
    "Parallel",
    "Placement",
    "Plan",
    "PlanChoice",
    "Plans",
    "Routes",
    "Routing",
    "Scenarios",
    "Schedule",
    "Shard",
    "Task",
    "TaskCosts",
    "TaskGraph",
    "Tasks",
    "Timeline",
    "TrainerSettings",
    "Transformer",
    "Workload",
    "audit",
    "autograd_orders",
    "balanced_split",
    "bidirectional",
    "chakra",
    "compare",
    "gpus",
    "hta",
    "linear",
    "looped",
    "lower",
    "lower_bound",
    "machines",
    "optimize",
    "order_by",
    "plan",
    "read_layout",
    "read_megatron",
    "read_torchtitan",
    "register",
    "replay",
    "schedule",
    "schedules",
    "simulate",
    "simulate_many",
    "sweep",
    "to_html",
    "trace",
    "transformers",
    "v_shaped",
    "verify",
    "waves",
    "widget",
    "write_layout",
]
