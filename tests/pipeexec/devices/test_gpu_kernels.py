"""The kernels that are shipped as PTX: that they assemble, and are called as they are declared."""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeexec.devices import gpu_kernels
from pipeexec.devices.gpu_kernels import PTX, GpuKernels, load_kernels


class Loaded:
    """Stands in for the driver: lists what is launched, by name."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[int, ...], list[Any]]] = []

    def load(self, ptx: str, names: list[str]) -> dict[str, Any]:
        """Return what launches each kernel; the signature is torch's."""

        def kernel(name: str) -> Any:
            def launch(grid: tuple[int, ...] = (1, 1, 1), args: list[Any] | None = None) -> None:
                self.launched.append((name, grid, args or []))

            return launch

        return {name: kernel(name) for name in names}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    """Load kernels by the stand-in."""
    fake = Loaded()
    monkeypatch.setattr("torch.cuda._utils._cuda_load_module", fake.load)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())  # any context
    load_kernels.cache_clear()
    yield fake
    load_kernels.cache_clear()


def _declared() -> dict[str, list[tuple[str, str]]]:
    """Return the type and name of each parameter in the PTX, by kernel."""
    entries = re.findall(r"\.visible \.entry (\w+)\(([^)]*)\)", PTX)
    return {name: re.findall(r"\.param \.(\w+) (\w+)", text) for name, text in entries}


def test_kernels_are_called_as_they_are_declared(loaded: Loaded) -> None:
    """A pointer is 64 bits, a Python int is passed as one of C: 32 bits."""
    kernels = load_kernels(torch.device("cpu"))
    time, sm_ids = torch.zeros(1, dtype=torch.int64), torch.zeros(7, dtype=torch.int32)
    kernels.write_time(time)
    kernels.wait(time, 2_000_003)
    kernels.locate(sm_ids, 5)
    declared = _declared()
    assert list(declared) == [name for name, _, _ in loaded.launched]
    for name, _, args in loaded.launched:
        kinds = ["u64" if isinstance(x, Tensor) else "s32" for x in args]
        assert kinds == [kind for kind, _ in declared[name]]
    assert loaded.launched[1][2] == [time, 2_000, 3]
    assert [name for _, name in declared["pipeexec_wait"]] == ["at", "microseconds", "nanoseconds"]
    assert loaded.launched[2][1:] == ((7, 1, 1), [sm_ids, 5])
    assert len(kernels) == len(GpuKernels._fields) == len(declared)


def test_a_long_wait_is_an_int_of_c(loaded: Loaded) -> None:
    """Longer ones than half an hour end after that."""
    load_kernels(torch.device("cpu")).wait(torch.zeros(1), 10**15)
    assert loaded.launched[0][2][1:] == [2**31 - 1, 0]


def test_kernels_are_loaded_once_a_gpu(loaded: Loaded) -> None:
    assert load_kernels(torch.device("cpu")) is load_kernels(torch.device("cpu"))


def _assembler() -> str:
    """Return ptxas: CUDA's, or the one inside Triton."""
    path = shutil.which("ptxas")
    triton = importlib.util.find_spec("triton")
    if path is None and triton is not None and triton.origin is not None:
        own = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
        path = str(own) if own.is_file() else None
    if path is None:
        pytest.skip("needs ptxas, of CUDA's tools or inside Triton")
    return path


def _assembled(ptx: str, folder: Path, arch: str = "sm_90") -> dict[str, bytes]:
    """Return the machine code of each kernel."""
    (folder / "kernels.ptx").write_text(ptx)
    command = [_assembler(), f"-arch={arch}", "kernels.ptx", "-o", "kernels.cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return _code((folder / "kernels.cubin").read_bytes())


def _code(elf: bytes) -> dict[str, bytes]:
    """Return the sections of an ELF file that begin with ``.text.``, by the rest of their names."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    sections = {}
    for name, _, _, _, offset, n_bytes in headers:
        text = elf[headers[names][4] + name :].split(b"\0", 1)[0].decode()
        if text.startswith(".text."):
            sections[text.removeprefix(".text.")] = elf[offset : offset + n_bytes]
    return sections


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_100"])
def test_the_kernels_assemble(arch: str, tmp_path: Path) -> None:
    """For GPUs from Ampere on, as the driver does it."""
    assert set(_assembled(PTX, tmp_path, arch)) == set(_declared())


def test_the_kernels_are_those_of_their_source(tmp_path: Path) -> None:
    """The CUDA in the module's docstring, compiled, is the same machine code."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    source = (gpu_kernels.__doc__ or "").partition(".. code-block:: cuda")[2]
    (tmp_path / "source.cu").write_text(textwrap.dedent(source))
    command = [nvcc, "-ptx", "-arch=compute_80", "source.cu", "-o", "source.ptx"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert _assembled((tmp_path / "source.ptx").read_text(), tmp_path) == _assembled(PTX, tmp_path)
