"""`GPipe`: wrap a sequential module, keep ``loss.backward()``, train over several devices."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Never

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.batch_norms import BatchNormCheck
from pipeexec.devices.make_devices import make_devices
from pipeexec.gpipe.arguments import (
    GPipeDevice,
    Switches,
    check_microbatches,
    check_module,
    check_order,
    check_switches,
    checked_balance,
    checked_devices,
    checked_input,
)
from pipeexec.gpipe.backward_order import PartitionTask, unordered_backward
from pipeexec.gpipe.batchnorm import DeferredBatchNorm
from pipeexec.gpipe.call import Call, ForwardRunner
from pipeexec.gpipe.call_plan import CALLER, COMPUTE, forward_backward_graph
from pipeexec.gpipe.partition import Runtime, make_runtime, skips_across, split_layers
from pipeexec.gpipe.skip import verify_skippables
from pipeexec.stages.activations import ActivationMeter
from pipeexec.stages.batches import Batch
from pipeexec.stages.stage import attach_meters
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_count,
    check_flag,
    check_name,
)
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import Streams
from pipesim.lowering.recomputes import RECOMPUTE, Recompute
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import checked_names

#: Held while a module's workers are made. A lock of the module could not be copied with it.
_MAKE_LOCK = threading.Lock()
#: Forwards that take longer (s) are run in threads. In shorter ones, threads that take Python's
#: lock from each other cost more than they gain (``benchmarks/peers_gpipe.py``).
MIN_THREADED_SECONDS = 300e-6


@checked_names
class GPipe(nn.Module):
    """A sequential module, split into partitions on several devices, run by micro-batches.

    Outputs, losses and gradients are those of the module. ``loss.backward()`` runs through the
    partitions as a pipeline too (GPipe, arXiv 1811.06965). The interface is that of torchgpipe
    (arXiv 2004.09910); ``docs/explanation/gpipe_module.md`` lists the differences.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` run the pipeline, too. Second derivatives
    (``create_graph=True``), and a backward after one with ``retain_graph=True``, run the layers
    again without it. They raise `pipesim.errors.ExecutionError` where the layers would give another
    result.

    A single micro-batch draws the random numbers that the module itself would draw. Of several,
    each has its own random numbers, which depend on the process's generator alone.

    Parameters
    ----------
    module
        Each layer takes the output of the layer before: a tensor or a tuple of tensors.
    balance
        Number of layers of each partition; see `pipeexec.gpipe.balance`.
    devices
        Devices of the partitions, also those of `slices` and `workers`; more than needed may be
        given. By default all GPUs, or a CPU worker a partition if there is no GPU.
    chunks
        Largest number of micro-batches of a mini-batch.
    checkpoint
        Which micro-batches drop their activations, and recompute them in the backward while it
        waits for gradients: ``"always"``, all ``"except_last"``, or ``"never"``.
    deferred_batch_norm
        Whether batch norms update their running statistics once a mini-batch.

    Other Parameters
    ----------------
    dependencies, copy_streams, portals
        For experiments: turn one mechanism off to measure its effect. The mechanisms are the order
        of the backward (`pipeexec.gpipe.backward_order`), separate streams for messages, and skips
        that go straight to the partition that pops them. Without copy streams both ends of a
        message wait for each other, as on default streams (`pipeexec.gpipe.rendezvous`); only its
        receiver waits if skips go straight to their partitions.
    recompute_waits
        For experiments without copy streams: whether a device receives a gradient before it
        recomputes, as under torchgpipe on default streams. The recompute then does not fill the
        wait for the gradient.
    streams
        For experiments: copy streams as in `pipesim.lower`. By default each device has a stream for
        each peer and direction; ``"per_microbatch"`` is like torchgpipe, which has one for each
        device and micro-batch.
    hosts
        For experiments: ``"one"`` thread issues the tasks of all devices, or a thread a device, for
        ``"per_device"`` (`pipeexec.gpipe.hosts`). torchgpipe has such threads for forwards, and
        torch's engine for backwards on GPUs. The threads share Python's lock.
    backward_seed, backward_order
        For experiments without dependencies: impose an order of the backward, drawn at random, or
        that of the R and B of each stage of a schedule, such as one of `pipesim.autograd_orders`. A
        schedule has as many micro-batches as a mini-batch makes. By default torch's engine chooses,
        in a graph like torchgpipe's (`pipeexec.gpipe.engine_graph`).
    threads
        For experiments on CPUs: whether partitions compute in separate threads, or all in the
        caller's thread. By default in threads on devices of `workers`, and where forwards take more
        than 0.3 ms: in shorter ones, threads that take Python's lock from each other cost more than
        they gain.

    Attributes
    ----------
    partitions
        The parts of the module; their parameters and buffers keep their places.
    balance, devices, chunks, checkpoint, threads
        The values in use; ``devices[-1]`` has the outputs, and should have the targets.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    >>> model = px.GPipe(layers, balance=[2, 2], devices=["cpu"] * 2, chunks=4)
    >>> model(torch.ones(8, 4)).sum().backward()
    >>> len(model), all(p.grad is not None for p in layers.parameters())
    (4, True)
    """

    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: str

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[GPipeDevice] | None = None,
        chunks: int = 1,
        checkpoint: Recompute = "except_last",
        deferred_batch_norm: bool = False,
        dependencies: bool = True,
        copy_streams: bool = True,
        portals: bool = True,
        recompute_waits: bool = False,
        streams: Streams = "per_peer",
        hosts: Literal["one", "per_device"] = "one",
        backward_seed: int | None = None,
        backward_order: Schedule | None = None,
        threads: bool | None = None,
    ) -> None:
        super().__init__()
        is_whole = isinstance(chunks, float) and chunks % 1 == 0 and chunks < 2**53
        self.chunks = check_count("chunks", int(chunks) if is_whole else chunks)
        self.checkpoint = str(checkpoint)
        if self.checkpoint not in RECOMPUTE:
            raise ArgumentError(
                f"checkpoint is not one of 'always', 'except_last', or 'never': got {checkpoint!r}"
            )
        check_flag("deferred_batch_norm", deferred_batch_norm)
        if threads is not None:
            check_flag("threads", threads)
        switches = Switches(
            dependencies, copy_streams, portals, recompute_waits, streams, hosts, backward_seed,
            backward_order,
        )  # fmt: skip
        check_switches(switches)
        if threads is False and hosts != "one":
            raise ArgumentError(
                f"hosts={hosts!r}, but threads=False runs all tasks in the caller's thread; leave "
                "out one of them"
            )
        check_module(module)
        verify_skippables(module)
        if deferred_batch_norm:
            converted = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
            assert isinstance(converted, nn.Sequential)
            module = converted
        self._check_batch_norms = BatchNormCheck(
            module.named_modules(),
            "deferred_batch_norm=True makes the running statistics alone those of the mini-batch.",
        )
        self.balance = checked_balance(balance, len(module))
        self._places = checked_devices(devices, len(self.balance))
        self.devices = [x if isinstance(x, torch.device) else x.torch_device for x in self._places]
        self.partitions = nn.ModuleList(split_layers(module, self.balance))
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        self._batch_norms = [x for x in self.modules() if isinstance(x, DeferredBatchNorm)]
        check_order(backward_order, len(self.balance))
        self._switches = switches
        self.threads = threads
        self._runner = ForwardRunner()
        self._runtime: Runtime | None = None
        self._last_call: Call | None = None

    # The interface of a sequential module

    def __len__(self) -> int:
        return sum(len(partition) for partition in self._parts())

    def __getitem__(self, index: int) -> nn.Module:
        layers = list(self)
        try:
            return layers[index]
        except IndexError:
            raise IndexError(f"layer {index} of {len(layers)}") from None

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self._parts():
            yield from partition

    def _parts(self) -> list[nn.Sequential]:
        return list(self.partitions)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the threads and streams; a copy makes its own."""
        return {**self.__dict__, "_runtime": None, "_last_call": None, "_places": self.devices}

    # Devices and types of parameters

    def cuda(self, device: object = None) -> Never:
        """Raise: every partition has its device.

        Parameters
        ----------
        device
            Ignored.

        Returns
        -------
        Never
            It does not return.
        """
        raise _moving_denied()

    def cpu(self) -> Never:
        """Raise: every partition has its device.

        Returns
        -------
        Never
            It does not return.
        """
        raise _moving_denied()

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change the type of parameters.

        Parameters
        ----------
        *args, **kwargs
            Those of `torch.nn.Module.to`, without a device: ``dtype``, ``non_blocking``,
            ``memory_format``.

        Returns
        -------
        GPipe
            This module.
        """
        is_device = args and isinstance(args[0], (torch.device, int, str, Tensor))
        if is_device or "device" in kwargs or "tensor" in kwargs:
            raise _moving_denied()
        return super().to(*args, **kwargs)

    # Forward

    def forward(self, input: Batch) -> Batch:
        """Return the output of a mini-batch, on the last device.

        Parameters
        ----------
        input
            A tensor or a tuple of tensors; the first dimension of each is the batch.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            Output of the last layer for all samples, in their order.
        """
        tensors = checked_input(input)
        if not self.devices:
            return input
        n_samples = {x.shape[0] if x.dim() else None for x in tensors}
        if len(n_samples) > 1 or None in n_samples:
            raise ArgumentError(
                f"the tensors of the input have shapes {[tuple(x.shape) for x in tensors]}; give "
                "each as many samples, along the first dimension"
            )
        inputs = tuple(x.to(self.devices[0], non_blocking=True) for x in tensors)
        is_atomic, outputs = self._run(inputs, not isinstance(input, tuple))
        return outputs[0] if is_atomic else outputs

    def _run(self, inputs: tuple[Tensor, ...], atomic: bool) -> tuple[bool, tuple[Tensor, ...]]:
        """Run micro-batches; return whether the outputs are one tensor, and the outputs."""
        runtime = self._make_ready()
        chunks = check_count("chunks", self.chunks)
        microbatches = list(zip(*(x.detach().chunk(chunks) for x in inputs), strict=True))
        m = len(microbatches)
        recomputed, tracked = self._recomputed(m), self._tracked(inputs, runtime)
        if tracked:
            check_microbatches(self._switches.backward_order, m)
        self._check_batch_norms(m)
        for norm in self._batch_norms if self.training else ():
            norm.begin(m)
        self._last_call, is_atomic, outputs = self._runner.run(
            runtime, self._stream(), inputs, microbatches, recomputed, tracked, self._batch_norms,
            atomic=atomic,
        )  # fmt: skip
        return is_atomic, outputs

    def _stream(self) -> str:
        """Return the name of the stream of each device that computes."""
        if self.devices[0].type != "cpu" or self.threads:
            return COMPUTE
        if self.threads is not None:
            return CALLER
        if self._switches.hosts != "one":
            return COMPUTE
        call, own = self._last_call, any(not isinstance(x, torch.device) for x in self._places)
        if own or call is None or call.forward_seconds() > MIN_THREADED_SECONDS:
            return COMPUTE
        return CALLER

    def _tracked(self, inputs: tuple[Tensor, ...], runtime: Runtime) -> range:
        """Return the partitions that have a backward: the first with a gradient, and all after."""
        n = len(self.partitions)
        if not torch.is_grad_enabled():
            return range(n, n)
        if any(x.requires_grad for x in inputs):
            runtime.stages[0].needs_input_grad = True
            return range(n)
        firsts = (
            j
            for j, part in enumerate(self.partitions)
            if any(x.requires_grad for x in part.parameters())
        )
        return range(next(firsts, n), n)

    def _recomputed(self, m: int) -> list[bool]:
        """Return, for each of ``m`` micro-batches, whether it is recomputed."""
        check_name("checkpoint", self.checkpoint, RECOMPUTE)
        n = {"always": m, "except_last": m - 1, "never": 0}[self.checkpoint] if self.training else 0
        return [i < n for i in range(m)]

    def _make_ready(self) -> Runtime:
        """Return the stages and streams, made on first use; several threads may be the first."""
        with _MAKE_LOCK:
            if self._runtime is None:
                devices = make_devices(self._places)
                self._runtime = make_runtime(self._parts(), self.devices, devices, self._switches)
        return self._runtime

    # Task graph and measurements

    def graph(self, batch_size: int) -> TaskGraph:
        """Return the tasks of one forward and backward of ``batch_size`` samples.

        `timeline` has the same tasks. The backward is in the order that the dependencies give, or
        without them in that which a CPU's engine is predicted to take.

        Parameters
        ----------
        batch_size
            Number of samples, at least 1.

        Returns
        -------
        TaskGraph
            Tasks of ``min(chunks, batch_size)`` micro-batches or fewer, as `torch.Tensor.chunk`
            cuts them.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> model = px.GPipe(layers, balance=[2, 2], devices=["cpu"] * 2, chunks=4)
        >>> model.graph(8).n_microbatches, model.graph(3).n_microbatches
        (4, 3)
        """
        batch_size = check_count("batch_size", batch_size)
        if batch_size >= 2**63:
            raise ArgumentError(f"batch_size must be below 2**63, got {batch_size}")
        m = len(torch.empty(batch_size, 0).chunk(self.chunks))
        recomputed, n = self._recomputed(m), len(self.balance)
        if self._switches.dependencies:
            return self._graph(recomputed, [])
        seed, order = self._switches.backward_seed, self._switches.backward_order
        check_microbatches(order, m)
        return self._graph(recomputed, unordered_backward(n, recomputed, seed, order))

    def _graph(self, recomputed: list[bool], backward: Iterable[PartitionTask]) -> TaskGraph:
        n, skips = len(self.balance), skips_across(self._parts()).values()
        return forward_backward_graph(n, recomputed, backward, skips, self._switches)

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts about the devices that matter to readers of measured times: emulated links."""
        devices = self._runtime.devices if self._runtime is not None else ()
        return tuple(dict.fromkeys(device.note for device in devices if device.note))

    @property
    def launches(self) -> dict[str, Any]:
        """Imposed seconds of a host to issue a task, as keywords of `pipesim.Costs`."""
        device = self._places[0] if self._places else None
        if device is None or isinstance(device, torch.device):
            return {}
        return {"launch": device.launch, "launch_by_op": device.launch_by_op}

    def skip_bytes(self) -> dict[tuple[int, int], int]:
        """Return the bytes a micro-batch of skips between partitions in the last forward.

        The format is that of `pipesim.Costs`. The largest micro-batch counts.

        Returns
        -------
        dict
            Bytes by pair of partitions, ``(source, target)``; 0 before the first forward. Empty
            without skips.
        """
        skips = skips_across(self._parts())
        sent = {} if self._last_call is None else self._last_call.tensors.skip_bytes
        nbytes = dict.fromkeys(skips.values(), 0)
        for key, pair in skips.items():
            nbytes[pair] += sent.get(key, 0)
        return nbytes

    @contextmanager
    def metered(self) -> Iterator[list[ActivationMeter]]:
        """Count, in this block, the bytes that each partition holds for its backward.

        Returns
        -------
        contextmanager
            Yields a meter a partition. Its ``peak`` is the most bytes held so far, and ``current``
            the bytes held now.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> model = px.GPipe(layers, balance=[2, 2], devices=["cpu"] * 2, chunks=4)
        >>> with model.metered() as meters:
        ...     model(torch.ones(8, 4)).sum().backward()
        >>> [meter.peak for meter in meters], [meter.current for meter in meters]
        ([160, 160], [0, 0])
        """
        runtime = self._make_ready()
        weights = [*self.parameters(), *self.buffers()]
        meters = [ActivationMeter(weights) for _ in runtime.stages]
        with attach_meters(runtime.stages, meters):
            yield meters

    def timeline(self) -> Timeline:
        """Return the times of all tasks of the last forward and its backward.

        Returns
        -------
        Timeline
            Start and end of each task (s).
        """
        call = self._last_call
        if call is None or not call.order:
            raise ExecutionError("nothing was measured yet; run a forward and its backward first")
        if call.has_failed:
            raise ExecutionError("the last forward or backward failed; run both again")
        backward = [(op, i, j) for op, j, i in call.order]
        return call.timeline(self._graph(call.tensors.recomputed, backward))


def _moving_denied() -> ArgumentTypeError:
    return ArgumentTypeError(
        "denied to move parameters and buffers, because GPipe should manage device placement"
    )
