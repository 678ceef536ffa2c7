"""Changes that fit in memory: each is what simulating that configuration gives."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_choice import EVERY_CASE
from hypothesis import given
from strategies import graphs

import pipesim as ps
from pipesim.analysis import configurations as memory_changes
from pipesim.errors import ArgumentError, MemoryLimitWarning, TimelineError
from pipesim.simulation.simulate import predict_timeline

#: Parameters and gradients take 10 bytes, and a micro-batch in flight 5.
COSTS = ps.Costs(1, 2, activation_bytes=5, parameter_bytes=5)
MODEL = ps.Transformer(
    hidden_size=64, n_layers=4, n_heads=4, sequence_length=128, vocabulary_size=256
)
NODE = ps.Network.preset("dgx_h100", gpus_per_device=2)
GPU = ps.GPU(flops=1e12, bandwidth=1e11, launch=1e-6, memory=1e9, peak_flops=2e12)
#: Arguments of `Transformer.costs`, and of `lower`, of the configuration that is changed.
SIZES: dict[str, Any] = {
    "microbatch_size": 4, "gpu": GPU, "tensor_parallel": 2, "network": NODE
}  # fmt: skip
LOWERING: dict[str, Any] = {
    "n_replicas": 2, "layout": "stage_major", "overlap": False, "grad_sync": "every",
    "hosts": "per_device", "step": "flush",
}  # fmt: skip


def stage_costs(**changes: Any) -> ps.Costs:
    """Return the costs of two stages, with some settings changed."""
    return MODEL.costs([2, 2], **{**SIZES, **changes})


def table_of(
    costs: ps.Costs,
    schedule: ps.Schedule,
    limit: Any,
    *,
    every: bool = True,
    quick: bool = False,
    **lowering: Any,
) -> dict[str, tuple[float, float, bool]]:
    """Return makespan, peak memory and fit of each change, by its text.

    With ``quick``, of no other schedules, which take most of the time.
    """
    timeline = predict_timeline(ps.lower(schedule, **lowering), costs, memory_limit=limit)
    table = timeline.memory.changes_that_fit(every=every, quick=quick)
    columns = ["change", "makespan", "relative", "peak_memory", "room", "fits", "note"]
    assert list(table.columns) == columns
    is_slow = table["change"].str.contains("offload") & (table["relative"] > 1)
    assert (is_slow == (table["note"] != "")).all()
    assert np.allclose(table["relative"] * timeline.makespan, table["makespan"])
    fitting = table[table["fits"]]
    assert fitting.index.tolist() == list(range(len(fitting)))
    assert fitting["makespan"].is_monotonic_increasing
    columns = [table[name].tolist() for name in ("makespan", "peak_memory", "fits")]
    return dict(zip(table["change"], zip(*columns, strict=True), strict=True))


def simulated(graph: ps.TaskGraph, costs: ps.Costs, limit: float) -> tuple[float, float, bool]:
    """Return what a row of the table should have."""
    timeline = predict_timeline(graph, costs)
    peak = float(timeline.memory.peak.max())
    return timeline.makespan, peak, peak <= limit


def test_by_hand() -> None:
    """GPipe holds both of two micro-batches: 20 bytes. With R it holds one, and R takes 1 s.

    One micro-batch after the other holds one too, and takes 2 * (1 + 2) * 2 s.
    """
    got = table_of(COSTS, ps.schedule("gpipe", 2, 2), 15, every=False)
    assert got["lower(recompute='always')"] == (11, 15, True)
    assert got["schedule='naive'"] == (12, 15, True)
    assert "schedule='1f1b'" not in got
    every = table_of(COSTS, ps.schedule("gpipe", 2, 2), 15)
    assert every["schedule='1f1b'"] == (9, 20, False)
    halves = "n_microbatches=4, at a half of the seconds and bytes of a micro-batch"
    assert every[halves] == ((2 + 0.5) * 3, 20, False)
    assert {k: v for k, v in every.items() if v[2]} == got


@pytest.mark.slow
def test_two_changes_where_none_fits() -> None:
    """Half a micro-batch at a time: recompute and micro-batches together."""
    got = table_of(COSTS, ps.schedule("gpipe", 2, 2), 12.5, every=False)
    text = (
        "n_microbatches=4, at a half of the seconds and bytes of a micro-batch and "
        "lower(recompute='always')"
    )
    key = next(key for key in got if set(key.split(" and ")) == set(text.split(" and ")))
    half = ps.Costs(0.5, 1, activation_bytes=2.5, parameter_bytes=5)
    graph = ps.lower(ps.schedule("gpipe", 2, 4), recompute="always")
    assert got[key] == simulated(graph, half, 12.5)
    assert all(fits for _, _, fits in got.values())
    for change in table_of(COSTS, ps.schedule("gpipe", 2, 2), 12.5):
        assert max(change.count("schedule="), change.count("n_microbatches=")) < 2
    assert not table_of(COSTS, ps.schedule("gpipe", 2, 2), 10, every=False), "parameters alone fit"


@cache
def changes_of_model(grad_sync: str) -> dict[str, tuple[float, float, bool]]:
    """Return the table of 1F1B with the reductions of gradients of these micro-batches."""
    start = {**LOWERING, "grad_sync": grad_sync}
    return table_of(stage_costs(), ps.schedule("1f1b", 2, 4), 1e7, **start)


@pytest.mark.parametrize(
    ("change", "costs", "schedule", "lowering"),
    [
        ("recompute='selective'", {"recompute": "selective"}, {}, {}),
        ("recompute='full'", {"recompute": "full"}, {}, {}),
        ("flash_attention=True", {"flash_attention": True}, {}, {}),
        ("sequence_parallel=True", {"sequence_parallel": True}, {}, {}),
        (
            "microbatch_size=2, n_microbatches=8",
            {"microbatch_size": 2},
            {"n_microbatches": 8},
            {"grad_sync": 2},
        ),
        (
            "microbatch_size=1, n_microbatches=16",
            {"microbatch_size": 1},
            {"n_microbatches": 16},
            {"grad_sync": 4},
        ),
        ("schedule='gpipe'", {}, {"name": "gpipe"}, {}),
        ("shard_optimizer=True", {}, {}, {"shard_optimizer": True, "grad_sync": "last"}),
        ("shard_parameters='step'", {}, {}, {"shard_parameters": "step", "grad_sync": "last"}),
        ("shard_parameters='every'", {}, {}, {"shard_parameters": "every", "grad_sync": "last"}),
        ("offload='all'", {}, {}, {"offload": "all"}),
    ],
)
def test_changes_of_a_model(
    change: str, costs: dict[str, Any], schedule: dict[str, Any], lowering: dict[str, Any]
) -> None:
    """Each row is what the user gets who makes the change; all other options stay."""
    start = {**LOWERING, **({"grad_sync": "last"} if "shard" in change else {})}
    got = changes_of_model(start["grad_sync"])
    changed = ps.schedule(**{"name": "1f1b", "n_devices": 2, "n_microbatches": 4, **schedule})
    graph = ps.lower(changed, **{**start, **lowering})
    assert got[change] == simulated(graph, stage_costs(**costs), 1e7)


@pytest.mark.parametrize("segments", [False, True])
def test_experts_on_more_gpus(segments: bool) -> None:
    """Experts are divided among twice as many GPUs; those of more GPUs than there are is no change.

    A sharded optimizer becomes sharded parameters. Graphs may have the exchanges as tasks.
    """
    model = ps.Transformer(
        hidden_size=64, n_layers=4, n_heads=4, sequence_length=128, vocabulary_size=256,
        n_experts=8, experts_per_token=2, expert_ffn_size=64,
    )  # fmt: skip

    def costs(n_gpus: int) -> ps.Costs:
        return model.costs([2, 2], microbatch_size=1, gpu=GPU, expert_parallel=n_gpus,
                           network=ps.Network.preset("dgx_h100"))  # fmt: skip

    def graph(n_gpus: int, **changes: Any) -> ps.TaskGraph:
        own = {"expert_layers": 2, "expert_replicas": n_gpus} if segments else {}
        options = {"n_replicas": 2, "shard_optimizer": True, **own, **changes}
        return ps.lower(ps.schedule("1f1b", 2, 4), **options)

    limit = simulated(graph(2), costs(2), 0)[1]
    timeline = predict_timeline(graph(1), costs(1), memory_limit=limit)
    table = timeline.memory.changes_that_fit(every=True, quick=True).set_index("change")
    row = table.loc["expert_parallel=2"]
    assert (row["makespan"], row["peak_memory"], row["fits"]) == simulated(
        graph(2), costs(2), limit
    )
    assert "expert_parallel=4" not in table.index
    row = table.loc["shard_parameters='step'"]
    other = graph(1, shard_optimizer=False, shard_parameters="step")
    assert (row["makespan"], row["peak_memory"], row["fits"]) == simulated(other, costs(1), limit)


@pytest.mark.slow
def test_schedules_with_other_stages() -> None:
    """The stages of a device share its costs, and one stage has those of all of a device's."""
    costs = replace(stage_costs(), input_grad=(1, 2), weight_grad=(1, 2), backward=None)
    got = table_of(costs, ps.schedule("1f1b", 2, 4), 1e7)
    zbv = ps.schedule("zbv", 2, 4)
    expected = simulated(ps.lower(zbv), costs.in_chunks(zbv.placement), 1e7)
    assert got["schedule='zbv'"] == pytest.approx(expected)
    uneven = ps.Costs(1, 5, input_grad=4, weight_grad=1, activation_bytes=4, weight_grad_bytes=1)
    half = uneven.in_chunks(ps.Placement.v_shaped(2))
    ordered = ps.schedule("v_half", 2, 4, costs=half)
    got = table_of(uneven, ps.schedule("1f1b", 2, 4), 8)
    assert got["schedule='v_half'"] == simulated(ps.lower(ordered), half, 8)
    assert got["schedule='v_half'"][0] == 26.5, "31 s in the order for equal F, I and W"
    chunks = ps.Costs((1, 2, 3, 4), (2, 4, 6, 8), activation_bytes=1, parameter_bytes=(4, 3, 2, 1),
                     launch=(0.5, 0.25, 0.125, 0.75))  # fmt: skip
    back = table_of(chunks, ps.schedule("interleaved_1f1b", 2, 4), 20)
    whole = ps.Costs((4, 6), (8, 12), activation_bytes=2, parameter_bytes=(6, 4),
                    launch=(0.5, 0.75))  # fmt: skip
    assert back["schedule='1f1b'"] == simulated(ps.lower(ps.schedule("1f1b", 2, 4)), whole, 20)
    assert "schedule='pipedream'" not in back, "it updates the weights in another way"


def zbv_graph(costs: ps.Costs) -> ps.TaskGraph:
    """Return ZB-V of 2 devices and 4 micro-batches, in the order for these costs."""
    return ps.lower(ps.schedule("zbv", 2, 4, costs=costs))


@pytest.mark.slow
@pytest.mark.parametrize("step", [None, 2e-5] if EVERY_CASE else [2e-5])
def test_layers_are_balanced_for_other_stages(step: float | None) -> None:
    """The model's costs are made for the stages of the schedule, if nothing else is in them."""
    costs = stage_costs(optimizer_step=step)
    for schedule, name in ((ps.schedule("1f1b", 2, 4), "zbv"), (ps.schedule("zbv", 2, 4), "1f1b")):
        placement = ps.schedule(name, 2, 4).placement
        if schedule.n_stages != 2:
            costs = MODEL.costs([1, 1, 1, 1], **SIZES, optimizer_step=step)
        options = {**SIZES, "placement": placement, "optimizer_step": step}
        wanted = MODEL.costs(placement.n_stages, **options)
        other = ps.schedule(name, 2, 4, **({"costs": wanted} if name == "zbv" else {}))
        layers = [1] * 4 if other.n_stages == 4 else [2, 2]
        got = table_of(costs, schedule, 1e7)[f"schedule={name!r}, layers_per_stage={layers}"]
        assert got == simulated(ps.lower(other), wanted, 1e7)
        listed = MODEL.costs(layers, **options)
        assert got == simulated(ps.lower(other), listed, 1e7), "the text gives it again"


@pytest.mark.slow
def test_what_layers_of_other_stages_cost() -> None:
    """Other splits stay; STEP and launches of stages are shared by a device's stages."""
    placed = MODEL.costs(2, **SIZES, placement=ps.Placement.linear(2))
    zbv = ps.schedule("zbv", 2, 4)
    got = table_of(placed, ps.schedule("1f1b", 2, 4), 1e7)[
        "schedule='zbv', layers_per_stage=[1, 1, 1, 1]"
    ]
    again = MODEL.costs(4, **SIZES, placement=zbv.placement)
    assert got == simulated(zbv_graph(again), again, 1e7), "STEP of stages follows from the GPU"
    uneven = MODEL.costs([3, 1], **SIZES)
    got = table_of(uneven, ps.schedule("1f1b", 2, 4), 1e7)["schedule='gpipe'"]
    assert got == simulated(ps.lower(ps.schedule("gpipe", 2, 4)), uneven, 1e7), "as many stages"
    steps = {"optimizer_step": (1e-3, 2e-3), "gpu": None, "flops_per_second": 1e11}
    stepped = stage_costs(**steps)
    got = table_of(stepped, ps.schedule("1f1b", 2, 4), 1e7)["schedule='zbv'"]
    chunks = stepped.in_chunks(zbv.placement)
    assert got == pytest.approx(simulated(zbv_graph(chunks), chunks, 1e7)), "STEP is of stages"
    launched = stage_costs(launch=(1e-5, 2e-5))
    got = table_of(launched, ps.schedule("1f1b", 2, 4), 1e7)["schedule='zbv'"]
    chunks = launched.in_chunks(zbv.placement)
    assert got == pytest.approx(simulated(zbv_graph(chunks), chunks, 1e7)), "launches are of stages"


@pytest.mark.slow
@pytest.mark.parametrize("n_replicas", [1, 2])
def test_advice_where_no_change_fits(n_replicas: int) -> None:
    """Parameters, gradients and optimizer stay, whatever is done with micro-batches."""
    costs = replace(COSTS, optimizer_bytes=4)  # 14 bytes, or 12 if two replicas share 4
    sharded = {"n_replicas": 2, "shard_optimizer": True} if n_replicas > 1 else {}
    limit = 11.5 if sharded else 13.5
    size = "12.0 B of 11.5 B" if sharded else "14.0 B of 13.5 B"
    holders = "more replicas that share" if sharded else "replicas that shard"
    text = (
        f"parameters, gradients and optimizer alone take {size} on device 0: it needs more "
        f"devices, tensor parallelism, or {holders} the optimizer"
    )
    graph = ps.lower(ps.schedule("gpipe", 2, 2), **sharded)
    with pytest.warns(MemoryLimitWarning) as caught:
        timeline = ps.simulate(graph, costs, memory_limit=limit)
    assert f"; {text}; timeline.memory.changes_that_fit()" in str(caught[0].message)
    table = timeline.memory.changes_that_fit()
    assert (len(table), table.attrs["advice"]) == (0, text)
    roomy = predict_timeline(graph, costs, memory_limit=14.5).memory.changes_that_fit()
    assert roomy.attrs["advice"] == "", "recompute leaves one micro-batch, too many bytes"


def test_advice_names_the_split() -> None:
    """Of 12 and 2 bytes with gradients on two devices of 10, all fit if divided otherwise."""
    costs = ps.Costs(1, 2, parameter_bytes=(6, 1), activation_bytes=1)
    for limit, is_named in ((10, True), (6, False)):
        with pytest.warns(MemoryLimitWarning) as caught:
            ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs, memory_limit=limit)
        text = "on device 0: it needs another split of layers among devices, more devices"
        assert (text in str(caught[0].message)) == is_named


def test_an_offload_that_does_not_pay() -> None:
    """By hand: F, F, B, B of 1, 1, 2, 2 s; OFFLOAD0 at 1 to 4 s, RELOAD0 at 4 to 7, B0 at 7.

    B1 runs at 2 to 4 s, so that of both copies of 3 s the first alone hides.
    """
    costs = replace(COSTS, offload=3, reload=3)
    timeline = predict_timeline(ps.lower(ps.schedule("gpipe", 1, 2), prefetch=0), costs,
                                memory_limit=15)  # fmt: skip
    table = timeline.memory.changes_that_fit(every=True, quick=True).set_index("change")
    row = table.loc["offload='all'"]
    assert row["makespan"] == 9
    assert row["room"] == pytest.approx(1 - row["peak_memory"] / 15)
    assert row["note"] == "copies of device 0 take 6.00 s, of which 3.00 s hide behind compute"


def test_schedules_of_as_many_modules() -> None:
    """An encoder on the devices of its language model is no choice for one model alone."""
    one = table_of(COSTS, ps.schedule("1f1b", 2, 4), 20)
    assert not [change for change in one if "encoder" in change]
    both = table_of(COSTS, ps.schedule("encoder_first", 2, 4), 20)
    assert {x for x in both if x.startswith("schedule=")} == {"schedule='encoder_nested'"}


def test_skips_name_stages() -> None:
    """Other numbers of stages have no such skips."""
    got = table_of(COSTS, ps.schedule("1f1b", 2, 4), 20, skips=[(0, 1)])
    assert "schedule='gpipe'" in got
    assert "schedule='interleaved_1f1b'" not in got


@pytest.mark.slow
def test_changed_costs_stay_changed() -> None:
    """Ratios to what the settings give, and values where these are 0; other fields as they are."""
    base = stage_costs()
    own = replace(base.scaled(0.5), optimizer_bytes=7e6, launch=1e-3, memory_reserve=0.1)
    full = stage_costs(recompute="full")
    wanted = replace(full, memory_reserve=0.1, optimizer_bytes=7e6, launch=1e-3)
    names = ("forward", "backward", "input_grad", "weight_grad", "recompute", "optimizer_step")
    for name in names:
        values = [getattr(x, name) for x in (base, own, full)]
        if values[0] is not None:
            before, now, after = (np.broadcast_to(x, 2) for x in values)
            scaled = after * np.divide(now, before, out=np.ones(2), where=before > 0)
            wanted = replace(wanted, **{name: tuple(scaled.tolist())})
    schedule = ps.schedule("1f1b", 2, 4)
    makespan, peak, _ = simulated(ps.lower(schedule), wanted, 1e7)
    for share, fits in ((1.05, False), (1.15, True)):
        got = table_of(own, schedule, share * peak, quick=True)["recompute='full'"]
        assert got == pytest.approx((makespan, peak, fits))


def test_options_of_schedules_stay() -> None:
    """The same options, and orders by costs are made again for the new costs."""
    costs = ps.Costs(
        1, 2, input_grad=1, weight_grad=1, activation_bytes=4, weight_grad_bytes=1,
        parameter_bytes=1,
    )  # fmt: skip
    order = ps.schedule("zb_1p", 2, 2, costs=costs, memory_limit=12).with_name("mine")
    half = ps.Costs(
        0.5, 1, input_grad=0.5, weight_grad=0.5, activation_bytes=2, weight_grad_bytes=0.5,
        parameter_bytes=1,
    )  # fmt: skip
    again = ps.schedule("zb_1p", 2, 4, costs=half, memory_limit=12)
    key = "n_microbatches=4, at a half of the seconds and bytes of a micro-batch"
    assert table_of(costs, order, 9, quick=True)[key] == simulated(ps.lower(again), half, 9)


@pytest.mark.slow
def test_reductions_stay_as_far_apart() -> None:
    """With twice as many micro-batches, after twice as many of them."""
    costs = replace(COSTS, reduce_grad=9)
    options: dict[str, Any] = {"n_replicas": 2}
    got = table_of(costs, ps.schedule("1f1b", 2, 8), 20, quick=True, grad_sync="2/2", **options)
    half = replace(costs, forward=0.5, backward=1, activation_bytes=2.5)
    graph = ps.lower(ps.schedule("1f1b", 2, 16), grad_sync=4, **options)
    key = "n_microbatches=16, at a half of the seconds and bytes of a micro-batch"
    assert got[key] == simulated(graph, half, 20)


def test_orders_of_your_own() -> None:
    """They have no form for more micro-batches, nor has a named schedule that was changed."""
    own = ps.Schedule.from_orders([["0F0", "0B0"], ["1F0", "1B0"]])
    built = ps.schedule("gpipe", 2, 2)
    changed = replace(built, microbatch=built.microbatch[::-1].copy(), op=built.op.copy())
    changed = replace(changed, microbatch=1 - built.microbatch)
    for schedule in (own, changed):
        got = table_of(COSTS, schedule, 15)
        assert "lower(recompute='always')" in got
        assert not any("n_microbatches" in change for change in got)


@pytest.mark.slow
def test_warning_names_changes_of_small_graphs() -> None:
    """The fastest come first; other schedules are left to the method."""
    with pytest.warns(MemoryLimitWarning) as caught:
        timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), COSTS, memory_limit=15)
    assert str(caught[0].message).endswith(
        "; timeline.memory.changes_that_fit() simulates changes that would fit, such as "
        "lower(recompute='always') (makespan +22.2%)"
    )
    with pytest.warns(MemoryLimitWarning, match=r"simulates changes that would fit$"):
        ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), COSTS, memory_limit=1)
    with pytest.warns(MemoryLimitWarning, match=r"simulates changes that would fit$"):
        ps.simulate(ps.lower(ps.schedule("gpipe", 8, 32)), COSTS, memory_limit=15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not timeline.memory.changes_that_fit().empty
        assert len(timeline.memory.changes_that_fit(quick=True)) == 1
        tight = replace(timeline, limits=12.5)
        assert not tight.memory.changes_that_fit().empty
        assert tight.memory.changes_that_fit(quick=True).empty, "two changes are needed"


def test_simulations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out is counted."""
    timeline = predict_timeline(ps.lower(ps.schedule("gpipe", 2, 2)), COSTS, memory_limit=15)
    everything = timeline.memory.changes_that_fit(every=True)
    assert everything.attrs["n_untried"] == 0
    monkeypatch.setattr(memory_changes, "MOST_TASKS", 3 * len(timeline.graph))
    few = timeline.memory.changes_that_fit(every=True)
    assert few.attrs["n_untried"] > 0
    assert len(few) < len(everything)


def test_what_is_needed(tmp_path: Path) -> None:
    """A limit, costs, and a graph with its schedule; the message says what to do."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    timeline = predict_timeline(graph, COSTS, memory_limit=15)
    with pytest.raises(TimelineError, match=r"has no memory limit.*memory_limit="):
        predict_timeline(graph, COSTS).memory.changes_that_fit()
    with pytest.raises(TimelineError, match="has no costs"):
        replace(timeline, costs=None).memory.changes_that_fit()
    timeline.save(tmp_path / "timeline.csv")
    loaded = replace(ps.Timeline.load(tmp_path / "timeline.csv", costs=COSTS), limits=15)
    with pytest.raises(TimelineError, match=r"is not from pipesim\.lower"):
        loaded.memory.changes_that_fit()
    with pytest.warns(MemoryLimitWarning, match=r"lower\(schedule\) makes graphs for which"):
        ps.simulate(loaded.graph, COSTS, memory_limit=15)
    with pytest.raises(ArgumentError, match="every must be True or False"):
        timeline.memory.changes_that_fit(every="no")  # type: ignore[arg-type]


@given(graphs())
def test_graphs_know_their_schedule(graph: ps.TaskGraph) -> None:
    """Lowering it again, with the same arguments, gives the same tasks."""
    source = graph.options.source
    assert source is not None
    again = ps.lower(source.schedule, **source.arguments)
    assert (again.kind == graph.kind).all()
    assert (again.microbatch == graph.microbatch).all()
    assert (again.dependencies.values == graph.dependencies.values).all()
    assert (again.host == graph.host).all()
    assert (again.streams, again.options) == (graph.streams, graph.options)
    assert again.name == graph.name
