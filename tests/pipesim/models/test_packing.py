"""Documents packed into micro-batches: work is balanced, limits are kept, nothing is lost."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.errors import ArgumentError

MODEL = ps.Transformer(
    hidden_size=64, n_layers=2, n_heads=4, sequence_length=512, vocabulary_size=64
)
RATE: dict[str, Any] = {"flops_per_second": 1e12}
TOKENS = st.lists(st.integers(1, 512), min_size=8, max_size=24)


def seconds(lengths: list[list[int]]) -> np.ndarray:
    """Return the seconds of packed micro-batches."""
    costs = MODEL.costs([2], lengths=lengths, microbatch_size=1, **RATE)
    both = np.atleast_2d(costs.forward) + np.atleast_2d(costs.backward)
    return np.broadcast_to(both.ravel(), len(lengths))


def test_long_documents_get_less_company_than_tokens_say() -> None:
    """A token has 24hh + 4hn FLOPs a layer, and 2hv of the head, of which h is 64.

    512 tokens take as long as about 16 times 64 tokens: 512 x 458 kFLOP, and 1024 x 229 kFLOP.
    Tokens alone would give 4 of 64 to the replica with 512.
    """
    packing = MODEL.pack([64] * 16 + [512], n_replicas=2, n_microbatches=1, **RATE)
    assert packing.lengths == [[512], [64] * 16]
    per_token = [2 * (24 * 64 * 64 + 4 * 64 * n) + 2 * 64 * 64 for n in (512, 64)]
    expected = [3 * n * flops / 1e12 for n, flops in zip((512, 1024), per_token, strict=True)]
    assert packing.seconds.ravel() == pytest.approx(expected)
    assert packing.imbalance == pytest.approx(max(expected) / np.mean(expected))


@given(TOKENS, st.integers(1, 2), st.integers(512, 1024))
def test_every_document_is_packed_once_within_the_limit(
    documents: list[int], n_replicas: int, max_tokens: int
) -> None:
    packing = MODEL.pack(documents, n_replicas=n_replicas, max_tokens=max_tokens, **RATE)
    numbers = [k for own in packing.documents for x in own for group in x for k in group]
    assert sorted(numbers) == list(range(len(documents)))
    flat = [group for own in packing.documents for (group,) in own]
    assert packing.lengths == [[documents[k] for k in group] for group in flat]
    assert max(map(sum, packing.lengths)) <= max_tokens
    assert packing.seconds[-1, -1] == pytest.approx(seconds([packing.lengths[-1]])[0])
    assert packing.seconds.shape == (n_replicas, len(flat) // n_replicas)


@given(st.lists(st.integers(1, 512), min_size=2, max_size=7))
def test_replicas_have_at_most_four_thirds_of_the_best_division(documents: list[int]) -> None:
    """Graham's bound, against all divisions into two replicas of one micro-batch."""
    packing = MODEL.pack(documents, n_replicas=2, n_microbatches=1, **RATE)
    work = seconds([[n] for n in documents])
    sides = np.array(list(product((0, 1), repeat=len(documents))))
    best = np.maximum(sides @ work, (1 - sides) @ work).min()
    assert packing.seconds.max() <= best * 4 / 3 * (1 + 1e-9)


def test_documents_are_shared_by_as_few_gpus_as_the_limit_allows() -> None:
    """512 by all four, 256 by two; GPUs that would be idle join others."""
    network = ps.Network(nodes=ps.Nodes(4, 1e-6, 1e12, 5e-6, 1e11, gpus_per_device=4))
    documents = [512, 200, 256, 130, 100, 90, 128, 64, 64, 60]
    packing = MODEL.pack(
        documents, max_tokens=128, context_parallel=4, dynamic_context=True, network=network, **RATE
    )
    assert packing.context_parallel == [[4], [2, 1, 1], [2, 1, 1], [2, 2]]
    groups = [
        (size, sum(group))
        for sizes, own in zip(packing.context_parallel, packing.lengths, strict=True)
        for size, group in zip(sizes, own, strict=True)
    ]
    assert {(4, 512), (2, 256), (2, 200), (2, 132)} <= {*groups}, "132: four parts of equal size"
    assert all(tokens <= 128 * size for size, tokens in groups)
    numbers = [k for own in packing.documents[0] for group in own for k in group]
    assert sorted(numbers) == list(range(len(documents)))
    costs = MODEL.costs(
        1, lengths=packing.lengths, context_parallel=packing.context_parallel, network=network,
        microbatch_size=1, **RATE,
    )  # fmt: skip
    graph = ps.lower(ps.schedule("1f1b", 1, len(packing.lengths)))
    assert ps.simulate(graph, costs).makespan == pytest.approx(packing.seconds.sum())
    assert costs.work is not None
    assert costs.work.tokens * len(packing.lengths) == sum(documents) + 2


def test_both_replicas_of_a_packing_take_about_as_long() -> None:
    """Each has costs of its own in a simulated step."""
    documents = np.random.default_rng(0).integers(16, 512, 40)
    packing = MODEL.pack(documents, n_replicas=2, max_tokens=1024, **RATE)
    costs = MODEL.costs([1, 1], lengths=packing.lengths, microbatch_size=1, **RATE)
    n = packing.seconds.shape[1]
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, n), n_replicas=2), costs)
    busy = timeline.busy.reshape(2, 2).sum(axis=1)
    assert busy == pytest.approx(packing.seconds.sum(axis=1))
    assert packing.imbalance < 1.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 100}, "documents[1] has 200 tokens, but a device takes 100 of a micro-ba"),
        ({}, "max_tokens is missing; give the most tokens of a GPU, or n_microbatches"),
        ({"n_microbatches": 1, "dynamic_context": True}, "max_tokens is missing"),
        ({"n_microbatches": 4}, "3 documents do not fill 4 micro-batches on each of 1 replicas"),
        ({"n_microbatches": 1, "n_replicas": 10**6}, "do not fill 1 micro-batches on each of 1"),
        ({"n_microbatches": 1, "max_tokens": 200}, "do not fill 1 micro-batches of 200 tokens a"),
        ({"max_tokens": 200, "context_parallel": 2, "dynamic_context": True},
         "no document needs more than 1 of the 2 GPUs of context_parallel; give context_paral"),
        ({"n_microbatches": 1, "lengths": [3]}, "lengths is no setting of pack"),
        ({"n_microbatches": 1, "documents": []}, "documents are empty; give the tokens of each"),
        ({"n_microbatches": 1, "documents": [1, 0]}, "documents[1] must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_bad_packings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        MODEL.pack(**{"documents": [100, 200, 50], **RATE, **options})
