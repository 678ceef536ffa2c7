"""`px.GPipe`: a sequential module in partitions is the module itself, only faster."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_pipelines import assert_order_respected, one_thread
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.gpipe.call import Call
from pipeexec.gpipe.skip import Namespace, pop, skippable, stash
from pipeexec.gpipe.task_orders import clock_cycles
from pipesim.errors import ArgumentError, ExecutionError, PipeError
from pipesim.ops import Op

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

MODES = ("always", "except_last", "never")
CPUS = ["cpu"] * 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Pair(nn.Module):
    """Makes a tuple of what it is given, with numbers that need no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, torch.arange(len(x)), x.sin()


class Swap(nn.Module):
    """Changes the order, and the numbers."""

    def forward(self, x: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        a, k, b = x
        return b, k + 1, a


class Merge(nn.Module):
    """Makes one tensor of the three."""

    def forward(self, x: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        a, k, b = x
        return a + b * k[:, None]


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes the cosine of its input."""

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x.cos())
        return x + 1


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Multiplies by what was stashed."""

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x if skip is None else x * skip


@skippable(stash=["skip"])
class StashNothing(nn.Module):
    """Stashes None."""

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", None)
        return x + 1


def dense(n: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(n)]


def nested() -> list[nn.Module]:
    """Two skips, one within the other, over all partitions."""
    inner, outer = Namespace(), Namespace()
    return [
        Stash().isolate(outer), nn.Linear(6, 6), Stash().isolate(inner), nn.Linear(6, 6),
        nn.Tanh(), Pop().isolate(inner), nn.Linear(6, 6), Pop().isolate(outer),
    ]  # fmt: skip


#: Models, each with the balances that it is cut by.
MODELS: dict[str, tuple[Callable[[], list[nn.Module]], list[list[int]]]] = {
    "dense": (dense, [[4], [1, 3], [1, 2, 1], [1, 1, 1, 1]]),
    "batch norm": (lambda: [*dense(2), nn.BatchNorm1d(6), *dense(1)], [[2, 2], [1, 1, 2]]),
    "in place": (lambda: [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6),
                          nn.ReLU(inplace=True)], [[1, 3], [1, 1, 1, 1]]),
    "tuples": (lambda: [nn.Linear(6, 6), Pair(), Swap(), Merge()], [[2, 2], [1, 1, 1, 1]]),
    "skips": (nested, [[2, 3, 3], [1, 4, 2, 1], [8]]),
    "a skip of nothing": (lambda: [StashNothing(), *dense(2), Pop()], [[1, 2, 1]]),
    "no parameters": (lambda: [nn.Tanh(), nn.Identity(), nn.ReLU()], [[1, 1, 1]]),
    "no parameters at first": (lambda: [nn.Flatten(), nn.Tanh(), nn.Linear(6, 6)], [[1, 1, 1]]),
}  # fmt: skip
CASES = [(name, balance) for name, (_, balances) in MODELS.items() for balance in balances]


def sequential(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*MODELS[name][0]())


def batch(n: int = 8, *, requires_grad: bool = False) -> Tensor:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(requires_grad)


def plain_step(module: nn.Module, x: Tensor, chunks: int) -> Tensor:
    """Run the module itself on the micro-batches."""
    output = torch.cat([module(part) for part in x.chunk(chunks)])
    if output.requires_grad:
        output.square().mean().backward()
    return output


def step(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    if output.requires_grad:
        output.square().mean().backward()
    return output


def check_same(model: nn.Module, plain: nn.Module) -> None:
    """Gradients, parameters and buffers."""
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)


# Transparency


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(("name", "balance"), CASES)
@pytest.mark.parametrize("requires_grad", [False, True])
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


@pytest.mark.parametrize("switch", ["dependencies", "copy_streams", "portals"])
@pytest.mark.parametrize(("name", "balance"), CASES)
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
    """What is recomputed draws what it drew; the same seed draws the same, another another."""
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
    seen: list[tuple[bool, bool]] = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((px.is_checkpointing(), px.is_recomputing()))
            return x * 1

    model = px.GPipe(nn.Sequential(nn.Linear(6, 6), Asks()), [2], devices=CPUS, chunks=2)
    step(model, batch())
    assert seen == [(True, False), (False, False), (False, True)]
    seen.clear()
    step(model.eval(), batch())
    assert seen == [(False, False)] * 2


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
            self.seen: list[threading.Thread] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(threading.current_thread())
            return x

    def seen(worth: float, **options: Any) -> list[bool]:
        layers = nn.Sequential(Where(), Where())
        model = px.GPipe(layers, [1, 1], chunks=2, **{"devices": CPUS, **options})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pipeexec.gpipe.gpipe.MIN_THREADED_SECONDS", worth)
            for _ in range(2):
                model(batch())
        return [thread is threading.current_thread() for thread in layers[0].seen]

    assert seen(0.0) == [False] * 4
    assert seen(float("inf")) == [False] * 2 + [True] * 2
    assert seen(float("inf"), threads=True) == [False] * 4
    assert seen(0.0, threads=False) == [True] * 4
    linked = px.workers(2, link=ps.Network(latency=1e-3))
    assert seen(float("inf"), devices=linked) == [False] * 4
    assert seen(0.0, devices=linked, threads=False) == [True] * 4


@pytest.mark.parametrize(("name", "balance"), CASES)
@pytest.mark.parametrize("checkpoint", MODES)
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


# Order


def test_clock_cycles_by_hand() -> None:
    """Four micro-batches, three partitions."""
    assert list(clock_cycles(4, 3)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1), (0, 2)],
        [(3, 0), (2, 1), (1, 2)],
        [(3, 1), (2, 2)],
        [(3, 2)],
    ]


@given(st.integers(1, 9), st.integers(1, 9))
def test_clock_cycles_run_everything_once_in_order(m: int, n: int) -> None:
    cycles = list(clock_cycles(m, n))
    assert len(cycles) == m + n - 1
    assert sorted(x for cycle in cycles for x in cycle) == [
        (i, j) for i in range(m) for j in range(n)
    ]
    assert all(i + j == k for k, cycle in enumerate(cycles) for i, j in cycle)


@pytest.mark.parametrize("checkpoint", MODES)
def test_the_backward_is_the_forward_turned_around(checkpoint: Any) -> None:
    """With dependencies: the order of the graph, and a recompute before it, if any."""
    model = px.GPipe(sequential("dense"), [1, 2, 1], devices=CPUS, chunks=4, checkpoint=checkpoint)
    step(model, batch())
    timeline, graph = model.timeline(), model.graph(8)
    assert timeline.complete
    assert [graph.task(k) for k in range(len(graph))] == [
        timeline.graph.task(k) for k in range(len(graph))
    ]
    n_recomputed = {"always": 4, "except_last": 3, "never": 0}[checkpoint]
    assert int((graph.op == Op.R).sum()) == 3 * n_recomputed
    for device in range(3):
        backward = [
            k for k in range(len(graph)) if graph.op[k] == Op.B and graph.device[k] == device
        ]
        started = sorted(backward, key=lambda k: timeline.start[k])
        assert [int(graph.microbatch[k]) for k in started] == [3, 2, 1, 0]
    assert ps.simulate(graph, ps.Costs(1, 2)).makespan > 0


@pytest.mark.parametrize("checkpoint", MODES)
def test_without_dependencies_recomputes_come_early(checkpoint: Any) -> None:
    """In the last partition all R before any B, elsewhere one micro-batch ahead."""
    model = px.GPipe(
        sequential("dense"), [1, 2, 1],
        devices=CPUS, chunks=4, checkpoint=checkpoint, dependencies=False,
    )  # fmt: skip
    step(model, batch())
    order = ["R3", "R2", "B3", "R1", "B2", "R0", "B1", "B0"]
    last = ["R3", "R2", "R1", "R0", "B3", "B2", "B1", "B0"]
    dropped = {"always": [], "except_last": ["R3"], "never": ["R3", "R2", "R1", "R0"]}[checkpoint]
    assert [backward_of(model, j).split() for j in range(3)] == [
        [task for task in each if task not in dropped] for each in (order, order, last)
    ]
    assert model.timeline().complete


def backward_of(model: px.GPipe, partition: int) -> str:
    """Return recomputes and backwards of a partition in the order in which they began."""
    timeline = model.timeline()
    graph = timeline.graph
    tasks = [
        k for k in range(len(graph))
        if graph.device[k] == partition and graph.op[k] in (Op.R, Op.B)
    ]  # fmt: skip
    tasks.sort(key=lambda k: (timeline.start[k], timeline.end[k]))
    return " ".join(f"{Op(graph.op[k]).name}{graph.microbatch[k]}" for k in tasks)


def test_without_dependencies_an_order_can_be_drawn() -> None:
    """Each partition has its own; the same seed gives the same, and gradients are the same."""
    plain = sequential("dense")

    def orders(seed: int, **options: Any) -> list[str]:
        model = px.GPipe(
            copy.deepcopy(plain), [1, 2, 1], devices=CPUS, chunks=8, backward_seed=seed, **options
        )
        step(model, batch())
        check_same(model, once)
        return [backward_of(model, j) for j in range(3)]

    once = copy.deepcopy(plain)
    plain_step(once, batch(), 8)
    drawn = orders(0, dependencies=False)
    assert drawn == orders(0, dependencies=False)
    assert drawn != orders(1, dependencies=False)
    assert len(set(drawn)) == 3
    assert [sorted(each.split()) for each in drawn] == [sorted(drawn[0].split())] * 3
    ordered = orders(0)
    assert ordered == orders(1)
    assert ordered[0].split()[-4:] == ["R1", "B1", "R0", "B0"]


@pytest.mark.parametrize("dependencies", [True, False])
@pytest.mark.parametrize("copy_streams", [True, False])
@pytest.mark.parametrize("portals", [True, False])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_step_is_that_of_its_graph(
    dependencies: bool, copy_streams: bool, portals: bool, seed: int | None
) -> None:
    """Messages of skips included, every task runs behind those that the graph has before it."""
    model = px.GPipe(
        sequential("skips"), [1, 4, 2, 1], devices=CPUS, chunks=4, dependencies=dependencies,
        copy_streams=copy_streams, portals=portals, backward_seed=seed,
    )  # fmt: skip
    step(model, batch(requires_grad=True))
    timeline = model.timeline()
    assert timeline.complete
    assert_order_respected(timeline)
    graph = model.graph(8)
    assert [graph.task(k) for k in range(len(graph))] == [
        timeline.graph.task(k) for k in range(len(graph))
    ]
    assert (timeline.graph.skips, timeline.graph.portals) == (((0, 3), (1, 2)), portals)
    costs = ps.Costs.from_timeline(timeline, skip_bytes={(0, 3): 48, (1, 2): 48})
    assert ps.simulate(timeline.graph, costs).makespan > 0


def test_portals_remove_the_copies_between() -> None:
    """Two micro-batches of a skip from the first partition to the last, 96 bytes each."""

    def messages(**options: Any) -> dict[str, float]:
        model = px.GPipe(
            nn.Sequential(Stash(), *dense(2), Pop()), [1, 1, 1, 1],
            devices=CPUS, chunks=2, **options,
        )  # fmt: skip
        step(model, batch(requires_grad=True))
        timeline = model.timeline()
        return {
            str(timeline.graph.task(k)): float(timeline.nbytes[k])
            for k in range(len(timeline))
            if timeline.graph.peer_stage[k] >= 0
        }

    straight = "0SEND_F{i}>3 3RECV_F{i}<0 3SEND_B{i}>0 0RECV_B{i}<3"
    hops = (
        "0SEND_F{i}>1 1RECV_F{i}<0 1SEND_B{i}>0 0RECV_B{i}<1 "
        "1SEND_F{i}>2 2RECV_F{i}<1 2SEND_B{i}>1 1RECV_B{i}<2 "
        "2SEND_F{i}>3 3RECV_F{i}<2 3SEND_B{i}>2 2RECV_B{i}<3"
    )
    for portals, tasks in ((True, straight), (False, hops)):
        names = {name for i in range(2) for name in tasks.format(i=i).split()}
        assert messages(portals=portals) == dict.fromkeys(names, 96.0)


def test_bytes_of_a_skip_are_those_of_the_largest_micro_batch() -> None:
    """Of seven samples in three micro-batches the last one has a single sample."""
    model = px.GPipe(
        nn.Sequential(Stash(), *dense(1), Pop()), [1, 1, 1], devices=CPUS[:3], chunks=3
    )
    model(batch(7))
    assert model.skip_bytes() == {(0, 2): 3 * 6 * 4}


def test_a_recompute_does_not_wait_for_its_gradient() -> None:
    """The backward of the last partition waits for a recompute of the first, which comes."""
    recomputed, came = threading.Event(), []

    class Tells(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if px.is_recomputing():
                recomputed.set()
            return x

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            if y.requires_grad:
                y.register_hook(lambda _: came.append(recomputed.wait(10)))
            return y

    model = px.GPipe(
        nn.Sequential(nn.Linear(6, 6), Tells(), nn.Linear(6, 6), Waits()), [2, 2],
        devices=CPUS, chunks=2, checkpoint="always", threads=True,
    )  # fmt: skip
    step(model, batch())
    assert came == [True, True]
    timeline = model.timeline()
    of = {str(timeline.graph.task(k)): k for k in range(len(timeline))}
    assert timeline.start[of["0B1"]] >= timeline.end[of["1B1"]]


def test_bytes_of_messages() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=2)
    step(model, batch())
    timeline = model.timeline()
    is_message = timeline.graph.pair >= 0
    assert (timeline.nbytes[is_message] == 4 * 6 * 4).all()


# What goes wrong


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
                assert any(torch.equal(mask, each) for each in forward)
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
    """One in threads of its own, one in the caller's, and one backward through both."""
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
    found: dict[int, list[Tensor]] = {0: [], 1: []}

    def work(number: int) -> None:
        for _ in range(20):
            x = batch(8 + 4 * number, requires_grad=True)
            model(x).square().sum().backward()
            assert x.grad is not None
            found[number].append(x.grad)

    threads = [threading.Thread(target=work, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, gradients in found.items():
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


@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_derivatives_are_refused() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=4)
    with pytest.raises(ExecutionError, match="create_graph=True"):
        model(batch()).square().sum().backward(create_graph=True)


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


def test_a_second_backward() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=2)
    loss = model(batch()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ExecutionError, match="a second backward through one forward of GPipe"):
        loss.backward()
    step(model, batch())


def test_gradients_of_something_alone() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=2)
    x = batch(requires_grad=True)
    with pytest.raises(
        ExecutionError, match=r"adds to the \.grad of its parameters: call backward"
    ):
        torch.autograd.grad(model(x).sum(), [x])
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(model(x).sum(), list(model.parameters()))


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
    ("given", "message"),
    [
        ([torch.zeros(2, 6)], "expected Tensor, but got list"),
        ((torch.zeros(2, 6), 1), "expected Tensor, but got int"),
        ((), "expected Tensor, but got an empty tuple"),
        ("x", "expected Tensor, but got str"),
    ],
)
def test_wrong_inputs(given: Any, message: str) -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS)
    with pytest.raises(TypeError, match=message):
        model(given)


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
