"""Names of a stage's parameters in the model that was split."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pipeexec.data_parallel.compiled_modules import WRAPPED, unwrapped
from pipeexec.splitting.split_stage import SplitStage


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter, by each of its names; a tied one has several."""
    names: dict[int, str] = {}
    return {
        name: names.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def named_model_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of each parameter of a stage; a shared one once.

    Names are those in the model, for stages of `pipeexec.split`, and else those in the stage. All
    copies of a tied parameter have its first name, as in ``model.named_parameters()``.
    `DistributedDataParallel` and `torch.compile` add nothing to names.
    """
    original = unwrapped(module)
    firsts = first_names(original.whole) if isinstance(original, SplitStage) else {}
    for name, parameter in original.named_parameters():
        model_name = original.model_name(name) if isinstance(original, SplitStage) else name
        yield firsts.get(model_name, model_name).replace(f"{WRAPPED}.", ""), parameter
