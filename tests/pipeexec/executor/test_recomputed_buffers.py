"""Recomputes of modules whose output depends on a buffer that they change.

Loss, gradients and buffers are those of the unsplit model with the same micro-batches.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from case_choice import covering
from ranks import Ranks
from small_pipelines import gradients, mse, pipeline, unsplit
from stateful_layers import BUFFER_LAYERS, Counter, add_in_place, stateful_stages
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.stages.activations import ActivationCounter, ActivationMeter
from pipeexec.stages.stage import Stage
from pipesim.errors import ExecutionError

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.BatchNormWarning"),
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
]

#: Schedules that run the forwards of a stage in the order of the micro-batches.
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved_1f1b")


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(24, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def graph_of(name: str, recompute: str = "always", m: int = 6, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, 2, m), recompute=recompute, **options)


def assert_close(actual: Any, expected: Any) -> None:
    """Check values to all but the last digits: the order of sums may differ."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def assert_buffers_equal(actual: list[nn.Module], expected: list[nn.Module]) -> None:
    for module, other in zip(actual, expected, strict=True):
        assert_close(dict(module.named_buffers()), dict(other.named_buffers()))


def assert_gradients_equal(actual: list[nn.Module], expected: list[nn.Module]) -> None:
    assert_close(gradients(actual), gradients(expected))


def check(graph: ps.TaskGraph, name: str, n_steps: int = 2) -> None:
    """Run steps of a pipeline and of the unsplit model; compare them."""
    stages = stateful_stages(name, graph.n_stages)
    same = copy.deepcopy(stages)
    x, y = batch()
    with pipeline(stages, graph) as subject:
        for _ in range(n_steps):
            for module in (*stages, *same):
                module.zero_grad()
            loss = subject.step(x, y).loss
            assert_close(float(loss), float(unsplit(same, graph, x, y)))
            assert_gradients_equal(stages, same)
            assert_buffers_equal(stages, same)


@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    covering(product(BUFFER_LAYERS, SCHEDULES, ["always", "except_last", "never"])),
)
def test_equal_to_the_unsplit_model(name: str, schedule: str, recompute: str) -> None:
    check(graph_of(schedule, recompute), name)


@pytest.mark.parametrize(
    ("name", "options"),
    covering(
        product(
            ["spectral_norm", "n += 1", "n = n + 1"],
            [{"recompute_first": True}, {"offload": "all"}, {"hosts": "one"}, {"overlap": False}],
        )
    ),
)
def test_other_graphs(name: str, options: dict[str, Any]) -> None:
    check(graph_of("gpipe", **options), name)


@pytest.mark.parametrize("name", ["spectral_norm", "codebook"])
def test_many_microbatches_in_flight(name: str) -> None:
    check(graph_of("gpipe", m=24), name)


@pytest.mark.parametrize(
    ("schedule", "name"),
    covering(product(["chimera", "dualpipe"], ["parametrized", "n = n + 1", "n += 1", "codebook"])),
)
def test_copies_of_stages_compute_as_without_recompute(name: str, schedule: str) -> None:
    """Each path of a bidirectional schedule has its own buffers."""
    _compare_with_never(name, lambda mode: graph_of(schedule, mode, m=4))


@pytest.mark.parametrize("name", ["parametrized", "n = n + 1", "batch norm"])
def test_replicas_compute_as_without_recompute(name: str) -> None:
    _compare_with_never(name, lambda mode: graph_of("1f1b", mode, m=3, n_replicas=2))


def _compare_with_never(name: str, graph: Any, *, twice: bool = True) -> None:
    results = []
    for mode in ("never", "always"):
        lowered = graph(mode)
        stages = stateful_stages(name, lowered.n_stages, twice=twice)
        x, y = batch()
        with pipeline(stages, lowered) as subject:
            losses = [float(subject.step(x, y).loss) for _ in range(2)]
        results.append((losses, stages))
    (losses, stages), (other_losses, other_stages) = results
    assert_close(losses, other_losses)
    assert_gradients_equal(stages, other_stages)
    assert_buffers_equal(stages, other_stages)


@pytest.mark.parametrize("name", ["spectral_norm", "n += 1", "n = n + 1", "running norm"])
def test_evaluation_between_steps_changes_nothing(name: str) -> None:
    graph = graph_of("1f1b")
    stages = stateful_stages(name)
    same = copy.deepcopy(stages)
    x, y = batch()
    with pipeline(stages, graph) as subject:
        for _ in range(2):
            for module in (*stages, *same):
                module.zero_grad()
            assert_close(float(subject.step(x, y).loss), float(unsplit(same, graph, x, y)))
            assert_gradients_equal(stages, same)
            subject.evaluate(x, y)
            assert_buffers_equal(stages, same)


@pytest.mark.parametrize("name", ["spectral_norm", "n += 1", "n = n + 1", "codebook"])
def test_asynchronous_steps(name: str) -> None:
    """Micro-batches have the weights of their forward, and its buffers."""
    _compare_with_never(name, lambda mode: graph_of("pipedream", mode), twice=False)


@pytest.mark.parametrize("counter", ["n += 1", "n = n + 1"])
def test_split_model(counter: str) -> None:
    """Stages of `pipeexec.split` keep buffers, and the sample leaves them alone."""
    torch.manual_seed(0)
    names = (counter, counter, "parametrized", "parametrized")
    model = nn.Sequential(*[BUFFER_LAYERS[name]() for name in names]).double()
    same = copy.deepcopy(model)
    x, y = batch()
    graph = graph_of("1f1b")
    stages = list(px.split(model, 2, sample=x[:4]))
    with pipeline(stages, graph) as subject:
        for _ in range(2):
            model.zero_grad()
            same.zero_grad()
            assert_close(float(subject.step(x, y).loss), float(unsplit([same], graph, x, y)))
            assert_gradients_equal([model], [same])
            assert_close([b for stage in stages for b in stage.buffers()], list(same.buffers()))


class KeyedCounter(nn.Module):
    """Attention over slices of a sequence, scaled by the number of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.layer = px.KeyValueCache(), nn.Linear(6, 6)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        q = self.layer(x)[:, None]
        return self.cache.attend(q, q, q)[:, 0] * (1 + self.n)


def test_slices_of_sequences() -> None:
    x = torch.randn(4, 8, 6, dtype=torch.float64)
    results = []
    for mode in ("never", "always"):
        torch.manual_seed(0)
        stages = [KeyedCounter().double() for _ in range(2)]
        graph = ps.lower(ps.schedule("seq1f1b", 2, 4, n_slices=2), recompute=mode)
        with pipeline(stages, graph) as subject:
            losses = [float(subject.step(x, x).loss) for _ in range(2)]
        results.append((losses, stages))
    assert_close(results[0][0], results[1][0])
    assert_gradients_equal(list(results[0][1]), list(results[1][1]))
    assert_buffers_equal(list(results[0][1]), list(results[1][1]))


def step_of_rank(processes: Processes, name: str, mode: str) -> list[Any]:
    """Run two steps of one process; return the loss, the gradients and the buffers."""
    stages, graph = stateful_stages(name, twice=False), graph_of("1f1b", mode)
    with px.Pipeline(stages, graph, ["cpu"], mse, processes=processes) as subject:
        for _ in range(2):
            result = subject.gather(subject.step(*batch()))
        own = stages[processes.rank]
        return [float(result.loss), gradients([own]), list(own.buffers())]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["parametrized", "n = n + 1"])
def test_processes(two_ranks: Ranks, name: str) -> None:
    never, always = (
        two_ranks.run(step_of_rank, name=name, mode=mode) for mode in ("never", "always")
    )
    for first, second in zip(never, always, strict=True):
        assert_close(first, second)


class LateCounter(nn.Module):
    """Begins to count when it is told to."""

    counts = False

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(6, 6), in_place
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and self.in_place:
            self.n += 1
        elif self.counts:
            self.n = self.n + 1
        return self.layer(x) * (1 + self.n)


def late_steps(in_place: bool) -> tuple[Any, list[nn.Module]]:
    """Run a step without counting; return the pipeline, and stages that count from now on."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [LateCounter(in_place).double() for _ in range(2)]
    subject = pipeline(stages, graph_of("gpipe"))
    subject.step(*batch())
    for stage in stages:
        stage.counts = True
    return subject, stages


def test_a_buffer_that_is_replaced_later_is_kept() -> None:
    subject, stages = late_steps(in_place=False)
    with subject:
        compare_step(subject, stages)


def test_a_buffer_that_changes_in_place_later_is_refused_once() -> None:
    """The step after it is right. So is a module that assigns a new tensor."""
    subject, stages = late_steps(in_place=True)
    with subject:
        with pytest.raises(ExecutionError, match=r"changed its buffer 'n' in place.*assign a new"):
            subject.step(*batch())
        for _ in range(3):  # each stage once
            try:
                subject.step(*batch())
            except ExecutionError:
                continue
            break
        compare_step(subject, stages)


def compare_step(subject: Any, stages: list[nn.Module]) -> None:
    for stage in stages:
        stage.zero_grad()
    same = copy.deepcopy(stages)
    loss = subject.step(*batch()).loss
    assert_close(float(loss), float(unsplit(same, subject.graph, *batch())))
    assert_gradients_equal(stages, same)
    assert_buffers_equal(stages, same)


def test_a_norm_that_is_unfrozen_later_is_watched_anew() -> None:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(BUFFER_LAYERS["running norm"]()).double()
                               for _ in range(2)]  # fmt: skip
    for stage in stages:
        stage[0].norm.eval()
    with pipeline(stages, graph_of("gpipe")) as subject:
        subject.step(*batch())
        for stage in stages:
            stage.train()
        compare_step(subject, stages)


def test_counters_in_a_stage_without_gradients() -> None:
    """Frozen stages have forwards only; their buffers change once."""
    stages = stateful_stages("n = n + 1")
    stages[0].requires_grad_(False)
    same = copy.deepcopy(stages)
    graph = graph_of("1f1b")
    with pipeline(stages, graph) as subject:
        assert_close(float(subject.step(*batch()).loss), float(unsplit(same, graph, *batch())))
    assert_gradients_equal(stages[1:], same[1:])
    assert_buffers_equal(stages, same)


def test_kept_buffers_do_not_count_as_activations() -> None:
    """A micro-batch that will be recomputed holds its input alone, as the simulator predicts."""
    subject = Stage(Counter(add_in_place).double(), 1, torch.device("cpu"), ActivationCounter())
    x = batch()[0]
    subject.forward(0, (x,), 0, True)  # a first forward is given a copy
    subject.reset()
    subject.meter = ActivationMeter([*subject.module.parameters(), *subject.module.buffers()])
    subject.forward(1, (x,), 0, True)
    assert subject.buffers.is_needed
    assert subject.meter.current == x.nbytes
