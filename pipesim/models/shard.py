"""`Shard`: bytes, parameters and FLOPs of one GPU of a device that computes a `Transformer`.

Letters and sources are those of `pipesim.models.transformer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipesim.costs.layer_split import (
    LayerPartition,
    Split,
    StageModules,
    checked_split,
    layout_modules,
)
from pipesim.errors import ArgumentError
from pipesim.models.model_sizes import OptionalSize, Size, check_divides, check_size, mtp_matrix
from pipesim.models.parallel import Parallel
from pipesim.models.placed_split import stage_sizes
from pipesim.models.precision import FORMATS
from pipesim.models.routing import Routing
from pipesim.models.shard_sizes import (
    FP32_BYTES,
    Matrix,
    attention_matrices,
    copied_bytes,
    kv_bytes,
    layer_matrices,
    optimizer_bytes,
    optimizer_parameters,
    per_stage,
    recomputes,
    routed_matrices,
    sent_states,
    shared_matrices,
    stage_parameters,
)
from pipesim.models.stage_memory import (
    embedding_operations,
    head_operations,
    kept_bytes,
    layer_operations,
    mtp_operations,
    stage_workspaces,
)
from pipesim.models.stage_seconds import stage_seconds
from pipesim.models.transformer import Transformer
from pipesim.utils.checks import checked


@checked
@dataclass(frozen=True)
class Shard(Parallel):
    """One GPU's share of a transformer that is spread as its `Parallel` says.

    Attributes
    ----------
    model
        The transformer.
    documents
        Tokens of each document packed into a sequence, whose tokens attend to their own document
        alone; empty for one. Only a fused attention core leaves out the other scores.
    prefix
        Tokens of the sequence before these, whose keys and values were kept: these are then a
        slice of it.
    context_groups
        Groups of ``tensor_parallel * context_parallel`` GPUs in a device, each of which computes
        sequences of its own at the same time. `Parallel` has one; more are those of a micro-batch
        with a smaller ``context_parallel`` than others.
    last_logits
        Whether the LM head computes the logits of the last token of each sequence or document
        alone, and no loss: forwards of a server. The head then has no backward.
    modules
        Layers of multi-token prediction and losses of each stage, and the hidden states that it
        sends; empty (the default) if the last stage has all of them. Layouts of Megatron give them.

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
    documents: tuple[int, ...] = field(default=(), kw_only=True)
    prefix: OptionalSize = field(default=0, kw_only=True)
    context_groups: Size = field(default=1, kw_only=True)
    last_logits: bool = field(default=False, kw_only=True)
    modules: tuple[StageModules, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", _checked_documents(self))
        modules = self.modules if isinstance(self.modules, tuple) else (self.modules,)
        if not all(isinstance(x, StageModules) for x in modules):
            raise ArgumentError(
                f"modules must be those of a layout, got {self.modules!r:.60}; give costs a layout "
                "string, such as 'Et|tmL'"
            )
        model, t = self.model, self.tensor_parallel
        has_dense = model.n_expert_layers < model.n_layers
        for name in ("n_heads", "n_kv_heads", *(("ffn_size",) if has_dense else ())):
            check_divides("tensor_parallel", t, name, getattr(model, name))
        _check_context(self)
        _check_experts(self)
        if self.prefix and model.bidirectional:
            raise ArgumentError(
                "tokens of a bidirectional model attend to later ones, which slices of a sequence "
                "do not have; leave slices out"
            )
        if recomputes(self, "mla_up_proj") and not model.kv_rank:
            raise ArgumentError(
                'recompute_modules of the framework has "mla_up_proj", and the model has no latent '
                "attention (kv_rank); leave it out"
            )
        if recomputes(self, "second_products") and (model.n_experts or model.kv_rank):
            what = "experts" if model.n_experts else "latent attention"
            raise ArgumentError(
                f'recompute="selective" of {self.framework.name or "the framework"} keeps every '
                f'other product of dense layers, and the model has {what}; give recompute="none" '
                'or "full", or a framework with recompute_modules=["core_attn"]'
            )

    @property
    def n_gpus(self) -> int:
        """GPUs of a device of the pipeline: tc in each of its ``context_groups``."""
        return super().n_gpus * self.context_groups

    @property
    def n_copies(self) -> int:
        """Copies in a device of parameters that are not of experts."""
        return self.n_gpus // self.tensor_parallel

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one GPU: bs/c."""
        return self.microbatch_size * self.model.sequence_length // self.context_parallel

    @property
    def causal_share(self) -> float:
        """See `Parallel`; 1 without a causal mask."""
        return 1.0 if self.model.bidirectional else super().causal_share

    @property
    def logit_tokens(self) -> int:
        """Tokens of a micro-batch whose logits one GPU computes: all, or one a sequence."""
        last = len(self.documents) or self.microbatch_size
        return last if self.last_logits else self.tokens

    @property
    def operand_bytes(self) -> float:
        """Bytes of an element that linear products of layers read, and keep for W."""
        own = FORMATS.get(self.precision)
        return self.model.bytes_per_activation if own is None else own.operand

    @property
    def attended(self) -> float:
        """Scores that the mask leaves, over those of one sequence of as many tokens."""
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
    def output_bytes(self) -> float:
        """Bytes of a stage's output that a GPU sends.

        2sbh; 2sbh/t with sequence parallelism or ``scatter_gather``.
        """
        parts = self.tensor_parallel if self.scattered_messages else 1
        return self._input_bytes / parts

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
        parallelism, and 32sbh/t with sequence parallelism, if gathered tensors are not kept. They
        have `operand_bytes`.
        """
        model = self.model
        if model.kv_rank:
            return self._kept_by_maps(layer_matrices(self), self.tokens)
        whole = 4 * model.hidden_size  # inputs of QKV and MLP, outputs of projection and down
        # Q, K and V, and the inputs of projection, activation and down.
        split = 2 * model.query_size + 2 * model.kv_size + (model.mlp_inputs + 1) * model.ffn_size
        return (
            self.tokens * self.operand_bytes * (whole / self._whole + split / self.tensor_parallel)
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
        """Bytes that final norm, LM head and one loss keep: two inputs, and logits in 32 bits.

        4sbh/t(1 + v/h) with sequence parallelism (arXiv 2205.05198, section 4.3), else
        4sbh + 4sbv/t. They are not recomputed. The vocabulary is not padded. With ``fused_loss``,
        logits have 16 bits. The loss of each of ``mtp_layers`` keeps as many.
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
        """Parameters of final norm, which is whole, and LM head."""
        model = self.model
        return self._split_parameters(model.head_parameters, model.norm_parameters)

    @property
    def mtp_input_parameters(self) -> float:
        """Parameters of one of ``mtp_layers`` without its layer: a map and three whole norms."""
        norms = 3 * self.model.norm_parameters
        return self._split_parameters(mtp_matrix(self.model) + norms, norms)

    def stage_parameters(self, layers_per_stage: Split) -> tuple[float, ...]:
        """Return the parameters of each stage, with copies of matrices that several use.

        Parameters
        ----------
        layers_per_stage
            Layers of each stage, a layout string of Megatron, or a number of even stages.

        Returns
        -------
        tuple
            Parameters of one GPU, one number a stage.
        """
        return stage_parameters(*self._split(layers_per_stage))

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
        own = with_layout(self, layers_per_stage)
        seconds = stage_seconds(own, None, flops_per_second, None)
        n_layers = self.model.n_layers
        sizes = stage_sizes(
            layers_per_stage, partition, n_layers, seconds.layers, *seconds.parts[1:]
        )
        return {**seconds.stages(sizes), **own.stage_bytes(sizes)}

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
        own, sizes = self._split(layers_per_stage)
        model, parameters = self.model, stage_parameters(own, sizes)
        logit_size = model.bytes_per_activation if self.fused_loss else FP32_BYTES
        logit_bytes = self.tokens * logit_size * model.vocabulary_size / self.tensor_parallel
        kv_cache = kv_bytes(self)
        if model.kv_rank:  # the latent vectors of all heads
            width = model.kv_rank + model.rope_head_size
            kv_cache = model.bytes_per_activation * self.tokens * width
        return {
            "output_bytes": tuple(self.output_bytes * n for n in sent_states(own, sizes)),
            "activation_bytes": per_stage(
                own,
                sizes,
                self.layer_activation_bytes,
                self.embedding_activation_bytes,
                self.head_activation_bytes,
                experts=self.expert_layer_activation_bytes,
                mtp=kept_bytes(mtp_operations(self)) if model.mtp_layers else 0.0,
            ),
            # Embedding: the gradient of its output. Head: its input and the gradient of the logits;
            # MTP: input and output of its map.
            "weight_grad_bytes": per_stage(
                own,
                sizes,
                self.layer_weight_grad_bytes,
                self._input_bytes,
                self._input_bytes + logit_bytes,
                experts=self.expert_layer_weight_grad_bytes,
                mtp=3 * self._input_bytes,
            ),
            "kv_cache_bytes": per_stage(own, sizes, kv_cache, experts=kv_cache),
            "parameter_bytes": tuple(n * model.bytes_per_parameter for n in parameters),
            "gradient_bytes": tuple(n * model.bytes_per_gradient for n in parameters),
            "optimizer_bytes": tuple(
                n * optimizer_bytes(self) for n in optimizer_parameters(own, sizes)
            ),
            **stage_workspaces(own, sizes),
            **copied_bytes(own, sizes),
        }

    def _split(self, layers_per_stage: Split) -> tuple[Shard, tuple[int, ...]]:
        """Return the shard with its modules, and the layers of each stage."""
        if self.modules and not isinstance(layers_per_stage, (str, int)):
            return self, tuple(layers_per_stage)  # checked, of the layout that gave the modules
        n_layers, name = self.model.n_layers, "layers_per_stage"
        sizes = checked_split(layers_per_stage, n_layers, name, ends_may_be_empty=True)
        return with_layout(self, layers_per_stage), sizes

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
        return tokens * self.operand_bytes * elements

    @property
    def _whole(self) -> int:
        """GPUs that share tensors which tensor parallelism leaves whole: t or 1."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @property
    def _input_bytes(self) -> float:
        """Bytes of a layer's input, and of a stage's output, on one GPU: 2sbh or 2sbh/t."""
        return self.tokens * self.model.bytes_per_activation * self.model.hidden_size / self._whole

    def _split_parameters(self, total: int, whole: int) -> float:
        """Return the parameters on one GPU, of ``total`` of which ``whole`` are not split."""
        return (total - whole) / self.tensor_parallel + whole


def with_layout(shard: Shard, layers_per_stage: Split) -> Shard:
    """Return a shard with the ``modules`` of a layout string; as it is for other splits."""
    modules = layout_modules(layers_per_stage, shard.model.mtp_layers)
    return replace(shard, modules=modules) if modules else shard


#: Settings that a model without experts does not have.
_OF_EXPERTS = (
    "expert_parallel", "expert_tensor_parallel", "routing", "expert_exchange",
    "dispatch_element_bytes",
)  # fmt: skip


def _checked_documents(shard: Shard) -> tuple[int, ...]:
    """Return the tokens of each document packed into the one sequence of a shard, if any."""
    documents, length = shard.documents, shard.model.sequence_length
    if isinstance(documents, tuple) and not documents:
        return ()
    if not isinstance(documents, (tuple, list)):
        raise ArgumentError(
            f"documents must be the tokens of each document, such as (512, 1536), got "
            f"{documents!r:.60}"
        )
    sizes = tuple(check_size(f"documents[{k}]", size) for k, size in enumerate(documents))
    if sum(sizes) != length or shard.microbatch_size != 1:
        raise ArgumentError(
            f"documents have {sum(sizes)} tokens, but a micro-batch is {shard.microbatch_size} "
            f"sequences of {length}; pack one sequence, with as many tokens"
        )
    return sizes


def _check_context(shard: Shard) -> None:
    """Check that context parallelism suits the sizes that it splits."""
    c, length = shard.context_parallel, shard.model.sequence_length
    splits_heads = shard.context_exchange == "all_to_all"
    in_pairs = c > 1 and shard.context_balance and not splits_heads
    if length % c or (in_pairs and length % (2 * c)):
        parts = f"{c} parts" if length % c else f"{2 * c} parts, two a GPU (context_balance=True)"
        raise ArgumentError(
            f"context_parallel={c} splits a sequence into {parts}, which do not divide "
            f"sequence_length={length}; choose context_parallel such that they do"
            + ("" if length % c else ", or give context_balance=False")
        )
    if shard.sequence_parallel:
        name = "sequence_length" + " / context_parallel" * (c > 1)
        check_divides("tensor_parallel", shard.tensor_parallel, name, length // c)
    for name in ("n_heads", "n_kv_heads") if splits_heads and c > 1 else ():
        heads, n_gpus = getattr(shard.model, name), shard.tensor_parallel * c
        if heads % n_gpus:
            raise ArgumentError(
                f'context_exchange="all_to_all" splits heads among the {n_gpus} GPUs of a '
                f"device (tensor_parallel x context_parallel), which do not divide {name}={heads}; "
                'give fewer, or context_exchange="ring"'
            )


def _check_experts(shard: Shard) -> None:
    """Check that expert parallelism suits the sizes that it splits."""
    model, x, t = shard.model, shard.expert_parallel, shard.tensor_parallel
    parts = shard.expert_tensor_parallel
    if not model.n_experts:
        for name in _OF_EXPERTS:
            value, default = getattr(shard, name), getattr(Parallel, name)
            if isinstance(value, Routing):
                value, default = value.to_dict(), default.to_dict()
            if value != default:
                raise ArgumentError(
                    f"{name}={value}, but the model has no experts; give n_experts, or leave "
                    f"{name} out"
                )
        return
    if x > model.n_experts:
        raise ArgumentError(
            f"expert_parallel={x} exceeds n_experts={model.n_experts}: each GPU has at least one "
            f"expert; give at most {model.n_experts}"
        )
    check_divides("expert_parallel", x, "n_experts", model.n_experts)
    if parts:
        check_divides("expert_tensor_parallel", parts, "tensor_parallel", t)
    check_divides(
        "expert_tensor_parallel" if parts else "tensor_parallel", parts or t, "expert_ffn_size",
        model.expert_ffn_size,
    )  # fmt: skip
    if model.shared_experts:
        size = model.shared_experts * model.expert_ffn_size
        check_divides("tensor_parallel", t, "shared_experts x expert_ffn_size", size)
    if parts not in (0, t) and not shard.sequence_parallel:
        raise ArgumentError(
            f"expert_tensor_parallel={parts} with tensor_parallel={t} needs "
            "sequence_parallel=True: otherwise several GPUs would send the same tokens to experts"
        )
    used, n_gpus = x * (parts or t), shard.n_gpus
    if used % n_gpus and n_gpus % used:
        raise ArgumentError(
            f"expert_parallel={x} and the {n_gpus} GPUs of a device (tensor_parallel x "
            "context_parallel) must be multiples of each other, so that groups of experts fill "
            "whole replicas; choose another expert_parallel"
        )
    shard.routing.shares(model.n_experts, model.experts_per_token)  # refuses other counts
