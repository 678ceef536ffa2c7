"""`GPU.fit` on steps of a known GPU, through costs and simulation."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from figure_artists import artist_of, axes
from measured_rows import MACHINE, SIZES, TRUE_EFFICIENCY, TRUTH, measured_rows, true_seconds

import pipesim as ps
from pipesim.calibration import Calibration
from pipesim.calibration.fit_gpu import CONSTANTS, EFFICIENCY, NICS, PRIOR, Constants, _note
from pipesim.calibration.measured_steps import (
    StepPrediction,
    measured_steps,
    predicted_seconds,
    step_predictions,
)
from pipesim.calibration.robust_fit import Fit
from pipesim.errors import ArgumentError, CalibrationWarning, CostsWarning, PipeError

START = "a100_80gb"
#: Steps of one device, which are quick to fit, and one with all that a row may lack.
FEW = [
    {**SIZES, "hidden_size": h, "microbatch_size": b, "n_microbatches": 2, "n_devices": 1,
     "overlap": False} for h, b in ((4096, 4), (2048, 4), (512, 1), (256, 1))
]  # fmt: skip
ROW = {"model": "gpt2_xl", "n_layers": 4, "microbatch_size": 2, "n_microbatches": 4, "seconds": 0.1}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return measured_rows()


@pytest.fixture(scope="module")
def fitted(rows: list[dict[str, Any]]) -> Calibration:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)  # none: all constants are determined
        return ps.GPU.fit(rows, gpu=START, network=MACHINE)


def few() -> list[dict[str, Any]]:
    return [{**row, "seconds": true_seconds(row)} for row in FEW]


def prediction(**settings: Any) -> StepPrediction:
    """Return the prediction of `ROW` with other settings; None removes one."""
    (step,) = step_predictions(measured_steps([{**ROW, **settings}]))
    return step


@pytest.mark.slow
def test_the_constants_of_the_gpu_that_took_the_steps(fitted: Calibration) -> None:
    """Each is within its standard error, though it begins far from it."""
    truth = {**asdict(TRUTH), EFFICIENCY: TRUE_EFFICIENCY}
    table = fitted.constants
    assert list(table.index) == ["flops", "bandwidth", "launch", "synchronization", EFFICIENCY]
    assert table["determined"].all()
    for name, row in table.iterrows():
        assert abs(np.log(row["value"] / truth[str(name)])) < row["standard_error"] < 0.35, name
        assert abs(np.log(row["start"] / truth[str(name)])) > 5 * abs(
            np.log(row["value"] / truth[str(name)])
        )
    assert fitted.gpu == replace(
        TRUTH, name=f"{START} fitted to 8 steps", flops=table.loc["flops", "value"],
        bandwidth=table.loc["bandwidth", "value"], launch=table.loc["launch", "value"],
        synchronization=table.loc["synchronization", "value"],
    )  # fmt: skip
    assert fitted.network_efficiency == table.loc[EFFICIENCY, "value"]


@pytest.mark.slow
def test_predictions_are_simulations_with_the_fitted_gpu_and_network(fitted: Calibration) -> None:
    row = fitted.rows.iloc[6]
    model = ps.Transformer(hidden_size=row["hidden_size"], **SIZES)
    costs = model.costs(
        2, microbatch_size=4, tensor_parallel=8, partition="even", gpu=fitted.gpu,
        network=fitted.network(8),
    )  # fmt: skip
    graph = ps.lower(ps.schedule("1f1b", 2, 4), overlap=False)
    assert row["predicted"] == pytest.approx(ps.simulate(graph, costs).makespan, rel=1e-9)
    assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)


@pytest.mark.slow
def test_errors_of_fitted_and_left_out_rows(fitted: Calibration) -> None:
    """Without noise, only rows that determine a constant alone are badly predicted without it."""
    errors = fitted.errors
    assert errors.loc["fitted", "worst"] < 0.03
    assert errors.loc["left out", "median"] < 0.03
    assert (errors.loc["left out"] >= errors.loc["fitted"]).all()
    left_out = fitted.rows["error_left_out"].abs()
    assert errors.loc["left out"].tolist() == [left_out.mean(), left_out.median(), left_out.max()]
    assert "8 rows" in repr(fitted)


@pytest.mark.slow
def test_a_constant_without_effect_stays_what_it_was() -> None:
    """No message blocks where there is no pipeline: the 0 of the GPU stays."""
    gpu = replace(TRUTH, synchronization=0.0, flops=2.7e14, launch=6e-6)
    with pytest.warns(CalibrationWarning, match="do not determine synchronization: its effect"):
        fitted = ps.GPU.fit(few(), gpu=gpu, constants=["flops", "launch", "synchronization"])
    assert fitted.gpu.synchronization == 0
    assert fitted.constants["determined"].tolist() == [True, True, False]
    assert fitted.constants.loc["synchronization", "value"] == 0
    assert fitted.gpu.bandwidth == gpu.bandwidth  # was not fitted


@pytest.mark.slow
def test_the_rate_of_fused_attention() -> None:
    """Long sequences determine it, and a fit of FLOP/s alone keeps it."""
    true = replace(ps.GPU.preset(START), attention_ratio=0.6)
    rows = [
        {**SIZES, "hidden_size": 1024, "n_heads": 8, "sequence_length": s, "microbatch_size": 1,
         "n_microbatches": 1, "n_devices": 1, "flash_attention": True}
        for s in (2048, 8192, 32768)
    ]  # fmt: skip
    steps = step_predictions(measured_steps([{**row, "seconds": 1.0} for row in rows]))
    seconds = predicted_seconds(steps, true, lambda _: None)
    measured = [{**row, "seconds": x} for row, x in zip(rows, seconds, strict=True)]
    fitted = ps.GPU.fit(measured, gpu=START, constants=["flops", "attention_ratio"])
    assert fitted.gpu.attention_ratio == pytest.approx(0.6, rel=0.02)
    assert fitted.gpu.flops == pytest.approx(true.flops, rel=0.02)
    alone = ps.GPU.fit(measured, gpu=true, constants=["flops"])
    assert alone.gpu.attention_ratio == 0.6


@pytest.mark.slow
def test_constants_by_default_are_those_that_can_have_an_effect(rows: list[dict[str, Any]]) -> None:
    some = [{**row, "overlap": True} for row in rows if row["tensor_parallel"] == 1]
    fitted = ps.GPU.fit(some[:4], gpu=replace(TRUTH, flops=2e14))
    assert list(fitted.constants.index) == ["flops", "bandwidth", "launch"]
    assert fitted.network() is None
    alone = ps.GPU.fit(few(), gpu=replace(TRUTH, flops=2e14))  # no message, though none overlaps
    assert list(alone.constants.index) == ["flops", "bandwidth", "launch"]
    assert set(fitted.constants.index) < set(CONSTANTS)
    assert not {"memory", "peak_flops", "multiprocessors", "name"} & set(CONSTANTS)


@pytest.mark.slow
def test_one_wrong_measurement_hardly_changes_the_constants() -> None:
    rows = few()
    rows += [{**row, "seconds": row["seconds"] * 0.99} for row in rows]
    rows[5]["seconds"] *= 2
    fitted = ps.GPU.fit(pd.DataFrame(rows), gpu=TRUTH, constants=["flops", "launch"])
    assert fitted.gpu.flops == pytest.approx(TRUTH.flops, rel=0.03)
    assert fitted.gpu.launch == pytest.approx(TRUTH.launch, rel=0.03)
    assert abs(fitted.rows.loc[5, "error_left_out"] + 0.5) < 0.03


def test_rates_stay_below_those_of_the_data_sheet() -> None:
    rows = [{**row, "seconds": row["seconds"] / 20} for row in few()[:2]]
    with pytest.warns(CalibrationWarning, match="flops is at its largest value, 3.12e"):
        fitted = ps.GPU.fit(rows, gpu=START, constants=["flops"], prior=False)
    assert fitted.gpu.flops == pytest.approx(312e12)
    assert fitted.gpu.flops <= fitted.gpu.peak
    assert fitted.constants.loc["flops", "note"] == "at its largest value"


@pytest.mark.slow
def test_a_network_of_ones_own_is_scaled(rows: list[dict[str, Any]]) -> None:
    """The efficiency is relative to it, and may be above 1."""
    some = [row for row in rows if row["tensor_parallel"] == 8]
    network = ps.Network.preset(MACHINE, 0.25, 8)
    fitted = ps.GPU.fit(some, gpu=TRUTH, network=network, constants=[EFFICIENCY])
    assert fitted.network_efficiency == pytest.approx(2, rel=0.05)
    assert fitted.network() == network.scaled(bandwidth=fitted.network_efficiency)


@pytest.mark.slow
def test_predictions_of_other_steps(fitted: Calibration, rows: list[dict[str, Any]]) -> None:
    """Those of the fitted rows are in their table; seconds need not be known."""
    unknown = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    for table in (rows, unknown, pd.DataFrame(unknown)):
        assert fitted.predict(table) == pytest.approx(fitted.rows["predicted"].to_numpy())
    with pytest.raises(ArgumentError, match="row 0: microbatch_size is missing"):
        fitted.predict([{"model": "gpt2_xl"}])
    with pytest.raises(ArgumentError, match="row 0: seconds must be a finite number above 0"):
        fitted.predict([{**ROW, "seconds": -1}])


@pytest.mark.slow
def test_latencies_of_a_network_of_single_gpus() -> None:
    """It is grouped for each row; tensor parallelism shows its latency."""
    gpu = replace(TRUTH, launch=1e-7)  # so that launches hide no collective
    single = ps.Network.preset(MACHINE)
    slow = single.scaled(latency=8.0)
    rows = [
        {**FEW[0], "hidden_size": h, "microbatch_size": 1, "tensor_parallel": t, "seconds": 1}
        for h in (512, 1024) for t in (1, 8)
    ]  # fmt: skip
    for row, step in zip(rows, step_predictions(measured_steps(rows)), strict=True):
        row["seconds"] = step.seconds(gpu, slow.grouped(step.gpus_per_device))
    fitted = ps.GPU.fit(rows, gpu=gpu, network=single, constants=["flops", "network_latency"])
    assert fitted.network_latency == pytest.approx(8, rel=0.05)
    assert fitted.network_efficiency == 1
    assert fitted.network(8) == single.scaled(latency=fitted.network_latency).grouped(8)


@pytest.mark.slow
def test_the_picture_has_predictions_of_left_out_rows(fitted: Calibration) -> None:
    ax = axes(3.5, 3.5)
    assert fitted.plot(ax=ax) is ax
    assert ax.get_title(loc="left") == f"{fitted.gpu.name}, left-out steps"
    points = artist_of(ax, "accuracy:steps").get_offsets()
    unit = 1e3 if "(ms)" in ax.get_xlabel() else 1.0
    expected = fitted.rows[["predicted_left_out", "measured"]].to_numpy() * unit
    np.testing.assert_allclose(points, expected)
    in_sample = artist_of(fitted.plot(ax=axes(), left_out=False), "accuracy:steps").get_offsets()
    np.testing.assert_allclose(in_sample[:, 0], fitted.rows["predicted"] * unit)


@pytest.mark.slow
def test_a_file_gives_the_gpu_back(fitted: Calibration, tmp_path: Path) -> None:
    fitted.save(tmp_path / "gpu.json")
    values = json.loads((tmp_path / "gpu.json").read_text())
    assert ps.GPU(**values["gpu"]) == fitted.gpu
    assert values["network_efficiency"] == fitted.network_efficiency
    assert values["constants"]["flops"]["determined"] is True
    assert values["errors"]["left out"]["worst"] == fitted.errors.loc["left out", "worst"]


@pytest.mark.slow
def test_a_few_rows_hardly_change_a_good_start_and_say_what_they_tell() -> None:
    """Errors of 10 % move rates less with the prior. Launches have no effect."""
    gpu = ps.GPU.preset(START)
    factors = (1.1, 0.92, 1.08, 0.93, 1.1)
    rows = [
        {**SIZES, "hidden_size": 4096, "microbatch_size": b, "n_microbatches": 1, "seconds": 1}
        for b in (1, 2, 3, 4, 6)
    ]  # fmt: skip
    steps = step_predictions(measured_steps(rows))
    for row, seconds, factor in zip(
        rows, predicted_seconds(steps, gpu, lambda _: None), factors, strict=True
    ):
        row["seconds"] = seconds * factor
    with pytest.warns(CalibrationWarning):
        near, free = (
            ps.GPU.fit(rows, gpu=gpu, prior=prior, progress=False) for prior in (True, False)
        )
    moved = [np.abs(np.log(table["value"] / table["start"])).max()
             for table in (near.constants, free.constants)]  # fmt: skip
    assert moved[0] < 0.1 < moved[1]
    table = near.constants
    assert table["prior"].tolist() == [PRIOR[str(name)] for name in table.index]
    assert set(PRIOR) == set(CONSTANTS)
    assert not table.loc["launch", "determined"]
    assert table.loc["launch", "value"] == gpu.launch
    assert (free.constants["prior"] == 1).all()


def test_one_row_is_enough_with_the_prior() -> None:
    """It moves rates; the row left out has the start."""
    row = few()[0]
    with pytest.warns(CalibrationWarning):
        fitted = ps.GPU.fit([row], gpu=START)
    assert abs(fitted.rows.loc[0, "error"]) < 0.5 * abs(fitted.rows.loc[0, "error_left_out"])
    (step,) = step_predictions(measured_steps([row]))
    start = step.seconds(ps.GPU.preset(START), None)
    assert fitted.rows.loc[0, "predicted_left_out"] == pytest.approx(start)


@pytest.mark.slow
def test_a_fitted_gpu_has_the_attention_of_its_rows() -> None:
    """A framework names the kernel, whose measured speed goes with the constant."""
    rows = [
        {**SIZES, "sequence_length": s, "hidden_size": 2048, "microbatch_size": 1, "seconds": 1,
         "n_microbatches": 1, "flash_attention": True, "framework": "megatron_core_2024"}
        for s in (4096, 32768)
    ]  # fmt: skip
    true = ps.GPU.preset("h100_sxm")
    steps = step_predictions(measured_steps(rows))
    slow = replace(true, attention_ratio=0.7 * true.attention_ratio)
    for row, seconds in zip(rows, predicted_seconds(steps, slow, lambda _: None), strict=True):
        row["seconds"] = seconds
    fitted = ps.GPU.fit(rows, gpu=true, constants=["attention_ratio"])
    assert fitted.gpu.attention_ratio == pytest.approx(slow.attention_ratio, rel=0.05)
    assert fitted.predict(rows) == pytest.approx(fitted.rows["predicted"].to_numpy())
    nameless = [{k: v for k, v in row.items() if k != "framework"} for row in rows]
    options = {"gpu": true, "constants": ["attention_ratio"]}
    named = ps.GPU.fit(nameless, framework="megatron_core_2024", **options)
    assert named.gpu == fitted.gpu != ps.GPU.fit(nameless, **options).gpu


def test_a_batch_is_divided_among_replicas_and_micro_batches() -> None:
    step = prediction(n_microbatches=None, global_batch=24, n_replicas=3)
    assert (step.graph.n_replicas, step.graph.n_microbatches) == (3, 4)
    assert step.model == ps.Transformer.preset("gpt2_xl", n_layers=4)


def test_recompute_is_in_backwards_or_in_tasks_of_its_own() -> None:
    inside, as_tasks = prediction(recompute="full"), prediction(recompute="always")
    assert (inside.graph.recompute, inside.options["recompute"]) == ("never", "full")
    assert (as_tasks.graph.recompute, "recompute" in as_tasks.options) == ("always", False)


def test_steps_with_stages_options_and_equal_graphs() -> None:
    looped = prediction(schedule="interleaved_1f1b", n_devices=2, n_chunks=2)
    assert (looped.graph.n_stages, looped.layers_per_stage) == (4, 4)
    assert prediction(n_devices=2, layers_per_stage=[1, 3]).layers_per_stage == [1, 3]
    even, balanced = (
        prediction(n_devices=2, layers_per_stage=word).seconds(START, None)
        for word in ("even", "balanced")
    )
    assert even == prediction(n_devices=2).seconds(START, None)
    assert balanced == prediction(n_devices=2, partition="balanced").seconds(START, None) < even
    rows = [ROW, {**ROW, "microbatch_size": 4}, {**ROW, "overlap": False}]
    first, same, other = step_predictions(measured_steps(rows))
    assert first.graph is same.graph is not other.graph


def test_a_warning_of_a_row_comes_once() -> None:
    """Splits that are not balanced are priced many times. By default stages are even."""
    row = {**ROW, "model": "llama3_8b", "n_devices": 2, "layers_per_stage": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.GPU.fit([row, {**row, "n_microbatches": 8}], gpu=START, constants=["flops"])
        ps.GPU.fit([{**row, "layers_per_stage": None}] * 2, gpu=START, constants=["flops"])
    assert [w.category for w in caught if w.category is not CalibrationWarning] == [
        CostsWarning
    ] * 2


def test_factors_of_a_file_are_the_start() -> None:
    """Fitted ones begin there, below the rates of the data sheet; others stay."""
    saved = {"gpu": asdict(TRUTH), "network_efficiency": 0.5, "network_latency": 2.0}
    row = {**FEW[0], "microbatch_size": 1, "tensor_parallel": 8}
    rows = [{**row, "n_microbatches": n, "seconds": 1} for n in (1, 2, 4)]
    network = ps.Network.preset(MACHINE, 0.8).scaled(latency=2.0).grouped(8)
    for own, step in zip(rows, step_predictions(measured_steps(rows)), strict=True):
        own["seconds"] = step.seconds(TRUTH, network)
    fitted = ps.GPU.fit(rows, gpu=saved, network=MACHINE, constants=[EFFICIENCY], prior=False)
    assert fitted.constants.loc[EFFICIENCY, "start"] == 0.5
    assert fitted.network_efficiency == pytest.approx(0.8, rel=0.05)
    assert fitted.network_latency == 2
    of_own = ps.GPU.fit(rows, gpu=saved, network=network, constants=["flops"])
    assert (of_own.network_efficiency, of_own.network_latency) == (1, 1)


@pytest.mark.slow
def test_nics_alone_are_fitted() -> None:
    """Rates inside nodes keep theirs; a file has the share of NICs, and later fits keep it."""
    row = {**FEW[0], "n_devices": 2, "tensor_parallel": 8, "n_replicas": 2, "n_layers": 4}
    rows = [{**row, "microbatch_size": b, "seconds": 1} for b in (1, 2, 4)]
    network = ps.Network.preset(MACHINE, nic_efficiency=0.3)
    for own, step in zip(rows, step_predictions(measured_steps(rows)), strict=True):
        own["seconds"] = step.seconds(TRUTH, network.grouped(8))
    fitted = ps.GPU.fit(rows, gpu=TRUTH, network=MACHINE, constants=[NICS])
    assert fitted.nic_efficiency == pytest.approx(0.3, rel=0.01)
    assert fitted.network_efficiency == fitted.constants.loc[NICS, "start"] == 0.7
    saved = json.loads(json.dumps(fitted.to_dict()))
    expected = ps.Network.preset(MACHINE, nic_efficiency=fitted.nic_efficiency)
    assert ps.Cluster(MACHINE, 16, gpu=saved).network() == expected == fitted.network()
    again = ps.GPU.fit(rows, gpu=saved, network=MACHINE, constants=[EFFICIENCY])
    assert again.nic_efficiency == fitted.nic_efficiency
    single = ps.Network.preset(MACHINE)
    of_own = ps.GPU.fit(rows, gpu=TRUTH, network=single, constants=[NICS])
    assert of_own.nic_efficiency == pytest.approx(0.3 / 0.7, rel=0.01)
    assert of_own.network() == single.scaled(nic_bandwidth=of_own.nic_efficiency)
    with pytest.raises(ArgumentError, match="constants has nic_efficiency, but the network has no"):
        ps.GPU.fit(rows, gpu=TRUTH, network=ps.Network(), constants=[NICS])


def test_milliseconds_are_warned_of() -> None:
    """The constant ends at its bound, a hundredth of its start, and errors stay large."""
    rows = [{**row, "seconds": row["seconds"] * 1e3} for row in few()]
    with pytest.warns(CalibrationWarning) as caught:
        ps.GPU.fit(rows, gpu=START, constants=["flops"])
    at_bound, large_error = map(str, (warning.message for warning in caught))
    assert "flops is at its least value, 2.59e+12" in at_bound
    assert "are these seconds?" in large_error


def test_a_row_for_each_constant_leaves_none_to_check_them() -> None:
    with pytest.warns(CalibrationWarning, match="1 measured steps for 1 constants: none is left"):
        ps.GPU.fit(few()[:1], gpu=TRUTH, constants=["flops"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        ps.GPU.fit(few()[:2], gpu=TRUTH, constants=["flops"])


@pytest.mark.parametrize(
    ("error", "note"), [(0.34, ""), (0.4, "weakly, 95 % within a factor of 2.2")]
)
def test_a_weakly_determined_constant_says_so(error: float, note: str) -> None:
    one = np.array([0.1])
    result = Fit(one, np.array([error]), {}, one, one)
    assert _note(0, Constants(("flops",), TRUTH, None), result) == note


def test_progress_is_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        for progress in (True, False):
            ps.GPU.fit(few()[:2], gpu=TRUTH, constants=["flops"], progress=progress)
            assert ("predictions" in capsys.readouterr().err) == (terminal and progress)


def test_groups_of_gpus_that_do_not_suit_the_machine() -> None:
    """The message names the column."""
    row = {**ROW, "n_heads": 24, "hidden_size": 1536, "tensor_parallel": 3}
    with pytest.raises(PipeError, match="row 0: tensor_parallel x context_parallel = 3 doe"):
        ps.GPU.fit([row], gpu=START, network=MACHINE, constants=["flops"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "llama3_9b"},
            "row 1: unknown transformer 'llama3_9b'; did you mean 'llama3_8b'",
        ),
        ({"model": None}, "row 1: hidden_size is missing; give the sizes"),
        ({"microbatch_size": None}, "row 1: microbatch_size is missing"),
        ({"n_microbatches": None}, "row 1: give either n_microbatches.*got neither"),
        ({"global_batch": 8}, "row 1: give either n_microbatches.*got both"),
        ({"n_microbatches": None, "global_batch": 9}, "global_batch=9 is no multiple of 2"),
        ({"n_microbatches": 0}, "row 1: n_microbatches must be at least 1"),
        ({"schedule": "1f2b"}, "row 1: unknown schedule '1f2b'; did you mean '1f1b'"),
        ({"n_chunks": 2}, "row 1: schedule '1f1b' takes no option 'n_chunks'"),
        ({"tensor_parallel": 3}, "row 1: tensor_parallel=3 does not divide n_heads=25"),
        ({"tensor_parallel": "q"}, "row 1: tensor_parallel must be a whole number, got 'q'"),
        ({"layers_per_stage": [1, 2], "n_devices": 2}, "row 1: layers_per_stage"),
        ({"recompute": "some"}, "row 1: unknown recompute 'some'"),
    ],
)
def test_rows_that_cannot_be_predicted(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PipeError, match=message):
        ps.GPU.fit([ROW, {**ROW, **changes}], gpu=START, constants=["flops"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prior": False}, r"1 measured steps for 3 constants \(flops, bandwidth, launch\); "
                           r"measure more steps, fit with the prior, or give fewer constants, "
                           r"such as constants=\('flops',\)"),
        ({"prior": 1}, "prior must be True or False"),
        ({"constants": ["flop"]}, "unknown constant 'flop'; did you mean 'flops'"),
        ({"constants": ["memory"]}, "unknown constant 'memory'"),
        ({"constants": []}, "constants is empty; give at least one of flops"),
        ({"constants": ["flops", "flops"]}, "constants has 'flops' twice"),
        ({"constants": [EFFICIENCY]}, "constants has network_efficiency, but there is no network"),
        ({"constants": "flops"}, "constants must be a list"),
        ({"gpu": "a100"}, "unknown GPU 'a100'; did you mean 'a100_40gb'"),
        ({"gpu": 3}, "gpu must be a pipesim.GPU"),
        ({"network": "dgx_a10"}, "unknown network 'dgx_a10'; did you mean 'dgx_a100'"),
        ({"network": 3}, "network must be a pipesim.Network"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_fitted(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ps.GPU.fit([ROW], **{"gpu": START, **arguments})


def test_rows_with_context_parallelism() -> None:
    """A device has the GPUs of both kinds of parallelism, as in `Transformer.costs`."""
    row = {
        **ROW, "n_heads": 24, "hidden_size": 1536, "tensor_parallel": 2, "context_parallel": 2,
        "sequence_parallel": True, "flash_attention": True,
    }  # fmt: skip
    network = ps.Network.preset(MACHINE)
    fitted = ps.GPU.fit(
        [row, {**row, "n_microbatches": 8, "seconds": 0.2}], gpu=START, network=network,
        constants=["flops"],
    )  # fmt: skip
    (step,) = step_predictions(measured_steps([row]))
    assert step.gpus_per_device == 4
    expected = step.seconds(fitted.gpu, fitted.network(4))
    assert fitted.rows["predicted"].iloc[0] == pytest.approx(expected)


@pytest.mark.slow
def test_repeated_rows_say_nothing_new() -> None:
    """Each configuration is fitted once, and left out with all of its rows."""
    once = few()
    again = [{**row, "label": "again", "schedule": "1f1b", "hosts": "one"} for row in once]
    fit = partial(ps.GPU.fit, gpu=START, constants=["flops", "bandwidth"])
    expected, twice = fit(once), fit([*once, *again, *again[:1] * 5])
    for name in ("value", "standard_error"):
        assert np.allclose(twice.constants[name], expected.constants[name], rtol=1e-3)
    assert np.allclose(twice.errors, expected.errors, rtol=1e-2)
    assert twice.rows["configuration"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0, 0, 0]
    assert "13 rows of 4 configurations" in repr(twice)
    assert twice.gpu.name == f"{START} fitted to 13 steps of 4 configurations"


def test_repeated_rows_do_not_count_as_further_steps() -> None:
    with pytest.raises(ArgumentError, match=r"6 measured steps of 3 configurations for 4 consta"):
        ps.GPU.fit(few()[:3] * 2, gpu=START, constants=CONSTANTS[:4], prior=False)
    with pytest.warns(CalibrationWarning, match="2 measured steps of 1 configuration for 1 const"):
        ps.GPU.fit(few()[:1] * 2, gpu=START, constants=["flops"])
