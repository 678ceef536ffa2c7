"""`calibration_warnings`: what a user should know of fitted constants before using them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


#: Notes of constants at a bound.
LEAST, LARGEST = "at its least value", "at its largest value"
#: Median error of fitted steps above which their seconds may have another unit.
_LARGE_ERROR = 0.5


def calibration_warnings(constants: pd.DataFrame, rows: pd.DataFrame) -> Iterator[str]:
    """Yield the text of each warning of a `Calibration`, from its tables."""
    for name, constant in constants.iterrows():
        value, note = f"{constant['value']:.4g}", constant["note"]
        if not constant["determined"]:
            yield f"the rows do not determine {name}: {note}; it stays {value}"
        elif note in (LEAST, LARGEST):
            yield (
                f"{name} is {note}, {value}: the steps would suit one beyond it; check the unit of "
                "seconds, the GPU, and the settings of the rows"
            )
    median = float(rows["error"].abs().groupby(rows["configuration"]).mean().median())
    if median > _LARGE_ERROR:
        yield (
            f"the median error of the fitted steps is {median:.0%}: are these seconds? If the "
            "column has milliseconds, divide it by 1000; or check the GPU and the rows' settings"
        )
    n_determined = int(constants["determined"].sum())
    count = rows["configuration"].nunique()
    if 0 < count <= n_determined:
        yield (
            f"{steps_text('measured steps', len(rows), count)} for {n_determined} constants: none "
            "is left to check them, "
            "so errors of left-out rows are not those of a prediction; measure more steps"
        )


def steps_text(noun: str, n_rows: int, n_configurations: int) -> str:
    """Return such as ``6 steps of 3 configurations``, or ``6 steps`` if all differ."""
    text = f"{n_rows} {noun}"
    if n_configurations == n_rows:
        return text
    return f"{text} of {n_configurations} configuration{'s' * (n_configurations > 1)}"
