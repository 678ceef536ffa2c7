"""Every process ends with the exit status of its own script, whatever has failed before.

The whole table runs with FAULTS in the environment, as in `make chaos`.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from case_choice import EVERY_CASE
from endings import CORE, TABLE, Ending, run_ending, wrong_with
from ranks import run_to_end

from pipeexec import process_end

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ending", TABLE if EVERY_CASE else CORE, ids=str)
def test_every_process_ends_with_its_own_status(ending: Ending, tmp_path: Path) -> None:
    """None aborts, hangs, or leaves a process or a file."""
    statuses, output, left = run_ending(ending, tmp_path, fresh=False)
    wrong = wrong_with(ending, statuses, output, left)
    assert not wrong, f"{ending}: {wrong}\n{output}"


STUCK = """
import threading, time, traceback
from forked import finalize
from pipeexec import process_end
process_end._BUSY_SECONDS = 0.1
def main():
    for stop in (None, lambda: None):
        thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
        if stop: process_end.end_thread_with_process(thread, stop)
        thread.start()
    print("ended")
    return 0
finalize(main, traceback.print_exc)
"""


def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path: Path) -> None:
    """A stage may hang for ever."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    assert run_to_end([[str(script)]], tmp_path) == ([0], ["ended\n"])


def test_threads_are_asked_to_end_then_connections_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections stay whole if all threads end at once."""
    for name in ("_THREADS", "_CONNECTIONS"):
        monkeypatch.setattr(process_end, name, type(getattr(process_end, name))())
    calls, stopped, broken = [], threading.Event(), threading.Event()

    class Connections:
        def break_connections(self) -> None:
            calls.append("broken")
            broken.set()

    connections = Connections()
    process_end.end_connections_with_process(connections)
    idle = threading.Thread(target=stopped.wait, daemon=True)
    idle.start()
    process_end.end_thread_with_process(idle, stopped.set)
    monkeypatch.setattr(process_end, "_IDLE_SECONDS", 100.0)
    process_end.end_threads()
    assert not idle.is_alive()
    assert calls == []
    waiting = threading.Thread(target=broken.wait, daemon=True)
    waiting.start()
    process_end.end_thread_with_process(waiting, lambda: None)
    monkeypatch.setattr(process_end, "_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(process_end, "_BUSY_SECONDS", 100.0)
    process_end.end_threads()
    assert not waiting.is_alive()
    assert calls == ["broken"]
