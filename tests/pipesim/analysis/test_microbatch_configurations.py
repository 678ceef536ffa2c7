"""Other schedules, stages and numbers of micro-batches for costs that differ between these."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.analysis.configurations import configuration
from pipesim.costs.rows import STAGE_ROWS
from pipesim.errors import CostsError

LENGTHS = np.array([[1.0, 2.0, 3.0, 4.0]])
COSTS = ps.Costs(LENGTHS, input_grad=LENGTHS, weight_grad=LENGTHS, launch=0.5 * LENGTHS,
                 activation_bytes=LENGTHS, weight_grad_bytes=0.5)  # fmt: skip

MODEL = ps.Transformer(hidden_size=8, n_layers=4, n_heads=2, sequence_length=4, vocabulary_size=16)


def named(name: str, costs: ps.Costs = COSTS, **options: Any) -> Any:
    schedule = ps.schedule(name, 2, 4, **options)
    return configuration(ps.simulate(ps.lower(schedule), costs))


def test_stages_of_a_device_are_added_for_each_micro_batch() -> None:
    changed = named("interleaved_1f1b", n_chunks=2).with_schedule("1f1b")
    assert changed.costs.forward == ((2, 4, 6, 8),) * 2
    assert changed.costs.launch == ((0.5, 1, 1.5, 2),) * 2, "the largest of the stages"
    back = named("1f1b", changed.costs).with_schedule("v_min")
    assert back.costs.forward == ((1, 2, 3, 4),) * 4


def test_smaller_micro_batches_divide_each() -> None:
    changed = named("1f1b").with_smaller_microbatches(2)
    assert changed.costs.forward == ((0.5, 0.5, 1, 1, 1.5, 1.5, 2, 2),)
    assert changed.costs.launch == ((0.5, 0.5, 1, 1, 1.5, 1.5, 2, 2),), "not its size"
    assert changed.costs.weight_grad_bytes == 0.25
    assert ps.simulate(changed.graph(), changed.costs).graph.n_microbatches == 8


def test_the_costs_of_other_micro_batches_are_not_known() -> None:
    message = "values for 4 micro-batches, so that those of 8 are not known; simulate with costs.av"
    with pytest.raises(CostsError, match=re.escape(message)):
        named("1f1b").with_n_microbatches(8)
    assert named("1f1b").with_n_microbatches(4).schedule == ps.schedule("1f1b", 2, 4)
    changed = named("1f1b", COSTS.averaged()).with_n_microbatches(8)
    assert ps.simulate(changed.graph(), changed.costs).graph.n_microbatches == 8


def test_settings_of_a_model_keep_the_ratios_of_each_micro_batch() -> None:
    costs = MODEL.costs([2, 2], microbatch_size=1, flops_per_second=1e9)
    forward = np.outer(costs.per_stage("forward", 2), [1.0, 2.0, 3.0, 4.0])
    changed = named("1f1b", replace(costs, forward=forward)).with_settings(microbatch_size=2)
    assert np.allclose(changed.costs.forward, 2 * forward)


def test_sweeps_name_the_reason_in_their_row() -> None:
    grid = {"schedule": ["1f1b", "zb_1p"], "n_devices": [2], "n_microbatches": [4, 8]}
    table = ps.sweep(grid, base={"costs": COSTS}, progress=False, n_jobs=1)
    fits = table["n_microbatches"] == 4
    assert table.loc[fits, "makespan"].notna().all()
    errors = table.loc[~fits, "error"].tolist()
    assert errors == [
        "costs have values for 4 micro-batches, but the graph has 8; give 8 values a stage",
        "costs have values for 4 micro-batches, but the schedule has 8; give 8 values a stage, or "
        "Costs.averaged()",
    ]


def test_models_have_equal_micro_batches() -> None:
    """Layers and settings of a model take one value a stage at most."""
    with pytest.raises(CostsError, match=r"column 'forward': must be finite seconds >= 0, got \["):
        ps.Layers({"forward": [[1, 2], [2, 3]], "backward": [1, 2]})
    with pytest.raises(CostsError, match=r"launch"):
        MODEL.costs([2, 2], microbatch_size=1, flops_per_second=1e9, launch=[[0, 1], [1, 0]])


def test_stages_put_together_again_give_the_costs_of_devices() -> None:
    """Of every field with one value a stage: those that stages have whole are not summed."""
    names = sorted({*STAGE_ROWS} - {"expert_layers", "reduced_share"})
    costs = ps.Costs(**dict.fromkeys(names, (4.0, 6.0)), expert_layers=(2, 4), reduced_share=0.5)
    placement = ps.Placement.looped(2, 2)
    timeline = ps.simulate(
        ps.lower(ps.schedule("interleaved_1f1b", 2, 4)), costs.in_chunks(placement)
    )
    again = configuration(timeline).with_schedule("1f1b").costs
    for name in STAGE_ROWS:
        assert again.per_stage(name, 2).tolist() == costs.per_stage(name, 2).tolist(), name


def test_smaller_micro_batches_divide_what_is_of_one() -> None:
    """Fields of whole stages, launches and exchanges of counts stay; seconds and bytes halve."""
    values: dict[str, Any] = {name: 4.0 for name in STAGE_ROWS if name != "reduced_share"}
    halved = named("1f1b", ps.Costs(**values)).with_smaller_microbatches(2).costs
    whole = {name for name in STAGE_ROWS if getattr(halved, name) == values.get(name, 1.0)}
    assert whole == {
        "launch", "exchange_counts", "exchange_accumulated", "optimizer_step", "grad_norm",
        "parameter_bytes", "optimizer_bytes", "gradient_bytes", "reduce_grad", "reduce_tied",
        "unshard", "expert_layers", "expert_parameter_bytes", "expert_gradient_bytes",
        "expert_optimizer_bytes", "reduced_share", "reduce_copies",
    }  # fmt: skip


def test_other_settings_keep_each_field_that_the_user_has_changed() -> None:
    costs = MODEL.costs([2, 2], microbatch_size=1, flops_per_second=1e9)
    settings: dict[str, Any] = {
        "tied_bytes": 1e9, "expert_replicas": 2, "all_reduce": "tree", "memory_reserve": 0.5,
        "skip_bytes": 7.0, "buckets": [[(1.0, 1.0)], [(1.0, 1.0)]],
        "exchange_bytes": {0: {"keys": [[1.0]]}}, "segments": [[(1.0,)] * 3] * 2,
        "launch_by_op": {"messages": 1e-6}, "gradient_exchange": "all_reduce",
        "exchanged_gradients": 2.0, "overlap_cost": 0.5, "tied": [(0, 1)],
    }  # fmt: skip
    others = {"network", "workload", "last_logits"}  # costs of servers train no graph
    assert {*settings, *STAGE_ROWS, *others} == {x.name for x in fields(costs)}
    own = replace(costs, **settings)
    changed = named("1f1b", own).with_settings(flash_attention=True).costs
    for name in settings:
        assert getattr(changed, name) == getattr(own, name), name
