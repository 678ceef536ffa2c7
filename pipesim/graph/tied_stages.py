"""Groups of tied stages: stages with copies of one parameter, such as an embedding and a head.

The copies of a group are equal: REDUCE_TIED sums their gradients once a mini-batch. A text has the
stages of a group between ``-``, and groups between commas: ``"0-7"``, ``"0-3-7,1-2"``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from pipesim.errors import ArgumentError, GraphError, check_count
from pipesim.graph.tasks import Kinds
from pipesim.ops import Op
from pipesim.utils.texts import parse_int

#: Stages of each group, in rising order.
Tied: TypeAlias = tuple[tuple[int, ...], ...]
#: Groups that a graph may have.
_MOST_GROUPS = 1000


def checked_tied(tied: Iterable[Iterable[int]] | str, n_stages: int) -> Tied:
    """Return the groups of tied stages, each in rising order."""
    groups = tuple(_stages_of(group, tied) for group in _listed(tied))
    for group in groups:
        for stage in group:
            if check_count("tied: a stage", stage, 0) >= n_stages:
                raise ArgumentError(
                    f"tied names stage {stage}; there are {n_stages} stages, 0..{n_stages - 1}"
                )
        if len(group) < 2 or len(set(group)) < len(group):
            raise ArgumentError(
                f"tied has the group {group!r}; a group has two or more different stages with "
                "copies of one parameter, such as (0, 3)"
            )
    return tuple(tuple(sorted(map(int, group))) for group in groups)


def check_tied_kinds(kinds: Kinds, tied: Tied) -> None:
    """Raise `GraphError` for a REDUCE_TIED of no group, or of a stage outside its group."""
    for row in np.flatnonzero(kinds.op == Op.REDUCE_TIED).tolist():
        stage, part = int(kinds.stage[row]), int(kinds.part[row])
        if not 0 <= part < len(tied) or stage not in tied[part]:
            raise GraphError(
                f"{stage}REDUCE_TIED has part {part}, the number of its group of tied stages, but "
                f"tied is {list(tied)!r}; give the groups as tied=, such as [(0, 3)]"
            )


def tied_text(tied: Tied) -> str:
    """Return the text that `checked_tied` reads."""
    return ",".join("-".join(map(str, group)) for group in tied)


def _listed(tied: Iterable[Iterable[int]] | str) -> list[object]:
    """Return the groups as a list."""
    if isinstance(tied, str):
        return [part.strip() for part in tied.split(",")]
    try:
        if isinstance(tied, (Mapping, bytes)):
            raise TypeError
        groups: list[object] = list(itertools.islice(tied, _MOST_GROUPS + 1))
    except TypeError:
        raise _wrong(tied) from None
    if len(groups) > _MOST_GROUPS:
        raise ArgumentError(f"tied has more than {_MOST_GROUPS} groups; give fewer")
    return groups


def _stages_of(group: object, tied: object) -> tuple[int, ...]:
    """Return the stages of one group."""
    if isinstance(group, str):
        numbers = [parse_int(text) for text in group.split("-")]
        stages = tuple(number for number in numbers if number is not None)
        if len(stages) < len(numbers):
            raise _wrong(tied)
        return stages
    if not isinstance(group, (tuple, list)):
        raise _wrong(tied)
    return tuple(group)


def _wrong(tied: object) -> ArgumentError:
    return ArgumentError(
        "tied must be groups of stages with copies of one parameter, such as [(0, 3)], or the text "
        f"'0-3', got {tied!r:.60}"
    )
