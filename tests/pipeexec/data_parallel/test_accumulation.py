"""Gradient accumulation: many backwards, one optimizer step, one all-reduce."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from small_pipelines import data, dense, mse
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pipeexec as px
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError, ExecutionError


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _run(
    accumulation: px.GradientAccumulation,
    parts: list[tuple[Tensor, Tensor]],
    *,
    weighted: bool = False,
) -> None:
    for inputs, targets in parts:
        with accumulation.microbatch(len(inputs) if weighted else None):
            accumulation.backward(mse(accumulation.model(inputs), targets))


def _whole(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """Return a copy of the model with the gradients of all parts as one batch."""
    model = copy.deepcopy(model)
    model.zero_grad()
    inputs, targets = (torch.cat(x) for x in zip(*parts, strict=True))
    mse(model(inputs), targets).backward()
    return model


def _assert_close(model: nn.Module, other: nn.Module) -> None:
    for actual, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad)
        torch.testing.assert_close(actual, wanted)


def _parts(*sizes: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = data(sum(sizes), seed=seed)
    return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


@pytest.mark.parametrize(
    ("sizes", "weighted"), [((4, 4, 4), False), ((4, 4, 4), True), ((5, 1, 3), True)]
)
def test_steps_as_with_the_whole_batch(sizes: tuple[int, ...], weighted: bool) -> None:
    model = dense(2)
    expected, optimizer = copy.deepcopy(model), _sgd(model)
    accumulation = px.GradientAccumulation(model, optimizer, n_steps=3)
    its = _sgd(expected)
    for step in range(3):
        parts = _parts(*sizes, seed=step)
        its.zero_grad()
        inputs, targets = (torch.cat(x) for x in zip(*parts, strict=True))
        mse(expected(inputs), targets).backward()
        its.step()
        _run(accumulation, parts, weighted=weighted)
        _assert_close(model, expected)
        assert accumulation.has_stepped


class _Recorder:
    """Notes, in order, what is called of a model and its optimizer."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self.events: list[str] = []
        self.ddp = ddp
        ddp.module.register_forward_hook(lambda *_: self._note("forward"))
        next(ddp.module.parameters()).register_hook(lambda _: self._note("backward"))
        ddp.register_comm_hook(None, lambda _, bucket: self._reduced(bucket))
        for name in ("zero_grad", "step"):
            setattr(optimizer, name, self._noted(name, getattr(optimizer, name)))

    def _note(self, event: str) -> None:
        self.events.append(
            f"{event} {'sync' if self.ddp.require_backward_grad_sync else 'no_sync'}"
        )

    def _noted(self, name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        def noted() -> Any:
            self.events.append(name)
            return call()

        return noted

    def _reduced(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.events.append("all_reduce")
        flat = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda x: x.value()[0])


def _replica(
    model: nn.Module, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.SGD, list[str]]:
    """Return DDP with one bucket, its optimizer, and the list of what is called."""
    ddp, optimizer = DistributedDataParallel(model, **options), _sgd(model)
    return ddp, optimizer, _Recorder(ddp, optimizer).events


def _published_case(_: Processes, n_steps: int) -> list[str]:
    ddp, optimizer, events = _replica(dense(2))
    _run(px.GradientAccumulation(ddp, optimizer, n_steps), _parts(*[2] * n_steps))
    return events


@pytest.mark.parametrize("n_steps", [1, 4])
def test_ddp_runs_the_published_steps(two_ranks: Ranks, n_steps: int) -> None:
    """As PyTorch's documentation of DDP's ``no_sync`` has it."""
    micro_step = ["forward no_sync", "backward no_sync"]
    last = ["forward sync", "backward sync", "all_reduce", "step"]
    for events in two_ranks.run(_published_case, n_steps=n_steps):
        assert events == ["zero_grad", *micro_step * (n_steps - 1), *last]


def _replicas_case(
    processes: Processes, sizes: list[list[int]], n_steps: int, weighted: bool
) -> None:
    """Train two replicas; a batch that is left over is flushed."""
    model = dense(2)
    expected = copy.deepcopy(model)
    ddp, optimizer, events = _replica(model)
    accumulation = px.GradientAccumulation(ddp, optimizer, n_steps)
    its = _sgd(expected)
    both = [_parts(*own, seed=rank) for rank, own in enumerate(sizes)]
    n = len(sizes[0])
    for first in range(0, n, n_steps):
        own = both[processes.rank][first : first + n_steps]
        _run(accumulation, own, weighted=weighted)
        assert accumulation.has_stepped == (len(own) == n_steps)
        assert accumulation.flush() == (len(own) < n_steps)
        assert accumulation.has_stepped or not accumulation.flush()
        its.zero_grad()
        parts = [part for of_rank in both for part in of_rank[first : first + n_steps]]
        inputs, targets = (torch.cat(x) for x in zip(*parts, strict=True))
        mse(expected(inputs), targets).backward()
        its.step()
        _assert_close(model, expected)
    n_batches = -(-n // n_steps)
    assert events.count("all_reduce") == events.count("step") == n_batches
    assert events.count("zero_grad") == n_batches


@pytest.mark.parametrize(
    ("sizes", "n_steps", "weighted"),
    [
        ([[2] * 8] * 2, 4, False),
        ([[2] * 6] * 2, 4, False),  # two are left
        ([[5, 1, 3, 2], [1, 2, 2, 7]], 2, True),
        ([[5, 1, 3], [1, 2, 2]], 2, True),
    ],
)
def test_replicas_step_as_with_the_whole_batch(
    two_ranks: Ranks, sizes: list[list[int]], n_steps: int, weighted: bool
) -> None:
    two_ranks.run(_replicas_case, sizes=sizes, n_steps=n_steps, weighted=weighted)


def test_schedulers_scalers_and_clipping() -> None:
    """A scheduler steps once a batch, and what clips sees gradients without their scale."""
    model, parts = dense(2), _parts(2, 2, 2, 2, 2, 2)
    plain = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for subject, options in ((plain, {}), (model, {"scaler": scaler})):
        optimizer = _sgd(subject)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        norms: list[Tensor] = []

        def clip(subject: nn.Module = subject, norms: list[Tensor] = norms) -> None:
            norms.append(nn.utils.clip_grad_norm_(subject.parameters(), 0.1))

        accumulation = px.GradientAccumulation(subject, optimizer, 4, before_step=clip, **options)
        for part in parts:
            _run(accumulation, [part])
            if accumulation.has_stepped:
                scheduler.step()
        accumulation.flush()
        assert len(norms) == 2
        assert scheduler.get_last_lr() == [0.05]
    _assert_close(model, plain)
    assert scaler.get_scale() == 2048.0


class _Failing(nn.Module):
    """Passes its input on; raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "forward":
            raise OSError("a flaky disk")
        x = x.clone()
        if self.place == "backward":
            x.register_hook(self._fail)
        return x

    def _fail(self, _: Tensor) -> None:
        raise OSError("a flaky disk")


def _failure_case(
    _: Processes | None,
    where: str,
    position: int,
    n_again: int,
    replicated: bool = True,
    sizes: Sequence[int] = (2, 2, 2),
) -> None:
    """Fail in a micro-batch ``at``; then ``n_again`` more make up a batch."""
    failing = _Failing()
    model: nn.Module = nn.Sequential(dense(2), failing)
    optimizer, events = _sgd(model), []
    if replicated:
        model, optimizer, events = _replica(model)
    parts, weighted = _parts(*sizes), len(set(sizes)) > 1
    before = copy.deepcopy(getattr(model, "module", model))
    accumulation = px.GradientAccumulation(model, optimizer, 3)
    _run(accumulation, parts[:position], weighted=weighted)
    failing.place = "" if where == "after" else where

    def fail() -> None:
        loss = mse(model(parts[position][0]), parts[position][1])
        if where != "loss":
            accumulation.backward(loss)
        raise OSError(f"a flaky {where}")

    n_samples = sizes[position] if weighted else None
    with pytest.raises(OSError, match="flaky"), accumulation.microbatch(n_samples):
        fail()
    failing.place = ""
    assert not accumulation.has_stepped
    assert accumulation.n_accumulated == 3 - n_again
    _run(accumulation, parts[3 - n_again :], weighted=weighted)
    assert accumulation.has_stepped
    for actual, wanted in zip(model.parameters(), _whole(before, parts).parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad)
    if replicated:
        assert events.count("step") == 1
        assert events.count("all_reduce") == 1 + (position == 2 and where == "after")


FAILURES = [("forward", 1, 2), ("loss", 2, 1), ("backward", 1, 3), ("backward", 2, 3),
            ("after", 2, 3)]  # fmt: skip


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 1, 2)])
@pytest.mark.parametrize(("where", "position", "n_again"), FAILURES)
def test_a_block_that_raises_leaves_things_usable(
    where: str, position: int, n_again: int, sizes: Sequence[int]
) -> None:
    """A micro-batch that raises before its backward is repeated; otherwise the batch is."""
    _failure_case(None, where, position, n_again, replicated=False, sizes=sizes)


@pytest.mark.parametrize(("where", "position", "n_again"), FAILURES)
def test_a_block_that_raises_in_replicas(
    two_ranks: Ranks, where: str, position: int, n_again: int
) -> None:
    two_ranks.run(_failure_case, where=where, position=position, n_again=n_again)


def test_wrong_use_is_refused() -> None:
    model, (part, *_) = dense(1), _parts(2, 2)
    optimizer = _sgd(model)
    with pytest.raises(ArgumentError, match=r"n_steps=4 does not divide n_batches=10: 2 would"):
        px.GradientAccumulation(model, optimizer, 4, n_batches=10)
    with pytest.raises(ArgumentError, match="n_steps must be at least 1"):
        px.GradientAccumulation(model, optimizer, 0)
    accumulation = px.GradientAccumulation(model, optimizer, 4, n_batches=8)
    loss = mse(model(part[0]), part[1])
    with pytest.raises(ExecutionError, match="outside a block"):
        accumulation.backward(loss)
    with pytest.raises(ExecutionError, match="has had no backward"), accumulation.microbatch():
        pass
    with pytest.raises(ExecutionError, match="called twice"), accumulation.microbatch():
        list(map(accumulation.backward, [loss, loss]))
    with pytest.raises(ExecutionError, match="nested"), accumulation.microbatch():
        _run(accumulation, [part])
    with pytest.raises(ExecutionError, match="within a block"), accumulation.microbatch():
        accumulation.flush()
    _run(accumulation, [part])
    with pytest.raises(ArgumentError, match="micro-batch 1 has n_samples=2"):
        _run(accumulation, [part], weighted=True)
    optimizer.zero_grad()
    with pytest.raises(ExecutionError, match="gradients of 1 micro-batches are gone"):
        _run(accumulation, [part])
    _run(accumulation, [part] * 4)  # a batch that begins anew
    assert accumulation.has_stepped
