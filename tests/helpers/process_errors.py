"""Errors of pipelines of several processes: each process ends in time, with the right message."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ranks import Ranks
from small_pipelines import cut, dense, mse
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.errors import PipeError

#: Seconds in which every process must have ended; the timeout is longer.
PROMPT, TIMEOUT = 10.0, 30.0


def make(
    processes: Processes,
    schedule: Any = "gpipe",
    stages: list[nn.Module | None] | None = None,
    devices: Any = ("cpu",),
    loss_fn: Any = mse,
    optimizer: Any = None,
    **options: Any,
) -> px.Pipeline:
    """Return a pipeline of two processes, all right but for what is given."""
    graph = options.pop("graph", None) or ps.lower(
        ps.schedule(schedule, 2, 4) if isinstance(schedule, str) else schedule
    )
    stages = list(cut(dense(2), [1, 1])) if stages is None else stages
    return px.Pipeline(stages, graph, devices, loss_fn, optimizer, processes=processes, **options)


Case = Callable[[Processes], None]


def _run_case(processes: Processes, module: str, name: str) -> tuple[str, float]:
    """Return the error that a case of a module raises, and after how long."""
    case: Case = getattr(importlib.import_module(module), name)
    began = time.monotonic()
    try:
        case(processes)
    except (PipeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    finally:
        torch.manual_seed(0)
    return "no error", time.monotonic() - began


def errors_of(case: Case, ranks: Ranks) -> list[tuple[str, float]]:
    """Let every rank run a case; return the error that each raises, and after how long."""
    return ranks.run(_run_case, timeout=TIMEOUT, module=case.__module__, name=case.__name__)


def assert_errors(errors: list[tuple[str, float]], expected: Sequence[str]) -> None:
    """Check what `errors_of` returned: the error of each rank, at once."""
    for (message, seconds), pattern in zip(errors, expected, strict=True):
        assert re.match(pattern, message, re.DOTALL), message
        assert seconds < PROMPT, message
