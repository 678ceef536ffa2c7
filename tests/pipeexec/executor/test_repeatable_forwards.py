"""Recomputed stages whose forward changes state that is no buffer: refused, with advice that works.

The advice of each message is taken: the step then equals that of the unsplit model.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from case_choice import covering
from small_pipelines import gradients, pipeline, unsplit
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import ExecutionError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved_1f1b")


class Layer(nn.Module):
    """A layer whose output is scaled by its state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.factor(x)

    def factor(self, x: Tensor) -> Any:
        raise NotImplementedError


class Number(Layer):
    """Counts in a number."""

    n = 0

    def factor(self, x: Tensor) -> Any:
        self.n += 1
        return 1 + self.n


class NumberAsBuffer(Layer):
    """`Number`, as its message says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def factor(self, x: Tensor) -> Any:
        self.n += 1
        return 1 + self.n


class Growing(Layer):
    """Appends to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def factor(self, x: Tensor) -> Any:
        self.history.append(1.0)
        return 1 + len(self.history)


class Queue(Layer):
    """Appends to a queue of constant length."""

    def __init__(self) -> None:
        super().__init__()
        self.last = deque([1.0, 2.0], maxlen=2)

    def factor(self, x: Tensor) -> Any:
        self.last.append(self.last[0] + 1)
        return self.last[-1]


class Table(Layer):
    """Counts in a nested dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"counts": {"forward": 0}}

    def factor(self, x: Tensor) -> Any:
        self.table["counts"]["forward"] += 1
        return self.table["counts"]["forward"]


class State:
    """Holds a number."""

    n = 0


class Held(Layer):
    """Counts in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()

    def factor(self, x: Tensor) -> Any:
        self.state.n += 1
        return 1 + self.state.n


class Named(Layer):
    """Counts in a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(n=0)

    def factor(self, x: Tensor) -> Any:
        self.state.n += 1
        return 1 + self.state.n


class PlainTensor(Layer):
    """Changes a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones((), dtype=torch.float64)

    def factor(self, x: Tensor) -> Any:
        self.mean.mul_(1.5)
        return self.mean.clone()


class Average(Layer):
    """Keeps a moving average in an attribute."""

    mean: Any = 0.0

    def factor(self, x: Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return 1 + self.mean


class Lazy(Layer):
    """Starts at None, and counts from the second forward on."""

    n: int | None = None

    def factor(self, x: Tensor) -> Any:
        self.n = 0 if self.n is None else self.n + 1
        return 1 + self.n


REFUSED: dict[str, tuple[type[Layer], str]] = {
    "number": (Number, "n"),
    "list": (Growing, "history"),
    "deque": (Queue, "last"),
    "dict": (Table, "table"),
    "object": (Held, "state"),
    "namespace": (Named, "state"),
    "tensor": (PlainTensor, "mean"),
    "average": (Average, "mean"),
    "lazy": (Lazy, "n"),
}


class Previous(Layer):
    """Depends on the input before: a second forward leaves the same state, and another output."""

    last = 0.0

    def factor(self, x: Tensor) -> Any:
        last, self.last = self.last, float(x.detach().mean())
        return 1 + last


class Clamped(Layer):
    """Writes to a parameter."""

    def factor(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.linear.bias.clamp_(min=0)
        return 1.0


class ClampedCopy(nn.Module):
    """`Clamped`, as its message says: the forward computes a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.linear.weight, self.linear.bias.clamp(min=0))
        return torch.tanh(y)


class OwnGenerator(Layer):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(1)

    def __deepcopy__(self, memo: Any) -> OwnGenerator:
        return build(OwnGenerator)

    def factor(self, x: Tensor) -> Any:
        return torch.rand(x.shape, generator=self.draws, dtype=x.dtype)


class Cached(Layer):
    """Fills caches in its first forward: a tensor, a number, and an entry for each shape."""

    cache: Tensor | None = None
    size: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[Any, Tensor] = {}

    def factor(self, x: Tensor) -> Any:
        if self.cache is None:
            self.cache = torch.arange(6, dtype=x.dtype)
            self.size = x.shape[1]
        if x.shape not in self.table:
            self.table[x.shape] = torch.ones(6, dtype=x.dtype)
        return 1 + self.cache * self.table[x.shape]


class Results(Layer):
    """Computes attributes anew in each forward, as old weight norms and auxiliary losses do."""

    last: Any = None
    mean = math.nan
    shape: Any = None

    def factor(self, x: Tensor) -> Any:
        self.last, self.mean = x.detach() * 2, float(x.detach().mean())
        self.shape = x.shape
        self.norms = [self.last.norm(), {"max": self.last.max()}]
        self.record = SimpleNamespace(x=self.last)
        return 1 + self.last.mean()


def build(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().double()


def stages_of(kind: type[nn.Module], n: int = 2) -> list[nn.Module]:
    """Return stages whose second module is of a kind."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), build(kind)).double() for _ in range(n)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def graph_of(schedule: str, recompute: str) -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, 2, 4), recompute=recompute)


def check(kind: type[nn.Module], graph: ps.TaskGraph) -> None:
    stages = stages_of(kind, graph.n_stages)
    same = copy.deepcopy(stages)
    with pipeline(stages, graph) as subject:
        for _ in range(2):
            for module in (*stages, *same):
                module.zero_grad()
            loss = float(subject.step(*batch()).loss)
            expected = float(unsplit(same, graph, *batch()))
            assert loss == pytest.approx(expected, rel=1e-12)
            torch.testing.assert_close(gradients(stages), gradients(same), rtol=1e-12, atol=1e-12)


def refuse(kind: type[nn.Module], match: str, schedule: str, recompute: str = "always") -> None:
    """See that steps are refused, not the first one alone, before any gradient."""
    graph = graph_of(schedule, recompute)
    stages = stages_of(kind, graph.n_stages)
    with pipeline(stages, graph) as subject:
        for _ in range(2):
            with pytest.raises(ExecutionError, match=match):
                subject.step(*batch())
        assert gradients(stages) == [None] * len(gradients(stages))
        float(subject.evaluate(*batch()).loss)


@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    covering(product(REFUSED, SCHEDULES, ["always", "except_last"])),
)
def test_attributes_that_each_forward_changes(name: str, schedule: str, recompute: str) -> None:
    kind, attribute = REFUSED[name]
    refuse(
        kind,
        rf"stage 0 is recomputed, and its module '1' \({kind.__name__}\) changes its attribute "
        rf"'{attribute}' in every forward.*make it a buffer.*or choose recompute='never'",
        schedule,
        recompute,
    )


@pytest.mark.parametrize(("name", "schedule"), covering(product(REFUSED, SCHEDULES)))
def test_without_recompute_all_run(name: str, schedule: str) -> None:
    """As the message says."""
    check(REFUSED[name][0], graph_of(schedule, "never"))


@pytest.mark.parametrize(
    ("kind", "schedule", "recompute"),
    covering(
        product(
            [NumberAsBuffer, ClampedCopy, Cached, Results], SCHEDULES,
            ["always", "except_last", "never"],
        )
    ),
)  # fmt: skip
def test_buffers_caches_and_results_run(
    kind: type[nn.Module], schedule: str, recompute: str
) -> None:
    check(kind, graph_of(schedule, recompute))


def test_an_output_that_depends_on_the_input_before() -> None:
    refuse(
        Previous,
        r"changes its attribute 'last' in a forward, and a second forward of the same input gave "
        r"another output: make it a buffer",
        "1f1b",
    )


def test_parameters_that_a_forward_writes() -> None:
    refuse(
        Clamped,
        r"its module '1.linear' \(Linear\) changes its parameter 'bias' in every forward.*"
        "let the forward compute a new tensor from it",
        "1f1b",
    )
    check(Clamped, graph_of("1f1b", "never"))  # no backward needs a bias


def test_a_generator_of_the_module() -> None:
    refuse(OwnGenerator, r"changes its generator 'draws' in every forward", "1f1b")
    check(OwnGenerator, graph_of("1f1b", "never"))


def test_steps_that_recompute_no_microbatch() -> None:
    """``except_last`` of one micro-batch recomputes none."""
    check(Number, ps.lower(ps.schedule("1f1b", 2, 1), recompute="except_last"))


def test_a_profile_needs_no_right_gradients() -> None:
    """It recomputes whatever the graph does, for its times."""
    with pipeline(stages_of(Number), graph_of("1f1b", "never")) as subject:
        px.measure(subject, *batch(), n_steps=1, warm_up=0)
        subject.step(*batch())


def test_only_a_suspect_runs_twice() -> None:
    """A forward that leaves no state runs once; one that leaves some, twice in the first step."""
    counts: dict[str, list[int]] = {}
    for kind in (NumberAsBuffer, Results):
        calls = counts[kind.__name__] = []
        stages = stages_of(kind)
        stages[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with pipeline(stages, graph_of("gpipe", "always")) as subject:
            for _ in range(2):
                subject.step(*batch())
                calls.append(0)
    assert [counts[k].index(0) for k in ("NumberAsBuffer", "Results")] == [8, 9]
    assert [sum(counts[k]) for k in ("NumberAsBuffer", "Results")] == [16, 17]


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("name", REFUSED)
def test_gpipe_refuses_them_too(name: str, checkpoint: str) -> None:
    kind, attribute = REFUSED[name]
    x, _ = batch()
    for chunks in (1, 2):
        if (chunks, checkpoint) == (1, "except_last"):
            continue  # nothing is recomputed
        layers = nn.Sequential(*stages_of(kind))
        model = px.GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint)
        match = rf"changes its attribute '{attribute}' .*or choose checkpoint='never'"
        with pytest.raises(ExecutionError, match=match):
            model(x)


@pytest.mark.parametrize("kind", [kind for kind, _ in REFUSED.values()])
def test_gpipe_without_checkpoint_runs_them(kind: type[nn.Module]) -> None:
    x, _ = batch()
    layers = nn.Sequential(*stages_of(kind))
    same = copy.deepcopy(layers)
    model = px.GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    model(x).square().mean().backward()
    torch.cat([same(part) for part in x.chunk(2)]).square().mean().backward()
    torch.testing.assert_close(gradients([layers]), gradients([same]), rtol=1e-12, atol=1e-12)
