"""Private names of torch.distributed.pipelining.

The runtime that runs a list of actions, and the class of those actions, have no public name. Only
this file imports them, so that a torch release that moves them breaks one file.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.profiler import record_function

_LOOPS: dict[type, str] = {ScheduleGPipe: "GPipe", Schedule1F1B: "1F1B"}
#: Actions, rank by rank: torch's own, their text, or None for an idle step.
Listed = Mapping[int, Sequence[object]]


def make_runtime(
    orders: Sequence[Sequence[str]],
    form: Literal["compute_only", "compute_comms"],
    *arguments: Any,
    **options: Any,
) -> PipelineScheduleMulti:
    """Return torch's runtime for the texts of actions, one sequence per rank.

    Torch lowers ``compute_only`` orders, and runs ``compute_comms`` orders as given.
    """
    runtime = _PipelineScheduleRuntime(*arguments, **options)
    for rank, row in enumerate(orders):
        runtime.pipeline_order[rank] = [_Action.from_str(text) for text in row]
    runtime._prepare_schedule_with_comms(runtime.pipeline_order, format=form)
    return runtime


def options_of_runtime() -> tuple[str, ...]:
    """Return the names of all arguments that the runtime of the installed torch takes."""
    # The runtime has no own signature: it removes some keyword arguments and passes the others to
    # its base class. Its subclasses name the removed ones.
    names: dict[str, None] = {}
    for schedule_class in (PipelineScheduleMulti, ScheduleInterleaved1F1B):
        names |= dict.fromkeys(inspect.signature(schedule_class).parameters)
    return tuple(names)


def listed_order(name: str, n_devices: int, n_microbatches: int, n_chunks: int) -> Listed:
    """Return ``pipeline_order`` of one of torch's classes; needs no processes.

    Torch raises `ValueError` or `AssertionError` for counts that the class does not take.
    """
    listed: Listed = _with_stubs(name, 0, n_devices, n_microbatches, n_chunks).pipeline_order
    return listed


def executed_order(name: str, n_devices: int, n_microbatches: int) -> Listed:
    """Return the order that one of torch's classes for one stage per rank runs.

    Its loop deviates from the listed order, so that stubs record the calls of the loop.
    """
    return {rank: _recorded(name, rank, n_devices, n_microbatches) for rank in range(n_devices)}


def loop_of(schedule: object) -> tuple[str, int, int] | None:
    """Return name, ranks and micro-batches of a schedule that runs a loop, else None."""
    name = _LOOPS.get(type(schedule))
    if name is None or not isinstance(schedule, PipelineScheduleSingle):
        return None
    return name, schedule._num_stages, schedule._n_microbatches


def _with_stubs(name: str, rank: int, n_devices: int, n_microbatches: int, n_chunks: int) -> Any:
    """Return one of torch's schedules; its stages have only the attributes that it reads."""
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
    """Return the actions that one rank runs."""
    schedule = _with_stubs(name, rank, n_devices, n_microbatches, 1)
    actions: list[str] = []
    stage = schedule._stage
    for messages in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        setattr(stage, f"get_{messages}_ops", lambda microbatch: [])
    stage.forward_one_chunk = lambda m, *_, **__: actions.append(f"{rank}F{m}")
    stage.backward_one_chunk = lambda m, **__: actions.append(f"{rank}B{m}")
    stage.perform_reduce_grad = lambda factor: None
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return actions


@contextmanager
def annotated_stages() -> Iterator[None]:
    """Record each forward and backward of a stage as a range.

    The runtime for lists of actions records the actions itself, so that its calls are left out.
    """
    inside = threading.local()  # ranks may be threads of one process

    @contextmanager
    def in_runtime(_: inspect.BoundArguments) -> Iterator[None]:
        inside.runtime = True
        try:
            yield
        finally:
            inside.runtime = False

    def recorded(op: str, call: inspect.BoundArguments) -> AbstractContextManager[object]:
        stage, microbatch, *_ = call.args
        op = op if call.arguments.get("full_backward", True) else "I"
        is_recorded = getattr(inside, "runtime", False)
        return (
            nullcontext()
            if is_recorded
            else record_function(f"PP:{stage.stage_index}{op}{microbatch}")
        )

    def wrap(
        context: Callable[..., AbstractContextManager[object]], owner: type, name: str
    ) -> None:
        method = getattr(owner, name)
        signature = inspect.signature(method)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with context(signature.bind(*args, **kwargs)):
                return method(*args, **kwargs)

        setattr(owner, name, call)
        stack.callback(setattr, owner, name, method)

    with ExitStack() as stack:
        for op, name in (("F", "forward"), ("B", "backward"), ("W", "backward_weight")):
            wrap(functools.partial(recorded, op), _PipelineStageBase, f"{name}_one_chunk")
        wrap(in_runtime, _PipelineScheduleRuntime, "_step_microbatches")
        yield
