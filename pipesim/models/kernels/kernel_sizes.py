"""`KernelSizes`: matrix products and sums of gradients of a shard, as kernels.

Letters are those of `pipesim.models.kernels.layer_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipesim.models.kernels.kernel import Kernel
from pipesim.models.shard_sizes import MASK_BYTES, Matrix, fuses_weight_grads

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


class OperationKernels(NamedTuple):
    """Kernels of one layer, of the embedding, or of the head, by operation.

    Attributes
    ----------
    forward, input_grad, weight_grad
        Kernels of F, I and W. B has those of I and W.
    recompute
        Kernels that a backward runs again with the ``recompute`` of the shard.
    """

    forward: tuple[Kernel, ...]
    input_grad: tuple[Kernel, ...]
    weight_grad: tuple[Kernel, ...]
    recompute: tuple[Kernel, ...] = ()


@dataclass(frozen=True)
class KernelSizes:
    """Numbers of one shard that formulas of kernels share."""

    shard: Shard

    @property
    def tokens(self) -> int:
        """T, tokens of one GPU of a context-parallel group."""
        return self.shard.tokens

    @property
    def share(self) -> float:
        """Tokens of the tensors that tensor parallelism leaves whole: T, or T/t."""
        return self.tokens / (self.shard.tensor_parallel if self.shard.sequence_parallel else 1)

    @property
    def mask(self) -> int:
        """Bytes of an element of a dropout's mask; 0 without dropout."""
        return MASK_BYTES * self.shard.model.dropout

    def product(self, name: str, rows: float, columns: float, depth: float) -> Kernel:
        """Return a matrix product whose operands and result are in 16 bits."""
        e = self.shard.model.bytes_per_activation
        nbytes = e * (rows * depth + depth * columns + rows * columns)
        return Kernel(name, 2 * rows * columns * depth, nbytes, depth)

    def forward_product(self, name: str, matrix: Matrix, rows: float | None = None) -> Kernel:
        """Return the product of a linear map of ``rows`` tokens, T by default, forward."""
        tokens = self.tokens if rows is None else rows
        return self.product(name, tokens, matrix.outputs, matrix.inputs)

    def input_grad(self, name: str, matrix: Matrix, rows: float | None = None) -> Kernel:
        """Return the product of the gradient of a linear map's input."""
        tokens = self.tokens if rows is None else rows
        return self.product(f"{name} input", tokens, matrix.inputs, matrix.outputs)

    def weight_grad(
        self, name: str, matrix: Matrix, *, bias: bool = True, rows: float | None = None
    ) -> tuple[Kernel, ...]:
        """Return the product of a weight's gradient and its sum, and those of the bias, if any.

        The gradient of a bias is a sum over the gradients of outputs.
        """
        tokens = self.tokens if rows is None else rows
        kernels = self._weight_products(name, matrix, tokens, 1)
        if self.shard.model.biases and bias:
            e, outputs = self.shard.model.bytes_per_activation, matrix.outputs
            kernels.append(Kernel(f"{name} bias", nbytes=e * tokens * outputs))
            kernels.append(self.accumulation(f"{name} bias", outputs))
        return tuple(kernels)

    def grouped(self, name: str, matrix: Matrix, rows: float, n: int) -> Kernel:
        """Return the products of n experts, which share ``rows`` tokens."""
        e = self.shard.model.bytes_per_activation
        inputs, outputs = matrix
        nbytes = e * (rows * inputs + n * inputs * outputs + rows * outputs)
        return Kernel(name, 2 * rows * outputs * inputs, nbytes, inputs, n, is_grouped=True)

    def grouped_weight_grad(
        self, name: str, matrix: Matrix, rows: float, n: int
    ) -> tuple[Kernel, ...]:
        """Return the gradients of the weights of n experts, which share ``rows`` tokens."""
        product, *sums = self._weight_products(name, matrix, rows, n)
        return (product._replace(is_grouped=True), *sums)

    def _weight_products(self, name: str, matrix: Matrix, tokens: float, n: int) -> list[Kernel]:
        """Return the gradients of n weights of one shape, and their sums."""
        model = self.shard.model
        inputs, outputs = matrix
        e, g, size = model.bytes_per_activation, model.bytes_per_gradient, inputs * outputs
        fused = fuses_weight_grads(model)
        written = 2 * g if fused else model.bytes_per_parameter
        nbytes = e * tokens * (inputs + outputs) + written * size * n
        product = Kernel(f"{name} weight", 2 * tokens * size, nbytes, tokens / n, n)
        return [product] if fused else [product, self.accumulation(name, size * n, n)]

    def accumulation(self, name: str, size: float, n_kernels: int = 1) -> Kernel:
        """Return the sum of a gradient with those of earlier micro-batches."""
        model = self.shard.model
        nbytes = (model.bytes_per_parameter + 2 * model.bytes_per_gradient) * size
        return Kernel(f"{name} accumulation", nbytes=nbytes, n_kernels=n_kernels)
