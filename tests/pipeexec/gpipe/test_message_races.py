"""Messages of one result in several threads, which run at the same time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeexec.gpipe import partition_tasks
from pipeexec.gpipe.partition import Route
from pipeexec.gpipe.partition_tasks import PartitionTasks
from pipesim.ops import Op


def test_a_send_between_two_looks_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of the output leaves while that of the skip looks at the same result."""
    monkeypatch.setattr(partition_tasks.transfer, "send", lambda values, *_: values)
    tasks: Any = object.__new__(PartitionTasks)
    tasks.runtime = SimpleNamespace(devices=[None] * 3)
    tasks.nbytes, tasks.skip_bytes, tasks._in_flight = {}, {}, {}
    key: Any = (None, "early")
    output, skip = torch.ones(1), torch.zeros(2)
    tasks._results = {(Op.F, 0, 0): {0: output, key: skip}}

    def streams(route: Any) -> Any:
        return SimpleNamespace(op=Op.F, route=route, send_stream=None)

    class Interrupted(Route):
        """A route whose look at the first slot another thread interrupts."""

        def carries(self, slot: Any) -> bool:
            if 0 in tasks._results[Op.F, 0, 0]:
                tasks.send(0, streams(Route(0, 1)), "output")
            return super().carries(slot)

    tasks.send(0, streams(Interrupted(0, 2, (key,))), "skip")
    assert tasks._in_flight == {"output": ((0,), (output,)), "skip": ((key,), (skip,))}
