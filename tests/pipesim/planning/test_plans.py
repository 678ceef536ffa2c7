"""Tables, front, texts and files of `Plans`, from evaluations made by hand."""

from __future__ import annotations

import math
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from html_cells import cells_of, tables_of
from hypothesis import given
from hypothesis import strategies as st
from small_plans import CHOICE, GPIPE, SPLIT, choice_of, evaluation, plans, problem

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.planning.choice import Evaluation, PlanChoice
from pipesim.planning.plan_tables import short_names
from pipesim.planning.plans import Plan, Plans

NAN = float("nan")


def test_the_table_has_the_ranked_configurations() -> None:
    """Units: s, tokens of the cluster a second, shares, bytes; 16 sequences of 2048 tokens."""
    table = plans().table
    assert table.index.name == "rank"
    assert table["step"].tolist() == [1.0, 1.5, 2.0]
    assert table["tokens_per_second"].tolist() == [32768.0, 32768 / 1.5, 16384.0]
    assert table["gap"].tolist() == pytest.approx([0.25, 1.0, 1.0])
    assert table["memory"].tolist() == [6e9, 7e9, 3e9]
    assert table["schedule"].tolist() == ["1f1b", "gpipe", "1f1b"]
    assert table["layers_per_stage"].tolist() == [(4, 4), (4, 4), (3, 2, 2, 1)]
    assert set(table["status"]) == {"simulated"}
    assert "noisy_step" not in table


def test_figures_are_those_of_the_simulated_step() -> None:
    """Tokens a second and MFU follow from the step as `Timeline` computes them."""
    plan = Plan(problem(), evaluation(CHOICE, NAN, NAN))
    timeline = plan.timeline
    row = Plans(problem(), (evaluation(CHOICE, timeline.makespan, 1.0),)).table.iloc[0]
    assert row["tokens_per_second"] == pytest.approx(timeline.tokens_per_second)
    assert row["mfu"] == pytest.approx(timeline.mfu())
    assert plan.step == timeline.makespan
    assert plan.timeline is timeline
    assert plan.graph is timeline.graph
    assert plan.graph.n_devices == 4
    assert plan.costs is timeline.costs


def test_utilization_of_different_gpus() -> None:
    """It is a share of the peak of all GPUs, also where replicas are on different ones."""
    cluster = ps.Cluster([("dgx_h100", 8), ("dgx_a100", 8)])
    mixed = replace(problem(), cluster=cluster)
    peak = sum(gpu.peak or NAN for gpu in cluster.gpus) / 2
    for pp, sizes in ((4, (2, 2, 2, 2)), (1, (8,))):
        choice = replace(CHOICE, pipeline_parallel=pp, data_parallel=8 // pp,
                         n_microbatches=2 * pp, layers_per_stage=sizes)  # fmt: skip
        timeline = Plan(mixed, evaluation(choice, NAN, NAN)).timeline
        row = Plans(mixed, (evaluation(choice, timeline.makespan, 1.0),)).table.iloc[0]
        assert isinstance(mixed.model, ps.Transformer)
        flops = mixed.model.step_flops(16)
        assert row["mfu"] == pytest.approx(flops / timeline.makespan / (16 * peak))
        assert row["mfu"] == pytest.approx(timeline.mfu())


def test_ruled_out_has_the_others_with_their_reasons() -> None:
    table = plans().ruled_out
    assert table["status"].tolist() == ["cannot win", "does not fit", "invalid"]
    assert table["reason"].tolist()[1:] == ["needs 9 GB of 8 GB", "8 layers, 3 stages"]
    assert table["n_microbatches"].tolist() == [11, 12, 13]
    assert table["bound"].tolist()[:2] == [2.5, 0.5]
    assert plans().counts == {"simulated": 3, "cannot win": 1, "does not fit": 1, "invalid": 1}


def test_the_front_leaves_out_what_another_beats() -> None:
    """GPipe takes more time and more memory than the best."""
    assert plans().front.index.tolist() == [0, 2]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12))
def test_the_front_by_brute_force(pairs: list[tuple[int, int]]) -> None:
    """No configuration of the front is beaten, and every other one is, or equals one of it."""
    rows = tuple(evaluation(choice_of(k), *map(float, pair)) for k, pair in enumerate(pairs))
    front = Plans(problem(), rows).front
    points = list(zip(front["step"], front["memory"], strict=True))
    assert points == sorted(set(points))
    beaten = [
        (x, y) for x, y in pairs if any((a <= x and b <= y) and (a, b) != (x, y) for a, b in pairs)
    ]
    assert set(points) == set(pairs) - set(beaten)


def test_noise_ranks_by_noisy_steps() -> None:
    """The front and the plot then have noisy steps; the table has both."""
    rows = [evaluation(CHOICE, 1.0, 6e9), evaluation(SPLIT, 0.9, 7e9)]
    noisy = [row._replace(noisy_step=step) for row, step in zip(rows, (1.2, 1.3), strict=True)]
    without_noise = evaluation(GPIPE, 1.5, 1e9)  # only the best are simulated with noise
    result = Plans(problem(), (*noisy, without_noise), percentile=90)
    assert result.table["noisy_step"].tolist()[:2] == [1.2, 1.3]
    assert result.front.index.tolist() == [0]
    assert "noisy" in result.summary()
    ax = result.plot()
    line = next(line for line in ax.lines if line.get_gid() == "plan:front")
    assert line.get_xdata().tolist() == [1.2]  # type: ignore[union-attr]
    assert not any(artist.get_gid() == "plan:gpipe" for artist in ax.collections)


def test_plans_by_rank() -> None:
    """A plan is built once; a loop goes over the ranks."""
    result = plans()
    assert result.best.choice == CHOICE
    assert result[2] is result.plan(2)
    assert [plan.choice for plan in result] == [CHOICE, GPIPE, SPLIT]
    assert len(result) == 3


def test_plans_of_named_configurations() -> None:
    """Ranked ones keep their rank, ruled-out ones their reason; others are simulated."""
    result = plans()
    assert result.plan(SPLIT) is result[2]
    assert result.plan(replace(SPLIT, sequence_parallel=True)) is result[2]  # it does not apply
    fits = replace(CHOICE, microbatch_size=2, n_microbatches=4)
    ruled_out = Evaluation(fits, NAN, 1.0, 9e9, NAN, "does not fit", "needs 9 GB")
    evaluated = Plans(problem(), (*result.evaluations, ruled_out)).plan(fits)
    assert evaluated.evaluation.reason == "needs 9 GB"
    other = result.plan(replace(fits, recompute="full"))
    assert other.step == other.timeline.makespan > 0


def test_configurations_by_their_settings() -> None:
    """Replicas and micro-batches follow from cluster and batch; stages are balanced by default."""
    settings = {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True}
    assert plans().choice(**settings, shard_optimizer=True, layers_per_stage=2) == CHOICE
    balanced = plans().choice(pipeline_parallel=4)
    assert sum(balanced.layers_per_stage) == 8
    assert (balanced.data_parallel, balanced.n_microbatches, balanced.schedule) == (2, 8, "1f1b")
    chunked = plans().choice(
        pipeline_parallel=2, schedule="interleaved_1f1b", n_chunks=2, microbatch_size=2,
        layers_per_stage="Ett|tt|tt|ttL", recompute="full",
    )  # fmt: skip
    assert chunked.layers_per_stage == (2, 2, 2, 2)
    assert chunked.n_microbatches == 2
    ordered = plans().choice(pipeline_parallel=2, schedule="v_half", ordered_for_costs=True)
    assert ordered.ordered_for_costs
    assert plans().plan(ordered).schedule != plans().plan(replace(ordered, ordered_for_costs=False))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor": 2}, "unknown setting of a configuration 'tensor'; did you mean 'tensor_p"),
        ({"tensor_parallel": [1, 2]}, "tensor_parallel must be one value"),
        ({"tensor_parallel": None}, "tensor_parallel must be one value, got None"),
        ({"pipeline_parallel": {1, 2}}, "pipeline_parallel must be one value, got {1, 2}"),
        ({"schedule": None}, "schedule must be one value, got None"),
        ({"tensor_parallel": 3}, "no such configuration: "),
        ({"pipeline_parallel": 2, "schedule": "interleaved_1f1b"}, "n_chunks is missing"),
        ({"n_microbatches": 5}, "n_microbatches=5, but global_batch=16 on 8 replicas is 2"),
        ({"n_microbatches": 5, "pipeline_parallel": 8}, "on 1 replica is 16"),
        ({"n_microbatches": "2"}, "n_microbatches must be a whole number"),
        ({"n_microbatches": np.array([1, 2])}, r"n_microbatches must be a whole number, got array"),
        ({"n_microbatches": 5, "microbatch_size": 2}, "is 1 micro-batch of 2; leave"),
        ({"n_chunks": 2}, "1f1b has 1 stage a device, got n_chunks=2"),
        ({"schedule": "zbv", "pipeline_parallel": 2, "n_chunks": 1}, "zbv has 2 stages a device"),
        ({"pipeline_parallel": 2, "layers_per_stage": [4, 3]}, "sums to 7 layers"),
        ({"pipeline_parallel": 2, "layers_per_stage": [4, 2, 2]}, "has 3 stages; pipeline_par"),
        ({"ordered_for_costs": True}, "1f1b takes no costs"),
        ({"ordered_for_costs": 1}, "ordered_for_costs must be"),
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'"),
    ],
)
def test_settings_of_no_configuration(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plans().choice(**settings)


@pytest.mark.parametrize("rank", [3, -1, True, 0.5, None, "0"])
def test_ranks_that_there_are_not(rank: object) -> None:
    with pytest.raises(
        ArgumentError, match=r"rank must be a whole number from 0 to 2, or .*plans\.choice"
    ):
        plans().plan(rank)  # type: ignore[arg-type]


def test_a_configuration_of_another_batch() -> None:
    with pytest.raises(ArgumentError, match=r"2 replicas of 5 .* which are 10; .* is 16"):
        plans().plan(replace(CHOICE, n_microbatches=5))


@pytest.mark.parametrize("field", fields(PlanChoice))
def test_a_configuration_with_an_array(field: Field[Any]) -> None:
    """It is refused by the field's name, and compared with no other before."""
    wrong: PlanChoice = replace(CHOICE, **{field.name: np.array([1, 2])})
    with pytest.raises(ArgumentError, match=field.name):
        plans().plan(wrong)


def test_no_configuration_fits() -> None:
    """Tables are empty, texts say so, and a plot and a best configuration are refused."""
    result = Plans(problem(), plans().evaluations[4:])
    assert len(result.table) == len(result.front) == 0
    assert repr(result).startswith("<Plans: 2 configurations: 0 simulated")
    assert result.summary().count("\n") == 0
    assert "<table" not in result._repr_html_()
    with pytest.raises(ArgumentError, match="at least one row"):
        result.plot()
    with pytest.raises(ArgumentError, match="no configuration is ranked"):
        result.best  # noqa: B018  # the property raises


def test_the_summary_counts_and_shows_the_best() -> None:
    lines = plans().summary(2).splitlines()
    assert lines[0] == (
        "6 configurations: 3 simulated, 1 pruned by bounds, 1 do not fit in memory, 1 invalid; "
        "500 ms"
    )
    assert len(lines) == 8
    assert lines[4].split()[:2] == ["0", "1.00"]
    assert lines[5].strip() == str(CHOICE)
    assert "gpipe" in plans()._repr_html_()
    assert str(plans()) == plans().summary()
    with pytest.raises(ArgumentError, match="n_best"):
        plans().summary(0)


def test_notes_and_interruptions_are_shown() -> None:
    result = replace(plans(), complete=False, notes=("Links between nodes are shared.",))
    assert "500 ms, interrupted" in repr(result)
    assert "Links between nodes are shared." in result.summary()
    assert "Links between nodes are shared." in result._repr_html_()


def test_a_plan_shows_its_results_and_settings() -> None:
    """Results are those of its row of the table."""
    html = plans()[2]._repr_html_()
    results, settings = tables_of(html)
    assert dict(zip(*results, strict=True)) == {
        "schedule": "1f1b",
        "step": "2.00 s",
        "tokens/s": "16384",
        "MFU": f"{plans().table['mfu'][2]:.1%}",
        "bubble": "25.0%",
        "memory (GiB)": "2.7940",
        "room": "96.2%",
        "gap": "100.0%",
    }
    shown = dict(settings[1:])
    assert set(shown) == {field.name for field in fields(PlanChoice)}
    assert shown["pipeline_parallel"] == "4"
    assert shown["layers_per_stage"] == "3+2(x2)+1"
    assert shown["sequence_parallel"] == "no"
    assert "16 sequences a step. Cluster of 8 h100_sxm" in html
    noisy = plans().evaluations[0]._replace(noisy_step=1.2)
    assert "1.20 s" in cells_of(Plan(problem(), noisy)._repr_html_())[1]


@pytest.mark.parametrize(
    ("evaluated", "reason"),
    [
        (plans().evaluations[3], "cannot win: its bound is 2.5 s"),
        (plans().evaluations[4], "does not fit: needs 9 GB of 8 GB"),
        (evaluation(CHOICE, NAN, NAN), "Not simulated yet"),
    ],
)
def test_a_plan_without_a_step_shows_the_reason(evaluated: Evaluation, reason: str) -> None:
    """It is not simulated to be shown."""
    plan = Plan(problem(), evaluated)
    html = plan._repr_html_()
    assert reason in html
    assert len(tables_of(html)) == 1
    assert "timeline" not in vars(plan)


def test_plans_escape_reasons_and_names() -> None:
    """Such as those of the user's own schedules and GPUs."""
    evil = "<script>alert(1)</script>"
    gpu = ps.GPU(flops=1e14, bandwidth=1e12, memory=80e9, name=evil)
    network = ps.Network(nodes=ps.Nodes(8))
    named = replace(problem(), cluster=ps.Cluster(gpu=gpu, n_gpus=8, network=network))
    plan = Plan(named, plans().evaluations[4]._replace(reason=evil))
    for shown in (plan, replace(plans(), notes=(evil,))):
        assert "<script>" not in shown._repr_html_()
        assert "&lt;script&gt;" in shown._repr_html_()


def test_the_file_has_all_configurations(tmp_path: Path) -> None:
    plans().to_csv(tmp_path / "plans.csv")
    table = pd.read_csv(tmp_path / "plans.csv")
    assert table["rank"].tolist()[:3] == [0, 1, 2]
    assert math.isnan(table["rank"][3])
    assert table["status"].tolist()[2:4] == ["simulated", "cannot win"]
    assert table["bound"].tolist()[:4] == [0.8, 0.75, 1.0, 2.5]
    assert [line.split(",")[0] for line in (tmp_path / "plans.csv").read_text().splitlines()] == [
        "rank", "0", "1", "2", "", "", ""
    ]  # fmt: skip
    assert len(table) == 6
    with pytest.raises(ArgumentError, match="cannot write"):
        plans().to_csv(tmp_path / "none" / "plans.csv")


def test_the_plot_is_labelled() -> None:
    """Labels have parallel sizes; the limit is the plan's unless given."""
    ax = plans().plot(title="small", memory_limit=8e9)
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["limit 7.45 GiB", "tp2 pp2 dp2", "tp1 pp4 dp2"]
    assert ax.get_title(loc="left") == "small"
    assert plans().plot().texts[0].get_text() == "limit 74.5 GiB"
    half = ps.Cluster("dgx_h100", n_gpus=8, usable_memory=0.5)
    free = replace(plans(), problem=replace(problem(), cluster=half, memory_limit=None))
    assert free.plot().texts[0].get_text() == "limit 38.0 GiB"


def test_names_of_configurations_differ() -> None:
    """Uneven layers are a sum in order of stages; labels have more settings where needed."""
    split = replace(SPLIT, sequence_parallel=True)
    even = replace(split, layers_per_stage=(2, 2, 2, 2))
    assert str(split).endswith("sequence parallel, 3+2(x2)+1 layers by stage")
    assert str(even).endswith("sequence parallel")
    ends = replace(split, layers_per_stage=(0, 4, 4, 0))
    assert str(ends).endswith(", 0(embedding alone)+4(x2)+0(head alone) layers by stage")
    other = replace(split, layers_per_stage=(2, 3, 2, 1))
    whole = replace(split, shard_optimizer=False)
    rows = [split, other, whole, replace(split, schedule="zb_h1"), CHOICE]
    assert short_names(rows) == [
        "tp1 pp4 dp2, 1f1b, distributed optimizer, sequence parallel, 3+2(x2)+1 layers",
        "tp1 pp4 dp2, 1f1b, distributed optimizer, sequence parallel, 2+3+2+1 layers",
        "tp1 pp4 dp2, 1f1b",
        "tp1 pp4 dp2, zb_h1",
        "tp2 pp2 dp2",
    ]


def test_layers_have_no_tokens() -> None:
    """Measured layers do not say how many tokens a sequence has: their rates are unknown."""
    table = pd.DataFrame({"forward": [1.0] * 8, "backward": [2.0] * 8})
    other = replace(problem(), model=ps.Layers(table))
    row = Plans(other, (evaluation(CHOICE, 1.0, 1.0),)).table.iloc[0]
    assert math.isnan(row["tokens_per_second"])
    assert math.isnan(row["mfu"])


def test_a_plan_prints_its_results() -> None:
    assert repr(plans().best) == f"<Plan {CHOICE}: 1.00 s a step, 5.59 GiB on the fullest device>"
    unknown = plans().plan(replace(CHOICE, microbatch_size=2, n_microbatches=4))
    assert repr(unknown).endswith("sequence parallel>")
    assert isinstance(unknown.choice, PlanChoice)
