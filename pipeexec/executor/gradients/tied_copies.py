"""`TiedCopies`: keep the copies of tied parameters equal if their values change between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.splitting.split_facts import tied_parameter
from pipeexec.splitting.tied import TiedGroup


class TiedCopies:
    """Copies of tied parameters in this process.

    Optimizers change all copies alike. Between steps, a user may load weights into the model, whose
    parameter is the first one: the others then take its values.

    Parameters
    ----------
    tied
        Groups of pairs of stage, and name in the stage's module.
    modules
        Modules of the stages.
    """

    def __init__(self, tied: Sequence[TiedGroup], modules: Sequence[nn.Module]) -> None:
        self._tied, self._modules = tied, modules
        self._versions: list[int] = []

    def _groups(self) -> list[list[nn.Parameter]]:
        return [
            [
                tied_parameter(self._modules[stage], name)
                for stage, name in group
                if not isinstance(self._modules[stage], RemoteStage)
            ]
            for group in self._tied
        ]

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the first parameter of each group to the others, if one has changed since `note`."""
        groups = self._groups()
        if self._versions == _versions(groups):
            return
        for group in groups:
            for parameter in group[1:]:
                parameter.copy_(group[0])
        self._versions = _versions(groups)

    def note(self) -> None:
        """Take the values as they are for equal, as they are after a step."""
        self._versions = _versions(self._groups())


def _versions(groups: Sequence[Sequence[nn.Parameter]]) -> list[int]:
    return [parameter._version for group in groups for parameter in group]
