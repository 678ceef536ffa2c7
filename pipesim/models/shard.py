"""`Shard`: bytes, parameters and FLOPs of one GPU of a device that computes a `Transformer`.

Letters and sources are those of `pipesim.models.transformer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipesim.costs.layer_split import LayerPartition, Split, checked_split
from pipesim.errors import check_flag, check_name, check_type
from pipesim.models.model_sizes import (
    ContextExchange,
    ExpertExchange,
    check_context,
    check_divides,
    check_expert_parallel,
    check_size,
    checked_documents,
)
from pipesim.models.placed_split import stage_sizes
from pipesim.models.routing import UNIFORM, Routing, as_routing
from pipesim.models.shard_sizes import (
    FP32_BYTES,
    Matrix,
    attention_matrices,
    copied_bytes,
    layer_matrices,
    optimizer_parameters,
    per_stage,
    routed_matrices,
    shared_matrices,
    stage_parameters,
)
from pipesim.models.stage_memory import (
    embedding_operations,
    head_operations,
    kept_bytes,
    layer_operations,
    stage_workspaces,
)
from pipesim.models.stage_seconds import stage_seconds
from pipesim.models.transformer import RECOMPUTE, LayerRecompute, Transformer


@dataclass(frozen=True)
class Shard:
    """One GPU's share of a transformer.

    A device of the pipeline is the t * c GPUs of a tensor- and context-parallel group. Experts are
    spread over GPUs of several devices, which are replicas of each other.

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
    context_parallel
        c: groups of t GPUs that share each sequence, s/c tokens each. It divides s.
    context_exchange
        How a GPU gets keys and values of the other tokens (sources:
        `pipesim.models.shard_collectives`):

        - ``"ring"`` (the default): they go around a ring, while attention to those that arrived
          last is computed.
        - ``"all_gather"``: they are gathered before attention.
        - ``"all_to_all"``: GPUs exchange tokens for heads before attention, and back after it. tc
          divides all heads.
    context_balance
        Whether GPU i has the parts i and 2c - 1 - i of 2c parts of a sequence, so that the causal
        mask leaves each as many scores; 2c then divides s. Otherwise it has the i-th of c parts,
        and the last GPU computes 2 - 1/c times as many scores as the mean. It does not matter for
        ``"all_to_all"``, which splits heads.
    context_shards_optimizer
        Whether the c groups share the optimizer's state, of parameters that each of them has, as
        replicas do with ``lower(shard_optimizer=True)``; True (the default) as in Megatron-LM's
        distributed optimizer.
    expert_parallel
        x: GPUs among which the experts of a layer are divided, E/x each. They are those of several
        replicas, with consecutive numbers in Megatron-LM's order (tp-cp-ep-dp-pp).
    expert_tensor_parallel
        GPUs that share each expert; a divisor of t. 0 (the default) for t.
    routing
        How tokens spread over experts: a `pipesim.Routing` or a mapping of its fields. By default
        each expert gets as many.
    documents
        Tokens of each document packed into a sequence, whose tokens attend to their own document
        alone; empty for one. Only a fused attention core leaves out the other scores.
    prefix
        Tokens of the sequence before these, whose keys and values were kept: these are then a
        slice of it.
    expert_exchange
        How a token gets to its experts on other GPUs:

        - ``"direct"`` (the default): once for each of its experts, as with an all-to-all of NCCL.
        - ``"hierarchical"``: once to each other node that has any of them, and from there to each
          GPU of the node that has any. Both overlap (DeepEP).
    dispatch_element_bytes
        Bytes of an element of tokens on the way to their experts, scales included; 0 (the default)
        for ``bytes_per_activation``. In the backward pass, gradients on the way to experts have as
        many; as tasks, the two exchanges of a layer then have each other's seconds, and the same
        sum. Results and gradients on the way back have the bytes of activations, and memory is
        that of activations.
    gradient_passes
        Whether the framework scales, checks and clips gradients, and copies stepped parameters, in
        passes of their own, as Megatron-LM's distributed optimizer:

        - Of all gradients of a GPU, before they are reduced: a read for the check for NaN, a read
          and a write to divide them by the number of replicas, and a write that sets them to zero.
        - Of those that it steps: a read and a write by which they are clipped.
        - Of parameters in 16 bits that it steps: a read of those in 32 bits, which are copied
          (``_copy_main_params_to_model_params``).

        Megatron-LM does so (``param_and_grad_buffer.py``, ``clip_grads.py``), while norms are above
        the limit. False (the default): STEP reads and writes gradients three times in all.

    Examples
    --------
    >>> import pipesim as ps
    >>> gpt3 = ps.Transformer(hidden_size=12288, n_layers=96, n_heads=96, sequence_length=2048,
    ...                       vocabulary_size=51200)
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
    context_parallel: int = 1
    context_exchange: ContextExchange = "ring"
    context_balance: bool = True
    context_shards_optimizer: bool = True
    expert_parallel: int = 1
    expert_tensor_parallel: int = 0
    routing: Routing = UNIFORM
    documents: tuple[int, ...] = ()
    prefix: int = 0
    expert_exchange: ExpertExchange = "direct"
    dispatch_element_bytes: float = 0.0
    gradient_passes: bool = False

    def __post_init__(self) -> None:
        check_type("model", self.model, Transformer)
        for name in ("microbatch_size", "tensor_parallel", "context_parallel", "expert_parallel"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        for name in ("sequence_parallel", "flash_attention", "scatter_gather", "fused_loss",
                     "gradient_passes"):  # fmt: skip
            check_flag(name, getattr(self, name))
        check_name("recompute", self.recompute, RECOMPUTE)
        has_dense = self.model.n_expert_layers < self.model.n_layers
        for name in ("n_heads", "n_kv_heads", *(("ffn_size",) if has_dense else ())):
            check_divides("tensor_parallel", self.tensor_parallel, name, getattr(self.model, name))
        if self.sequence_parallel and self.context_parallel == 1:
            length = self.model.sequence_length
            check_divides("tensor_parallel", self.tensor_parallel, "sequence_length", length)
        object.__setattr__(self, "routing", as_routing(self.routing))
        object.__setattr__(self, "documents", checked_documents(self))
        object.__setattr__(self, "prefix", check_size("prefix", self.prefix, 0))
        check_context(self)
        check_expert_parallel(self)

    @property
    def n_gpus(self) -> int:
        """GPUs of a device of the pipeline: tc."""
        return self.tensor_parallel * self.context_parallel

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one GPU: bs/c."""
        return self.microbatch_size * self.model.sequence_length // self.context_parallel

    @property
    def context_steps(self) -> int:
        """Kernels of a fused attention core: one for each step of a ring, else 1."""
        return self.context_parallel if self.context_exchange == "ring" else 1

    @property
    def causal_share(self) -> float:
        """Scores of the busiest GPU of a context-parallel group over their mean.

        1 if they are balanced; else 2 - 1/c, those of the last of c parts of a sequence.
        """
        c = self.context_parallel
        is_even = c == 1 or self.context_balance or self.context_exchange == "all_to_all"
        return 1.0 if is_even else 2 - 1 / c

    @property
    def attended(self) -> float:
        """Scores that the causal mask leaves, over those of one sequence of as many tokens."""
        length = self.model.sequence_length
        if self.documents:
            return sum(n * n for n in self.documents) / length**2
        return 1 + 2 * self.prefix / length

    @property
    def step_flops(self) -> float:
        """Model FLOPs of a micro-batch, as `Transformer.step_flops`, with the scores attended."""
        model, b = self.model, self.microbatch_size
        whole = model.step_flops(b)
        if self.attended == 1:
            return whole
        return whole + 3 * model.n_layers * model.core_flops(b) * (self.attended - 1)

    @property
    def attended_columns(self) -> float:
        """Columns of the scores that an attention core computes if it is not fused, over s."""
        return 1 + self.prefix / self.model.sequence_length

    @property
    def expert_tensor_size(self) -> int:
        """GPUs that share each expert."""
        return self.expert_tensor_parallel or self.tensor_parallel

    @property
    def local_experts(self) -> int:
        """Experts of one GPU: E/x."""
        return self.model.n_experts // self.expert_parallel

    @property
    def expert_tokens(self) -> float:
        """Tokens of one GPU whose experts its router chooses: T, or T/t."""
        return self.tokens / self._whole

    @property
    def imbalance(self) -> float:
        """Assignments of the busiest of x GPUs over their mean."""
        model = self.model
        if not model.n_experts:
            return 1.0
        x, k = self.expert_parallel, model.experts_per_token
        return self.routing.imbalance(model.n_experts, x, k)

    @property
    def routed_tokens(self) -> float:
        """Tokens for which the busiest GPU computes experts, once for each expert of a token."""
        gathered = self.expert_tensor_size if self.sequence_parallel else 1
        mean = self.expert_tokens * self.model.experts_per_token * gathered
        return mean * self.imbalance

    @property
    def expert_copies(self) -> float:
        """GPUs of a device that have the same experts; below 1 if a device lacks some experts.

        1/g if g replicas have different experts.
        """
        return self.n_gpus / (self.expert_tensor_size * self.expert_parallel)

    @property
    def expert_replicas(self) -> int:
        """Replicas that together have all experts, g; 1 if each has all of them."""
        return max(1, round(1 / self.expert_copies))

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
    def expert_layer_activation_bytes(self) -> float:
        """Bytes of a layer with experts that are held from F to B; 0 for a model without.

        The busiest GPU keeps the tokens that it received, and gate, up and their product of them.
        """
        return kept_bytes(layer_operations(self, experts=True)) if self.model.n_experts else 0.0

    @property
    def layer_weight_grad_bytes(self) -> float:
        """Bytes that W of a layer needs: each linear map's input, and the gradient of its output.

        32sbh with GPT-3's shape (arXiv 2401.10241, table 1), sbh(8 + 24/t) with tensor
        parallelism, and 32sbh/t with sequence parallelism, if gathered tensors are not kept.
        """
        model = self.model
        if model.kv_rank:
            return self._kept_by_maps(layer_matrices(self), self.tokens)
        whole = 4 * model.hidden_size  # inputs of QKV and MLP, outputs of projection and down
        # Q, K and V, and the inputs of projection, activation and down.
        split = 2 * model.query_size + 2 * model.kv_size + (model.mlp_inputs + 1) * model.ffn_size
        return (
            self.tokens
            * model.bytes_per_activation
            * (whole / self._whole + split / self.tensor_parallel)
        )

    @property
    def expert_layer_weight_grad_bytes(self) -> float:
        """Bytes that W of a layer with experts needs; 0 for a model without."""
        if not self.model.n_experts:
            return 0.0
        maps = {**attention_matrices(self), **shared_matrices(self)}
        routed = self._kept_by_maps(routed_matrices(self), self.routed_tokens)
        return self._kept_by_maps(maps, self.tokens) + routed

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
        """Parameters of a dense layer.

        Norms, biases added after a sum over the group, and maps to latent vectors are whole.
        """
        model = self.model
        whole = 2 * model.norm_parameters + 2 * model.hidden_size * model.biases
        return self._split_parameters(model.layer_parameters, whole + self._latent_parameters)

    @property
    def expert_layer_parameters(self) -> float:
        """Parameters of a layer with experts on one GPU, without `routed_parameters`.

        The router is whole.
        """
        model = self.model
        if not model.n_experts:
            return 0.0
        router, biases = model.hidden_size * model.n_experts, model.hidden_size * model.biases
        whole = 2 * model.norm_parameters + biases + router + self._latent_parameters
        whole += model.shared_experts * biases
        routed = model.n_experts * model.expert_parameters
        return self._split_parameters(model.expert_layer_parameters - routed, whole)

    @property
    def routed_parameters(self) -> float:
        """Parameters of a GPU's experts of one layer: those of E/x experts."""
        return self.local_experts * self.model.expert_parameters / self.expert_tensor_size

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

        Parameters
        ----------
        layers_per_stage
            Layers of each stage, a layout string of Megatron, or a number of even stages.

        Returns
        -------
        tuple
            Parameters of one GPU, one number a stage.
        """
        return stage_parameters(self, self._sizes(layers_per_stage))

    def stages(
        self,
        layers_per_stage: Split,
        flops_per_second: float,
        partition: LayerPartition | None = None,
    ) -> dict[str, tuple[float, ...]]:
        """Return the fields of `Costs` that follow from sizes, one value a stage.

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

        Parameters
        ----------
        layers_per_stage
            Layers of each stage, a layout string of Megatron, or a number of stages.
        flops_per_second
            FLOP/s that a GPU achieves, averaged over all that it does.
        partition
            How layers are divided among a number of stages: ``"even"`` (the default) or
            ``"balanced"``.

        Returns
        -------
        dict
            Tuples of seconds and of bytes, by name of the field.

        Notes
        -----
        - For R tasks, use ``recompute="none"`` and lower the schedule with ``"always"``: a graph
          with R tasks and costs with recompute would recompute twice.
        - With ``"full"`` and a split backward, W needs more bytes than F leaves (32sbh and 2sbh a
          layer). I takes the difference (rule 10 of docs/time.md).
        - The sum of gradients of two copies of a tied matrix is priced with `GPU` costs only.

        Examples
        --------
        A backward takes twice as long as the forward.

        >>> import pipesim as ps
        >>> shard = ps.Transformer.preset("gpt3_175b").shard(tensor_parallel=8)
        >>> fields = shard.stages(4, flops_per_second=150e12)
        >>> fields["backward"][0] / fields["forward"][0]
        2.0
        """
        seconds = stage_seconds(self, None, flops_per_second, None)
        n_layers = self.model.n_layers
        sizes = stage_sizes(
            layers_per_stage, partition, n_layers, seconds.layers, *seconds.parts[1:]
        )
        return {**seconds.stages(sizes), **self.stage_bytes(sizes)}

    def stage_bytes(self, layers_per_stage: Split) -> dict[str, tuple[float, ...]]:
        """Return the fields of `Costs` in bytes, one value a stage.

        Parameters
        ----------
        layers_per_stage
            Layers of each stage, a layout string of Megatron, or a number of even stages.

        Returns
        -------
        dict
            Tuples of bytes of one GPU, by name of the field.
        """
        sizes = self._sizes(layers_per_stage)
        model, parameters = self.model, self.stage_parameters(sizes)
        return {
            "output_bytes": (self.output_bytes,) * len(sizes),
            "activation_bytes": per_stage(
                model,
                sizes,
                self.layer_activation_bytes,
                self.embedding_activation_bytes,
                self.head_activation_bytes,
                experts=self.expert_layer_activation_bytes,
            ),
            # Embedding: the gradient of its output. Head: its input and the gradient of the logits.
            "weight_grad_bytes": per_stage(
                model,
                sizes,
                self.layer_weight_grad_bytes,
                self._input_bytes,
                self._input_bytes + self._logit_bytes,
                experts=self.expert_layer_weight_grad_bytes,
            ),
            "parameter_bytes": tuple(n * model.bytes_per_parameter for n in parameters),
            "gradient_bytes": tuple(n * model.bytes_per_gradient for n in parameters),
            "optimizer_bytes": tuple(
                n * model.optimizer_bytes_per_parameter for n in optimizer_parameters(self, sizes)
            ),
            **stage_workspaces(self, sizes),
            **copied_bytes(self, sizes),
        }

    def _sizes(self, layers_per_stage: Split) -> tuple[int, ...]:
        n_layers = self.model.n_layers
        return checked_split(layers_per_stage, n_layers, "layers_per_stage", ends_may_be_empty=True)

    @property
    def _latent_parameters(self) -> int:
        """Parameters of maps to latent vectors and of their norms, which each GPU has whole."""
        model = self.model
        if not model.kv_rank:
            return 0
        width = model.query_rank + model.kv_rank
        return model.hidden_size * (width + model.rope_head_size) + width

    def _kept_by_maps(self, maps: Mapping[str, Matrix], tokens: float) -> float:
        """Return the bytes of inputs of linear maps, and of the gradients of their outputs."""
        elements = sum(matrix.inputs + matrix.outputs for matrix in maps.values())
        return tokens * self.model.bytes_per_activation * elements

    @property
    def _whole(self) -> int:
        """GPUs that share tensors which tensor parallelism leaves whole: t or 1."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @property
    def _input_bytes(self) -> float:
        """Bytes of a layer's input, and of a stage's output, on one GPU: 2sbh or 2sbh/t."""
        return self.tokens * self.model.bytes_per_activation * self.model.hidden_size / self._whole

    @property
    def _logit_bytes(self) -> float:
        """Bytes of the gradient of the logits on one GPU, in 32 bits unless the loss is fused."""
        size = self.model.bytes_per_activation if self.fused_loss else FP32_BYTES
        return self.tokens * size * self.model.vocabulary_size / self.tensor_parallel

    @property
    def copied_parameters(self) -> float:
        """Parameters of the last stage's copy of a tied matrix."""
        model = self.model
        matrix = model.vocabulary_size * model.hidden_size / self.tensor_parallel
        return matrix if model.tied_embeddings else 0.0

    def _split_parameters(self, total: int, whole: int) -> float:
        """Return the parameters on one GPU, of ``total`` of which ``whole`` are not split."""
        return (total - whole) / self.tensor_parallel + whole
