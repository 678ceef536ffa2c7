"""`ProgressBar`: loss, rates and bubble of a training, in a line that is drawn again."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

from pipesim.utils.packages import imported
from pipesim.utils.units import significant


class ProgressBar:
    """Progress of a training, in a terminal or a notebook.

    Parameters
    ----------
    total
        Number of steps; None if it is unknown.
    initial
        Steps that ran before.
    show
        None: if standard error is a terminal, or in a notebook.
    """

    def __init__(self, total: int | None, initial: int, show: bool | None) -> None:
        hidden = show is False or (show is None and not (sys.stderr.isatty() or _in_notebook()))
        # tqdm.auto warns in notebooks without widgets.
        self._bar = imported("tqdm" if hidden else "tqdm.auto").tqdm(
            total=total, initial=initial, disable=hidden, unit="step", desc="train",
            dynamic_ncols=True,
        )  # fmt: skip

    def update(self, row: Mapping[str, float]) -> None:
        """Show a row of the log, after its step."""
        if not self._bar.disable:
            self._bar.set_postfix_str(_text(row), refresh=False)
        self._bar.update()

    def write_line(self, line: str) -> None:
        """Write a line above the bar, if it is shown."""
        if not self._bar.disable:
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _in_notebook() -> bool:
    """Return whether a kernel of Jupyter runs this code."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _text(row: Mapping[str, float]) -> str:
    """Return the values that matter while one waits."""
    parts = [f"loss {row['loss']:.4f}"]
    for name, label in (("lr", "lr"), ("grad_norm", "norm")):
        if name in row and not math.isnan(row[name]):
            parts.append(f"{label} {row[name]:.3g}")
    unit = "tokens" if "tokens_per_s" in row else "samples"
    if f"{unit}_per_s" in row:
        parts.append(f"{significant(row[f'{unit}_per_s'])} {unit}/s")
    bubble = f"bubble {row['bubble']:.0%}"
    if "predicted_bubble" in row:
        bubble += f" (predicted {row['predicted_bubble']:.0%})"
    return ", ".join([*parts, bubble])
