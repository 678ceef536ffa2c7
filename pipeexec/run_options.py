"""`RunOptions`: how steps are measured. It loads without torch, for the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, check_type
from pipesim.utils.checks import Count, Whole, checked


@checked
@dataclass(frozen=True)
class RunOptions:
    """How many steps are measured, for `pipeexec.validate`, `profile`, `measure` and `project`.

    ``repeat``, ``costs`` and ``progress`` are for `pipeexec.validate`; the others refuse them.

    Attributes
    ----------
    n_steps
        Number of measured steps of each graph, in each repeat.
    warm_up
        Number of steps before them that are not measured.
    repeat
        Number of times to calibrate and measure. Two or more give the uncertainty of the mean
        error over calibrations.
    costs
        Costs to predict from, without calibration; from `px.profile` or `Costs.load`.
    progress
        Called with a line of text before the warm-up and after each round.
    """

    n_steps: Count = 9
    warm_up: Whole = 2
    repeat: Count = 1
    costs: Costs | None = None
    progress: Annotated[Callable[[str], None], "progress(line)"] | None = None


#: Options of `pipeexec.validate`; and of `pipeexec.profile`, `measure` and `project`.
OF_VALIDATION, OF_PROFILE = RunOptions(), RunOptions(n_steps=7)


def run_options(options: RunOptions, **changes: Any) -> RunOptions:
    """Return options with other values, but for changes that are None.

    Other options than the changed ones have no effect, so that they must not be given.
    """
    check_type("options", options, RunOptions, "give pipeexec.RunOptions(n_steps=9)")
    for name, usual in vars(OF_VALIDATION).items():
        if name not in changes and (value := getattr(options, name)) != usual:
            raise ArgumentError(
                f"options has {name}={value!r:.60}, which has no effect here; give options with "
                f"{' and '.join(changes)} alone"
            )
    return replace(options, **{name: x for name, x in changes.items() if x is not None})
