"""`Explanation`: why one configuration is faster than another, in words and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipesim.planning.configurations.choice import PlanChoice
from pipesim.planning.configurations.reasons import part_name, part_reason
from pipesim.plot.html_parts import note_html, table_html
from pipesim.utils.units import format_bytes, format_time

if TYPE_CHECKING:
    import pandas as pd


#: Parts below this share of the longer step, or of the larger memory, are listed together.
_SMALL = 5e-4
#: Differences below this share of the step are due to rounding.
_ROUNDING = 1e-9
#: Value of the first configuration and of the second, and their difference.
_Row = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class Explanation:
    """Difference between the steps of two configurations, in parts; `print` it to read it.

    Attributes
    ----------
    first, second
        The configurations.
    seconds
        One row a part of the step: seconds of the ``first`` and the ``second``, and their
        ``difference``, below 0 where the first takes less. ``math.fsum`` of a column is exactly the
        step, or the difference of the two steps. `step_parts` defines the parts.
    memory
        One row a kind of memory, in bytes of the fullest device, with the same columns. The last
        row is the ``total``.
    is_tied
        Whether embedding and head of the model share their matrix.
    """

    first: PlanChoice
    second: PlanChoice
    seconds: pd.DataFrame
    memory: pd.DataFrame
    is_tied: bool = False

    @property
    def difference(self) -> float:
        """Seconds of the first step minus those of the second."""
        return math.fsum(self.seconds["difference"])

    @property
    def headline(self) -> str:
        """The two steps and their difference, in a sentence."""
        first, second = math.fsum(self.seconds["first"]), math.fsum(self.seconds["second"])
        if first == second:
            return f"A and B both take {format_time(first)} a step."
        share = abs(first / second - 1)
        return (
            f"A takes {format_time(first)} a step: {_change(first - second, format_time)} than B "
            f"with {format_time(second)}, or {share:.1%}."
        )

    def sentences(self) -> list[str]:
        """Return a sentence for each part of the difference, the largest first."""
        parts = _rows(self.seconds)
        step = max(math.fsum(self.seconds["first"]), math.fsum(self.seconds["second"]))
        shown, rest = _large(parts, _SMALL * step)
        texts = []
        for part in shown:
            reason = part_reason(part, self.first, self.second, is_tied=self.is_tied)
            end = f"; {reason}." if reason else "."
            name = part_name(part, self.first, self.second)
            texts.append(f"{name}: {_changes(parts[part], format_time)}{end}")
        if abs(rest) > _ROUNDING * step:
            texts.append(f"All other parts together: {_change(rest, format_time)}.")
        return texts

    def memory_sentences(self) -> list[str]:
        """Return the memory of the fullest devices, and a sentence for each kind that differs."""
        kinds = _rows(self.memory)
        size, other, change = kinds.pop("total")
        end = f": {_change(change, format_bytes)} than B with {format_bytes(other)}."
        end = end if change else ", as that of B does."
        texts = [f"The fullest device of A needs {format_bytes(size)}{end}"]
        shown, _ = _large(kinds, _SMALL * max(size, other))
        texts += [f"{kind.capitalize()}: {_changes(kinds[kind], format_bytes)}." for kind in shown]
        return texts

    def __str__(self) -> str:
        need, *kinds = self.memory_sentences()
        lines = [f"A: {self.first}", f"B: {self.second}", self.headline]
        lines += [f"  {text}" for text in self.sentences()]
        return "\n".join([*lines, need, *(f"  {text}" for text in kinds)])

    def __repr__(self) -> str:
        return f"<Explanation: {self.headline}>"

    def _repr_html_(self) -> str:
        steps, sizes = _rows(self.seconds), _rows(self.memory)
        parts = [
            [part_name(part, self.first, self.second), *map(format_time, row)]
            for part, row in steps.items()
        ]
        kinds = [[kind, *map(format_bytes, row)] for kind, row in sizes.items()]
        head = ["A", "B", "A minus B"]
        return "".join(
            [
                *(note_html(line) for line in str(self).splitlines()),
                table_html(["part of the step", *head], parts),
                table_html(["memory of the fullest device", *head], kinds),
            ]
        )


def explanation(
    choices: tuple[PlanChoice, PlanChoice],
    seconds: tuple[Mapping[str, float], Mapping[str, float]],
    memory: tuple[Mapping[str, float], Mapping[str, float]],
    *,
    is_tied: bool = False,
) -> Explanation:
    """Return the explanation of two configurations from the parts of their steps and memory."""
    from pipesim.utils.packages import pandas as pd

    differences = _differences(*seconds)
    steps = pd.DataFrame({"first": seconds[0], "second": seconds[1], "difference": differences})
    sizes = pd.DataFrame({"first": memory[0], "second": memory[1]})
    sizes["difference"] = sizes["first"] - sizes["second"]
    return Explanation(*choices, steps.rename_axis("part"), sizes.rename_axis("kind"), is_tied)


def _differences(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the difference of each part; rounding is part of the largest."""
    parts = {name: first[name] - second[name] for name in first}
    total = math.fsum(first.values()) - math.fsum(second.values())
    largest = max(parts, key=lambda name: abs(parts[name]))
    parts[largest] = 0.0
    parts[largest] = math.fsum([total, *(-part for part in parts.values())])
    return parts


def _rows(table: pd.DataFrame) -> dict[str, _Row]:
    """Return the rows of a table: values of both configurations, and their difference."""
    rows = zip(table.index, table["first"], table["second"], table["difference"], strict=True)
    return {str(name): (float(a), float(b), float(c)) for name, a, b, c in rows}


def _large(parts: Mapping[str, _Row], least: float) -> tuple[list[str], float]:
    """Return the parts that differ by at least this, the largest first; the sum of the others."""
    order = sorted(parts, key=lambda name: -abs(parts[name][2]))
    shown = [name for name in order if abs(parts[name][2]) >= least and parts[name][2]]
    return shown, math.fsum(parts[name][2] for name in order if name not in shown)


def _change(difference: float, text: Callable[[float], str]) -> str:
    """Return a difference in words, such as ``"1.2 s less"``."""
    return f"{text(abs(difference))} {'less' if difference < 0 else 'more'}"


def _changes(row: _Row, text: Callable[[float], str]) -> str:
    """Return a difference and both values in words."""
    return f"{_change(row[2], text)}, {text(row[0])} against {text(row[1])}"
