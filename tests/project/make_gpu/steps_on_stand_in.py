"""Steps of ``make gpu`` as they run on a GPU, tiny, on the stand-in for CUDA; for the rehearsal.

A dry run takes other branches than a GPU: CPU workers, no CUDA graphs, no slices. Here slices are
`FakeGpu`, whose work runs at once on the CPU. Times mean nothing, and targets are not looked at:
a step fails if it raises, or if one of its parts does. `NO_KERNELS` is the exception. Left out are
the steps whose calls need a driver.

``PYTHONPATH=tests/helpers python tests/project/make_gpu/steps_on_stand_in.py STEP...``
runs some steps, or all of `STEPS`.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_allocator import CountedGpu, FakeAllocator
from fake_cuda import FakeCuda, FakeGpu, named_gpus
from places import BENCHMARKS

import pipeexec as px
from pipeexec.executor import allocator_memory, step_capture, step_memory

sys.path.insert(0, str(BENCHMARKS))
bench = importlib.import_module("on_gpu.bench")
report = importlib.import_module("on_gpu.report")
steps = importlib.import_module("on_gpu.steps")

STEPS = ("validation-2", "instrument", "host", "memory", "peers", "validation-4", "bfloat16",
         "features", "gpipe", "overlap", "sanitizer", "soak")  # fmt: skip
#: Largest count of anything: steps, pixels, rounds.
MOST = 16
#: Functions of torch.cuda that need a driver, and what they return here.
ANSWERS: dict[str, Any] = {
    "synchronize": None, "empty_cache": None, "memory_allocated": 0, "memory_reserved": 0,
    "get_device_name": "NVIDIA H100 80GB HBM3", "_sleep": None,
}  # fmt: skip
#: Raised by parts that compare events with CUPTI's kernels, as the stand-in runs no kernels.
NO_KERNELS = "RuntimeError: CUPTI reported 0 kernels"


def slices(device: object, n: int, *, link: object = None) -> list[FakeGpu]:
    """Return stand-ins for slices; links are not imposed."""
    return [CountedGpu() for _ in range(n)]


def sample_allocator(
    cuda: FakeCuda,
    *arguments: Any,
    sample: Callable[..., allocator_memory.Allocated] = step_memory.sample_allocator,
) -> allocator_memory.Allocated:
    """Sample a stand-in for the allocator, on one GPU with all slices."""
    with FakeAllocator(cuda) as memory, pytest.MonkeyPatch.context() as patch:
        tasks_of = lambda tasks, devices: allocator_memory.sample_tasks(  # noqa: E731
            tasks, named_gpus(*[0] * len(devices)), memory.allocated, memory.active
        )
        patch.setattr(step_memory, "sample_tasks", tasks_of)
        return sample(*arguments)


class Bench(bench.Bench):  # type: ignore[misc, name-defined]
    """A GPU's, but for sizes and slices."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, dry=True)
        self.dry, self.kinds = False, (True, False)

    def pick(self, on_gpu: int, dry: int, brief: int | None = None) -> int:
        """Return the count of a GPU, within limits."""
        return min(on_gpu if brief is None else brief, MOST)

    def samples(self, n: int) -> int:
        """Return one."""
        return 1


class Report(report.Report):  # type: ignore[misc, name-defined]
    """A step's, with the parts that raised: targets missed while an exception is handled."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.raised: list[str] = []

    def check(self, is_met: bool, line: str) -> None:
        """Add a line of text, and note whether a part raised."""
        super().check(is_met, line)
        if sys.exception() is not None and NO_KERNELS not in line:
            self.raised.append(line)


def install(patch: pytest.MonkeyPatch) -> None:
    """Put stand-ins in the place of CUDA, slices, and checks that devices are GPUs."""
    for name in steps.STEPS:  # their annotations name torch's own classes
        if module := steps.step_called(name).module:
            importlib.import_module(module)
    cuda = FakeCuda()
    cuda.install(patch)
    patch.setattr(step_memory, "sample_allocator", partial(sample_allocator, cuda))
    for name, answer in ANSWERS.items():
        patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    patch.setattr(px, "slices", slices)
    for name in ("check_can_capture", "check_state"):
        patch.setattr(step_capture, name, lambda *_: None)


def run(name: str, folder: Path) -> str:
    """Run a step; return what it or its parts raised, empty for nothing or missed targets."""
    step, page = steps.step_called(name), Report(folder / f"{name}.txt")
    call = getattr(importlib.import_module(step.module), step.function)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(Bench(folder / name), page, *step.arguments)
    except Exception:
        return traceback.format_exc()
    return "\n".join(page.raised)


def main(names: Sequence[str]) -> int:
    """Run steps; return 1 if one raised."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        install(patch)
        errors = {name: run(name, Path(folder)) for name in names or STEPS}
    for name, error in errors.items():
        print(f"{name}: {error or 'ran'}")
    wrong = [name for name, error in errors.items() if error]
    print(f"{len(errors)} steps, {len(wrong)} raised {' '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
