"""Ranges of torch's schedules, in traces of two processes."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.torch_pipelining import torch_schedule_order
from pipesim.ops import Op
from pipesim.trace.chrome_json import load

N_MICROBATCHES = 4
#: Torch's GPipe begins with the backward of the first micro-batch, that of pipesim with the last.
SCHEDULES = {
    "1F1B": ps.schedule("1f1b", 2, N_MICROBATCHES),
    "GPipe": px.from_torch(torch_schedule_order("GPipe", 2, N_MICROBATCHES, executed=True)),
}


def trace_step(_: Processes, name: str, folder: str) -> dict[str, int]:
    """Write the trace of a step of a class of torch; return how often it has each range."""
    rank, n_chunks = dist.get_rank(), 1 if name in ("GPipe", "1F1B") else 2
    stages = [
        PipelineStage(nn.Linear(64, 64), rank + 2 * chunk, 2 * n_chunks, torch.device("cpu"))
        for chunk in range(n_chunks)
    ]
    schedule: Any = schedules.get_schedule_class(name)(
        stages[0] if n_chunks == 1 else stages, N_MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    batch = torch.ones(4 * N_MICROBATCHES, 64)
    inputs, target = ([batch] if rank == 0 else []), (batch if rank == 1 else None)
    file = Path(folder) / f"rank{rank}.json"
    with px.annotate_torch_pipelining():
        schedule.step(*inputs, target=target)
        with torch.profiler.profile() as profiler:
            schedule.step(*inputs, target=target)
    profiler.export_chrome_trace(str(file))
    names = [str(event.get("name")) for event in load(file)["traceEvents"]]
    return Counter(name for name in names if re.fullmatch(r"PP:\d[FBIW]\d", name))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_without_own_ranges(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    """The trace has the order of the schedule, and lies beside its simulation."""
    two_ranks.run(trace_step, name=name, folder=str(tmp_path))
    measured = ps.Timeline.from_chrome(tmp_path)
    graph = ps.lower(SCHEDULES[name], step="none")
    for device in range(2):
        assert compute(measured.graph, device) == compute(graph, device)
    costs = ps.Costs.from_timeline(measured)
    comparison = ps.Comparison(ps.simulate(graph, costs), measured)
    assert comparison.by_op.loc[["F", "B"], "count"].tolist() == [2 * N_MICROBATCHES] * 2
    assert comparison.by_op.loc[["F", "B"], "error"].abs().max() < 1e-9


def compute(graph: ps.TaskGraph, device: int) -> list[str]:
    """Return the forwards and backwards of a device, in their order."""
    tasks = list(graph)
    return [str(task) for task in tasks if task.device == device and task.action.op in (Op.F, Op.B)]


def test_schedule_with_own_ranges(two_ranks: Ranks, tmp_path: Path) -> None:
    """Each action is recorded once, by torch."""
    counts = two_ranks.run(trace_step, name="Interleaved1F1B", folder=str(tmp_path))
    for rank, count in enumerate(counts):
        expected = {
            f"PP:{stage}{op}{microbatch}": 1
            for stage in (rank, rank + 2)
            for op in "FB"
            for microbatch in range(N_MICROBATCHES)
        }
        assert count == expected


def test_split_backward() -> None:
    """Its halves are I and W; this stage has nothing to compute in them."""
    stage: Any = SimpleNamespace(stage_index=1, has_backward=False)
    with px.annotate_torch_pipelining(), torch.profiler.profile() as profiler:
        PipelineStage.backward_one_chunk(stage, 0, full_backward=False)
        PipelineStage.backward_weight_one_chunk(stage, bwd_chunk_id=2)
    names = [event.name for event in profiler.events() if event.name.startswith("PP:")]
    assert names == ["PP:1I0", "PP:1W2"]


def test_end_of_the_context() -> None:
    """Stages have torch's methods again, also after an error."""
    before = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk
    with suppress(RuntimeError), px.annotate_torch_pipelining():
        assert PipelineStage.forward_one_chunk is not before[0]
        raise RuntimeError
    assert (PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk) == before
