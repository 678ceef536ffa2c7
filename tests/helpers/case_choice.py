"""Cases of a product that run by default; all with ``FAULTS=all``, as `make chaos` has it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import Any, TypeVar

Case = TypeVar("Case")

#: Whether every case runs.
EVERY_CASE = "FAULTS" in os.environ


def _values(case: Any) -> Iterable[Hashable]:
    """Return the values of a tuple, each with its position, as text: some cannot be hashed."""
    return enumerate(map(str, case))


def covering(
    cases: Iterable[Case],
    n_values: int = 1,
    parts: Callable[[Case], Iterable[Hashable]] = _values,
) -> list[Case]:
    """Return few cases, in their order, that have all values of all cases; or all `EVERY_CASE`.

    Parameters
    ----------
    n_values
        With 2, they have all pairs of values that occur in one case.
    parts
        Returns the values of a case, which is a tuple by default.
    """
    cases = list(cases)
    if EVERY_CASE:
        return cases
    covered_by = [
        {group for n in range(1, n_values + 1) for group in combinations(sorted(parts(case)), n)}  # type: ignore[type-var]
        for case in cases
    ]
    missing = set[Any]().union(*covered_by)
    chosen, uses = set[int](), Counter[Any]()

    def worth(k: int) -> tuple[int, int]:
        """Return how much a case has that is missing, then how seldom the rest was chosen."""
        return len(covered_by[k] & missing), -sum(uses[group] for group in covered_by[k])

    while missing:
        best = max(range(len(cases)), key=worth)
        chosen.add(best)
        missing -= covered_by[best]
        uses.update(covered_by[best])
    return [cases[k] for k in sorted(chosen)]
