"""Requirements of ``make gpu``, checked before any time is spent and without loading torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from on_gpu.steps import step_called

#: Packages that pipesim, pipeexec and the steps import, and those of the step ``tests`` alone.
PACKAGES = (
    "torch", "numpy", "pandas", "matplotlib", "numba", "joblib", "cloudpickle", "simpy", "tqdm",
)  # fmt: skip
TEST_PACKAGES = ("pytest", "hypothesis")
_PYTHON = (3, 11)
#: Version of the driver interface that has green contexts, as `cuDriverGetVersion` counts.
_GREEN_CONTEXTS = 12040
_SM_COUNT, _MAJOR = 16, 75  # CUdevice_attribute
#: Fewest multiprocessors of a slice; see `pipeexec.devices.green_contexts.part_size`.
_FEWEST = {6: 1, 7: 2, 8: 4}
_DRY = "make gpu DRY_RUN=1 runs the steps tiny on CPU workers"


class Gpu(NamedTuple):
    """The first GPU, as the driver describes it; ``driver`` counts as `cuDriverGetVersion`."""

    name: str
    n_sms: int
    major: int
    driver: int
    has_green_contexts: bool

    def __str__(self) -> str:
        return f"{self.name}, {self.n_sms} SMs, driver of CUDA {_version(self.driver)}"


def find_gpu(library: Any = None) -> Gpu | str:
    """Return the first GPU, or a line that says why there is none.

    ``library`` stands for ``libcuda.so.1``.
    """
    if library is None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return f"no GPU: the driver cannot be loaded ({error}); {_DRY}"
    failed = library.cuInit(0)
    if failed:
        return f"no GPU: the driver answers cuInit with error {failed}; {_DRY}"
    count, device, version = (ctypes.c_int() for _ in range(3))
    library.cuDeviceGetCount(ctypes.byref(count))
    if count.value < 1:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f" with CUDA_VISIBLE_DEVICES={hidden!r}"
        return f"no GPU: the driver counts 0{why}; {_DRY}"
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGet(ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(100)
    library.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in (_SM_COUNT, _MAJOR):
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    green = hasattr(library, "cuGreenCtxCreate")
    return Gpu(
        name.value.decode(errors="replace"), capability[0], capability[1], version.value, green
    )


def gpu_problems(gpu: Gpu, names: Iterable[str], cuda: str | None) -> list[str]:
    """Return a line for each requirement that a GPU does not meet.

    ``names`` are the steps to run, ``cuda`` the version of CUDA for which torch was built.
    """
    problems = []
    if cuda is None:
        problems.append("torch was built without CUDA; give a PYTHON whose torch has it")
    elif gpu.driver < (needed := int(cuda.split(".")[0]) * 1000):
        problems.append(f"the driver is too old: torch, built for CUDA {cuda}, needs one of CUDA "
                        f"{_version(needed)}, it is of {_version(gpu.driver)}")  # fmt: skip
    fewest = _FEWEST.get(gpu.major, 8)
    for name in names:
        n = step_called(name).n_slices
        if n * fewest > gpu.n_sms:
            problems.append(f"{name} needs {n} slices of {fewest} SMs, {gpu.name} has {gpu.n_sms} "
                            "SMs; choose other steps with ONLY=")  # fmt: skip
    return problems


def gpu_remarks(gpu: Gpu) -> list[str]:
    """Return a line if slices of a GPU are no slices; steps then run all the same."""
    if gpu.has_green_contexts and gpu.driver >= _GREEN_CONTEXTS:
        return []
    return [f"no green contexts in this driver (of CUDA {_version(gpu.driver)}, needed is "
            f"{_version(_GREEN_CONTEXTS)}): slices share multiprocessors, and slow each other "
            "down"]  # fmt: skip


def package_problems(names: Iterable[str], packages: Iterable[str] = PACKAGES) -> list[str]:
    """Return a line for each requirement that this Python does not meet; ``names`` are steps."""
    if sys.version_info[:2] < _PYTHON:
        wanted, version = (".".join(map(str, v)) for v in (_PYTHON, sys.version_info[:2]))
        return [f"Python {wanted} or newer is needed, {sys.executable} is {version}; give PYTHON="]
    needed = (*packages, *(TEST_PACKAGES if "tests" in names else ()))
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if not lacking:
        return []
    words = " ".join(lacking)
    return [f"{sys.executable} lacks {words}: where there is a network, python3 -m pip download "
            f"--no-deps -d wheels {words}; then give WHEELS=wheels"]  # fmt: skip


def torch_cuda() -> str | None:
    """Return the version of CUDA for which torch was built, read from its files."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def path_problems(
    folders: Sequence[tuple[str, Path | None]], limit: float | None, wheels: Path | None
) -> list[str]:
    """Return a line for each folder that cannot be written, and for what else is wrong.

    ``folders`` have the names of their options.
    """
    problems = []
    for name, folder in folders:
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            problems.append(f"{name}={folder} cannot be written: {error.strerror or error}")
    if limit is not None and not 0 < limit < float("inf"):
        problems.append(f"LIMIT must be a positive number of seconds, got {limit:g}")
    if wheels is not None and not any(wheels.glob("*.whl")):
        problems.append(f"WHEELS={wheels} holds no wheels (*.whl)")
    return problems


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
