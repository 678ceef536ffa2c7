"""`px.project`: bytes are those of pipelines, the model stays as it is, and what is refused."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from small_pipelines import Nap, mse
from split_models import Language, Residual, Translation
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.thread_settings import one_thread
from pipeexec.projection import project as projecting
from pipeexec.projection.layer_seconds import LayerSeconds
from pipesim.analysis.measured_costs import output_bytes
from pipesim.errors import AccuracyWarning, ArgumentError, ExecutionError, PipeError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning")


def cluster(n: int = 2) -> ps.Cluster:
    gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
    return ps.Cluster(n_gpus=n, gpu=gpu, network=ps.Network(latency=1e-4, bandwidth=1e9))


def words() -> torch.Tensor:
    return torch.arange(24).reshape(3, 8) % 11


def word_loss(output, targets):
    return F.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())


def blocks(n: int, seconds: tuple[float, float] = (0.0, 0.0)) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Nap(*seconds)) for _ in range(n)))


class Repeated(nn.Module):
    """Calls one module four times."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.body(x).tanh()
        return x


MODELS = {
    "language": (
        lambda: Language(3),
        {"words": words(), "mask": torch.ones(3, 8)},
        words(),
        word_loss,
        [("words", "places", "dropout"), *((f"blocks.{k}",) for k in range(3)), ("norm", "head")],
    ),
    "residual": (
        Residual,
        torch.ones(2, 3, 8, 8),
        torch.zeros(2, dtype=torch.long),
        F.cross_entropy,
        [("first", "groups.0.0"), ("groups.0.1",), ("groups.1.0",), ("groups.1.1", "head")],
    ),
    "translation": (
        Translation,
        (words(), words()),
        torch.zeros(3, 8, 16),
        mse,
        None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_pipelines(name):
    """Of stages of any layers: activations, bytes between I and W, messages, parameters."""
    make, sample, targets, loss, modules = MODELS[name]
    model = make()
    projection = px.project(
        model, sample, cluster(), targets=targets, loss_fn=loss, n_steps=1, warm_up=0
    )
    n = len(projection.layers)
    if modules is not None and name == "language":
        assert projection.modules == tuple(modules)
    for sizes in ([n // 2, n - n // 2], [1, n - 1]):
        costs = projection.costs(sizes)
        stages = px.split(model, projection.blocks(sizes), sample=sample)
        assert projection.tied_stages(sizes) == stages.tied_stages
        graph, halves = (
            ps.lower(ps.schedule(order, len(sizes), 1), step="none", tied=stages.tied_stages)
            for order in ("gpipe", "zb_h1")
        )
        devices = ["cpu"] * len(sizes)
        with px.Pipeline(stages, graph, devices, loss, pin_threads=False) as pipeline:
            result = pipeline.step(sample, targets)
            assert tuple(pipeline.held_bytes(sample, targets)) == costs.activation_bytes
            left = pipeline.with_graph(halves).left_bytes(sample, targets)
        assert tuple(output_bytes(result.timeline)) == costs.output_bytes
        parameters = [sum(p.nbytes for p in stage.parameters()) for stage in stages]
        if name == "translation":  # decoders keep one output of the encoder, and share words
            assert all(a <= b for a, b in zip(left, costs.weight_grad_bytes, strict=True))
            assert all(a <= b for a, b in zip(parameters, costs.parameter_bytes, strict=True))
        else:
            assert (tuple(left), tuple(parameters)) == (
                costs.weight_grad_bytes, costs.parameter_bytes,
            )  # fmt: skip


def test_shared_tensors_count_once():
    """A ReLU saves the tensor that the next layer receives, so that sums would be too large."""
    projection = px.project(
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))),
        torch.ones(2, 4), cluster(), n_steps=1, warm_up=0, split_backward=False,
    )  # fmt: skip
    assert projection.layers.columns["activation_bytes"] == (64, 64, 64)
    assert projection.costs([3]).activation_bytes == (4 * 32,)  # not 192
    assert "input_grad" not in projection.layers.columns


class Functions(nn.Module):
    """Calls no module."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4, 4)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


@pytest.mark.slow
def test_functions_alone():
    """A model without modules is cut by its graph, and so are its layers."""
    projection = px.project(Functions(), torch.ones(2, 4), cluster(), n_steps=1, warm_up=0)
    assert projection.n_blocks == (1, 1, 1, 1)
    assert projection.costs([1, 3]).parameter_bytes == (64, 192)


@pytest.mark.parametrize("model", [Language(2), Repeated()])
def test_blocks(model):
    """Blocks of stages are counted as `px.split` counts them, of repeated modules too."""
    sample = words() if isinstance(model, Language) else torch.ones(2, 4)
    projection = px.project(model, sample, cluster(), n_steps=1, warm_up=0)
    assert len(projection.layers) == 4
    for sizes in ([1, 3], [2, 2], [1, 2, 1]):
        stages = px.split(model, projection.blocks(sizes), sample=sample)
        names = [name for part in stages.modules for name in part]
        assert names == [
            x for part in projection.modules for x in part if isinstance(model, Language)
        ] or set(names) == {"body"}
        assert [len(stages), sum(sizes)] == [len(sizes), len(projection.layers)]


@pytest.mark.slow
def test_one_layer_at_a_time():
    """A model that a function makes gives the same bytes, with data of one layer at a time."""
    sample = {"words": words()}
    options = {
        "targets": words(), "loss_fn": word_loss, "optimizer": torch.optim.Adam, "n_steps": 1,
        "warm_up": 0,
    }  # fmt: skip
    one, two, three = (
        px.project(make, sample, cluster(), **options, **other)
        for make, other in (
            (lambda: Language(2), {}),
            (Language(2), {}),
            (Language(2), {"layers_at_once": 3}),
        )
    )
    assert one.modules == two.modules == three.modules
    for name, column in two.layers.columns.items():
        if name.endswith("bytes"):
            assert one.layers.columns[name] == column == three.layers.columns[name]
        assert len(one.layers.columns[name]) == 4
    assert one.layers.joint_activation_bytes == two.layers.joint_activation_bytes
    assert two.layers.columns["optimizer_bytes"][0] > 2 * two.layers.columns["parameter_bytes"][0]


def test_the_model_stays():
    """Weights, gradients, buffers and random numbers are those of before."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(2))
    )
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    px.project(model, torch.ones(3, 4), cluster(), optimizer=torch.optim.Adam, n_steps=1, warm_up=0)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_seconds_of_layers():
    """Each layer has its seconds, of each operation; the first one has no input gradient."""
    model = nn.Sequential(*blocks(1, (0.002, 0.004)), *blocks(1, (0.008, 0.001)), *blocks(1))
    projection = px.project(model, torch.ones(1, 4), cluster(), n_steps=1, warm_up=1)
    columns = projection.layers.columns
    assert columns["forward"][0] >= 0.002
    assert columns["forward"][1] >= 0.008
    assert columns["recompute"][1] >= 0.008
    assert columns["backward"][1] >= 0.001
    assert columns["input_grad"][0] >= 0.004
    assert projection.launch > 0
    assert list(projection.table["modules"]) == ["0", "1", "2"]


def test_stages_sum_their_layers(monkeypatch):
    """Known seconds of layers, wherever they are measured, are those of the layers' stages."""

    def measured(modules, device, optimizer, **options):
        own = [float(sum(p.numel() for p in module.parameters())) for module in modules]
        columns = {"forward": own, "backward": [2 * x for x in own]}
        return LayerSeconds(columns, [0.3] * len(own), own, 1e-6)

    monkeypatch.setattr(projecting, "measure_layers", measured)
    model = nn.Sequential(*(nn.Linear(k, k + 1, bias=False) for k in range(1, 6)))
    for at_once in (None, 1, 2):
        with pytest.warns(AccuracyWarning, match=r"layer 0 \(0\) moves by 30%"):
            projection = px.project(model, torch.ones(7, 1), cluster(), layers_at_once=at_once)
        assert projection.microbatch_size == 7
        assert projection.layers.columns["forward"] == (2, 6, 12, 20, 30)
        costs = projection.costs([2, 3])
        assert (costs.forward, costs.backward) == ((8, 62), (16, 124))
        assert costs.launch == 1e-6
        assert costs.network == ps.Network(latency=1e-4, bandwidth=1e9)


def test_busy_workers(monkeypatch):
    """Copies of the layers run in other threads meanwhile, and the model stays as it is."""
    threads = set()
    monkeypatch.setattr(projecting, "available_cores", lambda: range(3))

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            threads.add(threading.current_thread().ident)
            return super().forward(x)

    model = nn.Sequential(Watched(4, 4), Watched(4, 4))
    before = copy.deepcopy(model.state_dict())
    alive = threading.active_count()
    px.project(model, torch.ones(2, 4), cluster(), optimizer=torch.optim.Adam, n_busy=2, n_steps=2)
    assert len(threads) == 1 + 3  # bytes are counted in the caller's thread
    assert threading.active_count() == alive
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_busy_workers_fail(monkeypatch):
    """An optimizer that fails on the copies alone is reported; so are too few cores."""
    monkeypatch.setattr(projecting, "available_cores", lambda: range(2))
    with pytest.raises(ArgumentError, match="n_busy=2 workers beside the profiled one need 3"):
        px.project(blocks(2), torch.ones(2, 4), cluster(), n_busy=2)
    calls = []

    def optimizer(parameters):
        result = torch.optim.SGD(parameters, lr=0.1)
        calls.append(result)
        if len(calls) == 1:  # of the busy worker, which comes first
            result.step = lambda *_: 1 / 0
        return result

    with pytest.raises(PipeError, match="a busy worker failed"):
        px.project(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4), cluster(),
            optimizer=optimizer, n_busy=1, n_steps=1, warm_up=0,
        )  # fmt: skip


def test_a_predicted_step_runs():
    """The graph and the cuts of a prediction are those of a pipeline that runs."""
    model, sample = Language(3), words()
    with one_thread():
        projection = px.project(
            model, sample, cluster(), targets=sample, loss_fn=word_loss, n_steps=1, warm_up=0
        )
    timeline = projection.predict("interleaved_1f1b", 2, 2, n_chunks=2)
    placement = ps.schedule("interleaved_1f1b", 2, 2, n_chunks=2).placement
    blocks = projection.blocks("balanced", placement=placement)
    stages = px.split(model, blocks, sample=sample)
    batch = torch.cat([sample, sample])
    with px.Pipeline(stages, timeline.graph, ["cpu"] * 2, word_loss, pin_threads=False) as run:
        assert run.step(batch, batch).timeline.n_devices == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": nn.ReLU()}, ArgumentError, "calls no module that has parameters"),
        ({"model": 3}, PipeError, "model must be"),
        ({"sample": "text"}, ArgumentError, "sample has no tensor"),
        ({"sample": torch.ones(2, 5)}, ExecutionError, "fails on the sample"),
        ({"sample": {"words": torch.ones(2, 4)}}, ExecutionError, "fails on the sample"),
        ({"cluster": "dgx_h1000"}, PipeError, "unknown machine of cluster 'dgx_h1000'"),
        ({"cluster": 8}, PipeError, "cluster must be a pipesim.Cluster"),
        ({"targets": torch.ones(2)}, ArgumentError, "targets are given, but no loss_fn"),
        ({"loss_fn": lambda output, _: output}, ExecutionError, "must return a tensor of one elem"),
        ({"device": "tpu"}, ArgumentError, "'tpu' is no device"),
        ({"microbatch_size": 0}, ArgumentError, "microbatch_size must be at least 1"),
        ({"layers_at_once": 0}, ArgumentError, "layers_at_once must be at least 1"),
        ({"n_busy": -1}, ArgumentError, "n_busy must be at least 0"),
        ({"n_steps": 0}, ArgumentError, "n_steps must be at least 1"),
        (
            {"model": blocks(2).requires_grad_(False)},
            ArgumentError,
            "no parameter of the model is trained",
        ),
        ({"optimizer": lambda _: 3}, PipeError, "optimizer"),
    ],
)
def test_refused(change, error, message):
    arguments = {"model": blocks(2), "sample": torch.ones(2, 4), "cluster": cluster()} | change
    with pytest.raises(error, match=message):
        px.project(**arguments, n_steps=1) if "n_steps" not in change else px.project(**arguments)


def test_a_name_is_one_node():
    """The name of a machine stands for one node of it."""
    projection = px.project(blocks(2), torch.ones(2, 4), "dgx_h100", n_steps=1, warm_up=0)
    assert projection.cluster == ps.Cluster("dgx_h100", n_gpus=8)
