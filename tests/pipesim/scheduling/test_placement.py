"""Which device holds a stage."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from strategies import placements

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.scheduling.placement import Placement


@pytest.mark.parametrize(
    ("placement", "device_of", "n_chunks"),
    [
        (ps.Placement.linear(3), (0, 1, 2), 1),
        (ps.Placement.looped(3, 2), (0, 1, 2, 0, 1, 2), 2),
        (ps.Placement.v_shaped(3), (0, 1, 2, 2, 1, 0), 2),
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
    """Every stage is on one device of each path, every device has one, and all agree."""
    held = [placement.stages_of(device) for device in range(placement.n_devices)]
    assert all(held)
    wanted = {(device, s) for path in placement.paths for s, device in enumerate(path)}
    assert sorted((d, s) for d, stages in enumerate(held) for s in stages) == sorted(wanted)
    assert placement.device_of == placement.paths[0]
    assert sorted(placement.path_of(7)) == placement.path_of(7).tolist()
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
        lambda: ps.Placement.linear(count),  # type: ignore[arg-type]
        lambda: ps.Placement.looped(count, 1),  # type: ignore[arg-type]
        lambda: ps.Placement.v_shaped(count),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError, match="n_devices must be"):
            make()
    with pytest.raises(ArgumentError, match="n_chunks must be"):
        ps.Placement.looped(2, count)  # type: ignore[arg-type]


def test_bidirectional() -> None:
    """Down the devices and up; the first half of the micro-batches goes down."""
    placement = ps.Placement.bidirectional(4)
    assert placement.paths == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert (placement.n_stages, placement.n_devices, placement.n_chunks) == (4, 4, 2)
    assert placement.stages_of(1) == (1, 2)
    assert placement.path_of(6).tolist() == [0, 0, 0, 1, 1, 1]
    assert placement.path_of(3).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("speeds", "paths"),
    [
        ({}, ((0, 1), (2, 3), (4, 5))),
        ({(1, 1): 0}, ((0, 1), (0, 1), (2, 1), (2, 4), (3, 4), (3, 4))),
        ({(1, 1): 0, (0, 1): 0}, ((0, 3), (1, 3), (2, 3))),
        ({(2, 0): 0.4}, ((0, 1),) * 4 + ((2, 3),) * 4 + ((0, 5), (2, 5), (4, 5), (4, 5))),
    ],
)
def test_rerouted(speeds: dict[tuple[int, int], float], paths: tuple[tuple[int, ...], ...]) -> None:
    """Written out: peers take equal parts of a dead worker's micro-batches, a slow one keeps some.

    With speed 0.4 the worker takes 2 of 12 micro-batches, as 2 / 0.4 = 5, and the others 5 each.
    """
    assert ps.Placement.rerouted(2, 3, 12, speeds).paths == paths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 3, 10, {}), "n_microbatches=10 are no whole number .* give a multiple of 3"),
        ((2, 3, 12, [(0, 1)]), "speeds must be a mapping"),
        ((2, 3, 12, {1: 0}), "1 is no worker; give the speed of workers"),
        ((2, 3, 12, {(3, 0): 0}), r"worker \(3, 0\), but there are 3 replicas of 2 stages"),
        ((2, 3, 12, {(0, 0): -1}), r"speed of worker \(0, 0\) must be finite and >= 0, got -1"),
        ((2, 1, 12, {(0, 1): 0}), "all workers of stage 1 have speed 0"),
    ],
)
def test_bad_speeds(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ps.Placement.rerouted(*arguments)


def test_waves() -> None:
    """Down and up as often as there are waves; one wave is a V."""
    assert ps.Placement.waves(2, 2).device_of == (0, 1, 1, 0, 0, 1, 1, 0)
    assert ps.Placement.waves(3, 1) == ps.Placement.v_shaped(3)


def test_bad_paths() -> None:
    """Paths of other length, no numbers, an odd number of devices."""
    with pytest.raises(ArgumentError, match="paths of 2 and of 1 stages"):
        Placement([0, 1], [0])
    with pytest.raises(ArgumentError, match=r"stage 1 in others\[0\] must be .* got 'x'"):
        Placement([0, 1], [1, "x"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match=r"no device 2; the placement has 2, 0\.\.1"):
        ps.Placement.linear(2).stages_of(2)
    with pytest.raises(ArgumentError, match="even number of devices, got 3"):
        ps.Placement.bidirectional(3)
