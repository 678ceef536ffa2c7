"""Save a checkpoint in two processes, and let rank 1 be killed while it writes the next one.

``python save_in_two.py FOLDER``; the environment is that of torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.checkpoints import save


def killed(*_: Any) -> None:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    """Rank 0 leaves the text of its error in a file."""
    processes = px.join(timeout=20)
    torch.manual_seed(0)
    stages: list[nn.Module | None] = [nn.Linear(16, 16), nn.Linear(16, 16)]
    stages[1 - processes.rank] = None
    pipeline = px.Pipeline(
        stages, ps.lower(ps.schedule("1f1b", 2, 2)), ["cpu"], nn.functional.mse_loss,
        processes=processes, pin_threads=False,
    )  # fmt: skip
    px.save_checkpoint(pipeline, folder / "x", n=1)
    if processes.rank == 1:
        save.file_facts = killed  # type: ignore[assignment]
    try:
        px.save_checkpoint(pipeline, folder / "x", n=2)
    except Exception as error:
        (folder.parent / "error").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
