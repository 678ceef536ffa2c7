"""The command ``pipesim calibrate``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from command_output import fail, rows, succeed
from measured_rows import MACHINE, measured_rows
from PIL import Image

import pipesim as ps

CONSTANTS = ["--constants", "flops,launch"]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of steps on one device, of which the second was measured 30 % too long."""
    path = tmp_path_factory.mktemp("steps") / "steps.csv"
    table = pd.DataFrame([row for row in measured_rows() if row["n_devices"] == 1])
    table.loc[1, "seconds"] *= 1.3
    table.assign(label=[f"run {k}" for k in range(len(table))]).to_csv(path, index=False)
    return path


@pytest.mark.slow
def test_what_is_printed_and_written(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables and files say what `GPU.fit` says."""
    names = ["--network", MACHINE, "--constants", "flops,launch,network_latency,synchronization"]
    files = [tmp_path / name for name in ("fit.png", "fit.csv", "fit.json")]
    writes = [part for flag, file in zip(("--plot", "--csv", "--json"), files, strict=True)
              for part in (flag, file)]  # fmt: skip
    out = succeed(capsys, "calibrate", steps, "--gpu", "a100_80gb", *names, *writes)
    with pytest.warns(ps.errors.CalibrationWarning):
        fitted = ps.GPU.fit(steps, gpu="a100_80gb", network=MACHINE, constants=names[-1].split(","))
    lines = rows(out)
    assert lines[0] == rows("4 constants fitted to 4 steps, from a100_80gb in dgx_a100")[0]
    assert lines[2][:2] == ["flops", f"{fitted.gpu.flops:.4g}"]
    assert lines[5] == ["synchronization", "0", "0.0003", "100%", "100.0%", "no:", "kept"]
    left_out = fitted.errors.loc["left out"]
    assert lines[8] == ["left", "out", *(f"{error:.1%}" for error in left_out)]
    worst = fitted.rows["error_left_out"].abs().idxmax()
    assert lines[10][:2] == ["run", str(worst)]
    assert "warning: the rows do not determine synchronization: its effect" in out
    scope = {"ps": ps, "model": ps.Transformer.preset("gpt2_xl"), "n_stages": 2}
    code = out[out.index("gpu = ps.GPU(") :]
    exec(code, scope)  # noqa: S102  # the printed statements
    assert scope["gpu"].flops == pytest.approx(fitted.gpu.flops, rel=1e-5)  # type: ignore[attr-defined]
    pd.testing.assert_frame_equal(pd.read_csv(files[1]), fitted.rows, check_exact=False)
    assert ps.GPU(**json.loads(files[2].read_text())["gpu"]) == fitted.gpu
    with Image.open(files[0]) as image:
        assert image.size == (1050, 1050)


@pytest.mark.slow
def test_a_fitted_gpu_is_a_start(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    succeed(capsys, "calibrate", steps, "--gpu", "a100_80gb", *CONSTANTS, "--json", path)
    fitted = ps.GPU(**json.loads(path.read_text())["gpu"])
    out = succeed(capsys, "calibrate", steps, "--gpu", path, *CONSTANTS)
    assert rows(out)[2][2] == f"{fitted.flops:.4g}"
    assert "Network" not in out[out.index("gpu = ps.GPU(") :]
    assert "name='a100_80gb fitted to 4 steps'" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "a100"], "unknown GPU 'a100'; did you mean 'a100_40gb'"),
        ([], "the following arguments are required: --gpu"),
        (["--gpu", "h200", "--network", "dgx"], "unknown network 'dgx'; did you mean 'dgx_a100'"),
        (["--gpu", "h200", "--constants", "flops,lunch"], "did you mean 'launch'"),
        (["--gpu", "h200", "--plots", "x.png"], "unrecognized argument --plots; did you mean"),
        (["--gpu", "h200", "--plot", "x.gif"], "must end in .pdf, .png, .svg"),
        (["--gpu", "nowhere.json"], "cannot read a GPU from nowhere.json"),
        (["--gpu", "h200", "--no-prior", "--constants",
          "flops,bandwidth,launch,overhead,half_depth"], "4 measured steps for 5 constants"),
    ],
)  # fmt: skip
def test_mistakes(
    steps: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capsys, "calibrate", steps, *arguments)


def test_mistakes_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("model,microbatch_size,n_microbatches,seconds\ngpt2_xl,1,2,0\n")
    error = fail(capsys, "calibrate", path, "--gpu", "h200")
    assert re.search(r"steps\.csv, line 2: seconds must be a finite number above 0, got 0", error)
    gpu = tmp_path / "gpu.json"
    for text, message in (
        ("[1]", "has no table"),
        ('{"gpu": 3}', "has no table"),
        ('{"flops": 1}', "gpu lacks bandwidth"),
        ("{", "cannot read a GPU from"),
    ):
        gpu.write_text(text)
        path.write_text("model,microbatch_size,n_microbatches,seconds\ngpt2_xl,1,2,1\n")
        assert message in fail(capsys, "calibrate", path, "--gpu", gpu)


def test_help_names_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    out = succeed(capsys, "calibrate", "--help", "file")
    assert "hidden_size, n_layers, n_heads" in out
