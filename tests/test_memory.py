"""Memory over time: rule 10 of docs/time.md."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from strategies import cases

import pipesim as ps
from pipesim.errors import TimelineError
from pipesim.memory import changes, static
from pipesim.ops import COMPUTE


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
    """Taken at the start of F, given back at the end of B."""
    timeline = simulated(TWO, ps.Costs(forward=1, backward=2, activation_bytes=(10, 7)))
    assert balance(timeline, 0) == [(0, 0), (0, 10), (1, 20), (7, 10), (9, 0)]
    assert balance(timeline, 1) == [(0, 0), (1, 7), (2, 14), (5, 7), (7, 0)]
    assert timeline.peak_memory.tolist() == [20, 14]


def test_held_throughout() -> None:
    """Parameters, as many gradients, and optimizer state, of all stages of a device."""
    costs = ps.Costs(1, 2, activation_bytes=1, parameter_bytes=(100, 30), optimizer_bytes=(7, 5))
    timeline = simulated(TWO, costs)
    assert static(timeline.graph, costs).tolist() == [207, 65]
    assert balance(timeline, 0)[0] == (0, 207)
    assert timeline.peak_memory.tolist() == [209, 67]
    one_device = simulated([["0F0", "1F0", "1B0", "0B0"]], costs)
    assert one_device.peak_memory.tolist() == [207 + 65 + 2]


def test_recompute_keeps_the_input_only() -> None:
    """F keeps the stage's input (3 bytes; none for stage 0, the caller has it), R the rest."""
    costs = ps.Costs(forward=1, backward=2, activation_bytes=10, output_bytes=(3, 99))
    timeline = simulated(TWO, costs, recompute="always")
    # Device 0: R1 at 2, fills the wait; B1 6 to 8; R0 8 to 9; B0 9 to 11.
    assert balance(timeline, 0) == [(0, 0), (2, 10), (8, 0), (8, 10), (11, 0)]
    # Device 1: F0 1, F1 2, R1 3 to 4, B1 4 to 6, R0 6 to 7, B0 7 to 9.
    assert balance(timeline, 1) == [(0, 0), (1, 3), (2, 6), (3, 13), (6, 3), (6, 10), (9, 0)]
    assert timeline.peak_memory.tolist() == [10, 13]


def test_recompute_except_the_last() -> None:
    """The last micro-batch takes everything at its F."""
    costs = ps.Costs(forward=1, backward=2, activation_bytes=10, output_bytes=(3, 99))
    timeline = simulated(TWO, costs, recompute="except_last")
    assert balance(timeline, 1) == [(0, 0), (1, 3), (2, 13), (5, 3), (5, 10), (8, 0)]


def test_input_is_no_more_than_the_activations() -> None:
    """A stage whose input is larger than what it keeps, as with activations given as 1."""
    costs = ps.Costs(forward=1, backward=2, activation_bytes=1, output_bytes=1000)
    assert simulated(TWO, costs, recompute="always").peak_memory.tolist() == [1, 2]


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


@given(cases())
def test_everything_taken_is_given_back(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Each device ends where it began, and never holds less than that."""
    graph, costs = case
    timeline = ps.simulate(graph, costs)
    frame, held = timeline.memory(), static(graph, costs)
    taken, given_back = changes(graph, costs)
    assert (taken >= 0).all()
    assert (given_back >= 0).all()
    assert (taken[~graph.is_op(COMPUTE)] == 0).all()
    for device in range(graph.n_devices):
        mine = frame[frame["device"] == device]
        assert mine["nbytes"].iloc[0] == mine["nbytes"].iloc[-1] == held[device]
        assert (mine["nbytes"] >= held[device]).all()
        assert (np.diff(mine["time"]) >= 0).all()
        assert mine["nbytes"].max() == timeline.peak_memory[device]


@given(cases())
def test_peak_is_what_an_order_of_events_shows(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """The same from the two columns of `changes`, walked task by task."""
    graph, costs = case
    timeline = ps.simulate(graph, costs)
    taken, given_back = changes(graph, costs)
    for device in range(graph.n_devices):
        now = peak = 0.0
        for task in np.flatnonzero((graph.device == device) & graph.on_compute):
            now += taken[task]
            peak = max(peak, now)
            now -= given_back[task]
        assert timeline.peak_memory[device] == static(graph, costs)[device] + peak


def test_partial_timeline() -> None:
    """After a failure: what has started holds its bytes, what has not ended keeps them."""
    whole = simulated(TWO, ps.Costs(forward=1, backward=2, activation_bytes=10))
    start, end = whole.start.copy(), whole.end.copy()
    end[whole.start >= 2] = np.nan  # F1 of device 1 was under way
    start[whole.start > 2] = np.nan
    partial = ps.Timeline(whole.graph, start, end, whole.nbytes, whole.costs)
    assert balance(partial, 0) == [(0, 0), (0, 10), (1, 20)]
    assert balance(partial, 1) == [(0, 0), (1, 10), (2, 20)]
    assert partial.peak_memory.tolist() == [20, 20]


def test_without_costs() -> None:
    """The message says how to get them."""
    whole = simulated(TWO, ps.Costs(1, 2))
    bare = ps.Timeline(whole.graph, whole.start, whole.end, whole.nbytes, name="mine")
    for ask in (lambda: bare.peak_memory, bare.memory):
        with pytest.raises(TimelineError, match=r"'mine' has no costs .*costs=\.\.\."):
            ask()
