"""Requirements of ``make gpu``, named before any time is spent; its options and its plan."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from ctypes import byref, c_int
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from gpu_modules import part
from places import ROOT

# Requirements


def _driver(changes: Mapping[Any, Any]) -> Any:
    """Return a stand-in for libcuda: an H100 with a driver of CUDA 13.0, but for what is given."""
    values = {"count": 1, "version": 13000, 16: 132, 75: 9, "init": 0, "green": True, **changes}

    def put(key: Any) -> Callable[..., int]:
        def call(to: Any, *_: Any) -> int:
            to._obj.value = values[key]
            return 0

        return call

    def attribute(to: Any, which: int, _: Any) -> int:
        return put(which)(to)

    library = SimpleNamespace(
        cuInit=lambda flags: values["init"], cuDeviceGetCount=put("count"),
        cuDriverGetVersion=put("version"), cuDeviceGet=lambda to, index: 0,
        cuDeviceGetName=lambda to, *_: setattr(to, "value", b"NVIDIA H100 80GB HBM3"),
        cuDeviceGetAttribute=attribute,
    )  # fmt: skip
    if values["green"]:
        library.cuGreenCtxCreate = None
    assert byref(c_int())._obj.value == 0  # what `put` relies on
    return library


@pytest.mark.parametrize(
    ("driver", "cuda", "message"),
    [
        ({}, "13.0", None),
        ({"version": 12080}, "12.8", None),
        ({"init": 100}, "13.0", "no GPU: the driver answers cuInit with error 100; make gpu DRY"),
        ({"count": 0}, "13.0", "no GPU: the driver counts 0.*make gpu DRY_RUN=1"),
        (
            {"version": 12080},
            "13.0",
            "too old: torch, built for CUDA 13.0, needs one of CUDA 13",
        ),
        ({"version": 12020}, "12.1", None),
        ({"green": False}, "13.0", None),
        ({16: 46}, "13.0", "validation-8 needs 8 slices of 8 SMs, .* has 46 SMs; .*ONLY="),
        ({}, None, "torch was built without CUDA"),
    ],
)
def test_a_gpu_that_does_not_do_is_named(
    gpu_script: ModuleType, driver: dict[Any, Any], cuda: str | None, message: str | None
) -> None:
    """In one line, before torch is loaded."""
    requirements = part("requirements")
    gpu = requirements.find_gpu(_driver(driver))
    problems = [gpu] if isinstance(gpu, str) else requirements.gpu_problems(
        gpu, ["validation-8"], cuda)  # fmt: skip
    assert len(problems) == (message is not None)
    if message is not None:
        assert re.search(message, problems[0])


@pytest.mark.parametrize(
    ("driver", "remarks"),
    [({}, 0), ({"green": False}, 1), ({"version": 12020}, 1)],
)
def test_a_driver_without_slices_is_remarked(
    gpu_script: ModuleType, driver: dict[Any, Any], remarks: int
) -> None:
    """Steps run all the same, on streams that share the GPU."""
    requirements = part("requirements")
    lines = requirements.gpu_remarks(requirements.find_gpu(_driver(driver)))
    assert len(lines) == remarks
    assert all("slices share multiprocessors" in line for line in lines)


def test_the_fewest_sms_of_a_slice_are_those_of_green_contexts(gpu_script: ModuleType) -> None:
    """They stand twice, as requirements are checked without loading torch."""
    from pipeexec.devices import green_contexts

    fewest = {major: counts[0] for major, counts in green_contexts._GRANULARITY.items()}
    assert fewest == part("requirements")._FEWEST
    assert green_contexts._SINCE_HOPPER[0] == 8


def test_two_slices_fit_where_eight_do_not(gpu_script: ModuleType) -> None:
    requirements = part("requirements")
    gpu = requirements.find_gpu(_driver({16: 46}))
    assert requirements.gpu_problems(gpu, ["validation-2"], "13.0") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "validation-3"], r"ONLY: step 'validation-3' does not exist; there are val"),
        (["--only", " , "], "ONLY names no step"),
        (["--dry-run", "--only", "tests"], "step 'tests' is not run on CPU workers"),
        (["--dry-run", "--pack", "/proc/packed"], "PACK=/proc/packed cannot be written: "),
        (["--dry-run", "--limit", "0"], "LIMIT must be a positive number of seconds, got 0"),
        (["--dry-run", "--limit", "nan"], "LIMIT must be a positive number"),
        (["--dry-run", "--wheels", "/nowhere"], "WHEELS=/nowhere holds no wheels"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    gpu_script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    options: list[str], message: str,
) -> None:  # fmt: skip
    """In one line; nothing is run, and nothing is written."""
    monkeypatch.setattr(
        gpu_script, "find_gpu", lambda: part("requirements").Gpu("", 132, 9, 13000, True)
    )
    monkeypatch.setattr(gpu_script, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(gpu_script, "OUT", Path("/proc/none" if "--dry-run" in options else "/tmp"))
    monkeypatch.setattr(gpu_script, "Runner", None)
    assert gpu_script.main(options) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.search(message, lines[0])


def test_packages_and_pythons_that_do_not_do_are_named(
    gpu_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements = part("requirements")
    (line,) = requirements.package_problems(["host"], ("numpy", "no_such_package"))
    assert "lacks no_such_package: " in line
    assert "WHEELS=wheels" in line
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    (line,) = requirements.package_problems(["host"], ("no_such_package",))
    assert re.search(r"Python 3.11 or newer is needed, .* is 3.9; give PYTHON=", line)


def test_packages_of_tests_are_needed_by_tests_alone(
    gpu_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements = part("requirements")
    monkeypatch.setattr(requirements, "TEST_PACKAGES", ("no_such_package",))
    assert requirements.package_problems(["host"]) == []
    assert len(requirements.package_problems(["host", "tests"])) == 1


@pytest.mark.slow
def test_a_wheel_that_cannot_be_installed_is_named(
    gpu_script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thing-1.0-py3-none-any.whl").write_text("no wheel")
    assert gpu_script.main(["--dry-run", "--wheels", str(tmp_path)]) == 2
    assert re.search(r"make gpu: WHEELS=.* cannot be installed: ", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("target", "option"), [("gpu", ""), ("gpu-first", "first"), ("gpu-second", "second")]
)
def test_options_of_make_are_those_of_its_command_line(target: str, option: str) -> None:
    """A machine may have variables of these names for other purposes."""
    names = dict.fromkeys(("OUT", "ONLY", "PACK", "LIMIT", "WHEELS"), "elsewhere")
    done = subprocess.run(
        ["make", "-n", target, "PACK=here"], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, **names},
    )  # fmt: skip
    assert '--pack "here"' in done.stdout
    assert "elsewhere" not in done.stdout
    assert (f"--call {option}" in done.stdout) == bool(option)


# The plan


def test_the_plan_of_the_docs_is_the_steps(gpu_script: ModuleType) -> None:
    """The two calls fit into their limits by their estimates."""
    steps = part("steps")
    text = (ROOT / "docs/how_to/validate_a_gpu_run.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) s \| (\d+) s \| (\d+) \|", text, re.MULTILINE)
    assert {name: tuple(map(float, row)) for name, *row in rows} == {
        name: (s.estimate, s.limit, s.worth) for name, s in (*steps._PREPARATION.items(),
                                                             *steps.STEPS.items())
    }  # fmt: skip
    for name, call in steps.CALLS.items():
        assert list(call.names) == steps.chosen(",".join(call.names), dry=False)
        seconds = sum(steps.step_called(n).estimate for n in (steps.WARM_UP, *call.names))
        assert seconds < 0.9 * call.limit
        assert f"| `gpu-{name}` | {call.limit:g} s | {seconds:g} s |" in text
    lines = re.findall(r"^python3 benchmarks/gpu.py .*$", text, re.MULTILINE)
    assert [line.split("--call ")[1].split()[0] for line in lines] == list(steps.CALLS)
    assert all(len(line) < 2000 and line.endswith('--pack "$OUT"') for line in lines)
    assert "the folder that comes back from the machine" in text  # what OUT is


def test_the_two_calls_fit_into_a_quarter_of_an_hour(gpu_script: ModuleType) -> None:
    """With a start of the machine each; a command loads and ends in five seconds."""
    text = " ".join((ROOT / "docs/how_to/validate_a_gpu_run.md").read_text().split())
    (seconds,) = re.findall(
        r"A start of (\d+) s, (\d+) s, a start of (\d+) s and (\d+) s of the second call are "
        r"900 s", text,
    )  # fmt: skip
    assert sum(map(int, seconds)) == 15 * 60
    calls = part("steps").CALLS
    for name, whole in (("first", seconds[1]), ("second", seconds[3])):
        assert calls[name].limit + 5 <= int(whole)


def test_the_second_call_repeats_what_the_first_left_out(
    gpu_script: ModuleType, tmp_path: Path
) -> None:
    """In the order of worth, behind its own steps; targets that were missed are results."""
    for step, status in (
        ("overlap", "cut"), ("host", "missed"), ("peers", "failed"), ("sanitizer", "not run"),
        ("memory", "passed"), ("soak", "failed"),
    ):  # fmt: skip
        part("outcomes").Outcome(step, status, 1.0, "").save(tmp_path)
    assert gpu_script.steps_of_call("second", tmp_path) == [
        "features", "peers", "overlap", "sanitizer",
    ]  # fmt: skip
    assert gpu_script.steps_of_call("first", tmp_path) == list(part("steps").CALLS["first"].names)
    assert gpu_script.steps_of_call("second", tmp_path / "none") == ["features"]


def test_steps_run_in_the_order_given(gpu_script: ModuleType) -> None:
    chosen = part("steps").chosen
    assert chosen("soak, host,soak", dry=True) == ["soak", "host"]


def test_the_step_of_tests_has_all_that_need_a_gpu(gpu_script: ModuleType) -> None:
    names = {Path(file).name for file in gpu_script.cuda_tests()}
    assert {"test_cuda.py", "test_pipeline.py", "test_offload.py"} <= names
    assert "test_races.py" not in names
