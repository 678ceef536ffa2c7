"""`annotate_torch_pipelining`: ranges of a profiler for schedules of torch that write none."""

from __future__ import annotations

from contextlib import AbstractContextManager


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
