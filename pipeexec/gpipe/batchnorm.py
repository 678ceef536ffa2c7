"""Batch norms whose running statistics are computed from mini-batches, not from micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from pipeexec.gpipe.checkpoint import is_recomputing


class DeferredBatchNorm(_BatchNorm):
    """A batch norm that updates its running statistics once a mini-batch.

    The running statistics equal those of a batch norm that runs the whole mini-batch. Each
    micro-batch is still normalized by its mean and variance.

    Parameters
    ----------
    num_features, eps, momentum, affine
        As for `torch.nn.BatchNorm2d`.
    chunks
        Number of micro-batches of a mini-batch.
    """

    #: Read by `pipeexec.data_parallel.batch_norms.BatchNormCheck`, which does not warn of it.
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
        self.counter = 0  # values of a channel so far, in this mini-batch
        self.tracked = 0  # micro-batches so far, in this mini-batch
        self._before: list[Tensor] | None = None  # running statistics before this mini-batch

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> nn.Module:
        """Return a module in which this class replaces all batch norms that track statistics.

        Parameters and buffers are shared with ``module``.
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
        """Begin a mini-batch of ``chunks`` micro-batches; drop the sums of one that failed."""
        self.chunks = chunks
        self._before = None
        if self.tracked:
            self._restart()

    def undo(self) -> None:
        """Restore the running statistics if a failed forward had run the whole mini-batch here."""
        if self._before is not None:
            for statistic, before in zip(self._statistics(), self._before, strict=True):
                statistic.copy_(before)
        self._before = None

    def _statistics(self) -> list[Tensor]:
        statistics = (self.running_mean, self.running_var, self.num_batches_tracked)
        return [x for x in statistics if x is not None]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a micro-batch; in training, add up its statistics unless it is recomputed."""
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
        """Update the running statistics from the mini-batch; the variance is unbiased."""
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
