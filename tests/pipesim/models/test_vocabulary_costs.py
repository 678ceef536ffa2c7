"""Costs of stages whose vocabulary is divided over all devices (arXiv 2411.05288)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError

P, H, V, TOKENS = 3, 16, 120, 2 * 8
MODEL = ps.Transformer(
    hidden_size=H, n_layers=6, n_heads=2, sequence_length=8, vocabulary_size=V,
    tied_embeddings=False,
)  # fmt: skip
#: Products alone take time.
GPU = ps.GPU(flops=1e9, bandwidth=1e30)


def costs(model: ps.Transformer = MODEL, layers: Any = (2, 2, 2), **options: Any) -> ps.Costs:
    settings = {"microbatch_size": 2, "gpu": GPU, "vocabulary_parallel": True, **options}
    return model.costs(layers, **settings)


@pytest.mark.parametrize("rate", [{}, {"gpu": None, "flops_per_second": 1e9}], ids=["gpu", "rate"])
def test_slices_have_equal_shares_of_the_head(rate: dict[str, Any]) -> None:
    """Each S is a third of the head, T twice as long; embedding and loss take no time."""
    own, chain = costs(**rate), costs(vocabulary_parallel=False, **rate)
    head = MODEL.head_flops(2) / 1e9
    assert own.forward == pytest.approx([0] * P + [*chain.forward[:2]] + [chain.forward[0]]
                                        + [head / P] * P + [0])  # fmt: skip
    assert own.backward[2 * P :] == pytest.approx([2 * head / P] * P + [0])
    assert sum(own.backward) == pytest.approx(sum(chain.backward))


def test_devices_hold_equal_parameters() -> None:
    """A slice of both matrices each; positions are on the first, and each has a final norm."""
    own, chain = costs(), costs(vocabulary_parallel=False)
    of_device = [sum(own.parameter_bytes[k::P]) for k in range(P)]  # the loss has none
    norm, positions = 2 * 2 * H, 2 * 8 * H
    assert sum(own.parameter_bytes) == sum(chain.parameter_bytes) + (P - 1) * norm
    assert of_device[0] - positions == of_device[1] == of_device[2]
    assert own.optimizer_bytes[0] == 12 * V * H / P
    padded = costs(replace(MODEL, vocabulary_size=V - 2))
    assert padded.parameter_bytes == own.parameter_bytes


def test_messages_and_activations() -> None:
    """Hidden states to the slices, and from the embedding; two numbers a token to the loss."""
    own = costs()
    hidden = 2 * TOKENS * H
    assert own.output_bytes == (hidden,) * (2 * P) + (2 * 4 * TOKENS,) * P + (0,)
    chain = costs(vocabulary_parallel=False)
    norm_and_head = 2 * hidden + 4 * TOKENS * V / P
    assert own.activation_bytes[2 * P : 3 * P] == (norm_and_head,) * P
    # The dropout that follows the sum of the embedding is of the first layers.
    assert own.activation_bytes[: P + 1] == (0,) * P + (chain.activation_bytes[0],)


def test_tied_slices_are_on_one_device() -> None:
    """Their sum takes no message, and graphs must name them."""
    own = costs(replace(MODEL, tied_embeddings=True), gpu="a100_80gb")
    assert own.tied_stages == ((0, 6), (1, 7), (2, 8))
    schedule = ps.schedule("1f1b", P, 4, vocabulary_parallel=own)
    timeline = ps.simulate(ps.lower(schedule, tied=own.tied_stages), own)
    is_sum = timeline.graph.is_op(frozenset({ps.Op.REDUCE_TIED}))
    assert is_sum.sum() == P
    assert not timeline.nbytes[is_sum].any()
    with pytest.raises(CostsError, match=r"lower with tied=costs\.tied_stages"):
        ps.simulate(ps.lower(schedule), own)
    forward = ps.lower(schedule, forward_only=True)  # sums no gradients
    assert ps.simulate(forward, own).makespan < timeline.makespan
    assert costs().tied_stages == ()
    assert (
        costs(replace(MODEL, tied_embeddings=True), lengths=[8, 4]).tied_stages == own.tied_stages
    )


def test_settings_give_the_costs_again() -> None:
    """Also those of micro-batches of other lengths, and of experts."""
    experts = replace(MODEL, n_experts=4, experts_per_token=2, n_dense_layers=1)
    for own in (costs(lengths=[8, 4]), costs(experts, expert_parallel=2)):
        assert own.work is not None
        assert own.work.settings is not None
        assert ps.Costs.transformer(**own.work.settings) == own
    assert own.expert_layers == (0,) * P + (1, 2, 2) + (0,) * (P + 1)


def test_sweeps_give_the_costs_that_the_schedule_needs() -> None:
    """The schedule orders for these costs, and its graph sums the gradients of tied slices."""
    settings = {"hidden_size": H, "n_layers": 6, "n_heads": 2, "sequence_length": 8,
                "vocabulary_size": V, "microbatch_size": 2, "gpu": "a100_80gb", "latency": 1e-3,
                "n_devices": 6, "n_microbatches": 6}  # fmt: skip
    table = ps.sweep(
        {"vocabulary_parallel": [False, True]}, base={"schedule": "1f1b", **settings}, n_jobs=1
    )
    tied, network = replace(MODEL, tied_embeddings=True), ps.Network(latency=1e-3)
    own = costs(tied, [1] * 6, gpu="a100_80gb", network=network)
    times = [
        ps.simulate(
            ps.lower(ps.schedule("1f1b", 6, 6, vocabulary_parallel=x), tied=own.tied_stages), own
        ).makespan
        for x in (own, True)
    ]
    assert table["makespan"].iloc[1] == times[0] < times[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "Ett|tt|ttL"}, "places embedding and loss"),
        ({"layers": 3, "partition": "even"}, "partition chooses among splits"),
        ({"layers": [6, 0, 0]}, "layers of stage 1"),
        ({"placement": ps.Placement.linear(3)}, "placement chooses among splits"),
        ({"launch": [1e-6] * 3}, "launch has values of stages"),
        ({"model": replace(MODEL, mtp_layers=1)}, "1 mtp_layers"),
        ({"vocabulary_parallel": "yes"}, "vocabulary_parallel must be"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        costs(**options)
