"""Failures of `px.GPipe`: exceptions, threads, interrupts and wrong arguments."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from gpipe_models import CPUS, MODES, Stash, batch, check_same, dense, plain_step, sequential, step
from torch import Tensor, nn

import pipeexec as px
from pipeexec.gpipe.call import Call
from pipesim.errors import ArgumentError, ExecutionError, PipeError

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.usefixtures("one_torch_thread"),
]


class Fails(nn.Module):
    """Raises in the forward, or in the backward, as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.in_forward = self.in_backward = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward:
            self.in_forward -= 1
            raise ZeroDivisionError("forward")
        y = x * 1
        if self.in_backward and y.requires_grad:
            y.register_hook(self.hook)
        return y

    def hook(self, _: Tensor) -> None:
        if self.in_backward:
            self.in_backward -= 1
            raise ZeroDivisionError("backward")


@pytest.mark.parametrize("where", ["in_forward", "in_backward"])
@pytest.mark.parametrize("partition", [0, 1, 2])
@pytest.mark.parametrize("checkpoint", MODES)
def test_an_exception_reaches_the_caller_as_itself(
    where: str, partition: int, checkpoint: Any
) -> None:
    """And the module works afterwards."""
    layers = [nn.Sequential(nn.Linear(6, 6), Fails()) for _ in range(3)]
    plain = nn.Sequential(*layers)
    model = px.GPipe(copy.deepcopy(plain), [1, 1, 1], devices=CPUS, chunks=3, checkpoint=checkpoint)
    setattr(model[partition][1], where, 1)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError, match=where[3:]):
        step(model, batch())
    model.zero_grad()
    assert torch.equal(step(model, batch()), plain_step(plain, batch(), 3))
    check_same(model, plain)


@pytest.mark.parametrize("where", ["in_forward", "in_backward"])
def test_a_failure_leaves_nothing_behind(where: str) -> None:
    layers = [nn.Sequential(nn.Linear(6, 6), Fails()) for _ in range(2)]
    model = px.GPipe(nn.Sequential(*layers), [1, 1], devices=CPUS, chunks=3)
    setattr(model[1][1], where, 1)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError):
        step(model, batch())
    step(model, batch())
    gc.collect()
    assert model._runtime is not None
    assert not any(stage._activations or stage._inputs for stage in model._runtime.stages)


def test_random_numbers_that_begin_later_are_those_of_the_recompute() -> None:
    """A dropout that is raised from 0: gradients are those of the outputs that were seen."""
    for chunks in (1, 4):
        torch.manual_seed(0)
        dropout = nn.Dropout(0.0)
        norm = nn.BatchNorm1d(6)
        layers = nn.Sequential(nn.Linear(6, 6), norm, dropout, nn.Linear(6, 6, bias=False))
        model = px.GPipe(layers, [3, 1], devices=CPUS, chunks=chunks, checkpoint="always")
        for p in (0.0, 0.5, 0.5):
            dropout.p = p
            model.zero_grad()
            masks: list[Tensor] = []
            handle = dropout.register_forward_hook(lambda _, x, y, m=masks: m.append(y / x[0]))
            step(model, batch())
            handle.remove()
            assert len(masks) >= 2 * chunks
            forward, again = masks[-2 * chunks : -chunks], masks[-chunks:]
            for mask in again:
                assert any(torch.equal(mask, other) for other in forward)
        assert int(norm.num_batches_tracked) == 3 * chunks


def test_others_may_draw_meanwhile() -> None:
    """A forward is run again where a layer may have begun to draw, but once if none has."""
    counts: list[int] = []

    class Elsewhere(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(len(x))
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
            return x

    layers = nn.Sequential(nn.Linear(6, 6), Elsewhere())
    model = px.GPipe(layers, [1, 1], devices=CPUS, chunks=2)
    for forwards in (4, 2, 2):
        counts.clear()
        step(model, batch())
        assert len(counts) == forwards + 1  # and a recompute


def test_an_eval_at_first_says_nothing_of_training() -> None:
    model = px.GPipe(
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5, inplace=True), nn.Linear(6, 6)),
        [1, 2], devices=CPUS, chunks=2,
    )  # fmt: skip
    model.eval()
    model(batch())
    model.train()
    step(model, batch())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_two_forwards_in_different_threads() -> None:
    """One in worker threads, one in the caller's, and one backward through both."""
    for _ in range(10):
        plain = sequential("batch norm")
        model = px.GPipe(copy.deepcopy(plain), [2, 2], devices=CPUS, chunks=4, checkpoint="always")
        buffers = [id(buffer) for buffer in model.buffers()]
        model.threads = False
        first = model(batch())
        model.threads = True
        (first + model(batch(16)[8:])).square().mean().backward()
        assert [id(buffer) for buffer in model.buffers()] == buffers
        other = torch.cat([plain(x) for x in batch().chunk(4)])
        (other + torch.cat([plain(x) for x in batch(16)[8:].chunk(4)])).square().mean().backward()
        check_same(model, plain)


def test_two_threads_may_use_one_module() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=4)
    results: dict[int, list[Tensor]] = {0: [], 1: []}

    def work(number: int) -> None:
        for _ in range(20):
            x = batch(8 + 4 * number, requires_grad=True)
            model(x).square().sum().backward()
            assert x.grad is not None
            results[number].append(x.grad)

    threads = [threading.Thread(target=work, args=(number,)) for number in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, gradients in results.items():
        assert len(gradients) == 20
        y = batch(8 + 4 * number, requires_grad=True)
        sequential("dense")(y).square().sum().backward()
        for gradient in gradients:
            torch.testing.assert_close(gradient, y.grad)


def test_a_failed_forward_leaves_no_statistics() -> None:
    """Of deferred batch norms: the next mini-batch is counted alone."""
    fails = Fails()
    layers = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), fails)
    model = px.GPipe(layers, [1, 2], devices=CPUS, chunks=4, deferred_batch_norm=True)
    fails.in_forward = 1
    with pytest.raises(ZeroDivisionError):
        model(batch() + 100)
    model(batch())
    assert float(model[0].running_mean.abs().max()) < 1


def test_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the caller waits for the devices."""
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=4, threads=True)
    rejoin = Call._rejoin

    def interrupted(call: Call) -> None:
        rejoin(call)
        raise KeyboardInterrupt

    monkeypatch.setattr(Call, "_rejoin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    monkeypatch.undo()
    assert model._runtime is not None
    assert not any(stage._activations or stage._inputs for stage in model._runtime.stages)
    step(model, batch())


def test_what_failed_was_not_measured() -> None:
    fails = Fails()
    model = px.GPipe(nn.Sequential(nn.Linear(6, 6), fails), [1, 1], devices=CPUS, chunks=2)
    fails.in_backward = 1
    with pytest.raises(ZeroDivisionError):
        step(model, batch())
    with pytest.raises(ExecutionError, match="the last forward or backward failed"):
        model.timeline()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("checkpoint", "sometimes", "unknown checkpoint 'sometimes'"), ("chunks", 0, "chunks must")],
)
def test_attributes_are_checked_when_they_are_used(name: str, value: Any, message: str) -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=2)
    setattr(model, name, value)
    with pytest.raises(PipeError, match=message):
        model(batch())


def test_a_second_backward_without_retain_graph() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=2)
    loss = model(batch()).sum()
    loss.backward()
    with pytest.raises(ExecutionError, match="give the first one retain_graph=True"):
        loss.backward()
    step(model, batch())


SHARED = nn.Linear(6, 6)
WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (nn.Linear(6, 6), {}, TypeError, "module must be nn.Sequential to be partitioned, got Linear"),
    (dense(2), {"balance": None}, ValueError, "balance is required.*balance_by_time"),
    (dense(2), {"balance": [1]}, ValueError, r"\(module: 2, sum of balance: 1\).*balance_by_time"),
    (dense(2), {"balance": [2, 0]}, ValueError, r"positive integer \(balance: \[2, 0\]\)"),
    (dense(2), {"balance": [3, -1]}, ValueError, "all balance numbers must be positive integer"),
    (dense(2), {"balance": [1.0, 1.0]}, ValueError, "all balance numbers must be positive integer"),
    (dense(2), {"devices": ["cpu"]}, IndexError, r"too few devices .*devices: 1, partitions: 2"),
    (dense(2), {"devices": ["abacus"] * 2}, ValueError, "'abacus' is no device"),
    (dense(2), {"chunks": 0}, ValueError, "chunks must be"),
    (dense(2), {"chunks": -1}, ValueError, "chunks must be"),
    (dense(2), {"chunks": 1.5}, ValueError, "chunks must be"),
    (dense(2), {"chunks": "many"}, ValueError, "chunks must be"),
    (dense(2), {"chunks": float("inf")}, ValueError, "chunks must be"),
    (
        dense(2),
        {"checkpoint": "sometimes"},
        ValueError,
        "checkpoint is not one of 'always', 'except_last', or 'never'",
    ),
    ([SHARED, SHARED], {}, ValueError, "duplicate children is not supported"),
    ([nn.Sequential(SHARED), nn.Sequential(SHARED)], {}, ValueError, "duplicate parameters in dis"),
    ([Stash(), nn.Tanh()], {}, TypeError, "no module declared 'skip' as poppable but stashed"),
]


@pytest.mark.parametrize(("layers", "options", "kind", "message"), WRONG)
def test_mistakes(
    layers: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    module = nn.Sequential(*layers) if isinstance(layers, list) else layers
    arguments = {"balance": [1, 1], "devices": CPUS, **options}
    with pytest.raises(PipeError, match=f"(?s){message}") as caught:
        px.GPipe(module, arguments.pop("balance"), **arguments)
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([torch.zeros(2, 6)], "expected Tensor, but got list"),
        ((torch.zeros(2, 6), 1), "expected Tensor, but got int"),
        ((), "expected Tensor, but got an empty tuple"),
        ("x", "expected Tensor, but got str"),
    ],
)
def test_wrong_inputs(inputs: Any, message: str) -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS)
    with pytest.raises(TypeError, match=message):
        model(inputs)


def test_inputs_of_several_lengths() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=4)
    with pytest.raises(ArgumentError, match=r"have shapes \[\(8, 6\), \(2, 6\)\]; give"):
        model((batch(8), batch(2)))


def test_a_partition_that_returns_no_tensor() -> None:
    class Text(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return "text"

    model = px.GPipe(nn.Sequential(nn.Linear(6, 6), Text()), [1, 1], devices=CPUS)
    with pytest.raises(TypeError, match=r"must return a tensor .* expected Tensor, but got str"):
        model(batch())


def test_it_stays_where_it_is() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS)
    for move in (
        lambda: model.cuda(),
        lambda: model.cpu(),
        lambda: model.to("cpu"),
        lambda: model.to(0),
        lambda: model.to(torch.device("cpu")),
        lambda: model.to(torch.zeros(1)),
        lambda: model.to(device="cpu"),
    ):
        with pytest.raises(TypeError, match="denied to move parameters and buffers"):
            move()
    assert model.to(torch.double)[0][0].weight.dtype == torch.double  # type: ignore[index]
    assert model.float()(batch()).dtype == torch.float


def test_nothing_to_show_yet() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS)
    with pytest.raises(ExecutionError, match="nothing was measured yet"):
        model.timeline()
    model(batch())
    with pytest.raises(ExecutionError, match="nothing was measured yet"):
        model.timeline()
