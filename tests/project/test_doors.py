"""One meaning of a limit, of an efficiency and of parts of costs, whichever function takes them.

Each table names all public functions with such an argument: a new one must be put into it.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from command_output import succeed
from public_names import public_values
from torch import nn

import pipeexec as px
import pipesim as ps
from pipesim.cli import main
from pipesim.errors import ArgumentError, CalibrationWarning, CostsWarning, PipeError
from pipesim.network.sources import EFFICIENCY
from pipesim.scheduling.registry import options_of_schedules
from pipesim.utils.accessors import Subject

MACHINE = "dgx_h100"
#: Devices hold 8, 2, 2 and 8 bytes of parameters and gradients, and 1 byte a micro-batch.
PARAMETERS = [4.0, 1.0, 1.0, 4.0]
COSTS = ps.Costs(
    1, 2, input_grad=1, weight_grad=1, activation_bytes=1, weight_grad_bytes=0.5,
    parameter_bytes=PARAMETERS,
)  # fmt: skip
CONFIG = """
devices = 4
microbatches = 6
[costs]
forward = [1, 1, 3, 1]
input_grad = 1
weight_grad = 1
activation_bytes = 1
parameter_bytes = [4, 1, 1, 4]
"""
TIMELINE = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 2)), COSTS)
LAYERS = ps.Layers(
    {"forward": [1] * 4, "input_grad": [1] * 4, "weight_grad": [1] * 4, "activation_bytes": [1] * 4,
     "parameter_bytes": PARAMETERS}
)  # fmt: skip
MODEL = ps.Transformer(
    hidden_size=256, n_layers=4, n_heads=4, sequence_length=128, vocabulary_size=512
)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield all public functions and methods, with their names."""
    for name, value in public_values():
        yield from with_members(name, value, inspect.isclass(value))


def with_members(
    name: str, value: Any, has_methods: bool
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield a function, or a class with its methods and those of its accessors."""
    if callable(value):
        yield name, value
    for key in [x for x in dir(value) if x[0] != "_"] if has_methods else ():
        member = getattr(value, key)
        is_view = inspect.isclass(member) and issubclass(member, Subject)
        yield from with_members(f"{name}.{key}", member, is_view)


def functions_with(*arguments: str) -> set[str]:
    """Return the names of public functions with one of these arguments, and of schedules."""
    names = set()
    for name, function in functions():
        if not callable(function):
            continue
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            continue
        if {*arguments} & {*parameters}:
            names.add(name)
    options = options_of_schedules().items()
    return names | {name for name, own in options if {*arguments} & {*own}}


# Arguments of unknown names.


def test_arguments_of_unknown_names_are_refused() -> None:
    """By classes and functions of both packages; with the nearest name, if one is near."""
    for package in (ps, px):
        for name in package.__all__:
            door = getattr(package, name)
            if isinstance(door, ModuleType) or not callable(door) or name in ("Action", "Op"):
                continue
            parameters = inspect.signature(door).parameters
            if not parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
                continue
            with pytest.raises(PipeError, match=rf"{name} takes no argument 'qqq'; it takes ") as e:
                door(qqq=1)
            assert isinstance(e.value, TypeError)
    for call, message in {
        lambda: ps.Network(bandwith=1): "Network takes no argument 'bandwith'; did you mean 'band",
        lambda: ps.Transformer(vocabulary=1): "did you mean 'vocabulary_size'",
        lambda: ps.plan(None, None, global_batchs=1): "did you mean 'global_batch'",
        lambda: ps.plan(None, None, sequence_length=1): r"\(pipesim.Transformer takes 'seq",
        lambda: ps.simulate(None, None, memory=1): "did you mean 'memory_limit'",
        lambda: ps.Network.preset(MACHINE, efficency=1): "preset takes no .* 'efficiency'",
        lambda: ps.Network().scaled(bandwith=1): "Network.scaled takes no .* 'bandwidth'",
        lambda: ps.Cluster(MACHINE, 8).scaled(bandwith=1): "Cluster.scaled takes no",
        lambda: ps.GPU.preset("a100_40gb", lunch=1): "did you mean 'launch'",
        lambda: COSTS.scaled(2, ops="F"): "did you mean 'op'",
        lambda: ps.Timeline.from_chrome("x", patern=1): "did you mean 'pattern'",
    }.items():
        with pytest.raises(TypeError, match=message):
            call()


# Limits of memory: each function returns or predicts a timeline that simulate finds to fit.


def fits(order: ps.Schedule, limit: Any, costs: ps.Costs = COSTS) -> bool:
    """Return whether an order fits; `simulate` counts all bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(ps.simulate(ps.lower(order), costs, memory_limit=limit).memory.fits)


def bound_is_kept(limit: Any) -> bool:
    """A limit that is too small for any order is refused, with the bytes of parameters in it."""
    return ps.lower_bound(ps.Placement.linear(4), 6, COSTS, limit) > 0


def chosen(limit: Any) -> list[int]:
    """Return the layers of each stage of the balanced split under a limit."""
    schedule = ps.schedule("1f1b", 2, 2)
    return list(LAYERS.split("balanced", placement=schedule, memory_limit=limit))


def costs_within(limit: Any) -> bool:
    schedule = ps.schedule("1f1b", 2, 2)
    costs = LAYERS.costs("balanced", placement=schedule, memory_limit=limit)
    return fits(schedule, limit, costs)


def costs_of_layers_within(limit: Any) -> bool:
    schedule = ps.schedule("1f1b", 2, 2)
    costs = ps.Costs.from_layers(LAYERS, "balanced", placement=schedule, memory_limit=limit)
    return fits(schedule, limit, costs)


def transformer_within(limit: Any) -> bool:
    schedule = ps.schedule("1f1b", 2, 2)
    costs = MODEL.costs(
        "balanced", placement=schedule, memory_limit=limit, microbatch_size=1, gpu="h100_sxm"
    )
    return fits(schedule, limit, costs)


def plan_within(limit: Any) -> bool:
    cluster = ps.Cluster(MACHINE, n_gpus=2)
    plans = ps.plan(LAYERS, cluster, global_batch=2, memory_limit=limit, progress=False)
    timeline = plans.best.timeline
    return bool((timeline.memory.peak <= 14).all())


def split_model_within(limit: Any) -> bool:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    stages = px.split(model, 2, sample=torch.ones(2, 8), memory_limit=limit, balance="memory")
    return len(stages.modules) == 2


#: Functions with a limit of memory, as a function of it that tells whether the result fits.
MEMORY: dict[str, Callable[[Any], bool]] = {
    "ps.simulate": lambda limit: fits(ps.schedule("1f1b", 4, 6), limit) is not None,
    "ps.compare": lambda limit: (
        ps.compare({"x": TIMELINE}, memory_limit=limit).loc["x", "fits"]
    ),
    "ps.order_by": lambda limit: fits(
        ps.order_by(ps.Placement.linear(4), 6, COSTS, memory_limit=limit), limit
    ),
    "ps.optimize": lambda limit: fits(
        ps.optimize(
            ps.Placement.linear(4), 6, COSTS, memory_limit=limit, seconds=0.5, progress=False
        ),
        limit,
    ),
    "zb_1p": lambda limit: fits(ps.schedule("zb_1p", 4, 6, costs=COSTS, memory_limit=limit), limit),
    "zb_2p": lambda limit: fits(ps.schedule("zb_2p", 4, 6, costs=COSTS, memory_limit=limit), limit),
    "ps.lower_bound": bound_is_kept,
    "ps.Layers.split": lambda limit: fits(
        ps.schedule("1f1b", 2, 2), limit, LAYERS.costs(chosen(limit))
    ),
    "ps.Layers.costs": costs_within,
    "ps.Costs.from_layers": costs_of_layers_within,
    "ps.Transformer.costs": transformer_within,
    "ps.plan": plan_within,
    "px.split": split_model_within,
}  # fmt: skip
#: A limit in which the parameters of device 0 fit, and not a micro-batch beside them.
TOO_LOW = 8.5


def test_each_function_with_a_limit_is_known() -> None:
    draws = {"ps.plot.plan_front"}
    assert functions_with("memory_limit") - draws == {*MEMORY}


@pytest.mark.parametrize("name", MEMORY)
def test_a_limit_is_all_bytes_of_a_device(name: str) -> None:
    """As a text, it is that many bytes; orders that a function makes fit by `simulate`."""
    limits: list[Any] = ["12B", 12.0]
    if name in ("ps.Transformer.costs", "px.split"):
        limits = ["1GB", 1e9]
    if name in ("ps.Layers.split", "ps.Layers.costs", "ps.Costs.from_layers", "ps.plan"):
        limits = ["14B", 14.0]
    for limit in limits:
        assert MEMORY[name](limit), limit
    with pytest.raises(ArgumentError, match=r"memory_limit must be bytes such as 80e9 or 80GiB"):
        MEMORY[name]("12 cows")


@pytest.mark.parametrize("name", ["ps.order_by", "ps.optimize", "zb_1p", "zb_2p", "ps.lower_bound"])
def test_parameters_count(name: str) -> None:
    """The limit has room for 8 micro-batches, but not beside the parameters."""
    with pytest.raises(ArgumentError, match=r"memory_limit of device 0 is 8.5"):
        MEMORY[name](TOO_LOW)


def test_limits_of_sweeps_and_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Orders of a row with a limit are those of the schedule's own option."""
    base = {"n_devices": 4, "n_microbatches": 6, "costs": COSTS}
    table = ps.sweep([{"schedule": "zb_2p", "memory_limit": "12B"}], base=base, progress=False)
    assert table["fits"].all()
    order = ps.schedule("zb_2p", 4, 6, costs=COSTS, memory_limit=12)
    assert table["makespan"][0] == ps.simulate(ps.lower(order), COSTS).makespan
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    for limit, word in ((13, "fits"), ("0.013kB", "fits")):
        assert word in succeed(capsys, "simulate", "1f1b", "--config", config,
                               "--memory-limit", limit)  # fmt: skip


# Efficiency: every function gives the network of a machine the same bandwidths.


def swept_network() -> ps.Network:
    """Return the network that a sweep's costs of a transformer have."""
    from pipesim.sweeps.settings import transformer_costs

    settings = {**asdict(MODEL), "microbatch_size": 1, "gpu": "h100_sxm"}
    table = {"transformer": settings, "network": {"preset": MACHINE}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostsWarning)
        return transformer_costs(table, ps.Placement.linear(2)).network


def fitted_network() -> ps.Network | None:
    """Return the network of a fit that has not fitted its efficiency."""
    row = {**asdict(MODEL), "microbatch_size": 1, "n_microbatches": 2, "seconds": 1e-3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        fitted = ps.GPU.fit([row], gpu="h100_sxm", network=MACHINE, constants=["launch"])
    saved = json.loads(json.dumps(fitted.to_dict()))
    assert ps.Cluster(MACHINE, 8, gpu=saved).network() == fitted.network()
    return fitted.network()


def cost_network(tmp_path: Path) -> ps.Network:
    costs = ps.Costs(1, 2, network=ps.Network.preset(MACHINE))
    costs.save(tmp_path / "costs.json")
    return ps.Costs.load(tmp_path / "costs.json").network


#: Functions that make the network of a machine by default.
NETWORKS: dict[str, Callable[[Path], ps.Network | None]] = {
    "ps.Network.preset": lambda _: ps.Network.preset(MACHINE),
    "ps.Network.from_dict": lambda _: ps.Network.from_dict({"preset": MACHINE}),
    "ps.Network.to_dict": lambda _: ps.Network.from_dict(ps.Network.preset(MACHINE).to_dict()),
    "ps.Layout.network": lambda _: ps.Layout().network(MACHINE),
    "ps.Cluster": lambda _: ps.Cluster(MACHINE, 16).network(),
    "ps.Cluster of several": lambda _: ps.Cluster([(MACHINE, 8), (MACHINE, 8)]).network(),
    "ps.Cluster(network=)": lambda _: (
        ps.Cluster(MACHINE, 16, network=ps.Network.preset(MACHINE)).network()
    ),
    "ps.Cluster(network={})": lambda _: (
        ps.Cluster(MACHINE, 16, network={"preset": MACHINE}).network()
    ),
    "ps.Cluster(network=, same efficiency)": lambda _: (
        ps.Cluster(MACHINE, 16, network={"preset": MACHINE}, network_efficiency=0.7).network()
    ),
    "ps.Cluster.from_dict": lambda _: (
        ps.Cluster.from_dict(ps.Cluster(MACHINE, 16).to_dict()).network()
    ),
    "ps.Cluster of a plain GPU table": lambda _: (
        ps.Cluster(MACHINE, 16, gpu=asdict(ps.GPU.preset("h100_sxm"))).network()
    ),
    "ps.sweep": lambda _: swept_network(),
    "ps.GPU.fit": lambda _: fitted_network(),
    "ps.Costs.save": cost_network,
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_a_machine_has_one_efficiency(name: str, tmp_path: Path) -> None:
    network = NETWORKS[name](tmp_path)
    assert network == ps.Network.preset(MACHINE, EFFICIENCY)
    assert network is not None
    assert network.nodes is not None
    assert network.nodes.nic_bandwidth == EFFICIENCY * 50e9
    assert network.nominal_share == EFFICIENCY


#: Functions that take another share of the bandwidth of NICs.
OF_NICS: dict[str, Callable[[], ps.Network]] = {
    "ps.Network.from_dict": lambda: (
        ps.Network.from_dict({"preset": MACHINE, "nic_efficiency": 0.5})
    ),
    "ps.Network.to_dict": lambda: ps.Network.from_dict(
        ps.Network.preset(MACHINE, nic_efficiency=0.5).to_dict()
    ),
    "ps.Layout.network": lambda: ps.Layout().network(MACHINE, nic_efficiency=0.5),
    "ps.Cluster": lambda: ps.Cluster(MACHINE, 16, nic_efficiency=0.5).network(),
    "ps.Cluster of several": lambda: (
        ps.Cluster([(MACHINE, 8), (MACHINE, 8)], nic_efficiency=0.5).network()
    ),
    "ps.Cluster(network=)": lambda: (
        ps.Cluster(
            MACHINE, 16, network=ps.Network.preset(MACHINE, nic_efficiency=0.25), nic_efficiency=0.5
        ).network()
    ),
    "ps.Cluster of a fitted GPU": lambda: (
        ps.Cluster(
            MACHINE, 16, gpu={"gpu": asdict(ps.GPU.preset("h100_sxm")), "nic_efficiency": 0.5}
        ).network()
    ),
    "ps.Network.scaled": lambda: (
        ps.Network.preset(MACHINE, nic_efficiency=0.25).scaled(nic_bandwidth=2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_NICS)
def test_nics_have_an_efficiency_of_their_own(name: str) -> None:
    network = OF_NICS[name]()
    assert network == ps.Network.preset(MACHINE, nic_efficiency=0.5)
    assert network.nodes is not None
    assert (network.nodes.port_bandwidth, network.nodes.nic_bandwidth) == (EFFICIENCY * 450e9, 25e9)
    assert (network.nominal_share, network.nominal_nic_share) == (EFFICIENCY, 0.5)
    assert network.scaled(bandwidth=0.5).nominal_nic_share == 0.25
    assert "0.7 of nominal bandwidths, NICs 0.5" in network._repr_html_()
    cluster = ps.Cluster(MACHINE, 16, network=network)
    assert repr(cluster).endswith("25 GB/s a NIC, 0.7 of nominal, NICs 0.5>")
    # Another share of all bandwidths is one of NICs, too.
    assert ps.Cluster(MACHINE, 16, network=network, network_efficiency=0.35).network() == (
        ps.Network.preset(MACHINE, 0.35)
    )


def test_nics_need_nodes() -> None:
    with pytest.raises(PipeError, match="nic_bandwidth: the network has no nodes"):
        ps.Network().scaled(nic_bandwidth=2)
    with pytest.raises(PipeError, match="nic_efficiency is given, but network has no nodes"):
        ps.Cluster(None, 8, gpu="h100_sxm", network=ps.Network(), nic_efficiency=0.5)
    with pytest.raises(PipeError, match="nic_efficiency must be above 0 and at most 1, got 2"):
        ps.Network.preset(MACHINE, nic_efficiency=2)


def test_each_function_with_an_efficiency_is_known() -> None:
    fitted = {"ps.calibration.Calibration"}
    names = functions_with("efficiency", "network_efficiency") - fitted
    assert names == {"ps.Network.preset", "ps.Layout.network", "ps.Cluster"}


def test_the_efficiency_is_said() -> None:
    """In texts of clusters and networks; a changed network keeps what it is a share of."""
    network = ps.Network.preset(MACHINE)
    assert repr(ps.Cluster(MACHINE, 16)).endswith("35 GB/s a NIC, 0.7 of nominal>")
    assert "nominal_share=0.7" in repr(network)
    assert "0.7 of nominal bandwidths" in network._repr_html_()
    assert network.scaled(bandwidth=0.5).nominal_share == 0.35
    assert network.unlimited().nominal_share is None
    assert network.grouped(8).nominal_share == EFFICIENCY
    with pytest.raises(PipeError, match=r"nominal_share must be .* number \(above 0\), got 0"):
        replace(network, nominal_share=0)


def test_another_efficiency_replaces_that_of_a_network() -> None:
    """It is a share of nominal bandwidths, and not one more factor."""
    expected = ps.Cluster(MACHINE, 16, network_efficiency=0.35)
    network = ps.Network.preset(MACHINE)
    assert ps.Cluster(MACHINE, 16, network=network, network_efficiency=0.35) == expected
    own = replace(network, nominal_share=None)  # whose nominal bandwidths these are
    result = ps.Cluster(MACHINE, 16, network=own, network_efficiency=0.5).network()
    assert result.nodes is not None
    assert result.nodes.nic_bandwidth == 0.35 * 50e9
    assert result.nominal_share == 0.5


def test_less_bandwidth_never_helps() -> None:
    """The network of a machine passed in is that machine's; half of any rate is no gain."""
    whole = ps.Cluster(MACHINE, n_gpus=16)
    own = ps.Cluster(MACHINE, n_gpus=16, network=ps.Network.preset(MACHINE))
    halves = [whole.scaled(**{name: 0.5}) for name in ("nic_bandwidth", "bandwidth", "flops")]  # type: ignore[arg-type]
    for settings in (
        {"tensor_parallel": 2, "schedules": ["1f1b"]},
        {"tensor_parallel": 4, "schedules": ["zb_h1"], "shard_optimizer": True},
        {"tensor_parallel": 1, "schedules": ["interleaved_1f1b"], "n_chunks": 2},
    ):
        seconds = [
            ps.plan(
                MODEL, cluster, global_batch=32, pipeline_parallel=2, microbatch_size=1, n_best=1,
                progress=False, **settings,  # type: ignore[arg-type]
            ).best.timeline.makespan
            for cluster in (whole, own, *halves)
        ]  # fmt: skip
        assert seconds[0] == seconds[1] <= min(seconds[2:])
        assert seconds[0] < max(seconds[2:])


def test_a_scaled_cluster_is_said() -> None:
    """Factors multiply; the result says them, and so does its plan."""
    cluster = ps.Cluster(MACHINE, n_gpus=8)
    half = cluster.scaled(nic_bandwidth=0.5, memory=2.0, memory_bandwidth=0.25).scaled(flops=0.5)
    half = half.scaled(flops=0.5)
    text = "; scaled: memory 2, memory_bandwidth 0.25, nic_bandwidth 0.5, flops 0.25"
    assert repr(half).endswith(f"{text}>")
    assert half.gpu.flops == cluster.gpu.flops / 4
    assert half.gpu.peak == cluster.gpu.peak / 4
    assert half.gpu.bandwidth == cluster.gpu.bandwidth / 4
    assert half.memory == 2 * cluster.memory
    assert half.network() == cluster.network().scaled(nic_bandwidth=0.5)
    assert cluster.scaled() == cluster
    plans = ps.plan(
        MODEL, half, global_batch=8, schedules="1f1b", pipeline_parallel=2, tensor_parallel=4,
        progress=False,
    )  # fmt: skip
    assert text[2:] in plans.summary()
    for name in ("flops", "latency", "bandwidth"):
        with pytest.raises(PipeError, match=f"{name} must be a finite factor"):
            cluster.scaled(**{name: -1})  # type: ignore[arg-type]


# Parts of costs.


def test_parts_of_costs_have_one_meaning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a method, a sweep and the command."""
    assert functions_with("per") == {"ps.Costs.in_chunks"}
    costs = ps.Costs([1.0, 1.0, 3.0, 1.0], input_grad=1, weight_grad=1)
    schedule = ps.schedule("interleaved_1f1b", 4, 6)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    makespans = []
    for per in ("device", "layers"):
        chunks = costs.in_chunks(schedule.placement, per=per)  # type: ignore[arg-type]
        expected = ps.simulate(ps.lower(schedule), chunks).makespan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CostsWarning)
            table = ps.sweep(
                [{"schedule": "interleaved_1f1b"}],
                base={"n_devices": 4, "n_microbatches": 6, "costs": costs, "per": per},
                progress=False,
            )
            main(["simulate", "interleaved_1f1b", "--config", str(path), "--per", per])
        assert table["makespan"][0] == expected
        assert f"makespan {expected * 1e3:9.0f} ms" in capsys.readouterr().out
        makespans.append(expected)
    assert makespans[0] != makespans[1]
