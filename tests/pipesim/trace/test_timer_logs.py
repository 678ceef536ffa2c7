"""Timers in logs, made by hand in the formats of Megatron-LM and DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipesim as ps
from pipesim.errors import TimelineError

SETUP = """(min, max) time across ranks (ms):
    load-checkpoint ................................: (4.00, 5.00)
"""
ITERATION = (
    " iteration       {}/     100 | consumed samples: 8 | elapsed time per iteration (ms): 9.0 |\n"
)
MIN_MAX = f"""{SETUP}{ITERATION.format(10)}(min, max) time across ranks (ms):
    forward-compute ................................: (16.00, 20.00)
    forward-backward-send-forward-backward-recv ....: (1.00, 2.50)
    optimizer ......................................: (3.00, 4.00)
{ITERATION.format(20)}(min, max) time across ranks (ms):
    forward-compute ................................: (17.00, 21.00)
"""
MAX = f"""{ITERATION.format(10)}max time across ranks (ms):
    backward-compute ...............................: 40.00
"""
ALL = f"""{ITERATION.format(10)}times across ranks (ms):
  forward-compute:
     rank  0: 16.00
     rank 12: 20.00
  backward-recv:
     rank  0: 1.00
done:
"""
LINE = f"""{ITERATION.format(2)}3: time (ms) | forward-compute: 50.50 | backward-compute: 80.00
"""
#: Logged every 5 steps, what has added up since.
DEEPSPEED = """[Rank 0] time (ms) | batch_input: 1.00 | fwd_microstep: 10.00 | bwd_microstep: 30.00
[Rank 0] time (ms) | fwd: 10.00 | bwd: 30.00
steps: 5 loss: 1.2345 iter time (s): 0.100 samples/sec: 80.0
[Rank 0] time (ms) | pipe_send_output: 2.00
[Rank 0] time (ms) | batch_input: 1.00 | fwd_microstep: 15.00
steps: 10 loss: 1.2345 iter time (s): 0.100 samples/sec: 80.0
[Rank 0] time (ms) | pipe_send_output: 3.00
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            MIN_MAX,
            [
                (10, 1, "forward-compute", "F", -1, 0.016, 0.02),
                (10, 1, "forward-backward-send-forward-backward-recv", "", -1, 0.001, 0.0025),
                (10, 1, "optimizer", "STEP", -1, 0.003, 0.004),
                (20, 1, "forward-compute", "F", -1, 0.017, 0.021),
            ],
        ),
        (MAX, [(10, 1, "backward-compute", "B", -1, None, 0.04)]),
        (
            ALL,
            [
                (10, 1, "forward-compute", "F", 0, 0.016, 0.016),
                (10, 1, "forward-compute", "F", 12, 0.02, 0.02),
                (10, 1, "backward-recv", "RECV_B", 0, 0.001, 0.001),
            ],
        ),
        (
            LINE,
            [
                (2, 1, "forward-compute", "F", -1, 0.0505, 0.0505),
                (2, 1, "backward-compute", "B", -1, 0.08, 0.08),
            ],
        ),
        (
            DEEPSPEED,
            [
                (5, 5, "batch_input", "", 0, 0.001, 0.001),
                (5, 5, "fwd_microstep", "F", 0, 0.01, 0.01),
                (5, 5, "bwd_microstep", "", 0, 0.03, 0.03),
                (5, 5, "fwd", "", 0, 0.01, 0.01),
                (5, 5, "bwd", "", 0, 0.03, 0.03),
                (5, 5, "pipe_send_output", "SEND_F", 0, 0.002, 0.002),
                (10, 5, "batch_input", "", 0, 0.001, 0.001),
                (10, 5, "fwd_microstep", "F", 0, 0.015, 0.015),
                (10, 5, "pipe_send_output", "SEND_F", 0, 0.003, 0.003),
            ],
        ),
    ],
    ids=["minmax", "max", "all", "one line", "DeepSpeed"],
)
def test_formats(tmp_path: Path, log: str, expected: list[tuple[object, ...]]) -> None:
    """Timers of the setup, before the first step, are left out."""
    path = tmp_path / "run.log"
    path.write_text(log)
    table = ps.trace.read_timers(path)
    rows = table.astype(object).where(table.notna(), None).itertuples(index=False, name=None)
    for row, wanted in zip(rows, expected, strict=True):
        assert row[:5] == wanted[:5]
        assert row[5:] == pytest.approx(wanted[5:])


def test_log_without_steps(tmp_path: Path) -> None:
    """The error names the options that log timers."""
    path = tmp_path / "run.log"
    path.write_text(SETUP)
    with pytest.raises(TimelineError, match="--timing-log-level 2"):
        ps.trace.read_timers(path)
