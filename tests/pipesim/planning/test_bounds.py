"""Bounds of drawn costs against simulations: none is above a step or the bytes of a device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipesim as ps
from pipesim.planning.choice import StageDevices
from pipesim.planning.plan_bounds import Sharing, device_work, least_end, least_memory, reductions
from pipesim.scheduling.placement import LAYOUTS, Layout, replica_devices
from pipesim.scheduling.registry import schedule_info
from pipesim.timeline.memory import reserved_memory

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "6"))
#: Arguments of `pipesim.lower` by what replicas share.
SHARED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "optimizer": {"shard_optimizer": True},
    "parameters": {"shard_parameters": "every"},
    "parameters of a step": {"shard_parameters": "step"},
}
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zbv", "dualpipev")


def sharing_of(shared: str, n_replicas: int) -> Sharing:
    """Return the replicas that share the optimizer or more."""
    if shared == "nothing" or n_replicas == 1:
        return Sharing()
    return Sharing(n_replicas, shared.startswith("parameters"))


def checked(
    schedule: ps.Schedule, costs: ps.Costs, shared: str, n_replicas: int, layout: Layout
) -> tuple[float, float]:
    """Check the bounds of a configuration; return the bound on its step, and its step."""
    devices = StageDevices.of_placement(schedule.placement)
    splits = bool((schedule.op == ps.Op.I).any())
    hides = schedule.overlapped is not None and bool(costs.expert_layers)
    sharing = sharing_of(shared, n_replicas)
    work = device_work(costs, devices, splits_backward=splits, hides_exchanges=hides)
    reduction = reductions(costs.network, n_replicas, schedule.n_devices, layout, costs.all_reduce)
    end = least_end(costs, devices, sharing, reduction)
    bound = work.least_step(schedule.n_microbatches, end, int(devices.device[0]))
    graph = ps.lower(
        schedule, n_replicas=n_replicas, layout=layout,
        **(SHARED[shared] if n_replicas > 1 else {}),
        **({"expert_layers": costs.expert_layers} if hides else {}),
    )  # fmt: skip
    timeline = ps.simulate(graph, costs)
    assert bound <= timeline.makespan
    held = reserved_memory(timeline)[replica_devices(n_replicas, schedule.n_devices, layout)]
    assert (least_memory(costs, devices, sharing, splits_backward=splits) <= held).all()
    return bound, timeline.makespan


def drawn_costs(
    random: np.random.Generator, schedule: ps.Schedule, n_devices: int, *, experts: bool
) -> ps.Costs:
    """Return costs whose values differ so much that one of them may be all that counts."""

    def stages() -> tuple[float, ...]:
        return tuple(random.choice([0.0, 1.0, 8.0], schedule.n_stages).tolist())

    names = ["forward", "backward", "optimizer_step", "reduce_copies", "parameter_bytes",
             "gradient_bytes", "optimizer_bytes", "activation_bytes", "forward_workspace_bytes",
             "backward_workspace_bytes", "input_grad", "weight_grad"]  # fmt: skip
    values: dict[str, Any] = {name: stages() for name in names}
    if experts:
        values |= {
            "expert_layers": 1.0,
            "exchange_dispatch": stages(),
            "exchange_combine": stages(),
        }
    shape = n_devices, n_devices
    latency, bandwidth = (random.choice(x, shape) for x in ([0.0, 1.0, 8.0], [1.0, 8.0, np.inf]))
    return ps.Costs(
        **values,
        output_bytes=float(random.choice([0.0, 1.0])),
        memory_reserve=float(random.choice([0.0, 0.25])),
        network=ps.Network.from_matrix(latency, bandwidth),
    )


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32 - 1))
def test_bounds_hold_for_drawn_costs(name: str, seed: int) -> None:
    """Steps and bytes of any costs, sharing and layout are at least their bounds."""
    random = np.random.default_rng(seed)
    n_devices, n_microbatches = int(random.integers(1, 4)), int(random.choice([1, 2, 6]))
    n_replicas = 1 if name == "dualpipev" else int(random.integers(1, 4))
    if not schedule_info(name).allows(n_devices, n_microbatches):
        n_microbatches = 6
    schedule = ps.schedule(name, n_devices, n_microbatches)
    costs = drawn_costs(random, schedule, n_devices * n_replicas, experts=name == "dualpipev")
    checked(schedule, costs, str(random.choice(list(SHARED))), n_replicas, random.choice(LAYOUTS))


def test_half_a_ring_reduces_shared_parameters() -> None:
    """Stage 1 gathers behind F of stage 0: 8 + 1 + 1 s, and half of a ring's 16 s at the end.

    Replicas of stage 0 exchange in no time, so that nothing of this is hidden.
    """
    latency = np.zeros((4, 4))
    latency[2:, 2:] = 8.0
    costs = ps.Costs(
        forward=(8.0, 1.0), backward=(0.0, 1.0), parameter_bytes=1.0,
        network=ps.Network.from_matrix(latency, np.inf),
    )  # fmt: skip
    schedule = ps.schedule("1f1b", 2, 1)
    expected = {"nothing": (26.0, 26.0), "parameters of a step": (18.0, 18.0)}
    for shared, values in expected.items():
        assert checked(schedule, costs, shared, 2, "stage_major") == pytest.approx(values, rel=1e-8)


def test_exchanges_of_forward_and_backward_are_hidden() -> None:
    """Both run behind the other half of a pair: a device is busy with compute alone."""
    costs = ps.Costs(
        forward=8.0, backward=8.0, input_grad=4.0, weight_grad=4.0, expert_layers=1.0,
        exchange_dispatch=4.0, exchange_combine=4.0,
    )  # fmt: skip
    bound, step = checked(ps.schedule("dualpipev", 2, 12), costs, "nothing", 1, "stage_major")
    assert bound == pytest.approx(2 * 12 * 16 + 16)
    assert step < 2 * 12 * (16 + 8) + 16, "as long as if one of both were not hidden"


@pytest.mark.parametrize("shared", SHARED)
def test_bytes_of_one_microbatch_are_their_bound(shared: str) -> None:
    """A stage that is alone on its device holds no less, the allocator's reserve included."""
    costs = ps.Costs(
        1.0, 2.0, activation_bytes=3.0, forward_workspace_bytes=5.0, backward_workspace_bytes=7.0,
        parameter_bytes=8.0, gradient_bytes=16.0, optimizer_bytes=32.0, memory_reserve=0.25,
    )  # fmt: skip
    schedule = ps.schedule("1f1b", 1, 1)
    devices = StageDevices.of_placement(schedule.placement)
    bound = least_memory(costs, devices, sharing_of(shared, 2), splits_backward=False)
    timeline = ps.simulate(ps.lower(schedule, n_replicas=2, **SHARED[shared]), costs)
    assert bound.tolist() * 2 == pytest.approx(reserved_memory(timeline), rel=1e-8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [1, 2])
def test_reductions_are_those_of_the_replicas_of_each_device(layout: Layout, step: int) -> None:
    """Every ``step``-th replica: no two pairs of devices have the same latency or bandwidth."""
    table = np.arange(1.0, 65.0).reshape(8, 8)
    network = ps.Network.from_matrix(table, 100.0 - table)
    result = reductions(network, 4, 2, layout, "ring", step)
    assert result is not None
    for device, replicas in enumerate(replica_devices(4, 2, layout).T):
        for nbytes in (0.0, 1e6):
            seconds = network.all_reduce(nbytes, replicas[::step])
            bound = result.least[device] + result.slope[device] * nbytes
            assert bound == pytest.approx(seconds)
    assert reductions(network, 4, 2, layout, "ring", 4) is None
