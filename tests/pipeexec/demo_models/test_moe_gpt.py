"""The GPT with experts: shapes, seeds, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from pipeexec.demo_models.gpt import moe_gpt
from pipesim.errors import ArgumentError

SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_experts": 4, "sequence": 8}


def test_shapes_and_causality() -> None:
    model = moe_gpt(**SMALL)
    tokens = torch.randint(256, (2, 8))
    logits = model(tokens)
    assert logits.shape == (2, 8, 256)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    torch.testing.assert_close(model(changed)[:, :5], logits[:, :5])


def test_shares_have_the_weights_of_the_whole() -> None:
    before = torch.get_rng_state()
    whole = moe_gpt(**SMALL).state_dict()
    parts = [moe_gpt(**SMALL, share=(k, 2)).state_dict() for k in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert {name for part in parts for name in part} == set(whole)
    assert all(torch.equal(x, whole[name]) for part in parts for name, x in part.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 3}, "d_model must be a multiple of n_heads, got d_model=16 and n_heads=3"),
        ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"share": (0, 3)}, "n_experts=4 is not divisible by the 3 replicas"),
        ({"expert_width": 0}, "expert_width must be at least 1, got 0"),
    ],
)
def test_bad_sizes(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        moe_gpt(**{**SMALL, **options})  # type: ignore[arg-type]
