"""Sizes of published decoder-only transformers, as their papers and configurations state them.

Vocabularies are those of the models; training frameworks pad them to a multiple of 128 or more.
Norms of queries and keys (Qwen3), which have 2 parameters an element of a head, are left out. So
are the biases of DeepSeek-V3's routers, and its module that predicts a second token, which
``mtp_layers=1`` adds. Of GPT-OSS, sinks are left out, and windows of 128 tokens, which each other
layer has: its attention is that of full sequences. A shift of its norms, which have none, is
counted with its biases. Llama 3.1 has the sizes of Llama 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipesim.errors import find_name

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class _Published:
    """Sizes of a model, and the number of their source in `_SOURCES`."""

    summary: str
    source: int
    sizes: dict[str, Any]


def _gpt(
    summary: str, source: int, h: int, n_layers: int, heads: int, s: int, v: int
) -> _Published:
    sizes = {"hidden_size": h, "n_layers": n_layers, "n_heads": heads, "sequence_length": s,
             "vocabulary_size": v}  # fmt: skip
    return _Published(summary, source, sizes)


def _llama(
    summary: str, source: int, h: int, n_layers: int, heads: int, kv_heads: int, f: int, s: int,
    v: int, *, tied: bool = False, head_size: int = 0, gated: bool = True,
) -> _Published:  # fmt: skip
    """Return a model of Llama's shape: gated MLP, rotary positions, no biases, no dropout."""
    shape = _gpt(summary, source, h, n_layers, heads, s, v).sizes
    sizes = {
        **shape, "n_kv_heads": kv_heads, "ffn_size": f, "head_size": head_size, "gated_mlp": gated,
        "biases": False, "learned_positions": False, "dropout": False, "tied_embeddings": tied,
    }  # fmt: skip
    return _Published(summary, source, sizes)


def _experts(
    dense: _Published, n: int, k: int, u: int, *, shared: int = 0, n_dense: int = 0, **others: int
) -> _Published:
    """Return a model whose layers, but for the first, have experts."""
    sizes = {
        **dense.sizes, "n_experts": n, "experts_per_token": k, "expert_ffn_size": u,
        "shared_experts": shared, "n_dense_layers": n_dense, **others,
    }  # fmt: skip
    return _Published(dense.summary, dense.source, sizes)


#: Sources of sizes by number.
_SOURCES = {
    1: 'Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, table 2',
    2: 'Brown et al., "Language Models are Few-Shot Learners", arXiv 2005.14165, table 2.1',
    3: 'Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", '
    "arXiv 2205.05198, table 3",
    4: 'Touvron et al., "Llama 2", arXiv 2307.09288, section 2.2; configurations at '
    "https://huggingface.co/meta-llama/Llama-2-7b-hf and likewise",
    5: 'Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783, table 3; 8,192 '
    "tokens, the length of most of the training",
    6: 'Jiang et al., "Mistral 7B", arXiv 2310.06825, table 1',
    7: 'Yang et al., "Qwen3 Technical Report", arXiv 2505.09388, table 1; configurations at '
    "https://huggingface.co/Qwen/Qwen3-32B and likewise; 4,096 tokens, the length of most "
    "of the training (section 3.2)",
    8: "Mistral AI, 2024, https://mistral.ai/news/mixtral-8x22b (141 billion parameters, 39 of "
    "them active); configuration at https://huggingface.co/mistralai/Mixtral-8x22B-v0.1",
    9: 'DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 3.1.2; configuration at '
    "https://huggingface.co/deepseek-ai/DeepSeek-V2; 4,096 tokens, the length of the training",
    10: 'DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 4.2; configuration '
    "at https://huggingface.co/deepseek-ai/DeepSeek-V3; 4,096 tokens, the length of the training",
    11: 'OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925, table 1; '
    "configurations at https://huggingface.co/openai/gpt-oss-120b and likewise; 4,096 tokens, the "
    "length before its extension",
    12: 'Kimi Team, "Kimi K2", arXiv 2507.20534, table 2; configuration at '
    "https://huggingface.co/moonshotai/Kimi-K2-Base; 4,096 tokens, the length of most of the "
    "training",
    13: 'Parmar et al., "Nemotron-4 15B Technical Report", arXiv 2402.16819, table 1',
    14: 'NVIDIA, "Nemotron-4 340B Technical Report", arXiv 2406.11704, table 1',
    15: 'Jiang et al., "Mixtral of Experts", arXiv 2401.04088, table 1; 46.7 billion parameters, '
    "12.9 of them active: https://mistral.ai/news/mixtral-of-experts",
}

_MODELS = {
    "gpt2_xl": _gpt("GPT-2 1.5B", 1, 1600, 48, 25, 1024, 50257),
    "gpt3_175b": _gpt("GPT-3 175B", 2, 12288, 96, 96, 2048, 50257),
    "megatron_22b": _gpt("Megatron 22B", 3, 6144, 48, 64, 2048, 51200),
    "megatron_530b": _gpt("Megatron-Turing 530B", 3, 20480, 105, 128, 2048, 51200),
    "megatron_1t": _gpt("Megatron 1T", 3, 25600, 128, 160, 2048, 51200),
    "llama2_7b": _llama("Llama 2 7B", 4, 4096, 32, 32, 32, 11008, 4096, 32000),
    "llama2_13b": _llama("Llama 2 13B", 4, 5120, 40, 40, 40, 13824, 4096, 32000),
    "llama2_70b": _llama("Llama 2 70B", 4, 8192, 80, 64, 8, 28672, 4096, 32000),
    "llama3_8b": _llama("Llama 3 8B", 5, 4096, 32, 32, 8, 14336, 8192, 128256),
    "llama3_70b": _llama("Llama 3 70B", 5, 8192, 80, 64, 8, 28672, 8192, 128256),
    "llama3_405b": _llama("Llama 3 405B", 5, 16384, 126, 128, 8, 53248, 8192, 128256),
    "mistral_7b": _llama("Mistral 7B", 6, 4096, 32, 32, 8, 14336, 8192, 32000),
    "qwen3_8b": _llama("Qwen3 8B", 7, 4096, 36, 32, 8, 12288, 4096, 151936),
    "qwen3_14b": _llama("Qwen3 14B", 7, 5120, 40, 40, 8, 17408, 4096, 151936),
    "qwen3_32b": _llama("Qwen3 32B", 7, 5120, 64, 64, 8, 25600, 4096, 151936, head_size=128),
    "nemotron4_15b": _llama(
        "Nemotron-4 15B", 13, 6144, 32, 48, 8, 24576, 4096, 256000, gated=False),
    "nemotron4_340b": _llama(
        "Nemotron-4 340B", 14, 18432, 96, 96, 8, 73728, 4096, 256000, gated=False),
    "mixtral_8x7b": _experts(
        _llama("Mixtral 8x7B", 15, 4096, 32, 32, 8, 14336, 32768, 32000), 8, 2, 14336),
    "mixtral_8x22b": _experts(
        _llama("Mixtral 8x22B", 8, 6144, 56, 48, 8, 16384, 65536, 32000), 8, 2, 16384),
    "qwen3_30b_a3b": _experts(
        _llama("Qwen3 30B A3B", 7, 2048, 48, 32, 4, 6144, 4096, 151936, head_size=128),
        128, 8, 768),
    "qwen3_235b_a22b": _experts(
        _llama("Qwen3 235B A22B", 7, 4096, 94, 64, 4, 12288, 4096, 151936, head_size=128),
        128, 8, 1536),
    "gpt_oss_20b": _experts(
        _llama("GPT-OSS 20B", 11, 2880, 24, 64, 8, 2880, 4096, 201088, head_size=64), 32, 4, 2880,
        biases=True),
    "gpt_oss_120b": _experts(
        _llama("GPT-OSS 120B", 11, 2880, 36, 64, 8, 2880, 4096, 201088, head_size=64),
        128, 4, 2880, biases=True),
    "deepseek_v2": _experts(
        _llama("DeepSeek-V2 236B", 9, 5120, 60, 128, 128, 12288, 4096, 102400, head_size=128),
        160, 6, 1536, shared=2, n_dense=1, expert_groups=8, groups_per_token=3,
        kv_rank=512, query_rank=1536, rope_head_size=64, value_head_size=128),
    "deepseek_v3": _experts(
        _llama("DeepSeek-V3 671B", 10, 7168, 61, 128, 128, 18432, 4096, 129280, head_size=128),
        256, 8, 2048, shared=1, n_dense=3, expert_groups=8, groups_per_token=4,
        kv_rank=512, query_rank=1536, rope_head_size=64, value_head_size=128),
    "kimi_k2": _experts(
        _llama("Kimi K2 1T", 12, 7168, 61, 64, 64, 18432, 4096, 163840, head_size=128),
        384, 8, 2048, shared=1, n_dense=1,
        kv_rank=512, query_rank=1536, rope_head_size=64, value_head_size=128),
}  # fmt: skip


def published_sizes(name: str) -> dict[str, Any]:
    """Return the attributes of `pipesim.Transformer` for a published model."""
    return _MODELS[find_name("transformer", name, _MODELS)].sizes


def transformers() -> pd.DataFrame:
    """List the models that `Transformer.preset` accepts: one row a name, one column a size.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``summary``, ``source`` (the paper), and the sizes of a `Transformer` that
        the model has, given or by default.

    Examples
    --------
    >>> import pipesim as ps
    >>> ps.transformers().loc["llama3_8b", ["n_layers", "hidden_size"]].tolist()
    [32, 4096]
    """
    from pipesim.utils.packages import pandas as pd

    rows = {name: _row(name, model) for name, model in _MODELS.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("name")


def _row(name: str, published: _Published) -> dict[str, Any]:
    from pipesim.models.transformer import Transformer

    model, columns = Transformer.preset(name), [*_MODELS["deepseek_v3"].sizes]
    sizes = {column: getattr(model, column) for column in columns}
    sizes["head_size"] = model.head_size or model.hidden_size // model.n_heads
    return {"summary": published.summary, "source": _SOURCES[published.source], **sizes}
