"""Which device holds a stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import placements

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.placement import Placement


@pytest.mark.parametrize(
    ("placement", "device_of", "n_chunks"),
    [
        (ps.linear(3), (0, 1, 2), 1),
        (ps.looped(3, 2), (0, 1, 2, 0, 1, 2), 2),
        (ps.v_shaped(3), (0, 1, 2, 2, 1, 0), 2),
        (Placement([1, 0, 1]), (1, 0, 1), 2),
    ],
)
def test_placements(placement: Placement, device_of: tuple[int, ...], n_chunks: int) -> None:
    """Each kind written out."""
    assert placement.device_of == device_of
    assert placement.n_stages == len(device_of)
    assert placement.n_devices == max(device_of) + 1
    assert placement.n_chunks == n_chunks


@given(placements())
def test_devices_share_the_stages_out(placement: Placement) -> None:
    """Every stage is on one device, every device has one, and both directions agree."""
    held = [placement.stages_of(device) for device in range(placement.n_devices)]
    assert all(held)
    assert sorted(s for stages in held for s in stages) == list(range(placement.n_stages))
    assert all(placement.device_of[s] == d for d, stages in enumerate(held) for s in stages)
    assert placement.n_chunks == max(map(len, held))


@pytest.mark.parametrize(
    ("device_of", "message"),
    [
        ([0, 2], r"\[0, 2\] leaves device 1 without a stage; number the devices"),
        ([], "leaves device 0 without a stage"),
        ([0, -1], "device of stage 1 must be at least 0, got -1"),
        ([0, 0.5], r"device of stage 1 must be a whole number, got 0\.5 \(float\)"),
        ([True, 0], r"device of stage 0 must be a whole number, got True \(bool\)"),
        ([None], r"device of stage 0 must be a whole number, got None"),
    ],
)
def test_bad_placement(device_of: list[int], message: str) -> None:
    """What is wrong is named with the stage that it is wrong for."""
    with pytest.raises(ArgumentError, match=message):
        Placement(device_of)


@pytest.mark.parametrize("count", [0, -1, 1.0, 2.5, True, None, "2"])
def test_bad_counts(count: object) -> None:
    """The makers take whole numbers of at least 1."""
    for make in (
        lambda: ps.linear(count),  # type: ignore[arg-type]
        lambda: ps.looped(count, 1),  # type: ignore[arg-type]
        lambda: ps.v_shaped(count),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError, match="n_devices must be"):
            make()
    with pytest.raises(ArgumentError, match="n_chunks must be"):
        ps.looped(2, count)  # type: ignore[arg-type]
