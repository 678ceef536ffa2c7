"""Reports of splits: sizes and measured seconds of stages, and predicted steps."""

from __future__ import annotations

import pytest
import torch
from split_models import WIDTH, Language
from torch import nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import ArgumentError, ExecutionError, PipeError

SAMPLE = torch.ones(3, WIDTH)


def layers(n: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n)))


def test_a_row_a_stage():
    """Sizes are exact, seconds are measured."""
    table = px.split(layers(), [3, 1], sample=SAMPLE).report().table
    assert table["modules"].tolist() == ["0 to 2", "3"]
    assert table["layers"].tolist() == [3, 1]
    assert table["parameters"].tolist() == [3 * WIDTH * (WIDTH + 1), WIDTH * (WIDTH + 1)]
    assert table["flops"].tolist() == [n * 2 * len(SAMPLE) * WIDTH**2 for n in (3, 1)]
    assert table["activation_bytes"].tolist() == [3 * SAMPLE.nbytes, SAMPLE.nbytes]
    assert table["message_bytes"].tolist() == [SAMPLE.nbytes, 0]
    assert (table[["forward", "backward"]] > 0).all(axis=None)


def test_predicted_steps():
    """Makespans are those that the simulator has for the report's costs."""
    stages = px.split(layers(), 4, sample=SAMPLE)
    own = ps.schedule("1f1b", 4, 3)
    names = ("gpipe", "zb_h1", "interleaved_1f1b", "zbv")
    report = stages.report(schedules=(*names, own), n_microbatches=6)
    assert list(report.makespans) == [*names, own.name]
    for name, n_devices in zip(names, (4, 4, 2, 2), strict=True):
        graph = ps.lower(ps.schedule(name, n_devices, 6))
        assert report.makespans[name] == ps.simulate(graph, report.costs).makespan
        assert report.n_devices[name] == n_devices
    assert report.makespans[own.name] == ps.simulate(ps.lower(own), report.costs).makespan
    assert report.costs.forward == tuple(report.table["forward"])


def test_text():
    """Units, and how seconds were measured."""
    text = str(px.split(layers(), 2, sample=SAMPLE).report())
    lines = text.splitlines()
    assert lines[0] == "2 stages of Sequential, by nn.Sequential"
    assert lines[1].split() == [
        "stage", "modules", "layers", "parameters", "FLOPs", "forward", "backward", "activations",
        "message",
    ]  # fmt: skip
    assert lines[2].split()[:6] == ["0", "0", "to", "1", "2", "544"]
    assert "measured on cpu of this machine, one thread" in lines[4]
    assert "Predicted step of 8 micro-batches, ideal links: gpipe " in lines[5]
    assert " on 2 devices, 1f1b " in lines[5]


def test_a_larger_batch():
    """Sizes are those of the batch, by default of the sample."""
    words = torch.zeros(2, 3, dtype=torch.long)
    stages = px.split(Language(), 2, sample=words)
    small, large = stages.report().table, stages.report(words.repeat(5, 1)).table
    assert (large["flops"] == 5 * small["flops"]).all()
    assert large["message_bytes"][0] == 5 * small["message_bytes"][0]
    assert (large["parameters"] == small["parameters"]).all()


def test_the_model_stays_as_it_was():
    """Running statistics, random numbers and gradients."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    px.split(model, 2, sample=SAMPLE).report()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"schedules": ["gpip"]}, PipeError, "did you mean 'gpipe'"),
        ({"schedules": ["zbv"]}, ArgumentError, "'zbv' has 2 stages, and the split 3"),
        ({"schedules": [ps.schedule("gpipe", 2, 2)]}, ArgumentError, "has 2 stages, and the split"),
        ({"schedules": "gpipe"}, PipeError, "schedules must be"),
        ({"n_microbatches": 0}, ArgumentError, "n_microbatches must be"),
        ({"batch": (SAMPLE, SAMPLE)}, ArgumentError, "the batch is nested as"),
        ({"batch": torch.ones(2, 3)}, ExecutionError, "stage 0 fails: RuntimeError"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        px.split(layers(3), 3, sample=SAMPLE).report(**options)


def test_stages_of_other_processes():
    with pytest.raises(ExecutionError, match=r"stages \[1\] are those of other processes"):
        px.split(layers(), 2, sample=SAMPLE, only=[0]).report()
