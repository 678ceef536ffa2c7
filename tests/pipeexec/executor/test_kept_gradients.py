"""Gradients that are kept over steps, of every kind of copy: those of the unsplit model."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from case_choice import covering
from kept_gradients import MODES, Case, run, unsplit
from ranks import Ranks
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

#: Cases of one process, and of two.
ALONE = [
    *(Case(part, 2, (0, 0)) for part in ("dense", "tied", "experts")),
    *(Case(part, 2, (0,) * 4) for part in ("dense", "tied", "experts")),
]
TOGETHER = [
    *(Case(part, 1, (0, 1)) for part in ("dense", "experts", "shared experts")),
    Case("dense", 1, (0, 0, 1, 1)),  # replicas that share experts have a process each, or all one
    *(
        Case(part, 2, (0, 0, 1, 1))
        for part in ("dense", "tied", "experts", "shared experts", "embedding")
    ),
    *(Case(part, 2, (0, 1)) for part in ("dense", "tied", "experts")),
]


def parts(pair: tuple[Case, str]) -> list[str]:
    """Return the case, and each part of the model in each mode."""
    case, mode = pair
    return [str(case), f"{case.part}, {mode}"]


def check(
    case: Case, mode: str, results: list[tuple[list[dict[str, Tensor]], float | None]]
) -> None:
    """Raise unless gradients of all copies are those of the unsplit model, and so is their norm."""
    expected = unsplit(case, MODES[mode])
    is_found = set()
    for gradients, norm in results:
        for of_copy in gradients:
            for name, value in of_copy.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=name)
                is_found.add(name)
        if norm is not None:
            total = {id(x): x for x in expected.values()}.values()
            right = torch.stack([x.norm() for x in total]).norm().item()
            assert norm == pytest.approx(right, rel=1e-12)
    assert is_found == set(expected)


@pytest.mark.parametrize(("case", "mode"), covering(product(ALONE, MODES), 1, parts), ids=str)
def test_in_one_process(case: Case, mode: str) -> None:
    check(case, mode, [run(None, case, mode)])


@pytest.mark.parametrize(("case", "mode"), covering(product(TOGETHER, MODES), 1, parts), ids=str)
def test_in_two_processes(two_ranks: Ranks, case: Case, mode: str) -> None:
    check(case, mode, two_ranks.run(run, row=case, mode=mode))
