"""The page's numbers against those of pipesim: its program runs in Deno, on random graphs."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from javascript import answering
from strategies import cases, noises

import pipesim as ps
from pipesim.analysis.critical_path import last_waits
from pipesim.analysis.idle_gaps import find_gaps
from pipesim.plot.page.save import packed_page
from pipesim.plot.page.timeline_columns import simulation_inputs

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "6"))

READ = """
import { readBlock } from "./data/document.js";
import { findGaps } from "./data/gaps.js";
import { memoryOverTime } from "./data/memory.js";
import { scaledInputs, simulate, unchanged } from "./data/simulator.js";

function answer(bytes) {
  const size = new DataView(bytes.buffer).getUint32(0, true);
  const changes = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  return readBlock(bytes.subarray(4 + size)).tracks.map((track) => describe(track, changes));
}
function describe({ timeline, graph, memory, inputs, refusal, resolution }, changes) {
  const explained = ({ start, end, before, reason }) => ({
    start: [...start], end: [...end], before: [...before], reason: [...reason],
  });
  return {
    ...explained(timeline), busy: [...timeline.busy], bubble: timeline.bubble,
    makespan: timeline.makespan, path: timeline.criticalPath, refusal, resolution,
    names: [...timeline.start.keys()].map((task) => graph.taskName(task)),
    gaps: timeline.isComplete ? findGaps(timeline) : null,
    memory: memory && memoryOverTime(timeline, memory).map(({ times, nbytes, peak }) => ({
      times: [...times], nbytes: [...nbytes], peak,
    })),
    simulated: inputs && !refusal && explained(simulate(graph, inputs)),
    changed: inputs && !refusal && changes.map((change) => {
      const inputsThen = scaledInputs(graph, inputs, { ...unchanged(), ...change });
      return [...simulate(graph, inputsThen).end];
    }),
  };
}
"""


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[[bytes], Any]]:
    """Return a function that asks the page's program."""
    with answering(READ) as function:
        yield function


def read(ask: Callable[[bytes], Any], item: Any, *changes: dict[str, Any]) -> dict[str, Any]:
    """Return what the page computes of a timeline, and its ends under changed factors."""
    _, data = packed_page(item)
    text = json.dumps(changes).encode()
    sent = len(text).to_bytes(4, "little") + text + zlib.decompress(data)
    return ask(sent)[0]


def floats(values: list[float | None]) -> np.ndarray:
    """Return numbers in which null stands for NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def check(timeline: ps.Timeline, answer: dict[str, Any]) -> None:
    """Compare all that the page knows of a timeline."""
    rounding = answer["resolution"]
    assert rounding <= 1e-9 * max(1.0, timeline.makespan)
    np.testing.assert_allclose(floats(answer["start"]), timeline.start, rtol=0, atol=rounding)
    np.testing.assert_allclose(floats(answer["end"]), timeline.end, rtol=0, atol=rounding)
    assert answer["names"] == [str(timeline.graph.task(k)) for k in range(len(timeline))]
    waits = last_waits(timeline)
    np.testing.assert_array_equal(answer["before"], waits.task)
    np.testing.assert_array_equal(answer["reason"], waits.reason)
    assert answer["makespan"] == pytest.approx(timeline.makespan, rel=0, abs=rounding)
    np.testing.assert_allclose(answer["busy"], timeline.busy, rtol=1e-12, atol=1e3 * rounding)
    assert answer["bubble"] == pytest.approx(timeline.bubble_fraction, abs=1e-12 + rounding)
    if timeline.ran.any():
        assert answer["path"] == timeline.why.critical_path().index.tolist()
    if timeline.complete and not rounding:
        check_gaps(timeline, answer["gaps"])
    if answer["memory"] is not None and not rounding:
        check_memory(timeline, answer["memory"])


def check_gaps(timeline: ps.Timeline, gaps: list[dict[str, Any]]) -> None:
    """Compare idle gaps, which the causes in the page are listed for."""
    expected = find_gaps(timeline)
    for name in ("device", "since", "until", "task", "previous"):
        np.testing.assert_array_equal([gap[name] for gap in gaps], getattr(expected, name))


def check_memory(timeline: ps.Timeline, devices: list[dict[str, Any]]) -> None:
    """Compare the bytes that devices hold over time."""
    frame = timeline.memory()
    for device, held in enumerate(devices):
        rows = frame[frame["device"] == device]
        np.testing.assert_array_equal(held["times"], rows["time"])
        np.testing.assert_allclose(held["nbytes"], rows["nbytes"], atol=1e-6)
        assert held["peak"] == pytest.approx(timeline.memory.peak[device])


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_pages_simulate_as_pipesim(
    ask: Callable[[bytes], Any], case: tuple[ps.TaskGraph, ps.Costs]
) -> None:
    """Times, waits, gaps and bytes are equal, whether they are stored or simulated."""
    timeline = ps.simulate(*case)
    answer = read(ask, timeline)
    check(timeline, answer)
    inputs = simulation_inputs(timeline)
    event("simulated" if inputs.is_exact else "stored")
    if inputs.is_exact and not inputs.refusal:
        assert answer["simulated"]["start"] == timeline.start.tolist()
        assert answer["simulated"]["end"] == timeline.end.tolist()
        waits = last_waits(timeline)
        assert answer["simulated"]["before"] == waits.task.tolist()
        assert answer["simulated"]["reason"] == waits.reason.tolist()


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), case=cases())
def test_pages_of_other_times(
    ask: Callable[[bytes], Any], data: st.DataObject, case: tuple[ps.TaskGraph, ps.Costs]
) -> None:
    """Times of noise and of partial runs are exact; a replay ends when that of pipesim does."""
    graph, costs = case
    timeline = ps.simulate(graph, costs, noise=data.draw(noises(graph)))
    missing = data.draw(st.sampled_from([0, 0, 1, 2]))
    end, start = timeline.end.copy(), timeline.start.copy()
    if missing:
        order = np.argsort(start)
        end[order[-missing:]] = np.nan
        start[order[-1]] = np.nan
    answer = read(ask, replace(timeline, start=start, end=end))
    check(replace(timeline, start=start, end=end), answer)
    if answer["simulated"] and not simulation_inputs(timeline).is_exact:
        again = ps.replay(timeline)
        np.testing.assert_allclose(answer["simulated"]["end"], again.end, rtol=1e-9, atol=1e-6)


NETWORK = ps.Network(latency=0.25, bandwidth=8.0)
CHANGED = [
    ({"ops": {int(ps.Op.F): 0.3}}, lambda c: c.scaled(0.3, op="F")),
    ({"ops": {int(ps.Op.B): 1.7}}, lambda c: c.scaled(1.7, op="B")),
    ({"stages": {2: 2.5}}, lambda c: c.scaled(2.5, stage=2, n_stages=4)),
    ({"latency": 3.0}, lambda c: replace(c, network=NETWORK.scaled(latency=3.0))),
    ({"bandwidth": 2.0}, lambda c: replace(c, network=NETWORK.scaled(bandwidth=2.0))),
    ({"bandwidth": 0.3}, lambda c: replace(c, network=NETWORK.scaled(bandwidth=0.3))),
    ({"launch": 4.0}, lambda c: replace(c, launch=4 * c.launch)),
]


@pytest.mark.parametrize("n_replicas", [1, 2])
@pytest.mark.parametrize("grad_sync", ["last", "every"])
def test_changes_are_those_of_costs(
    ask: Callable[[bytes], Any], n_replicas: int, grad_sync: str
) -> None:
    """A slider gives the times of changed costs; a changed bandwidth up to rounding."""
    graph = ps.lower(ps.schedule("1f1b", 4, 6), n_replicas=n_replicas, grad_sync=grad_sync)
    costs = ps.Costs(
        forward=1.1, backward=(2.0, 2.3, 1.9, 2.2), optimizer_step=0.7, output_bytes=3.0,
        output_seconds=0.2, launch=0.05, parameter_bytes=16.0, network=NETWORK,
    )  # fmt: skip
    answer = read(ask, ps.simulate(graph, costs), *(change for change, _ in CHANGED))
    for (change, make), end in zip(CHANGED, answer["changed"], strict=True):
        expected = ps.simulate(graph, make(costs)).end
        if "bandwidth" in change:
            np.testing.assert_allclose(end, expected, rtol=1e-12)
        else:
            np.testing.assert_array_equal(end, expected, err_msg=str(change))


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_rendezvous_waits_for_the_host_of_the_receiver(
    ask: Callable[[bytes], Any], slow: int
) -> None:
    """A RECV that no host has issued yet is not reached, although its stream is free."""
    graph = ps.lower(ps.schedule("1f1b", 3, 4), rendezvous=True, hosts="per_device")
    launch = tuple(2.0 if stage == slow else 0.125 for stage in range(3))
    costs = ps.Costs(1.0, 2.0, output_bytes=3.0, launch=launch, network=NETWORK)
    timeline = ps.simulate(graph, costs)
    answer = read(ask, timeline)
    check(timeline, answer)
    assert answer["simulated"]["start"] == timeline.start.tolist()
    assert answer["simulated"]["reason"] == last_waits(timeline).reason.tolist()


def test_gaps_of_tasks_that_overlap(ask: Callable[[bytes], Any]) -> None:
    """A task that ends before the one before it begins no gap, as in measured times."""
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 1, 2), step="none"), ps.Costs(1.0, 1.0))
    start, end = np.array([0.0, 1.0, 3.0, 7.0]), np.array([5.0, 2.0, 4.0, 8.0])
    overlapping = replace(timeline, start=start, end=end)
    answer = read(ask, overlapping)
    check_gaps(overlapping, answer["gaps"])
    assert [(gap["since"], gap["until"]) for gap in answer["gaps"]] == [(5.0, 7.0)]
