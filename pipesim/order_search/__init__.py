"""Search for orders: a compiled evaluator of one placement's orders, and a local search."""

from pipesim.order_search.evaluate import (
    OBJECTIVES,
    Objective,
    Times,
    checked_bound,
    evaluate,
    keeps_limit,
    meets,
    peak_bytes,
)
from pipesim.order_search.improve import (
    LocalSearch,
    anneal_microbatches,
    first_microbatch_orders,
    improve,
)
from pipesim.order_search.lane_order import LaneOrder, lane_order, schedule_of
from pipesim.order_search.problem import (
    OrderProblem,
    counts_all_costs,
    has_equal_microbatches,
    order_problem,
)

__all__ = [
    "OBJECTIVES",
    "LaneOrder",
    "LocalSearch",
    "Objective",
    "OrderProblem",
    "Times",
    "anneal_microbatches",
    "checked_bound",
    "counts_all_costs",
    "evaluate",
    "first_microbatch_orders",
    "has_equal_microbatches",
    "improve",
    "keeps_limit",
    "lane_order",
    "meets",
    "order_problem",
    "peak_bytes",
    "schedule_of",
]
