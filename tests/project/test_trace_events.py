"""Bad values of every key of every kind of event in a trace: refused by name, or ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from case_choice import EVERY_CASE

import pipesim as ps
from pipeexec.data_parallel import sync_report
from pipesim.errors import PipeError

_NODE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
_BASE = {"pid": 1, "tid": 1, "cat": "user_annotation"}
#: One event of each kind that a reader knows, and what it needs around it.
EVENTS: list[dict[str, Any]] = [
    {**_BASE, "ph": "B", "name": "PP:0F0", "ts": 0, "args": {}},
    {**_BASE, "ph": "E", "name": "PP:0F0", "ts": 10},
    {**_BASE, "ph": "b", "name": "PP:0B0", "ts": 20, "id": "7"},
    {**_BASE, "ph": "e", "name": "PP:0B0", "ts": 30, "id": "7"},
    {**_BASE, "ph": "X", "name": "DistributedDataParallel.forward", "ts": 0, "dur": 9},
    {**_BASE, "ph": "X", "name": _NODE, "cat": "cpu_op", "ts": 20, "dur": 9},
    {**_BASE, "ph": "X", "name": "torch::autograd::AccumulateGrad", "cat": "cpu_op", "ts": 21,
     "dur": 1},
    {**_BASE, "ph": "X", "name": "c10d::allreduce_", "cat": "cpu_op", "ts": 23, "dur": 5,
     "args": {"External id": 4}},
    {**_BASE, "ph": "X", "name": "record_param_comms", "cat": "cpu_op", "ts": 24, "dur": 3,
     "args": {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float"}},
    {**_BASE, "ph": "X", "name": "hipLaunchKernel", "cat": "hip_runtime", "ts": 25, "dur": 1,
     "args": {"correlation": 5, "External id": 4}},
    {**_BASE, "ph": "X", "name": "ncclDevKernel_Generic", "cat": "kernel", "pid": 0, "ts": 40,
     "dur": 9, "args": {"correlation": 5, "External id": 4}},
    {**_BASE, "ph": "X", "name": "nccl:all_reduce", "cat": "gpu_user_annotation", "pid": 0,
     "ts": 40, "dur": 9, "args": {"External id": 4}},
]  # fmt: skip
BAD: list[Any] = [
    None, True, "x", "", -1, 1e400, float("nan"), 10**400, [], [1], {}, {"a": [1]}, 0.5,
]  # fmt: skip
READERS: dict[str, Callable[[Path], object]] = {
    "from_chrome": ps.Timeline.from_chrome,
    "sync_report": lambda path: str(sync_report(path)),
}


def _changed() -> Iterator[list[Any]]:
    """Yield traces of which one key, or one event, has a bad value."""
    for index, event in enumerate(EVENTS):
        for bad in BAD:
            yield [*EVENTS[:index], bad, *EVENTS[index + 1 :]]
            for key in event:
                yield [*EVENTS[:index], {**event, key: bad}, *EVENTS[index + 1 :]]
            for key in event.get("args", {}):
                args = {**event["args"], key: bad}
                yield [*EVENTS[:index], {**event, "args": args}, *EVENTS[index + 1 :]]
        for key in event:
            rest = {name: value for name, value in event.items() if name != key}
            yield [*EVENTS[:index], rest, *EVENTS[index + 1 :]]
        yield [*EVENTS[:index], *EVENTS[index + 1 :]]


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")
def test_bad_events(reader: str, tmp_path: Path) -> None:
    """Every trace is read, or refused with its path and in fewer than 1,000 characters."""
    path = tmp_path / "trace.json"
    wrong, n_read, n_refused = [], 0, 0
    # Every third: keys are no multiple of three, so that each value meets other keys.
    for events in [EVENTS, *islice(_changed(), 0, None, 1 if EVERY_CASE else 3)]:
        path.write_text(json.dumps({"traceEvents": events}))
        try:
            READERS[reader](path)
            n_read += 1
        except PipeError as error:
            n_refused += 1
            if len(str(error)) > 1000:
                wrong.append(str(error))
        except Exception as error:
            different = [x for x in events if x not in EVENTS]
            wrong.append(f"{type(error).__name__}: {error} of {different!r:.300}")
    assert not wrong, f"{len(wrong)} traces:\n" + "\n".join(wrong[:20])
    assert min(n_read, n_refused) > 50
