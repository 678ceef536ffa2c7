"""Pipelines over many processes against the unsplit model: same loss, gradients, parameters.

To the last bit, as in one process: messages change nothing, and neither does where a stage runs.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_choice import EVERY_CASE, covering
from ranks import Ranks
from small_pipelines import (
    NAMES_WITHOUT_SLICES,
    AddInputs,
    assert_order_respected,
    cut,
    data,
    dense,
    mse,
    orders,
    pipeline,
    two_target_loss,
    unsplit,
)
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.cli import main
from pipeexec.demo_models.registry import build_model, split
from pipeexec.distributed import Processes
from pipeexec.distributed.process_clock import Alignment, ProcessClock
from pipeexec.executor import StepResult
from pipeexec.profiling import Profile
from pipeexec.stages.module_call import OwnGenerator, task_seed
from pipesim.ops import COLLECTIVES

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

Batch = tuple[list[nn.Module], Any, Any, Callable[[Any, Any], Tensor]]


class Fork(nn.Module):
    """One tensor to four: values, an integer mask, a skip connection, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x), (x > 0).long(), x * 2, self.layer(x).sin()


class Along(nn.Module):
    """Passes all on but the last, of which it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor, skip: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(self.layer(x * mask)), mask, skip * 2, x[:, :0]


class Join(nn.Module):
    """Four to one, of which one is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor, skip: Tensor, empty: Tensor) -> Tensor:
        return self.layer(x + skip) * mask + empty.sum()


def _dense(n: int, n_samples: int = 13) -> Batch:
    return list(cut(dense(n), [1] * n)), *data(n_samples), mse


def _tuples(n: int) -> Batch:
    if n == 2:
        return [_Chain(Fork(), Along()), Join()], *data(13), mse
    between = [_Between(Along()) for _ in range(n - 3)]
    return [Fork(), Along(), *between, Join()], *data(13), mse


class _Chain(nn.Module):
    """Two that exchange tuples."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, *x: Tensor) -> Any:
        return self.second(*self.first(*x))


class _Between(nn.Module):
    """Several to several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor, skip: Tensor, empty: Tensor) -> Any:
        return self.inner(x, mask, skip, x + empty.sum())


def _tokens(n: int) -> Batch:
    """Integers are the input of the first stage."""
    work = build_model("gpt", layers=n, width=16, heads=2, sequence=8)
    return list(split(work.layers, n)), *work.make_batch(13, 0), work.loss


def _batch_norm(n: int) -> Batch:
    stages = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(n)]
    return list(stages), *data(13), mse


def _dropout(n: int) -> Batch:
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4)) for _ in range(n)]
    return list(stages), *data(13), mse


def _doubles(n: int) -> Batch:
    """A stage of doubles between others."""
    stages = [nn.Linear(16, 16).double() for _ in range(n)]
    inputs, targets = data(13)
    return list(stages), inputs.double(), targets.double(), mse


def _several_batches(n: int) -> Batch:
    """A batch of several tensors, and targets that are several too."""
    inputs, targets = data(13)
    stages = [AddInputs(16, 16), *(nn.Linear(16, 16) for _ in range(n - 1))]
    return stages, (inputs, inputs**2), (targets, inputs), two_target_loss


MODELS: dict[str, Callable[[int], Batch]] = {
    "dense": _dense,
    "tuples": _tuples,
    "tokens": _tokens,
    "batch norm": _batch_norm,
    "dropout": _dropout,
    "doubles": _doubles,
    "several batches": _several_batches,
}


class Scalar(nn.Module):
    """A parameter without dimensions, and one of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.full((16,), 0.25, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift.float()


def _mixed(n: int) -> Batch:
    return [nn.Sequential(nn.Linear(16, 16), Scalar()) for _ in range(n)], *data(13), mse


MODELS["mixed"] = _mixed

OPTIMIZERS: dict[str, Any] = {
    "": None,
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def make_graph(schedule: str, p: int, m: int, options: dict[str, Any]) -> ps.TaskGraph:
    """Return the graph of a named schedule, or of a row of actions a device."""
    order = ps.schedule(schedule, p, m) if schedule in ps.schedules().index else ORDERS[schedule]
    return ps.lower(order, **options)


#: Schedules of our own: a device of each process, then another; and one with messages back.
ORDERS = {
    "zigzag": orders("0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"),
}


def train(
    processes: Processes,
    model: str,
    schedule: str,
    p: int,
    m: int,
    options: dict[str, Any],
    optimizer: str = "",
    n_steps: int = 1,
) -> dict[str, Any]:
    """Run steps; return what this process has afterwards, and what it knows of the whole."""
    torch.manual_seed(5)
    graph = make_graph(schedule, p, m, options)
    stages, inputs, targets, loss_fn = MODELS[model](graph.n_stages)
    own = p // processes.n_ranks
    homes = range(processes.rank * own, (processes.rank + 1) * own)
    local = np.isin(graph.homes, list(homes))
    own_stages = [s if local[:, k].any() else None for k, s in enumerate(stages)]
    losses = []
    with px.Pipeline(
        own_stages, graph, ["cpu"] * own, loss_fn, OPTIMIZERS[optimizer], processes=processes
    ) as subject:
        subject.align()
        for _ in range(n_steps):
            result = subject.step(
                inputs if local[:, 0].any() else None, targets if local[:, -1].any() else None
            )
            whole = subject.gather(result)
            losses.append(whole.loss)
        check_whole(result, whole, processes, local)
        assert {s for s in own_stages if s is not None} <= {*subject.modules}, "a copy is trained"
        modules = dict(enumerate(subject.modules))
    return {
        "losses": losses,
        "peak_held": list(whole.peak_held),
        **tensors(modules),
    }


def tensors(modules: Mapping[int, nn.Module]) -> dict[str, dict[str, Any]]:
    """Return copies of parameters and buffers, and the gradients, by stage and name."""
    return {
        "parameters": {
            f"{k}.{name}": x.detach().clone()
            for k, module in modules.items()
            for name, x in (*module.named_parameters(), *module.named_buffers())
        },
        "gradients": {
            f"{k}.{name}": x.grad
            for k, module in modules.items()
            for name, x in module.named_parameters()
        },
    }


def check_whole(
    own: StepResult, whole: StepResult, processes: Processes, local: np.ndarray
) -> None:
    """Check a gathered result, in the process that has it."""
    clocks = [Alignment(*row) for row in processes.share(processes.clock.alignment)]
    # Of a machine that other work keeps busy, the bound of a sample says little.
    slack = max(5e-3, *(clock.round_trip + 3 * clock.residual for clock in clocks))
    timeline = whole.timeline
    assert timeline.complete
    assert_order_respected(timeline, slack, between_processes=True)
    sends = np.flatnonzero(timeline.graph.pair > np.arange(len(timeline.graph)))
    assert (timeline.nbytes[sends] == timeline.nbytes[timeline.graph.pair[sends]]).all()
    ran = own.timeline.ran
    shift = (timeline.end - own.timeline.end)[ran]
    assert np.ptp(shift) < 1e-9, "a process's own times moved against each other"
    # A collective starts when its last member has come, whom its own process does not see.
    moved = (timeline.start - own.timeline.start)[ran] - shift
    together = timeline.graph.is_op(COLLECTIVES)[ran]
    assert (np.abs(moved[~together]) < 1e-9).all()
    assert (moved[together] > -1e-9).all()
    assert len(whole.losses) == timeline.graph.n_microbatches
    assert whole.host_seconds > own.host_seconds > 0
    assert own.host_times is not None
    assert whole.host_times is not None
    assert (whole.host_times[ran] == own.host_times[ran]).all()
    assert not np.isnan(own.host_times[ran]).any()
    errors = sorted(processes.share(own.clock_error))
    assert whole.clock_error == sum(errors[-2:]) > 0


def expected(
    model: str,
    schedule: str,
    p: int,
    m: int,
    options: dict[str, Any],
    optimizer: str = "",
    n_steps: int = 1,
) -> dict[str, Any]:
    """Return what the same comes to in one process: the unsplit model, or a pipeline's steps."""
    torch.manual_seed(5)
    graph = make_graph(schedule, p, m, options)
    stages, inputs, targets, loss_fn = MODELS[model](graph.n_stages)
    seed = torch.initial_seed()

    def call(stage: int, microbatch: int, module: nn.Module, values: tuple[Tensor, ...]) -> Any:
        with OwnGenerator(task_seed(seed, 0, stage, microbatch), torch.device("cpu")):
            return module(*values)

    if optimizer:
        with pipeline(stages, graph, loss_fn, OPTIMIZERS[optimizer]) as subject:
            losses = [subject.step(inputs, targets).loss for _ in range(n_steps)]
    else:
        losses = [unsplit(stages, graph, inputs, targets, loss_fn, call=call)]
    return {
        "losses": losses,
        **tensors(dict(enumerate(stages))),
    }


def check(ranks: Ranks, model: str, schedule: str, p: int, m: int, **options: Any) -> None:
    """Run steps in the ranks and in this process: all must be equal to the last bit."""
    steps = {k: options.pop(k) for k in ("optimizer", "n_steps") if k in options}
    case = (model, schedule, p, m, options)
    results = ranks.run(train, model=model, schedule=schedule, p=p, m=m, options=options, **steps)
    wanted = expected(*case, **steps)
    graph = make_graph(schedule, p, m, options)
    for rank, result in enumerate(results):
        assert torch.equal(torch.stack(result["losses"]), torch.stack(wanted["losses"])), rank
        assert result["peak_held"] == results[0]["peak_held"]
    for kind in ("parameters", "gradients"):
        places = [_by_stage(x[kind], graph.n_stages) for x in results]
        names = [name for place in places for name, _ in place]
        assert set(names) == set(wanted[kind])
        for name, value in (pair for place in places for pair in place):
            its = wanted[kind][name]
            same = value is its if its is None else torch.equal(value, its)
            assert same, (kind, name)


def _by_stage(values: dict[str, Any], n_stages: int) -> list[tuple[str, Any]]:
    """Return parameters by their stage, whichever path's copy they are of."""
    pairs = []
    for name, value in values.items():
        number, _, rest = name.partition(".")
        pairs.append((f"{int(number) % n_stages}.{rest}", value))
    return pairs


# Schedules, recompute modes, and what stages are made of


@pytest.mark.parametrize("name", NAMES_WITHOUT_SLICES)
def test_parity_of_every_schedule_in_two_processes(name: str, two_ranks: Ranks) -> None:
    check(two_ranks, "dense", name, 2, 4)


@pytest.mark.parametrize(
    "name",
    ["interleaved_1f1b", "zb_h1", "dualpipev", "chimera", "hanayo", "pipedream"]
    + ["gpipe", "1f1b", "zbv"] * EVERY_CASE,
)
def test_parity_in_four_processes(name: str, four_ranks: Ranks) -> None:
    check(four_ranks, "dense", name, 4, 8)


@pytest.mark.parametrize(
    ("name", "recompute"),
    covering(product(["gpipe", "1f1b", "interleaved_1f1b", "zbv", "chimera"],
                     ["always", "except_last"])),
)  # fmt: skip
def test_parity_with_recompute(name: str, recompute: str, two_ranks: Ranks) -> None:
    check(two_ranks, "dropout", name, 2, 4, recompute=recompute)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv", "chimera", "dualpipe"])
def test_parity_of_several_devices_a_process(name: str, two_ranks: Ranks) -> None:
    """Some messages cross processes, some stay in one."""
    check(two_ranks, "dense", name, 4, 8)


def test_parity_where_every_message_comes_back(two_ranks: Ranks) -> None:
    check(two_ranks, "dense", "zigzag", 2, 2)


@pytest.mark.parametrize(("schedule", "name"), covering(product(["1f1b", "zb_h1"], MODELS)))
def test_parity_whatever_stages_exchange(schedule: str, name: str, four_ranks: Ranks) -> None:
    """Micro-batches of 4 and of 3 samples; tuples, integers, doubles, absent gradients."""
    check(four_ranks, name, schedule, 4, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False, "rendezvous": True},
        {"overlap": False},
        {"rendezvous": True},
        {"streams": "single"},
        {"streams": "single", "rendezvous": True},
        {"step": "none"},
    ],
)
def test_parity_however_messages_are_sent(options: dict[str, Any], two_ranks: Ranks) -> None:
    check(two_ranks, "tuples", "gpipe", 2, 3, **options)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    covering(product(["1f1b", "zbv", "chimera", "dualpipe", "pipedream"], ["adamw", "sgd"])),
)
def test_three_steps_are_those_of_one_process(name: str, optimizer: str, two_ranks: Ranks) -> None:
    """Optimizers, and the copies of stages in several processes, stay together."""
    check(two_ranks, "dropout", name, 2, 4, optimizer=optimizer, n_steps=3)


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_versions_of_weights_in_four_processes(name: str, four_ranks: Ranks) -> None:
    check(four_ranks, "dense", name, 4, 8, optimizer="sgd", n_steps=2, recompute="always")


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_gradients_of_any_type_are_summed_over_processes(name: str, two_ranks: Ranks) -> None:
    """Parameters without dimensions, and two types in one stage."""
    check(two_ranks, "mixed", name, 2, 4, optimizer="sgd", n_steps=2)


def other_graphs(processes: Processes) -> list[Any]:
    """Run one schedule after the other with the same stages; count what they hold."""
    stages: list[nn.Module | None] = list(cut(dense(2), [1, 1]))
    inputs, targets = data(8)
    first, second = (ps.lower(ps.schedule(name, 2, 4)) for name in ("gpipe", "zb_h1"))
    values = []
    with px.Pipeline(stages, first, ["cpu"], mse, processes=processes) as subject:
        for graph in (first, second):
            other = subject.with_graph(graph)
            values.append(other.gather(other.step(inputs, targets)).loss.item())
            values.append(other.held_bytes(inputs, targets))
            values.append(other.device_bytes(inputs, targets))
            values.append(other.left_bytes(inputs, targets))
    return values


def test_other_graphs_on_the_same_stages(two_ranks: Ranks) -> None:
    """Every process knows the bytes of all stages: those of one process, except for headers."""
    stages, batch = cut(dense(2), [1, 1]), data(8)
    expected: list[Any] = []
    for name in ("gpipe", "zb_h1"):
        graph = ps.lower(ps.schedule(name, 2, 4))
        with pipeline(stages, graph) as subject:
            expected.append(subject.step(*batch).loss.item())
            expected += [subject.held_bytes(*batch), subject.device_bytes(*batch),
                         subject.left_bytes(*batch)]  # fmt: skip
    first, second = two_ranks.run(other_graphs)
    assert first == second
    for actual, wanted in zip(first, expected, strict=True):
        if isinstance(wanted, float):
            assert actual == wanted
        else:  # of four messages, each with a header of 128 bytes at most
            assert all(a <= b <= a + 4 * 128 for a, b in zip(wanted, actual, strict=True))


def late_clock(processes: Processes) -> list[float]:
    """Return when the devices began; the clock of rank 1 is told to be 100 s behind rank 0's."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), hosts="per_device")
    honest = ProcessClock.to_first
    with (
        px.Pipeline(cut(dense(2), [1, 1]), graph, ["cpu"], mse, processes=processes) as pipeline,
        pytest.MonkeyPatch.context() as patch,
    ):
        late = lambda clock, time: honest(clock, time) + 100 * processes.rank  # noqa: E731
        patch.setattr(ProcessClock, "to_first", late)
        timeline = pipeline.gather(pipeline.step(*data(8))).timeline
    return [float(timeline.start[graph.device == device].min()) for device in range(2)]


def test_times_of_all_processes_are_on_the_clock_of_the_first(two_ranks: Ranks) -> None:
    """On one machine all have one clock; on several they may be hours apart."""
    for first, second in two_ranks.run(late_clock):
        assert 0 <= first < 50
        assert 100 <= second < 150


# The command line


def command_line(processes: Processes, folder: str) -> list[int]:
    """Profile, train and validate; each command joins and leaves by itself."""
    sizes = "--layers 2 --width 16 --heads 2 --sequence 16 --batch 8 --microbatches 4"
    common = shlex.split(f"{sizes} --steps 2 --warm-up 1 --results {folder}")
    return [
        main(["profile", "--name", "costs", *common]),
        main(["run", "--name", "run", "--costs", f"{folder}/costs", *common]),
        main(["validate", "--name", "both", "--recompute", "never", *common]),
    ]


def test_every_command_runs_in_two_processes(two_ranks: Ranks, tmp_path: Path) -> None:
    """And one process writes, with the clocks of both."""
    assert two_ranks.run(command_line, folder=str(tmp_path)) == [[0, 0, 0]] * 2
    for name in ("run", "both"):
        record = json.loads((tmp_path / name / "run.json").read_text())
        assert len(record["clocks"]) == 2
        assert record["clocks"][1]["n_samples"] > 2
    both = px.load_run(tmp_path / "both")
    assert list(both.rows) == ["gpipe never", "1f1b never"]
    assert all(row.measured.complete for row in both.rows.values())
    assert len(both.clocks) == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        *("timeline.csv", "timeline.png", "predicted.csv", "costs.json", "overlay.png"),
    }
    assert Profile.load(tmp_path / "costs").fits is not None
