"""Numbers of numpy's and of `fractions` are numbers, and what holds them can be saved."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.simulation import Failures, LogNormal, Normal

KINDS = [np.float32, np.float64, np.int64, Fraction, int]


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_saved(kind: Any, tmp_path: Path) -> None:
    """Whatever kind of number they, their network, its links and nodes were made of."""
    two, nodes = kind(2), ps.Nodes(8, kind(2), kind(2), kind(2), kind(2))
    for network in (
        ps.Network(two, two),
        ps.Network(links=[ps.Link(two, two, ((np.int64(0), 1),))]),
        ps.Network(nodes=nodes),
    ):
        costs = ps.Costs(
            forward=two, backward=(two, two), skip_bytes={(0, 1): two}, network=network
        )
        costs.save(tmp_path / "costs.json")
        assert ps.Costs.load(tmp_path / "costs.json") == costs


@pytest.mark.parametrize("kind", KINDS)
def test_fields_are_plain_floats(kind: Any) -> None:
    """So that they print, hash and compare as floats do."""
    sizes = {"hidden_size": 4, "n_layers": 2, "n_heads": 1, "sequence_length": 2}
    model = ps.Transformer(**sizes, vocabulary_size=np.int64(4), bytes_per_parameter=kind(2))
    assert type(model.bytes_per_parameter) is float
    assert type(model.shard(tensor_parallel=np.int64(1)).tensor_parallel) is int
    noise = ps.Noise(
        seed=np.int64(1),
        slow_devices={0: kind(2)},
        slow_links={(0, 1): kind(2)},
        failures=Failures(kind(2), kind(2)),
    )
    assert noise.failures is not None
    values = (
        *noise.slow_devices.values(),
        *noise.slow_links.values(),
        noise.failures.every,
        noise.failures.pause,
        Normal(kind(2)).std,
        LogNormal(kind(2)).sigma,
    )
    assert {(type(value), value) for value in values} == {(float, 2.0)}


def test_a_sweep_takes_them() -> None:
    """As costs do."""
    base = {"schedule": "gpipe", "n_devices": 2, "backward": 1, "n_microbatches": 2}
    table = ps.sweep([{**base, "forward": Fraction(1, 2)}], n_jobs=1, progress=False)
    assert table["makespan"][0] == 4.5
    assert table["error"].isna().all()


def test_numbers_of_thousands_of_digits_are_refused() -> None:
    """Python writes no such number: the message says how long it is."""
    for value in (-(10**5000), 10**5000):
        with pytest.raises(ArgumentError, match="more than 30 digits"):
            ps.GPU(flops=value, bandwidth=1.0)
    with pytest.raises(ArgumentError, match="at least 1, got a number of more than 30 digits"):
        ps.schedule("1f1b", -(10**5000), 4)
