"""`Shard`: what one GPU of a tensor-parallel group holds and computes of a `Transformer`.

Letters and sources as in `pipesim.models.transformer`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from pipesim.costs.layer_split import (
    Partition,
    Split,
    balanced_split,
    check_partition,
    checked_split,
)
from pipesim.errors import (
    ArgumentError,
    CostsWarning,
    check_count,
    check_flag,
    check_name,
    check_type,
)
from pipesim.models.transformer import (
    RECOMPUTE,
    Recompute,
    Transformer,
    check_divides,
    check_size,
    checked_rate,
)

__all__ = ["Shard"]

#: Logits stay in 32 bits for the loss, and a dropout mask in 8 (arXiv 2205.05198, section 4).
_LOGIT_BYTES, _MASK_BYTES = 4, 1
#: An even split is worth a warning if its slowest stage takes so many times as long as need be;
#: looked at for models of so many layers at most.
_MUCH, _FEW = 1.05, 1000


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
        Whether what tensor parallelism leaves whole is split along the sequence; t divides s.
    recompute
        Of layers, inside B and I. ``"selective"``: the attention core, whose softmax and dropout
        are dropped (FlashAttention does not store them either). ``"full"``: whole layers, of
        which only the input is kept.

    Raises
    ------
    ArgumentError
        If t does not divide what it splits, and for an unknown ``recompute`` (`UnknownNameError`).

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
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        check_type("model", self.model, Transformer)
        for name in ("microbatch_size", "tensor_parallel"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        check_flag("sequence_parallel", self.sequence_parallel)
        check_name("recompute", self.recompute, RECOMPUTE)
        for name in ("n_heads", "n_kv_heads", "ffn_size"):
            check_divides("tensor_parallel", self.tensor_parallel, name, getattr(self.model, name))
        if self.sequence_parallel:
            length = self.model.sequence_length
            check_divides("tensor_parallel", self.tensor_parallel, "sequence_length", length)

    @property
    def output_bytes(self) -> float:
        """Bytes that a GPU sends of a stage's output: 2sbh; 2sbh/t with sequence parallelism."""
        return self._tokens * self.model.bytes_per_activation * self.model.hidden_size / self._whole

    @property
    def layer_activation_bytes(self) -> float:
        """Bytes that are held of a layer from F to B.

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

        A gated MLP keeps gate, up and their product. What a layer holds for the moment in which
        it is recomputed is not counted.
        """
        if self.recompute == "full":
            return self.output_bytes
        model, e, mask = self.model, self.model.bytes_per_activation, self._mask
        split = e * self._split_inputs
        if self.recompute == "none":  # softmax; its dropout's mask and output
            core = e + (_MASK_BYTES + e) * model.dropout
            split += core * model.n_heads * model.sequence_length
        # Inputs of both norms, of QKV and of the MLP; masks of both dropouts.
        whole = (4 * e + 2 * mask) * model.hidden_size
        return self._tokens * (whole / self._whole + split / self.tensor_parallel)

    @property
    def layer_weight_grad_bytes(self) -> float:
        """Bytes that W of a layer needs: each linear map's input, and the gradient of its output.

        32sbh with GPT-3's shape (arXiv 2401.10241, table 1), sbh(8 + 24/t) with tensor
        parallelism, and 32sbh/t with sequence parallelism, if what is gathered is not kept.
        """
        whole = 4 * self.model.hidden_size  # inputs of QKV and MLP, outputs of projection and down
        split = self._split_inputs / self.tensor_parallel
        return self._tokens * self.model.bytes_per_activation * (whole / self._whole + split)

    @property
    def embedding_activation_bytes(self) -> float:
        """Bytes that the embedding keeps, the mask of its dropout: sbh, or sbh/t.

        Source: arXiv 2205.05198, section 4.3. The tokens' numbers are not counted.
        """
        return self._tokens * self._mask * self.model.hidden_size / self._whole

    @property
    def head_activation_bytes(self) -> float:
        """Bytes that final norm, LM head and loss keep: two inputs, and logits in 32 bits.

        4sbh/t(1 + v/h) with sequence parallelism (arXiv 2205.05198, section 4.3), else
        4sbh + 4sbv/t. They are not recomputed. The vocabulary is not padded.
        """
        return 2 * self.output_bytes + self._logit_bytes

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer. Norms, and biases after a sum over the group, are whole."""
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

    def stages(
        self, layers_per_stage: Split, flops_per_second: float, partition: Partition | None = None
    ) -> dict[str, tuple[float, ...]]:
        """Return fields of `Costs`, one value a stage; see `Transformer.costs`.

        Seconds are FLOPs / (t * flops_per_second). Of a stage whose forward is F = linear maps
        (LM head included) + attention cores, and which recomputes R inside its backward:

        - ``forward`` F, and ``recompute`` too, which is for R tasks;
        - ``input_grad`` linear + 2 cores + R: both factors of a core's products need gradients;
        - ``weight_grad`` linear: a core has no weights;
        - ``backward`` their sum, 2F + R.

        With GPT-3's shape, I of a layer has sbh(24h + 8s) FLOPs and W 24sbhh (arXiv 2401.10241,
        table 1).

        Memory holds ``parameter_bytes + gradient_bytes + optimizer_bytes``: for each parameter 2 +
        2 + 12 = 16 for Adam with gradients in 16 bits, 2 + 4 + 12 = 18 with gradients in 32 bits.
        Only ``optimizer_bytes`` are shared by replicas where the optimizer is sharded.
        REDUCE_GRAD moves ``gradient_bytes``.

        Notes
        -----
        For R tasks, take ``recompute="none"`` and lower the schedule with ``"always"``: a graph
        with R tasks and costs with recompute would recompute twice. With ``"full"`` and a split
        backward, W needs more than F has left (32sbh to 2sbh a layer); rule 10 of docs/time.md
        counts no more than was there, so that memory comes out too low. The exchange of gradients
        between two copies of a tied matrix is not modelled.

        Raises
        ------
        ArgumentError
            For a rate that is not finite and above 0, and as `Transformer.costs`.
        """
        flops_per_second = checked_rate("flops_per_second", flops_per_second, "FLOP/s")
        model, b = self.model, self.microbatch_size
        sizes = self._sizes(layers_per_stage, partition)
        ends = [(stage == 0, stage == len(sizes) - 1) for stage in range(len(sizes))]

        def of_stages(layer: float, first: float = 0.0, last: float = 0.0) -> tuple[float, ...]:
            return tuple(
                n * layer + first * is_first + last * is_last
                for n, (is_first, is_last) in zip(sizes, ends, strict=True)
            )

        rate = self.tensor_parallel * float(flops_per_second)
        linear, core, head = model.linear_flops(b), model.core_flops(b), model.head_flops(b)
        again = model.recomputed_flops(b, self.recompute)
        forward = of_stages((linear + core) / rate, last=head / rate)
        copied = self._copied_parameters if len(sizes) > 1 else 0.0
        parameters = of_stages(
            self.layer_parameters, self.embedding_parameters, self.head_parameters + copied
        )
        return {
            "forward": forward,
            "backward": of_stages((2 * (linear + core) + again) / rate, last=2 * head / rate),
            "input_grad": of_stages((linear + 2 * core + again) / rate, last=head / rate),
            "weight_grad": of_stages(linear / rate, last=head / rate),
            "recompute": forward,
            "output_bytes": (self.output_bytes,) * len(sizes),
            "activation_bytes": of_stages(
                self.layer_activation_bytes,
                self.embedding_activation_bytes,
                self.head_activation_bytes,
            ),
            # Of the embedding, the gradient of its output; of the head, its input and the logits'.
            "weight_grad_bytes": of_stages(
                self.layer_weight_grad_bytes,
                self.output_bytes,
                self.output_bytes + self._logit_bytes,
            ),
            "parameter_bytes": tuple(n * model.bytes_per_parameter for n in parameters),
            "gradient_bytes": tuple(n * model.bytes_per_gradient for n in parameters),
            "optimizer_bytes": tuple(n * model.optimizer_bytes_per_parameter for n in parameters),
        }

    def _sizes(self, layers_per_stage: Split, partition: Partition | None) -> tuple[int, ...]:
        """Return the layers of each stage, of a number of stages as ``partition`` says."""
        model, b = self.model, self.microbatch_size
        is_number = check_partition(partition, layers_per_stage, "layers_per_stage")
        layer = 3 * model.layer_flops(b) + model.recomputed_flops(b, self.recompute)
        head = 3 * model.head_flops(b)  # the last stage has it, and needs no layer then

        def balanced() -> tuple[int, ...]:
            n_stages = check_count("layers_per_stage", layers_per_stage)
            if n_stages > model.n_layers + 1:
                raise ArgumentError(
                    f"layers_per_stage={n_stages}: {model.n_layers} layers and the LM head cannot "
                    f"be split into {n_stages} stages; give at most {model.n_layers + 1}"
                )
            *sizes, last = balanced_split([layer] * model.n_layers + [head], n_stages)
            return (*sizes, last - 1)

        if is_number and partition == "balanced":
            return balanced()
        sizes = checked_split(
            layers_per_stage, model.n_layers, "layers_per_stage", ends_may_be_empty=True
        )
        if is_number and partition is None and model.n_layers <= _FEW:
            slowest = [
                max(layer * n + head * (stage == len(each) - 1) for stage, n in enumerate(each))
                for each in (sizes, balanced())
            ]
            if slowest[0] > _MUCH * slowest[1]:
                warnings.warn(
                    f"layers_per_stage={layers_per_stage} has as many layers on each stage; with "
                    f"the LM head, the last takes {slowest[0] / slowest[1]:.2f} times as long as "
                    'the slowest of a balanced split would; give partition="balanced", or '
                    '"even" if that is meant',
                    CostsWarning,
                    stacklevel=4,
                )
        return sizes

    @property
    def _tokens(self) -> int:
        return self.microbatch_size * self.model.sequence_length

    @property
    def _whole(self) -> int:
        """GPUs among which tensors are split that tensor parallelism leaves whole."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @property
    def _mask(self) -> int:
        """Bytes of an element of a dropout's mask."""
        return _MASK_BYTES * self.model.dropout

    @property
    def _split_inputs(self) -> int:
        """Elements a token that the group splits and B needs.

        Q, K and V, the inputs of projection, activation and down. By size, the outputs' gradients
        and inputs that W needs are the same.
        """
        model = self.model
        return 2 * model.hidden_size + 2 * model.kv_size + (model.mlp_inputs + 1) * model.ffn_size

    @property
    def _logit_bytes(self) -> float:
        return self._tokens * _LOGIT_BYTES * self.model.vocabulary_size / self.tensor_parallel

    @property
    def _copied_parameters(self) -> float:
        """Parameters of the last stage's copy of a tied matrix."""
        model = self.model
        matrix = model.vocabulary_size * model.hidden_size / self.tensor_parallel
        return matrix if model.tied_embeddings else 0.0

    def _split_parameters(self, all_of_them: int, whole: int) -> float:
        return (all_of_them - whole) / self.tensor_parallel + whole
