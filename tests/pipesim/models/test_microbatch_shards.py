"""Costs of micro-batches of other lengths, packed documents, and slices of sequences."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError, MemoryLimitWarning

MODEL = ps.Transformer(
    hidden_size=256, n_layers=4, n_heads=4, sequence_length=512, vocabulary_size=1024
)
FUSED: dict[str, Any] = {"gpu": "h100_sxm", "flash_attention": True, "microbatch_size": 1}


def test_equal_lengths_are_one_value() -> None:
    costs = MODEL.costs([2, 2], **FUSED)
    for lengths in ([512] * 3, [[512]] * 3, np.full(3, 512)):
        several = MODEL.costs([2, 2], lengths=lengths, **FUSED)
        assert several == costs
    assert MODEL.costs([2, 2], slices=1, **FUSED) == costs


def test_costs_are_of_as_many_micro_batches_and_slices_as_they_were_made_for() -> None:
    """Though all are equal: those of 3 lengths, and of whole sequences, are of no other graph."""
    schedule = ps.schedule("1f1b", 2, 4)
    three = MODEL.costs([2, 2], lengths=[512] * 3, **FUSED)
    with pytest.raises(CostsError, match="values for 3 micro-batches, but the graph has 4"):
        ps.simulate(ps.lower(schedule), three)
    with pytest.raises(CostsError, match="values for 3 micro-batches, but 4 are to be ordered"):
        ps.order_by(ps.Placement.linear(2), 4, costs=three)
    ps.simulate(ps.lower(schedule), three.averaged())
    sliced = ps.schedule("seq1f1b", 2, 4, n_slices=2)
    for n, text in {1: "whole sequences", 4: "sequences in 4 slices"}.items():
        with pytest.raises(CostsError, match=f"{text}, but the graph is of sequences in 2 slices"):
            ps.simulate(ps.lower(sliced), MODEL.costs([2, 2], slices=n, **FUSED))
    with pytest.raises(CostsError, match="in 2 slices, but the graph is of whole sequences"):
        ps.simulate(ps.lower(schedule), MODEL.costs([2, 2], slices=2, **FUSED))


def test_changes_that_fit_know_slices() -> None:
    """Each change is simulated with the costs of each slice."""
    costs = MODEL.costs([2, 2], slices=2, gpu="h100_sxm", microbatch_size=1)
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4, n_slices=2))
    peak = ps.simulate(graph, costs).memory.peak.max()
    with pytest.warns(MemoryLimitWarning, match="flash_attention=True"):
        timeline = ps.simulate(graph, costs, memory_limit=peak - 1)
    table = timeline.memory.changes_that_fit().set_index("change")
    fused = MODEL.costs([2, 2], slices=2, **FUSED)
    expected = ps.simulate(graph, fused).makespan
    assert table.loc["flash_attention=True", "makespan"] == pytest.approx(expected)


def test_padded_sequences_are_models_of_their_length() -> None:
    costs = MODEL.costs([2, 2], lengths=[512, 128], **FUSED)
    short = ps.Transformer(
        hidden_size=256, n_layers=4, n_heads=4, sequence_length=128, vocabulary_size=1024
    ).costs([2, 2], **FUSED)
    for name in ("forward", "backward", "activation_bytes", "output_bytes"):
        assert getattr(costs.microbatch(1), name) == getattr(short, name)
    assert costs.parameter_bytes == MODEL.costs([2, 2], **FUSED).parameter_bytes
    assert costs.work is not None
    assert costs.work.tokens == 320, "on average"


def test_documents_attend_to_themselves() -> None:
    """Two documents of half the tokens have half of the scores, and all other FLOPs."""
    rate: dict[str, Any] = {"flops_per_second": 1e12, "microbatch_size": 1}
    one, packed = (
        MODEL.costs([2, 2], lengths=[x, 512], **rate).averaged() for x in (512, [256, 256])
    )
    core = 2 * MODEL.core_flops() / 1e12
    assert one.forward[0] - packed.forward[0] == pytest.approx(
        core / 2 / 2
    )  # of one micro-batch of two
    assert one.activation_bytes == packed.activation_bytes
    unfused: dict[str, Any] = {"gpu": "h100_sxm", "microbatch_size": 1}
    masked = MODEL.costs([2, 2], lengths=[[256, 256], 512], **unfused)
    assert masked.n_microbatches is None, "a mask saves nothing unless it is fused"


def test_slices_have_the_work_of_the_sequence() -> None:
    """FLOPs and bytes of all slices are those of the sequence; attention grows by slice."""
    long = ps.Transformer.preset("llama3_8b", sequence_length=65536, n_layers=4)
    rate: dict[str, Any] = {"flops_per_second": 1e14, "microbatch_size": 1, "flash_attention": True}
    whole, sliced = long.costs([2, 2], **rate), long.costs([2, 2], slices=8, **rate)
    for name in ("forward", "backward", "activation_bytes"):
        parts = (getattr(sliced.microbatch(k), name) for k in range(8))
        assert np.allclose(sum(map(np.array, parts)), getattr(whole, name))
    steps = np.diff(sliced.forward[0])
    assert (steps > 0).all()
    assert np.allclose(steps, steps[0]), "scores of a slice grow by one square"
    assert sliced.work is not None
    assert whole.work is not None
    assert sliced.work.flops * 8 == pytest.approx(whole.work.flops)
    uneven = long.costs([2, 2], slices=[32768, 16384, 16384], **rate)
    assert np.sum(uneven.forward[0]) == pytest.approx(whole.forward[0])


def test_sequences_of_unlike_lengths_have_slices_of_their_own() -> None:
    """Each slice costs what it costs in a run of its sequence alone."""
    rows = {512: [384, 128], 96: [64, 32]}
    rate: dict[str, Any] = {"flops_per_second": 1e12, "microbatch_size": 1}
    costs = MODEL.costs([2, 2], lengths=[*rows], slices=[*rows.values()], **rate)
    alone = [MODEL.costs([2, 2], lengths=[n], slices=own, **rate) for n, own in rows.items()]
    for name in ("forward", "backward", "activation_bytes"):
        parts = [np.array(getattr(own, name)) for own in alone]
        assert (np.array(getattr(costs, name)) == np.hstack(parts)).all(), name
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4, n_slices=2))
    assert ps.simulate(graph, costs).makespan == ps.simulate(graph, costs.rebuilt()).makespan


def test_settings_build_them_again() -> None:
    costs = MODEL.costs([2, 2], lengths=[512, [128, 128], 64], **FUSED)
    assert costs.rebuilt() == costs
    assert costs.rebuilt(gpu="h200").n_microbatches == 3


def test_a_step_of_packed_microbatches() -> None:
    """Short micro-batches make the step shorter, in any schedule."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    rate: dict[str, Any] = {"flops_per_second": 1e12, "microbatch_size": 1}
    times = [
        ps.simulate(graph, MODEL.costs([2, 2], lengths=lengths, **rate)).makespan
        for lengths in ([512] * 4, [512, 512, 256, 256], [[256, 256]] * 4)
    ]
    assert times[1] < times[0]
    assert times[2] < times[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, "lengths must be, for each micro-batch, the tokens of its sequences, or"),
        ({"lengths": 512}, "lengths must be, for each micro-batch"),
        ({"lengths": "512"}, "lengths must be, for each micro-batch"),
        ({"lengths": [512, 0]}, "lengths[1] must be at least 1, got 0"),
        ({"lengths": [512, [1.5]]}, "lengths[1][0] must be a whole number"),
        ({"lengths": [512, []]}, "lengths[1] must be tokens, or those of each document; got []"),
        ({"slices": 3}, "slices=3"),
        ({"slices": 0}, "slices must be at least 1, got 0"),
        ({"slices": [256, 128]}, "slices have 384 tokens, but a sequence has 512; give tokens tha"),
        ({"slices": [256, 256], "lengths": [[512]]}, "slices are of one sequence, but lengths pac"),
        ({"lengths": [[256, 256]], "microbatch_size": 2}, "packs documents into one micro-batch"),
        ({"slices": "2"}, "slices must be a"),
        ({"slices": [[256, 256], [512]], "lengths": [512] * 2}, "slices have lists of 2, 1 slices"),
        ({"slices": [[512]], "lengths": [512] * 2}, "slices have lists of 1 slices for 2 micro-ba"),
    ],
)
def test_bad_lengths(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        MODEL.costs([2, 2], **{**FUSED, **options})


def test_lengths_of_another_number_of_microbatches() -> None:
    costs = MODEL.costs([2, 2], lengths=[512, 256], **FUSED)
    with pytest.raises(CostsError, match="for 2 micro-batches, but the graph has 4"):
        ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), costs)


@pytest.mark.slow
def test_changes_of_unequal_micro_batches_keep_whole_sequences() -> None:
    """One sequence cannot be divided."""
    costs = MODEL.costs([2, 2], lengths=[512, 256] * 2, **FUSED)
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    peak = ps.simulate(graph, costs).memory.peak.max()
    with pytest.warns(MemoryLimitWarning):
        timeline = ps.simulate(graph, costs, memory_limit=0.9 * peak)
    assert (
        not timeline.memory.changes_that_fit(every=True)["change"]
        .str.contains("microbatch_size")
        .any()
    )


def test_costs_of_each_micro_batch_of_each_replica() -> None:
    """Bytes of activations, which a timeline does not show, are those of each replica."""
    values = [[1.0, 2.0, 3.0, 4.0]] * 2
    costs = ps.Costs(values, values, activation_bytes=values)
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=2), costs)
    measured = ps.Costs.from_timeline(timeline, per_microbatch=True)
    assert measured.activation_bytes == ((1, 2, 3, 4, 1, 2, 3, 4),) * 2
    again = ps.simulate(timeline.graph, measured)
    assert again.makespan == timeline.makespan
    assert (again.memory.peak == timeline.memory.peak).all()
