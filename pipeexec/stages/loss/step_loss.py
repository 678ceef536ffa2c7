"""`StepLoss`: combine the losses of micro-batches to the loss of the whole batch.

A mean over samples is weighted by the samples of its micro-batch, which are known before the step.
A mean over something else, such as tokens that are not masked, comes as ``(sum, count)``. Backwards
begin before the last count is known, so they start from sums, and gradients are divided by the
total count when the optimizer steps. Megatron-LM does the same (``calculate_per_token_loss``).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeexec.distributed.processes import Processes
from pipeexec.stages.batch_shares import BatchShares
from pipeexec.stages.loss.loss_check import Difference, LossCheck
from pipeexec.stages.loss.loss_function import Count, LossFunction
from pipeexec.stages.loss.loss_shapes import LossShapes
from pipeexec.stages.loss.metrics import Metrics, MetricSum, metric_sums
from pipesim.errors import ExecutionError

#: A count on the host, or on each GPU.
_LossCounts = float | dict[torch.device, Tensor]


class StepLoss:
    """Losses of the micro-batches of one step, and the counts by which gradients are divided.

    Micro-batches are numbered through all shares of the batch; see `pipeexec.stages.batch_shares`.

    Parameters
    ----------
    function
        Loss function of the pipeline.
    sizes
        Samples of each micro-batch, or its weight if the user gives weights.
    targets
        Targets of each micro-batch; None for those of other processes.
    shares, n_batches
        Shares of the batch, and mini-batches of each.
    devices
        Devices of this process's stages: counts on a GPU are copied to the others.
    processes
        Processes of the pipeline, or None.
    own, owners
        Micro-batches whose last stage is in this process, and ranks of the processes that have a
        last stage; used with ``processes``.
    """

    def __init__(
        self,
        function: LossFunction,
        sizes: Sequence[float],
        targets: Sequence[Any],
        shares: BatchShares,
        n_batches: int,
        devices: Iterable[torch.device],
        processes: Processes | None = None,
        own: Iterable[int] = (),
        owners: Iterable[int] = (),
    ) -> None:
        self.function, self.targets, self.sizes = function, targets, sizes
        is_mean = function.reduction == "mean"
        #: Numbers of the micro-batches, by share and mini-batch.
        self._numbers = np.arange(len(sizes)).reshape(shares.n_shares, n_batches, -1)
        self.weights = _weights(sizes, self._numbers) if is_mean else [1.0] * len(sizes)
        #: Number of losses that `StepResult.loss` is a mean of.
        self.n_losses = n_batches if is_mean else 1
        self.losses: list[Tensor | None] = [None] * len(sizes)
        #: Metrics of each micro-batch; empty without metrics.
        self._metrics: dict[int, Metrics] = {}
        self._counts: list[_LossCounts | None] = [None] * len(sizes)
        self._gpus = [x for x in dict.fromkeys(devices) if x.type == "cuda"]
        self._totals: dict[int, float] = {}
        self._published: set[int] = set()
        self._lock = threading.RLock()
        self._processes, self._own, self._owners = processes, set(own), sorted(set(owners))
        self._name = "" if processes is None else f"count/{processes.next_number()}"
        self.check = None if function.is_checked else LossCheck()
        #: Shapes of `Microbatches`; None for a batch that is split evenly.
        self.output_shapes: LossShapes | None = None
        #: Factor of the gradients, and count of earlier steps whose gradients they are added to.
        self.gradient_weight, self.earlier_count = 1.0, 0.0

    def microbatch_loss(self, microbatch: int, output: object) -> Tensor:
        """Return the loss of a micro-batch whose gradients add up over the step, and note it."""
        is_first = self.function.returns_count is None
        loss, count, metrics = self.function.with_metrics(output, self.targets[microbatch])
        if metrics is not None:
            self._note_metrics(microbatch, metrics)
        if self.output_shapes is not None:
            self.output_shapes.note(output, count)
        if is_first and self._processes is not None:
            self._processes.publish(f"{self._name}/is", float(count is not None))
        if count is None:
            loss = loss * self.weights[microbatch]
        else:
            self._note_count(microbatch, count)
        self.losses[microbatch] = loss.detach()
        if self.check is not None:
            self.check.note(microbatch, output)
        return loss if self.gradient_weight == 1.0 else loss * self.gradient_weight

    def _note_metrics(self, microbatch: int, metrics: Metrics) -> None:
        """Keep the metrics of a micro-batch.

        Raises
        ------
        ExecutionError
            If another micro-batch has other metrics.
        """
        with self._lock:
            self._metrics[microbatch] = metrics
            first = next(iter(self._metrics.values()))
        forms = [{name: x is None for name, (_, x) in row.items()} for row in (first, metrics)]
        if forms[0] != forms[1]:
            raise ExecutionError(
                f"loss_fn returned the metrics {', '.join(first) or 'of no name'} for one "
                f"micro-batch and {', '.join(metrics) or 'none'} for another; return the same for "
                "all, with a count for all or for none"
            )

    def metric_sums(self) -> dict[str, MetricSum]:
        """Return the sums of each metric over the micro-batches of this process."""
        if not self._metrics:
            return {}
        numbers = range(len(self.sizes))
        return metric_sums([self._metrics.get(k) for k in numbers], self.weights)

    def _note_count(self, microbatch: int, count: Count) -> None:
        """Keep a count. With the last of a mini-batch, publish their sum if all are on the host.

        Copies to other GPUs are queued on the stream of the last stage, before its backward. A STEP
        follows that backward, so it finds them there.
        """
        if isinstance(count, Tensor):
            self._counts[microbatch] = {x: count.to(x, non_blocking=True) for x in self._gpus}
            return
        self._counts[microbatch] = count
        if self._processes is not None:
            batch = self._mini_batch(microbatch)
            if all(isinstance(self._counts[k], float) for k in self._local_microbatches(batch)):
                self._publish(batch)

    def _mini_batch(self, microbatch: int) -> int:
        _, n_batches, size = self._numbers.shape
        return microbatch // size % n_batches

    def _local_microbatches(self, batch: int) -> list[int]:
        """Return the micro-batches of a mini-batch whose last stage is in this process."""
        numbers: list[int] = self._numbers[:, batch].ravel().tolist()
        return [k for k in numbers if self._processes is None or k in self._own]

    def loss_shares(self) -> list[Tensor | None]:
        """Return the share of each micro-batch in the loss of its mini-batch."""
        if not self.is_counted():
            return list(self.losses)
        return [
            None
            if loss is None
            else (loss / self._total(self._mini_batch(k), loss.device)).to(loss.dtype)
            for k, loss in enumerate(self.losses)
        ]

    @torch.no_grad()
    def divide(self, module: nn.Module, batch: int, mean: Callable[[Count], Count]) -> None:
        """Divide the gradients of a stage by the count of a mini-batch.

        ``mean`` returns the mean of a count over replicas that the pipeline does not know. It is
        the mean that DistributedDataParallel takes of gradients.

        Raises
        ------
        ExecutionError
            If the count is 0 and on the host; a count of 0 on a GPU gives gradients of NaN.
        """
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        if not gradients:
            return
        total = self.total_count(batch, gradients[0].device, mean)
        for gradient in gradients:
            gradient.div_(total)

    def total_count(
        self, batch: int, device: torch.device, mean: Callable[[Count], Count]
    ) -> Count:
        """Return the count by which the gradients of a mini-batch are divided; see `divide`."""
        total = mean(self._total(batch, device) + self.earlier_count)
        if not isinstance(total, Tensor) and not total:
            raise ExecutionError(
                f"the counts of mini-batch {batch} add up to 0, and gradients cannot be divided by "
                "that; leave out batches without anything to count"
            )
        return total

    def unchecked_number(self) -> str | None:
        """Return the path of a number in the output on which the mean of the first step depends.

        It is a mean over samples or not: that cannot be checked. None with one micro-batch, for
        sums, and for losses with counts.
        """
        is_exact = self.function.returns_count or self.function.reduction == "sum"
        return None if self.check is None or is_exact or len(self.sizes) < 2 else self.check.number

    def unlike_shapes(self) -> tuple[str, list[str]] | None:
        """Return name and shapes of values that make a mean over samples doubtful, once.

        None if they are alike, for sums, and for losses with counts or weights.
        """
        function = self.function
        is_exact = function.returns_count is not False or function.reduction == "sum"
        if self.output_shapes is None or is_exact or function.has_warned_of_shapes:
            return None
        shapes = self.output_shapes.unlike()
        function.has_warned_of_shapes = shapes is not None
        return shapes

    def difference(self) -> Difference | None:
        """Return the difference of the loss from that of several micro-batches at once.

        None if there is none, after the first step, and if they cannot be compared.
        """
        if self.check is None:
            return None
        check, self.check = self.check, None
        if check.overflows():  # a later step can be compared
            return None
        self.function.is_checked = True
        return check.difference(self.function, self.targets, self.losses, self._factors)

    def _factors(self, microbatches: Sequence[int]) -> tuple[list[float], float]:
        """Return factors that turn a step's weights into those of a batch of some micro-batches.

        Also return the total count of these micro-batches, 1 without counts.
        """
        if self.function.returns_count:
            counts = [_to_float(x) for k in microbatches if (x := self._counts[k]) is not None]
            return [1.0] * len(microbatches), math.fsum(counts)
        if self.function.reduction == "sum":
            return [1.0] * len(microbatches), 1.0
        n_samples = sum(self.sizes[k] for k in microbatches)
        return [self.sizes[k] / (n_samples * self.weights[k]) for k in microbatches], 1.0

    def is_counted(self) -> bool:
        """Return whether the loss has counts; other processes learn it in the first step."""
        if self.function.returns_count is None and self._processes is not None:
            self.function.returns_count = bool(self._processes.published(f"{self._name}/is"))
        return bool(self.function.returns_count)

    def is_counted_before(self) -> bool:
        """Return whether losses of earlier steps had counts."""
        return bool(self.function.returns_count)

    def batch_count(self) -> float:
        """Return the count of the first mini-batch; the host waits for counts on a GPU."""
        device = self._gpus[0] if self._gpus else torch.device("cpu")
        return float(self._total(0, device))

    def _total(self, batch: int, device: torch.device) -> Count:
        """Return the count of a mini-batch, over all replicas; on a GPU for tensors there.

        No count is missing: a stage steps after the last backward of the mini-batch.
        """
        counts = [x for k in self._local_microbatches(batch) if (x := self._counts[k]) is not None]
        on_gpu = [x[device] for x in counts if not isinstance(x, float)]
        if on_gpu and self._processes is None:  # each STEP sums again, on its own stream
            return torch.stack(on_gpu).sum()
        with self._lock:
            if batch not in self._totals:
                self._totals[batch] = self._sum_over_processes(batch)
            return self._totals[batch]

    def _sum_over_processes(self, batch: int) -> float:
        if self._processes is None:
            return self._local_sum(batch)
        if self._processes.rank in self._owners:
            self._publish(batch)
        return math.fsum(
            self._processes.published(f"{self._name}/{batch}/{rank}") for rank in self._owners
        )

    def _publish(self, batch: int) -> None:
        """Publish the count of this process's micro-batches to other processes, once."""
        assert self._processes is not None
        with self._lock:
            if batch not in self._published:
                self._published.add(batch)
                name = f"{self._name}/{batch}/{self._processes.rank}"
                self._processes.publish(name, self._local_sum(batch))

    def _local_sum(self, batch: int) -> float:
        counts = [self._counts[k] for k in self._local_microbatches(batch)]
        return math.fsum(_to_float(x) for x in counts if x is not None)


def _weights(sizes: Sequence[float], numbers: np.ndarray[Any, Any]) -> list[float]:
    """Return the part of each micro-batch in its mini-batch, over all replicas."""
    table = np.array(sizes)[numbers]
    weights: list[float] = (table / table.sum(axis=(0, 2), keepdims=True)).ravel().tolist()
    return weights


def _to_float(counts: _LossCounts) -> float:
    """Return a count as a float; the host waits for one on a GPU."""
    return counts if isinstance(counts, float) else float(next(iter(counts.values())))
