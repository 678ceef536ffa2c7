"""``make gpu-rehearsal``: how its checks are run, and what they find in the sources."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import rehearsal
from rehearsal import ROOT, cuda_tests, run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "passed", "text"),
    [
        ("print('first'); print('fine')", True, "fine"),
        ("print('FAILED test_x.py'); print('1 failed'); raise SystemExit(1)", False,
         "1 failed; FAILED test_x.py"),
        ("raise SystemExit(2)", False, "exit status 2"),
        ("import time; time.sleep(60)", False, "took more than 1 s"),
        (f"print('{ROOT}/pipeexec/x.py:1: DeprecationWarning: old'); print('fine')", False,
         "1 warnings by our files, the first: "),
        (f"print('{ROOT}/.venv-rehearsal/x.py:1: DeprecationWarning: old'); print('fine')", True,
         "fine"),
    ],
)  # fmt: skip
def test_a_check_passes_or_fails(tmp_path: Path, code: str, passed: bool, text: str) -> None:
    """And its output is kept."""
    seconds = 1 if "sleep" in code else 30
    result = run("check", [sys.executable, "-c", code], seconds, tmp_path)
    assert result[0] == passed
    assert result[1].startswith(text)
    assert (tmp_path / "check.log").is_file()


def test_a_check_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {name: ([sys.executable, "-c", f"raise SystemExit({code})"], 20.0)
                for name, code in (("bad", 1), ("good", 0))}  # fmt: skip
    monkeypatch.setattr(rehearsal, "OUT", tmp_path)
    monkeypatch.setattr(rehearsal, "ROOT", tmp_path.parent)
    monkeypatch.setattr(rehearsal, "commands", lambda: commands)
    assert rehearsal.main([]) == 1
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split()[:2] for line in log] == [["bad", "FAILED"], ["good", "ok"]]
    assert log == capsys.readouterr().out.splitlines()[:2]
    del commands["bad"]
    assert rehearsal.main([]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_script")  # which also forgets the modules of the steps
def test_the_stand_in_finds_what_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function and class that the steps run without a GPU."""
    from steps_on_stand_in import install

    install(monkeypatch)


def test_what_the_checks_cover() -> None:
    """The files that mention CUDA, whatever they are called."""
    names = {Path(path).name for path in cuda_tests()}
    assert names >= {
        "test_cuda.py", "test_cuda_streams.py", "test_emulated_links.py", "test_slices.py",
        "test_races.py", "test_gpu_kernels.py", "test_gpu_peers.py", "test_nested_backward.py",
    }  # fmt: skip
    assert not names & {"test_costs.py", "test_real_images.py"}  # the latter needs scikit-learn


@pytest.mark.slow
def test_checks_find_the_helpers(tmp_path: Path) -> None:
    """Each check is a process, which finds helpers by the paths that it is given."""
    code = "from importlib.util import find_spec; import places; assert find_spec('fake_cuda')"
    assert run("steps", [sys.executable, "-c", code], 60, tmp_path) == (True, "exit status 0")
