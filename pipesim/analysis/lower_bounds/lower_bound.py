"""`lower_bound`: a lower bound on the makespan of any order of a placement's actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.lower_bounds.graph_bound import graph_bound
from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import each_microbatch
from pipesim.errors import CostsError, check_count, check_flag, check_type
from pipesim.lowering.lower import lower
from pipesim.ops import Op
from pipesim.order_search.objective import Objective
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints
from pipesim.utils.units import Bytes


def lower_bound(
    placement: Placement,
    n_microbatches: int,
    costs: Costs,
    memory_limit: Bytes | Sequence[Bytes] | NDArray[np.float64] | None = None,
    *,
    split_backward: bool | None = None,
    objective: Objective = "makespan",
    search: bool = True,
) -> float:
    """Return a time (s) that no order of a placement's actions goes below.

    It holds for each schedule of F and B, or of F, I and W, without overlapped actions, that
    `pipesim.lower` lowers with its default options and `pipesim.simulate` simulates with these
    costs. `pipesim.analysis.lower_bounds.graph_bound` says how it is computed.

    Parameters
    ----------
    placement
        Which device holds which stage.
    n_microbatches
        Micro-batches of a step, at least one for each path of the placement.
    costs
        Seconds and bytes of each stage, or of each stage and micro-batch. The bound then holds for
        all orders of micro-batches.
    memory_limit
        Bytes that a device may hold, one number or one a device, as in `pipesim.simulate`: all
        bytes, parameters included, also as ``"80GiB"``. The bound then holds for orders that keep
        the limit; without bytes in the costs, all do. By default the memory of a GPU in the
        workload of the costs, if any, as in `pipesim.optimize`; infinity for no limit.
    split_backward
        Whether the backward is I and W, or B. None: either, if the costs have ``input_grad`` and
        ``weight_grad``, else B. For either, I takes the lesser of I and B, and W the rest of the
        lesser of both sums.
    objective
        ``"makespan"``, or ``"span"``: the longest time of any device from its first start to its
        last end, without STEP.
    search
        Whether to raise the bound by branching on the orders of devices, for up to about a second
        more. The number of steps is fixed, so that the bound does not depend on the machine.
        No option limits the time of the rest, which grows with the tasks. It is a second for some
        tens of thousands of them, and 12 s for 512 stages with 512 micro-batches. It is about a
        minute for 3 stages with a million.

    Returns
    -------
    float
        Seconds of the objective; no order takes less.

    Raises
    ------
    CostsError
        If the costs lack seconds of an operation or have another number of stages, or if sums of
        them are not finite.
    NetworkError
        If a link names a device that the placement does not have.
    CapacityError
        If there is no memory for so many tasks.

    See Also
    --------
    pipesim.optimize : Search for an order that meets the bound.
    pipesim.Timeline.lower_bound : Bound for the tasks of a timeline.
    pipesim.Timeline.gap : Makespan of a timeline over its bound, minus 1.

    Examples
    --------
    1F1B is optimal if all stages take equally long:

    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=1, backward=2)
    >>> ps.lower_bound(ps.linear(4), 8, costs)
    33.0
    >>> ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8)), costs).makespan
    33.0
    """
    check_type("placement", placement, Placement)
    check_type("costs", costs, Costs)
    n_microbatches = check_count("n_microbatches", n_microbatches, placement.n_paths)
    check_flag("search", search)
    if split_backward is not None:
        check_flag("split_backward", split_backward)
    has_parts = costs.input_grad is not None and costs.weight_grad is not None
    if split_backward and not has_parts:
        raise CostsError(
            "split_backward=True needs the seconds of I and W; give the costs input_grad and "
            "weight_grad, or leave split_backward out"
        )
    is_split = split_backward
    if split_backward is None:
        is_split = has_parts
        if is_split:
            costs = each_microbatch(lambda own: _of_both_kinds(own, placement.n_stages), costs)
    if memory_limit is None and costs.work is not None:
        memory_limit = costs.work.memory
    graph = lower(_any_order(placement, n_microbatches, bool(is_split)))
    return graph_bound(graph, costs, memory_limit=memory_limit, objective=objective, search=search)


def _of_both_kinds(costs: Costs, n_stages: int) -> Costs:
    """Return costs of I and W such that orders with I and W, or with B, take as long or longer.

    An order with B becomes one with I and W: both fit into the time of B, the gradient is sent
    after I, and memory is released as early or earlier, if W holds no more than activations.
    """
    input_grad, weight_grad, backward, activation, held = (
        costs.per_stage(name, n_stages)
        for name in (
            *("input_grad", "weight_grad", "backward"),
            *("activation_bytes", "weight_grad_bytes"),
        )
    )
    first = np.minimum(input_grad, backward)
    rest = np.maximum(0.0, np.minimum(weight_grad, backward - first))
    return replace(
        costs,
        input_grad=tuple(first.tolist()),
        weight_grad=tuple(rest.tolist()),
        weight_grad_bytes=tuple(np.minimum(held, activation).tolist()),
    )


def _any_order(placement: Placement, n_microbatches: int, is_split: bool) -> Schedule:
    """Return a schedule of all forwards, then all backwards, stage by stage."""
    columns = _device_columns(placement, placement.path_of(n_microbatches), is_split)
    return Schedule.from_columns("any order", placement, n_microbatches, columns)


def _device_columns(
    placement: Placement, path_of: Ints, is_split: bool
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield operations, stages and micro-batches of each device."""
    backward = [Op.I, Op.W] if is_split else [Op.B]
    lanes: list[list[tuple[int, int, Ints]]] = [[] for _ in range(placement.n_devices)]
    for stages, ops in (
        (range(placement.n_stages), [Op.F]),
        (reversed(range(placement.n_stages)), backward),
    ):
        for stage in stages:
            for path, homes in enumerate(placement.paths):
                numbers = np.flatnonzero(path_of == path)
                lanes[homes[stage]].extend((op, stage, numbers) for op in ops)
    for own in lanes:
        sizes = [len(numbers) for _, _, numbers in own]
        yield (
            np.repeat([op for op, _, _ in own], sizes),
            np.repeat([stage for _, stage, _ in own], sizes),
            np.concatenate([numbers for _, _, numbers in own]),
        )
