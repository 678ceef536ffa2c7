"""`Costs.scaled`: faster and slower operations of one stage, or of all."""

from __future__ import annotations

import math
from typing import Any

import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, CapacityError, CostsError, UnknownNameError


def test_scaled() -> None:
    """All stages, or one, of scalars that stand beside values a stage."""
    costs = ps.Costs((1, 2), 4, optimizer_step=1, launch=1)
    assert costs.scaled(factor=2).forward == (2, 4)
    assert costs.scaled(factor=2).backward == 8
    one = costs.scaled(factor=0.5, stage=1)
    assert (one.forward, one.backward, one.optimizer_step) == ((1, 1), (4, 2), (1, 0.5))
    assert one.launch == 1
    assert one.input_grad is None
    assert ps.Costs(1, 2, overlapped=2.5).scaled(factor=2).overlapped == 5


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        (ps.Costs((1, 2), 4), {"factor": -1}, "factor must be finite and >= 0, got -1"),
        (ps.Costs((1, 2), 4), {"factor": math.inf}, "factor must be"),
        (ps.Costs((1, 2), 4), {"factor": "2"}, "factor must be"),
        (
            ps.Costs((1, 2), 4),
            {"factor": 2, "stage": 2},
            "there is no stage 2 in costs of 2 stages",
        ),
        (ps.Costs(1, 4), {"factor": 2, "stage": 0}, "the same for all stages"),
    ],
)
def test_bad_scales(costs: ps.Costs, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CostsError, match=message):
        costs.scaled(**options)


@pytest.mark.parametrize("stage", [-1, 0.5, True])
def test_no_stage(stage: Any) -> None:
    with pytest.raises(ArgumentError, match="stage must be"):
        ps.Costs((1, 2), 4).scaled(factor=2, stage=stage)


def test_one_stage_of_uniform_costs_is_scaled() -> None:
    """If their number is given."""
    costs = ps.Costs(forward=1, backward=2, overlapped=3)
    scaled = costs.scaled(2.5, stage=2, n_stages=4)
    assert (scaled.forward, scaled.backward) == ((1, 1, 2.5, 1), (2, 2, 5, 2))
    assert scaled.overlapped == (3, 3, 7.5, 3)
    with pytest.raises(CostsError, match=r"scaled\(2.5, stage=2, n_stages=...\)"):
        costs.scaled(2.5, stage=2)
    with pytest.raises(CostsError, match="there is no stage 4 in costs of 4 stages"):
        costs.scaled(2.5, stage=4, n_stages=4)
    with pytest.raises(CapacityError, match=r"placement of 1e\+12 stages"):
        costs.scaled(2.5, stage=0, n_stages=10**12)
    with pytest.raises(CostsError, match="of 1 and of 4 stages"):
        ps.Costs(forward=(1,), backward=1).scaled(2, n_stages=4)
    with pytest.raises(CostsError, match="are of 2 and of 4 stages"):
        ps.Costs(forward=(1, 1), backward=1).scaled(2, stage=0, n_stages=4)


#: Seconds of each operation; overlapped F and B take 4.
SPLIT = ps.Costs(1, 5, 2, 3, overlapped=4, optimizer_step=7)


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        ("F", {"forward": 0.5, "recompute": 1, "overlapped": 4 - 0.5 * 4 / 6}),
        (
            "B",
            {
                "backward": 2.5,
                "input_grad": 1,
                "weight_grad": 1.5,
                "overlapped": 4 - 0.5 * 4 * 5 / 6,
            },
        ),
        ("I", {"input_grad": 1}),
        ("W", {"weight_grad": 1.5}),
        ("R", {"recompute": 0.5}),
        ("STEP", {"optimizer_step": 3.5}),
    ],
)
def test_one_operation_is_scaled(op: str, changes: dict[str, float]) -> None:
    """Others keep their seconds, those that follow from it too; I and W are B."""
    scaled = SPLIT.scaled(0.5, op=op)
    for name in ("forward", "backward", "input_grad", "weight_grad", "recompute", "overlapped",
                 "optimizer_step"):  # fmt: skip
        expected = changes.get(name, SPLIT.per_stage(name, 1)[0])
        assert scaled.per_stage(name, 1)[0] == pytest.approx(expected), name
    assert SPLIT.scaled(0.5, op=ps.Op[op]) == scaled


def test_a_backward_keeps_its_seconds_if_a_half_is_scaled() -> None:
    halves = ps.Costs((1, 1), None, 2, (3, 4))
    scaled = halves.scaled(0.5, op="W", stage=1)
    assert (scaled.weight_grad, scaled.backward) == ((3, 2), (5, 6))
    assert halves.scaled(0.5).per_stage("backward", 2).tolist() == [2.5, 3]
    assert halves.scaled(0.5, op="B").backward == (2.5, 3)


def test_the_effect_on_a_timeline() -> None:
    """Backwards of one stage twice as fast: 1F1B of two stages and two micro-batches by hand."""
    graph = ps.lower(ps.schedule("1f1b", 2, 2), step="none")
    costs = ps.Costs(1, 2)
    assert ps.simulate(graph, costs).makespan == 9
    faster = costs.scaled(0.5, op="B", stage=1, n_stages=2)
    assert ps.simulate(graph, faster).makespan == 7
    split = ps.lower(ps.schedule("zbv", 2, 4), step="none")
    thirds = ps.Costs(1, input_grad=1, weight_grad=1)
    makespans = [ps.simulate(split, thirds.scaled(0.5, op=op)).makespan for op in ("B", None)]
    assert ps.simulate(split, thirds).makespan > makespans[0] > makespans[1]


def test_operations_that_cannot_be_scaled() -> None:
    with pytest.raises(UnknownNameError, match="unknown operation 'SEND_F'"):
        SPLIT.scaled(2, op="SEND_F")
    with pytest.raises(CostsError, match="weight_grad is missing, so that W cannot be scaled"):
        ps.Costs(1, 2).scaled(2, op="W")
    with pytest.raises(CostsError, match="backward is missing"):
        ps.Costs(1).scaled(2, op="B")
    with pytest.raises(CostsError, match="forward must be finite seconds, and factor=10"):
        ps.Costs(1e308, 1).scaled(10, op="F")


def test_all_seconds_of_steps_are_scaled() -> None:
    """Sums of copies of gradients, which replicas do not share, are a part of STEP."""
    costs = ps.Costs(1, 2, optimizer_step=3, reduce_copies=5)
    for options in ({}, {"op": "STEP"}):
        scaled = costs.scaled(2, **options)  # type: ignore[arg-type]
        assert (scaled.optimizer_step, scaled.reduce_copies) == (6, 10), options
    assert ps.Costs(1, 2).scaled(2, stage=0, n_stages=2).reduce_copies == 0
