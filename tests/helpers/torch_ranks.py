"""One rank of a pipeline under torch's runtime, in a process of its own; tests start several.

``python torch_ranks.py RANK FOLDER``: the folder holds ``case.json``, and gets the gradients.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from ranks import run_to_end
from torch import Tensor, nn

import pipesim as ps

WIDTH, BATCH = 8, 12


def layers(n_stages: int) -> list[nn.Sequential]:
    """Return stages with the same weights in every process."""
    torch.manual_seed(n_stages)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n_stages)]


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the same in every process."""
    torch.manual_seed(99)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def run_ranks(
    folder: Path, files: Sequence[str], lowered: Sequence[str] = (), seconds: float = 240
) -> list[dict[str, Tensor]]:
    """Let two processes run schedule files in turn; return the gradients of each, by name.

    Those in ``lowered`` are run with the messages that pipesim adds, the rest with torch's.
    """
    (folder / "case.json").write_text(json.dumps({"files": files, "lowered": list(lowered)}))
    commands = [[__file__, str(rank), str(folder)] for rank in range(2)]
    statuses, output = run_to_end(commands, folder, seconds)
    assert statuses == [0, 0], "\n".join(output)
    tensors: list[dict[str, Tensor]] = [{} for _ in files]
    for rank in range(2):
        for all_of, own in zip(tensors, torch.load(folder / f"{rank}.pt"), strict=True):
            all_of |= own
    return tensors


def _main(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    import pipeexec as px

    # It takes seconds to load, and most of pipeexec does without.
    assert "torch.distributed.pipelining" not in sys.modules
    from torch.distributed.pipelining import PipelineStage

    case = json.loads((folder / "case.json").read_text())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    inputs, targets = batch()
    results = []
    for file in case["files"]:
        schedule = ps.Schedule.load(file)
        modules = layers(schedule.n_stages)
        stages = [
            PipelineStage(modules[s], s, schedule.n_stages, torch.device("cpu"))
            for s in schedule.placement.stages_of(rank)
        ]
        runtime = px.to_torch(
            ps.lower(schedule) if file in case["lowered"] else schedule,
            stages,
            nn.functional.mse_loss,
        )
        losses: list[Tensor] = []
        ends = {stage.stage_index for stage in stages}
        runtime.step(
            *([inputs] if 0 in ends else []),
            target=targets if schedule.n_stages - 1 in ends else None,
            losses=losses,
        )
        gradients = {
            f"{stage.stage_index}.{name}": parameter.grad
            for stage in stages
            for name, parameter in modules[stage.stage_index].named_parameters()
        }
        if losses:
            gradients["loss"] = torch.stack(losses).mean().detach()
        results.append(gradients)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
