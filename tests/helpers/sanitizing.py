"""Checks of streams and memory on the stand-in for CUDA: races, and memory that is freed too early.

torch's CUDA sanitizer decides what is ordered (`torch.cuda._sanitizer`). On a GPU it is told of
kernels, events and waits by torch; here by a dispatch mode, and by the stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeEvent, FakeGpu, FakeStream
from small_pipelines import cut, dense, mse, sgd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import pipeexec as px
import pipesim as ps


def _imported() -> Any:
    """Import torch's sanitizer without its effect, which is to trace all that CUDA does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_activate_gpu_trace", lambda: None)
        from torch.cuda import _sanitizer
    return _sanitizer


csan = _imported()


@dataclass
class _Memory:
    """A piece of memory.

    Attributes
    ----------
    number
        No two pieces have the same, unlike addresses.
    storage
        Tells when it is freed.
    owner
        The stream that was current when it was allocated, to which the allocator gives it back.
        None if it was there before: it then stays.
    made_by
        The operator that allocated it.
    last_of_owner
        Number of the last operator of the owner before; it may still use the same memory.
    uses
        The last operator of each stream that used it: its number and its name.
    kept_for
        Streams for which `torch.Tensor.record_stream` keeps it.
    """

    number: int
    storage: StorageWeakRef
    owner: FakeStream | None
    made_by: str
    last_of_owner: int = -1
    uses: dict[int, tuple[int, str]] = field(default_factory=dict)
    kept_for: set[int] = field(default_factory=set)


class _Arguments(csan.ArgumentHandler):  # type: ignore[misc]
    """Tells what an operator reads and writes, by numbers of memory in place of addresses."""

    def __init__(self, watch: Sanitizer) -> None:
        super().__init__()
        self.watch = watch

    def _handle_argument(
        self,
        value: Any,
        is_write: bool,
        metadata_only: bool,
        name: str | None = None,
        is_output: bool = False,
    ) -> None:
        if not isinstance(value, torch.Tensor) or not value.numel():
            return
        number = self.watch.memory(value).number
        if is_write:
            self.dataptrs_written.add(number)
        elif not metadata_only:
            self.dataptrs_read.add(number)
        self.tensor_aliases.setdefault(number, [])
        if is_output:
            self.outputs.add(number)


class Sanitizer(TorchDispatchMode):
    """Looks for races, and for memory that is freed while another stream may use it.

    Memory that is freed goes back to the stream that was current when it was allocated: the next
    operator there that allocates memory may write it. So for each other stream that used it, the
    allocator must keep it (`torch.Tensor.record_stream`), or its owner must have waited by then.
    The allocator keeps memory until all has run that a stream was given before the memory was
    freed, which covers work of other streams for which that stream had waited.

    New memory may be some that its owner still uses: other streams must wait before they write it.
    Copies in pinned host memory have no owner: torch's allocator of pinned memory notes by itself
    which streams use them.

    Parameters
    ----------
    cuda
        The stand-in.

    Attributes
    ----------
    races
        Two accesses of one memory by two streams, neither of which waited for the other.
    freed
        Memory that was freed too early, as text.
    n_freed, n_kept
        How much memory was freed, and how much of it was kept for a stream.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda, self.handler = cuda, csan.EventHandler()
        self.races: list[str] = []
        self.freed: list[str] = []
        self.n_freed = self.n_kept = 0
        self._memory: dict[int, _Memory] = {}  # by where torch has its storage
        self._shared: dict[int, _Memory] = {}  # those that another stream than the owner used
        self._free: list[_Memory] = []  # of those, not allocated again so far
        self._n_memories = 0
        self._events: list[FakeEvent] = []  # so that no two have one id

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as torch's own; else optimizers would not be seen

    # What operators do

    def memory(self, tensor: torch.Tensor, made_by: str = "", device: Any = None) -> _Memory:
        """Return the memory of a tensor; new memory is owned by the current stream if made here."""
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None or memory.storage.expired():
            self._n_memories += 1
            owner = self.cuda.current_stream(device) if made_by else None
            memory = _Memory(self._n_memories, StorageWeakRef(storage), owner, made_by)
            if owner is not None:
                state = self.handler.syncs.current_sync_states.get(owner.number, {})
                memory.last_of_owner = state.get(owner.number, -1)
            self._memory[storage._cdata] = memory
        return memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((*args, *kwargs.values()))
        stream, target = self._streams(inputs, kwargs.get("device"), func)
        has_no_kernel = func._schema.name == "aten::set_"
        is_factory = has_no_kernel or bool(csan.FACTORY_FUNCTION_REGEX.match(func._schema.name))
        arguments = _Arguments(self)
        arguments.parse_inputs(func._schema, args, kwargs, is_factory=is_factory)
        if target is not stream:
            self._order(target, stream)
        output = func(*args, **kwargs)
        outputs, name = _tensors((output,)), str(func._schema.name)
        before = self._n_memories
        for x in outputs:
            self.memory(x, name, target.device)
        if self._n_memories > before:
            self._allocated(target)
        arguments.parse_outputs(func._schema, output, is_factory=is_factory)
        errors = self.handler._handle_kernel_launch(
            stream.number,
            arguments.dataptrs_read - arguments.dataptrs_written,
            arguments.dataptrs_written,
            arguments.outputs,
            func._schema,
            arguments.tensor_aliases,
        )
        self.races += [_text(error) for error in errors]
        for x in (*inputs, *outputs):
            memory = self.memory(x)
            memory.uses[stream.number] = self.handler.seq_num, name
            if memory.owner is not None and memory.owner is not stream:
                self._shared[memory.number] = memory
                if memory.number in arguments.dataptrs_written:
                    self._written(memory, name, stream)
        if target is not stream:
            self._order(stream, target)
        return output

    def _written(self, memory: _Memory, name: str, stream: FakeStream) -> None:
        """Note that another stream than the owner writes memory: it must follow the allocation."""
        assert memory.owner is not None
        owner = memory.owner.number
        if not self.handler.syncs.is_ordered_after(stream.number, memory.last_of_owner, owner):
            self.races.append(f"{memory.made_by} on {owner}, {name} on {stream.number}")

    def _streams(
        self, inputs: Sequence[torch.Tensor], device: Any, func: Any
    ) -> tuple[FakeStream, FakeStream]:
        """Return the stream on which an operator runs, and the one that owns its output.

        A kernel runs on the current stream of the GPU that has the memory; a copy to another GPU on
        that of its source, and each of the two waits for the other, before and after it.
        """
        owners = (self.memory(x).owner for x in inputs)
        homes = [owner.device for owner in owners if owner is not None]
        if func is torch.ops.aten.copy_.default and len(homes) == 2:
            target, source = map(self.cuda.current_stream, homes)
            return source, target
        stream = self.cuda.current_stream(homes[0] if homes else None)
        if device is None or device.index is None:
            return stream, stream
        return stream, self.cuda.current_stream(device)

    def _order(self, before: FakeStream, after: FakeStream) -> None:
        """Let one stream wait for all that another one was given."""
        event = FakeEvent(self.cuda)
        self.recorded(event, before)
        self.waited(after, event)

    # What the stand-in tells

    def recorded(self, event: FakeEvent, stream: FakeStream) -> None:
        """Note that an event was recorded on a stream."""
        self._events.append(event)
        self.handler._handle_event_record(id(event), stream.number)

    def waited(self, stream: FakeStream, event: FakeEvent) -> None:
        """Note that a stream waits for an event."""
        self._sweep()  # what was freed before is not covered by this wait
        self.handler._handle_event_wait(id(event), stream.number)

    def synchronized(self, stream: FakeStream) -> None:
        """Note that the host has waited for a stream."""
        self.handler._handle_stream_synchronization(stream.number)

    def kept(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """Note that memory of a tensor is kept for a stream."""
        self.memory(tensor).kept_for.add(stream.number)

    def pinned(self, copy: torch.Tensor) -> None:
        """Note that a tensor is a copy in pinned host memory."""
        memory = self.memory(copy)
        memory.owner = None
        self._shared.pop(memory.number, None)

    def _sweep(self) -> None:
        """Note which memory has been freed; forget uses that end before it is given back."""
        is_ordered_after = self.handler.syncs.is_ordered_after
        for number in [n for n, memory in self._shared.items() if memory.storage.expired()]:
            memory = self._shared.pop(number)
            memory.uses = {
                stream: (seq_num, name)
                for stream, (seq_num, name) in memory.uses.items()
                if not any(is_ordered_after(kept, seq_num, stream) for kept in memory.kept_for)
            }
            self._free.append(memory)

    def _allocated(self, owner: FakeStream) -> None:
        """Note that a stream writes new memory: it may be any that was given back to the stream."""
        self._sweep()
        free, self._free = self._free, []
        for memory in free:
            if memory.owner is not owner:
                self._free.append(memory)
                continue
            self.n_freed += 1
            self.n_kept += bool(memory.kept_for)
            for stream, (seq_num, name) in memory.uses.items():
                if not self.handler.syncs.is_ordered_after(owner.number, seq_num, stream):
                    self.freed.append(
                        f"{memory.made_by} on {owner.number}, used by {name} on {stream}"
                    )


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors that have elements, of arguments and of lists among them."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.numel():
                tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors(value)
    return tensors


def _call_with_each(function: Callable[[Any], object], value: Any) -> None:
    """Call a function with a value, or with each element of a list, at any depth."""
    if isinstance(value, list | tuple):
        for element in value:
            _call_with_each(function, element)
    else:
        function(value)


def _text(error: Any) -> str:
    """Return the two accesses of a race."""
    return ", ".join(
        f"{str(access.operator).partition('(')[0]} on {access.stream}"
        for access in (error.previous_access, error.current_access)
    )


@contextmanager
def sanitized(patch: pytest.MonkeyPatch) -> Iterator[Sanitizer]:
    """Install a stand-in for CUDA, and check what is done in this block."""
    cuda = FakeCuda()
    cuda.install(patch)
    watch = Sanitizer(cuda)
    cuda.observers.append(watch)
    # torch's sanitizer notes a stack for each operator, which takes longer than all else.
    no_stack = SimpleNamespace(extract=lambda frames, lookup_lines: [])
    patch.setattr(
        csan, "traceback", SimpleNamespace(StackSummary=no_stack, walk_stack=lambda frame: ())
    )
    to_host = FakeGpu.to_host

    def to_pinned(gpu: FakeGpu, data: torch.Tensor) -> torch.Tensor:
        copy = to_host(gpu, data)
        watch.pinned(copy)
        return copy

    patch.setattr(FakeGpu, "to_host", to_pinned)
    patch.setattr(csan, "pytree", SimpleNamespace(tree_map_=_call_with_each))  # not any class
    with watch:
        yield watch


def check(watch: Sanitizer) -> None:
    """Check that nothing was found, and that there was something to look at."""
    assert not watch.races, watch.races
    assert not watch.freed, watch.freed
    assert watch.n_kept


def pipeline_on_slices(
    graph: ps.TaskGraph, *, gpus: bool = False, optimizer: Any = sgd
) -> px.Pipeline:
    """Return a pipeline on slices of a GPU, or on as many GPUs."""
    stages = cut(dense(graph.n_stages), [1] * graph.n_stages)
    devices = [FakeGpu(index, index if gpus else None) for index in range(graph.n_devices)]
    return px.Pipeline(stages, graph, devices, mse, optimizer)
