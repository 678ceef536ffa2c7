"""The command ``pipesim plan``."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_output import fail, rows, succeed
from PIL import Image

import pipesim as ps
from pipesim.cli import main
from pipesim.planning.plans import Plans

#: A search of a few configurations.
SIZES = ["--size", "hidden_size=1024", "--size", "n_layers=8", "--size", "n_heads=8",
         "--size", "sequence_length=1024", "--size", "vocabulary_size=8192"]  # fmt: skip
CLUSTER = ["--cluster", "dgx_h100", "--gpus", 4, "--global-batch", 8]
FEW = ["--tensor-parallel", "1,2", "--pipeline-parallel", 2, "--microbatch-size", 1,
       "--schedules", "1f1b,zbv", "--recompute", "none", "--shard-optimizer", "true"]  # fmt: skip
PLAN = ["plan", *SIZES, *CLUSTER, *FEW]


def same_plans() -> Plans:
    """Return what Python finds for the same arguments."""
    model = ps.Transformer(
        hidden_size=1024, n_layers=8, n_heads=8, sequence_length=1024, vocabulary_size=8192
    )
    return ps.plan(
        model, ps.Cluster("dgx_h100", 4), global_batch=8, tensor_parallel=[1, 2],
        pipeline_parallel=2, microbatch_size=1, schedules=["1f1b", "zbv"], recompute="none",
        shard_optimizer=True, n_best=2,
    )  # fmt: skip


def test_the_best_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary is that of Python, but for the seconds of the search."""
    printed = succeed(capsys, *PLAN, "--best", 2).splitlines()
    expected = same_plans().summary(2).splitlines()
    assert printed[0].split(";")[0] == expected[0].split(";")[0]
    assert printed[1:] == expected[1:]
    assert "published steps without their framework on h100 took" in printed[1]
    assert [row[0] for row in rows("\n".join(printed))[3::2]] == ["rank", "0", "1"]


@pytest.mark.slow
def test_sharing_offload_and_slices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Options and settings of a file are the parameters of Python."""
    values: dict[str, list[Any]] = {
        "context_parallel": [1, 2], "expert_parallel": [1, 2], "n_slices": [1, 2],
        "shard_parameters": ["none", "step", 1], "offload": ["none", 0.5, "longest:0.5"],
    }  # fmt: skip
    flags = [
        x
        for name, value in values.items()
        for x in (f"--{name.replace('_', '-')}", ",".join(map(str, value)))
    ]
    experts = {"n_experts": 4, "experts_per_token": 2, "expert_ffn_size": 512}
    sizes = [x for name, size in experts.items() for x in ("--size", f"{name}={size}")]
    few = ["--pipeline-parallel", 2, "--microbatch-size", 1, "--recompute", "none", "--best", 2]
    few += ["--schedules", "1f1b,seq1f1b"]
    arguments = ["plan", *SIZES, *sizes, *CLUSTER, *few]
    table = succeed(capsys, *arguments, *flags, "--csv", tmp_path / "a.csv").splitlines()[1:]
    written = pd.read_csv(tmp_path / "a.csv").query("status != 'invalid'")
    for name, value in values.items():
        assert {*map(str, written[name])} == {*map(str, value)}
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    (tmp_path / "plan.toml").write_text("\n".join(lines))
    assert succeed(capsys, *arguments, "--config", tmp_path / "plan.toml").splitlines()[1:] == table
    message = fail(capsys, *arguments, "--shard-parameters", "always")
    assert "unknown shard_parameters 'always'" in message


def test_other_programs_and_explanations(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags and settings are of the best; the explanation of it and another rank."""
    one = ["--schedules", "1f1b", "--tensor-parallel", 2, "--sequence-parallel", "true"]
    arguments = [*PLAN, *one, "--recompute", "none,full", "--best", 2, "--explain", 1]
    out = succeed(capsys, *arguments, "--megatron", "--torchtitan")
    _, table, reason, flags, settings = out.split("\n\n", 4)
    assert "1f1b" in table
    assert reason.startswith("A: tp2 pp2 dp1, 1f1b")
    assert " less than B with " in reason
    assert "none, against full recompute" in reason
    assert shlex.split(flags)[4:9] == [
        "--micro-batch-size", "1", "--global-batch-size", "8", "--sequence-parallel"
    ]  # fmt: skip
    assert tomllib.loads(settings)["parallelism"]["pipeline_parallel_degree"] == 2


def test_a_wrong_rank_to_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before the search, and no file is written."""
    for rank in ("x", "-1", "0.5"):
        words = [f"--explain={rank}", "--csv", tmp_path / "a.csv"]
        assert "--explain must be" in fail(capsys, *PLAN, *words)
    assert not list(tmp_path.iterdir())


def test_the_order_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings of torchtitan name it; without them, the file alone is written."""
    path = tmp_path / "order.csv"
    one = ["--schedules", "zb_h1", "--tensor-parallel", 2, "--sequence-parallel", "true"]
    arguments = [*PLAN, *one, "--order", path]
    succeed(capsys, *arguments)
    order = ps.Schedule.load(path)
    assert (order.n_devices, order.n_microbatches) == (2, 8)
    path.unlink()
    out = succeed(capsys, *arguments, "--torchtitan")
    assert f'pipeline_parallel_schedule_csv = "{path}"' in out
    assert ps.Schedule.load(path) == order


def test_progress_is_shown_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to stderr, so that the output can be read by other programs."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*map(str, PLAN)]) == 0
    out, err = capsys.readouterr()
    assert "configuration/s" in err
    assert " configurations: " in out.splitlines()[0]


@pytest.mark.slow
def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All configurations, and their picture."""
    succeed(capsys, *PLAN, "--csv", tmp_path / "a.csv", "--plot", tmp_path / "a.png")
    table, plans = pd.read_csv(tmp_path / "a.csv"), same_plans()
    assert len(table) == len(plans.evaluations)
    assert table["step"][0] == plans.best.step
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (2148, 1050)


def test_a_file_of_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments override the file; paths of GPUs in it are beside it."""
    (tmp_path / "plan.toml").write_text(
        """
        global_batch = 8
        tensor_parallel = [1, 2]
        pipeline_parallel = 4
        microbatch_size = 1
        schedules = ["1f1b", "zbv"]
        recompute = "none"
        shard_optimizer = true
        [model]
        hidden_size = 1024
        n_layers = 8
        n_heads = 8
        sequence_length = 1024
        vocabulary_size = 8192
        [cluster]
        machine = "dgx_h100"
        n_gpus = 4
        """
    )
    config = ["plan", "--config", tmp_path / "plan.toml", "--pipeline-parallel", 2]
    out = succeed(capsys, *config, "--best", 2)
    assert out.splitlines()[1:] == same_plans().summary(2).splitlines()[1:]
    other = succeed(capsys, *config, "--size", "n_layers=6", "--best", 2)
    assert other.splitlines()[-2:] != out.splitlines()[-2:]


def test_files_beside_the_file_of_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('model = "gpt2_xl"\n[cluster]\nmachine = "dgx_h100"\ngpu = "fit.json"\n')
    message = fail(capsys, "plan", "--config", path, "--gpus", 1, "--global-batch", 1)
    assert str(tmp_path / "fit.json") in message


def test_names_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Model and machine may be names; limits may have units."""
    path = tmp_path / "plan.toml"
    path.write_text('model = "gpt2_xl"\ncluster = "dgx_h100"\nmemory_limit = "79GB"\n')
    one = ["--gpus", 1, "--global-batch", 1, "--recompute", "none"]
    out = succeed(capsys, "plan", "--config", path, *one)
    assert "tp1 pp1 dp1" in out
    assert "1 simulated" in out.splitlines()[0]


@pytest.mark.slow
def test_noise_ranks_by_a_percentile(capsys: pytest.CaptureFixture[str]) -> None:
    out = succeed(capsys, *PLAN, "--noise", 0.05, "--percentile", 90, "--best", 1)
    assert "noisy" in out
    steps = rows(out)[5]
    assert steps[3] != steps[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "global_batch is missing; give --global-batch"),
        (["plan", *CLUSTER], "MODEL is missing; name one, such as llama3_70b"),
        (["plan", "lama3_70b", *CLUSTER], "unknown transformer 'lama3_70b'; did you mean"),
        (["plan", *SIZES, "--global-batch", 8], "--cluster is missing; give such as --cluster"),
        ([*PLAN, "--cluster", "dgx"], "unknown machine 'dgx'; did you mean"),
        ([*PLAN, "--gpus", 0], "a cluster needs a GPU"),
        ([*PLAN, "--size", "hidden=8"], "unknown size 'hidden' of a model"),
        ([*PLAN, "--best", 0], "--best must be at least 1, got 0"),
        ([*PLAN, "--schedules", "1f2b"], "unknown schedule '1f2b'; did you mean '1f1b'"),
        ([*PLAN, "--tensor-parallel", 3], "tensor_parallel=3"),
        (
            [*PLAN, "--memory-limit", "1MiB"],
            "none of 6 configurations fits in memory_limit, 1.00 MiB",
        ),
        ([*PLAN, "--noise", "x"], "must be"),
        ([*PLAN, "--plot", "a.txt"], "must end in .pdf, .png, .svg"),
        ([*PLAN, "--tensor", 1], "unrecognized argument --tensor; did you mean '--tensor-paral"),
    ],
)
def test_mistakes(
    arguments: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedules", "zbv", "--megatron"], "Megatron-LM has no schedule 'zbv'"),
        (["--explain", 99], "rank must be a whole number from 0 to"),
    ],
)
def test_a_refusal_comes_after_the_plan(
    arguments: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search of minutes is not lost."""
    assert main([str(x) for x in (*PLAN, *arguments)]) == 2
    out, err = capsys.readouterr()
    assert "configurations: " in out
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor_paralel = 1", "unknown plan.toml: key"),
        ("model = 3", "model must be a name or a table, got 3"),
        ("cluster = [", "cannot read settings from"),
        ("[cluster]\nmachines = 'dgx_h100'\nmachine = 'dgx_h100'", "unknown key of a cluster"),
    ],
)
def test_mistakes_in_a_file(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(text)
    assert message in fail(capsys, *PLAN[:11], "--config", "plan.toml", "--global-batch", 8)


def test_measured_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of layers has no sizes to change."""
    path = tmp_path / "layers.csv"
    pd.DataFrame({"forward": [1e-3] * 4, "backward": [2e-3] * 4}).to_csv(path, index=False)
    arguments = ["plan", path, "--cluster", "dgx_h100", "--gpus", 2, "--global-batch", 4]
    out = succeed(capsys, *arguments, "--pipeline-parallel", 2, "--schedules", "1f1b")
    assert "tp1 pp2 dp1" in out
    assert "has measured layers" in fail(capsys, *arguments, "--size", "n_layers=3")
