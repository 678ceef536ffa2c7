"""Numbers too large or too small to calculate with are refused, with their place, and never inf."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError, NetworkError, TimelineError
from pipesim.simulation import Empirical, Failures, LogNormal, Normal

GRAPH = ps.lower(ps.schedule("1f1b", 4, 8))
REPLICAS = ps.lower(ps.schedule("1f1b", 4, 8), n_replicas=2)
NOISE = ps.Noise(seed=0, task=Normal(0.1))
LINE = ps.Placement.linear(4)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "n_layers": 4, "n_heads": 4, "sequence_length": 8, "vocabulary_size": 16,
}  # fmt: skip


def costs(**fields: Any) -> ps.Costs:
    return ps.Costs(**{"forward": 1, "backward": 2, **fields})


@pytest.fixture(autouse=True)
def _no_warnings() -> Any:
    """An error is enough: numpy warns of no overflow besides."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("engine", ["compiled", "simpy"])
@pytest.mark.parametrize(
    ("fields", "noise", "message"),
    [
        ({"forward": 1e307}, None, r"0F0 \(task 0\) would end at 1e\+307 s"),
        ({"launch": 1e308}, None, r"0F0 \(task 0\) would end at 1e\+308 s"),
        ({"network": ps.Network(latency=1e308)}, None, r"1RECV_F0 .* would end at 1e\+308 s"),
        ({"output_bytes": 1e300, "network": ps.Network(0, 1e-300)}, None, "0SEND_F0 .* got inf"),
        ({"backward": None, "input_grad": 1e308, "weight_grad": 1e308}, None, "backward of s"),
        ({}, {"failures": Failures(1, 1e308)}, r"0F0 \(task 0\) would end at 1e\+308 s"),
        ({"forward": 10}, {"slow_devices": {0: 1e308}}, "a task may last inf s"),
        ({}, {"device": Empirical([1] * 99 + [1e200]), "task": Empirical([1e-200, 1])}, None),
    ],
)  # fmt: skip
def test_endless_times(
    engine: str, fields: dict[str, Any], noise: dict[str, Any] | None, message: str | None
) -> None:
    """The first task that would end beyond any time is named."""
    drawn = None if noise is None else ps.Noise(seed=0, **noise)
    if message is None:
        assert np.isfinite(ps.simulate(GRAPH, costs(), noise=drawn).makespan)
        return
    with pytest.raises(CostsError, match=message):
        ps.simulate(GRAPH, costs(**fields), engine=engine, noise=drawn)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ps.simulate_many(GRAPH, costs(), ps.Noise(seed=0, failures=Failures(1, 1e308)),
                                  4, progress=False), CostsError, r"0F0 .* 1e\+308 s"),
        (lambda: ps.simulate(GRAPH, costs(activation_bytes=1.7e308)).memory.peak, CostsError,
         "device 0 would hold inf bytes"),
        (lambda: ps.simulate(GRAPH, costs(parameter_bytes=1.7e308)).memory.peak, CostsError,
         "device 0 would hold inf bytes"),
        (lambda: ps.simulate(GRAPH, costs(activation_bytes=1.7e308)).memory(), CostsError,
         "device 0 would hold inf bytes"),
        (lambda: ps.Timeline(GRAPH, np.zeros(len(GRAPH)), np.full(len(GRAPH), np.inf)),
         TimelineError, "end of a task is inf s"),
        (lambda: ps.simulate(GRAPH, costs(forward=5e-324, backward=0)).throughput, TimelineError,
         "too short a time for a throughput"),
        (lambda: costs(forward=1e308).scaled(10), CostsError, "forward must be finite"),
        (lambda: ps.simulate(REPLICAS, costs(parameter_bytes=1e300, network=ps.Network(0, 1e-200))),
         NetworkError, r"all-reduce of 1e\+300 bytes over 2 members would last inf s"),
        (lambda: ps.Network(nodes=ps.Nodes(8, 0, 5e-324, 0, 5e-324, 1)).all_reduce(1, range(16)),
         NetworkError, "all-reduce of 1 bytes over 16 members would last inf s"),
        (lambda: ps.Network(0, 1e-300).all_to_all(1e300, range(4)), NetworkError, "last inf s"),
        (lambda: ps.order_by(LINE, 8, ps.Costs(1e308, input_grad=1, weight_grad=1)),
         CostsError, "the seconds of 8 micro-batches"),
        (lambda: ps.order_by(LINE, 8, ps.Costs(1, input_grad=1, weight_grad=1,
                                               activation_bytes=1e308)),
         CostsError, "the bytes of 8 micro-batches"),
        (lambda: ps.order_by(LINE, 8, ps.Costs(1, input_grad=1, weight_grad=1,
                             output_bytes=1e300, network=ps.Network(0, 1e-300))),
         CostsError, "a message from device 0 to 1 would take inf s"),
        *((lambda name=name: ps.schedule(name, 4, 8, costs=ps.Costs(1e308, input_grad=1e308,
                                         weight_grad=1)), CostsError, "add up to more than")
          for name in ("zb_1p", "zb_2p", "v_min", "v_half")),
        (lambda: ps.Layers({"forward": [1e308, 1e308], "backward": [1, 1]}).costs([2]),
         CostsError, "forward of stage 0: the sum of 2 layers"),
        (lambda: ps.Layers({"forward": [1e308, 1], "backward": [1e308, 1]}).costs(2),
         CostsError, "seconds of layer 0 must be finite"),
        (lambda: ps.Transformer(**{**SIZES, "hidden_size": 4 * 10**200}), ArgumentError,
         r"hidden_size must be at most 1e\+15"),
        (lambda: ps.Transformer(**SIZES).costs(2, microbatch_size=10**400, flops_per_second=1),
         ArgumentError, r"microbatch_size must be at most 1e\+15"),
        (lambda: ps.Transformer(**SIZES, bytes_per_activation=1e308), ArgumentError,
         r"bytes_per_activation must be at most 1e\+100"),
        (lambda: ps.Transformer(**SIZES).costs(2, microbatch_size=1, flops_per_second=1e308,
                                               tensor_parallel=4),
         ArgumentError, r"flops_per_second must be at most 1e\+100"),
        (lambda: LogNormal(1e308), ArgumentError, "sigma must be at most 3"),
        (lambda: ps.Noise(seed=0, failures=Failures(5e-324, 1), gpus_per_device=10**6),
         ArgumentError, "every=5e-324 s of one GPU, over gpus_per_device=1000000, is too small"),
        (lambda: Empirical(["1", "2"]), ArgumentError, "samples must be numbers.*'1' .str"),
        (lambda: Empirical(np.array(["1"])), ArgumentError, "samples must be numbers.*'1' .str"),
        (lambda: Empirical([True, False]), ArgumentError, "samples must be numbers.*True .bool"),
        (lambda: Empirical(np.array([True])), ArgumentError, "samples must be numbers.*True"),
        (lambda: Empirical([1, 10**400]), ArgumentError, "samples must be finite"),
    ],
)  # fmt: skip
def test_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    """Whatever is too large, too small or no number."""
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("value", [1e308, 5e-324, 3.0])
def test_empirical_of_any_size(value: float) -> None:
    """Equal samples are the factor 1, however large; no sum of them overflows."""
    graph = ps.lower(ps.schedule("gpipe", 1, 2))
    noise = ps.Noise(seed=0, task=Empirical([value] * 10))
    assert ps.simulate(graph, costs(), noise=noise).makespan == 6.0


def test_log_normal_has_mean_1_at_its_limit() -> None:
    """Of the table of draws; beyond the limit of sigma it would miss more and more."""
    from pipesim.simulation.distributions import tabulated

    table = tabulated(LogNormal(3), 1)
    inner = table[0, 1:-1].sum() + table[1].mean() + table[2].mean()
    assert inner / table.shape[1] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("scenario", ["x", -1, 1.5, 3, True])
def test_a_scenario_is_checked_without_noise(scenario: Any) -> None:
    """There is nothing to tell scenarios apart, so there is one."""
    with pytest.raises(ArgumentError, match="scenario"):
        ps.simulate(GRAPH, costs(), scenario=scenario)
    assert ps.simulate(GRAPH, costs(), scenario=np.int64(0)).makespan == 33


@dataclass(frozen=True)
class Own:
    """A distribution of the user's own, whose quantiles are ``values``."""

    values: Callable[[Any], Any]

    def quantile(self, level: Any) -> Any:
        return self.values(level)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda level: None, "must return an array of factors of the shape.*got NoneType"),
        (lambda level: "x", "got str 'x'"),
        (lambda level: 1.0, "got float 1.0"),
        (lambda level: np.ones(3), "got ndarray"),
        (lambda level: np.full(level.shape, "1.0"), "got ndarray"),
        (lambda level: level * 1j, "got ndarray"),
        (lambda level: np.full(level.shape, np.nan), "factors must be finite"),
        (lambda level: 1 / 0, "raised ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.parametrize("what", ["task", "device", "message"])
def test_a_distribution_of_the_users_own(values: Any, message: str, what: str) -> None:
    """It is named, and what it returned."""
    noise = ps.Noise(seed=0, **{what: Own(values)})
    with pytest.raises(ArgumentError, match=message):
        ps.simulate(GRAPH, costs(), noise=noise)
    with pytest.raises(ArgumentError, match=message):
        ps.simulate_many(GRAPH, costs(), noise, 2, progress=False)
