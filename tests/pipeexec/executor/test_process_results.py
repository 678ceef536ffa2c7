"""The measurements of a step by each process: written, read, and merged."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipeexec.executor.step import Step
from pipeexec.executor.step_result import (
    ProcessResult,
    StepResult,
    gathered_result,
    merge_results,
)
from pipesim.timeline.timeline import Timeline

GRAPH = ps.lower(ps.schedule("1f1b", 3, 4))
TIMELINE = ps.simulate(GRAPH, ps.Costs(forward=1.0, backward=2.0))
NBYTES = np.where(GRAPH.pair >= 0, 64.0 + np.arange(len(GRAPH)), 0.0)
times = st.floats(-1e6, 1e6)


def part(devices: set[int], zero: float = 0.0, **options: Any) -> ProcessResult:
    """Return what the process of some devices would have measured, had it begun at ``zero``."""
    ran = np.isin(GRAPH.device, sorted(devices))
    start, end = (np.where(ran, x - zero, np.nan) for x in (TIMELINE.start, TIMELINE.end))
    timeline = Timeline(GRAPH, start, end, np.where(ran, NBYTES, 0.0))
    held = tuple(d + 1 if d in devices else 0 for d in range(3))
    return ProcessResult(zero, timeline, options.pop("losses", {}), 0.5, held, **options)


def test_a_process_tells_its_start_on_the_clock_of_rank_0() -> None:
    """Its own clock is 5 seconds ahead."""
    clock = SimpleNamespace(to_first=lambda time: time - 5.0)
    step: Any = SimpleNamespace(
        events=SimpleNamespace(zero=7.0, host_seconds=0.5), has_stopped=True, clock_error=0.25,
        processes=SimpleNamespace(clock=clock),
        readings=lambda: SimpleNamespace(timeline=TIMELINE, host_times=None),
    )  # fmt: skip
    assert Step.process_result(step).zero == 2.0
    step.processes = None
    assert Step.process_result(step).zero == 7.0


def assert_equal(a: ProcessResult, b: ProcessResult) -> None:
    assert (a.zero, a.losses, a.host_seconds, a.peak_held, a.loss_dtype) == (
        b.zero, b.losses, b.host_seconds, b.peak_held, b.loss_dtype
    )  # fmt: skip
    for x, y in zip(
        (a.timeline.start, a.timeline.end, a.timeline.nbytes),
        (b.timeline.start, b.timeline.end, b.timeline.nbytes),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


@given(
    devices=st.sets(st.integers(0, 2)),
    zero=times,
    losses=st.dictionaries(st.integers(0, 3), st.floats(allow_nan=False)),
)
def test_parts_are_written_and_read(
    devices: set[int], zero: float, losses: dict[int, float]
) -> None:
    """To the last bit, also where nothing ran, and where losses are infinite."""
    local = part(devices, zero, losses=losses, loss_dtype="float64" if losses else "")
    assert_equal(ProcessResult.unpack(GRAPH, local.pack()), local)


def test_a_loss_that_is_no_number_is_read() -> None:
    local = part({2}, losses={0: float("nan")}, loss_dtype="float32")
    assert np.isnan(ProcessResult.unpack(GRAPH, local.pack()).losses[0])


@given(owner=st.tuples(*[st.integers(0, 3)] * 3), zeros=st.tuples(*[st.integers(-9, 9)] * 4))
def test_the_whole_is_what_its_parts_were_of(
    owner: tuple[int, ...], zeros: tuple[int, ...]
) -> None:
    """Whichever process has which devices, and whenever each began; some have none."""
    parts = [
        part({d for d in range(3) if owner[d] == rank}, float(zero),
             losses={rank: 0.25 * rank}, loss_dtype="float32" if rank % 2 else "")
        for rank, zero in enumerate(zeros)
    ]  # fmt: skip
    merged = merge_results(GRAPH, parts)
    first = min(zeros)
    assert merged.zero == first
    assert merged.timeline.complete
    np.testing.assert_array_equal(merged.timeline.start, TIMELINE.start - first)
    np.testing.assert_array_equal(merged.timeline.end, TIMELINE.end - first)
    np.testing.assert_array_equal(merged.timeline.nbytes, NBYTES)
    assert merged.losses == {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75}
    assert merged.peak_held == (1, 2, 3)
    assert merged.host_seconds == 2.0
    assert merged.loss_dtype == "float32"


def test_parts_of_a_step_that_failed_have_no_peaks() -> None:
    """One alone, or several; tasks that ran nowhere stay out."""
    parts = [ProcessResult(0.0, part({d}).timeline, {}, 0.5) for d in (0, 2)]
    for some in (parts, parts[:1]):
        merged = merge_results(GRAPH, some)
        assert merged.peak_held == ()
        assert not merged.timeline.complete
        assert merged.timeline.ran.sum() == sum(p.timeline.ran.sum() for p in some)


def test_issue_times_are_put_together() -> None:
    """On one clock, as starts are; unknown where a process knows none, as those with GPUs do."""
    issued = TIMELINE.start / 2
    parts = []
    for device, zero in ((0, 0.0), (1, 3.0), (2, 1.0)):
        local = part({device}, zero)
        timeline = replace(local.timeline, issued=None if device == 1 else issued - zero)
        parts.append(replace(local, timeline=timeline))
    read = [ProcessResult.unpack(GRAPH, item.pack()) for item in parts]
    actual = merge_results(GRAPH, read).timeline.issued
    assert read[1].timeline.issued is None
    np.testing.assert_array_equal(actual, np.where(GRAPH.device == 1, np.nan, issued))


def test_every_field_is_sent_and_merged() -> None:
    """Give a new field a value here that is not its default."""
    local = part(
        {0, 1, 2}, losses=dict.fromkeys(range(4), 0.5), loss_dtype="float32", clock_error=0.25,
        host_times=np.arange(len(GRAPH)) + 0.5, metrics={"accuracy": (3.0, 4.0)}, votes=1,
    )  # fmt: skip
    local = replace(local, zero=2.0, timeline=replace(local.timeline, issued=TIMELINE.start))
    bare = ProcessResult(0.0, local.timeline, {}, 0.0)
    result = StepResult((), local.timeline, (), 0.0)
    agreed: dict[str, Any] = {
        "n_losses": 2, "grad_norm": 1.5, "skipped": True, "loss_stages": (1,)
    }  # fmt: skip
    read = ProcessResult.unpack(GRAPH, local.pack())
    gathered = gathered_result(replace(result, **agreed), merge_results(GRAPH, [read]))
    names = {x.name for x in fields(ProcessResult)} - {"timeline"}
    for name in names:
        value = getattr(local, name)
        assert not np.array_equal(value, getattr(bare, name)), f"{name} has its default"
        for other in (read, merge_results(GRAPH, [read])):
            np.testing.assert_array_equal(getattr(other, name), value, name)
    for name in (names & {x.name for x in fields(StepResult)}) - {"losses"}:
        np.testing.assert_array_equal(getattr(gathered, name), getattr(local, name), name)
    # Others, or empty after `gather`.
    separate = {"timeline", "part", "metric_sums", "milestones", "lacks_losses"}
    assert {x.name for x in fields(StepResult)} - names - separate == agreed.keys()
    assert {name: getattr(gathered, name) for name in agreed} == agreed
