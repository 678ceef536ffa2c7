"""`GPipe`: wrap a sequential module, keep ``loss.backward()``, train over several devices.

Longer than other files by the documentation of its one class.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Never

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.batch_norms import BatchNormCheck
from pipeexec.devices.make_devices import make_devices
from pipeexec.gpipe.arguments import (
    Place,
    check_microbatches,
    check_module,
    checked_balance,
    checked_input,
    checked_order,
    chosen,
)
from pipeexec.gpipe.backward_order import Task, undirected
from pipeexec.gpipe.batchnorm import DeferredBatchNorm
from pipeexec.gpipe.call import CALLER, COMPUTE, WORTH_A_THREAD, Call
from pipeexec.gpipe.partition import Partition, skips_across
from pipeexec.gpipe.partition_tasks import Machine, Work
from pipeexec.gpipe.routes import routes, ways
from pipeexec.gpipe.skip import verify_skippables
from pipeexec.gpipe.timeline import graph_of, of_partitions, timeline_of
from pipeexec.stages.activation_bytes import ActivationCounter, ActivationMeter
from pipeexec.stages.batches import Batch
from pipeexec.stages.random_numbers import next_seed, use_seed
from pipeexec.stages.stage import Stage, attach_meters
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_count,
    check_flag,
    check_name,
)
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import RECOMPUTE, Recompute
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline

__all__ = ["GPipe"]

#: Held while a module's workers are made: a lock of the module's own could not be copied with it.
_MAKING = threading.Lock()


class GPipe(nn.Module):
    """A sequential module in partitions on several devices, which micro-batches pass through.

    Outputs, losses and gradients are those of the module; ``loss.backward()`` goes back through
    the partitions as a pipeline, too (GPipe, arXiv 1811.06965; torchgpipe, arXiv 2004.09910, whose
    interface this is; ``docs/gpipe.md`` has the differences). Gradients are added to ``.grad`` of
    the parameters: `torch.autograd.grad` and second derivatives do not go through.

    Random numbers: of one micro-batch those that the module itself would draw; of several, each
    has its own, which depend on the process's generator alone.

    Parameters
    ----------
    module
        Each of its layers takes what the one before returns: a tensor or a tuple of tensors.
    balance
        Numbers of layers of the partitions; see `pipeexec.gpipe.balance`.
    devices
        Of the partitions; more than needed may be given, also those of `slices` and `workers`. By
        default all GPUs, or a CPU worker a partition where there are none.
    chunks
        Into how many micro-batches to cut a mini-batch, at most.
    checkpoint
        Which micro-batches drop their activations, and recompute them in the backward while it
        waits for gradients: ``"always"``, all ``"except_last"``, or ``"never"``.
    deferred_batch_norm
        Whether batch norms update their running statistics once a mini-batch.
    dependencies, copy_streams, portals
        Of the mechanisms that make it fast, which to use: the order of the backward
        (`pipeexec.gpipe.backward_order`), streams of their own for messages, and skips that go
        straight to where they are popped. To see what each does; there is no other reason to do
        without.
    recompute_waits
        Whether, without copy streams, a device receives a gradient before it recomputes, so that
        the recompute does not fill the wait for it, as under torchgpipe on default streams.
    backward_seed
        Where nothing orders the backward, draw the order at random; None for the order that
        autograd takes of torchgpipe's graph on CPUs (`pipesim.schedule`, ``"autograd"``).
    backward_order
        Where nothing orders the backward, a schedule whose R and B of each stage to follow, such as
        one of `pipesim.autograd_orders`. Of as many micro-batches as a mini-batch makes.
    threads
        Whether partitions on CPUs compute in threads of their own, or all in the caller's. By
        default in threads on devices of `workers`, and where forwards take more than 0.3 ms: with
        less to do, threads that take Python's lock from each other cost more than they gain.

    Attributes
    ----------
    partitions
        The parts of the module; their parameters and buffers keep their places.
    balance, devices, chunks, checkpoint, threads
        As they are used; ``devices[-1]`` is where outputs are, and targets should be.

    Raises
    ------
    ArgumentError
        For a module, balance or mode that is none; `TypeError`, too, for a module that is not
        sequential, and `IndexError` for too few devices.
    SkipError
        For skips that are not stashed once and popped once.
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
        devices: Iterable[Place] | None = None,
        chunks: int = 1,
        checkpoint: Recompute = "except_last",
        deferred_batch_norm: bool = False,
        dependencies: bool = True,
        copy_streams: bool = True,
        portals: bool = True,
        recompute_waits: bool = False,
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
        flags = {"dependencies": dependencies, "copy_streams": copy_streams, "portals": portals}
        flags |= {"recompute_waits": recompute_waits, "deferred_batch_norm": deferred_batch_norm}
        for name, flag in flags.items():
            check_flag(name, flag)
        if recompute_waits and copy_streams:
            raise ArgumentError(
                "recompute_waits=True, but messages have copy streams: a gradient is received on a "
                "stream of its own, and a recompute never waits for it; add copy_streams=False, or "
                "leave recompute_waits out"
            )
        if threads is not None:
            check_flag("threads", threads)
        if backward_seed is not None:
            check_count("backward_seed", backward_seed, 0)
        if backward_order is not None and (dependencies or backward_seed is not None):
            raise ArgumentError(
                "backward_order is for a backward that nothing else orders; give "
                "dependencies=False with it, and no backward_seed"
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
        self._places = chosen(devices, len(self.balance))
        self.devices = [x if isinstance(x, torch.device) else x.torch_device for x in self._places]
        self.partitions = nn.ModuleList(_cut(module, self.balance))
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        self._batch_norms = [x for x in self.modules() if isinstance(x, DeferredBatchNorm)]
        self._dependencies, self._copy_streams = dependencies, copy_streams
        self._portals, self._backward_seed = portals, backward_seed
        self._recompute_waits = recompute_waits
        self._backward_order = checked_order(backward_order, len(self.balance))
        self.threads = threads
        self._others_draw = False  # from the process's generator, while this runs
        self._machine: Machine | None = None
        self._last: Call | None = None

    # As of the sequential module

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
        """Leave out the threads and streams, which are made anew."""
        return {**self.__dict__, "_machine": None, "_last": None, "_places": self.devices}

    # Where it is

    def cuda(self, device: object = None) -> Never:
        """Raise: every partition has its device."""
        raise _moving_denied()

    def cpu(self) -> Never:
        """Raise: every partition has its device."""
        raise _moving_denied()

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change the type of parameters; raise for a device: every partition has its own."""
        is_place = args and isinstance(args[0], (torch.device, int, str, Tensor))
        if is_place or "device" in kwargs or "tensor" in kwargs:
            raise _moving_denied()
        return super().to(*args, **kwargs)

    # What it does

    def forward(self, input: Batch) -> Batch:
        """Return the output of a mini-batch, on the last device.

        Raises
        ------
        ArgumentTypeError
            If the input is no tensor, and no tuple of tensors.
        """
        tensors = checked_input(input)
        if not self.devices:
            return input
        n_samples = {x.shape[0] if x.dim() else None for x in tensors}
        if len(n_samples) > 1 or None in n_samples:
            raise ArgumentError(
                f"the tensors of the input have shapes {[tuple(x.shape) for x in tensors]}; give "
                "as many samples of each, along the first dimension"
            )
        inputs = tuple(x.to(self.devices[0], non_blocking=True) for x in tensors)
        self._ready()
        is_atomic, outputs = self._run(inputs, not isinstance(input, tuple))
        return outputs[0] if is_atomic else outputs

    def _run(self, inputs: tuple[Tensor, ...], atomic: bool) -> tuple[bool, tuple[Tensor, ...]]:
        """Run micro-batches; return the outputs, and whether they are one tensor."""
        machine = self._machine
        assert machine is not None
        chunks = check_count("chunks", self.chunks)
        microbatches = list(zip(*(x.detach().chunk(chunks) for x in inputs), strict=True))
        recomputed, tracked = self._recomputed(len(microbatches)), self._tracked(inputs)
        if tracked:
            check_microbatches(self._backward_order, len(microbatches))
        self._check_batch_norms(len(microbatches), stacklevel=6)
        for norm in self._batch_norms if self.training else ():
            norm.begin(len(microbatches))
        several = len(microbatches) > 1
        seed = next_seed() if several and machine.draws(unknown=True) else None
        repeats = several and bool(tracked) and any(recomputed) and not self._others_draw
        before = machine.random_states() if repeats else None
        call = Call(Work(machine, recomputed, seed, tracked), self._stream())
        try:
            made = call.run(inputs, microbatches, atomic)
        except BaseException:
            for norm in self._batch_norms:  # those of early partitions may have seen all of it
                norm.undo()
            raise
        if before is not None and machine.take_back_draws(before):
            # A partition draws that did not draw before, so that nobody knows what: once more.
            call.forget()
            seed = next_seed()
            call = Call(Work(machine, recomputed, seed, tracked, again=True), self._stream())
            made = call.run(inputs, microbatches, atomic)
            self._others_draw = not machine.draws(unknown=False)  # it was none of ours
        if seed is not None and machine.draws(unknown=False):
            use_seed()
        self._last = call
        return made

    def _stream(self) -> str:
        """Return which stream of each device is to compute."""
        if self.devices[0].type != "cpu" or self.threads:
            return COMPUTE
        if self.threads is not None:
            return CALLER
        last, given = self._last, any(not isinstance(x, torch.device) for x in self._places)
        if given or last is None or last.forward_seconds() > WORTH_A_THREAD:
            return COMPUTE
        return CALLER

    def _tracked(self, inputs: tuple[Tensor, ...]) -> range:
        """Return the partitions that have a backward: those from the first with a gradient on."""
        n = len(self.partitions)
        if not torch.is_grad_enabled():
            return range(n, n)
        assert self._machine is not None
        if any(x.requires_grad for x in inputs):
            self._machine.stages[0].needs_input_grad = True
            return range(n)
        firsts = (
            j
            for j, part in enumerate(self.partitions)
            if any(x.requires_grad for x in part.parameters())
        )
        return range(next(firsts, n), n)

    def _recomputed(self, m: int) -> list[bool]:
        """Return which of so many micro-batches are recomputed."""
        check_name("checkpoint", self.checkpoint, RECOMPUTE)
        n = {"always": m, "except_last": m - 1, "never": 0}[self.checkpoint] if self.training else 0
        return [i < n for i in range(m)]

    def _ready(self) -> Machine:
        """Return the workers and streams, made on first use; several threads may be the first."""
        with _MAKING:
            self._machine = self._machine or self._made()
        return self._machine

    def _made(self) -> Machine:
        """Return the workers and streams."""
        parts = self._parts()
        skips = skips_across(parts)
        partitions = [
            Partition(
                part,
                [key for key, (_, target) in skips.items() if target == j],
                [key for key, (source, _) in skips.items() if source == j],
            )
            for j, part in enumerate(parts)
        ]
        stages = [
            Stage(partition, j, device, ActivationCounter())
            for j, (partition, device) in enumerate(zip(partitions, self.devices, strict=True))
        ]
        devices = make_devices(self._places)
        along = routes(len(parts), skips, portals=self._portals)
        return Machine(
            stages,
            partitions,
            devices,
            ways(len(parts), along),
            ways(len(parts), [route.back for route in along]),
            [threading.RLock() for _ in parts],
            itertools.count(),
            self._dependencies,
            self._copy_streams,
            self._backward_seed,
            self._recompute_waits,
            self._backward_order,
        )

    # What it is to the simulator

    def graph(self, batch_size: int) -> TaskGraph:
        """Return the tasks of one forward and backward of so many samples.

        Those that `timeline` has, in the order that the dependencies give.
        """
        batch_size = check_count("batch_size", batch_size)
        if batch_size >= 2**63:
            raise ArgumentError(f"batch_size must be below 2**63, got {batch_size}")
        m = len(torch.empty(batch_size, 0).chunk(self.chunks))
        recomputed, n = self._recomputed(m), len(self.balance)
        if self._dependencies:
            return self._graph(recomputed, [])
        check_microbatches(self._backward_order, m)
        tasks = undirected(n, recomputed, self._backward_seed, self._backward_order)
        return self._graph(recomputed, tasks)

    def _graph(self, recomputed: list[bool], tasks: Iterable[Task]) -> TaskGraph:
        return graph_of(
            len(recomputed),
            of_partitions(len(self.balance), recomputed, tasks),
            skips=skips_across(self._parts()).values(),
            overlap=self._copy_streams,
            portals=self._portals,
            recompute_waits=self._recompute_waits,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What whoever reads measured times should know of the devices, such as imposed links."""
        devices = self._machine.devices if self._machine is not None else ()
        return tuple(dict.fromkeys(device.note for device in devices if device.note))

    def skip_bytes(self) -> dict[tuple[int, int], int]:
        """Return what skips carried between partitions in the last forward: bytes a micro-batch.

        As `pipesim.Costs` takes them; the largest, if micro-batches differ.
        """
        skips = skips_across(self._parts())
        sent = {} if self._last is None else self._last.work.skip_bytes
        found = dict.fromkeys(skips.values(), 0)
        for key, pair in skips.items():
            found[pair] += sent.get(key, 0)
        return found

    @contextmanager
    def metered(self) -> Iterator[list[ActivationMeter]]:
        """Count, in this block, the bytes that each partition holds for its backward."""
        machine = self._ready()
        weights = [*self.parameters(), *self.buffers()]
        meters = [ActivationMeter(weights) for _ in machine.stages]
        with attach_meters(machine.stages, meters):
            yield meters

    def timeline(self) -> Timeline:
        """Return when each task of the last forward, and of its backward, ran.

        Raises
        ------
        ExecutionError
            If there was no forward and backward yet, or the last one failed.
        """
        call = self._last
        if call is None or not call.order:
            raise ExecutionError("nothing was measured yet; run a forward and its backward first")
        if call.has_failed:
            raise ExecutionError("the last forward or backward failed; run both again")
        tasks = [(op, i, j) for op, j, i in call.order]
        return timeline_of(call, self._graph(call.work.recomputed, tasks))


def _moving_denied() -> ArgumentTypeError:
    return ArgumentTypeError(
        "denied to move parameters and buffers, because GPipe should manage device placement"
    )


def _cut(module: nn.Sequential, balance: list[int]) -> Iterator[nn.Sequential]:
    """Return partitions whose layers keep their names."""
    layers = iter(module.named_children())
    for n in balance:
        partition = nn.Sequential()
        for _ in range(n):
            partition.add_module(*next(layers))
        yield partition
