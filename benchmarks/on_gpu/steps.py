"""The steps of ``make gpu``: modules, time limits, estimates and worth; and the two short calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Probes of the step ``environment`` that figures rest on, and what is said of the rows of
#: makespans where one says no: of all rows, and of those of CUDA graphs.
PREMISES = {
    "slices are green contexts": ("slices share multiprocessors", False),
    "a captured step stays on its slices": ("replays leave their slices", True),
}
#: Loads all that other steps load, and saves the prediction from a data sheet; runs first.
WARM_UP = "warm-up"


class GpuStep(NamedTuple):
    """One step, a process of its own.

    Attributes
    ----------
    module, function
        Called with a `Bench`, a `Report` and ``arguments``; the step ``tests`` has none.
    estimate, limit
        Seconds that it takes on an H100 in brief mode, estimated by arithmetic; seconds after which
        it is cut.
    worth
        What is lost without it, from 10 down to 1: where time is short, the least goes first.
    arguments
        Further arguments.
    n_slices
        Largest number of slices that it makes of the GPU.
    variable
        Variable of the environment that its process has, set to 1.
    """

    module: str
    function: str
    estimate: float
    limit: float
    worth: int
    arguments: tuple[int, ...] = ()
    n_slices: int = 4
    variable: str = ""


STEPS: dict[str, GpuStep] = {
    "validation-2": GpuStep("on_gpu.validation", "validation", 55, 110, 10, (2,), n_slices=2),
    "instrument": GpuStep("on_gpu.instrument", "instrument", 25, 60, 8),
    "host": GpuStep("on_gpu.host", "host", 15, 40, 6),
    "memory": GpuStep("on_gpu.memory", "memory", 30, 60, 7),
    "peers": GpuStep("on_gpu.peers", "peers", 35, 80, 8),
    "validation-4": GpuStep("on_gpu.validation", "validation", 75, 150, 9, (4,)),
    "bfloat16": GpuStep("on_gpu.validation", "in_bfloat16", 25, 60, 6, (2,), n_slices=2),
    "features": GpuStep("on_gpu.features", "features", 30, 70, 9),
    "gpipe": GpuStep("on_gpu.gpipe", "gpipe", 40, 80, 5),
    "overlap": GpuStep("on_gpu.overlap", "overlap", 40, 80, 4),
    "environment": GpuStep("on_gpu.environment", "environment", 30, 75, 7),
    "sanitizer": GpuStep("on_gpu.sanitizer", "sanitizer", 60, 110, 3,
                         variable="TORCH_CUDA_SANITIZER"),
    "tests": GpuStep("", "", 110, 200, 2, n_slices=8),
    "soak": GpuStep("on_gpu.soak", "soak", 50, 90, 2),
    "validation-8": GpuStep("on_gpu.validation", "validation", 110, 200, 1, (8,), n_slices=8),
}  # fmt: skip
_PREPARATION = {WARM_UP: GpuStep("on_gpu.warm_up", "warm_up", 30, 75, 10, n_slices=1)}
#: Steps of a dry run, which has few CPU workers.
DRY = tuple(name for name in STEPS if name not in ("validation-8", "tests"))


class Call(NamedTuple):
    """A command that measures as much as its seconds allow."""

    names: tuple[str, ...]
    limit: float


#: The calls of ``make gpu-first`` and ``make gpu-second``. The second one also repeats steps of the
#: first that failed or were cut, or runs those that it did not reach.
CALLS = {
    "first": Call(
        ("validation-2", "instrument", "host", "memory", "peers", "validation-4", "bfloat16",
         "gpipe", "overlap", "environment", "sanitizer"), 520.0,
    ),
    "second": Call(("features",), 165.0),
}  # fmt: skip


def step_called(name: str) -> GpuStep:
    """Return a step by its name."""
    return {**_PREPARATION, **STEPS}[name]


def chosen(only: str | None, dry: bool) -> list[str]:
    """Return the names of the steps to run, in the order given; by default all.

    Raises
    ------
    ValueError
        For a name that is no step, or no step of a dry run.
    """
    possible = list(DRY if dry else STEPS)
    if only is None:
        return possible
    names = list(dict.fromkeys(name.strip() for name in only.split(",") if name.strip()))
    for name in names:
        if name not in possible:
            why = "is not run on CPU workers" if name in STEPS else "does not exist"
            raise ValueError(f"ONLY: step {name!r} {why}; there are {', '.join(possible)}")
    if not names:
        raise ValueError(f"ONLY names no step; there are {', '.join(possible)}")
    return names


def next_step(waiting: Sequence[str], left: float) -> str:
    """Return the step to run next: the first one, once those of least worth are left out.

    As many are left out, for now, as the estimates say that ``left`` seconds are too few for all.
    """
    kept = list(waiting)
    while len(kept) > 1 and sum(step_called(name).estimate for name in kept) > left:
        kept.remove(min(kept, key=lambda name: step_called(name).worth))
    return kept[0]
