"""Processes on this machine that find each other as those of torchrun do, over gloo."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _machine as machine
import torch.multiprocessing as mp


def spawn(function: Callable[..., None], n_ranks: int, *arguments: Any) -> None:
    """Run ``function(*arguments)`` in ``n_ranks`` processes; raise if one of them does."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # read at their start
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_be_rank, (function, n_ranks, port, arguments), nprocs=n_ranks)


def publish_text(function: Callable[..., None], n_ranks: int, name: str, *arguments: Any) -> None:
    """Run ``function(folder, *arguments)`` in processes; print and keep the text that they leave.

    It is the file ``text`` of the folder. It gets a header, and goes to
    ``results/benchmarks/<name>.txt``.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(function, n_ranks, folder, *arguments)
        text = (Path(folder) / "text").read_text()
    text = "\n".join([*machine.header(["pipesim", "torch"]), "", text])
    print(text)
    (machine.ROOT / "results" / "benchmarks" / f"{name}.txt").write_text(text + "\n")


def _be_rank(
    rank: int, function: Callable[..., None], n_ranks: int, port: int, arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    function(*arguments)
