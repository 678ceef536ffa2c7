"""Save checkpoints, one after the other, until a signal ends the process.

``python save_until_killed.py FOLDER NOTE``: each has its number in all its values; the file NOTE
has the number of the last one that was saved.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import torch
from torch import nn

import pipeexec as px
import pipesim as ps


def main(folder: Path, note: Path) -> None:
    """Continue from the latest checkpoint, if there is one."""
    stages = [nn.Linear(16, 16), nn.Linear(16, 16)]
    graph = ps.lower(ps.schedule("1f1b", 2, 2))
    with px.Pipeline(
        stages, graph, ["cpu"] * 2, nn.functional.mse_loss, torch.optim.AdamW, pin_threads=False
    ) as pipeline:
        latest = px.latest_checkpoint(folder)
        if latest is not None:
            px.load_checkpoint(pipeline, latest)
        for number in count(pipeline.n_steps + 1):
            pipeline.load_state_dict(
                {key: torch.full_like(x, number) for key, x in pipeline.state_dict().items()}
            )
            pipeline.n_steps = number
            px.save_checkpoint(pipeline, folder / "same", n=number)
            px.save_checkpoint(pipeline, folder / f"step-{number}", keep=2, n=number)
            part = note.with_suffix(".part")
            part.write_text(str(number))
            part.rename(note)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
