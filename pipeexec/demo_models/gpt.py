"""Byte-level GPT, with or without experts: ``nn.Sequential``, to be cut between any two layers.

It can run sequences in slices: attention and positions use `pipeexec.KeyValueCache`. No two layers
share a parameter: the head is not tied to the embedding.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from pipeexec.demo_models.construction import (
    check_parameters,
    check_sizes,
    costed_layer,
    seeded_model,
)
from pipeexec.experts.layer import Experts
from pipeexec.stages.sequence_slices import KeyValueCache
from pipesim.errors import ArgumentError, number


def gpt(
    *,
    n_layers: int = 8,
    d_model: int = 256,
    n_heads: int = 4,
    sequence: int = 128,
    dropout: float = 0.0,
    vocabulary: int = 256,
    seed: int = 0,
) -> nn.Sequential:
    """Build a byte-level GPT: embedding, ``n_layers`` transformer blocks, final norm with head.

    Parameters
    ----------
    n_layers
        Transformer blocks; the model has ``n_layers + 2`` layers.
    d_model
        Width, a multiple of ``n_heads``.
    sequence
        Largest length of an input, in tokens.
    dropout
        Probability, at least 0 and below 1, of dropping an element of the embedding or of a
        residual branch. Attention weights are not dropped.
    seed
        Seed of the initial weights.

    Returns
    -------
    nn.Sequential
        From int64 (batch, sequence) to logits (batch, sequence, vocabulary).
    """
    check_sizes(n_layers=n_layers, d_model=d_model, n_heads=n_heads)
    check_sizes(sequence=sequence, vocabulary=vocabulary)
    if d_model % n_heads:
        raise ArgumentError(
            f"d_model must be a multiple of n_heads, got d_model={d_model} and n_heads={n_heads}; "
            f"take d_model={math.ceil(d_model / n_heads) * n_heads}"
        )
    p = number(dropout)
    if p is None or not 0 <= p < 1:
        raise ArgumentError(
            f"dropout must be a probability of at least 0 and below 1, got {dropout!r}; 0 is none"
        )
    check_parameters(
        n_layers * (12 * d_model**2 + 13 * d_model) + (2 * vocabulary + sequence) * d_model,
        n_layers=n_layers, d_model=d_model, sequence=sequence, vocabulary=vocabulary,
    )  # fmt: skip
    # The head has 2 d V operations a token, a block 24 d^2; norm and loss add a little.
    head_cost = vocabulary / (10 * d_model)
    return seeded_model(
        lambda: [
            Embedding(vocabulary, sequence, d_model, p),
            *(_Block(d_model, n_heads, p) for _ in range(n_layers)),
            costed_layer(
                head_cost, nn.LayerNorm(d_model), nn.Linear(d_model, vocabulary, bias=False)
            ),
        ],
        seed,
    )


class Embedding(nn.Module):
    """Token and position embedding: int64 (batch, sequence) to (batch, sequence, d_model)."""

    relative_cost = 0.04

    def __init__(self, vocabulary: int, sequence: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, d_model)
        self.position = nn.Embedding(sequence, d_model)
        self.dropout = _dropout(dropout)
        self.cache = KeyValueCache()
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of both embeddings; raise `ArgumentError` for too many tokens."""
        first, longest = self.cache.offset(tokens.shape[1]), self.position.num_embeddings
        length = first + tokens.shape[1]
        if length > longest:
            raise ArgumentError(
                f"the embedding got samples of {length} tokens, and has positions for at most "
                f"{longest}; shorten the samples or build the model with sequence={length}"
            )
        x: Tensor = self.dropout(self.token(tokens) + self.position.weight[first:length])
        return x


class _Block(nn.Module):
    """Pre-norm transformer block, causal: (batch, sequence, d_model) to the same."""

    relative_cost = 1.0

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.projection = nn.Linear(d_model, d_model)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model)
        )
        self.dropout = _dropout(dropout)
        self.cache = KeyValueCache()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.n_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = self.cache.attend(query, key, value)
        x = x + self.dropout(self.projection(attended.transpose(1, 2).flatten(2)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


def _dropout(p: float) -> nn.Module:
    # Without dropout there is no nn.Dropout: modules show which stages draw random numbers.
    return nn.Dropout(p) if p > 0 else nn.Identity()


def moe_gpt(
    *,
    n_layers: int = 4,
    d_model: int = 64,
    n_heads: int = 4,
    n_experts: int = 8,
    experts_per_token: int = 2,
    expert_width: int | None = None,
    sequence: int = 64,
    vocabulary: int = 256,
    share: tuple[int, int] = (0, 1),
    seed: int = 0,
) -> nn.Sequential:
    """Build a GPT with experts: embedding, blocks of attention and experts, final norm with head.

    Every block is an ``nn.Sequential`` of two residual layers, attention and `pipeexec.Experts`, so
    that the model can be cut between any two blocks, and a stage at its experts.

    Parameters
    ----------
    n_layers, d_model, n_heads, sequence, vocabulary
        As of `gpt`.
    n_experts, experts_per_token, share
        As of `pipeexec.Experts`.
    expert_width
        Width of the hidden layer of an expert; four times ``d_model`` by default.
    seed
        Seed of the initial weights, which are the same for every share.

    Returns
    -------
    nn.Sequential
        As of `gpt`.
    """
    check_sizes(n_layers=n_layers, d_model=d_model, n_heads=n_heads, n_experts=n_experts)
    check_sizes(sequence=sequence, vocabulary=vocabulary, experts_per_token=experts_per_token)
    hidden = 4 * d_model if expert_width is None else expert_width
    check_sizes(expert_width=hidden)
    if d_model % n_heads:
        raise ArgumentError(
            f"d_model must be a multiple of n_heads, got d_model={d_model} and n_heads={n_heads}"
        )
    expert = 2 * d_model * hidden + d_model + hidden
    check_parameters(
        n_layers * (4 * d_model**2 + n_experts * (expert + d_model))
        + (2 * vocabulary + sequence) * d_model,
        n_layers=n_layers, d_model=d_model, n_experts=n_experts, vocabulary=vocabulary,
    )  # fmt: skip

    def block() -> nn.Sequential:
        return nn.Sequential(
            _Attention(d_model, n_heads),
            Experts(
                lambda: nn.Sequential(
                    nn.Linear(d_model, hidden), nn.GELU(), nn.Linear(hidden, d_model)
                ),
                d_model,
                n_experts,
                experts_per_token,
                share=share,
                norm=nn.LayerNorm(d_model),
                residual=True,
            ),
        )

    return seeded_model(
        lambda: [
            Embedding(vocabulary, sequence, d_model, 0.0),
            *(block() for _ in range(n_layers)),
            nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, vocabulary, bias=False)),
        ],
        seed,
    )


class _Attention(nn.Module):
    """Pre-norm attention with a residual, causal: (batch, sequence, d_model) to the same."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.projection = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, self.n_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = x + self.projection(attended.transpose(1, 2).flatten(2))
        return output
