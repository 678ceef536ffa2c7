"""Where a split cuts: the first call of each stage, by weights of the calls of modules.

Weights are parameters, seconds, FLOPs and bytes of each call of a module in a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from pipeexec.devices.thread_settings import one_thread
from pipeexec.nesting import tensors_in
from pipeexec.splitting import Balance
from pipeexec.splitting.operations import storage_of
from pipesim.costs.layer_split import (
    balanced_split,
    layout_stages,
    limited_split,
    whole_sums,
)
from pipesim.errors import ArgumentError, check_count, check_list, check_name
from pipesim.utils.texts import format_bytes

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

    ``names`` are the modules of the calls, in order. The model may be a copy without data; it has
    ``optimizer_bytes`` of optimizer state for each byte of a trained parameter.
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


#: Description of stages: their number, blocks of each, first modules, or Megatron's layout.
Cuts = int | str | Sequence[int] | Sequence[str]


class Balancing(NamedTuple):
    """Quantity that cuts balance between stages, and the limit of a stage; see `split`."""

    balance: str
    memory_limit: float | None
    weights: Callable[[str], Sequence[float]]  # of each call, for a balance


def first_calls(
    names: Sequence[str], blocks: frozenset[str], cuts: Cuts, balancing: Balancing
) -> list[int]:
    """Return the number of the first call of each stage.

    Calls before the first block belong to the first stage. Other calls that are no blocks belong
    to the stage of the call before them. If no block is called, each call is a block.
    """
    check_name("balance", balancing.balance, get_args(Balance))
    starts = _starts(names, blocks, cuts, balancing)
    if balancing.memory_limit is not None:
        _check_bytes(names, starts, balancing, is_least=isinstance(cuts, int))
    return starts


def _starts(
    names: Sequence[str], blocks: frozenset[str], cuts: Cuts, balancing: Balancing
) -> list[int]:
    places = [k for k, name in enumerate(names) if name in blocks] or list(range(len(names)))
    if isinstance(cuts, str):
        counts = [stage.layers for stage in layout_stages(cuts, "stages")]
    elif isinstance(cuts, int) and not isinstance(cuts, bool):
        counts = _counts(names, places, check_count("stages", cuts), balancing)
    else:
        values = check_list("stages", cuts, "blocks of each stage, or the first module of each")
        if values and all(isinstance(value, str) for value in values):
            return _calls_of_names(names, values)
        counts = [check_count("stages", value, 0) for value in values]
    if sum(counts) != len(places):
        raise ArgumentError(
            f"stages have {sum(counts)} blocks ({', '.join(map(str, counts))}), but the model has "
            f"{len(places)}, from {names[places[0]]!r} to {names[places[-1]]!r}"
        )
    return _calls_of_counts(names, places, counts)


def _counts(names: Sequence[str], places: Sequence[int], n: int, balancing: Balancing) -> list[int]:
    """Return the blocks of each of n stages."""
    if n > len(places):
        raise ArgumentError(
            f"stages={n}, but the model has {len(places)} blocks that are not cut: "
            f"{names[places[0]]!r} to {names[places[-1]]!r}; give at most {len(places)} stages"
        )
    balance, limit, weights = balancing
    if balance == "blocks":
        least, rest = divmod(len(places), n)
        counts = [least + (k < rest) for k in range(n)]
        block_weights = [1.0] * len(places)
    else:
        block_weights = _sums(weights(balance), places)
        counts = list(balanced_split(block_weights, n))
    if limit is None:
        return counts
    nbytes = _sums(weights("memory"), places)
    if max(_sums(nbytes, [0, *accumulate(counts[:-1])])) <= limit:
        return counts
    *byte_sums, end = whole_sums([*nbytes, limit])
    bytes_limit = byte_sums, end - byte_sums[-1]  # a limit in the unit of the sums
    fitting = limited_split(whole_sums(block_weights), n, [bytes_limit])
    # Without a split that fits, the one with the least bytes shows by how much.
    return list(balanced_split(nbytes, n) if fitting is None else fitting)


def _sums(weights: Sequence[float], starts: Sequence[int]) -> list[float]:
    """Return the sums of weights from each start to the next; the first one begins at 0."""
    ends = [*starts[1:], len(weights)]
    return [float(sum(weights[a:b])) for a, b in zip([0, *starts[1:]], ends, strict=True)]


def _check_bytes(
    names: Sequence[str], starts: Sequence[int], balancing: Balancing, *, is_least: bool
) -> None:
    """Raise if a stage has more bytes than the limit; ``is_least`` if no other cuts have less."""
    sums, limit = _sums(balancing.weights("memory"), starts), balancing.memory_limit
    if limit is not None and max(sums) > limit:
        stage = sums.index(max(sums))
        first, last = starts[stage], [*starts[1:], len(names)][stage] - 1
        raise ArgumentError(
            f"memory_limit={limit:g}, but stage {stage} of {len(starts)}, {names[first]!r} to "
            f"{names[last]!r}, needs {sums[stage]:.0f} bytes ({format_bytes(sums[stage])}) for "
            "parameters, gradients, optimizer state and the activations of one sample; "
            + ("no other cuts need less" if is_least else "that is the least limit for these cuts")
            + ". Give a higher limit, more stages, or a sample of a smaller micro-batch"
        )


def _calls_of_counts(
    names: Sequence[str], places: Sequence[int], counts: Sequence[int]
) -> list[int]:
    """Return the first calls of stages with so many blocks each.

    A first stage without blocks ends before the first block; a last one without begins after the
    last block.
    """
    ends = list(accumulate(counts))
    starts = [0]
    for end in ends[:-1]:
        starts.append(places[end] if end < len(places) else places[-1] + 1)
    for stage, (a, b) in enumerate(zip(starts, [*starts[1:], len(names)], strict=True)):
        if a >= b:
            raise ArgumentError(
                f"stage {stage} of {len(counts)} has no module: only the first and the last may "
                "have 0 blocks, if modules come before or after the blocks"
            )
    return starts


def _calls_of_names(names: Sequence[str], firsts: Sequence[str]) -> list[int]:
    """Return the first calls of stages that begin with some modules."""
    starts = []
    for name in firsts:
        if name not in names:
            whole = [x for x in names if name.startswith(f"{x}.")]
            if whole:
                raise ArgumentError(
                    f"{name!r} is inside {whole[0]!r}, which is not cut; begin a stage with "
                    f"{whole[0]!r} or with the module after it"
                )
            check_name("module of stages", name, names)
        starts.append(names.index(name))
    if starts[:1] != [0]:
        starts.insert(0, 0)
    if starts != sorted(set(starts)):
        k = next(k for k in range(1, len(starts)) if starts[k] <= starts[k - 1])
        raise ArgumentError(
            f"stages must begin in the order of the forward: {names[starts[k]]!r} runs before "
            f"{names[starts[k - 1]]!r}"
        )
    return starts
