"""Clocks, power and reasons of throttling of the GPU while a step runs, as ``nvidia-smi`` says."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time

#: End of the name of a step's file.
SUFFIX = ".clocks.csv"
#: What is asked for, and the columns of the file behind ``time``.
_QUERY = {
    "clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "watts",
    "temperature.gpu": "celsius", "clocks_event_reasons.active": "reasons",
    "memory.used": "used_mib",
}  # fmt: skip
_COMMAND = ("nvidia-smi", "--id=0", f"--query-gpu={','.join(_QUERY)}",
            "--format=csv,noheader,nounits", "--loop-ms=500")  # fmt: skip
#: Seconds that ``nvidia-smi`` has to end, once it is asked and once it is killed, and its reader.
_END = 1.0
#: Reasons that are no throttling: none, and an idle GPU.
_AT_EASE = {0, 1}


@contextmanager
def sampled_clocks(file: Path, command: Sequence[str] = _COMMAND) -> Iterator[None]:
    """Write a row twice a second to ``file`` during a block; no file where there is no command."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        yield
        return
    reader = threading.Thread(target=_write, args=(process, file), daemon=True)
    reader.start()
    try:
        yield
    finally:
        for stop in (process.terminate, process.kill):
            stop()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END)
                break
        reader.join(_END)


def _write(process: subprocess.Popen[str], file: Path) -> None:
    assert process.stdout is not None
    with file.open("w") as rows:
        rows.write(",".join(["time", *_QUERY.values()]) + "\n")
        for line in process.stdout:
            rows.write(f"{time():.3f},{line.replace(', ', ',').strip()}\n")
            rows.flush()


def clocks_between(file: Path, began: float, ended: float) -> dict[str, str]:
    """Return median clock and power, and whether the GPU throttled, between two times (s).

    Empty if nothing was sampled then.
    """
    import pandas as pd

    if not file.is_file():
        return {}
    table = pd.read_csv(file, dtype={"reasons": str}, on_bad_lines="skip")
    table = table[pd.to_numeric(table["time"], errors="coerce").between(began, ended)]
    values = table[["sm_mhz", "watts"]].apply(pd.to_numeric, errors="coerce").dropna()
    if values.empty:
        return {}
    reasons = {int(text, 16) for text in table["reasons"].dropna() if text.startswith("0x")}
    return {
        "SM MHz": f"{values['sm_mhz'].median():.0f}",
        "W": f"{values['watts'].median():.0f}",
        "throttled": " ".join(f"{x:#x}" for x in sorted(reasons - _AT_EASE)) or "no",
    }
