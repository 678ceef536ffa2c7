"""Values of the option ``offload``: the activations that go to host memory, of all stages or each.

A value is ``"none"``, ``"all"``, a share of the bytes of each micro-batch such as 0.5, or the text
``"longest:0.5"``: the half of the micro-batches whose activations live longest. As text, values of
stages stand between slashes: ``"all/0.5/none"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pipesim.errors import ArgumentError, check_count, number
from pipesim.utils.texts import parse_float

#: One value, as users give it.
OffloadValue: TypeAlias = str | float
#: As users give it for all stages.
OffloadArgument: TypeAlias = OffloadValue | Sequence[OffloadValue] | Mapping[int, OffloadValue]
_BETWEEN = "/"
_LONGEST = "longest:"
_ALLOWED = (
    '"none", "all", a share of the bytes of each micro-batch from 0 to 1, or the text '
    '"longest:0.5" for the half of the micro-batches that live longest'
)


@dataclass(frozen=True)
class StageOffload:
    """Activations to offload: of a stage, or of all stages together.

    Attributes
    ----------
    share
        Share of the bytes of each selected micro-batch, 0 to 1.
    longest
        Share of the micro-batches that is selected, those that live longest first; 1 for all.
    """

    share: float = 1.0
    longest: float = 1.0

    @property
    def is_none(self) -> bool:
        """Whether nothing is offloaded."""
        return self.share == 0 or self.longest == 0

    @property
    def text(self) -> str:
        """The text that `checked_offload` reads."""
        if self.is_none:
            return "none"
        if self.longest < 1:
            return f"{_LONGEST}{self.longest!r}"
        return "all" if self.share == 1 else repr(self.share)


def checked_offload(
    offload: OffloadArgument, n_stages: int
) -> StageOffload | tuple[StageOffload, ...]:
    """Return the value for all stages together, or one a stage if they were given."""
    if isinstance(offload, str) and _BETWEEN in offload:
        offload = offload.split(_BETWEEN)
    if isinstance(offload, Mapping):
        return _of_mapping(offload, n_stages)
    if isinstance(offload, (list, tuple)):
        if len(offload) != n_stages:
            raise ArgumentError(
                f"offload has {len(offload)} values, and there are {n_stages} stages; give one "
                "value for all, one a stage, or a mapping from stages"
            )
        return tuple(_checked(x, f"offload of stage {s}") for s, x in enumerate(offload))
    return _checked(offload, "offload")


def _of_mapping(offload: Mapping[int, OffloadValue], n_stages: int) -> tuple[StageOffload, ...]:
    """Return one value a stage; stages that a mapping does not name offload nothing."""
    if not offload:
        raise ArgumentError("offload is a mapping that names no stage; give such as {0: 'all'}")
    for stage in offload:
        if check_count("offload: a stage", stage, 0) >= n_stages:
            raise ArgumentError(
                f"offload names stage {stage}; there are {n_stages} stages, 0..{n_stages - 1}"
            )
    values = (offload.get(stage, "none") for stage in range(n_stages))
    return tuple(_checked(value, f"offload of stage {s}") for s, value in enumerate(values))


def _checked(value: object, name: str) -> StageOffload:
    """Return one value."""
    if isinstance(value, str):
        text = value.strip()
        if text in ("none", "all"):
            return StageOffload(float(text == "all"))
        share = parse_float(text.removeprefix(_LONGEST))
        if share is not None and 0 <= share <= 1:
            is_longest = text.startswith(_LONGEST)
            return StageOffload(longest=share) if is_longest else StageOffload(share)
    else:
        share = None if isinstance(value, (bool, np.bool_)) else number(value)
        if share is not None and 0 <= share <= 1:
            return StageOffload(share)
    raise ArgumentError(f"{name} must be {_ALLOWED}; got {value!r:.60}")


def checked_shares(shares: Sequence[float] | str, n_stages: int) -> tuple[float, ...]:
    """Return the shares of stages that OFFLOADs move, one a stage; empty if all are 1."""
    listed = shares.split(_BETWEEN) if isinstance(shares, str) and shares else shares
    if isinstance(listed, str) and not listed:
        listed = ()
    if not isinstance(listed, (list, tuple, np.ndarray)):
        raise ArgumentError(f"offload_shares must be numbers, one a stage, got {shares!r:.60}")
    values = [parse_float(x) if isinstance(x, str) else number(x) for x in listed]
    for stage, share in enumerate(values):
        if share is None or not 0 < share <= 1:
            raise ArgumentError(
                f"offload_shares of stage {stage} must be above 0 and at most 1, the share of the "
                f"bytes of activations that OFFLOAD moves; got {listed[stage]!r:.60}"
            )
    if values and len(values) != n_stages:
        raise ArgumentError(
            f"offload_shares has {len(values)} values for {n_stages} stages; give one a stage"
        )
    of_stages = tuple(float(x) for x in values if x is not None)
    return () if all(share == 1 for share in of_stages) else of_stages


def shares_text(shares: Sequence[float]) -> str:
    """Return the text that `checked_shares` reads."""
    return _BETWEEN.join(map(repr, shares))
