"""`watch_sync`: a linter of gradient synchronization for existing training loops."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeexec.data_parallel.ddp import is_synchronizing
from pipeexec.data_parallel.sync_lint.collective_hook import AllReduce, hook_all_reduces
from pipeexec.data_parallel.sync_lint.device_times import device_timer
from pipeexec.data_parallel.sync_lint.findings import SyncReport
from pipeexec.data_parallel.sync_lint.method_hook import wrap_method
from pipeexec.data_parallel.sync_lint.sync_rules import apply_rules
from pipeexec.data_parallel.sync_lint.watched_model import (
    TimedAllReduce,
    WatchedBackward,
    WatchedModel,
)
from pipesim.errors import ArgumentError, ArgumentTypeError, check_type


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

    Raises
    ------
    ExecutionError
        Within another block.

    See Also
    --------
    pipeexec.sync_report : The same for a recorded trace or a timeline.
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
        stack.enter_context(hook_all_reduces(watch._on_all_reduce))
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
        self._watched: dict[int, WatchedModel] = {}
        self._names: Counter[str] = Counter()
        self._is_closed = False  # whether no more models are watched
        self._stack: ExitStack | None = None
        self._backward: WatchedBackward | None = None  # the current one
        self._last: WatchedModel | None = None  # the model of the latest gradient

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
            wrap_method(stack, owner, name, before, after)
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            with self._watch_backward(makes_gradients=not is_synchronizing(tensors)):
                backward(tensors, *args, **kwargs)

        torch.autograd.backward = watched
        stack.callback(setattr, torch.autograd, "backward", backward)

    def _add(self, model: nn.Module) -> WatchedModel:
        assert self._stack is not None
        ddp = model if isinstance(model, DistributedDataParallel) else None
        module = model if ddp is None else ddp.module
        named = {name: x for name, x in module.named_parameters() if x.requires_grad}
        parameters = list(named.values())
        kind = type(module).__name__
        self._names[kind] += 1
        name = kind if self._names[kind] == 1 else f"{kind} {self._names[kind]}"
        timer = device_timer(parameters[0].device)
        watched = WatchedModel(name, ddp, list(named), parameters, *timer)
        self._watched[id(model)] = watched
        for key, parameter in named.items():
            handle = parameter.register_post_accumulate_grad_hook(
                lambda _, watched=watched, key=key: self._on_gradient(watched, key)
            )
            self._stack.callback(handle.remove)
        return watched

    def _models_of(self, owner: torch.optim.Optimizer | nn.Module) -> list[WatchedModel]:
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
        self._backward = backward = WatchedBackward(makes_gradients)
        try:
            yield
        finally:
            if self._last is not None:
                backward.ended = self._last.now()
            self._backward = None

    def _on_gradient(self, watched: WatchedModel, name: str) -> None:
        """Note that a parameter has its gradient."""
        self._last = watched
        backward = self._backward
        # A backward that bypasses `torch.autograd.backward` is identified by its number.
        key = torch._C._current_graph_task_id() if backward is None else backward
        if backward is None or backward.makes_gradients:
            watched.add_gradient(key, name)
        if backward is not None:
            backward.computed = watched.now()

    def _on_all_reduce(self, call: AllReduce) -> Callable[[], object] | None:
        """Note an all-reduce of gradients; return a function that notes its end."""
        watched = self._reduced_model(call)
        if watched is None or watched.latest is None:
            return None
        nbytes = float(sum(x.numel() * x.element_size() for x in call.tensors))
        timed = TimedAllReduce(nbytes, watched.now(), self._backward)
        watched.calls.append((watched.latest, timed))

        def note_end() -> None:
            timed.end = watched.now()

        return note_end

    def _reduced_model(self, call: AllReduce) -> WatchedModel | None:
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
    def _may_be_by_reducer(call: AllReduce, watched: WatchedModel | None) -> bool:
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
