"""`Equivalence`: whether two configurations compute the same, parameter by parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeexec.validation.equivalence.layer_isolation import BrokenLayer
from pipeexec.validation.equivalence.small_runs import SmallRun

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Equivalence:
    """Comparison of two configurations; `print` it to read it.

    Attributes
    ----------
    equal
        Whether losses, all gradients and all weights after a step are equal up to rounding.
    runs
        The two configurations that ran.
    losses
        Loss of each.
    table
        One row a parameter: ``gradient``, ``sgd`` and ``adam``, the largest difference of its
        gradient, and of its values after a step of each optimizer; ``gradient_limit``,
        ``sgd_limit`` and ``adam_limit``, the largest that rounding explains for the value with this
        difference; and ``equal``.
    layers
        Layers that break the equality, in the order of the model; empty if ``equal``.
    buffers
        Paths of buffers, such as running means, that differ after a step; those of the first
        replica are compared. ``equal`` does not count them.
    notes
        Parts of the configurations that did not run, and other remarks, a sentence each.

    See Also
    --------
    pipeexec.check_equivalent : Make such a comparison.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    >>> batch = torch.randn(8, 4), torch.randn(8, 1)
    >>> report = px.check_equivalent(
    ...     model, {"n_stages": 1}, {"n_stages": 2}, batch, nn.functional.mse_loss
    ... )
    >>> report.equal, report.table.index.tolist()
    (True, ['0.weight', '0.bias', '1.weight', '1.bias'])
    """

    equal: bool
    runs: tuple[SmallRun, SmallRun]
    losses: tuple[float, float]
    table: pd.DataFrame
    layers: tuple[BrokenLayer, ...]
    buffers: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"a: {self.runs[0]}", f"b: {self.runs[1]}"]
        n_wrong = int((~self.table["equal"]).sum())
        if self.equal:
            lines.append(f"equal: losses, and {len(self.table)} parameters after a step")
        else:
            lines.append(
                f"not equal: {n_wrong} of {len(self.table)} parameters differ; losses "
                f"{self.losses[0]:.9g} and {self.losses[1]:.9g}"
            )
        lines += [f"{x.path} ({x.kind}): {x.reason}" for x in self.layers]
        if self.buffers:
            lines.append(f"buffers that differ after a step: {', '.join(self.buffers)}")
        return "\n".join([*lines, *self.notes])
