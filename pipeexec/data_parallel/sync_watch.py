"""`watch_sync`: a linter of gradient synchronization for existing training loops.

It hooks every all-reduce of this process, those of DistributedDataParallel's reducer included. The
reducer calls its process group from C++, so a wrapper of `torch.distributed.all_reduce` does not
see it. A communication hook can neither be removed nor share a model with another hook. But every
all-reduce passes torch's dispatcher as ``c10d::allreduce_``. There `torch.library` can put a kernel
in front of the backends' kernels, and remove it again.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeexec.data_parallel.ddp import is_synchronizing
from pipeexec.data_parallel.sync_rules import (
    CLEAR,
    STEP,
    AllReduceCall,
    History,
    HistoryEvent,
    MicroStep,
    SyncReport,
    apply_rules,
)
from pipesim.errors import ArgumentError, ArgumentTypeError, ExecutionError, check_type
from pipesim.utils.checks import checked_names


@checked_names
def watch_sync(
    model: nn.Module | None = None, *, group: dist.ProcessGroup | None = None
) -> AbstractContextManager[SyncWatch]:
    """Watch a training loop, and report all-reduces of gradients that are of no use, or missing.

    ::

        with px.watch_sync() as sync:
            for step, (inputs, targets) in enumerate(loader):
                ...
        print(sync.report())

    A micro-step is one backward of a model. Findings are:

    - a result that a later backward adds to, and that is reduced again before the optimizer steps;
    - a result that ``zero_grad()`` clears before a step, or that no optimizer has used at the end;
    - ``no_sync()`` around the backward and not the forward, where it has no effect, and the
      reverse, where nothing is reduced;
    - an optimizer step with gradients that were not reduced: replicas diverge. Parameters that a
      backward leaves unused are named, if DDP waits for them. If the process group has one process,
      a note says so instead;
    - gradients that an optimizer has stepped with, and that were not cleared.

    Each finding has the numbers of its micro-steps, calls, bytes, measured seconds, and the seconds
    that ``no_sync()`` would save.

    **How savings are estimated:** a call that is left out saves the time in which it was running
    and nothing was computed. Within a backward that is the time from its last gradient to its end;
    elsewhere, all of it. Concurrent calls count once. Waiting for a slower replica is counted,
    although it would move to the next all-reduce. Not counted are copies to and from DDP's buckets,
    and the slowdown of computation that overlaps with a reduction.

    Every DistributedDataParallel that runs forward in the block is watched, at the backwards of
    ``Tensor.backward`` and ``torch.autograd.backward``, one at a time. The end of the block removes
    all hooks. In the block, each all-reduce takes about 0.1 ms more, and each gradient 10 us.

    **Not observed:**

    - replays of CUDA graphs, which make no calls;
    - all-reduces of copies of gradients, such as flat buffers, that do not hold all of them;
    - collectives other than all-reduces, such as those of FSDP and ZeRO;
    - optimizers that are not `torch.optim.Optimizer`.

    Over NCCL, times are those of CUDA events; this was not measured on GPUs.

    Parameters
    ----------
    model
        The only model to watch. It need not be DDP: the same rules apply to gradients that the loop
        reduces itself, by `torch.distributed.all_reduce` of each ``.grad`` or of a flat copy of
        all.
    group
        The only process group whose calls are watched.

    Returns
    -------
    AbstractContextManager[SyncWatch]
        Its value is a `SyncWatch`; call its ``report()`` in the block or after it.

    See Also
    --------
    pipeexec.data_parallel.sync_report : The same for a recorded trace or a timeline.
    pipeexec.GradientAccumulation : Accumulation without useless reductions.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with px.watch_sync(model) as sync:
    ...     model(torch.ones(8, 4)).sum().backward()
    ...     optimizer.step()
    >>> report = sync.report()
    >>> report.n_steps, report.n_calls, report.notes
    (1, 0, ('one process: nothing to synchronize',))
    """
    if model is not None:
        check_type("model", model, nn.Module, "give the DistributedDataParallel, or leave it out")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(f"group must be a torch.distributed group, got {group!r:.60}")
    if model is not None and not any(x.requires_grad for x in model.parameters()):
        raise ArgumentError("the model has no parameter that requires a gradient, so none to watch")
    return _watching(model, group)


@contextmanager
def _watching(model: nn.Module | None, group: dist.ProcessGroup | None) -> Iterator[SyncWatch]:
    watch = SyncWatch(group)
    with ExitStack() as stack:
        stack.enter_context(_hook_all_reduces(watch._on_all_reduce))
        watch._install(stack)
        if model is not None:
            watch._add(model)
            watch._is_closed = True
        yield watch


class SyncWatch:
    """Observations of `watch_sync` so far; `report` applies the rules to them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else str(group.group_name)
        self._process_group = group
        self._watched: dict[int, _WatchedModel] = {}
        self._names: Counter[str] = Counter()
        self._is_closed = False  # whether no more models are watched
        self._stack: ExitStack | None = None
        self._backward: _WatchedBackward | None = None  # the current one
        self._last: _WatchedModel | None = None  # the model of the latest gradient

    def report(self) -> SyncReport:
        """Return the report on the loop so far."""
        histories = {x.name: x.with_calls() for x in self._watched.values()}
        unreplicated = [x.name for x in self._watched.values() if x.n_processes == 1 and x.history]
        notes = []
        if not any(histories.values()):
            notes.append(
                "no backward of a watched model was seen; DistributedDataParallel is found at its "
                "forward, other models are given: watch_sync(model)"
            )
        for name in unreplicated:
            model = f"{name}: " if len(self._watched) > 1 else ""
            notes.append(f"{model}one process: nothing to synchronize")
        return apply_rules(histories, notes, without_replicas=unreplicated)

    # Hooks and models

    def _install(self, stack: ExitStack) -> None:
        """Install hooks on all models and optimizers; the stack removes them when it closes."""
        self._stack = stack
        stack.callback(register_optimizer_step_post_hook(lambda x, *_: self._on_step(x)).remove)
        for owner, name, before, after in (
            (DistributedDataParallel, "forward", self._on_forward, None),
            (torch.optim.Optimizer, "zero_grad", None, self._on_clear),
            (nn.Module, "zero_grad", None, self._on_clear),
            (torch.amp.GradScaler, "step", None, lambda _, x, *__, **___: self._on_step(x)),
        ):
            _wrap_method(stack, owner, name, before, after)
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            with self._watch_backward(makes_gradients=not is_synchronizing(tensors)):
                backward(tensors, *args, **kwargs)

        torch.autograd.backward = watched
        stack.callback(setattr, torch.autograd, "backward", backward)

    def _add(self, model: nn.Module) -> _WatchedModel:
        assert self._stack is not None
        ddp = model if isinstance(model, DistributedDataParallel) else None
        module = model if ddp is None else ddp.module
        named = {name: x for name, x in module.named_parameters() if x.requires_grad}
        parameters = list(named.values())
        kind = type(module).__name__
        self._names[kind] += 1
        name = kind if self._names[kind] == 1 else f"{kind} {self._names[kind]}"
        timer = _device_timer(parameters[0].device)
        watched = _WatchedModel(name, ddp, list(named), parameters, *timer)
        self._watched[id(model)] = watched
        for key, parameter in named.items():
            handle = parameter.register_post_accumulate_grad_hook(
                lambda _, watched=watched, key=key: self._on_gradient(watched, key)
            )
            self._stack.callback(handle.remove)
        return watched

    def _models_of(self, owner: torch.optim.Optimizer | nn.Module) -> list[_WatchedModel]:
        """Return the watched models of which an optimizer or module has parameters."""
        if isinstance(owner, nn.Module):
            ids = {id(x) for x in owner.parameters()}
        else:
            ids = {id(x) for group in owner.param_groups for x in group["params"]}
        return [watched for watched in self._watched.values() if not ids.isdisjoint(watched.ids)]

    # Events

    def _on_forward(self, ddp: DistributedDataParallel, *_: Any, **__: Any) -> None:
        if not torch.is_grad_enabled():
            return
        watched = self._watched.get(id(ddp))
        if watched is None and not self._is_closed:
            watched = self._add(ddp)
        if watched is not None:
            watched.forwards.append(not ddp.require_backward_grad_sync)

    @contextmanager
    def _watch_backward(self, *, makes_gradients: bool) -> Iterator[None]:
        """Watch a backward, unless it is within another one, as that of a checkpoint is."""
        if self._backward is not None:
            yield
            return
        for watched in self._watched.values():
            if not watched.is_clear and all(x.grad is None for x in watched.parameters):
                watched.add_clear()  # by `parameter.grad = None`
        self._backward = backward = _WatchedBackward(makes_gradients)
        try:
            yield
        finally:
            if self._last is not None:
                backward.ended = self._last.now()
            self._backward = None

    def _on_gradient(self, watched: _WatchedModel, name: str) -> None:
        """Note that a parameter has its gradient."""
        self._last = watched
        backward = self._backward
        # A backward that bypasses `torch.autograd.backward` is identified by its number.
        key = torch._C._current_graph_task_id() if backward is None else backward
        if backward is None or backward.makes_gradients:
            watched.add_gradient(key, name)
        if backward is not None:
            backward.computed = watched.now()

    def _on_all_reduce(self, call: _AllReduce) -> Callable[[], object] | None:
        """Note an all-reduce of gradients; return a function that notes its end."""
        watched = self._reduced_model(call)
        if watched is None or watched.latest is None:
            return None
        nbytes = float(sum(x.numel() * x.element_size() for x in call.tensors))
        timed = _TimedAllReduce(nbytes, watched.now(), self._backward)
        watched.calls.append((watched.latest, timed))

        def note_end() -> None:
            timed.end = watched.now()

        return note_end

    def _reduced_model(self, call: _AllReduce) -> _WatchedModel | None:
        """Return the model whose gradients an all-reduce sums; None if it sums other tensors."""
        if call.is_batch_norm or self._group not in (None, call.group):
            return None
        if not all(x.is_floating_point() or x.is_complex() for x in call.tensors):
            return None  # the map of used parameters, under find_unused_parameters
        if self._backward is not None or torch._C._current_graph_task_id() != -1:
            if self._may_be_by_reducer(call, self._last):
                return self._last
            others = [x for x in self._watched.values() if self._may_be_by_reducer(call, x)]
            return others[0] if len(others) == 1 else None
        if not call.is_python:
            return None
        shapes = {(x.data_ptr(), x.numel()) for x in call.tensors}
        n_elements = sum(x.numel() for x in call.tensors)
        for watched in self._watched.values():
            if watched.latest is None:
                continue
            gradients = (x.grad for x in watched.parameters if x.grad is not None)
            if n_elements == watched.n_elements or any(
                (x.data_ptr(), x.numel()) in shapes for x in gradients
            ):
                return watched
        return None

    @staticmethod
    def _may_be_by_reducer(call: _AllReduce, watched: _WatchedModel | None) -> bool:
        """Return whether a model's reducer may have made a call within a backward."""
        if watched is None or watched.ddp is None or watched.group != call.group:
            return False
        return not call.is_python or bool(watched.ddp._comm_hooks)

    def _on_step(self, optimizer: torch.optim.Optimizer) -> None:
        for watched in self._models_of(optimizer):
            watched.add_step(self._process_group)

    def _on_clear(self, owner: torch.optim.Optimizer | nn.Module, *_: Any, **__: Any) -> None:
        for watched in self._models_of(owner):
            watched.add_clear()


@dataclass(eq=False)
class _WatchedBackward:
    """A backward: ``computed`` is the moment of its last gradient, ``ended`` that of its end."""

    makes_gradients: bool = True
    computed: _Moment = None
    ended: _Moment = None


@dataclass(eq=False)
class _TimedAllReduce:
    """An all-reduce that has started, and the backward in which it did."""

    nbytes: float
    start: _Moment
    backward: _WatchedBackward | None
    end: _Moment = None

    def to_call(self, seconds: Callable[[_Moment], float]) -> AllReduceCall:
        """Return its times in seconds; without an end, the end of the backward counts."""
        start = seconds(self.start)
        backward = self.backward
        ends = [x for x in (self.end, backward and backward.ended) if x is not None]
        end = max(start, seconds(ends[0])) if ends else start
        exposed = (start, end)
        if backward is not None and backward.computed is not None:
            last = seconds(backward.ended) if backward.ended is not None else end
            exposed = (max(start, seconds(backward.computed)), min(end, last))
        return AllReduceCall(
            self.nbytes, (start, end), (exposed,) if exposed[0] < exposed[1] else ()
        )


@dataclass(eq=False)
class _WatchedModel:
    """A model and the history of its gradients; `with_calls` adds the times of all-reduces."""

    name: str  # in the report
    ddp: DistributedDataParallel | None  # around the model
    names: list[str]  # of the parameters
    parameters: list[nn.Parameter]  # those that require gradients
    now: Callable[[], _Moment]  # of `_device_timer`, as `seconds`
    seconds: Callable[[_Moment], float]
    history: list[HistoryEvent] = field(default_factory=list)
    calls: list[tuple[MicroStep, _TimedAllReduce]] = field(default_factory=list)
    #: Whether ``no_sync()`` was around each forward since the last backward.
    forwards: list[bool] = field(default_factory=list)
    latest: MicroStep | None = None  # if neither a step nor a clear has followed it
    backward: object = None  # key of the backward of the latest micro-step
    n_micro_steps: int = 0
    n_processes: int = 0  # over which the model is replicated, as observed at optimizer steps

    def __post_init__(self) -> None:
        self.ids = {id(parameter) for parameter in self.parameters}
        self.n_elements = sum(parameter.numel() for parameter in self.parameters)

    @property
    def group(self) -> str | None:
        """Name of DDP's process group."""
        return None if self.ddp is None else str(self.ddp.process_group.group_name)

    @property
    def is_clear(self) -> bool:
        """Whether there was no backward since gradients were cleared."""
        return not self.history or self.history[-1] == CLEAR

    def add_gradient(self, key: object, name: str) -> None:
        """Note the gradient of a parameter; the first of a backward ``key`` starts a micro-step."""
        if self.latest is None or self.backward != key:
            self._start_micro_step(key)
        if self.latest is not None:
            self.latest.unused.pop(name, None)

    def _start_micro_step(self, key: object) -> None:
        backward_in = None if self.ddp is None else not self.ddp.require_backward_grad_sync
        forward_in = all(self.forwards) if self.forwards else None
        ddp = self.ddp
        waits_for_all = ddp is not None and not (ddp.find_unused_parameters or ddp.static_graph)
        ignored = getattr(ddp, "parameters_to_ignore", ())
        unused = dict.fromkeys(x for x in self.names if waits_for_all and x not in ignored)
        self.latest = MicroStep(self.n_micro_steps, forward_in, backward_in, unused=unused)
        self.history.append(self.latest)
        self.backward = key
        self.n_micro_steps += 1
        self.forwards.clear()

    def add_step(self, group: dist.ProcessGroup | None) -> None:
        """Note a step of an optimizer, if there was a backward before.

        A model without DDP is replicated over ``group``, or over all processes if it is None.
        """
        if self.latest is not None:
            if self.ddp is not None:
                group = self.ddp.process_group
            has_group = dist.is_available() and dist.is_initialized()
            size = dist.get_world_size(group) if has_group else 1
            self.n_processes = max(self.n_processes, size)
            self.history.append(STEP)
            self.latest = None

    def add_clear(self) -> None:
        """Note that gradients are cleared."""
        if not self.is_clear:
            self.history.append(CLEAR)
        self.latest = None

    def with_calls(self) -> History:
        """Return the history, with the all-reduces of each micro-step so far."""
        for step, _ in self.calls:
            step.calls.clear()
        for step, timed in self.calls:
            step.calls.append(timed.to_call(self.seconds))
        return self.history


# Hooks and clocks

#: Frames above a kernel that are searched for its caller.
_DEPTH = 12


class _AllReduce(NamedTuple):
    """An all-reduce that is about to be called."""

    tensors: list[Tensor]
    group: str  # name of the process group
    is_python: bool  # whether Python code called it; the reducer is C++
    is_batch_norm: bool  # whether `torch.nn.SyncBatchNorm` called it, for its statistics


@contextmanager
def _hook_all_reduces(
    before: Callable[[_AllReduce], Callable[[], object] | None],
) -> Iterator[None]:
    """Call ``before`` before each all-reduce in the block.

    It returns a function to call at the end of the all-reduce, or None. Gloo calls it in the thread
    in which the all-reduce ends. NCCL calls it as soon as the all-reduce is issued, with a current
    stream that waits for it.
    """
    operation = torch.ops.c10d.allreduce_.default

    def all_reduce(tensors: list[Tensor], group: Any, *options: Any) -> Any:
        names = _callers()
        call = _AllReduce(
            tensors,
            str(ProcessGroup.unbox(group).group_name),
            any(name.startswith("torch.distributed") for name in names),
            "torch.nn.modules._functions" in names,
        )
        after = before(call)
        with torch._C._AutoDispatchBelowAutograd():
            result = operation(tensors, group, *options)
        if after is not None:
            Work.unbox(result[1]).get_future().then(lambda _: after())
        return result

    if torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "Autograd"):
        raise ExecutionError(
            "all-reduces of this process are watched already; end that px.watch_sync() block "
            "before the next one begins"
        )
    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", all_reduce, "Autograd")
    try:
        yield
    finally:
        library._destroy()


def _callers() -> list[str]:
    """Return the modules of the innermost Python calls, without this file's, up to autograd's."""
    frame = sys._getframe(2)
    names: list[str] = []
    while frame is not None and len(names) < _DEPTH:
        name = str(frame.f_globals.get("__name__", ""))
        if name in ("torch.autograd", "torch.autograd.graph"):
            break
        names.append(name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


def _wrap_method(
    stack: ExitStack,
    owner: type,
    name: str,
    before: Callable[..., object] | None,
    after: Callable[..., object] | None,
) -> None:
    """Call functions before and after a method of a class, until the stack closes."""
    method = vars(owner)[name]

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = method(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, wrapped)
    stack.callback(setattr, owner, name, method)


#: A time: seconds of the host's clock, or a CUDA event.
_Moment = Any


def _device_timer(device: torch.device) -> tuple[Callable[[], _Moment], Callable[[_Moment], float]]:
    """Return two functions: the current moment, and a moment in seconds since this call.

    A CPU's moment is the time of the call. A GPU's moment is the time at which its current stream
    reaches it; turning it into seconds blocks until then.
    """
    if device.type != "cuda":
        origin = time.perf_counter()
        return time.perf_counter, lambda moment: float(moment) - origin

    def now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    first = now()

    def seconds(moment: torch.cuda.Event) -> float:
        moment.synchronize()
        return float(first.elapsed_time(moment)) / 1e3

    return now, seconds
