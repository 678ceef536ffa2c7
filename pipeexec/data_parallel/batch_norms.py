"""Batch norms that make training on micro-batches differ from training on the whole batch."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipesim.errors import BatchNormWarning
from pipesim.utils.caller_warnings import warn_caller

#: Most names that a message lists; it counts the others.
_MAX_NAMES = 5


class BatchNormCheck:
    """Warns once of the batch norms of a model that normalize each micro-batch separately.

    A batch norm normalizes by the mean and variance of its input in training mode, and in either
    mode if it keeps no running statistics. Others are the same function of each sample, whatever
    the batch. `pipeexec.gpipe.batchnorm.DeferredBatchNorm` causes no warning: the user chose it for
    micro-batches. ``advice`` is the last sentence of the message, for the caller's case.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], advice: str) -> None:
        self._norms = [
            (name, module)
            for name, module in modules
            if isinstance(module, _BatchNorm) and not getattr(module, "is_deferred", False)
        ]
        self._advice = advice

    def __call__(self, n_microbatches: int) -> None:
        """Warn if a batch of ``n_microbatches`` would be normalized in parts."""
        if n_microbatches < 2 or not self._norms:
            return
        names = [
            name or "the model itself"
            for name, norm in self._norms
            if norm.training or (norm.running_mean is None and norm.running_var is None)
        ]
        if not names:
            return
        self._norms = []
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        warn_caller(
            f"batch norms {', '.join(map(repr, names[:_MAX_NAMES]))}{more} normalize each of "
            f"{n_microbatches} micro-batches by its own mean and variance: loss and gradients are "
            "not those of the whole batch at once, and running statistics are updated "
            f"{n_microbatches} times a batch. For equal gradients use GroupNorm or LayerNorm, or "
            "freeze the batch norms with their eval(). SyncBatchNorm shares statistics between "
            f"replicas, not between micro-batches. {self._advice}",
            BatchNormWarning,
        )
