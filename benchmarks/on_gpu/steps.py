"""The steps of ``make gpu``: modules, time limits and estimates, in the order in which they run."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DRY", "PREMISES", "STEPS", "WARM_UP", "GpuStep", "chosen", "step_called"]

#: Probes of the step ``environment`` without which figures of slices mean nothing.
PREMISES = ("slices are green contexts", "a captured step stays on its slices")
#: Loads all that other steps load, and saves the prediction from a data sheet; runs first.
WARM_UP = "warm-up"


class GpuStep(NamedTuple):
    """One step, a process of its own.

    Attributes
    ----------
    module, function
        Called with a `Bench`, a `Report` and ``arguments``; the step ``tests`` has none.
    estimate, limit
        Seconds that it takes on an H100, estimated by arithmetic; seconds after which it is cut.
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
    arguments: tuple[int, ...] = ()
    n_slices: int = 4
    variable: str = ""


STEPS: dict[str, GpuStep] = {
    "environment": GpuStep("on_gpu.environment", "environment", 40, 120, n_slices=8),
    "validation-2": GpuStep("on_gpu.validation", "validation", 75, 150, (2,), n_slices=2),
    "tests": GpuStep("", "", 110, 200, n_slices=8),
    "sanitizer": GpuStep("on_gpu.sanitizer", "sanitizer", 45, 90, variable="TORCH_CUDA_SANITIZER"),
    "overlap": GpuStep("on_gpu.overlap", "overlap", 45, 90),
    "gpipe": GpuStep("on_gpu.gpipe", "gpipe", 45, 90),
    "host": GpuStep("on_gpu.host", "host", 25, 60),
    "memory": GpuStep("on_gpu.memory", "memory", 35, 75),
    "peers": GpuStep("on_gpu.peers", "peers", 60, 120),
    "validation-4": GpuStep("on_gpu.validation", "validation", 125, 220, (4,)),
    "validation-8": GpuStep("on_gpu.validation", "validation", 185, 300, (8,), n_slices=8),
    "soak": GpuStep("on_gpu.soak", "soak", 50, 90),
}
_PREPARATION = {WARM_UP: GpuStep("on_gpu.warm_up", "warm_up", 50, 150, n_slices=1)}
#: Steps of a dry run, which has two CPU workers.
DRY = tuple(name for name in STEPS if name not in ("validation-4", "validation-8", "tests"))


def step_called(name: str) -> GpuStep:
    """Return a step by its name."""
    return {**_PREPARATION, **STEPS}[name]


def chosen(only: str | None, dry: bool) -> list[str]:
    """Return the names of the steps to run, in the order of `STEPS`.

    Raises
    ------
    ValueError
        For a name that is no step, or no step of a dry run.
    """
    possible = list(DRY if dry else STEPS)
    if only is None:
        return possible
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in possible:
            why = "is not run on CPU workers" if name in STEPS else "does not exist"
            raise ValueError(f"ONLY: step {name!r} {why}; there are {', '.join(possible)}")
    if not names:
        raise ValueError(f"ONLY names no step; there are {', '.join(possible)}")
    return [name for name in possible if name in names]
