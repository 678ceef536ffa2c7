"""Weights of calls: parameters, seconds, FLOPs and bytes of each call of a module in a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from pipeexec.devices.thread_settings import one_thread
from pipeexec.nesting import tensors_in
from pipeexec.splitting.tracing.operations import storage_of

#: Measured runs of a module, after one that warms up.
_N_RUNS = 3
#: Called before a call, with its number, its module and its arguments, or after it.
_Visit = Callable[[int, nn.Module, Any], None]


class Seconds(NamedTuple):
    """Seconds of a module's forward, and of its backward: medians of some runs."""

    forward: float
    backward: float


def measured_seconds(module: nn.Module, args: Any, kwargs: Any) -> Seconds:
    """Measure a module on one thread; its gradients stay as they were.

    Tensors of the arguments get a gradient if they require one.
    """
    rows = []
    for _ in range(_N_RUNS + 1):
        leaves = detached((args, kwargs))
        with one_thread(), torch.enable_grad():
            start = _now(leaves)
            output = module(*leaves[0], **leaves[1])
            middle = _now(leaves)
            _backward(module, tensors_in(leaves), output)
            rows.append(Seconds(middle - start, _now(leaves) - middle))
    return Seconds(*(median(column) for column in zip(*rows[1:], strict=True)))


def _backward(module: nn.Module, inputs: Sequence[Tensor], output: Any) -> None:
    """Compute gradients of an output with respect to parameters and inputs."""
    roots = [x for x in tensors_in(output) if x.requires_grad]
    leaves = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    if roots and leaves:
        torch.autograd.grad(roots, leaves, [torch.ones_like(x) for x in roots], allow_unused=True)


def detached(values: Any) -> Any:
    """Return nested values whose tensors have a graph of their own.

    Those that required gradients require them. They are no leaves, so that modules may change them.
    """
    return pytree.tree_map_only(
        Tensor,
        lambda x: x.detach().requires_grad_().clone() if x.requires_grad else x.detach(),
        values,
    )


def _now(values: Any) -> float:
    """Return the time after all kernels on the values' GPU, if they are on one; s."""
    if any(x.is_cuda for x in tensors_in(values)):
        torch.cuda.synchronize()
    return perf_counter()


class CallWeights:
    """Weights of calls of modules, by forwards of a sample.

    Parameters
    ----------
    model
        The model, or a copy of it without data.
    names
        Module of each call, in order.
    args, kwargs
        The sample.
    has_data
        Whether the model's parameters have values.
    optimizer_bytes
        Bytes of optimizer state for each byte of a trained parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        has_data: bool,
        optimizer_bytes: float,
    ) -> None:
        self.model, self.names, self.args, self.kwargs = model, tuple(names), args, kwargs
        self.has_data, self.optimizer_bytes = has_data, optimizer_bytes

    def weights(self, kind: str) -> list[float]:
        """Return the weight of each call: "blocks", "parameters", "time" or "memory"."""
        if kind == "blocks":
            return [1.0] * len(self.names)
        if kind == "parameters":
            return [float(sum(p.numel() for p in m.parameters())) for m in self._modules()]
        if kind == "time":
            return self.seconds() if self.has_data else self.flops()
        return self.bytes()

    def _modules(self) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name in self.names]

    def seconds(self) -> list[float]:
        """Return the measured seconds of forward and backward of each call."""
        result: list[float] = []

        def measure(_: int, module: nn.Module, arguments: Any) -> None:
            result.append(sum(measured_seconds(module, *arguments)))

        with self._visits(measure):
            self._run()
        return result

    def flops(self) -> list[float]:
        """Return the FLOPs of the forward of each call."""
        totals: list[int] = []
        with FlopCounterMode(display=False) as counter:

            def count(*_: object) -> None:
                totals.append(counter.get_total_flops())

            with self._visits(count, count):
                self._run()
        return [float(b - a) for a, b in zip(totals[::2], totals[1::2], strict=True)]

    def bytes(self) -> list[float]:
        """Return the bytes of parameters, gradients, optimizer state and activations of each call.

        Activations are the tensors that autograd saves in the call, for the sample.
        """
        saved: list[dict[int, Tensor]] = [{} for _ in self.names]
        states = (*self.model.parameters(), *self.model.buffers())
        ignored = {storage_of(x) for x in states}
        current: list[int] = []

        def save(tensor: Tensor) -> Tensor:
            if current and storage_of(tensor) not in ignored:
                saved[current[-1]][storage_of(tensor)] = tensor.detach()
            return tensor

        def leave(number: int, *_: object) -> None:
            current.clear()
            activations[number] = sum(x.untyped_storage().nbytes() for x in saved[number].values())
            saved[number].clear()

        activations = [0] * len(self.names)
        with (
            self._visits(lambda number, *_: current.append(number), leave),
            torch.autograd.graph.saved_tensors_hooks(save, lambda x: x),
        ):
            self._run()
        return [
            self._state_bytes(module) + nbytes
            for module, nbytes in zip(self._modules(), activations, strict=True)
        ]

    def _state_bytes(self, module: nn.Module) -> float:
        """Return the bytes of a module's parameters and buffers, gradients and optimizer state."""
        held = sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
        trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        return held + trained * (1.0 + self.optimizer_bytes)

    def _run(self) -> None:
        with torch.enable_grad():
            self.model(*detached(self.args), **detached(self.kwargs))

    @contextmanager
    def _visits(self, before: _Visit, after: _Visit | None = None) -> Iterator[None]:
        """Call functions before and after each call in forwards of the block.

        The outputs of calls are detached, so that the activations of one call are held at a time.
        """
        number, is_visited = 0, False

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal is_visited
            if not is_visited:  # otherwise ``before`` calls the module
                is_visited = True
                before(number, module, (args, kwargs))
                is_visited = False

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            nonlocal number
            if is_visited:
                return output
            if after is not None:
                after(number, module, (args, {}))
            number += 1
            return detached(output)

        handles = []
        for name in dict.fromkeys(self.names):
            module = self.model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
