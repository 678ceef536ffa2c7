"""What is taken from torch.distributed.pipelining behind its public surface.

The runtime that runs a list of actions, and the class of those actions, have no public name. They
are imported here and nowhere else, so that a release that moves them breaks one file.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

__all__ = [
    "Listed",
    "executed_order",
    "listed_order",
    "loop_of",
    "make_runtime",
    "options_of_runtime",
]

_LOOPS: dict[type, str] = {ScheduleGPipe: "GPipe", Schedule1F1B: "1F1B"}
#: Actions, rank by rank: torch's own, their text, or None for an idle step.
Listed = Mapping[int, Sequence[object]]


def make_runtime(
    orders: Sequence[Sequence[str]],
    form: Literal["compute_only", "compute_comms"],
    *arguments: Any,
    **options: Any,
) -> PipelineScheduleMulti:
    """Return torch's runtime of the texts of actions, one sequence a rank.

    ``compute_only`` is lowered by torch; ``compute_comms`` is run as it stands.
    """
    runtime = _PipelineScheduleRuntime(*arguments, **options)
    for rank, row in enumerate(orders):
        runtime.pipeline_order[rank] = [_Action.from_str(text) for text in row]
    runtime._prepare_schedule_with_comms(runtime.pipeline_order, format=form)
    return runtime


def options_of_runtime() -> tuple[str, ...]:
    """Return the names of all arguments that the runtime of the installed torch takes."""
    # The runtime has no signature of its own. It takes some options out of its keyword arguments
    # and hands the others to its base class; those that it takes out are named by its subclasses.
    names: dict[str, None] = {}
    for schedule_class in (PipelineScheduleMulti, ScheduleInterleaved1F1B):
        names |= dict.fromkeys(inspect.signature(schedule_class).parameters)
    return tuple(names)


def listed_order(name: str, n_devices: int, n_microbatches: int, n_chunks: int) -> Listed:
    """Return ``pipeline_order`` of one of torch's classes, made without processes.

    Raises
    ------
    ValueError, AssertionError
        As torch does for counts that the class does not take.
    """
    listed: Listed = _on_stubs(name, 0, n_devices, n_microbatches, n_chunks).pipeline_order
    return listed


def executed_order(name: str, n_devices: int, n_microbatches: int) -> Listed:
    """Return what a class of torch's for one stage a rank runs.

    Its loop does not follow what it lists, so that stubs note what the loop calls.
    """
    return {rank: _recorded(name, rank, n_devices, n_microbatches) for rank in range(n_devices)}


def loop_of(schedule: object) -> tuple[str, int, int] | None:
    """Return name, ranks and micro-batches of a schedule that is a loop of its own, or None."""
    name = _LOOPS.get(type(schedule))
    if name is None or not isinstance(schedule, PipelineScheduleSingle):
        return None
    return name, schedule._num_stages, schedule._n_microbatches


def _on_stubs(name: str, rank: int, n_devices: int, n_microbatches: int, n_chunks: int) -> Any:
    """Return a schedule of torch's whose stages only have the attributes that it looks at."""
    schedule_class: Any = get_schedule_class(name)
    stages = [
        SimpleNamespace(
            stage_index=rank + chunk * n_devices,
            num_stages=n_devices * n_chunks,
            group_size=n_devices,
            group_rank=rank,
            is_last=False,
            submod=nn.Identity(),
        )
        for chunk in range(n_chunks)
    ]
    single = issubclass(schedule_class, PipelineScheduleSingle)
    return schedule_class(stages[0] if single else stages, n_microbatches)


def _recorded(name: str, rank: int, n_devices: int, n_microbatches: int) -> list[str]:
    """Return what one rank runs."""
    schedule = _on_stubs(name, rank, n_devices, n_microbatches, 1)
    ran: list[str] = []
    stage = schedule._stage
    for messages in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        setattr(stage, f"get_{messages}_ops", lambda microbatch: [])
    stage.forward_one_chunk = lambda m, *_, **__: ran.append(f"{rank}F{m}")
    stage.backward_one_chunk = lambda m, **__: ran.append(f"{rank}B{m}")
    stage.perform_reduce_grad = lambda factor: None
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return ran
