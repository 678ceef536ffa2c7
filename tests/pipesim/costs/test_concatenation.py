"""`Costs.concatenate`: each field of `Costs`, tied stages of one module, and costs of servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.costs import Workload
from pipesim.costs.rows import ROWS, STAGE_ROWS
from pipesim.errors import CostsError
from pipesim.ops import Op

NETWORK = ps.Network(latency=1, bandwidth=8)
PLAIN = ps.Costs(forward=1, backward=2)
MODEL = ps.Transformer(
    hidden_size=64, n_layers=4, n_heads=4, sequence_length=32, vocabulary_size=128,
    tied_embeddings=True,
)  # fmt: skip
#: Value of each field without values of stages in the costs of two stages behind one, and in the
#: costs of all three; an error of the second is its message.
JOINED: dict[str, tuple[Any, Any]] = {
    "skip_bytes": ({(0, 1): 4.0}, (((1, 2), 4.0),)),
    "tied_bytes": (4.0, (4.0,)),
    "tied": ([(0, 1)], ((1, 2),)),
    "workload": (Workload(tokens=10, flops=100), None),
    "buckets": ([[(1.0, 1.0)]] * 2, CostsError("buckets of a module")),
    "segments": ([[(1.0,)] * 3] * 2, CostsError("segments of a module")),
    "exchange_bytes": ({0: {"keys": [[1.0]]}}, CostsError("exchange_bytes of a module")),
    "network": (NETWORK, NETWORK),
    "all_reduce": ("tree", "tree"),
    "memory_reserve": (0.2, 0.2),
    "expert_replicas": (2, 2),
    "gradient_exchange": ("all_reduce", "all_reduce"),
    "exchanged_gradients": (2.0, 2.0),
    "overlap_cost": (0.5, 0.5),
    "launch_by_op": ({"STEP": 0.25}, (("STEP", 0.25),)),
    "last_logits": (True, True),
}


def joined(first: ps.Costs, second: ps.Costs) -> ps.Costs:
    """Return the costs of a module of one stage and one of two."""
    return ps.Costs.concatenate({"vision": (first, 1), "language": (second, 2)})


@pytest.mark.parametrize("name", ROWS)
def test_each_field_is_joined(name: str) -> None:
    """A new field with values of stages is joined; any other needs a row above."""
    assert JOINED.keys() == ROWS.keys() - STAGE_ROWS.keys()
    if name in STAGE_ROWS:
        whole = dict.fromkeys(("parameter_bytes", "optimizer_bytes", "gradient_bytes"), 9.0)
        values = (0.75, 0.5, 0.25) if STAGE_ROWS[name].unit == "shares" else (4.0, 2.0, 3.0)
        own = [replace(PLAIN, **{**whole, name: value}) for value in (values[0], values[1:])]
        assert getattr(joined(*own), name) == values
        return
    value, whole = JOINED[name]
    own = replace(PLAIN, **{name: value})
    if isinstance(whole, CostsError):
        with pytest.raises(CostsError, match=str(whole)):
            joined(PLAIN, own)
    else:
        assert getattr(joined(PLAIN, own), name) == whole


def placed(**options: Any) -> ps.TaskGraph:
    """Return the graph of an encoder of two stages before a model of three; one micro-batch."""
    placement = ps.Placement.from_modules(
        {"vision": [0, 1], "language": [2, 3, 4]}, {"vision": "language"}
    )
    return ps.lower(ps.order_by(placement, 1, split_backward=False), step="flush", **options)


def test_a_model_sums_its_tied_embedding_between_its_own_stages() -> None:
    """Behind an encoder: bytes, STEP without ``tied``, REDUCE_TIED with it, and memory."""
    run: dict[str, Any] = {"gpu": "h100_sxm", "microbatch_size": 1}
    network = ps.Network(bandwidth=1e9)
    language = MODEL.costs([1, 2, 1], network=network, **run)
    vision = replace(MODEL, bidirectional=True, tied_embeddings=False).costs([2, 2], **run)
    costs = ps.Costs.concatenate({"vision": (vision, 2), "language": (language, 3)}, network)
    assert language.tied_stages == ((0, 2),)
    assert costs.tied_stages == ((2, 4),)
    assert costs.tied_bytes == (128 * 64 * MODEL.bytes_per_gradient,)
    assert ps.Costs.from_dict(costs.to_dict()) == costs

    tied = ps.simulate(placed(tied=costs.tied_stages), costs)
    sums = tied.graph.is_op((Op.REDUCE_TIED,))
    assert sorted(tied.graph.stage[sums].tolist()) == [2, 4]
    assert tied.nbytes[sums].tolist() == [*costs.tied_bytes] * 2  # type: ignore[misc]
    seconds = network.all_reduce(costs.tied_bytes[0], [2, 4], "fastest")  # type: ignore[index]
    assert tied.duration[sums] == pytest.approx([seconds] * 2)

    plain = ps.simulate(placed(), costs)
    steps = plain.graph.is_op((Op.STEP,))
    untied = ps.simulate(placed(), replace(costs, tied_bytes=0))
    added = (plain.duration - untied.duration)[steps]
    assert added[np.argsort(plain.graph.stage[steps])] == pytest.approx([0, 0, seconds, 0, seconds])
    alone = ps.simulate(ps.lower(ps.schedule("gpipe", 3, 1), step="flush"), language)
    for timeline in (tied, plain):
        np.testing.assert_allclose(timeline.memory.peak[2:], alone.memory.peak)


def test_costs_without_a_loss_stay_so() -> None:
    """Of one module, as of a model alone: they price graphs that do not train, and no others."""
    served = MODEL.costs([2, 1, 1], gpu="h100_sxm", microbatch_size=1, last_logits=True)
    vision = replace(PLAIN, input_grad=1, weight_grad=1)
    costs = ps.Costs.concatenate({"vision": (vision, 2), "language": (served, 3)})
    assert ps.simulate(placed(forward_only=True), costs).makespan > 2
    for own, graph in ((costs, placed()), (served, ps.lower(ps.schedule("gpipe", 3, 1)))):
        with pytest.raises(CostsError, match=r"no loss .* give forward_only=True to lower"):
            ps.simulate(graph, own)


def test_tied_stages_that_do_not_suit_are_refused() -> None:
    """Groups without names, other groups, stages that a graph lacks, and stages of devices."""
    with pytest.raises(CostsError, match="of 2 groups of tied stages, but its costs name 0"):
        joined(PLAIN, replace(PLAIN, tied_bytes=(1, 2)))
    costs = replace(PLAIN, tied=[(2, 4), (0, 1)], tied_bytes=(8, 4), network=NETWORK)
    timeline = ps.simulate(placed(tied=[(0, 1)]), costs)
    assert timeline.nbytes[timeline.graph.is_op((Op.REDUCE_TIED,))].tolist() == [4, 4]
    with pytest.raises(CostsError, match=r"lower with tied=costs\.tied_stages"):
        ps.simulate(placed(tied=[(0, 4)]), costs)
    with pytest.raises(ps.errors.ArgumentError, match="tied names stage 4; there are 3 stages"):
        ps.simulate(ps.lower(ps.schedule("gpipe", 3, 1)), costs)
    with pytest.raises(CostsError, match="not of the 10 stages of the placement; leave it out"):
        replace(costs, forward=(1,) * 5).in_chunks(ps.Placement.looped(5, 2))
