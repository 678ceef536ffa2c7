"""Simulate schedules of pipeline-parallel training; `pipeexec` runs the same task graphs.

A `Schedule` is lowered to a `TaskGraph`. Simulating the graph with `Costs` gives a `Timeline`:

>>> import pipesim as ps
>>> schedule = ps.schedule("1f1b", n_devices=4, n_microbatches=8)
>>> timeline = ps.simulate(ps.lower(schedule), ps.Costs(forward=1, backward=2))
>>> float(timeline.makespan)
33.0
"""

from typing import TYPE_CHECKING

from pipesim import analysis as analysis
from pipesim import calibration as calibration
from pipesim import costs as costs
from pipesim import errors as errors
from pipesim import graph as graph
from pipesim import models as models
from pipesim import network as network
from pipesim import ops as ops
from pipesim import planning as planning
from pipesim import plot as plot
from pipesim import scheduling as scheduling
from pipesim import simulation as simulation
from pipesim import timeline as timeline
from pipesim import trace
from pipesim._version import __version__ as __version__
from pipesim.analysis.audit import audit
from pipesim.analysis.autograd_orders import autograd_orders
from pipesim.analysis.compare import Comparison
from pipesim.analysis.lower_bounds.lower_bound import lower_bound
from pipesim.analysis.replay import replay
from pipesim.costs.costs import Costs
from pipesim.costs.keys import Keys
from pipesim.costs.layer_split import balanced_split
from pipesim.demo_menu import demo
from pipesim.framework.framework import Framework, frameworks
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify
from pipesim.list_scheduling.order_by import order_by
from pipesim.lowering.lower import lower
from pipesim.models.data_sheets import gpus
from pipesim.models.encoders import Encoder
from pipesim.models.gpu import GPU
from pipesim.models.layers import Layers
from pipesim.models.parallel import Parallel
from pipesim.models.published_models import transformers
from pipesim.models.routing import Routing
from pipesim.models.transformer import Transformer
from pipesim.network.links import HostLink, Link, NodeCollectives, Nodes
from pipesim.network.network import Network
from pipesim.network.parallel_layout import Layout
from pipesim.network.sources import machines
from pipesim.ops import Action, Op
from pipesim.planning.cluster import Cluster
from pipesim.planning.megatron import read_megatron
from pipesim.planning.optimize import optimize
from pipesim.planning.plan import plan
from pipesim.planning.torchtitan import read_torchtitan
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, register, schedule, schedules
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.noise import Noise
from pipesim.simulation.scenarios import simulate_many
from pipesim.simulation.simulate import simulate
from pipesim.sweeps.compare import compare
from pipesim.sweeps.sweep import sweep
from pipesim.timeline.timeline import Timeline
from pipesim.utils.packages import lazy_names

from pipesim import named_schedules as named_schedules  # isort: skip  # registers them
from pipesim.old_names import EXPORTS  # isort: skip

__all__ = [
    "GPU",
    "Action",
    "ClosedForm",
    "Cluster",
    "Comparison",
    "Costs",
    "Encoder",
    "Framework",
    "HostLink",
    "Keys",
    "Layers",
    "Layout",
    "Link",
    "Network",
    "NodeCollectives",
    "Nodes",
    "Noise",
    "Op",
    "Parallel",
    "Placement",
    "Routing",
    "Schedule",
    "TaskGraph",
    "Timeline",
    "Transformer",
    "audit",
    "autograd_orders",
    "balanced_split",
    "compare",
    "demo",
    "frameworks",
    "gpus",
    "lower",
    "lower_bound",
    "machines",
    "optimize",
    "order_by",
    "plan",
    "read_megatron",
    "read_torchtitan",
    "register",
    "replay",
    "schedule",
    "schedules",
    "simulate",
    "simulate_many",
    "sweep",
    "trace",
    "transformers",
    "verify",
]

if not TYPE_CHECKING:  # type checkers know the new places alone
    __getattr__, __dir__ = lazy_names(__spec__, EXPORTS)
