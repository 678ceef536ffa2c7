"""Clocks of processes: offset and drift from made-up samples, and from real round trips."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks

from pipeexec.distributed import Processes
from pipeexec.distributed.process_clock import _MOST_SAMPLES, ProcessClock

seeds = st.integers(0, 1 << 16)


def clock(samples: list[tuple[float, float, float]]) -> ProcessClock:
    """Return a clock that has taken these samples."""
    result = ProcessClock(1, 2, None)  # type: ignore[arg-type]  # has no connections
    result._samples = samples
    return result


def sampled(
    offset: float, drift: float, noise: float, n: int = 50, every: float = 1.0, seed: int = 0
) -> ProcessClock:
    """Return a clock that stands so to rank 0's, and was compared every so many seconds."""
    random = np.random.default_rng(seed)
    time = 1e5 + every * np.arange(n)
    shown = offset + drift * (time - time[0]) + noise * random.uniform(-1, 1, n)
    return clock(list(zip(time.tolist(), shown.tolist(), [1e-4] * n, strict=True)))


@given(offset=st.floats(-1e4, 1e4), drift=st.floats(-1e-4, 1e-4), seed=seeds)
def test_offset_and_drift_are_found(offset: float, drift: float, seed: int) -> None:
    """To within the samples' noise, so that times of 49 s later are as well."""
    noise = 2e-5
    subject = sampled(offset, drift, noise, seed=seed)
    fit = subject.alignment
    assert fit.offset == pytest.approx(offset, abs=noise)
    assert fit.drift == pytest.approx(drift, abs=noise / 10)
    assert fit.residual <= noise
    assert (fit.round_trip, fit.n_samples) == (1e-4, 50)
    for later in (0.0, 20.0, 49.0):
        remote = 1e5 + later - offset - drift * later
        assert subject.to_first(1e5 + later) == pytest.approx(remote, abs=2 * noise)


@given(offset=st.floats(-10, 10), noise=st.floats(0, 1e-3), seed=seeds)
def test_no_drift_is_found_in_a_moment(offset: float, noise: float, seed: int) -> None:
    """Samples of less than two seconds show the clocks' noise; their middle counts."""
    fit = sampled(offset, 0.0, noise, n=9, every=0.1, seed=seed).alignment
    assert fit.drift == 0.0
    assert fit.offset == pytest.approx(offset, abs=noise + 1e-12)


@pytest.mark.parametrize("n", [1, 2])
def test_few_samples_give_an_offset(n: int) -> None:
    fit = sampled(3.0, 0.0, 0.0, n=n, every=60.0).alignment
    assert (fit.offset, fit.drift, fit.residual, fit.n_samples) == (3.0, 0.0, 0.0, n)


def test_a_clock_without_samples_is_rank_0s() -> None:
    first = clock([])
    assert first.alignment == (0.0, 0.0, 0.0, 0.0, 0)
    assert first.to_first(12.5) == 12.5


def compare(processes: Processes, n: int) -> dict[str, Any]:
    """Compare clocks so often; return the alignment, and how long the record gets."""
    before = processes.clock.alignment.n_samples
    for _ in range(n):
        processes.clock.sample(n_trips=2)
    shared = processes.share(processes.clock.alignment)
    totals = processes.total([processes.rank, 0.5])
    return {"before": before, "alignment": list(processes.clock.alignment), "shared": shared,
            "totals": totals}  # fmt: skip


def test_clocks_of_one_machine_agree(four_ranks: Ranks) -> None:
    """They are one clock: what is found is the error, which half a round trip bounds."""
    results = four_ranks.run(compare, n=5)
    assert results[0]["alignment"] == [0.0, 0.0, 0.0, 0.0, 0]
    for result in results:
        assert result["shared"] == [x["alignment"] for x in results]
        assert result["totals"] == [6.0, 2.0]
    for result in results[1:]:
        offset, drift, residual, round_trip, n_samples = result["alignment"]
        assert n_samples == min(result["before"] + 5, _MOST_SAMPLES)
        assert 0 < round_trip < 0.1
        assert result["before"] >= 1, "processes are aligned when they join"
        if drift == 0.0:
            assert abs(offset) <= round_trip / 2 + 3 * residual
