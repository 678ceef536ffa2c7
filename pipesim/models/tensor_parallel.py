"""`Shard`: bytes, parameters and FLOPs of one GPU of a tensor-parallel group of a `Transformer`.

Letters and sources are those of `pipesim.models.transformer`. The file has just over 300 lines: one
class of short properties, half of it the docstrings of their formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipesim.costs.layer_split import LayerPartition, Split, checked_split
from pipesim.errors import check_flag, check_name, check_type
from pipesim.models.shard_sizes import FP32_BYTES
from pipesim.models.size_checks import check_divides, check_size
from pipesim.models.splits.stage_sizes import stage_sizes
from pipesim.models.stage_memory import (
    embedding_operations,
    head_operations,
    kept_bytes,
    layer_operations,
    stage_workspaces,
)
from pipesim.models.stage_seconds import per_stage, stage_seconds
from pipesim.models.transformer import RECOMPUTE, LayerRecompute, Transformer

__all__ = ["Shard"]


@dataclass(frozen=True)
class Shard:
    """One GPU's share of a transformer. A tensor-parallel group is one device of the pipeline.

    Attributes
    ----------
    model
        The transformer.
    microbatch_size
        b.
    tensor_parallel
        t: GPUs that share each layer. It divides the heads of queries, keys and values, and f.
    sequence_parallel
        Whether tensors that tensor parallelism leaves whole are split along the sequence; t then
        divides s.
    recompute
        Recompute of layers inside B and I. ``"selective"``: of the attention core, whose softmax
        and dropout are dropped (FlashAttention does not store them either). ``"full"``: of whole
        layers, of which only the input is kept.
    flash_attention
        Whether the attention core is one fused kernel, which keeps neither scores nor softmax, but
        32 bits for each head and token.
    scatter_gather
        Whether each GPU of the group sends its part of a stage's output, and the receiving group
        gathers the parts (arXiv 2104.04473, section 4.1). Otherwise each sends the whole output to
        its counterpart. Sequence parallelism has parts already, and needs none gathered.
    fused_loss
        Whether the loss is fused into kernels that turn the logits into their gradient in place, in
        16 bits, such as Transformer Engine's ``parallel_cross_entropy``. Otherwise it keeps a copy
        of the logits in 32 bits, Megatron-LM's own fusion included.

    Raises
    ------
    ArgumentError
        If t does not divide a size that it splits.
    UnknownNameError
        For an unknown ``recompute``.

    Examples
    --------
    >>> gpt3 = Transformer(hidden_size=12288, n_layers=96, n_heads=96, sequence_length=2048,
    ...                    vocabulary_size=51200)
    >>> sbh = 2048 * 1 * 12288
    >>> gpt3.shard(tensor_parallel=8).layer_activation_bytes / sbh  # 10 + 24/8 + 80/8
    23.0
    """

    model: Transformer
    microbatch_size: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    recompute: LayerRecompute = "none"
    flash_attention: bool = False
    scatter_gather: bool = False
    fused_loss: bool = False

    def __post_init__(self) -> None:
        check_type("model", self.model, Transformer)
        for name in ("microbatch_size", "tensor_parallel"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        check_flag("sequence_parallel", self.sequence_parallel)
        check_flag("flash_attention", self.flash_attention)
        check_flag("scatter_gather", self.scatter_gather)
        check_flag("fused_loss", self.fused_loss)
        check_name("recompute", self.recompute, RECOMPUTE)
        for name in ("n_heads", "n_kv_heads", "ffn_size"):
            check_divides("tensor_parallel", self.tensor_parallel, name, getattr(self.model, name))
        if self.sequence_parallel:
            length = self.model.sequence_length
            check_divides("tensor_parallel", self.tensor_parallel, "sequence_length", length)

    @property
    def output_bytes(self) -> float:
        """Bytes of a stage's output that a GPU sends.

        2sbh; 2sbh/t with sequence parallelism or ``scatter_gather``.
        """
        parts = self.tensor_parallel if self.scattered_messages else 1
        return self._input_bytes / parts

    @property
    def scattered_messages(self) -> bool:
        """Whether the receiving group gathers the parts of a message, each sent by one GPU."""
        return self.scatter_gather and self.tensor_parallel > 1 and not self.sequence_parallel

    @property
    def layer_activation_bytes(self) -> float:
        """Bytes of a layer that are held from F to B.

        Notes
        -----
        With GPT-3's shape, dropout and 2 bytes an element, table 2 of arXiv 2205.05198:

        =========  =====================  =========================
        recompute  tensor parallelism     and sequence parallelism
        =========  =====================  =========================
        none       sbh(10+24/t+5as/(ht))  sbh(34/t+5as/(ht))
        selective  sbh(10+24/t)           34sbh/t
        full       2sbh                   2sbh/t (not in the table)
        =========  =====================  =========================

        A gated MLP keeps gate, up and their product. Memory that a layer needs only during its own
        recompute is workspace. `pipesim.models.stage_memory` has the bytes of each operation.
        """
        return kept_bytes(layer_operations(self))

    @property
    def layer_weight_grad_bytes(self) -> float:
        """Bytes that W of a layer needs: each linear map's input, and the gradient of its output.

        32sbh with GPT-3's shape (arXiv 2401.10241, table 1), sbh(8 + 24/t) with tensor
        parallelism, and 32sbh/t with sequence parallelism, if gathered tensors are not kept.
        """
        whole = 4 * self.model.hidden_size  # inputs of QKV and MLP, outputs of projection and down
        split = self._split_inputs / self.tensor_parallel
        return self._tokens * self.model.bytes_per_activation * (whole / self._whole + split)

    @property
    def embedding_activation_bytes(self) -> float:
        """Bytes of the mask of the embedding's dropout, which it keeps: sbh, or sbh/t.

        Source: arXiv 2205.05198, section 4.3. Token ids are not counted.
        """
        return kept_bytes(embedding_operations(self))

    @property
    def head_activation_bytes(self) -> float:
        """Bytes that final norm, LM head and loss keep: two inputs, and logits in 32 bits.

        4sbh/t(1 + v/h) with sequence parallelism (arXiv 2205.05198, section 4.3), else
        4sbh + 4sbv/t. They are not recomputed. The vocabulary is not padded. With ``fused_loss``,
        logits have 16 bits.
        """
        return kept_bytes(head_operations(self))

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer. Norms, and biases added after a sum over the group, are whole."""
        model = self.model
        whole = 2 * model.norm_parameters + 2 * model.hidden_size * model.biases
        return self._split_parameters(model.layer_parameters, whole)

    @property
    def embedding_parameters(self) -> float:
        """Parameters of the embedding; learned positions are whole."""
        model = self.model
        positions = model.embedding_parameters - model.vocabulary_size * model.hidden_size
        return self._split_parameters(model.embedding_parameters, positions)

    @property
    def head_parameters(self) -> float:
        """Parameters of final norm and LM head; the norm is whole."""
        return self._split_parameters(self.model.head_parameters, self.model.norm_parameters)

    def stage_parameters(self, layers_per_stage: Split) -> tuple[float, ...]:
        """Return the parameters of each stage; the last of several has a copy of a tied matrix.

        Raises
        ------
        ArgumentError
            For layers that do not sum to the model's or do not divide evenly.
        """
        sizes = self._sizes(layers_per_stage)
        copied = self.copied_parameters if len(sizes) > 1 else 0.0
        return per_stage(
            sizes, self.layer_parameters, self.embedding_parameters, self.head_parameters + copied
        )

    def stages(
        self,
        layers_per_stage: Split,
        flops_per_second: float,
        partition: LayerPartition | None = None,
    ) -> dict[str, tuple[float, ...]]:
        """Return fields of `Costs`, one value a stage; see `Transformer.costs`.

        Seconds are FLOPs / (t * flops_per_second). Let F = linear maps (with the LM head) +
        attention cores be the FLOPs of a stage's forward, and R those that its backward
        recomputes:

        - ``forward``: F. ``recompute``, which is for R tasks: F.
        - ``input_grad``: linear + 2 cores + R. Both factors of a core's products need gradients.
        - ``weight_grad``: linear. A core has no weights.
        - ``backward``: the sum of both, 2F + R.

        With GPT-3's shape, I of a layer has sbh(24h + 8s) FLOPs and W 24sbhh (arXiv 2401.10241,
        table 1).

        Memory is ``parameter_bytes + gradient_bytes + optimizer_bytes``. With Adam, one parameter
        has 2 + 2 + 12 = 16 bytes with gradients in 16 bits, and 2 + 4 + 12 = 18 with gradients in
        32 bits. If the optimizer is sharded, replicas share ``optimizer_bytes`` only.
        REDUCE_GRAD moves ``gradient_bytes``. While a task runs, its stage holds workspace besides
        its activations: gradients, gathered tensors, what is recomputed.

        Notes
        -----
        - For R tasks, use ``recompute="none"`` and lower the schedule with ``"always"``: a graph
          with R tasks and costs with recompute would recompute twice.
        - With ``"full"`` and a split backward, W needs more bytes than F leaves (32sbh and 2sbh a
          layer). I takes the difference (rule 10 of docs/time.md).
        - The sum of gradients of two copies of a tied matrix is priced with `GPU` costs only.

        Raises
        ------
        ArgumentError
            For a rate that is not finite and above 0, and as `Transformer.costs`.
        """
        seconds = stage_seconds(self, None, flops_per_second, None)
        n_layers = self.model.n_layers
        sizes = stage_sizes(layers_per_stage, partition, n_layers, *seconds.parts)
        return {**seconds.stages(sizes), **self.stage_bytes(sizes)}

    def stage_bytes(self, layers_per_stage: Split) -> dict[str, tuple[float, ...]]:
        """Return the fields of `Costs` in bytes, one value a stage.

        Raises
        ------
        ArgumentError
            For layers that do not sum to the model's or do not divide evenly.
        """
        sizes = self._sizes(layers_per_stage)
        model, parameters = self.model, self.stage_parameters(sizes)
        return {
            "output_bytes": (self.output_bytes,) * len(sizes),
            "activation_bytes": per_stage(
                sizes,
                self.layer_activation_bytes,
                self.embedding_activation_bytes,
                self.head_activation_bytes,
            ),
            # Embedding: the gradient of its output. Head: its input and the gradient of the logits.
            "weight_grad_bytes": per_stage(
                sizes,
                self.layer_weight_grad_bytes,
                self._input_bytes,
                self._input_bytes + self._logit_bytes,
            ),
            "parameter_bytes": tuple(n * model.bytes_per_parameter for n in parameters),
            "gradient_bytes": tuple(n * model.bytes_per_gradient for n in parameters),
            "optimizer_bytes": tuple(n * model.optimizer_bytes_per_parameter for n in parameters),
            **stage_workspaces(self, sizes),
        }

    def _sizes(self, layers_per_stage: Split) -> tuple[int, ...]:
        """Return the layers of each stage."""
        n_layers = self.model.n_layers
        return checked_split(layers_per_stage, n_layers, "layers_per_stage", ends_may_be_empty=True)

    @property
    def _tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.microbatch_size * self.model.sequence_length

    @property
    def _whole(self) -> int:
        """GPUs that share tensors which tensor parallelism leaves whole: t or 1."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @property
    def _input_bytes(self) -> float:
        """Bytes of a layer's input, and of a stage's output, on one GPU: 2sbh or 2sbh/t."""
        return self._tokens * self.model.bytes_per_activation * self.model.hidden_size / self._whole

    @property
    def _split_inputs(self) -> int:
        """Elements a token that B needs and the group splits.

        They are Q, K and V, and the inputs of projection, activation and down. The gradients of
        outputs, and the inputs, that W needs have the same size.
        """
        model = self.model
        return 2 * model.query_size + 2 * model.kv_size + (model.mlp_inputs + 1) * model.ffn_size

    @property
    def _logit_bytes(self) -> float:
        """Bytes of the gradient of the logits on one GPU, in 32 bits unless the loss is fused."""
        size = self.model.bytes_per_activation if self.fused_loss else FP32_BYTES
        return self._tokens * size * self.model.vocabulary_size / self.tensor_parallel

    @property
    def copied_parameters(self) -> float:
        """Parameters of the last stage's copy of a tied matrix."""
        model = self.model
        matrix = model.vocabulary_size * model.hidden_size / self.tensor_parallel
        return matrix if model.tied_embeddings else 0.0

    def _split_parameters(self, total: int, whole: int) -> float:
        """Return the parameters on one GPU, of ``total`` of which ``whole`` are not split."""
        return (total - whole) / self.tensor_parallel + whole
