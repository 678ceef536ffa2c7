"""Stages that are a graph: `Placement(edges=)`, such as encoders that feed a language model.

The numbers of the rules are those of docs/time.md. Random graphs of such placements are in the
strategies that other tests share.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid
from rules import dependencies

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError, DeadlockError, ScheduleError
from pipesim.ops import SENDS

#: Two encoders, each of one stage, and a language model of two stages.
TWO_ENCODERS = ps.Placement([0, 1, 2, 3], edges=[(0, 2), (1, 2), (2, 3)])


def lowered(orders: list[str], placement: ps.Placement, **options: Any) -> ps.TaskGraph:
    """Return the graph of orders of devices, without optimizer steps."""
    schedule = ps.Schedule.from_orders([x.split() for x in orders], placement=placement)
    return ps.lower(schedule, **{"step": "none", **options})


def two_encoders(**options: Any) -> ps.TaskGraph:
    """Two micro-batches: both encoders run ahead, and 1F1B after them."""
    return lowered(
        ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1"],
        TWO_ENCODERS,
        **options,
    )


def test_a_stage_waits_for_all_stages_before_it() -> None:
    """Rule 3: 2F needs the messages of 0 and 1, which is slower; their B need one of 2 alone."""
    costs = ps.Costs(forward=(1, 2, 1, 1), backward=(1, 2, 1, 1))
    assert draw(ps.simulate(two_encoders(), costs), transfers=False) == grid("""
        0 | F0 F1 .. .. .. .. B0 .. B1 ..
        1 | F0 F0 F1 F1 .. .. B0 B0 B1 B1
        2 | .. .. F0 .. F1 B0 .. B1 .. ..
        3 | .. .. .. F0 B0 F1 B1 .. .. ..
    """)


def test_messages_of_edges_have_the_bytes_of_outputs() -> None:
    """Rule 4: each on the channel of its devices; 0 to 2 has bytes of its own."""
    costs = ps.Costs(
        forward=1, backward=1, output_bytes=(1, 2, 0, 9), skip_bytes={(0, 2): 3},
        network=ps.Network(bandwidth=1),
    )  # fmt: skip
    timeline = ps.simulate(two_encoders(), costs)
    sent = timeline.graph.is_op(SENDS) & (timeline.graph.microbatch == 0)
    sizes = {str(timeline.graph.task(k)): timeline.nbytes[k] for k in np.flatnonzero(sent)}
    assert sizes == {
        "0SEND_F0>2": 3, "1SEND_F0": 2, "2SEND_F0": 0, "3SEND_B0": 0, "2SEND_B0": 2,
        "2SEND_B0>0": 3,
    }  # fmt: skip
    assert draw(timeline, rows="^[012]$|^[01] send:2$") == grid("""
        0        | F0 F1 .. .. .. .. .. .. .. .. .. .. B0 .. .. B1
        0 send:2 | .. F0 F0 F0 F1 F1 F1 .. .. .. .. .. .. .. .. ..
        1        | F0 F1 .. .. .. .. .. .. .. .. .. B0 .. B1 .. ..
        1 send:2 | .. F0 F0 F1 F1 .. .. .. .. .. .. .. .. .. .. ..
        2        | .. .. .. .. F0 .. .. F1 B0 .. B1 .. .. .. .. ..
    """)


def test_an_edge_on_one_device_needs_the_stage_itself() -> None:
    """Without a message; an order that has them the wrong way round deadlocks."""
    placement = ps.Placement([0, 1, 0], edges=[(0, 2), (1, 2)])
    right, wrong = "0F0 2F0 2B0 0B0", "2F0 0F0 2B0 0B0"
    graph = lowered([right, "1F0 1B0"], placement)
    needs = {str(graph.task(k)): {str(graph.task(i)) for i in graph.dependencies[k]}
             for k in range(len(graph))}  # fmt: skip
    assert needs["2F0"] == {"0F0", "2RECV_F0"}
    assert needs["0B0"] == {"0F0", "2B0"}
    with pytest.raises(DeadlockError, match=r"2F0 .* waits for 0F0 on device 0"):
        lowered([wrong, "1F0 1B0"], placement)


def test_a_stage_that_feeds_none_computes_a_loss() -> None:
    """A side head: its B needs its own F alone, and stage 0 the gradients of both."""
    graph = lowered(
        ["0F0 0B0", "1F0 1B0", "2F0 2B0"], ps.Placement([0, 1, 2], edges=[(0, 1), (0, 2)])
    )
    assert draw(
        ps.simulate(graph, ps.Costs(forward=1, backward=(1, 3, 1))), transfers=False
    ) == grid(
        """
        0 | F0 .. .. .. .. B0
        1 | .. F0 B0 B0 B0 ..
        2 | .. F0 B0 .. .. ..
        """
    )


def test_colocated_modules() -> None:
    """An encoder of two stages on the devices of the language model, before its forwards."""
    placement = ps.Placement.from_modules(
        {"vision": [0, 1], "language": [0, 1]}, {"vision": "language"}
    )
    assert placement == ps.Placement([0, 1, 0, 1])  # which is a chain
    both = ps.Placement.from_modules(
        {"vision": [0], "audio": [1], "language": [0, 1]},
        {"vision": ["language"], "audio": "language"},
    )
    assert both == ps.Placement([0, 1, 0, 1], edges=[(0, 2), (1, 2), (2, 3)])
    schedule = ps.order_by(both, 2, split_backward=False)
    assert schedule.grid() == grid("""
        device 0 | 0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1
        device 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """)


def test_replicas_of_an_encoder() -> None:
    """Each runs its half of the micro-batches, which the language model takes in turn.

    Their reduction of a second waits for the backwards of both.
    """
    replicated = ps.Placement.from_modules(
        {"vision": [[0], [1]], "language": [2]}, {"vision": "language"}
    )
    costs = ps.Costs(forward=(2, 1), backward=(2, 1), reduce_grad=1, optimizer_step=1)
    graph = ps.lower(ps.order_by(replicated, 4, costs, split_backward=False))
    for engine in ("simpy", "compiled"):
        timeline = ps.simulate(graph, costs, engine=engine)
        assert draw(timeline, transfers=False) == grid("""
            0 | F0 F0 F1 F1 B0 B0 .. .. B1 B1 .. .. .. ST
            1 | F2 F2 F3 F3 .. .. B2 B2 .. .. B3 B3 .. ST
            2 | .. .. F0 B0 F2 B2 F1 B1 F3 B3 ST .. .. ..
        """)
        assert timeline.why.idle_by_cause().sum(axis=1).tolist() == [5, 5, 5]


def test_replicas_share_an_encoder() -> None:
    """It serves both in turn, so that the second starts a second later, not two."""
    shared = ps.Placement.from_modules(
        {"vision": [0], "language": [[1], [2]]}, {"vision": "language"}
    )
    costs = ps.Costs(forward=(1, 2), backward=(1, 2))
    graph = ps.lower(ps.order_by(shared, 4, costs, split_backward=False), step="none")
    assert draw(ps.simulate(graph, costs), transfers=False) == grid("""
        0 | F0 F2 F1 F3 .. B0 B2 .. .. B1 B3
        1 | .. F0 F0 B0 B0 F1 F1 B1 B1 .. ..
        2 | .. .. F2 F2 B2 B2 F3 F3 B3 B3 ..
    """)


@pytest.mark.parametrize("m", [12, 17, 31])
def test_micro_batches_of_replicas(m: int) -> None:
    """Replicas of each module take equal shares in order, or one more, whatever the others do."""
    counts, sizes = {"vision": 4, "audio": 3, "language": 2}, (1, 1, 2)
    device, modules = iter(range(99)), {}
    for (name, count), size in zip(counts.items(), sizes, strict=True):
        modules[name] = [[next(device) for _ in range(size)] for _ in range(count)]
    placement = ps.Placement.from_modules(modules, {"vision": "language", "audio": "language"})
    assert placement.n_paths == 12
    paths = np.array(placement.paths)[placement.path_of(m)]
    for stage, (name, count) in enumerate(counts.items()):
        own = [modules[name][i * count // m][0] for i in range(m)]
        assert paths[:, stage].tolist() == own


def test_an_encoder_with_batches_of_two_micro_batches() -> None:
    """F of the first of two has the seconds of both, and B of the second, which both wait for.

    The bytes of both are with the second, whose B frees them.
    """
    vision = ps.Costs(forward=[[2, 0] * 2], backward=[[0, 2] * 2], activation_bytes=[[0, 2] * 2])
    language = ps.Costs(forward=1, backward=1)
    costs = ps.Costs.concatenate({"vision": (vision, 1), "language": (language, 2)})
    schedule = ps.order_by(
        ps.Placement.linear(3), 4, costs, priority="forward_first", in_flight=[4, 2, 1],
        split_backward=False,
    )  # fmt: skip
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    assert draw(timeline, transfers=False) == grid("""
        0 | F0 F0 F2 F2 .. .. .. .. B1 B1 .. .. B3 B3
        1 | .. .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 .. ..
        2 | .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. ..
    """)
    late = ["0F0 0F1 0B0 0F2 0F3 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1F3 1B2 1B3"]
    assert ps.simulate(lowered(late, ps.Placement.linear(2)), vision).memory.peak[0] == 4


def test_a_chain_is_as_before() -> None:
    """Edges of a chain are no edges: equal, of one hash, with the same text."""
    chain = ps.Placement([0, 1, 1, 0], edges=[(2, 3), (0, 1), (1, 2)])
    assert chain == ps.Placement([0, 1, 1, 0]) == ps.Placement([0, 1, 1, 0], edges=chain.edges)
    assert hash(chain) == hash(ps.Placement([0, 1, 1, 0]))
    assert repr(chain) == "Placement(paths=((0, 1, 1, 0),))"
    assert ps.Placement.linear(4) != TWO_ENCODERS
    assert "edges=((0, 2), (1, 2), (2, 3))" in repr(TWO_ENCODERS)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 1), (2, 1)], r"edge \(2, 1\) does not lead from a stage to a later one of 0\.\.2"),
        ([(0, 1), (1, 1)], r"edge \(1, 1\) does not lead .* no cycle"),
        ([(0, 1), (1, 3)], r"edge \(1, 3\) does not lead"),
        ([(0, 1)], r"stage 2 has no edge: .* such as \(1, 2\)"),
        ([(1, 2)], r"stage 0 has no edge: .* such as \(0, 1\)"),
        ([(0, 1), (0, 1), (1, 2)], r"edge \(0, 1\) is given twice"),
        ([(0, 1, 2)], r"\(0, 1, 2\) is no edge; give pairs"),
        ([(0, 1.5)], "edges: a stage must be a whole number"),
        ("0-1", "edges must be pairs of stages"),
    ],
)
def test_bad_edges(edges: Any, message: str) -> None:
    """Cycles, unknown stages and stages alone are named."""
    with pytest.raises(ArgumentError, match=message):
        ps.Placement([0, 1, 2], edges=edges)


def test_bad_modules() -> None:
    """Unknown names, an order that is none, a module without stages."""
    modules = {"vision": [0], "language": [1, 2]}
    with pytest.raises(ArgumentError, match=r"unknown module fed by 'vision' 'langauge'.*language"):
        ps.Placement.from_modules(modules, {"vision": "langauge"})
    with pytest.raises(
        ArgumentError, match="feeds: 'language' feeds 'vision', which comes no later"
    ):
        ps.Placement.from_modules(modules, {"language": "vision"})
    with pytest.raises(
        ArgumentError, match="modules: 'vision' must be a sequence of device numbers"
    ):
        ps.Placement.from_modules({**modules, "vision": []}, {"vision": "language"})
    for vision, message in (
        ([[0], 3], "or one such sequence for each replica, got"),
        ([[0, 3], [4]], "'vision' has replicas of 1 and of 2 stages; give"),
        ([[0], [3], [0]], "replicas 0 and 2 of 'vision' have their stage 0 on device 0"),
        ([["0"], [3]], "modules: a device of 'vision' must be a whole number"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ps.Placement.from_modules({**modules, "vision": vision}, {"vision": "language"})
    with pytest.raises(ArgumentError, match="stage 0 has no edge"):
        ps.Placement.from_modules(modules, {})
    with pytest.raises(ArgumentError, match="feeds: none of 2 modules feeds another; give"):
        ps.Placement.from_modules({"vision": [0], "language": [1]}, {})


def test_files_keep_edges(tmp_path: Path) -> None:
    """A timeline's file has them; files of schedules refuse them."""
    graph = two_encoders()
    timeline = ps.simulate(graph, ps.Costs(forward=1, backward=1))
    timeline.save(tmp_path / "step.csv")
    read = ps.Timeline.load(tmp_path / "step.csv").graph
    assert read.edges == graph.edges == TWO_ENCODERS.edges
    assert read.skips == graph.skips == ((0, 2),)
    assert dependencies(read) == [
        set(row) for row in map(read.dependencies.__getitem__, range(len(read)))
    ]
    assert graph.options.source is not None
    with pytest.raises(ScheduleError, match="the stages of schedule 'custom' have edges"):
        graph.options.source.schedule.save(tmp_path / "orders.csv")
    with pytest.raises(ArgumentError, match="to the next stage alone; lower a schedule of a chain"):
        graph.save_torch_csv(tmp_path / "torch.csv")


def test_what_needs_a_chain_says_so() -> None:
    """Skips are edges; sharded stages, tied bytes without stages and searches take a chain."""
    for options in ({"skips": [(0, 2)]}, {"portals": False}):
        with pytest.raises(ArgumentError, match=r"add a pair of stages to Placement\(edges=\)"):
            two_encoders(**options)
    with pytest.raises(ArgumentError, match="sharded embeddings are simulated in a chain"):
        two_encoders(sharded=[0], n_replicas=2)
    costs = ps.Costs(forward=1, backward=1, tied_bytes=1)
    with pytest.raises(CostsError, match="tied_bytes are of the first and the last stage"):
        ps.simulate(two_encoders(step="flush"), costs)
    with pytest.raises(ArgumentError, match=r"takes stages that are a chain.*ps.order_by"):
        ps.optimize(TWO_ENCODERS, 2, costs, progress=False)


def test_memory_counts_the_inputs_of_all_edges() -> None:
    """Rule 10: a recomputed F keeps what arrives on each edge, but not the caller's input."""
    costs = ps.Costs(
        forward=1, backward=1, recompute=1, activation_bytes=100, output_bytes=(1, 2, 4, 8)
    )
    memory = ps.simulate(two_encoders(recompute="always"), costs).memory
    assert memory.peak.tolist() == [100, 100, 100 + 3, 100]  # stage 3 has one in flight


def test_costs_of_modules_are_joined() -> None:
    """Stage after stage, numbers and rows of micro-batches; a setting of one is that of all."""
    network = ps.Network(bandwidth=8)
    vision = ps.Costs(forward=1, backward=2, output_bytes=[[4, 0]], skip_bytes={(0, 1): 5})
    language = ps.Costs(
        forward=(3, 4), backward=6, launch=0.1, network=network, all_reduce="tree",
        skip_bytes={(0, 1): 6},
    )  # fmt: skip
    costs = ps.Costs.concatenate({"vision": (vision, 2), "language": (language, 2)})
    assert costs.forward == (1, 1, 3, 4)
    assert costs.output_bytes == ((4, 0), (4, 0), (0, 0), (0, 0))
    assert costs.launch == (0, 0, 0.1, 0.1)
    assert costs.skip_sizes == (((0, 1), 5), ((2, 3), 6))
    assert (costs.network, costs.all_reduce) == (network, "tree")
    for changed, message in (
        ({"network": ps.Network(bandwidth=9)}, "costs of 'vision' and 'language' .* network= to"),
        ({"recompute": 1}, "recompute is missing in the costs of 'language', whose"),
        ({"input_grad": 1, "weight_grad": 1}, "input_grad is missing in the costs of 'language'"),
        ({"forward": (1, 2, 3)}, "forward has 3 values in the costs of 'vision', which has 2"),
    ):
        own = replace(language, forward=[[3, 4]]) if "recompute" in changed else language
        with pytest.raises(CostsError, match=message):
            ps.Costs.concatenate({"vision": (replace(vision, **changed), 2), "language": (own, 2)})
