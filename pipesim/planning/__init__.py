"""Which configuration, and which order of its tasks: search, and proof of how good they are."""

from pipesim.planning.choice import PlanChoice
from pipesim.planning.framework_settings import TrainerSettings
from pipesim.planning.optimize import OptimizedSchedule
from pipesim.planning.plans import Plan, Plans

__all__ = ["OptimizedSchedule", "Plan", "PlanChoice", "Plans", "TrainerSettings"]
