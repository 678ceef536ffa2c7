"""Stages with experts in one process: the model as one module, memory, costs, and bad input."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from expert_stages import N_LAYERS, WIDTH, K, adam, batch, build, cut_evenly, lowered, train_unsplit
from small_pipelines import assert_order_respected, call_within, mse
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.executor import StepResult
from pipesim.errors import ArgumentError, ExecutionError, StageError
from pipesim.ops import Op, is_expert_exchange

pytestmark = pytest.mark.filterwarnings(
    "ignore::pipesim.errors.OversubscriptionWarning", "ignore::pipesim.errors.AccuracyWarning"
)


def pipeline(
    stages: Any, graph: ps.TaskGraph, optimizer: Any = adam, **options: Any
) -> px.Pipeline:
    devices = ["cpu"] * graph.n_devices
    return px.Pipeline(stages, graph, devices, mse, optimizer, pin_threads=False, **options)


def train(
    model: nn.Sequential, graph: ps.TaskGraph, n_replicas: int, n_steps: int = 2, **options: Any
) -> list[StepResult]:
    """Train stages of the model; return the results."""
    with pipeline(cut_evenly(model, graph.n_stages), graph, **options) as subject:
        return [call_within(60, lambda: subject.step(*batch(n_replicas))) for _ in range(n_steps)]


@pytest.mark.parametrize(
    ("schedule", "n_devices", "n_stages", "n_replicas", "lowering"),
    [
        ("1f1b", 1, 1, 1, {}),
        ("gpipe", 2, 2, 1, {}),
        ("zb_h1", 2, 2, 2, {}),
        ("1f1b", 1, 1, 4, {"expert_replicas": 2}),
        ("1f1b", 2, 2, 2, {"expert_replicas": 1}),
        ("dualpipe", 2, 2, 2, {}),
        ("dualpipev", 2, 4, 1, {}),
        ("dualpipev", 2, 4, 2, {}),
        ("1f1b merged", 2, 2, 1, {}),
        ("interleaved_1f1b merged", 2, 4, 2, {}),
        ("interleaved_1f1b delayed_w", 2, 4, 2, {}),
        ("1f1b", 2, 2, 2, {"overlap": False}),
        ("1f1b", 2, 2, 2, {"grad_sync": "every"}),
        ("1f1b", 2, 2, 2, {"grad_sync": "bucketed", "grad_norm": True}),
        ("1f1b", 2, 2, 2, {"hosts": "per_device", "host_threads": True}),
    ],
)
def test_losses_gradients_and_weights_are_those_of_the_model(
    schedule: str, n_devices: int, n_stages: int, n_replicas: int, lowering: dict[str, Any]
) -> None:
    graph = lowered(schedule, n_devices, n_stages, n_replicas, **{"hosts": "one", **lowering})
    n_layers = max(N_LAYERS, n_stages)
    model, whole = build(n_layers=n_layers), train_unsplit(n_replicas, 2, n_layers=n_layers)
    results = train(model, graph, n_replicas)
    assert [result.loss.item() for result in results] == pytest.approx(whole["losses"], rel=1e-12)
    for name, parameter in model.named_parameters():
        for value, other in ((parameter, whole["weights"]), (parameter.grad, whole["gradients"])):
            torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-12)
    timeline = results[-1].timeline
    assert timeline.complete
    assert_order_respected(timeline)
    if graph.has_grad_norm:
        norm = torch.stack([g.norm() for g in whole["gradients"].values()]).norm()
        assert results[-1].grad_norm == pytest.approx(float(norm), rel=1e-9)


def test_gradients_are_clipped_once() -> None:
    """An expert has gradients in one replica alone, whose sum both replicas take."""
    model, whole, (x, y) = build(), build(), batch(2)
    graph = lowered("1f1b", 1, 1, 2, hosts="one", grad_norm=True)
    train(model, graph, 2, n_steps=1, optimizer=_plain_sgd, max_grad_norm=0.01)
    mse(whole(x), y).backward()
    nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-6, atol=1e-12)


def _plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def test_options_of_the_layer_in_a_pipeline() -> None:
    """A shared expert, normalized weights, no residual; two layers with experts a stage."""
    options: dict[str, Any] = {"normalize": True, "has_shared": True, "residual": False}
    model = build(n_layers=4, **options)
    whole = train_unsplit(2, 2, n_layers=4, **options)
    results = train(model, lowered("zb_h1", 2, 2, 2, hosts="one", expert_layers=2), 2)
    assert [result.loss.item() for result in results] == pytest.approx(whole["losses"], rel=1e-12)


def test_steps_add_up() -> None:
    """Gradients of two steps with accumulate are those of both batches together."""
    model, (x, y) = build(), batch(2)
    graph = lowered("1f1b", 2, 2, 2, hosts="one")
    with pipeline(cut_evenly(model, 2), graph) as subject:
        subject.step(x, y, accumulate=True)
        result = subject.step(x, y)
    assert result.timeline.complete
    whole = train_unsplit(2, 1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, whole["weights"][name], rtol=1e-7, atol=1e-9)


def test_evaluation_and_prediction() -> None:
    model, (x, y) = build(), batch(2)
    with pipeline(cut_evenly(model, 2), lowered("1f1b", 2, 2, 2, hosts="one")) as subject:
        result, output = subject.evaluate(x, y), subject.predict(x)
        assert [held.current for held in subject.held] == [0] * 4
    with torch.no_grad():
        torch.testing.assert_close(result.loss, mse(model(x), y))
        torch.testing.assert_close(output, model(x))


def test_schedules_draw_the_same_random_numbers() -> None:
    """Dropout draws in segments 0 and 2 from one generator, whatever runs between them."""
    losses = []
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        torch.manual_seed(3)
        model = build()
        for layer in model:
            if isinstance(layer, nn.Sequential):
                layer.append(nn.Dropout(0.5))
        torch.manual_seed(3)
        graph = lowered(schedule, 2, 2, 2, hosts="one")
        losses.append([float(r.loss) for r in train(model, graph, 2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] == pytest.approx(losses[2], rel=1e-12)
    assert len({*losses[0]}) == 2


class _Draw(nn.Module):
    """Passes its input on, and keeps a random number of each forward."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.numbers.append(torch.rand(()).item())
        return x


def test_segments_of_a_micro_batch_draw_one_after_the_other() -> None:
    numbers: list[float] = []
    children = [x for layer in build() for x in (layer, _Draw(numbers))]
    with pipeline([nn.Sequential(*children)], lowered("1f1b", 1, 1, 1, hosts="one")) as subject:
        subject.step(*batch(1))
    assert len(numbers) == len({*numbers}) == 5 * K


def test_autocast() -> None:
    model, (x, y) = build().float(), (part.float() for part in batch(2))
    with (
        pipeline(cut_evenly(model, 2), lowered("zb_h1", 2, 2, 2, hosts="one")) as subject,
        torch.autocast("cpu", torch.bfloat16),
    ):
        loss = subject.step(x, y).loss
        whole = mse(build().float()(x), y)
    assert float(loss) == pytest.approx(whole.item(), rel=2e-2)


def test_experts_without_tokens_have_zero_gradients() -> None:
    """An optimizer then treats them as in one process, wherever they are."""
    model = build()
    experts = model[1]
    assert isinstance(experts, px.Experts)
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[:2] = torch.tensor([[1.0], [-1.0]])
        experts.norm = None  # type: ignore[assignment]
    train(model, lowered("1f1b", 2, 2, 2, hosts="one"), 2, n_steps=1)
    for expert in experts.experts.values():
        assert all(p.grad is not None for p in expert.parameters())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_memory_is_as_predicted_to_the_byte(schedule: str) -> None:
    """Micro-batches are equal, but the experts of the two replicas get other numbers of tokens."""
    graph = lowered(schedule, 2, 2, 2, hosts="one")
    x, y = (part[:2].repeat(2 * K, 1, 1) for part in batch(1))
    one = lowered("zb_h1" if schedule == "zb_h1" else "gpipe", 2, 2, 2, hosts="one")
    with pipeline(cut_evenly(build(), 2), graph, None) as subject:
        subject.step(x, y)  # a first forward gets copies
        measured = subject.memory(x, y)
        held, left = _bytes_of_one(subject, one, x, y)
    costs = ps.Costs(
        1.0, backward=2.0, input_grad=1.0, weight_grad=1.0, expert_layers=1, expert_replicas=2,
        exchange_dispatch=0.5, exchange_combine=0.5,
        activation_bytes=_per_microbatch(held), weight_grad_bytes=_per_microbatch(left),
    )  # fmt: skip
    predicted = ps.simulate(graph, costs).memory.peak
    assert (measured.peak_activations == predicted).all()
    assert len({*predicted.tolist()}) > 2  # replicas differ


def _bytes_of_one(
    subject: px.Pipeline, graph: ps.TaskGraph, x: Any, y: Any
) -> tuple[list[int], list[int]]:
    """Return the bytes of one micro-batch of each stage of each replica, whole and after I."""
    single = ps.lower(
        ps.Schedule.from_orders([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]]),
        n_replicas=2, expert_layers=1,
    )  # fmt: skip
    assert single.homes.tolist() == graph.homes.tolist()
    alone = subject.with_graph(single)
    return alone.held_bytes(x[:4], y[:4]), alone.left_bytes(x[:4], y[:4])


def _per_microbatch(values: list[int]) -> list[list[float]]:
    """Return one value a stage and micro-batch of both replicas."""
    table = np.array(values, dtype=float).reshape(2, 2)  # replica, stage
    return np.repeat(table.T, K, axis=1).tolist()


def test_bytes_of_exchanges() -> None:
    """Two replicas with the same tokens: each sends the other half of what it routes there."""
    graph = lowered("1f1b", 1, 1, 2, hosts="one")
    (result,) = train(build(), graph, 2, n_steps=1)
    nbytes = result.timeline.nbytes
    sizes = {}
    for name in ("dispatch", "combine", "combine_grad", "dispatch_grad"):
        tasks = [
            k for k in range(len(graph))
            if graph.op[k] == Op.ALL_TO_ALL and graph.task(k).action.part >= 0
            and re.fullmatch(rf".*\.{name}\d", str(graph.task(k)))
        ]  # fmt: skip
        assert all(is_expert_exchange(graph.op[k], graph.part[k]) for k in tasks)
        sizes[name] = nbytes[tasks].sum()
    rows = 2 * 5 * 3 * 2 * 2  # replicas, samples, tokens, experts a token, layers
    counts = sizes["dispatch"] - sizes["combine_grad"]
    assert counts == 2 * K * 2 * 4 * 8  # two layers, four experts of the other, 8 bytes each
    assert sizes["combine"] == sizes["combine_grad"] == sizes["dispatch_grad"]
    assert 0 < sizes["combine"] < rows * WIDTH * 8


@pytest.mark.parametrize(("schedule", "n_stages"), [("zb_h1", 2), ("dualpipev", 4)])
def test_profile_measures_segments_and_exchanges(schedule: str, n_stages: int) -> None:
    graph = lowered(schedule, 2, n_stages, 2, hosts="one")
    n_layers = max(N_LAYERS, n_stages)
    with pipeline(cut_evenly(build(n_layers=n_layers), n_stages), graph) as subject:
        costs = px.profile(subject, *batch(2), n_steps=1, warm_up=1)
    layers = n_layers // n_stages
    assert costs.expert_layers == (layers,) * n_stages
    assert costs.expert_replicas == 2
    assert costs.recompute is None
    for seconds in (costs.exchange_dispatch, costs.exchange_combine):
        assert np.min(seconds) > 0
    shares = np.array(costs.segments)
    assert shares.shape == (n_stages, 3, 2 * layers + 1)
    assert np.allclose(shares.sum(-1), 1)
    assert (shares[:, : 2 + (schedule == "zb_h1")] > 0).all()
    timeline = ps.simulate(graph, costs)
    assert timeline.makespan > 0
    exchanges = is_expert_exchange(graph.op, graph.part)
    assert timeline.duration[exchanges].min() == pytest.approx(
        min(*costs.exchange_dispatch, *costs.exchange_combine)  # type: ignore[misc]
    )


@pytest.mark.parametrize(
    ("lowering", "message"),
    [
        ({"expert_layers": 0}, "stage 0 has 1 layers of pipeexec.Experts, but the graph was lowered"
         " with 0 (expert_layers); give lower(..., expert_layers=...)"),
        ({"expert_layers": [1, 2]}, "stage 1 has 1 layers of pipeexec.Experts, but the graph was lo"
         "wered with 2"),
        ({"recompute": "always"}, "the graph recomputes stage 0, which has layers with experts"),
        ({"n_replicas": 3}, "n_experts=8 of a layer of stage 0 is not divisible by the 3 replicas"),
    ],
)  # fmt: skip
def test_graphs_that_do_not_suit(lowering: dict[str, Any], message: str) -> None:
    graph = lowered("1f1b", 2, 2, **{"n_replicas": 2, "hosts": "one", **lowering})
    with pytest.raises(ArgumentError, match=re.escape(message)):
        pipeline(cut_evenly(build(), 2), graph)


def test_stages_that_do_not_suit() -> None:
    graph = lowered("1f1b", 1, 1, 1, hosts="one")
    dense = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ArgumentError, match=r"lowered with 2 layers with experts in stage 0"):
        pipeline([dense], graph)
    hidden = nn.Sequential(_Caller(build()[:2]), *build()[2:])
    with pytest.raises(
        ArgumentError, match=r"layer '0.inner.1' of stage 0 .* is called by a _Call"
    ):
        pipeline([hidden], graph)
    one = build(n_layers=1)
    with pytest.raises(ArgumentError, match=r"stage 0 has 1 layers of pipeexec.Experts"):
        pipeline([nn.Sequential(*one, one[1])], graph)
    two = build()
    with pytest.raises(ArgumentError, match=r"calls a layer with experts twice"):
        pipeline([nn.Sequential(*two, two[1])], graph)
    with pytest.raises(ArgumentError, match=r"has a share of its experts, but another process"):
        pipeline([build((0, 2))], lowered("1f1b", 1, 1, 2, hosts="one"))
    wrapped = lowered("1f1b", 1, 1, 1, hosts="one")
    with pytest.raises(ArgumentError, match=r"inside a OptimizedModule, which cannot be cut"):
        pipeline([torch.compile(build(), backend="eager")], wrapped)
    several = ps.lower(ps.schedule("pipedream", 2, K), expert_layers=1)
    with pytest.raises(ArgumentError, match=r"4 mini-batches, and stage 0 has layers with experts"):
        pipeline(cut_evenly(build(), 2), several)


class _Caller(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_an_expert_that_raises_is_named_by_its_segment() -> None:
    model = build()
    experts = model[3]
    assert isinstance(experts, px.Experts)
    experts.experts["0"] = nn.Linear(WIDTH + 1, WIDTH).double()
    with (
        pipeline([model], lowered("1f1b", 1, 1, 2, hosts="one")) as subject,
        pytest.raises(StageError, match=r"0F0\.3"),
    ):
        subject.step(*batch(2))


def test_the_layer_is_its_formula() -> None:
    torch.manual_seed(0)
    norm, shared = nn.LayerNorm(4), nn.Linear(4, 4)
    layer = px.Experts(
        lambda: nn.Linear(4, 4), 4, 6, 2, norm=norm, shared=shared, residual=True, normalize=True
    )
    x = torch.randn(3, 5, 4)
    expected = torch.empty_like(x)
    for place in np.ndindex(3, 5):
        hidden = norm(x[place])
        scores = layer.router(hidden).softmax(-1)
        best = scores.topk(2).indices.tolist()
        total = sum(scores[e] for e in best)
        routed = sum(scores[e] / total * layer.experts[str(e)](hidden) for e in best)
        expected[place] = x[place] + shared(hidden) + routed
    torch.testing.assert_close(layer(x), expected)


def test_a_share_has_the_names_and_values_of_the_whole() -> None:
    whole = build().state_dict()
    for k in range(2):
        part = build((k, 2)).state_dict()
        assert len(part) < len(whole)
        assert all(torch.equal(value, whole[name]) for name, value in part.items())
    with pytest.raises(ExecutionError, match=r"experts 4 to 7 of 8, so that it runs in a pipeline"):
        build((1, 2))(batch(1)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_experts": 6, "share": (0, 4)}, "n_experts=6 is not divisible by the 4 replicas of sh"),
        ({"share": (2, 2)}, "share must be (k, n) with 0 <= k < n, got (2, 2)"),
        ({"share": 2}, "share must be (k, n), the k-th of n equal parts of the experts"),
        ({"experts_per_token": 9}, "experts_per_token=9 must be at most n_experts=8"),
        ({"n_experts": 0}, "n_experts must be at least 1, got 0"),
        ({"width": 2.5}, "width must be"),
        (
            {"expert": nn.Linear(4, 4).weight},
            "expert must be a function, called as expert(), which",
        ),
        ({"expert": lambda: 3}, "expert() must be a torch.Module, got 3 (int); return a module"),
        ({"norm": 3}, "norm must be a torch.Module, got 3 (int)"),
        ({"residual": 1}, "residual must be True or False, got 1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    good = {"expert": lambda: nn.Linear(4, 4), "width": 4, "n_experts": 8}
    with pytest.raises(ArgumentError, match=re.escape(message)):
        px.Experts(**{**good, **options})


def test_experts_that_share_a_parameter_are_refused() -> None:
    one = nn.Linear(4, 4)
    with pytest.raises(ArgumentError, match=r"experts 0 and 1 share a parameter; expert must make"):
        px.Experts(lambda: one, 4, 4)


def test_costs_can_be_changed_for_a_prediction() -> None:
    """Half of the seconds of an exchange, and nothing else."""
    graph = lowered("dualpipev", 2, 4, 1)
    costs = ps.Costs(
        4, input_grad=4, weight_grad=4, expert_layers=1, exchange_dispatch=1, exchange_combine=1
    )
    faster = replace(costs, exchange_dispatch=0.5, exchange_combine=0.5)
    assert ps.simulate(graph, faster).makespan < ps.simulate(graph, costs).makespan
