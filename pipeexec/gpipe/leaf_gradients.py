"""Gradients of a call's leaves, its inputs and parameters, that autograd takes.

In a usual ``backward()``, tasks add gradients to ``.grad`` of the parameters themselves, once a
micro-batch. There are two other ways:

- Tasks collect the gradients, the same numbers, and the last node of the graph returns them. So
  ``torch.autograd.grad`` and ``backward(inputs=...)`` have them, and a hook of a parameter gets the
  gradient of the mini-batch.
- `repeated_gradients` runs the layers again, as one graph of torch's own from inputs and parameters
  to outputs. Graphs of tasks are separate, one a partition and micro-batch, and are freed by their
  backward. So second derivatives (``create_graph=True``) and further backwards
  (``retain_graph=True``) come from the repeated forward, with every ``checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeexec.gpipe.backward_order import join_gradients
from pipeexec.gpipe.checkpoint import recomputing
from pipeexec.gpipe.partition import Form
from pipeexec.stages.recompute import tensor_version
from pipesim.errors import ExecutionError

if TYPE_CHECKING:
    from pipeexec.gpipe.partition_tasks import CallTensors, SlotTensors

#: Gradients of the parameters of a partition, as far as there are any.
ParameterGradients = dict[Tensor, Tensor | None]


def trainable_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters that need gradients, sooner than ``module.parameters()`` does."""
    parameters: dict[Tensor, None] = {}
    modules: list[nn.Module | None] = [module]
    for part in modules:
        if part is not None:
            modules += part._modules.values()
            for x in part._parameters.values():
                if x is not None and x.requires_grad and x.is_leaf:
                    parameters[x] = None
    return list(parameters)


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Take the hooks of parameters away in a block."""
    tables = [
        hooks
        for x in parameters
        for hooks in (x._backward_hooks, x._post_accumulate_grad_hooks)
        if hooks
    ]
    hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, own in zip(tables, hooks, strict=True):
            table.update(own)


@contextmanager
def collect_gradients(collected: ParameterGradients) -> Iterator[None]:
    """Add gradients of parameters to ``collected`` in a block, in place of ``.grad``."""
    before = [x.grad for x in collected]
    with _without_hooks(list(collected)):
        for x, gradient in collected.items():
            x.grad = gradient
        try:
            yield
        finally:
            for x, gradient in zip(collected, before, strict=True):
                collected[x], x.grad = x.grad, gradient


class Leaves:
    """Leaves of a call: inputs, one tensor (atomic) or a tuple, and parameters by partition.

    Attributes
    ----------
    all_parameters
        Parameters of all partitions.
    tensors
        Inputs, then parameters.
    versions
        Version counter of each tensor after the forward.
    needs_input_gradients
        Whether an input needs a gradient.
    """

    def __init__(
        self,
        inputs: tuple[Tensor, ...],
        is_atomic: bool,
        parameters: Mapping[int, Sequence[Tensor]],
    ) -> None:
        self.inputs, self.is_atomic, self.parameters = inputs, is_atomic, parameters
        self.all_parameters = list(chain.from_iterable(parameters.values()))
        self.tensors = [*inputs, *self.all_parameters]
        self.versions: Sequence[int] = ()
        self.needs_input_gradients = any(x.requires_grad for x in inputs)

    def note_versions(self) -> None:
        """Note the version counters: the forward has ended, which may change parameters."""
        self.versions = [tensor_version(x) for x in self.tensors]

    def have_hooks(self) -> bool:
        """Return whether a parameter has a hook, which is to get the mini-batch's gradient."""
        return any(x._backward_hooks or x._post_accumulate_grad_hooks for x in self.all_parameters)


def repeated_gradients(
    tensors: CallTensors,
    leaves: Leaves,
    shapes: Sequence[Sequence[torch.Size]],
    output_gradients: Sequence[Sequence[Tensor | None]],
) -> list[Tensor | None]:
    """Run the layers again, in the calling thread, and return the gradients of all leaves.

    ``shapes`` are those of the inputs of each micro-batch. Where the gradient mode is on, the
    gradients have a graph. Sums are in the order of a usual backward.
    """
    _check_unchanged(tensors, leaves)
    # Some may be frozen since the forward.
    parameters = [x for x in leaves.all_parameters if x.requires_grad]
    sums: ParameterGradients = dict.fromkeys(parameters)
    input_gradients: list[dict[int, Tensor]] = [{} for _ in shapes]
    with torch.enable_grad():
        parts = [x.split([shape[k][0] for shape in shapes]) for k, x in enumerate(leaves.inputs)]
    for i in reversed(range(len(shapes))):
        inputs = {k: part[i] for k, part in enumerate(parts)}
        with tensors.settings(), recomputing():
            outputs = _repeat_layers(tensors, i, inputs, leaves.is_atomic)
        pairs = [
            (x, gradient)
            for x, gradient in zip(outputs, output_gradients[i], strict=True)
            if gradient is not None and x.requires_grad
        ]
        if not pairs:
            continue
        numbers = [k for k, x in inputs.items() if x.requires_grad]
        with _without_hooks(parameters):
            gradients = torch.autograd.grad(
                [x for x, _ in pairs],
                [*(inputs[k] for k in numbers), *parameters],
                [gradient for _, gradient in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        pairs_of_inputs = zip(numbers, gradients, strict=False)
        input_gradients[i] = {k: x for k, x in pairs_of_inputs if x is not None}
        for x, gradient in zip(parameters, gradients[len(numbers) :], strict=True):
            if gradient is not None:
                before = sums[x]
                sums[x] = gradient if before is None else before + gradient
    return [*join_gradients(input_gradients, shapes), *map(sums.get, leaves.all_parameters)]


def _repeat_layers(
    tensors: CallTensors, i: int, inputs: Mapping[int, Tensor], is_atomic: bool
) -> list[Tensor]:
    """Return the outputs of a micro-batch, in the caller's gradient mode."""
    slots: SlotTensors = dict(inputs.items())
    form = Form(is_atomic, len(inputs))
    for j, stage in enumerate(tensors.runtime.stages):
        partition = tensors.runtime.partitions[j]
        form = partition.input_form(form.is_atomic, slots)
        values = tuple(slots.pop(slot).to(stage.device) for slot in form.slots)
        with tensors.runtime.locks[j]:
            partition.forms.inputs = form
            outputs = stage.repeat(tensors.key(i), values, tensors.task_seed(i, j))
            form = partition.forms.outputs
        slots.update(zip(form.slots, outputs, strict=True))
    return [slots[k] for k in range(form.n)]


def _check_unchanged(tensors: CallTensors, leaves: Leaves) -> None:
    """Raise `ExecutionError` if a leaf has changed since the forward."""
    present = {x for partition in tensors.runtime.partitions for x in partition.parameters()}
    for number, (x, version) in enumerate(zip(leaves.tensors, leaves.versions, strict=True)):
        is_input = number < len(leaves.inputs)
        if tensor_version(x) != version or not (is_input or x in present):
            kind = "an input" if is_input else "a parameter"
            raise ExecutionError(
                f"{kind} of GPipe, of shape {tuple(x.shape)}, was changed since the forward; "
                "create_graph=True and a second backward run the forward again, and need it as it "
                "was: call them before the optimizer's step"
            )
