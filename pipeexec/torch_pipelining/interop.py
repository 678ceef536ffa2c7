"""Convert schedules to and from torch.distributed.pipelining, and annotate its stages.

Torch's package is imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from pipesim.errors import ArgumentError, check_count, check_flag, check_name, check_text
from pipesim.graph.exports import torch_orders
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify
from pipesim.scheduling.files import schedule_from_texts
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.checks import checked_names

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    from pipeexec.torch_pipelining.private import Listed


#: Names of torch's schedule classes (without ``Schedule``), and the stages per rank of each.
TORCH_SCHEDULES: Mapping[str, int | None] = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": None,
    "LoopedBFS": None,
    "InterleavedZeroBubble": None,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


def to_torch(
    schedule: Schedule | TaskGraph,
    stages: Sequence[PipelineStage],
    loss_fn: Callable[..., Tensor],
    *,
    loss_reduction: Literal["mean", "sum"] = "mean",
    **options: Any,
) -> PipelineScheduleMulti:
    """Return torch.distributed.pipelining's runtime of a schedule.

    Every process of the group must call this, each with its own stages. Stages run as in torch's
    own schedules, and so do FSDP and DDP.

    Parameters
    ----------
    schedule
        A schedule, to which torch adds the messages; or a graph from `pipesim.lower`, whose
        messages are sent in its issue order. A graph has no ``UNSHARD`` for stages under FSDP.
    stages
        The `torch.distributed.pipelining.PipelineStage` of each stage that this rank holds.
    loss_fn
        ``loss_fn(output, target)`` of a micro-batch.
    loss_reduction
        Whether ``loss_fn`` returns a ``"mean"`` over its samples, or a ``"sum"``. Torch
        averages means without weights: micro-batches should have the same size.
    **options
        More arguments of torch's schedules, such as ``output_merge_spec``.

    Returns
    -------
    torch.distributed.pipelining.schedules.PipelineScheduleMulti
        Its ``step(*args, target=..., losses=...)`` runs one step: the rank of the first stage
        gives the inputs, that of the last stage the targets. Gradients add up in
        ``parameter.grad``; optimizer steps are the caller's.

    Raises
    ------
    ScheduleError
        If the schedule is wrong; see `pipesim.verify`.

    See Also
    --------
    pipeexec.from_torch : The other way round.

    Notes
    -----
    Until torch 2.11, a step begins with a message from each stage to its neighbours. Where a rank
    holds two neighbours, as in ZB-V, that message goes to the rank itself, and gloo raises
    RuntimeError.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> import pipeexec as px, pipesim as ps
    >>> from torch.distributed.pipelining import PipelineStage
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    >>> runtime = px.to_torch(ps.schedule("1f1b", 1, 2), [stage], torch.nn.functional.mse_loss)
    >>> x, losses = torch.ones(8, 4), []
    >>> _ = runtime.step(x, target=x, losses=losses)
    >>> len(losses)
    2
    >>> dist.destroy_process_group()
    """
    from pipeexec.torch_pipelining.private import make_runtime

    check_name("loss_reduction", loss_reduction, ("mean", "sum"))
    if not callable(loss_fn):
        raise ArgumentError(
            f"loss_fn must be callable as loss_fn(output, target), got {loss_fn!r:.60}"
        )
    check_options(options)
    form: Literal["compute_only", "compute_comms"]
    if isinstance(schedule, Schedule):
        _check_runnable(schedule)
        orders = [[str(action) for action in order] for order in schedule.orders]
        homes, form = list(schedule.placement.device_of), "compute_only"
    elif isinstance(schedule, TaskGraph):
        verify(schedule)
        orders, homes = torch_orders(schedule), schedule.device_of_stage.tolist()
        form = "compute_comms"
    else:
        raise ArgumentError(f"to_torch takes a Schedule or a TaskGraph, got {schedule!r:.60}")
    ordered = stages_in_order(stages, homes, len(orders))
    scale = loss_reduction == "mean"
    return make_runtime(
        orders, form, ordered, schedule.n_microbatches, loss_fn=loss_fn, scale_grads=scale,
        **options,
    )  # fmt: skip


@checked_names
def from_torch(
    schedule: object, *, n_microbatches: int | None = None, name: str | None = None
) -> Schedule:
    """Return the order of one of torch.distributed.pipelining's schedules.

    Parameters
    ----------
    schedule
        Object of one of torch's schedule classes, or its ``pipeline_order``: a mapping of ranks to
        actions (or their text), with None for idle steps. The loops of `ScheduleGPipe` and
        `Schedule1F1B` do not follow the order that they list; the result is the order of the loop.
    n_microbatches
        Number of micro-batches; by default that of the actions.
    name
        Name of the schedule; by default that of the class.

    Returns
    -------
    Schedule
        The actions of each rank, in their order.

    Raises
    ------
    ScheduleError
        If an action cannot be simulated, naming rank and position. The order itself is not checked
        before `pipesim.verify`.

    See Also
    --------
    pipeexec.to_torch : The other way round.
    pipeexec.torch_pipelining.torch_schedule_order : Order of a class of torch.

    Examples
    --------
    >>> import pipeexec as px
    >>> print(px.from_torch({0: ["0F0", "0B0"], 1: [None, "1F0", "1B0"]}).grid())
    device 0 | 0F0 0B0
    device 1 | 1F0 1B0
    """
    from pipeexec.torch_pipelining.private import executed_order, loop_of

    if name is not None:
        check_text("name", name)
    order = schedule if isinstance(schedule, Mapping) else getattr(schedule, "pipeline_order", None)
    loop = loop_of(schedule)
    if loop is not None:
        order = executed_order(*loop)
    if not isinstance(order, Mapping) or not order:
        raise ArgumentError(
            "from_torch takes a schedule of torch.distributed.pipelining with a pipeline_order, or "
            f"a mapping of ranks to actions; got {schedule!r:.60}"
        )
    if set(order) != set(range(len(order))):
        raise ArgumentError(
            f"the ranks of an order are 0 to {len(order) - 1}, got {', '.join(map(repr, order))}"
        )
    rows = [_texts(rank, order[rank]) for rank in range(len(order))]
    default = "torch" if isinstance(schedule, Mapping) else type(schedule).__name__
    where = f"the order of {name or default}"
    return schedule_from_texts(where, rows, name or default, n_microbatches)


def torch_schedule_order(
    name: str, n_devices: int, n_microbatches: int, n_chunks: int = 1, *, executed: bool = False
) -> Listed:
    """Return the order that one of torch's schedule classes lists; needs no process or stage.

    Parameters
    ----------
    name
        ``"GPipe"``, ``"1F1B"``, ``"Interleaved1F1B"``, ``"LoopedBFS"``,
        ``"InterleavedZeroBubble"``, ``"ZBVZeroBubble"`` or ``"DualPipeV"``.
    n_devices, n_microbatches, n_chunks
        Number of ranks, of micro-batches, and of stages per rank.
    executed
        Whether to return the order that the class runs. ``"GPipe"`` and ``"1F1B"`` run a loop of
        another order than they list; see docs/how_to/exchange_orders_with_torch.md.

    Returns
    -------
    dict
        Actions of each rank, as ``pipeline_order`` has them, or as text; None for idle steps.

    See Also
    --------
    pipeexec.from_torch : Make a schedule of the order.

    Examples
    --------
    >>> import pipeexec as px
    >>> from pipeexec.torch_pipelining import torch_schedule_order
    >>> order = torch_schedule_order("1F1B", 2, 3, executed=True)
    >>> print(px.from_torch(order).grid())
    device 0 | 0F0 0F1 0B0 0F2 0B1 0B2
    device 1 | 1F0 1B0 1F1 1B1 1F2 1B2
    """
    from pipeexec.torch_pipelining.private import executed_order, listed_order

    check_name("schedule of torch", name, TORCH_SCHEDULES)
    n_devices = check_count("n_devices", n_devices)
    n_microbatches = check_count("n_microbatches", n_microbatches)
    n_chunks = check_count("n_chunks", n_chunks)
    check_flag("executed", executed)
    check_schedule(f"torch's {name}", 2 * n_devices * n_microbatches * n_chunks)
    takes = TORCH_SCHEDULES[name]
    if takes not in (None, n_chunks):
        raise ArgumentError(f"torch's {name} takes n_chunks={takes}, got {n_chunks}")
    try:
        if executed and takes == 1:
            return executed_order(name, n_devices, n_microbatches)
        return listed_order(name, n_devices, n_microbatches, n_chunks)
    except (ValueError, AssertionError) as error:
        raise ArgumentError(
            f"torch's {name} does not take n_devices={n_devices}, n_microbatches={n_microbatches}, "
            f"n_chunks={n_chunks}: {error}"
        ) from error


def _check_runnable(schedule: Schedule) -> None:
    """Raise unless torch can run a schedule."""
    where = f"schedule {schedule.name!r}"
    if schedule.placement.n_paths > 1:
        raise ArgumentError(
            f"{where} has {schedule.placement.n_paths} paths, with copies of stages on different "
            "devices; in torch a stage is on one rank: take a schedule of one path, such as "
            "'dualpipev' for 'dualpipe'"
        )
    if schedule.placement.edges:
        raise ArgumentError(
            f"{where} has stages with the edges {list(schedule.placement.edges)}; torch's runtime "
            "sends each output to the next stage: take a schedule of a chain"
        )
    if schedule.n_batches > 1 or schedule.weight_versions != "one":
        raise ArgumentError(
            f"{where} has {schedule.n_batches} mini-batches and weight_versions="
            f"{schedule.weight_versions!r}; torch's runtime knows no optimizer step inside a step: "
            "take a schedule with one set of weights"
        )
    if schedule.n_slices > 1:
        raise ArgumentError(
            f"{where} has {schedule.n_slices} slices a sequence; torch's runtime keeps no keys and "
            "values from one micro-batch for the next: take a schedule without slices"
        )
    verify(schedule)


def _texts(rank: int, row: object) -> list[str]:
    """Return the texts of the actions of a rank."""
    if isinstance(row, (str, bytes)) or not isinstance(row, Sequence):
        raise ArgumentError(
            f"rank {rank} of an order must list its actions, got {row!r:.60}; give a sequence such "
            "as ['0F0', '0B0']"
        )
    return ["" if action is None else str(action) for action in row]


# Options and stages that `to_torch` hands to torch's runtime.

#: Attributes that each stage must have.
_STAGE_ATTRIBUTES = ("stage_index", "num_stages", "group_rank", "group_size")
#: Arguments of torch's runtime that options must not set, and what to do instead.
RESERVED = {
    "n_microbatches": "the schedule has it; leave it out",
    "scale_grads": "give loss_reduction='sum' for gradients that are not scaled",
}


def check_options(options: Mapping[str, object]) -> None:
    """Raise `ArgumentError` for options that torch's runtime lacks or that this package sets."""
    from pipeexec.torch_pipelining.private import options_of_runtime

    allowed = set(options_of_runtime()) - {"stages", "loss_fn", *RESERVED}
    for option in options:
        if option in RESERVED:
            raise ArgumentError(f"to_torch takes no option {option!r}: {RESERVED[option]}")
        check_name("option of torch's runtime:", option, allowed)


def stages_in_order(stages: Sequence[Any], homes: list[int], n_devices: int) -> list[Any]:
    """Return the stages of this rank in order; raise if they differ from the placement's."""
    if not isinstance(stages, Sequence):
        raise ArgumentError(
            f"to_torch takes a sequence of stages, got {stages!r:.60}; give [stage], even of one"
        )
    for stage in stages:
        lacking = [name for name in _STAGE_ATTRIBUTES if not hasattr(stage, name)]
        if lacking:
            raise ArgumentError(
                f"{stage!r:.60} is no stage: it lacks {', '.join(lacking)}; wrap the module in "
                "torch.distributed.pipelining.PipelineStage"
            )
        check_count("stage_index of a stage", stage.stage_index, 0)
    ordered = sorted(stages, key=lambda stage: stage.stage_index)
    if not ordered:
        raise ArgumentError("to_torch got no stages; give those that this rank holds")
    rank, size = ordered[0].group_rank, ordered[0].group_size
    if size != n_devices:
        raise ArgumentError(
            f"the schedule is for {n_devices} devices, but the stages' process group has {size} "
            "ranks; give one rank a device"
        )
    for stage in ordered:
        if stage.num_stages != len(homes):
            raise ArgumentError(
                f"stage {stage.stage_index} says num_stages={stage.num_stages}, but the schedule "
                f"has {len(homes)} stages; make each PipelineStage with that number"
            )
    expected = [stage for stage, home in enumerate(homes) if home == rank]
    indices = [stage.stage_index for stage in ordered]
    if indices != expected:
        raise ArgumentError(
            f"rank {rank} holds the stages {expected}, got {indices}; give just these"
        )
    return ordered


def annotate_torch_pipelining() -> AbstractContextManager[None]:
    """Let all schedules of torch.distributed.pipelining write the ranges that pipesim reads.

    In torch 2.13, `Schedule1F1B` writes no ranges, and `ScheduleGPipe` writes ``Forward 0``,
    without a stage. In the context, each forward and backward of a stage is a range such as
    ``PP:1F0`` or ``PP:1B0``; the halves of a split backward are ``PP:1I0`` and ``PP:1W0``. Classes
    with ranges of their own, such as `ScheduleInterleaved1F1B`, keep those and get no others.

    Each rank enters the context, in the process that calls ``schedule.step``. Methods of all stages
    are replaced while it is open. The loss is in no range; ``Timeline.from_chrome(gaps="charge")``
    counts it to the task that follows.

    Returns
    -------
    context manager

    See Also
    --------
    pipesim.Timeline.from_chrome : Read the traces of all ranks.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> import pipeexec as px
    >>> from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    >>> schedule = Schedule1F1B(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    >>> x = torch.ones(8, 4)
    >>> with px.annotate_torch_pipelining(), torch.profiler.profile() as profiler:
    ...     _ = schedule.step(x, target=x)
    >>> sorted(event.name for event in profiler.events() if event.name.startswith("PP:"))
    ['PP:0B0', 'PP:0B1', 'PP:0F0', 'PP:0F1']
    >>> dist.destroy_process_group()
    """
    from pipeexec.torch_pipelining.private import annotated_stages

    return annotated_stages()
