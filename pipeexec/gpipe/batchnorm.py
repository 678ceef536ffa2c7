"""Batch norms whose running statistics are those of the mini-batch, not of its micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from pipeexec.gpipe.checkpoint import is_recomputing

__all__ = ["DeferredBatchNorm"]


class DeferredBatchNorm(_BatchNorm):
    """A batch norm that gathers the statistics of all micro-batches, then updates its own once.

    The statistics are those that a batch norm would have of the whole mini-batch. Each micro-batch
    is still normalized by its own mean and variance.

    Parameters
    ----------
    num_features, eps, momentum, affine
        As of `torch.nn.BatchNorm2d`.
    chunks
        Micro-batches of a mini-batch.
    """

    #: It was chosen for micro-batches: `pipeexec.data_parallel.batch_norms.BatchNormCheck` does not
    #: warn of it.
    is_deferred = True
    sum: Tensor
    sum_squares: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.register_buffer("sum", torch.zeros(num_features))
        self.register_buffer("sum_squares", torch.zeros(num_features))
        self.chunks = chunks
        self.counter = 0  # values of a channel so far
        self.tracked = 0  # micro-batches so far
        self._before: list[Tensor] | None = None  # the statistics that this mini-batch has changed

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> nn.Module:
        """Return a module with these in place of all batch norms that track statistics.

        Parameters and buffers are shared with the module's.
        """
        if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
            return module
        converted = module
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            converted = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
            for name in ("weight", "bias"):
                setattr(converted, name, getattr(module, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(converted, name, getattr(module, name))
            assert isinstance(module.running_mean, Tensor)
            for name in ("sum", "sum_squares"):
                setattr(converted, name, torch.zeros_like(module.running_mean))
            converted.train(module.training)
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_deferred_batch_norm(child, chunks))
        return converted

    def begin(self, chunks: int) -> None:
        """Begin a mini-batch of so many micro-batches; let go of what one that failed has left."""
        self.chunks = chunks
        self._before = None
        if self.tracked:
            self._restart()

    def undo(self) -> None:
        """Forget a mini-batch whose forward failed after all of it had come by here."""
        if self._before is not None:
            for statistic, before in zip(self._statistics(), self._before, strict=True):
                statistic.copy_(before)
        self._before = None

    def _statistics(self) -> list[Tensor]:
        found = (self.running_mean, self.running_var, self.num_batches_tracked)
        return [x for x in found if x is not None]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a micro-batch; in training, note its statistics, unless it is recomputed."""
        self._check_input_dim(input)
        if not self.training:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0,
                self.eps,
            )  # fmt: skip
        if not is_recomputing():
            self._track(input.detach())
        return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _track(self, micro_batch: Tensor) -> None:
        dims = [d for d in range(micro_batch.dim()) if d != 1]
        self.sum += micro_batch.sum(dims)
        self.sum_squares += micro_batch.square().sum(dims)
        self.counter += micro_batch.numel() // micro_batch.size(1)
        self.tracked += 1
        if self.tracked == self.chunks:
            self._commit()

    def _commit(self) -> None:
        """Update the running statistics by those of the mini-batch; the variance is unbiased."""
        self._before = [x.clone() for x in self._statistics()]
        assert isinstance(self.num_batches_tracked, Tensor)
        assert isinstance(self.running_mean, Tensor)
        assert isinstance(self.running_var, Tensor)
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        mean = self.sum / self.counter
        biased = self.sum_squares / self.counter - mean.square()
        variance = biased * (self.counter / max(1, self.counter - 1))
        self.running_mean += share * (mean - self.running_mean)
        self.running_var += share * (variance - self.running_var)
        self._restart()

    def _restart(self) -> None:
        self.sum.zero_()
        self.sum_squares.zero_()
        self.counter = self.tracked = 0
