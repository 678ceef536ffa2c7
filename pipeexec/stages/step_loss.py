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
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipeexec.distributed.processes import Processes
from pipeexec.nesting import leaves, tensors_in, with_tensors
from pipeexec.stages.loss_function import (
    Count,
    LossFunction,
    Metrics,
    MetricSum,
    metric_sums,
    stage_loss_name,
)
from pipeexec.stages.microbatches import BatchShares, shapes_beyond_samples
from pipesim.errors import ExecutionError

#: Bytes of outputs that the check keeps, unless two micro-batches have more.
MOST_BYTES = 64 << 20
#: Bytes of an output beyond which nothing is checked: the check copies two outputs several times.
LARGEST = 256 << 20
#: Relative difference that rounding does not explain, in single precision and better.
_TOLERANCE = 1e-3
#: The same in units of the last place, for half precision.
_ULPS = 4

#: Returns the loss of an output and its targets, and its count if it has one.
LossAndCount = Callable[[object, object], tuple[Tensor, Tensor | float | None]]


class Difference(NamedTuple):
    """Loss and count summed over micro-batches, and the same of these micro-batches at once.

    Losses are divided by their counts, which are 1 if there are none. ``gradients`` is the norm of
    the difference of the gradients at the output, relative to those at once.
    """

    combined: float
    whole: float
    gradients: float
    combined_count: float
    whole_count: float
    n_microbatches: int


class LossCheck:
    """Compares the combined loss of micro-batches with the loss of all of them at once.

    A mean over unmasked tokens, for example, is no mean over samples. Weighted by samples, the
    micro-batches give another loss, and other gradients, than the batch at once. So the first step
    keeps outputs of the last stage and their gradients: up to `MOST_BYTES`, but of two
    micro-batches at least. Outputs beyond `LARGEST` are not kept. After the step the loss function
    is called on all of them. It is called twice: a loss that draws random numbers has two values.
    Gradients show a difference even if all losses are equal, as they may be before training.

    Attributes
    ----------
    scale
        Factor of the gradients: that of a gradient scaler.
    number
        Path of a tensor without dimensions in the output, such as a loss that the model computes,
        through which gradients flow: several of them cannot be joined. None without one.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self.number: str | None = None
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._first: Any = None  # nested as all outputs are
        self._nbytes = 0
        self._lock = threading.Lock()  # last stages of several paths or replicas call `note`

    def note(self, microbatch: int, output: object) -> None:
        """Keep an output, and its gradient once the backward has computed it."""
        tensors = tensors_in(output)
        for path, value in leaves(output, "output"):
            if isinstance(value, Tensor) and value.requires_grad and value.dim() == 0:
                value.register_hook(partial(self._keep_path, path))
        with self._lock:
            if (
                microbatch in self._outputs
                or not any(_is_of_samples(x) for x in tensors)
                or not self._has_room(tensors)
            ):
                return
            self._outputs[microbatch] = tuple(x.detach() for x in tensors)
            if self._first is None:
                self._first = with_tensors(output, self._outputs[microbatch])
        for index, tensor in enumerate(tensors):
            if _is_of_samples(tensor):
                tensor.register_hook(partial(self._keep, microbatch, index))

    def _has_room(self, tensors: tuple[Tensor, ...]) -> bool:
        nbytes = sum(x.nbytes for x in tensors)
        self._nbytes += nbytes
        first = next(iter(self._outputs.values()), tensors)
        if any(x.device != y.device for x, y in zip(first, tensors, strict=False)):
            return False
        return nbytes <= LARGEST and (len(self._outputs) < 2 or self._nbytes <= MOST_BYTES)

    def _keep(self, microbatch: int, index: int, gradient: Tensor) -> None:
        self._gradients[microbatch, index] = gradient.detach().clone()

    def _keep_path(self, path: str, _: Tensor) -> None:
        self.number = path

    def overflows(self) -> bool:
        """Return whether gradients are not finite because of the scale."""
        return self.scale != 1 and not all(x.isfinite().all() for x in self._gradients.values())

    def difference(
        self,
        function: LossAndCount,
        targets: Sequence[Any],
        losses: Sequence[Tensor | None],
        factors: Callable[[Sequence[int]], tuple[list[float], float]],
    ) -> Difference | None:
        """Return the difference; None if there is none, or if nothing can be compared.

        Losses are weighted as in the step; ``factors`` is `StepLoss._factors`.
        """
        kept = sorted({number for number, _ in self._gradients})
        if len(kept) < 2:
            return None
        scales, combined_count = factors(kept)
        try:
            columns = zip(*(self._outputs[number] for number in kept), strict=True)
            joined = [_joined(column) for column in columns]
            gradients = self._join_gradients(kept, scales)
            outputs = [joined[index].requires_grad_() for index in gradients]
            labels = _join_targets([targets[number] for number in kept])
            argument = with_tensors(self._first, joined)
            gpus = sorted({x.device.index or 0 for x in joined if x.device.type == "cuda"})
            with torch.random.fork_rng(gpus), torch.enable_grad():
                loss, count = function(argument, labels)
                whole = torch.autograd.grad(loss * self.scale, outputs, allow_unused=True)
                again, _ = function(argument, labels)
        except Exception:  # the loss takes micro-batches of one size only: nothing to compare
            return None
        weighted = [
            float(x) * scale
            for number, scale in zip(kept, scales, strict=True)
            if (x := losses[number]) is not None
        ]
        difference = Difference(
            sum(weighted) / (combined_count or math.nan),
            float(loss.detach()) / (float(1 if count is None else count) or math.nan),
            _relative(list(gradients.values()), whole),
            combined_count,
            float(1 if count is None else count),
            len(kept),
        )
        limit = max(_TOLERANCE, _ULPS * max(torch.finfo(x.dtype).eps for x in (*outputs, loss)))
        draws = abs(float(again.detach() - loss.detach())) > limit * abs(float(loss.detach()))
        counts_differ = abs(difference.whole_count - combined_count) > limit * combined_count
        return difference if not draws and (difference.gradients > limit or counts_differ) else None

    def _join_gradients(self, kept: Sequence[int], factors: Sequence[float]) -> dict[int, Tensor]:
        """Return the gradients of all micro-batches, by the tensor's number in the output."""
        return {
            index: torch.cat(
                [
                    self._gradients[number, index] * factor
                    if (number, index) in self._gradients
                    else torch.zeros_like(self._outputs[number][index])
                    for number, factor in zip(kept, factors, strict=True)
                ]
            )
            for index in sorted({index for _, index in self._gradients})
        }


def _relative(gradients: Sequence[Tensor], whole: Sequence[Tensor | None]) -> float:
    """Return the norm of the difference of gradients, relative to that of ``whole``."""
    pairs = [(x, y) for x, y in zip(gradients, whole, strict=True) if y is not None]
    difference = torch.stack([(x - y).float().norm() for x, y in pairs]).norm()
    return float(difference / torch.stack([y.float().norm() for _, y in pairs]).norm())


def _is_of_samples(tensor: Tensor) -> bool:
    """Return whether a tensor gets a gradient, and is no single number."""
    return tensor.requires_grad and tensor.dim() > 0


def _joined(column: Sequence[Tensor]) -> Tensor:
    """Return a value of all micro-batches; NaN for numbers that differ, which nothing equals."""
    if column[0].dim() > 0:
        return torch.cat(list(column))
    is_equal = all(torch.equal(x, column[0]) for x in column)
    return column[0] if is_equal else torch.tensor(math.nan, device=column[0].device)


def _join_targets(targets: list[Any]) -> Any:
    """Return the targets of all micro-batches; they share tensors that are not split."""
    columns = zip(*(tensors_in(x) for x in targets), strict=True)
    joined = [
        column[0] if all(x is column[0] for x in column) else torch.cat(column)
        for column in columns
    ]
    return with_tensors(targets[0], joined)


class LossShapes:
    """Shapes of the outputs and targets of one step's `Microbatches`, without their samples.

    A mean over tokens, weighted by samples, is not the mean over all tokens if sequences of
    micro-batches have different lengths. Outputs of different lengths cannot be joined, so that
    `LossCheck` cannot compare. Slices of sequences are weighted by their positions. Shapes of
    targets are those of all processes, as text.
    """

    def __init__(
        self, targets: Iterable[str], *, has_weights: bool, counts_positions: bool
    ) -> None:
        self._has_weights, self._is_exact = has_weights, has_weights or counts_positions
        self._targets, self._outputs = dict.fromkeys(targets), dict[str, None]()

    def note(self, output: object, count: Count | None) -> None:
        """Note the shapes of an output."""
        if self._has_weights and count is not None:
            raise ExecutionError(
                "loss_fn returned (sum, count), and Microbatches have weights: both say how much a "
                "micro-batch counts; leave the weights out"
            )
        self._outputs[str(shapes_beyond_samples(output))] = None

    def unlike(self) -> tuple[str, list[str]] | None:
        """Return name and shapes of values whose shapes differ; None if tokens are counted."""
        for name, shapes in (("outputs", self._outputs), ("targets", self._targets)):
            if len(shapes) > 1 and not self._is_exact:
                return name, list(shapes)
        return None


#: A count on the host, or on each GPU.
_LossCounts = float | dict[torch.device, Tensor]


class StepLoss:
    """Losses of the micro-batches of one step, and the counts by which gradients are divided.

    Micro-batches are numbered through all shares of the batch; see `pipeexec.stages.microbatches`.

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
        #: Targets of each micro-batch on the device of a stage with a loss of its own, by stage.
        self.stage_targets: dict[int, Sequence[Any]] = {}
        #: Metrics of each micro-batch, by stage (-1 for the last); empty without metrics.
        self._metrics: dict[int, dict[int, Metrics]] = {}
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
        elif self.function.of_stages:
            raise ExecutionError(
                f"loss_fn returned (sum, count), but {_stages_text(self.function.of_stages)} by "
                "stage_losses, and gradients that add up cannot be divided by counts of several "
                "losses; let loss_fn return a mean, and give the counts as weights: "
                "px.Microbatches(targets, weights=[number of tokens of each])"
            )
        else:
            self._note_count(microbatch, count)
        self.losses[microbatch] = loss.detach()
        if self.check is not None:
            self.check.note(microbatch, output)
        return loss if self.gradient_weight == 1.0 else loss * self.gradient_weight

    def stage_loss(self, stage: int, microbatch: int, predictions: object) -> Tensor:
        """Return the loss of a stage before the last one, weighted as `microbatch_loss` is.

        It is kept as a metric, whose sum over micro-batches is the loss of the stage.
        """
        function, targets = self.function.of_stages[stage], self.stage_targets[stage]
        loss, count, metrics = function.with_metrics(predictions, targets[microbatch])
        if count is not None:
            raise ExecutionError(
                f"the loss of stage {stage} (stage_losses) returned (sum, count); return a mean "
                "over samples as loss_fn does, or sums with loss_reduction='sum'"
            )
        own: Metrics = {stage_loss_name(stage): (loss.detach(), None)}
        self._note_metrics(microbatch, own | (metrics or {}), stage)
        return loss * (self.weights[microbatch] * self.gradient_weight)

    def _note_metrics(self, microbatch: int, metrics: Metrics, stage: int = -1) -> None:
        """Keep the metrics of a micro-batch, which are the same as those of others."""
        with self._lock:
            rows = self._metrics.setdefault(stage, {})
            rows[microbatch] = metrics
            first = next(iter(rows.values()))
        forms = [{name: x is None for name, (_, x) in row.items()} for row in (first, metrics)]
        if forms[0] != forms[1]:
            raise ExecutionError(
                f"loss_fn returned the metrics {', '.join(first) or 'of no name'} for one "
                f"micro-batch and {', '.join(metrics) or 'none'} for another; return the same for "
                "all, with a count for all or for none"
            )

    def metric_sums(self) -> dict[str, MetricSum]:
        """Return the sums of each metric over the micro-batches of this process."""
        sums: dict[str, MetricSum] = {}
        for rows in self._metrics.values():
            own = metric_sums([rows.get(k) for k in range(len(self.sizes))], self.weights)
            if both := sums.keys() & own.keys():
                raise ExecutionError(
                    f"losses of two stages return the metric {min(both)!r}; give each its own name"
                )
            sums |= own
        return sums

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
        the mean that DistributedDataParallel takes of gradients. A count of 0 is an error on the
        host, and gives gradients of NaN on a GPU.
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


def _stages_text(stages: Iterable[int]) -> str:
    numbers = sorted(stages)
    names = ", ".join(map(str, numbers))
    return f"stages {names} have losses" if len(numbers) > 1 else f"stage {names} has a loss"


def _weights(sizes: Sequence[float], numbers: np.ndarray[Any, Any]) -> list[float]:
    """Return the part of each micro-batch in its mini-batch, over all replicas."""
    table = np.array(sizes)[numbers]
    weights: list[float] = (table / table.sum(axis=(0, 2), keepdims=True)).ravel().tolist()
    return weights


def _to_float(counts: _LossCounts) -> float:
    """Return a count as a float; the host waits for one on a GPU."""
    return counts if isinstance(counts, float) else float(next(iter(counts.values())))
