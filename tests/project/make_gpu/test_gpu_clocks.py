"""Clocks of the GPU while a step of ``make gpu`` runs, with a stand-in for ``nvidia-smi``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import monotonic, sleep, time

import pytest
from gpu_modules import part

pytestmark = pytest.mark.usefixtures("gpu_script")

#: Takes the options that are given to it, and answers as a driver of an H100 does.
NVIDIA_SMI = """#!{python}
import os, sys, time
options = dict(text.split("=", 1) for text in sys.argv[1:])
assert options.pop("--id") == "0"
assert options.pop("--format") == "csv,noheader,nounits"
milliseconds = int(options.pop("--loop-ms"))
answers = {{
    "clocks.sm": ["345", "1980", "1980"], "clocks.mem": ["2619"],
    "power.draw": ["80.12", "[N/A]", "312.40"], "temperature.gpu": ["50"],
    "clocks_event_reasons.active": [
        "0x0000000000000001", "0x0000000000000000", "0x0000000000000004",
    ],
    "memory.used": ["1234"],
}}
names = options.pop("--query-gpu").split(",")
assert not options
for name in names:
    if name not in answers:
        print(f'Field "{{name}}" is not a valid field to query.')
        sys.exit(2)
open({pid!r}, "w").write(str(os.getpid()))
for number in range(10_000):
    print(", ".join(answers[x][min(number, len(answers[x]) - 1)] for x in names), flush=True)
    time.sleep(milliseconds / 10_000)
"""


def lines_of(file: Path, least: int) -> list[str]:
    """Wait until a file has some lines; return them."""
    end, lines = monotonic() + 30, list[str]()
    while len(lines) < least and monotonic() < end:
        sleep(0.02)
        lines = file.read_text().splitlines() if file.is_file() else []
    return lines


def test_clocks_are_sampled_during_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each answer, with its time; the command ends with the block."""
    command, pid = tmp_path / "nvidia-smi", tmp_path / "pid"
    command.write_text(NVIDIA_SMI.format(python=sys.executable, pid=str(pid)))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    clocks, began = tmp_path / "host.clocks.csv", time()
    with part("clocks").sampled_clocks(clocks):
        title, *rows = lines_of(clocks, least=6)
    assert title == "time,sm_mhz,memory_mhz,watts,celsius,reasons,used_mib"
    assert [row.partition(",")[2] for row in rows[:3]] == [
        "345,2619,80.12,50,0x0000000000000001,1234",
        "1980,2619,[N/A],50,0x0000000000000000,1234",
        "1980,2619,312.40,50,0x0000000000000004,1234",
    ]
    assert all(began - 0.01 <= float(row.partition(",")[0]) <= time() + 0.01 for row in rows)
    assert part("clocks").clocks_between(clocks, began - 1, time() + 1) == {
        "SM MHz": "1980", "W": "312", "throttled": "0x4"
    }  # fmt: skip
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_no_clocks_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block runs all the same."""
    monkeypatch.setenv("PATH", str(tmp_path))
    clocks = tmp_path / "host.clocks.csv"
    with part("clocks").sampled_clocks(clocks):
        assert not clocks.is_file()
    assert part("clocks").clocks_between(clocks, 0.0, time()) == {}
