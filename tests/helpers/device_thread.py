"""Backwards of GPipe whose layers are run by a thread of autograd's own, as those on a GPU are.

Run as a program, in a process of its own: it registers a device with torch, for all of the process.
Prints what each backward did, as JSON.

torch lets a device be written in Python. Nodes whose gradients are on such a device are run by the
engine's thread for it. The thread that called backward, and waits, meanwhile runs other nodes that
are ready: a stand-in for a GPU in this one respect.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import pipeexec as px
from pipeexec.devices.thread_settings import one_thread
from pipeexec.gpipe.backward_order import TaskIssuer
from pipeexec.gpipe.call import Call
from pipeexec.stages.stage import Stage


class OnDevice(Tensor):
    """A tensor that says it is on the device; its numbers are in ``raw``, on the host."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnDevice:
        tensor = torch._C._acc.create_empty_tensor(raw.shape, raw.dtype)
        tensor.__class__ = cls
        tensor.raw = raw
        return tensor  # type: ignore[no-any-return]


class _ToDevice(torch.autograd.Function):
    threads: set[str] = set()  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return OnDevice(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Tensor:
        _ToDevice.threads.add(threading.current_thread().name)
        time.sleep(1e-3)  # so that the thread that waits has the time to run another node
        return gradient.raw  # type: ignore[no-any-return]


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.raw.clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return OnDevice(gradient)


class Layer(nn.Module):
    """A linear layer that goes through the device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return _ToHost.apply(_ToDevice.apply(self.linear(x)))  # type: ignore[no-any-return]


class _Depth:
    """Counts how many B are being issued within each other, at most."""

    def __init__(self) -> None:
        self.now = self.deepest = 0

    @contextmanager
    def counted(self, calls: list[Call], node_seconds: float) -> Iterator[None]:
        """Count in a block, and note the calls whose backward begins there.

        Nodes that order tasks sleep for ``node_seconds``: if that is longer than the device takes,
        few of them run within a task.
        """
        inner, inner_begin = Stage.backward, Call.begin
        inner_issue = TaskIssuer.issue_or_queue

        def backward(stage: Stage, *arguments: Any) -> Any:
            self.now += 1
            self.deepest = max(self.deepest, self.now)
            try:
                return inner(stage, *arguments)
            finally:
                self.now -= 1

        def begin(call: Call, gradients: Any) -> bool:
            calls.append(call)
            return inner_begin(call, gradients)

        def issue_or_queue(issuer: TaskIssuer, tasks: Any) -> None:
            inner_issue(issuer, tasks)
            time.sleep(node_seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stage, "backward", backward)
            patch.setattr(TaskIssuer, "issue_or_queue", issue_or_queue)
            patch.setattr(Call, "begin", begin)
            yield


def _result(n_calls: int, x: Tensor, model: Any, chunks: int) -> Tensor:
    """Run a model on as many inputs; return the loss, micro-batch by micro-batch as GPipe does."""
    outputs = []
    for scale in range(1, n_calls + 1):
        inputs = x if n_calls == 1 else scale * x
        if isinstance(model, px.GPipe):
            outputs.append(model(inputs))
        else:
            outputs.append(torch.cat([model(part) for part in inputs.chunk(chunks)]))
    return torch.stack([output.square().sum() for output in outputs]).sum()


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    """Return the largest difference of two gradients, over the largest number in the second."""
    assert a is not None
    assert b is not None
    return float((a - b).abs().max() / b.abs().max())


def _one(
    chunks: int, n_calls: int, *, dependencies: bool, input_grad: bool, node_seconds: float = 0.0
) -> dict[str, Any]:
    """Run one backward through GPipe, and one through the module; say how they compare."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer() for _ in range(3)))
    model = px.GPipe(
        copy.deepcopy(plain), [1, 2], devices=["cpu"] * 2, chunks=chunks, threads=False,
        dependencies=dependencies, checkpoint="never",
    )  # fmt: skip
    x = torch.randn(chunks, 16)
    split_x, its = (x.clone().requires_grad_(input_grad) for _ in range(2))
    depth, calls = _Depth(), list[Call]()
    with depth.counted(calls, node_seconds):
        _result(n_calls, split_x, model, chunks).backward()
    with one_thread():
        _result(n_calls, its, plain, chunks).backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    if input_grad:
        pairs.append((split_x.grad, its.grad))
    return {
        "chunks": chunks,
        "calls": n_calls,
        "dependencies": dependencies,
        "input_grad": input_grad,
        "deepest": depth.deepest,
        "worst": max(_difference(a, b) for a, b in pairs),
        "orders": [[(j, i) for _, j, i in call.order] for call in calls],
    }


def main() -> None:
    """Print what each case did, then the threads that ran nodes of the device."""
    _setup_privateuseone_for_python_backend("pipeexec_test")
    flags = list(itertools.product([True, False], repeat=2))
    results = [_one(4, n_calls, dependencies=dependencies, input_grad=input_grad)
             for n_calls in (1, 2) for dependencies, input_grad in flags]  # fmt: skip
    results += [_one(4, 2, dependencies=dependencies, input_grad=True, node_seconds=3e-3)
                for dependencies in (True, False)]  # fmt: skip
    # The engine goes over to other threads at a depth of 60.
    results.append(_one(70, 1, dependencies=False, input_grad=False))
    json.dump({"found": results, "threads": sorted(_ToDevice.threads)}, sys.stdout)
    sys.stdout.flush()
    # Without the end of the interpreter: a thread of the engine that wants its lock then aborts the
    # process (pytorch/pytorch#38228).
    os._exit(0)


if __name__ == "__main__":
    main()
