"""`Transformer`: parameters, FLOPs and `Costs` of a decoder-only transformer, from its sizes.

Letters of the formulas, in all files of this room: s tokens a sequence, b sequences a micro-batch
(B a batch), h hidden size, a heads, q size of all queries of a token (h, unless the size of a head
is given), k that of all keys (q, unless heads share them), f inner size of the MLP, g matrices of
the MLP that read its input (1, or 2 if it is gated), v vocabulary, L layers, t tensor-parallel
size. Of layers with experts: E experts, k experts a token, m shared experts, u inner size of an
expert.

Sources: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters",
arXiv 2104.04473. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", arXiv 2205.05198. Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241.
Experts: Jiang et al., "Mixtral of Experts", arXiv 2401.04088. Shared experts and latent attention:
DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2. Prediction of further tokens: DeepSeek-AI,
"DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Unpack

from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import LayerPartition, Split
from pipesim.costs.rows import PerStage
from pipesim.errors import check_count, check_name
from pipesim.models.model_sizes import (
    OptionalSize,
    Size,
    active_matrices,
    attention_biases,
    attention_matrices,
    check_divides,
    check_experts,
    check_latent_attention,
    check_size,
    end_flops,
    expert_matrix,
    latent_norms,
    mtp_matrix,
)
from pipesim.models.parallel import (
    RECOMPUTE,
    CostsSettings,
    LayerRecompute,
    Parallel,
    ParallelSettings,
    as_parallel,
    takes_settings,
)
from pipesim.models.published_models import published_sizes
from pipesim.network.network import Network
from pipesim.utils.checks import Amount, checked
from pipesim.utils.texts import Bytes

if TYPE_CHECKING:
    import pandas as pd

    from pipesim.graph.graph import TaskGraph
    from pipesim.models.gpu import GPU
    from pipesim.models.model_costs import Lengths, Slices
    from pipesim.models.packing import pack_documents
    from pipesim.models.shard import Shard
    from pipesim.scheduling.placement import Placement
    from pipesim.scheduling.schedule import Schedule


@checked
@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only transformer, or an encoder; by default of GPT-3's shape, as in papers.

    Attributes
    ----------
    hidden_size, n_layers, n_heads, sequence_length, vocabulary_size
        h, L, a, s and v.
    ffn_size
        f; 0 (the default) for 4h.
    n_kv_heads
        Heads of keys and values, each shared by as many heads of queries (grouped-query
        attention); 0 (the default) for a.
    head_size
        Elements of a head, q/a; 0 (the default) for h/a.
    gated_mlp
        Whether the MLP is ``down(act(gate(x)) * up(x))`` (SwiGLU), of three matrices.
    biases
        Whether linear maps have biases, and norms a shift (LayerNorm, not RMSNorm). The LM head
        has none.
    learned_positions
        Whether positions have parameters, sh.
    dropout
        Whether softmax, attention, MLP and embedding have dropout on their outputs.
    tied_embeddings
        Whether the LM head's matrix is that of the embedding. First and last stage hold one copy
        each, unless they are the same stage.
    bytes_per_parameter, bytes_per_gradient, bytes_per_activation
        Bytes of an element; 2 for bfloat16. Give 4 for gradients that are summed in 32 bits, as in
        Megatron-LM with bfloat16: 2 bytes a parameter more.
    optimizer_bytes_per_parameter
        12 (the default) for Adam in mixed precision: weights and two moments in 32 bits.
    n_experts
        E: experts of a layer, each an MLP of its own, of which a router picks some for each token;
        0 (the default) for no experts.
    experts_per_token
        k: experts that each token goes to; at least 1 with experts.
    shared_experts
        m: further experts of each layer that all tokens go to (DeepSeekMoE).
    expert_ffn_size
        u: inner size of each expert; 0 (the default) for f.
    n_dense_layers
        First layers of the model that have an MLP of inner size f in place of experts.
    kv_rank
        Elements of the latent vector from which keys and values of a token are made (multi-head
        latent attention, MLA); 0 (the default) for ordinary attention. With it, a head has
        ``head_size`` elements of queries and keys without positions, besides those below. Linear
        maps of attention then have no biases.
    query_rank
        Elements of the latent vector of queries; 0 (the default) if queries have none.
    rope_head_size
        Elements of a head with rotary positions, in addition to ``head_size``. All heads share
        those of the key.
    value_head_size
        Elements of values of a head; 0 (the default) for ``head_size``.
    expert_groups, groups_per_token
        Groups of consecutive experts, and the number of them that the router picks for a token
        before it picks experts among those ("node-limited routing", arXiv 2412.19437, section
        2.1.2); 0 (the default) for no groups.
    mtp_layers
        Modules that predict further tokens (multi-token prediction, MTP), one after another; 0 (the
        default) for none. Each has a layer like the last one, a map of 2h to h elements, and three
        norms, and a loss of its own, for which the LM head is computed once more. All are on the
        last stage, unless a layout of Megatron places them (``m``) or losses (``L``). Stages
        after the first have a copy of the embedding for them, and each stage with losses a head.
    bidirectional
        Whether tokens attend to all of their sequence, as in an encoder of images, and not only to
        those before them. A fused attention core then computes all scores, and not a half.

    Examples
    --------
    >>> import pipesim as ps
    >>> llama = ps.Transformer(  # Llama 3 405B, arXiv 2407.21783, table 3
    ...     hidden_size=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_size=53248,
    ...     sequence_length=8192, vocabulary_size=128256, gated_mlp=True, biases=False,
    ...     learned_positions=False, dropout=False, tied_embeddings=False)
    >>> f"{llama.n_parameters:.4g}"
    '4.059e+11'
    """

    hidden_size: Size
    n_layers: Size
    n_heads: Size
    sequence_length: Size
    vocabulary_size: Size
    ffn_size: OptionalSize = 0
    n_kv_heads: OptionalSize = 0
    head_size: OptionalSize = 0
    gated_mlp: bool = False
    biases: bool = True
    learned_positions: bool = True
    dropout: bool = True
    tied_embeddings: bool = True
    bytes_per_parameter: Amount = 2.0
    bytes_per_gradient: Amount = 2.0
    bytes_per_activation: Amount = 2.0
    optimizer_bytes_per_parameter: Amount = 12.0
    n_experts: OptionalSize = 0
    experts_per_token: OptionalSize = 0
    shared_experts: OptionalSize = 0
    expert_ffn_size: OptionalSize = 0
    n_dense_layers: OptionalSize = 0
    kv_rank: OptionalSize = 0
    query_rank: OptionalSize = 0
    rope_head_size: OptionalSize = 0
    value_head_size: OptionalSize = 0
    expert_groups: OptionalSize = 0
    groups_per_token: OptionalSize = 0
    mtp_layers: OptionalSize = 0
    bidirectional: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ffn_size", self.ffn_size or 4 * self.hidden_size)
        object.__setattr__(self, "n_kv_heads", self.n_kv_heads or self.n_heads)
        if not self.head_size:
            check_divides("n_heads", self.n_heads, "hidden_size", self.hidden_size)
        check_divides("n_kv_heads", self.n_kv_heads, "n_heads", self.n_heads)
        check_experts(self)
        check_latent_attention(self)
        if self.n_experts:
            object.__setattr__(self, "expert_ffn_size", self.expert_ffn_size or self.ffn_size)
        if self.kv_rank:
            size = self.value_head_size or self.head_size
            object.__setattr__(self, "value_head_size", size)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Transformer:
        """Return a published model; `pipesim.transformers` lists them with their sources.

        Parameters
        ----------
        name
            Such as ``"llama3_70b"``.
        **changes
            Attributes to change, such as ``sequence_length=4096`` or ``n_layers=12``.

        Returns
        -------
        Transformer
            The model.
        """
        sizes = published_sizes(name)
        for attribute in changes:
            check_name("attribute of a transformer", attribute, [x.name for x in fields(cls)])
        return cls(**{**sizes, **changes})

    @property
    def query_size(self) -> int:
        """Elements of all queries of a token, q; those of rotary positions of MLA included."""
        if self.kv_rank:
            return (self.head_size + self.rope_head_size) * self.n_heads
        return self.head_size * self.n_heads or self.hidden_size

    @property
    def kv_size(self) -> int:
        """Elements of all keys of a token, k; its values have as many, except with MLA."""
        return self.query_size // self.n_heads * self.n_kv_heads

    @property
    def value_size(self) -> int:
        """Elements of all values of a token: k, or those of all heads with MLA."""
        return self.value_head_size * self.n_heads if self.kv_rank else self.kv_size

    @property
    def core_output_size(self) -> int:
        """Elements of the attention core's output of a token: q, or those of values with MLA."""
        return self.value_size if self.kv_rank else self.query_size

    @property
    def mlp_inputs(self) -> int:
        """Matrices of the MLP that read its input, g."""
        return 2 if self.gated_mlp else 1

    @property
    def layer_matrices(self) -> int:
        """Parameters of a layer's linear maps without biases: h(q + 2k) + qh + (g + 1)hf."""
        return attention_matrices(self) + self.hidden_size * (self.mlp_inputs + 1) * self.ffn_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of a norm."""
        return self.hidden_size * (1 + self.biases)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer without experts: `layer_matrices`, biases and two norms.

        12hh + 13h with GPT-3's shape (arXiv 2104.04473, equation 2). With MLA, norms of the latent
        vectors are added.
        """
        outputs = self.hidden_size + self.mlp_inputs * self.ffn_size
        biases = attention_biases(self) + outputs * self.biases
        return self.layer_matrices + biases + 2 * self.norm_parameters + latent_norms(self)

    @property
    def n_expert_layers(self) -> int:
        """Layers with experts: those after the first ``n_dense_layers``; 0 without experts."""
        return self.n_layers - self.n_dense_layers if self.n_experts else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert: (g + 1)hu, and biases."""
        return expert_matrix(self) + self.biases * (
            self.mlp_inputs * self.expert_ffn_size + self.hidden_size
        )

    @property
    def expert_layer_parameters(self) -> int:
        """Parameters of a layer with experts: attention, norms, router hE, E + m experts.

        0 for a model without experts.
        """
        if not self.n_experts:
            return 0
        mlp = self.hidden_size * (self.mlp_inputs + 1) * self.ffn_size
        mlp += (self.hidden_size + self.mlp_inputs * self.ffn_size) * self.biases
        experts = (self.n_experts + self.shared_experts) * self.expert_parameters
        return self.layer_parameters - mlp + self.hidden_size * self.n_experts + experts

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding: vh, and sh of learned positions."""
        positions = self.sequence_length if self.learned_positions else 0
        return (self.vocabulary_size + positions) * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the final norm, and of the LM head, vh, unless it is tied."""
        matrix = 0 if self.tied_embeddings else self.vocabulary_size * self.hidden_size
        return self.norm_parameters + matrix

    @property
    def mtp_parameters(self) -> int:
        """Parameters of one module of `mtp_layers`: a layer, 2hh, and three norms."""
        layer = self.expert_layer_parameters if self.n_expert_layers else self.layer_parameters
        return layer + mtp_matrix(self) + 3 * self.norm_parameters

    @property
    def n_parameters(self) -> int:
        """Parameters of the model; a tied matrix, and those that `mtp_layers` share, count once."""
        ends = self.embedding_parameters + self.head_parameters
        layers = (self.n_layers - self.n_expert_layers) * self.layer_parameters
        layers += self.n_expert_layers * self.expert_layer_parameters
        return layers + self.mtp_layers * self.mtp_parameters + ends

    @property
    def n_active_parameters(self) -> int:
        """Parameters that one token uses: all but those of experts that it does not go to."""
        unused = self.n_experts - self.experts_per_token
        layers = self.n_expert_layers + self.mtp_layers * (self.n_expert_layers > 0)
        return self.n_parameters - layers * unused * self.expert_parameters

    def linear_flops(self, microbatch_size: int = 1) -> int:
        """Return the FLOPs of a dense layer's linear maps in the forward.

        2bs `layer_matrices`; 24bshh with GPT-3's shape.

        Parameters
        ----------
        microbatch_size
            Sequences, b; 1 by default.

        Returns
        -------
        int
            FLOPs, two per multiply-add.
        """
        return 2 * self._tokens(microbatch_size) * self.layer_matrices

    def core_flops(self, microbatch_size: int = 1) -> int:
        """Return the FLOPs of a layer's attention core in the forward: 4bssq.

        They are those of the scores and of the sum of values. The causal mask saves no FLOPs in
        this count, as in the papers. With MLA the core's output has another size than queries, o:
        2bss(q + o).

        Parameters
        ----------
        microbatch_size
            Sequences, b; 1 by default.

        Returns
        -------
        int
            FLOPs, two per multiply-add.
        """
        sizes = self.query_size + self.core_output_size
        return 2 * self._tokens(microbatch_size) * self.sequence_length * sizes

    def layer_flops(self, microbatch_size: int = 1) -> int:
        """Return the FLOPs of a dense layer in the forward.

        Matrix products only, as in arXiv 2205.05198, appendix A.

        Parameters
        ----------
        microbatch_size
            Sequences, b; 1 by default.

        Returns
        -------
        int
            FLOPs, two per multiply-add.
        """
        return self.linear_flops(microbatch_size) + self.core_flops(microbatch_size)

    def expert_layer_flops(self, microbatch_size: int = 1) -> int:
        """Return the FLOPs of a layer with experts in the forward; 0 for a model without.

        They are those of attention, the router, and k + m experts for each token.

        Parameters
        ----------
        microbatch_size
            Sequences, b; 1 by default.

        Returns
        -------
        int
            FLOPs, two per multiply-add.
        """
        linear = 2 * self._tokens(microbatch_size) * active_matrices(self)
        return linear + self.core_flops(microbatch_size) if self.n_experts else 0

    def head_flops(self, microbatch_size: int = 1) -> int:
        """Return the FLOPs of the LM head in the forward: 2bshv.

        The look-up of the embedding counts as none.

        Parameters
        ----------
        microbatch_size
            Sequences, b; 1 by default.

        Returns
        -------
        int
            FLOPs, two per multiply-add.
        """
        return 2 * self._tokens(microbatch_size) * self.hidden_size * self.vocabulary_size

    def recomputed_flops(self, microbatch_size: int = 1, recompute: LayerRecompute = "none") -> int:
        """Return the FLOPs that a dense layer's recompute repeats in the backward.

        Parameters
        ----------
        microbatch_size
            Sequences, b; 1 by default.
        recompute
            ``"none"`` (the default), ``"selective"``: the attention core, or ``"full"``: the layer.

        Returns
        -------
        int
            FLOPs, two per multiply-add.
        """
        check_name("recompute", recompute, RECOMPUTE)
        core, linear = self.core_flops(microbatch_size), self.linear_flops(microbatch_size)
        return {"none": 0, "selective": core, "full": core + linear}[recompute]

    def step_flops(self, batch_size: int = 1, recompute: LayerRecompute = "none") -> int:
        """Return the FLOPs of a batch: forward, backward (twice as many), and recompute.

        Those of `mtp_layers` are among them.

        With GPT-3's shape they are 72BLshh(1 + s/6h + v/12hL) without recompute (arXiv 2205.05198,
        appendix A), and 96BLshh(1 + s/6h + v/16hL) with full recompute (arXiv 2104.04473, equation
        3). Only experts that tokens go to count.

        Parameters
        ----------
        batch_size
            Sequences of the batch, B; 1 by default.
        recompute
            ``"none"`` (the default), ``"selective"`` or ``"full"``, as for `recomputed_flops`.

        Returns
        -------
        int
            FLOPs of all layers and of the LM head, two per multiply-add.

        Notes
        -----
        Selective recompute adds one forward of the attention core, 4Bssh a layer. The hardware
        FLOPs of arXiv 2205.05198, 72BLshh(1 + s/3h + v/12hL), add three times as many.

        Examples
        --------
        About 6 FLOPs a parameter and token:

        >>> import pipesim as ps
        >>> gpt3 = ps.Transformer.preset("gpt3_175b")
        >>> round(gpt3.step_flops() / (gpt3.n_parameters * gpt3.sequence_length), 1)
        6.2
        """
        check_count("batch_size", batch_size)
        n_experts, mtp = self.n_expert_layers, self.mtp_layers
        n_dense = self.n_layers - n_experts + mtp * (n_experts == 0)
        n_experts += mtp * (n_experts > 0)
        layers = n_dense * self.layer_flops(batch_size)
        layers += n_experts * self.expert_layer_flops(batch_size)
        again = n_dense * self.recomputed_flops(batch_size, recompute)
        if n_experts:
            layer, core = self.expert_layer_flops(batch_size), self.core_flops(batch_size)
            again += n_experts * {"none": 0, "selective": core, "full": layer}[recompute]
        return 3 * (layers + end_flops(self, batch_size)) + again

    @takes_settings(ParallelSettings)
    def shard(
        self,
        parallel: Parallel | Mapping[str, Any] | None = None,
        **settings: Unpack[ParallelSettings],
    ) -> Shard:
        """Return the share of one GPU in a device of the pipeline.

        Parameters
        ----------
        parallel
            A `Parallel`, or a mapping of its fields; None (the default) for their defaults.
        **settings
            Fields of `Parallel` that are other than those of ``parallel``.

        Returns
        -------
        Shard
            Bytes, parameters and FLOPs of the GPU.
        """
        from pipesim.models.shard import Shard

        return Shard(self, **as_parallel(Transformer.shard, parallel, settings).settings)

    @takes_settings(ParallelSettings, microbatch_size=Parameter.empty)
    def kernels(
        self,
        gpu: GPU | Mapping[str, Any] | str,
        *,
        parallel: Parallel | Mapping[str, Any] | None = None,
        **settings: Unpack[ParallelSettings],
    ) -> pd.DataFrame:
        """Return the kernels that one GPU runs for one micro-batch, as a table of one row a kernel.

        Parameters
        ----------
        gpu
            Rates that kernels reach: a `pipesim.GPU`, the name of a preset, or a mapping of a GPU's
            fields.
        parallel, **settings
            As for `shard`; ``microbatch_size`` must be among them.

        Returns
        -------
        pandas.DataFrame
            ``part`` (layer, expert layer, embedding, head, mtp: what comes before the layer of
            one of ``mtp_layers``); ``op``: F, I and W as in `pipesim.Op`,
            and R for kernels that a backward runs again; ``kernel``, its name; ``n_kernels``; their
            ``flops``, ``bytes`` and ``seconds``; and ``bound``, the longest share of these seconds:
            compute, memory or overhead. Messages between GPUs are no kernels here.

        Examples
        --------
        >>> import pipesim as ps
        >>> gpt3 = ps.Transformer(hidden_size=12288, n_layers=96, n_heads=96, sequence_length=2048,
        ...                       vocabulary_size=51200)
        >>> table = gpt3.kernels("a100_80gb", microbatch_size=1, tensor_parallel=8)
        >>> layer = table[table["part"] == "layer"]
        >>> layer.groupby("op")["flops"].sum().div(2048 * 12288**2 / 8).round(2).to_dict()
        {'F': 24.67, 'I': 25.33, 'W': 24.0}
        """
        from pipesim.models.layer_kernels import kernel_table

        shard = self.shard(as_parallel(Transformer.kernels, parallel, settings))
        return kernel_table(shard, gpu)

    @takes_settings(CostsSettings, microbatch_size=Parameter.empty)
    def costs(
        self,
        layers_per_stage: Split,
        *,
        gpu: GPU | Mapping[str, Any] | str | None = None,
        flops_per_second: float | None = None,
        parallel: Parallel | Mapping[str, Any] | None = None,
        lengths: Lengths | None = None,
        slices: Slices = 1,
        last_logits: bool = False,
        partition: LayerPartition | None = None,
        placement: Placement | Schedule | TaskGraph | None = None,
        memory_limit: Bytes | Sequence[Bytes] | None = None,
        optimizer_step: PerStage | None = None,
        launch: PerStage = 0.0,
        network: Network | None = None,
        vocabulary_parallel: bool = False,
        **settings: Unpack[CostsSettings],
    ) -> Costs:
        """Return the costs of stages; the first has the embedding, those with losses the LM head.

        Parameters
        ----------
        layers_per_stage
            Layers of each stage, in order (first and last may have none); or a layout string of
            Megatron, such as ``"Et*2|(t*3|)*2t|m|L"``, whose ``m`` are ``mtp_layers``; or a number
            of stages; or, with ``placement``, ``"even"`` or ``"balanced"``.
        gpu
            A `pipesim.GPU`, the name of a preset, or a mapping of a GPU's fields; or the path of a
            file ``.json`` that `Calibration.save` wrote, or the mapping in it, whose factors of the
            network do not change ``network``: give `Calibration.network`. Seconds are those of
            the `kernels` and of the collectives of tensor parallelism, and at least those of
            their launches; see `pipesim.models.stage_seconds`. STEP takes the time to read and
            write gradients, optimizer and parameters. ``tied_bytes`` are those of a tied matrix.
            REDUCE_GRAD takes the faster of ring and tree.
        flops_per_second
            Instead of ``gpu``: FLOP/s that a GPU achieves (not its peak), averaged over all that it
            does. It leaves out that small kernels and element-wise ones are slower, and that the
            host needs time to launch them; collectives of tensor parallelism; and STEP. Do not
            compare configurations by it: measured against 240 steps on a node of A100, the best
            configuration by such costs is slower than one chosen at random.
        parallel
            A `Parallel`, or a mapping of its fields: sizes of parallelism, recompute, experts.
            `Shard.stages` has the formulas of all values.
        lengths
            Micro-batches of other lengths: for each, the tokens of its ``microbatch_size``
            sequences, padded to it (``[512, 2048, ...]``), or a list of the tokens of each document
            packed into one sequence (``[[512, 1536], [2048], ...]``). Tokens attend to their own
            document; only ``flash_attention`` leaves out the other scores. If replicas have
            other micro-batches, give those of all replicas, of replica 0 first: each then has
            seconds and bytes of its own. The model's own length counts for
            parameters and the split of layers. None: all have the model's length.
        slices
            Slices of each sequence, for schedules such as ``"seq1f1b"``: their number, or the
            tokens of each, or with ``lengths`` such a list for each micro-batch. Attention of a
            later slice has more keys. Gradients of the keys and values of earlier slices are not
            counted as memory.
        last_logits
            Whether the LM head computes the logits of the last token of each sequence, document or
            slice alone, and no loss, as vLLM (``logits_indices``) and SGLang
            (``LogitsProcessor``) do. Such costs are for graphs with ``forward_only=True``.
            Otherwise it computes those of all tokens and the loss, as training and evaluation do.
        partition
            How layers are divided among a number of stages. ``"even"`` (the default here without
            ``placement``): each stage has as many. ``"balanced"`` (the default of
            `Costs.from_layers`): the slowest stage, including embedding and LM head, takes as
            little time as possible.
        placement, memory_limit
            As for `Layers.costs`: ``"balanced"`` then balances the devices of a `Placement`, or
            makes the step of a `Schedule` or graph short, within a limit of bytes; by default that
            of ``gpu``, if there are splits that fit in it. Only a graph tells replicas and a
            sharded optimizer: ``placement=lower(schedule, n_replicas=8, shard_optimizer=True)``.
        optimizer_step
            Seconds of STEP; None (the default) for those that follow from ``gpu``, or 0 without.
        launch
            Seconds of the host to issue a task, as in `Costs`. Launches of kernels are not among
            them: those are ``gpu.launch``.
        network
            Links between devices, and between the GPUs of a device: with ``tensor_parallel=8``
            such as ``Network.preset("dgx_h100", gpus_per_device=8)``. With a network of nodes, the
            seconds of exchanges of experts are those between neighbours in Megatron-LM's order,
            ``lower(layout="stage_major")``.
        vocabulary_parallel
            Whether embedding and LM head are divided over the ``p`` devices, whose layers are
            ``layers_per_stage``: costs of the ``3p + 1`` stages of ``pipesim.schedule("1f1b",
            vocabulary_parallel=True)``. Slices have equal sizes, padded. Each slice of the head
            has a final norm. `Costs.tied_stages` are slices of a tied matrix on one device, which
            holds both, each with its gradient and optimizer state. ``optimizer_step`` is of each
            stage: a device steps three of them, and the last device four.
        **settings
            Fields of `Parallel` that are other than those of ``parallel``; without it,
            ``microbatch_size`` must be among them. If experts are spread over several replicas,
            lower the graph with ``n_replicas`` that are a multiple of ``costs.expert_replicas``.

            ``context_parallel`` may be a list of one size a micro-batch, as with dynamic (hybrid)
            context parallelism of Megatron-LM. A device has the GPUs of the largest size, c. Of
            micro-batch k with size d, d groups of ``tensor_parallel`` GPUs share a sequence, and
            c/d sequences are computed at the same time. Each of them is as long as ``lengths[k]``
            says, or ``lengths[k]`` has a list of documents for each: ``lengths=[8192, [[2048],
            [1024, 1024]]], context_parallel=[2, 1]``. Fewer lists leave GPUs idle. A list of
            sizes is that of unlike groups of one micro-batch, ``[2, 1, 1]`` of 4. Seconds and
            bytes are those of the group with the most. Parameters, their reduction and the
            optimizer are those of c.

        Returns
        -------
        Costs
            With its ``workload``: tokens, FLOPs and GPUs.

        Raises
        ------
        NetworkError
            With ``gpu``, for a network whose devices have another number of GPUs than
            ``tensor_parallel * context_parallel``.

        Warns
        -----
        CostsWarning
            - For a number of stages without ``partition``, if the slowest stage takes more than 5 %
              longer than with ``"balanced"``.
            - For a balanced split for a schedule or a graph, if none is found that fits in the
              memory of ``gpu``: by how much the fastest without that limit does not fit.
            - With ``gpu``, for tensor or context parallelism on a network without nodes, whose
              collectives then take no time.

        Examples
        --------
        Four GPUs with 12 layers of GPT-2 XL each:

        >>> import pipesim as ps
        >>> model = ps.Transformer.preset("gpt2_xl")
        >>> costs = model.costs([12] * 4, microbatch_size=1, gpu="h100_sxm", flash_attention=True)
        >>> graph = ps.lower(ps.schedule("1f1b", n_devices=4, n_microbatches=8))
        >>> timeline = ps.simulate(graph, costs)
        >>> timeline.memory.fits, 0 < timeline.mfu() < 1
        (True, True)
        """
        from pipesim.models.model_costs import context_sizes, model_costs

        context: tuple[tuple[int, ...], ...] = ()
        if "context_parallel" in settings:
            settings["context_parallel"], context = context_sizes(settings["context_parallel"])
        shard = self.shard(as_parallel(Transformer.costs, parallel, settings))
        return model_costs(
            shard,
            layers_per_stage,
            gpu=gpu,
            flops_per_second=flops_per_second,
            partition=partition,
            placement=placement,
            memory_limit=memory_limit,
            optimizer_step=optimizer_step,
            launch=launch,
            network=network,
            lengths=lengths,
            slices=slices,
            last_logits=last_logits,
            context=context,
            vocabulary_parallel=vocabulary_parallel,
        )

    @takes_settings(ParallelSettings, microbatch_size=Parameter.empty)
    def balanced_slices(
        self,
        layers_per_stage: Split,
        n_slices: int | None = None,
        *,
        first: int | None = None,
        multiple: int = 1,
        backward: bool = False,
        gpu: GPU | Mapping[str, Any] | str | None = None,
        flops_per_second: float | None = None,
        parallel: Parallel | Mapping[str, Any] | None = None,
        partition: LayerPartition | None = None,
        network: Network | None = None,
        last_logits: bool = False,
        **settings: Unpack[ParallelSettings],
    ) -> list[int]:
        """Return the tokens of slices of a sequence that take equal seconds: ``slices`` of `costs`.

        Attention of a later slice has more keys, so that it is shorter. These are the dynamic
        chunks of a prefill (SGLang, vLLM), and with ``backward`` the computation-wise partition of
        Seq1F1B (arXiv 2406.03488, section 3.3). The seconds are those of the slowest stage by the
        model's own `costs`.

        Parameters
        ----------
        layers_per_stage
            As for `costs`.
        n_slices
            Number of slices: the slowest takes as little time as possible, within 0.1 %.
        first
            Instead of ``n_slices``: tokens of the first slice (``--chunked-prefill-size`` of
            SGLang). The others are as long as its seconds allow; the last has the rest.
        multiple
            Tokens of which all slices but the last are a multiple, such as those of a page of
            a key-value cache; 1 by default.
        backward
            Whether to balance the seconds of F and B, of a training step, instead of those of F.
        gpu, flops_per_second, parallel, partition, network, last_logits, **settings
            As for `costs`.

        Returns
        -------
        list of int
            Tokens of each slice, in the order of the sequence; their sum is ``sequence_length``.

        Raises
        ------
        ArgumentError
            Without one of ``n_slices`` and ``first``, or if ``multiple`` does not suit them, the
            sequence, or the GPUs that share it.

        Examples
        --------
        >>> import pipesim as ps
        >>> model = ps.Transformer.preset("llama3_8b", sequence_length=131072)
        >>> model.balanced_slices([8] * 4, 4, multiple=64, microbatch_size=1,
        ...                       flops_per_second=400e12)
        [58368, 29952, 23168, 19584]
        """
        from pipesim.models.balanced_slices import balanced_slices

        return balanced_slices(
            self.shard(as_parallel(Transformer.balanced_slices, parallel, settings)),
            layers_per_stage,
            n_slices,
            first=first,
            multiple=multiple,
            backward=backward,
            gpu=gpu,
            flops_per_second=flops_per_second,
            partition=partition,
            network=network,
            last_logits=last_logits,
        )

    if TYPE_CHECKING:  # registered by the room
        pack = pack_documents

    def _tokens(self, microbatch_size: int) -> int:
        return check_size("microbatch_size", microbatch_size) * self.sequence_length
