"""Byte-level GPT whose MLPs are layers with experts, as an ``nn.Sequential`` for stages."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipeexec.demo_models.construction import check_parameters, check_sizes, seeded_model
from pipeexec.demo_models.gpt import Embedding
from pipeexec.experts.layer import Experts
from pipesim.errors import ArgumentError


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
    n_layers
        Blocks; the model has ``n_layers + 2`` children.
    d_model
        Width, a multiple of ``n_heads``.
    n_experts, experts_per_token, share
        As of `pipeexec.Experts`.
    expert_width
        Width of the hidden layer of an expert; four times ``d_model`` by default.
    sequence
        Largest length of an input, in tokens.
    seed
        Seed of the initial weights, which are the same for every share.

    Returns
    -------
    nn.Sequential
        From int64 (batch, sequence) to logits (batch, sequence, vocabulary).
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
