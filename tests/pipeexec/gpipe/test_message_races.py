"""Messages of one result in several threads, which run at the same time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeexec.gpipe import partition_tasks
from pipeexec.gpipe.call_plan import Message
from pipeexec.gpipe.partition_tasks import CallTensors


def test_a_send_between_two_looks_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of the output leaves while that of the skip looks at the same result."""
    monkeypatch.setattr(partition_tasks.transfer, "send", lambda values, *_: values)
    key: Any = (None, "early")
    output, skip = torch.ones(1), torch.zeros(2)

    class Interrupted(frozenset[Any]):
        """Skips: another thread interrupts the look whether the first slot is one of them."""

        def __contains__(self, slot: object) -> bool:
            if 0 in tensors._results[0]:
                tensors.send(sends["output"])
            return super().__contains__(slot)

    def task(number: int, stage: int) -> Any:
        index = SimpleNamespace(index=stage)
        return SimpleNamespace(id=number, source=0, stage=index, device=None, stream=None)

    sends = {"output": task(1, 0), "skip": task(2, 0)}
    tensors: Any = object.__new__(CallTensors)
    tensors.skip_bytes, tensors._results = {}, {0: {0: output, key: skip}}
    messages = {1: Message(task(3, 1), None), 2: Message(task(4, 2), Interrupted([key]))}
    tensors.plan = SimpleNamespace(messages=messages, graph=SimpleNamespace(rendezvous=False))
    tensors.send(sends["skip"])
    assert tensors._results == {0: {}, 1: {0: output}, 2: {key: skip}}
