"""Memory over time: rule 10 of docs/time.md."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from strategies import cases

import pipesim as ps
from pipesim.errors import CostsError, TimelineError
from pipesim.ops import COMPUTE, TRANSFERS, Op
from pipesim.timeline.task_bytes import changes, static, workspaces


def simulated(orders: list[list[str]], costs: ps.Costs, recompute: str = "never") -> ps.Timeline:
    """Run orders without optimizer steps."""
    graph = ps.lower(ps.Schedule.from_orders(orders), recompute=recompute, step="none")
    return ps.simulate(graph, costs)


def balance(timeline: ps.Timeline, device: int) -> list[tuple[float, float]]:
    """Return ``(time, bytes)`` of a device after each change that changes something."""
    frame = timeline.memory()
    rows = frame[frame["device"] == device][["time", "nbytes"]].to_numpy().tolist()
    kept = [row for before, row in zip([[None, None], *rows], rows, strict=False)
            if row[1] != before[1]]  # fmt: skip
    return [(time, nbytes) for time, nbytes in kept]


TWO = [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]]


def test_forward_takes_and_backward_gives() -> None:
    """Allocated at the start of F, freed at the end of B."""
    timeline = simulated(TWO, ps.Costs(forward=1, backward=2, activation_bytes=(10, 7)))
    assert balance(timeline, 0) == [(0, 0), (0, 10), (1, 20), (7, 10), (9, 0)]
    assert balance(timeline, 1) == [(0, 0), (1, 7), (2, 14), (5, 7), (7, 0)]
    assert timeline.memory.peak.tolist() == [20, 14]


def test_held_throughout() -> None:
    """Parameters, as many gradients, and optimizer state, of all stages of a device."""
    costs = ps.Costs(1, 2, activation_bytes=1, parameter_bytes=(100, 30), optimizer_bytes=(7, 5))
    timeline = simulated(TWO, costs)
    assert static(timeline.graph, costs).tolist() == [207, 65]
    assert balance(timeline, 0)[0] == (0, 207)
    assert timeline.memory.peak.tolist() == [209, 67]
    one_device = simulated([["0F0", "1F0", "1B0", "0B0"]], costs)
    assert one_device.memory.peak.tolist() == [207 + 65 + 2]


def test_recompute_keeps_the_input_only() -> None:
    """F keeps the stage's input (3 bytes; none for stage 0, the caller has it), R the rest."""
    costs = ps.Costs(forward=1, backward=2, activation_bytes=10, output_bytes=(3, 99))
    timeline = simulated(TWO, costs, recompute="always")
    # Device 0: R1 at 2, fills the wait; B1 6 to 8; R0 8 to 9; B0 9 to 11.
    assert balance(timeline, 0) == [(0, 0), (2, 10), (8, 0), (8, 10), (11, 0)]
    # Device 1: F0 1, F1 2, R1 3 to 4, B1 4 to 6, R0 6 to 7, B0 7 to 9.
    assert balance(timeline, 1) == [(0, 0), (1, 3), (2, 6), (3, 13), (6, 3), (6, 10), (9, 0)]
    assert timeline.memory.peak.tolist() == [10, 13]


def test_recompute_except_the_last() -> None:
    """The last micro-batch takes everything at its F."""
    costs = ps.Costs(forward=1, backward=2, activation_bytes=10, output_bytes=(3, 99))
    timeline = simulated(TWO, costs, recompute="except_last")
    assert balance(timeline, 1) == [(0, 0), (1, 3), (2, 13), (5, 3), (5, 10), (8, 0)]


def test_input_is_no_more_than_the_activations() -> None:
    """A stage whose input is larger than what it keeps, as with activations given as 1."""
    costs = ps.Costs(forward=1, backward=2, activation_bytes=1, output_bytes=1000)
    assert simulated(TWO, costs, recompute="always").memory.peak.tolist() == [1, 2]


def test_split_backward() -> None:
    """I gives back all but what W needs, W the rest."""
    costs = ps.Costs(
        forward=1, input_grad=1, weight_grad=1, activation_bytes=10, weight_grad_bytes=4
    )
    timeline = simulated([["0F0", "0F1", "0I0", "0I1", "0W1", "0W0"]], costs)
    assert balance(timeline, 0) == [(0, 0), (0, 10), (1, 20), (3, 14), (4, 8), (5, 4), (6, 0)]


def test_split_backward_with_recompute() -> None:
    """R brings back what I and W give back."""
    costs = ps.Costs(
        forward=1, input_grad=1, weight_grad=1, activation_bytes=10, weight_grad_bytes=4
    )
    timeline = simulated([["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]], costs, recompute="always")
    assert balance(timeline, 0) == [
        (0, 0), (2, 10), (4, 4), (5, 0), (5, 10), (7, 4), (8, 0)
    ]  # fmt: skip


def test_weight_gradient_may_need_more() -> None:
    """Inputs and output gradients of layers can be more than what autograd held: I takes them."""
    costs = ps.Costs(
        forward=1, input_grad=1, weight_grad=1, activation_bytes=2, weight_grad_bytes=5
    )
    timeline = simulated([["0F0", "0I0", "0W0"]], costs)
    assert balance(timeline, 0) == [(0, 0), (0, 2), (1, 5), (3, 0)]


@pytest.mark.slow
@given(cases())
def test_everything_taken_is_given_back(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Each device ends where it began, and never holds less than that."""
    graph, costs = case
    timeline = ps.simulate(graph, costs)
    frame, held = timeline.memory(), static(graph, costs)
    allocated, given_back = changes(graph, costs)
    assert (allocated >= 0).all()
    assert (given_back >= 0).all()
    messages = TRANSFERS if graph.forward_only else frozenset()
    assert (allocated[~graph.is_op(COMPUTE | messages | {Op.RELOAD, Op.UNSHARD})] == 0).all()
    others = {Op.REDUCE_GRAD, Op.OFFLOAD}
    assert (given_back[~graph.is_op(COMPUTE | messages | others)] == 0).all()
    assert allocated.sum() == given_back.sum()
    for device in range(graph.n_devices):
        own = frame[frame["device"] == device]
        assert own["nbytes"].iloc[0] == own["nbytes"].iloc[-1] == held[device]
        assert (own["nbytes"] >= held[device]).all()
        assert (np.diff(own["time"]) >= 0).all()
        assert own["nbytes"].max() == timeline.memory.peak[device]


@pytest.mark.slow
@given(cases())
def test_peak_is_what_an_order_of_events_shows(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """The same from the two columns of `changes`, walked task by task.

    Whenever a task takes bytes, each earlier one holds its own until it ends: on its stream those
    before it have ended, on others those whose end is not later than its start. Of those that take
    no time at that moment, those with smaller ids.
    """
    graph, costs = case
    # Messages and RELOADs take bytes too.
    assume(not graph.forward_only and not graph.is_op(frozenset({Op.RELOAD})).any())
    timeline = ps.simulate(graph, costs)
    allocated, given_back = changes(graph, costs)
    temporary = workspaces(graph, costs)[graph.kind]
    for device in range(graph.n_devices):
        own = graph.device == device
        others = np.flatnonzero(own & ~graph.on_compute & (given_back > 0))
        gathers = np.flatnonzero(own & ~graph.on_compute & (allocated > 0))
        now = peak = 0.0
        moments = []  # of each taking task: what others hold then
        for task in np.flatnonzero(own & (graph.on_compute | (allocated > 0))):
            moment, start, end = timeline.start[task], timeline.start[others], timeline.end[others]
            ended = (end < moment) | (end == moment) & ((start < end) | (others < task))
            started = timeline.start[gathers] < moment
            started |= (timeline.start[gathers] == moment) & (gathers <= task)
            elsewhere = allocated[gathers[started]].sum() - given_back[others[ended]].sum()
            moments.append((task, moment, elsewhere))
        for task, moment, elsewhere in moments:
            if graph.on_compute[task]:
                now += allocated[task]
                peak = max(peak, now + temporary[task] + elsewhere)
                now -= given_back[task]
                continue
            computes = np.flatnonzero(own & graph.on_compute)
            start, end = timeline.start[computes], timeline.end[computes]
            started = (start < moment) | (start == moment) & (computes < task)
            over = (end < moment) | (end == moment) & ((start < end) | (computes < task))
            held = allocated[computes[started]].sum() - given_back[computes[over]].sum()
            held += temporary[computes[started & ~over]].sum()
            peak = max(peak, held + elsewhere)
        assert timeline.memory.peak[device] == static(graph, costs)[device] + peak


WAITING = ps.Costs(
    forward=1, backward=2, reduce_grad=5, activation_bytes=1, parameter_bytes=10, gradient_bytes=100
)


def test_gradients_wait_for_reductions_that_are_slower_than_backwards() -> None:
    """One stage, K = 4: F0 B0 F1 B1 F2 B2 F3 B3 on compute, R0 R1 R2 R3 from 3, 8, 13 and 18 on.

    B0's gradient is the one that the others are added to. Those of B1 to B3 wait until 13, 18, 23.
    """
    graph = ps.lower(ps.schedule("1f1b", 1, 4), n_replicas=2, grad_sync="every", step="none")
    timeline = ps.simulate(graph, WAITING)
    assert timeline.frame.query("op == 'REDUCE_GRAD' and device == 0")["end"].tolist() == [
        8, 13, 18, 23
    ]  # fmt: skip
    assert balance(timeline, 0) == [
        (0, 110), (0, 111), (3, 110), (3, 111), (4, 211), (6, 210), (6, 211), (7, 311), (9, 310),
        (9, 311), (10, 411), (12, 410), (13, 310), (18, 210), (23, 110),
    ]  # fmt: skip
    assert timeline.memory.peak.tolist() == [411, 411]


@pytest.mark.parametrize(
    ("grad_sync", "reduce_grad", "peaks"),
    [
        ("last", 5, [111, 111]),
        ("bucketed", 5, [111, 111]),
        ("every", 5, [411, 411]),
        ("every", 1, [211, 211]),  # each is reduced before the next backward begins
        ("every", 2, [311, 311]),  # the third backward begins before B1's is reduced
        ("every", 3, [311, 311]),
        ("every", 4, [411, 411]),
        (2, 5, [211, 211]),
        (2, 1, [211, 211]),
    ],
)
def test_how_many_gradients_wait(
    grad_sync: str | int, reduce_grad: float, peaks: list[float]
) -> None:
    """By how long a reduction takes: 3 s pass from one backward to the next."""
    schedule = ps.schedule("1f1b", 1, 4)
    graph = ps.lower(schedule, n_replicas=2, grad_sync=grad_sync, step="none")
    timeline = ps.simulate(graph, replace(WAITING, reduce_grad=reduce_grad))
    assert timeline.memory.peak.tolist() == peaks
    alone = ps.lower(schedule, grad_sync=grad_sync, step="none")  # nothing to wait for
    assert ps.simulate(alone, WAITING).memory.peak.tolist() == [111]


def test_each_stage_waits_by_itself() -> None:
    """Stage 0 reduces after each micro-batch, stage 1 after the last; and in each mini-batch."""
    costs = replace(WAITING, activation_bytes=0, reduce_grad=100, input_grad=1, weight_grad=1)
    graph = ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=2, grad_sync=("every", "last"))
    assert ps.simulate(graph, costs).memory.peak.tolist() == [410, 110] * 2
    schedule = ps.schedule("zb_h1", 1, 4).with_updates(2, "stashed")
    graph = ps.lower(schedule, n_replicas=2, grad_sync="every")
    held = ps.simulate(graph, costs)  # of each two micro-batches the second one waits
    assert (held.memory.peak - static(graph, costs)).tolist() == [100, 100]


def test_tasks_of_no_time_take_before_they_give() -> None:
    """B1 gives its activation back, then B0 makes a gradient that waits, all at 2."""
    graph = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=2, grad_sync="every", step="none")
    timeline = ps.simulate(graph, replace(WAITING, backward=0))
    assert balance(timeline, 0) == [
        (0, 110), (0, 111), (1, 112), (2, 111), (2, 211), (2, 210), (12, 110)
    ]  # fmt: skip
    assert timeline.memory.peak.tolist() == [211, 211]


def test_partial_timeline() -> None:
    """After a failure: what has started holds its bytes, what has not ended keeps them."""
    whole = simulated(TWO, ps.Costs(forward=1, backward=2, activation_bytes=10))
    start, end = whole.start.copy(), whole.end.copy()
    end[whole.start >= 2] = np.nan  # F1 of device 1 was under way
    start[whole.start > 2] = np.nan
    partial = ps.Timeline(whole.graph, start, end, whole.nbytes, whole.costs)
    assert balance(partial, 0) == [(0, 0), (0, 10), (1, 20)]
    assert balance(partial, 1) == [(0, 0), (1, 10), (2, 20)]
    assert partial.memory.peak.tolist() == [20, 20]


def test_without_costs() -> None:
    """The message says how to get them."""
    whole = simulated(TWO, ps.Costs(1, 2))
    bare = ps.Timeline(whole.graph, whole.start, whole.end, whole.nbytes, name="mine")
    for ask in (lambda: bare.memory.peak, bare.memory):
        with pytest.raises(TimelineError, match=r"'mine' has no costs .*costs=\.\.\."):
            ask()


WORKSPACE = ps.Costs(
    forward=1,
    backward=2,
    activation_bytes=10,
    forward_workspace_bytes=(3, 4),
    backward_workspace_bytes=(20, 30),
)


def test_workspace_is_held_while_a_task_runs() -> None:
    """Two stages, two micro-batches: F0 F1 B1 B0, with 3 bytes more during F and 20 during B."""
    timeline = simulated(TWO, WORKSPACE)
    assert balance(timeline, 0) == [
        (0, 0), (0, 13), (1, 10), (1, 23), (2, 20), (5, 40), (7, 10), (7, 30), (9, 0)
    ]  # fmt: skip
    assert timeline.memory.peak.tolist() == [40, 50]


def test_workspace_of_every_operation() -> None:
    """F and R hold that of forward; B, I and W that of backward."""
    costs = replace(WORKSPACE, output_bytes=10, input_grad=1, weight_grad=1, weight_grad_bytes=4)
    split = simulated([["0F0", "0I0", "0W0"]], one_stage(costs))
    assert balance(split, 0) == [(0, 0), (0, 13), (1, 10), (1, 30), (2, 4), (2, 24), (3, 0)]
    again = simulated([["0F0", "0B0"]], one_stage(costs), recompute="always")
    # Stage 0 keeps no input: F ends with 0 bytes, R takes 10.
    assert balance(again, 0) == [(0, 0), (0, 3), (1, 0), (1, 13), (2, 10), (2, 30), (4, 0)]


def one_stage(costs: ps.Costs) -> ps.Costs:
    """Return the costs of stage 0 alone."""
    return replace(costs, forward_workspace_bytes=3, backward_workspace_bytes=20)


def test_two_stages_of_a_device_share_a_workspace() -> None:
    """They run one after the other: the larger workspace counts, not the sum."""
    timeline = simulated([["0F0", "1F0", "1B0", "0B0"]], WORKSPACE)
    assert timeline.memory.peak.tolist() == [20 + 30]
    placement = ps.Schedule.from_orders([["0F0", "1F0", "1B0", "0B0"]]).placement
    device = ps.Costs(1, 2, activation_bytes=(10,), backward_workspace_bytes=(20,))
    chunks = device.in_chunks(placement)
    assert chunks.activation_bytes == (5, 5)
    assert chunks.backward_workspace_bytes == (20, 20)


def test_breakdown_by_hand() -> None:
    """Device 0 peaks in B1, with two micro-batches; a tenth of its bytes is the reserve."""
    costs = replace(
        WORKSPACE,
        parameter_bytes=100,
        gradient_bytes=200,
        optimizer_bytes=(300, 600),
        memory_reserve=0.1,
    )
    timeline = simulated(TWO, costs)
    table = timeline.memory.breakdown()
    assert table.index.name == "device"
    assert table.to_dict("index") == {
        0: {
            "parameters": 100, "gradients": 200, "optimizer": 300, "activations": 20,
            "workspace": 20, "buffers": 0, "reserve": 64, "total": 704,
        },
        1: {
            "parameters": 100, "gradients": 200, "optimizer": 600, "activations": 20,
            "workspace": 30, "buffers": 0, "reserve": 95, "total": 1045,
        },
    }  # fmt: skip
    assert timeline.memory.peak.tolist() == [640, 950]


def test_breakdown_of_waiting_gradients_and_versions() -> None:
    """Gradients that wait for reductions are buffers; both versions of weights are parameters."""
    graph = ps.lower(ps.schedule("1f1b", 1, 4), n_replicas=2, grad_sync="every", step="none")
    row = ps.simulate(graph, WAITING).memory.breakdown().loc[0]
    assert row[["parameters", "gradients", "activations", "buffers"]].tolist() == [10, 100, 1, 300]
    schedule = ps.schedule("1f1b", 2, 4).with_updates(2, "double_buffered")
    costs = ps.Costs(1, 2, parameter_bytes=7)
    versions = ps.simulate(ps.lower(schedule), costs).memory.breakdown()
    assert versions["parameters"].tolist() == [14, 14]
    nothing = ps.simulate(ps.lower(schedule), ps.Costs(1, 2)).memory.breakdown()
    assert (nothing == 0).all(axis=None)


@pytest.mark.slow
@given(cases())
def test_breakdown_sums_to_the_peak(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Every part is at least 0. They sum to the peak, up to rounding of thirds of a byte."""
    graph, costs = case
    timeline = ps.simulate(graph, replace(costs, memory_reserve=0.5))
    table = timeline.memory.breakdown()
    assert (table >= 0).all(axis=None)
    parts = table.drop(columns=["reserve", "total"]).sum(axis=1)
    assert parts.tolist() == pytest.approx(timeline.memory.peak.tolist(), rel=1e-12)
    assert table["total"].tolist() == (1.5 * timeline.memory.peak).tolist()
    workspace = workspaces(graph, costs)
    assert set(table["workspace"]) <= {0.0, *workspace.tolist()}


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "a", None, (0.1, 0.2), True])
def test_bad_reserve(value: object) -> None:
    """A share is one finite number of at least 0."""
    with pytest.raises(CostsError, match="memory_reserve must be a finite share >= 0"):
        ps.Costs(1, 2, memory_reserve=value)  # type: ignore[arg-type]


def test_memory_fields_survive_files() -> None:
    """Costs come back from `to_dict`, and costs of a timeline keep them."""
    costs = replace(WORKSPACE, memory_reserve=0.25)
    assert ps.Costs.from_dict(costs.to_dict()) == costs
    assert "memory_reserve" not in WORKSPACE.to_dict()
    measured = ps.Costs.from_timeline(simulated(TWO, costs))
    assert measured.backward_workspace_bytes == (20, 30)
    assert measured.memory_reserve == 0.25


def test_layers_of_a_stage_share_a_workspace() -> None:
    """By hand: when the first layer's backward holds 9, the second holds its 4 no longer."""
    columns = {"forward": [1, 1, 1], "backward": [2, 2, 2], "activation_bytes": [4, 4, 4]}
    layers = ps.Layers({**columns, "backward_workspace_bytes": [9, 4, 6]})
    costs = layers.costs([2, 1])
    assert costs.activation_bytes == (8, 4)
    assert costs.backward_workspace_bytes == (5, 6)
    assert ps.Layers({**columns, "backward_workspace_bytes": [7, 4, 6]}).costs(
        [3]
    ).backward_workspace_bytes == (6,)
