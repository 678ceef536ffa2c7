"""Timers in the logs of Megatron-LM and DeepSpeed, as a table.

A timer is a sum over the calls of a step, so that logs tell what operations cost, and not when
tasks ran. Formats:

- NVIDIA/Megatron-LM, megatron/core/timers.py and ``training_log`` in megatron/training/training.py,
  which divides by the steps of ``--log-interval``; before 2023 one line ``time (ms) | ...``, as in
  bigscience-workshop/bigscience, experiments/gpt2-meg;
- deepspeedai/DeepSpeed, deepspeed/utils/timer.py and deepspeed/runtime/pipe/engine.py, which logs
  every ``steps_per_print`` steps what has added up since.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pipesim.errors import TimelineError
from pipesim.trace.range_names import WORDS, word_key
from pipesim.utils.files import check_path, read_text

if TYPE_CHECKING:
    import pandas as pd


#: Beginning of timers in a log.
TIMERS = re.compile(r"times? across ranks \(ms\):|\btime \(ms\) \| ")
_MEGATRON_STEP = re.compile(r"\biteration\s*=?\s*([0-9]+)\s*/")
_DEEPSPEED_STEP = re.compile(r"\bsteps: ([0-9]+) loss: ")
_TIME = r"([0-9]+(?:\.[0-9]+)?)"
#: Times of Megatron-LM's --timing-log-option minmax, max and all, which names the timer first.
_MIN_MAX = re.compile(rf"([\w/-]+) \.+: \({_TIME}, {_TIME}\)")
_MAX = re.compile(rf"([\w/-]+) \.+: {_TIME}\s*$")
_NAME = re.compile(r"([\w/-]+):\s*$")
_RANK = re.compile(rf"\brank +([0-9]+): {_TIME}\s*$")
#: One line with all timers of a rank.
_LINE = re.compile(r"(?:\[Rank ([0-9]+)\] |rank=([0-9]+) )?time \(ms\) \|(.*)")
_PART = re.compile(rf"([\w/-]+): {_TIME}")
#: Operations of timers that have other names than `WORDS`; DeepSpeed's sums of others have none.
_OPS = {
    **dict.fromkeys(("fwd", "bwd", "step"), ""),
    "all-grads-sync": "REDUCE_GRAD",
    "fwd_microstep": "F",
    "bwd_inner_microstep": "B",
    "pipe_send_output": "SEND_F",
    "pipe_recv_input": "RECV_F",
    "pipe_send_grad": "SEND_B",
    "pipe_recv_grad": "RECV_B",
    "step_microstep": "STEP",
}
_COLUMNS = ("step", "n_steps", "timer", "op", "rank", "min", "max")


def read_timers(path: Path | str) -> pd.DataFrame:
    """Read the timers in a log of Megatron-LM or DeepSpeed.

    Megatron-LM logs forwards and backwards with ``--timing-log-level 2``, DeepSpeed with
    ``wall_clock_breakdown``. There is no timeline in such a log: a timer is a sum over the
    micro-batches, and chunks, of a step.

    Parameters
    ----------
    path
        Text file.

    Returns
    -------
    pandas.DataFrame
        One row a timer and step, or a timer, step and rank:

        - ``step``: number of the step that was logged;
        - ``n_steps``: number of steps that the times are a sum of. 1 for Megatron-LM, which logs
          means. For DeepSpeed the steps since the previous log, or since step 0;
        - ``timer``: its name in the log;
        - ``op``: name of the `pipesim.Op` that it times, or empty;
        - ``rank``: rank of the times, or -1 where the log does not name it;
        - ``min``, ``max``: seconds of the fastest and the slowest rank; the same for one rank, and
          ``min`` is NaN with ``--timing-log-option max``.

        Timers of receives include waiting.

    Raises
    ------
    TimelineError
        For a file that cannot be read or has no timers of steps.

    Examples
    --------
    Divide by the number of micro-batches for the costs of one:

    >>> import pathlib, tempfile
    >>> import pipesim as ps
    >>> log = '''iteration 10/ 100 | elapsed time per iteration (ms): 95.0 |
    ... (min, max) time across ranks (ms):
    ...     forward-compute ................................: (16.00, 20.00)
    ...     backward-compute ...............................: (32.00, 40.00)
    ... '''
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "run.log"
    ...     _ = path.write_text(log)
    ...     timers = ps.trace.read_timers(path)
    >>> seconds = timers.groupby("op")["max"].mean() / 8  # micro-batches
    >>> ps.Costs(forward=seconds["F"], backward=seconds["B"])
    <Costs of any number of stages: F 2.50 ms, B 5.00 ms>
    """
    from pipesim.utils.packages import pandas as pd

    path = check_path("path", path)
    rows = _rows(read_text(path, "timers from", TimelineError))
    if not rows:
        raise TimelineError(
            f"{path} has no timers of steps; log them with --timing-log-level 2 (Megatron-LM) or "
            "wall_clock_breakdown (DeepSpeed)"
        )
    table = pd.DataFrame(rows, columns=list(_COLUMNS))
    table[["min", "max"]] *= 1e-3
    return table


def _rows(text: str) -> list[tuple[object, ...]]:
    """Return the rows of the table, times in ms."""
    rows: list[tuple[object, ...]] = []
    early: list[tuple[object, ...]] = []  # DeepSpeed's timers before the number of their step
    step, steps, timer = -1, 0, ""
    for line in text.splitlines():
        if number := _DEEPSPEED_STEP.search(line):
            step, steps = int(number[1]), int(number[1]) - max(step, 0)
            rows += [(step, steps, *times) for times in early]
            early.clear()
        elif number := _MEGATRON_STEP.search(line):
            step, steps = int(number[1]), 1
        times, timer = _times(line, timer)
        for name, *values in times:
            op = WORDS.get(word_key(name, WORDS))
            row = name, _OPS.get(name, "" if op is None else op.name), *values
            if name.startswith(("batch_input", "fwd", "bwd", "step")):
                early.append(row)
            elif step >= 0:
                rows.append((step, steps, *row))
    return rows


def _times(line: str, timer: str) -> tuple[list[tuple[str, int, float, float]], str]:
    """Return timers of a line, with rank, minimum and maximum (ms); and the timer of ranks below.

    ``timer`` is the timer of the lines of ranks.
    """
    if match := _LINE.search(line):
        rank = int(match[1] or match[2] or -1)
        parts = _PART.findall(match[3])
        return [(name, rank, float(time), float(time)) for name, time in parts], ""
    if match := _MIN_MAX.search(line):
        return [(match[1], -1, float(match[2]), float(match[3]))], ""
    if match := _MAX.search(line):
        return [(match[1], -1, math.nan, float(match[2]))], ""
    if timer and (match := _RANK.search(line)):
        return [(timer, int(match[1]), float(match[2]), float(match[2]))], timer
    return [], match[1] if (match := _NAME.search(line)) else ""
