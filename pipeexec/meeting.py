"""How the processes that a launcher started find each other."""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipeexec.processes import Processes
from pipesim.errors import ArgumentError, ExecutionError, number

__all__ = ["join"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_N_JOINED = itertools.count()
#: Seconds beyond its own timeout that the search for the store may take.
_PATIENCE = 1.0


def join(timeout: float = 60.0) -> Processes:
    """Join the processes that torchrun started; every one of them must call this, equally often.

    Makes torch.distributed's default process group (gloo, and NCCL where there is a GPU) if it is
    not there yet.

    Parameters
    ----------
    timeout
        Seconds without progress after which every process stops with an error.

    Raises
    ------
    ArgumentError
        If torchrun's environment variables are missing or wrong.
    ExecutionError
        If the processes do not find each other.
    """
    seconds = number(timeout)
    if seconds is None or not 0 < seconds < float("inf"):
        raise ArgumentError(f"timeout must be a positive number of seconds, got {timeout!r}")
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise ArgumentError(
            f"{', '.join(missing)} not set in the environment; start the processes with torchrun "
            "--nproc-per-node 2 -m pipeexec run"
        )
    local_rank, n_local = (_count(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    try:
        store, rank, n_ranks = _find(seconds)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise ExecutionError(_not_found(error)) from error
    return Processes(
        PrefixStore(f"pipeexec/{next(_N_JOINED)}", store),
        rank,
        n_ranks,
        seconds,
        local_rank=rank if local_rank is None else local_rank,
        n_local=n_ranks if n_local is None else n_local,
        holder=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
    )


def _count(name: str) -> int | None:
    """Return the number in an environment variable; None where it is not set."""
    text = os.environ.get(name)
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    raise ArgumentError(
        f"{name} is {text!r} in the environment, which is no count; start the processes with "
        "torchrun --nproc-per-node 2 -m pipeexec run"
    )


def _find(timeout: float) -> tuple[Store, int, int]:
    """Return the store, and make the default process group if there is none."""
    store, rank, n_ranks = _rendezvous(timeout)
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore("default", store),
            rank=rank,
            world_size=n_ranks,
            # Longer than ours, which names who is waited for.
            timeout=timedelta(seconds=2 * timeout + 30),
        )
        atexit.register(_end_groups)
    return store, rank, n_ranks


def _end_groups() -> None:
    """End the threads of process groups while Python still runs.

    One of gloo's that lets go of a tensor only after that aborts the process (pytorch/pytorch,
    issue 190489).
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _rendezvous(timeout: float) -> tuple[Store, int, int]:
    """Return the store, rank, and number of ranks; a stranger at the port may never answer."""
    found: list[tuple[Store, int, int]] = []
    errors: list[Exception] = []

    def meet() -> None:
        try:
            found.append(next(rendezvous("env://", timeout=timedelta(seconds=timeout))))
        except Exception as error:  # is raised below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=meet, name="pipeexec join", daemon=True)
    thread.start()
    thread.join(1.5 * timeout + _PATIENCE)  # it has a timeout of its own, where anyone answers
    if errors:
        raise errors[0]
    if not found:
        raise RuntimeError(f"whoever listens there has not answered for {timeout:g} s")
    return found[0]


def _not_found(error: Exception) -> str:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    first = str(error).splitlines()[0]
    if "EADDRINUSE" in first or "address already in use" in first.lower():
        return f"port {where} is in use on {socket.gethostname()}; choose another --master-port"
    return (
        f"rank {os.environ['RANK']} found no store at {where}: {first}; check that every process "
        "is started, with the same master address and port"
    )
