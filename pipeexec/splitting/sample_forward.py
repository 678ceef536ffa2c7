"""`SampleForward`: modules and data flow of one forward of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeexec.splitting.balance.call_weights import CallWeights
from pipeexec.splitting.stand_in import on_meta, to_meta, with_zeros
from pipeexec.splitting.tracing.data_flow import DataFlow, follow
from pipeexec.splitting.tracing.exported_model import export_model
from pipeexec.splitting.tracing.ways import UncutModules, uncut_modules
from pipeexec.stages.restore import preserved_buffers
from pipesim.errors import ExecutionError

__all__ = ["SampleForward", "exported_forward", "sample_forward", "unchanged"]

_EXPORT = "torch.export"


class SampleForward(NamedTuple):
    """Modules and data flow of a forward.

    Attributes
    ----------
    uncut
        Modules that are not cut.
    flow
        Data flow between them.
    model, args, kwargs
        The model, or a copy of it without data, and the sample.
    """

    uncut: UncutModules
    flow: DataFlow
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def weights(self, kind: str, *, has_data: bool, optimizer_bytes: float) -> list[float]:
        """Return the weight of each call; see `CallWeights`."""
        names = [call.name for call in self.flow.calls]
        measured = CallWeights(
            self.model, names, self.args, self.kwargs,
            has_data=has_data, optimizer_bytes=optimizer_bytes,
        )  # fmt: skip
        with _failing_forward(self.model), unchanged(self.model):
            return measured.weights(kind)


def sample_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_data: bool
) -> SampleForward:
    """Return modules and data flow of a forward; buffers and random numbers stay as they were.

    A model without data runs without, or on zeros if its forward reads values, as of masks.

    Raises
    ------
    ExecutionError
        If the forward fails.
    """
    if not has_data:
        with suppress(Exception):  # a forward may read values anywhere
            empty = on_meta(model).train(model.training)
            return sample_forward(empty, *to_meta((args, kwargs)), has_data=True)
        model = with_zeros(model)
    with _failing_forward(model), unchanged(model):
        uncut = uncut_modules(model, args, kwargs)
        flow = follow(model, uncut.names, args, kwargs)
    return SampleForward(uncut, flow, model, args, kwargs)


def exported_forward(forward: SampleForward) -> SampleForward:
    """Return modules and data flow of the model's graph, by torch.export.

    If that fails, return the given ones, with the reason.
    """
    model, args, kwargs = forward.model, forward.args, forward.kwargs
    failed = (*forward.uncut.ways_failed, (forward.uncut.way, "these are fewer than two"))
    with unchanged(model):
        try:
            exported = export_model(model, args, kwargs)
            reason = "fewer than two operations of the graph have parameters"
        except Exception as error:  # of the user's code, and whatever torch.export raises
            exported = None
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.200}"
        if exported is None or len(exported.blocks) < 2:
            uncut = forward.uncut._replace(ways_failed=(*failed[:-1], (_EXPORT, reason)))
            return forward._replace(uncut=uncut)
        flow = follow(exported, exported.blocks, args, kwargs)
    names = exported.blocks
    uncut = UncutModules(names, frozenset(names), _EXPORT, failed)
    return SampleForward(uncut, flow, exported, args, kwargs)


@contextmanager
def _failing_forward(model: nn.Module) -> Iterator[None]:
    """Raise `ExecutionError` for errors in a forward."""
    try:
        yield
    except Exception as error:  # of the user's code
        raise ExecutionError(
            f"the forward of {type(model).__name__} fails on the sample: "
            f"{type(error).__name__}: {error!s:.300}"
        ) from error


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """Restore buffers, such as running statistics, and the state of random numbers at the end."""
    devices = {x.get_device() for module in modules for x in module.parameters() if x.is_cuda}
    with torch.random.fork_rng(sorted(devices)), preserved_buffers(modules):
        yield
