"""`px.GPipe`: a sequential module in partitions is the module itself, only faster."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from case_choice import covering
from gpipe_models import (
    CASES,
    CPUS,
    MODES,
    Pair,
    batch,
    check_same,
    dense,
    plain_step,
    sequential,
    step,
)
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.usefixtures("one_torch_thread"),
]


# Transparency


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "balance", "checkpoint", "requires_grad"),
    covering((*case, mode, grad) for case in CASES for mode in MODES for grad in (True, False)),
)
def test_outputs_and_gradients_are_those_of_the_module(
    name: str, balance: list[int], checkpoint: Any, requires_grad: bool
) -> None:
    """Twice, so that what was learnt of a stage in the first step holds in the second."""
    plain = sequential(name)
    model = px.GPipe(copy.deepcopy(plain), balance, devices=CPUS, chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        x, y = batch(requires_grad=requires_grad), batch(requires_grad=requires_grad)
        assert torch.equal(step(model, x), plain_step(plain, y, 3))
        check_same(model, plain)
        assert (x.grad is None) == (y.grad is None)
        if x.grad is not None and y.grad is not None:
            torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "balance", "switch"),
    covering((*case, switch) for case in CASES
             for switch in ("dependencies", "copy_streams", "portals")),
)  # fmt: skip
def test_mechanisms_change_nothing_but_time(name: str, balance: list[int], switch: str) -> None:
    plain = sequential(name)
    options: dict[str, Any] = {switch: False}
    model = px.GPipe(copy.deepcopy(plain), balance, devices=CPUS, chunks=4, **options)
    x, y = batch(requires_grad=True), batch(requires_grad=True)
    assert torch.equal(step(model, x), plain_step(plain, y, 4))
    check_same(model, plain)
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
@pytest.mark.parametrize("chunks", [1, 2, 4, 10])
def test_any_number_of_samples_and_chunks(n: int, chunks: int) -> None:
    plain = sequential("dense")
    model = px.GPipe(copy.deepcopy(plain), [2, 2], devices=CPUS, chunks=chunks)
    assert torch.equal(step(model, batch(n)), plain_step(plain, batch(n), chunks))
    check_same(model, plain)


@pytest.mark.parametrize("checkpoint", MODES)
def test_without_gradients(checkpoint: Any) -> None:
    plain = sequential("batch norm")
    model = px.GPipe(copy.deepcopy(plain), [2, 2], devices=CPUS, chunks=2, checkpoint=checkpoint)
    with torch.no_grad():
        output = model(batch())
        assert torch.equal(output, torch.cat([plain(x) for x in batch().chunk(2)]))
    assert not output.requires_grad
    model.eval()
    plain.eval()
    assert torch.equal(model(batch()), torch.cat([plain(x) for x in batch().chunk(2)]))
    assert torch.equal(step(model, batch()), plain_step(plain, batch(), 2))
    check_same(model, plain)


def test_what_is_frozen_gets_no_gradient() -> None:
    """The first partition; and all of it: the output then needs none."""
    plain = sequential("dense")
    plain[:2].requires_grad_(False)
    model = px.GPipe(copy.deepcopy(plain), [2, 2], devices=CPUS, chunks=2)
    step(model, batch())
    plain_step(plain, batch(), 2)
    check_same(model, plain)
    model.requires_grad_(False)
    assert not model(batch()).requires_grad


@pytest.mark.parametrize("checkpoint", MODES)
def test_dropout_of_one_micro_batch_is_that_of_the_module(checkpoint: Any) -> None:
    """And leaves the random state behind where the module does."""
    plain = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5))
    model = px.GPipe(copy.deepcopy(plain), [2, 2], devices=CPUS, checkpoint=checkpoint)
    outputs, states = [], []
    for module in (plain, model):
        torch.manual_seed(3)
        outputs += [step(module, batch()) for _ in range(2)][-1:]
        states.append(torch.get_rng_state())
    assert torch.equal(*outputs)
    assert torch.equal(*states)
    check_same(model, plain)


def test_dropout_does_not_depend_on_the_mode() -> None:
    """A recompute repeats the numbers of its forward; each step draws others, in every mode."""
    plain = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5))
    models = [
        px.GPipe(copy.deepcopy(plain), [2, 2], devices=CPUS, chunks=4, checkpoint=mode)
        for mode in ("always", "except_last", "never", "never")
    ]
    for number, model in enumerate(models):
        torch.manual_seed(3)
        first, second = step(model, batch()), step(model, batch())
        assert not torch.equal(first, second)
        if number:
            check_same(model, models[0])


def test_random_state_is_left_alone_where_nothing_is_drawn() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=4)
    before = torch.get_rng_state()
    step(model, batch())
    assert torch.equal(torch.get_rng_state(), before)


def test_settings_of_the_caller_hold_in_every_partition() -> None:
    plain = sequential("dense")
    model = px.GPipe(copy.deepcopy(plain), [1, 3], devices=CPUS, chunks=2, checkpoint="always")
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = model(batch()), torch.cat([plain(x) for x in batch().chunk(2)])
    assert output.dtype == expected.dtype == torch.bfloat16
    output.float().square().mean().backward()
    expected.float().square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-3)
    with torch.inference_mode():
        assert model(batch()).is_inference()


def test_deferred_batch_norm_has_the_statistics_of_the_mini_batch() -> None:
    """Also where it does not divide evenly, with recomputed micro-batches."""
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    model = px.GPipe(
        copy.deepcopy(plain), [2, 1], devices=CPUS, chunks=4, checkpoint="always",
        deferred_batch_norm=True,
    )  # fmt: skip
    for n in (8, 11):
        step(model, batch(n))
        plain(batch(n))
    norm = model[1]
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(norm, name), getattr(plain[1], name))


def test_modules_can_tell_that_they_are_recomputed() -> None:
    states: list[tuple[bool, bool]] = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            states.append((px.is_checkpointing(), px.is_recomputing()))
            return x * 1

    model = px.GPipe(nn.Sequential(nn.Linear(6, 6), Asks()), [2], devices=CPUS, chunks=2)
    step(model, batch())
    assert states == [(True, False), (False, False), (False, True)]
    states.clear()
    step(model.eval(), batch())
    assert states == [(False, False)] * 2


def test_two_forwards_before_a_backward() -> None:
    plain = sequential("dense")
    model = px.GPipe(copy.deepcopy(plain), [1, 3], devices=CPUS, chunks=2)
    (model(batch()).sum() + model(batch(6)).square().sum()).backward()
    (plain(batch()).sum() + plain(batch(6)).square().sum()).backward()
    check_same(model, plain)


def test_part_of_an_output() -> None:
    """A loss of some samples, and of one of several outputs."""
    plain = nn.Sequential(nn.Linear(6, 6), Pair())
    model = px.GPipe(copy.deepcopy(plain), [1, 1], devices=CPUS, chunks=4)
    for module in (plain, model):
        module(batch())[2][:3].sum().backward()
    check_same(model, plain)


@pytest.mark.slow
def test_a_forward_without_backward_is_forgotten() -> None:
    for checkpoint in MODES:
        model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=2, checkpoint=checkpoint)
        output = model(batch())
        assert model._runtime is not None
        stages = model._runtime.stages
        assert any(stage._activations or stage._inputs for stage in stages)
        del output
        gc.collect()
        assert not any(stage._activations or stage._inputs for stage in stages)
        step(model, batch())
        assert not any(stage._activations or stage._inputs for stage in stages)


def test_training_goes_as_without() -> None:
    plain = sequential("batch norm")
    model = px.GPipe(copy.deepcopy(plain), [1, 3], devices=CPUS, chunks=2)
    for module, run in ((plain, lambda m, x: plain_step(m, x, 2)), (model, step)):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        for n in (8, 6, 8):
            optimizer.zero_grad()
            run(module, batch(n))
            optimizer.step()
    check_same(model, plain)


def test_threads_live_as_long_as_the_module() -> None:
    before = set(threading.enumerate())
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=2)
    step(model, batch())
    workers = set(threading.enumerate()) - before
    assert len(workers) == 2
    step(model, batch())
    assert workers == set(threading.enumerate()) - before
    del model
    gc.collect()
    for thread in workers:
        thread.join(10.0)
        assert not thread.is_alive()


# As a container


def test_short_forwards_run_in_the_thread_of_the_caller() -> None:
    """From the second on, when it is known how long they take; long ones in their own."""

    class Where(nn.Module):
        """Notes its threads."""

        def __init__(self) -> None:
            super().__init__()
            self.threads: list[threading.Thread] = []

        def forward(self, x: Tensor) -> Tensor:
            self.threads.append(threading.current_thread())
            return x

    def in_caller(worth: float, **options: Any) -> list[bool]:
        layers = nn.Sequential(Where(), Where())
        model = px.GPipe(layers, [1, 1], chunks=2, **{"devices": CPUS, **options})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pipeexec.gpipe.gpipe.MIN_THREADED_SECONDS", worth)
            for _ in range(2):
                model(batch())
        return [thread is threading.current_thread() for thread in layers[0].threads]

    assert in_caller(0.0) == [False] * 4
    assert in_caller(float("inf")) == [False] * 2 + [True] * 2
    assert in_caller(float("inf"), threads=True) == [False] * 4
    assert in_caller(0.0, threads=False) == [True] * 4
    linked = px.workers(2, link=ps.Network(latency=1e-3))
    assert in_caller(float("inf"), devices=linked) == [False] * 4
    assert in_caller(0.0, devices=linked, threads=False) == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "balance", "checkpoint"),
    covering((*case, mode) for case in CASES for mode in MODES),
)
def test_it_is_the_same_in_the_thread_of_the_caller(
    name: str, balance: list[int], checkpoint: Any
) -> None:
    plain = sequential(name)
    model = px.GPipe(
        copy.deepcopy(plain), balance, devices=CPUS, chunks=4, checkpoint=checkpoint, threads=False
    )
    x, y = batch(requires_grad=True), batch(requires_grad=True)
    assert torch.equal(step(model, x), plain_step(plain, y, 4))
    check_same(model, plain)
    torch.testing.assert_close(x.grad, y.grad)


def test_it_is_a_sequence_of_layers() -> None:
    layers = dense(4)
    model = px.GPipe(nn.Sequential(*layers), [1, 3], devices=CPUS)
    assert len(model) == 4
    assert list(model) == layers
    assert [model[k] for k in (0, 1, 3, -1, -4)] == [layers[k] for k in (0, 1, 3, 3, 0)]
    for index in (4, -5):
        with pytest.raises(IndexError):
            model[index]
    assert (model.balance, model.chunks, model.checkpoint) == ([1, 3], 1, "except_last")
    assert model.devices == [torch.device("cpu")] * 2
    assert list(model.state_dict())[:2] == ["partitions.0.0.0.weight", "partitions.0.0.0.bias"]
    assert "partitions.1.3.0.bias" in model.state_dict()


def test_copies_have_workers_of_their_own() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=2)
    step(model, batch())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        other.zero_grad()
        model.zero_grad()
        assert torch.equal(step(other, batch()), step(model, batch()))
        check_same(other, model)


def test_nothing_at_all() -> None:
    model = px.GPipe(nn.Sequential(), [], devices=CPUS)
    assert len(model) == 0
    assert torch.equal(model(batch()), batch())
