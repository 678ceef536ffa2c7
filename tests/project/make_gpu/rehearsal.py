"""``make gpu``, rehearsed without a GPU: under torch built for CUDA and the Python of GPU machines.

Each check is a process with a time limit. It gets a line in ``results/gpu-rehearsal/log.txt``; its
output is in ``NAME.log`` beside that. A check that fails stops no other. The exit status is 1 if
one failed.

    versions    every module of pipesim and pipeexec is imported, without deprecation warnings
    syntax      every Python file compiles without a warning
    calls       every use of torch and of the CUDA driver is one that they have
    kernels     the kernels of pipeexec are assembled for H100 and for B200
    tests       the tests of the CUDA paths that need no GPU
    steps       the steps of ``make gpu`` as they run on a GPU, on the stand-in for CUDA
    gpu_first   ``make gpu-first DRY_RUN=1``
    gpu_second  ``make gpu-second DRY_RUN=1``
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from places import HELPERS, ROOT

OUT = ROOT / "results" / "gpu-rehearsal"
PACKAGES = ("pipesim", "pipeexec")
#: What the images of GPU machines lack, as wheels, for ``make gpu WHEELS=``.
WHEELS = Path(sys.prefix) / "wheels"
#: H100 and H200; B200.
ARCHITECTURES = ("90", "100")
#: Files with tests of the CUDA paths mention one of these.
_CUDA_PATHS = re.compile(
    r"\b(fake_cuda|torch\.cuda|torch_calls|device_thread|allocator_memory|cuda_graph"
    r"|pipeexec\.(devices|gpipe|torch_pipelining))\b"
)
#: Files whose pictures come from scikit-learn, which the images of GPU machines lack.
_PICTURES = re.compile(r"^from images import", re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+(\w+)")
#: Warnings by files of this project.
_OUR_WARNING = re.compile(rf"{re.escape(str(ROOT))}/(?!\.)\S+: \w*(Deprecation|Future)Warning")


class Failed(Exception):
    """A check failed."""


def versions() -> str:
    """Import all modules; deprecated calls by them are errors."""
    import torch

    if torch.version.cuda is None:
        raise Failed(f"torch {torch.__version__} is not built for CUDA")
    for kind in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("error", category=kind, module=r"(pipesim|pipeexec)\b")
    names, lacking = [name for package in PACKAGES for name in _modules(package)], []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # of an extra, which images lack
            if str(error.name).startswith(PACKAGES):
                raise
            lacking.append(f"{name} (needs {error.name})")
    packages = ("torch", "numpy", "pandas", "matplotlib", "numba", "pytest", "cuda-bindings")
    listing = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{len(names) - len(lacking)} modules, without {', '.join(lacking) or 'exception'}; Python "
        f"{platform.python_version()}, CUDA {torch.version.cuda}, {listing}"
    )


def _modules(package: str) -> Iterator[str]:
    yield package
    for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
        if not module.name.endswith("__main__"):
            yield module.name


def syntax() -> str:
    """Compile all files; warnings are errors."""
    folders = (*PACKAGES, "benchmarks", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in files:
            compile(path.read_text(), str(path), "exec")
    return f"{len(files)} files"


def kernels() -> str:
    """Assemble all kernels to machine code, as the driver would."""
    import triton

    from pipeexec.devices.gpu_kernels import PTX

    folder = Path(inspect.getfile(triton)).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernels.ptx"
        source.write_text(PTX)
        for architecture in ARCHITECTURES:
            assembler = folder / ("ptxas" if int(architecture) < 100 else "ptxas-blackwell")
            done = subprocess.run(
                [assembler, f"-arch=sm_{architecture}", source, "-o", Path(scratch) / "kernels"],
                check=False, capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode:
                raise Failed(f"for sm_{architecture}: {done.stderr}")
    names = ", ".join(_ENTRY.findall(PTX))
    return f"{names} for {', '.join(f'sm_{number}' for number in ARCHITECTURES)}"


def cuda_tests() -> list[str]:
    """Return the files with tests of the CUDA paths, apart from those of pictures."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    return [
        str(path)
        for path, text in texts.items()
        if _CUDA_PATHS.search(text) and not _PICTURES.search(text)
    ]


def pytest_command(*files: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb", "short", *files]


def step_command(name: str) -> list[str]:
    return [sys.executable, str(Path(__file__)), name]


#: Run in a process of their own each, named on the command line.
STEPS: dict[str, Callable[[], str]] = {"versions": versions, "syntax": syntax, "kernels": kernels}


def commands() -> dict[str, tuple[list[str], float]]:
    """Return the command of each check, and the seconds that it may take."""
    return {
        "versions": (step_command("versions"), 300),
        "syntax": (step_command("syntax"), 120),
        "calls": (pytest_command("tests/project/make_gpu/test_torch_calls.py"), 300),
        "kernels": (step_command("kernels"), 300),
        "tests": (pytest_command(*cuda_tests()), 1800),
        "steps": ([sys.executable, "tests/project/make_gpu/steps_on_stand_in.py"], 900),
        **{f"gpu_{call}": (gpu_call(call), 900) for call in ("first", "second")},
    }


def gpu_call(call: str) -> list[str]:
    """Return a call of ``make gpu-first`` or ``make gpu-second`` on CPU workers."""
    python = f"PYTHON={sys.executable}"
    return ["make", f"gpu-{call}", "DRY_RUN=1", "LIMIT=850", python, f"WHEELS={WHEELS}"]


def environment(name: str) -> dict[str, str]:
    """Return the environment of a check: no GPU, and the paths of packages, helpers and wheels.

    ``make gpu-first`` gets no paths: it finds packages itself, and takes wheels by an option.
    """
    path = [] if name.startswith("gpu_") else [ROOT, HELPERS, *WHEELS.glob("*.whl")]
    return {
        **{key: text for key, text in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL")},
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONWARNINGS": "default::DeprecationWarning,default::FutureWarning",
        "MPLBACKEND": "Agg",
    }


def run(name: str, command: Sequence[str], seconds: float, out: Path) -> tuple[bool, str]:
    """Run a check; return whether it passed, and its last line or what went wrong."""
    log = out / f"{name}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, cwd=ROOT,
                env=environment(name), check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, f"took more than {seconds:.0f} s"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    warnings = [line for line in lines if _OUR_WARNING.search(line)]
    if warnings:
        return False, f"{len(warnings)} warnings by our files, the first: {warnings[0].strip()}"
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    result = [*lines[-1:], *failed[:3]] if lines else [f"exit status {code}"]
    return code == 0, "; ".join(line.strip() for line in result)


def run_step(name: str) -> int:
    """Run a step in this process; return its exit status."""
    try:
        print(STEPS[name]())
    except Failed as failed:
        print(failed)
        return 1
    return 0


def main(argv: Sequence[str]) -> int:
    """Run all checks, or one step in this process."""
    if argv:
        return run_step(*argv)
    OUT.mkdir(parents=True, exist_ok=True)
    passed = True
    with (OUT / "log.txt").open("w") as file:
        for name, (command, seconds) in commands().items():
            start = perf_counter()
            good, text = run(name, command, seconds, OUT)
            passed &= good
            took = f"{perf_counter() - start:6.1f} s"
            line = f"{name:<10} {'ok' if good else 'FAILED':<7} {took}  {text}"
            print(line, flush=True)
            print(line, file=file, flush=True)
    print(f"the logs are in {OUT.relative_to(ROOT)}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
