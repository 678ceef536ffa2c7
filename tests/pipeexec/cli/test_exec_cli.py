"""The command ``pipeexec``: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import fcntl
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeexec as px
import pipesim as ps
from pipeexec.cli import main
from pipeexec.profiling import Profile
from pipeexec.run_directory import read_record
from pipesim.errors import ArgumentError
from pipesim.utils.command_line import MOST_LINES


def words(text: str) -> list[str]:
    return text.split()


pytestmark = pytest.mark.usefixtures("empty_figures")

SIZES = "--layers 4 --width 16 --heads 2 --sequence 8"
SMALL = words("--layers 2 --width 16 --heads 2 --sequence 8 --microbatches 2 --batch 5 --steps 2")


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """Restore what a command line may set, since it ends with its process."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.fixture
def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if any step runs."""

    def step(*_: Any) -> None:
        raise AssertionError("a step ran")

    monkeypatch.setattr(px.Pipeline, "step", step)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A stranger clones it, types make demo, and looks at a figure.\n" * 5)
    return path


def fail(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run the command, which must fail with one line on stderr, and return that line."""
    assert main([str(arg) for arg in args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("pipeexec: warning: ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("pipeexec: error: ")
    return lines[0]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the run directory of a small validation, and the arguments that made it."""
    folder = tmp_path_factory.mktemp("cli")
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 10)
    results = folder / "results"
    return results / "small", [
        *("validate", *SMALL, "--warm-up", "1", "--seed", "7", "--recompute", "never,always"),
        *("--schedules", "1f1b", "--text", str(text), "--results", str(results)),
        *("--name", "small"),
    ]


@pytest.mark.slow
def test_validate_and_show(
    demo: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A row a schedule and mode, the costs, and where the figure is; `show` prints the same."""
    path, arguments = demo
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    table, order, *rest = out.split("\n\n")
    lines = table.splitlines()
    assert "predicted ms" in lines[0]
    assert "measured ms" in lines[0]
    assert [" ".join(line.split()[:2]) for line in lines[1:]] == ["1f1b never", "1f1b always"]
    assert "error: predicted over measured makespan" in out
    assert "costs (ms; loaded: all stages running" in out
    assert rest[-1] == f"wrote {path}: the figure is {path / 'overlay.png'}\n"
    assert (path / "overlay.png").is_file()
    messages = err.splitlines()
    assert [line for line in messages if line.startswith("  round")]
    assert all(line.startswith(("  ", "pipeexec: warning: ")) for line in messages), err
    # So small a model cannot be predicted well: its tasks are short, or slow on a busy machine.
    assert any(re.search("below 1 ms|the machine is busy", line) for line in messages), err

    record = read_record(path)
    assert (record["seed"], record["batch"], record["steps"]) == (7, 5, 2)
    assert record["model"] == "gpt"
    assert record["options"]["width"] == 16
    assert sum(record["layers_of_stages"]) == 4
    assert set(record["rows"]) == {"1f1b never", "1f1b always"}

    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[: len(lines)] == lines
    assert order in out


@pytest.mark.slow
def test_a_seed_makes_a_run_that_can_be_repeated(demo: tuple[Path, list[str]]) -> None:
    """The same weights, data and dropout: the same losses."""
    path, arguments = demo
    losses = []
    options = words("--dropout 0.1 --schedules 1f1b --recompute never")
    for name in ("first", "second"):
        assert main([*arguments, *options, "--name", name]) == 0
        rows = px.load_run(path.parent / name).rows
        losses.append([row.losses for row in rows.values()])
    assert losses[0] == losses[1]
    assert len(losses[0][0]) == 2


@pytest.mark.slow
def test_an_image_model_on_uneven_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With transfers on the compute stream, and three stages on however many cores."""
    arguments = words("validate --model convnet --layers 2 --width 4 --image-size 8 --classes 3")
    arguments += words("--microbatches 2 --steps 1 --warm-up 0 --balance 2,1,1 --no-overlap")
    arguments += words(f"--schedules gpipe --recompute except_last --results {tmp_path}")
    assert main(arguments) == 0
    run = px.load_run(tmp_path / "validate")
    assert list(run.rows) == ["gpipe except_last"]
    graph = run.rows["gpipe except_last"].measured.graph
    assert graph.n_stages == 3
    assert {name for _, name in graph.streams} == {"compute"}
    assert read_record(tmp_path / "validate")["layers_of_stages"] == [2, 1, 1]
    assert read_record(tmp_path / "validate")["batch"] == 8


@pytest.mark.slow
def test_profile_show_and_validate_with_its_costs(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Costs are measured once, shown, and predicted from without another calibration."""
    options = [*SMALL, "--text", str(text), "--results", str(tmp_path)]
    path = tmp_path / "costs"
    assert main(["profile", *options, "--name", "costs", "--schedules", "zb_h1"]) == 0
    out, err = capsys.readouterr()
    assert "measuring: 2 steps to warm up, then 2" in err
    assert out.startswith("costs (ms; loaded: all stages running")
    assert "\nI    0 " in out, "zb_h1 splits its backward"
    assert "0 to 1 loaded" in out
    assert out.endswith(f"\nwrote {path}: the figure is {path / 'transfers.png'}\n")
    assert (path / "transfers.png").is_file()
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == out.splitlines()[:-2]

    arguments = ["validate", *options, "--recompute", "never", "--repeat", "2"]
    for file, name in ((path, "1f1b,zb_h1"), (path / "costs.json", "1f1b")):
        own = ["--schedules", name, "--costs", str(file), "--name", name]
        assert main([*arguments, *own, "--details"]) == 0
        out = capsys.readouterr().out
        assert "by Student's t over 2 repeats" in out
        assert "what the error consists of" in out
        assert "error of each operation and stage" in out
        assert "costs (ms" not in out
        run = px.load_run(tmp_path / name)
        assert run.costs == Profile.load(path).costs
        record = read_record(tmp_path / name)
        assert (record["repeat"], record["costs"]) == (2, str(file))
        assert main(["show", str(tmp_path / name), "--details"]) == 0
        assert out.startswith(capsys.readouterr().out.rstrip())
    assert main(["show", str(tmp_path / name)]) == 0
    short = capsys.readouterr().out
    heads = short.splitlines()[0]
    assert "error" in heads
    assert "worst" not in heads
    assert "what the error consists of" not in short
    assert "pipeexec show DIRECTORY --details" in short


def test_costs_of_other_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages in the file, three in the pipeline: told before anything runs."""
    ps.Costs((1, 2), (1, 2)).save(tmp_path / "costs.json")
    line = fail(capsys, "validate", *SMALL, "--stages", 3, "--costs", tmp_path / "costs.json")
    assert "do not suit graph 'gpipe never' of 3 stages" in line
    assert "forward has 2 values for 3 stages" in line


# Mistakes: one line, before any work


@pytest.mark.slow
@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model gtp", "unknown model 'gtp'; did you mean 'gpt'"),
        ("--schedules 1f1c", "unknown schedule '1f1c'; did you mean '1f1b'"),
        ("--schedules gpipe,", None),
        ("--schedules ,", "name at least one schedule, one recompute mode and one --grad-sync"),
        ("--replicas 0", "n_replicas must be"),
        ("--replicas 2 --grad-sync often", "unknown grad_sync 'often'"),
        ("--recompute sometimes", "unknown recompute 'sometimes'"),
        ("--model convnet --heads 2", "unknown option of model 'convnet': 'heads'"),
        ("--image-size 8", "unknown option of model 'gpt': 'image_size'"),
        ("--devices cpu,tpu", "'tpu' is no device"),
        ("--devices cpu", "the graph has 2 devices, got 1"),
        ("--devices cpu,meta", "'meta' cannot run stages yet"),
        ("--batch 3 --microbatches 4", "inputs have 3 samples, too few for 4 micro-batches"),
        ("--batch 0", "batch must be at least 1, got 0"),
        ("--batch -2", "batch must be at least 1, got -2"),
        ("--stages 9 --layers 4", "more stages than layers: got n_stages=9 for a model of 6"),
        ("--stages 0", "n_stages must be at least 1, got 0"),
        ("--microbatches 0", "n_microbatches must be at least 1, got 0"),
        ("--steps 0", "n_steps must be at least 1, got 0"),
        ("--repeat 0", "repeat must be at least 1, got 0"),
        ("--costs /absent/costs.json", "cannot read costs from /absent/costs.json"),
        ("--warm-up -1", "warm_up must be at least 0, got -1"),
        ("--seed -1", "seed must be at least 0, got -1"),
        ("--learning-rate -1", "learning rate must be a finite number >= 0, got -1.0"),
        ("--learning-rate nan", "learning rate must be a finite number >= 0, got nan"),
        ("--learning-rate inf", "learning rate must be a finite number >= 0, got inf"),
        ("--balance 2,1", "balance [2, 1] sums to 3 layers, but the model has 6"),
        ("--balance 2,x", "not whole numbers: '2,x'"),
        ("--width 15", "d_model must be a multiple of n_heads"),
        ("--dropout 2", "dropout must be a probability"),
        ("--text /absent/file", "cannot read the text /absent/file: No such file"),
        ("--stages two", "invalid int value: 'two'"),
        ("--balance 1,2,3 --schedules zbv", "--balance needs a multiple of 2 layer counts for zbv"),
        ("--balance 2,2,2 --stages 2", "3 layer counts, but the schedules have 2 stages on 2 devi"),
        ("--schedules gpipe,zbv", "gpipe never: [0, 1], zbv never: [0, 1, 1, 0]: validate"),
        (
            "--schedules zbv,interleaved_1f1b",
            "zbv never: [0, 1, 1, 0], interleaved_1f1b never: [0, 1, 0, 1]: validate them apart",
        ),
        ("--name=..", "name '..' is no name of a folder; give a name without '/'"),
        ("--name=", "name '' is no name of a folder"),
        ("--name ../esc", "name '../esc' is no name of a folder"),
        ("--name /tmp/abs", "its parent folder by --results"),
        ("--name a\0b", r"name 'a\x00b' is no name of a folder"),
        (f"--name {'n' * 230}", "name 'nnnnnnnnnnnnnnnnnnnn...' has more than 223 bytes"),
        ("--name run-partial", "ends with '-partial', as the directory that an error"),
        (
            "--batch 999999999999",
            "batch=999999999999 samples of sequence=128 needs 4.23e+06 GB, and",
        ),
        ("--model convnet --batch 999999999999", "batch=999999999999 images of image_size=32 nee"),
        ("--model convnet --image-size 9999999", "batch=32 images of image_size=9999999 needs"),
        ("--model convnet --classes 999999999999", "n_classes=999999999999 needs"),
        ("--layers 999999999999", "a model of n_layers=999999999999, d_model=128, sequence=128, v"),
        ("--width 4000000000", "d_model=4000000000, sequence=128, vocabulary=256 needs"),
        ("--sequence 99999999999", "sequence=99999999999, vocabulary=256 needs"),
        ("--steps 999999999999", "keeping n_steps=999999999999 x repeat=1 results needs"),
        ("--repeat 999999999999", "keeping n_steps=21 x repeat=999999999999 results needs"),
        ("--stages 999999999999", "schedule 'gpipe' of 1.6e+13 actions needs"),
        ("--microbatches 999999999999", "schedule 'gpipe' of 4e+12 actions needs"),
        ("--replicas 999999999999", "a graph of 9.6e+13 tasks needs"),
        ("--n-buckets 999999999999", "n_buckets must be at most 1000, got 999999999999"),
        ("--no-such-option", "unrecognized arguments: --no-such-option (see pipeexec --help)"),
    ],
)
def test_mistakes(
    arguments: str,
    message: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And no run directory is left."""
    if message is None:  # a trailing comma is none: the steps begin
        with pytest.raises(AssertionError, match="a step ran"):
            main(["validate", *arguments.split(), "--results", str(tmp_path)])
        return
    line = fail(capsys, "validate", *arguments.split(), "--results", tmp_path / "results")
    assert message in line
    if (tmp_path / "results").exists():
        assert list((tmp_path / "results").iterdir()) == []


# Counts of devices and micro-batches: of flags, of files, of --balance


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save schedules where the command runs."""
    monkeypatch.chdir(tmp_path)
    ps.schedule("1f1b", 3, 4).save("three.csv")
    ps.schedule("zbv", 2, 8).save("v.csv")
    ps.schedule("gpipe", 2, 6).save("two.csv")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note devices, micro-batches, layers and samples, and let no step run."""
    noted: list[str] = []

    def validate(stages: Any, graphs: Any, devices: Any, _: Any, batches: Any, *__: Any, **___: Any
    ) -> None:  # fmt: skip
        micro = {graph.n_microbatches for graph in graphs.values()}
        layers = ",".join(str(len(stage)) for stage in stages)
        samples = len(next(iter(batches))[1])
        noted.append(f"{len(devices)} devices, {micro}, {layers} layers, {samples} samples")
        raise ArgumentError("enough")

    monkeypatch.setattr(sys.modules["pipeexec.validation.validate"], "validate", validate)
    return noted


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--schedules v.csv --balance 2,2,1,1", "2 devices, {8}, 2,2,1,1 layers, 32 samples"),
        ("--schedules three.csv", "3 devices, {4}, 3,2,1 layers, 16 samples"),
        ("--schedules three.csv,1f1b", "3 devices, {4}, 3,2,1 layers, 16 samples"),
        ("--schedules zbv --balance 1,2,2,1", "2 devices, {8}, 1,2,2,1 layers, 32 samples"),
        (
            "--schedules 1f1b --balance 2,4 --stages 2 --microbatches 1",
            "2 devices, {1}, 2,4 layers, 4 samples",
        ),
        (
            "--schedules dualpipe,1f1b --balance 2,4 --microbatches 6",
            "2 devices, {6}, 2,4 layers, 24 samples",
        ),
    ],
)
def test_counts(
    arguments: str, expected: str, counts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A file has its own counts, --balance has as many devices as its stages take."""
    fail(capsys, "validate", *words(SIZES), *arguments.split())
    assert counts == [expected]


@pytest.mark.usefixtures("files", "no_step")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--schedules three.csv --stages 2",
            "number of devices; got 3 in three.csv, 2 in --stages",
        ),
        ("--schedules two.csv --microbatches 8", "got 6 in two.csv, 8 in --microbatches: leave"),
        ("--schedules two.csv,three.csv", "got 2 in two.csv, 3 in three.csv: leave --stages out"),
        ("--schedules v.csv --balance 3,3", "2 layer counts, but the schedules have 4 stages on 2"),
        ("--schedules none.csv", "cannot read schedule none.csv: No such file"),
    ],
)
def test_counts_that_disagree(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each count is named with the place that it comes from."""
    assert message in fail(capsys, "validate", *words(SIZES), *arguments.split())


def test_every_schedule_can_be_balanced() -> None:
    """The counts with which --balance asks for the stages a device suit all schedules."""
    for name in ps.schedules(2, 8).index:
        schedule = ps.schedule(name, 2, 8)
        assert schedule.n_stages % schedule.n_devices == 0, name


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize("command", ["run", "profile"])
def test_more_steps_than_can_be_kept(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`validate` is one of the mistakes above."""
    steps = ["--steps", str(10**12), "--results", str(tmp_path)]
    assert main([command, *SMALL[:-2], *steps]) == 2
    assert "error: keeping n_steps=1000000000000 results needs" in capsys.readouterr().err


@pytest.mark.usefixtures("no_step")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fail(capsys, "validate", "--devices", "cuda:0,cuda:1", "--results", tmp_path)
    assert "'cuda:0' is not there: torch sees 0 CUDA devices" in line


@pytest.mark.usefixtures("no_step")
def test_results_that_cannot_be_written_are_found_before_the_work(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A parent that is a file cannot be written into, by any command."""
    line = fail(capsys, "validate", "--results", text / "results")
    assert "cannot write results in" in line
    (tmp_path / "notes").mkdir()
    line = fail(capsys, "validate", "--results", tmp_path, "--name", "notes")
    assert "notes exists and is no run directory" in line


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize("command", ["validate", "run", "profile"])
def test_a_run_that_another_process_writes(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before it begins; the lock of a process that has ended counts for nothing."""
    lock = tmp_path / ".same.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 17 on there")
        file.flush()
        line = fail(capsys, command, *SMALL, "--results", tmp_path, "--name", "same")
        assert f"process 17 on there is writing {tmp_path}/same; wait for its end" in line
    with pytest.raises(AssertionError, match="a step ran"):
        main([command, *SMALL, "--results", str(tmp_path), "--name", "same"])
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_fails_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: Any) -> None:
        raise ValueError("several\nlines")

    monkeypatch.setattr("pipeexec.demo_models.gpt._Block.forward", forward)
    assert main(["validate", *SMALL, "--results", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "pipeexec: error: 0F0 failed (device 0, stage 0, micro-batch 0): ValueError: seve" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["validate", "run", "profile"])
def test_an_interrupt_is_told(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(px.Pipeline, "step", interrupted)
    assert main([command, *SMALL, "--results", str(tmp_path)]) == 130
    err = capsys.readouterr().err
    assert err.endswith("pipeexec: interrupted\n")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_show_of_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "absent is no whole run directory" in fail(capsys, "show", tmp_path / "absent")
    assert "is no whole run directory" in fail(capsys, "show", tmp_path)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'vaildate'" in fail(capsys, "vaildate")


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["validate", "--help"], ["profile", "--help"], ["show", "--help"]]
)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: pipeexec")
    assert err == ""


@pytest.mark.parametrize("command", ["validate", "run", "profile", "train", "show"])
def test_help_is_short_and_complete(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for arguments in ([command, "--help"], [command, "--help", "all"]):
        with pytest.raises(SystemExit):
            main(arguments)
        texts.append(capsys.readouterr().out)
    short, full = texts
    assert "None" not in short
    assert len(short.splitlines()) <= MOST_LINES
    assert all(len(line) <= 80 for line in short.splitlines())
    flags = re.findall(r"^  (?:-h, )?(--[\w-]+)", full, re.MULTILINE)
    assert flags == re.findall(r"^  (?:-h, )?(--[\w-]+)", short, re.MULTILINE)


def test_help_and_mistakes_are_answered_without_torch() -> None:
    """Torch takes seconds to load. The package loads it when a name is first used."""
    script = (
        "import runpy, sys\n"
        "for arguments in ('--help', 'validate --help all', '--completion bash',"
        " 'validate --stages x', 'train nosuch.toml', 'show nosuch', 'run --costs nosuch'):\n"
        "    sys.argv = ['pipeexec', *arguments.split()]\n"
        "    try:\n        runpy.run_module('pipeexec', run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        print('END', arguments, end.code, 'torch' in sys.modules)\n"
        "import pipeexec\n"
        "assert pipeexec.Pipeline.__name__ == 'Pipeline'\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("END")] == [
        "END --help 0 False",
        "END validate --help all 0 False",
        "END --completion bash 0 False",
        "END validate --stages x 2 False",
        "END train nosuch.toml 2 False",
        "END show nosuch 2 False",
        "END run --costs nosuch 2 False",
    ]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"pipeexec {px.__version__}\n"
