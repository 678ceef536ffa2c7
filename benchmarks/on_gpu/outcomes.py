"""Outcomes of steps, and the summary of a folder of results: one line a step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from on_gpu.steps import STEPS, WARM_UP

#: Ways in which a step ends.
STATUSES = ("passed", "missed", "failed", "cut", "not run")


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes
    ----------
    step, status
        Its name, and one of `STATUSES`.
    seconds
        Time that its process took.
    remark
        The first target that was missed, the last line of its output, or why it did not run.
    hardware, is_dry
        The GPU, and whether it was a dry run on CPU workers.
    when
        Time at which it ended, in ISO 8601.
    """

    step: str
    status: str
    seconds: float
    remark: str
    hardware: str = ""
    is_dry: bool = False
    when: str = ""

    def line(self) -> str:
        """Return a line of the summary."""
        return (
            f"{self.step:<14} {self.status:<8} {self.seconds:6.1f} s  {self.remark[:160]}".rstrip()
        )

    def save(self, folder: Path) -> None:
        """Write the outcome to a folder of results."""
        (folder / f"{self.step}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")


def outcomes_in(folder: Path, names: Iterable[str] = (WARM_UP, *STEPS)) -> list[Outcome]:
    """Return the outcomes that a folder holds, in the order of the steps."""
    files = [folder / f"{name}.json" for name in names]
    return [Outcome(**json.loads(file.read_text())) for file in files if file.is_file()]


def write_summary(outcomes: Iterable[Outcome], file: Path) -> None:
    """Write one line a step, below the hardware and dates that they name."""
    outcomes = list(outcomes)
    lines = []
    if any(outcome.is_dry for outcome in outcomes):
        lines.append("a dry run on CPU workers: nothing was measured on a GPU")
    lines += dict.fromkeys(outcome.hardware for outcome in outcomes if outcome.hardware)
    lines += [", ".join(dict.fromkeys(outcome.when[:10] for outcome in outcomes)), ""]
    text = "\n".join([*lines, *(outcome.line() for outcome in outcomes)]) + "\n"
    written = file.with_name(f".{file.name}.tmp")
    written.write_text(text)
    written.replace(file)
