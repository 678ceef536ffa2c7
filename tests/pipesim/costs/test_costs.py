"""Costs: values a stage, defaults, the costs of each task, files, and what is refused."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases, costs, skipping_cases

import pipesim as ps
from pipesim.costs.costs import replace_stages
from pipesim.costs.rows import COMPUTED, STAGE_ROWS
from pipesim.errors import CostsError, CostsWarning, PipeError, UnknownNameError
from pipesim.ops import COLLECTIVES, COMPUTE, COPIES, SENDS, TRANSFERS, Op


def test_one_value_or_one_a_stage() -> None:
    """Scalars, tuples, lists and arrays, of any real type."""
    given_values = [2, 2.0, (2, 2), [2, 2.0], np.array([2, 2]), np.float32(2), np.int64(2)]
    for value in given_values:
        got = ps.Costs(forward=value, backward=1).per_stage("forward", 2)
        assert got.tolist() == [2.0, 2.0]
        assert got.dtype == np.float64


def test_defaults() -> None:
    """R takes as long as F, and B as long as I and W together, unless they are given."""
    prices = ps.Costs(forward=(1, 2), input_grad=3, weight_grad=(4, 5))
    assert prices.per_stage("recompute", 2).tolist() == [1, 2]
    assert prices.per_stage("backward", 2).tolist() == [7, 8]
    full = ps.Costs(forward=1, backward=2, input_grad=3, weight_grad=4, recompute=5)
    assert full.per_stage("recompute", 1).tolist() == [5]
    assert full.per_stage("backward", 1).tolist() == [2]
    assert full.per_stage("optimizer_step", 1).tolist() == [0]


def test_costs_of_tasks_by_hand() -> None:
    """Each operation has its own field, of its own stage; messages have their network's."""
    orders = [["0F0", "0F1", "0B0", "0I1", "0W1"], ["1F0", "1F1", "1I0", "1B1", "1W0"]]
    graph = ps.lower(ps.Schedule.from_orders(orders), recompute="except_last")
    prices = ps.Costs(
        forward=(1, 2),
        backward=(3, 4),
        input_grad=(5, 6),
        weight_grad=(7, 8),
        recompute=(9, 10),
        optimizer_step=(11, 12),
        launch=(13, 14),
        output_bytes=(20, 999),
        network=ps.Network(latency=15, bandwidth=10),
    )
    got = prices.of(graph)
    table = {
        str(graph.task(t)): (got.duration[t], got.latency[t], got.launch[t], got.nbytes[t])
        for t in range(len(graph))
    }
    assert table["0F1"] == (1, 0, 13, 0)
    assert table["1F1"] == (2, 0, 14, 0)
    assert table["0B0"] == (3, 0, 13, 0)
    assert table["1B1"] == (4, 0, 14, 0)
    assert table["0I1"] == (5, 0, 13, 0)
    assert table["1I0"] == (6, 0, 14, 0)
    assert table["0W1"] == (7, 0, 13, 0)
    assert table["1W0"] == (8, 0, 14, 0)
    assert table["0R0"] == (9, 0, 13, 0)
    assert table["1R0"] == (10, 0, 14, 0)
    assert table["0STEP"] == (11, 0, 13, 0)
    assert table["1STEP"] == (12, 0, 14, 0)
    # The gradient of stage 1's input is as large as stage 0's output, 20 bytes.
    assert table["0SEND_F1"] == (2, 15, 13, 20)
    assert table["1SEND_B1"] == (2, 15, 14, 20)
    assert table["1RECV_F1"] == (0, 15, 14, 20)
    assert table["0RECV_B1"] == (0, 15, 13, 20)
    assert got.costs is prices


@pytest.mark.slow
@given(cases())
def test_task_costs_suit_the_graph(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """One finite value a task; links are those of messages, reductions and copies."""
    graph, prices = case
    got = prices.of(graph)
    for column in (got.duration, got.latency, got.launch, got.nbytes):
        assert column.shape == (len(graph),)
        assert (np.isfinite(column) & (column >= 0)).all()
    transfers = graph.is_op(TRANSFERS)
    assert (got.links[~graph.is_op(SENDS | COLLECTIVES | COPIES)] == -1).all()
    assert (got.latency[~transfers] == 0).all()
    ends = np.flatnonzero(transfers)
    for column in (got.latency, got.nbytes):
        assert (column[ends] == column[graph.pair[ends]]).all()
    # What takes no time holds nothing; a link of endless bandwidth is not held by seconds either.
    held = graph.is_op(SENDS) & (replace(prices, output_seconds=0.0).of(graph).duration > 0)
    assert (got.links[held] >= 0).any(axis=1).all()


def test_every_operation_has_a_duration() -> None:
    """A field, or the network; an operation without either would silently take no time."""
    of_network = TRANSFERS | COLLECTIVES | COPIES
    assert {op for op, _ in COMPUTED} == COMPUTE - {Op.RESHARD}, "which takes no time"
    assert {op for op, _ in COMPUTED} | of_network | {Op.RESHARD} == set(Op)


def test_algorithm_of_reductions(tmp_path: Path) -> None:
    """Of 4 replicas: a ring takes 2 * 3/4 * 8 + 2 * 3 = 18 s, a tree 2 * 8 + 2 * 2 = 20 s."""
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=4)
    reduces = graph.op == Op.REDUCE_GRAD
    ring = ps.Costs(1, 1, parameter_bytes=8, network=ps.Network(latency=1, bandwidth=1))
    tree = replace(ring, all_reduce="tree")
    assert set(ring.of(graph).duration[reduces]) == {18}
    assert set(tree.of(graph).duration[reduces]) == {20}
    assert (tree.of(graph).links[reduces] >= 0).sum() == 2 * 5, "five edges, up and down"
    tree.save(tmp_path / "costs.json")
    assert ps.Costs.load(tmp_path / "costs.json") == tree
    assert ps.Costs.from_timeline(ps.simulate(graph, tree)).all_reduce == "tree"
    with pytest.raises(UnknownNameError, match="unknown all-reduce 'tre'; did you mean 'tree'"):
        ps.Costs(1, 1, all_reduce="tre")


#: None stands for what follows from others, and for what is not measured.
REQUIRED = sorted(k for k, row in STAGE_ROWS.items() if row.default is not None or k == "forward")


#: What no field of costs takes.
BAD_VALUES = [
    *(float("nan"), math.inf, -math.inf, -1e-9, "1 cow", True, np.False_, 1j, Decimal(1), {"0": 1}),
    *({1.0}, [{1.0}], 10**400),
]


@pytest.mark.parametrize("name", STAGE_ROWS)
def test_bad_value(name: str) -> None:
    """Field and value are named, and what is allowed; nothing else is raised."""
    unit = STAGE_ROWS[name].unit
    for value in BAD_VALUES:
        values = {"forward": 1.0, "backward": 1.0, name: value}
        with pytest.raises(
            CostsError, match=f"{name}( of stage 0)? must be finite {unit} >= 0, got "
        ):
            ps.Costs(**values)


@pytest.mark.parametrize("value", [float("nan"), math.inf, -1, None, "1", False])
def test_bad_value_of_a_stage(value: Any) -> None:
    """The stage is named too."""
    with pytest.raises(CostsError, match="backward of stage 2 must be finite seconds >= 0, got"):
        ps.Costs(forward=1, backward=(1, 1, value))


@pytest.mark.parametrize("name", REQUIRED)
def test_none(name: str) -> None:
    """None stands for a default in some fields, and is wrong in the others."""
    values = {"forward": 1.0, "backward": 1.0, name: None}
    with pytest.raises(CostsError, match=rf"{name} (is missing; give|must be finite .*got None)"):
        ps.Costs(**values)


def test_empty_and_missing() -> None:
    """No values at all."""
    with pytest.raises(CostsError, match="backward is empty; give one value, or one a stage"):
        ps.Costs(forward=1, backward=[])  # type: ignore[arg-type]
    with pytest.raises(CostsError, match="forward is missing; give the seconds of F"):
        ps.Costs()


def test_wrong_length() -> None:
    """The field, its length, and the number of stages; of a half of the backward as well."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2))
    with pytest.raises(CostsError, match="forward has 3 values for 2 stages; give one, or one a"):
        ps.Costs((1, 2, 3), 1).of(graph)
    with pytest.raises(CostsError, match="output_bytes has 1 values for 2 stages"):
        ps.Costs(1, 1, output_bytes=(5,)).of(graph)
    with pytest.raises(CostsError, match="input_grad has 3 values for 2 stages"):
        ps.Costs(1, input_grad=(1, 2, 3), weight_grad=1).of(graph)


def test_missing_for_the_graph() -> None:
    """Only what the graph has need of must be given."""
    whole = ps.lower(ps.schedule("gpipe", 1, 1))
    split = ps.lower(ps.Schedule.from_orders([["0F0", "0I0", "0W0"]]))
    with pytest.raises(CostsError, match="backward is missing, and so is input_grad or weight_gr"):
        ps.Costs(forward=1, input_grad=1).of(whole)
    with pytest.raises(CostsError, match="input_grad is missing, but the graph has tasks that nee"):
        ps.Costs(forward=1, backward=1).of(split)
    ps.Costs(forward=1, backward=1).of(whole)
    ps.Costs(forward=1, input_grad=1, weight_grad=1).of(split)


def test_network_is_a_network() -> None:
    """A table is read by `from_dict`, not here."""
    with pytest.raises(CostsError, match=r"network must be a pipesim\.Network, got None"):
        ps.Costs(1, 1, network=None)  # type: ignore[arg-type]


def test_unknown_field() -> None:
    """In a call or in a file; the error names the nearest known one."""
    with pytest.raises(UnknownNameError, match="unknown cost 'foward'; did you mean 'forward'"):
        ps.Costs(1, 1).per_stage("foward", 2)
    with pytest.raises(UnknownNameError, match="unknown cost 'foward'; did you mean 'forward'"):
        ps.Costs.from_dict({"foward": 1})


@pytest.mark.slow
@given(st.data())
def test_file_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """JSON keeps every bit: endless bandwidth, bytes of skips and exchanges, and buckets too."""
    _, prices = data.draw(
        st.one_of(st.tuples(st.none(), costs(3, 3)), skipping_cases(), cases(grad_sync="bucketed"))
    )
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    prices.save(path)
    assert ps.Costs.load(path) == prices
    assert ps.Costs.from_dict(prices.to_dict()) == prices
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read costs from"),
        ('{"forward": 1, "back', "cannot read costs from"),
        ("[1, 2]", "holds no costs, but list"),
        ("null", "holds no costs, but NoneType"),
        ('{"backward": 1}', "forward is missing"),
        ('{"forward": "1"}', "forward must be finite"),
        ('{"forward": NaN}', "forward must be finite"),
        ('{"forward": null}', "forward is missing"),
        ('{"forward": 1, "frward": 1}', "unknown cost 'frward'; did you mean 'forward'"),
        ('{"forward": 1, "network": null}', "network must be a table"),
        ('{"forward": 1, "network": 3}', "network must be a table"),
        ('{"forward": 1, "network": {"latncy": 1}}', "network has no 'latncy'"),
        ('{"forward": 1, "network": {"latency": "1"}}', "latency must be finite"),
        ('{"forward": 1, "network": {"links": 3}}', "links must be"),
        ('{"forward": 1, "network": {"links": [3]}}', "links must be"),
        ('{"forward": 1, "network": {"links": [{"latency": 1}]}}', "names no pairs"),
        ('{"forward": 1, "network": {"links": [{"pairs": [[0]]}]}}', "pairs must be"),
    ],
)
def test_edited_file(tmp_path: Path, text: str, message: str) -> None:
    """Whatever a file holds, what is raised is ours."""
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(PipeError, match=message):
        ps.Costs.load(path)


def test_missing_file(tmp_path: Path) -> None:
    """The path is named."""
    with pytest.raises(CostsError, match=r"cannot read costs from .*nowhere\.json"):
        ps.Costs.load(tmp_path / "nowhere.json")


def test_costs_of_devices_in_chunks() -> None:
    """What a device takes is shared by its stages; messages and launches stay as they are."""
    costs = ps.Costs(forward=(4, 6), backward=8, output_bytes=3, launch=1, parameter_bytes=(2, 4))
    chunks = costs.in_chunks(ps.Placement.v_shaped(2))
    assert chunks.forward == (2, 3, 3, 2)
    assert chunks.backward == (4, 4, 4, 4)
    assert chunks.parameter_bytes == (1, 2, 2, 1)
    assert (chunks.output_bytes, chunks.launch, chunks.input_grad) == (3, 1, None)
    assert costs.in_chunks(ps.Placement.linear(2)).per_stage("forward", 2).tolist() == [4, 6]
    with pytest.raises(CostsError, match="forward has 2 values for 3 devices"):
        costs.in_chunks(ps.Placement.linear(3))


def test_slow_layers_are_cut_in_their_order() -> None:
    """The third quarter of a model is stages 4 and 5, whatever devices have them."""
    costs = ps.Costs(forward=(1, 1, 3, 1), backward=2, output_bytes=(5, 6, 7, 8), launch=1)
    chunks = costs.in_chunks(ps.Placement.looped(4, 2), per="layers")
    assert chunks.forward == (0.5, 0.5, 0.5, 0.5, 1.5, 1.5, 0.5, 0.5)
    assert chunks.backward == (1,) * 8
    assert chunks.output_bytes == (5, 5, 6, 6, 7, 7, 8, 8)
    assert chunks.launch == 1
    assert costs.in_chunks(ps.Placement.v_shaped(4), per="layers").forward == chunks.forward
    rows = ps.Costs(forward=[[1, 2], [3, 4]], backward=1)
    assert rows.in_chunks(ps.Placement.v_shaped(2), per="layers").forward == (
        (0.5, 1), (0.5, 1), (1.5, 2), (1.5, 2),
    )  # fmt: skip
    with pytest.raises(CostsError, match="cuts 2 parts of the model into 3 stages"):
        ps.Costs((1, 2), 2).in_chunks(ps.Placement([0, 1, 0]), per="layers")
    with pytest.raises(UnknownNameError, match="unknown per 'layer'"):
        costs.in_chunks(ps.Placement.v_shaped(4), per="layer")  # type: ignore[arg-type]


def test_a_stage_of_two_devices_has_no_cost_of_a_slow_one() -> None:
    graph = ps.lower(ps.schedule("chimera", 4, 8))
    placement = ps.Placement.bidirectional(4)
    uneven = ps.Costs((2, 2, 3, 2), 4)
    with pytest.raises(CostsError, match=r"forward differs .* pipesim.Noise\(slow_devices="):
        uneven.in_chunks(placement)
    assert uneven.in_chunks(placement, per="layers").forward == (2, 2, 3, 2)

    costs = ps.Costs((3, 2, 2, 3), (6, 4, 4, 6)).in_chunks(placement, per="device")
    noise = ps.Noise(slow_devices={0: 1.5, 3: 1.5})
    slow = ps.simulate(graph, ps.Costs(2, 4), noise=noise)
    assert ps.simulate(graph, costs).makespan == slow.makespan


def test_slow_devices_are_told_from_slow_layers() -> None:
    """Once, and only where it matters: several stages a device whose seconds differ."""
    uneven, match = ps.Costs((1, 1, 3, 1), 2), "if layers of the model are slow, give per='layers'"
    with pytest.warns(CostsWarning, match=match) as caught:
        uneven.in_chunks(ps.Placement.v_shaped(4))
    assert [w.filename for w in caught] == [__file__]
    with pytest.warns(CostsWarning, match=match) as caught:
        ps.Costs([[1, 2], [3, 4]], 2).in_chunks(ps.Placement.v_shaped(2))
    assert len(caught) == 1
    grid = {"schedule": ["zbv", "interleaved_1f1b"], "n_microbatches": [4, 8]}
    base = {"n_devices": 4, "forward": [1, 1, 3, 1], "input_grad": 1, "weight_grad": 1}
    with pytest.warns(CostsWarning, match=match) as caught:
        ps.sweep(grid, base={**base, "per": "device"}, n_jobs=1, progress=False)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uneven.in_chunks(ps.Placement.linear(4))
        uneven.in_chunks(ps.Placement.v_shaped(4), per="device")
        ps.Costs(1, 2, activation_bytes=(1, 2, 3, 4)).in_chunks(ps.Placement.v_shaped(4))
        table = ps.sweep(grid, base={**base, "per": "layers"}, n_jobs=1, progress=False)
    costs = ps.Costs((1, 1, 3, 1), input_grad=1, weight_grad=1)
    graph = ps.lower(ps.schedule("interleaved_1f1b", 4, 8))
    expected = ps.simulate(graph, costs.in_chunks(ps.Placement.looped(4, 2), per="layers")).makespan
    assert table["makespan"].iloc[-1] == expected


def test_launches_of_operations() -> None:
    """In place of those of the stage; "messages" are four operations."""
    graph = ps.lower(ps.schedule("gpipe", 2, 1))
    costs = ps.Costs(1, 2, launch=(1, 3), launch_by_op={"messages": 0, ps.Op.STEP: 5})
    tasks = costs.of(graph)
    actual = {str(task): tasks.launch[task.id] for task in graph}
    assert actual == {
        "0F0": 1, "0SEND_F0": 0, "1RECV_F0": 0, "1F0": 3, "1B0": 3, "1SEND_B0": 0, "0RECV_B0": 0,
        "0B0": 1, "0STEP": 5, "1STEP": 5,
    }  # fmt: skip
    seconds = {"SEND_F": 0, "RECV_F": 0, "SEND_B": 0, "RECV_B": 0, "STEP": 5}
    assert replace(costs, launch_by_op=seconds) == costs
    assert replace(costs, launch_by_op={}).launch_by_op is None
    timeline = ps.simulate(graph, costs)
    assert timeline.issue_times.tolist() == np.cumsum(tasks.launch).tolist()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, 'launch_by_op must map operations, or "messages", to the seconds'),
        ({"message": 0}, "operation of launch_by_op 'message'; did you mean 'messages'"),
        ({"F": -1}, "launch_by_op of F must be finite seconds >= 0, got -1"),
        ({"SEND_F": 1, "messages": 0}, "launch_by_op gives SEND_F twice"),
    ],
)
def test_wrong_launches_of_operations(value: Any, message: str) -> None:
    with pytest.raises(PipeError, match=message):
        ps.Costs(1, 2, launch_by_op=value)


def test_costs_in_one_line_and_as_a_table() -> None:
    """Ranges over stages, in fitting units; nothing that is not given."""
    costs = ps.Costs((1e-3, 2e-3), backward=(4e-3, 4e-3), activation_bytes=(1 << 20, 1 << 30))
    text = "<Costs of 2 stages: F 1.00 to 2.00 ms, B 4.00 ms, activations 1.00 MiB to 1.00 GiB>"
    assert repr(costs) == text
    assert repr(ps.Costs(1)) == "<Costs of any number of stages: F 1.00 s>"
    html = costs._repr_html_()
    assert html.count("<tr>") == 3
    assert "stage 1" in html
    assert "2.00 ms" in html
    assert "parameter" not in html
    assert "each stage" in ps.Costs(1, 2)._repr_html_()
    wide = ps.Costs([1e-3] * 512, [2e-3] * 512)
    assert len(repr(wide)) < 100
    assert "stages 64 to 511" in wide._repr_html_()


def test_equal_costs_have_equal_pickles_after_a_simulation() -> None:
    """Values that a simulation keeps are in no pickle: a cache on disk finds equal costs."""
    network = ps.Network(bandwidth=1.0)
    fresh, simulated = (
        ps.Costs(forward=1.0, backward=2.0, output_bytes=3.0, network=network)
        for network in (network, replace(network))
    )
    graph = ps.lower(ps.schedule("1f1b", 4, 8))
    kinds = ps.lower(ps.schedule("1f1b", 4, 8)).kinds.joined()  # not in a cache
    sizes = len(pickle.dumps(simulated)), len(pickle.dumps(kinds))
    makespan = ps.simulate(graph, simulated).makespan
    assert kinds == graph.kinds
    assert (kinds.homes == graph.homes).all()
    assert kinds.streams[0] == graph.streams
    assert (len(pickle.dumps(simulated)), len(pickle.dumps(kinds))) == sizes
    assert joblib.hash(simulated) == joblib.hash(fresh)
    loaded = pickle.loads(pickle.dumps(simulated))  # noqa: S301
    assert loaded == simulated
    assert ps.simulate(graph, loaded).makespan == makespan
    assert pickle.loads(pickle.dumps(kinds)) == kinds  # noqa: S301


def test_replaced_values_of_stages_are_those_of_replace() -> None:
    """All fields, errors and columns are equal to those of `dataclasses.replace`."""
    before = ps.Costs(forward=(1.0, 2.0), backward=(3.0, 4.0), launch=0.5, all_reduce="tree")
    before.per_stage("launch", 2), before.per_stage("forward", 2)
    rows = [(5.0, 6.0), (7.0, 8.0), (0.0, 9.0)]
    names, columns = ("forward", "backward"), tuple(zip(*rows, strict=True))
    changed = replace_stages(before, names, rows)
    wanted = replace(before, forward=columns[0], backward=columns[1])
    assert changed == wanted
    assert joblib.hash(changed) == joblib.hash(wanted)
    for name in ("forward", "backward", "launch", "recompute"):
        assert (changed.per_stage(name, 3) == wanted.per_stage(name, 3)).all()
    assert before.per_stage("forward", 2).tolist() == [1.0, 2.0]
    for value in (-1.0, math.inf, math.nan):
        with pytest.raises(CostsError, match="backward of stage 1 must be finite"):
            replace_stages(before, names, [rows[0], (7.0, value)])
