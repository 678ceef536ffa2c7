"""``pipeexec train config.toml``: what it trains, what it refuses, and torchrun."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from places import ROOT
from ranks import environment, free_port, run_to_end

import pipeexec as px
from pipeexec.cli import main
from pipeexec.training import TrainingRun
from pipeexec.training import train as interrupts
from pipeexec.training.batch_source import TextBatches, text_files

pytestmark = pytest.mark.usefixtures("empty_figures")

CONFIG = """
[model]
name = "gpt"
layers = 2
width = 16
heads = 2
sequence = 8

[data]
text = ["*.txt"]
batch_size = 4

[pipeline]
stages = 2
microbatches = 2

[optimizer]
lr = 1e-2

[training]
directory = "{folder}/run"
steps = 4
predict = false
"""

MODULE = """
import torch
from torch import nn

def model(width=4, *, fail=False):
    if fail:
        raise OSError("no weights here")
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4), nn.Linear(4, 1))

def tied(width=4):
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))
    layers[2].weight = layers[0].weight
    return layers

def loss(output, targets):
    return (output - targets).square().mean()

def data(batch_size=4, *, n=3):
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(batch_size, 4, generator=draw), torch.ones(batch_size, 1))
               for _ in range(n)]
    return batches, batches[:1]

def shared(batch_size, replicas, n_replicas):
    draw = torch.Generator().manual_seed(0)
    first, end = replicas[0], replicas[-1] + 1
    own = slice(first * batch_size // n_replicas, end * batch_size // n_replicas)
    return [(torch.randn(batch_size, 4, generator=draw)[own], torch.ones(batch_size, 1)[own])
            for _ in range(3)]

def stream(batch_size):
    yield torch.ones(batch_size, 4), torch.ones(batch_size, 1)

constant = 3
"""

#: Sections of a configuration that names functions of `MODULE`.
FACTORIES = """
[model]
factory = "own_code:model"
loss = "own_code:loss"
width = 8
[data]
factory = "own_code:data"
batch_size = 8
[pipeline]
stages = 2
microbatches = 2
[training]
directory = "{folder}/run"
predict = false
"""


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """Restore what a command line may set, since it ends with its process."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
    sys.modules.pop("own_code", None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a text and the user's module."""
    (tmp_path / "text.txt").write_text("A stranger clones it, and trains a small model.\n" * 9)
    (tmp_path / "own_code.py").write_text(MODULE)
    return tmp_path


def write(folder: Path, text: str = CONFIG, **changes: str) -> str:
    """Write a configuration with changed lines; return its path."""
    text = text.replace("{folder}", str(folder))
    for old, new in changes.items():
        text = re.sub(rf"(?m)^{old} = .*$", new, text)
    path = folder / "config.toml"
    path.write_text(text)
    return str(path)


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Train, which must fail with one line on stderr, and return that line."""
    assert main(["train", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), (out, err)
    return err


def losses(folder: Path, name: str = "run") -> list[float]:
    return TrainingRun.load(folder / name).losses


class TestRuns:
    """What a configuration trains."""

    def test_files_and_summary(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["train", write(folder)]) == 0
        out, err = capsys.readouterr()
        assert "4 steps: loss" in out
        assert "step 4: loss" in err
        assert main(["show", str(folder / "run")]) == 0
        assert capsys.readouterr().out == out
        assert "evaluation: loss" in out
        run = TrainingRun.load(folder / "run")
        assert run.losses[-1] < run.losses[0]
        assert run.evaluations["step"].tolist() == [4]
        assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == [
            "step-00000004"
        ]

    @pytest.mark.slow
    def test_continues_to_the_last_bit(self, folder: Path) -> None:
        path = write(folder)
        assert main(["train", path, "--steps", "2"]) == 0
        assert main(["train", path, "--resume"]) == 0
        resumed = losses(folder)
        assert main(["train", path, "--fresh"]) == 0
        assert losses(folder) == resumed

    @pytest.mark.parametrize("is_second", [False, True])
    def test_ctrl_c_ends_it_with_130(
        self,
        is_second: bool,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """At once, or after the step that runs; without a traceback."""
        step = px.Pipeline.step

        def interrupted(*arguments: Any) -> Any:
            for _ in range(1 + is_second):
                signal.raise_signal(signal.SIGINT)
            return step(*arguments)

        monkeypatch.setattr(interrupts, "_COPY_SECONDS", 0.0)
        monkeypatch.setattr(px.Pipeline, "step", interrupted)
        assert main(["train", write(folder)]) == 130
        last = capsys.readouterr().err.splitlines()[-1]
        expected = "  interrupted after step 1: the same command continues"
        assert last == ("pipeexec: interrupted" if is_second else expected)

    def test_other_settings_are_refused(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["train", write(folder)])
        capsys.readouterr()
        path = write(folder, lr="lr = 2e-2", microbatches="microbatches = 4")
        assert "optimizer.lr is 0.01 there, and 0.02 now" in fail(capsys, path)

    def test_factories(self, folder: Path) -> None:
        assert main(["train", write(folder, FACTORIES)]) == 0
        assert len(losses(folder)) == 3

    def test_scheduler_and_decay(self, folder: Path) -> None:
        text = CONFIG.replace("lr = 1e-2", "lr = 1e-2\nweight_decay = 0.1\ndecay_dimensions = 2")
        text += '[scheduler]\nname = "CosineAnnealingLR"\nT_max = 3\nwarm_up = 2\n'
        assert main(["train", write(folder, text)]) == 0
        rates = TrainingRun.load(folder / "run").table["lr"].tolist()
        assert rates == pytest.approx([1e-2, 1e-2, 0.75e-2, 0.25e-2])

    def test_clipping(self, folder: Path) -> None:
        """The norm of all gradients is in the log, and changes the losses."""
        assert main(["train", write(folder)]) == 0
        whole = losses(folder)
        path = write(folder, CONFIG.replace("lr = 1e-2", "lr = 1e-2\nmax_grad_norm = 1e-6"))
        assert main(["train", path, "--fresh"]) == 0
        table = TrainingRun.load(folder / "run").table
        assert (table["grad_norm"] > 1e-6).all()
        assert table["loss"][0] == whole[0]
        assert losses(folder) != whole

    def test_tied_parameters(self, folder: Path) -> None:
        """A factory's model may have an embedding that is its head, too."""
        assert main(["train", write(folder, FACTORIES.replace("own_code:model", "own_code:tied"))
                     ]) == 0  # fmt: skip
        weights = px.read_checkpoint(px.latest_checkpoint(folder / "run" / "checkpoints"))["model"]
        assert torch.equal(weights["0.weight"], weights["2.weight"])

    @pytest.mark.slow
    def test_float16(self, folder: Path) -> None:
        """The gradient scaler is part of checkpoints."""
        text = CONFIG.replace("[training]", '[training]\nautocast = "float16"')
        path = write(folder, text)
        assert main(["train", path, "--steps", "2"]) == 0
        assert main(["train", path]) == 0
        resumed = TrainingRun.load(folder / "run").table
        path = write(folder, text, predict="predict = true")  # a profile changes no number
        assert main(["train", path, "--fresh"]) == 0
        whole = TrainingRun.load(folder / "run").table
        names = ["loss", "grad_norm", "skipped"]
        assert resumed[names].equals(whole[names])
        path = px.latest_checkpoint(folder / "run" / "checkpoints")
        assert px.read_checkpoint(path)["objects"]["grad_scaler"]["_growth_tracker"] == 4

    @pytest.mark.slow
    def test_autocast(self, folder: Path) -> None:
        assert main(["train", write(folder)]) == 0
        whole = losses(folder)
        path = write(folder, CONFIG.replace("[training]", '[training]\nautocast = "bfloat16"'))
        assert main(["train", path, "--fresh"]) == 0
        assert losses(folder) == pytest.approx(whole, rel=1e-2)
        assert losses(folder) != whole


def changed(section: str, line: str) -> str:
    """Return the configuration with one more line in a section."""
    return CONFIG.replace(f"[{section}]", f"[{section}]\n{line}")


BAD: dict[str, tuple[str, str]] = {
    "no TOML": ("[model", "config.toml: Expected"),
    "section": ("[modell]", "unknown section [modell]; did you mean 'model'?"),
    "no section": ("model = 3", "model must be a section; write [model]"),
    "key": (changed("pipeline", "stage = 2"), "[pipeline] has unknown key 'stage'; did you mean "
            "'stages'?"),
    "type": (CONFIG.replace("steps = 4", 'steps = "4"'), "[training] steps must be a whole number, "
             "got '4' (str); give an int of at least 1"),
    "flag": (CONFIG.replace("predict = false", "predict = 'yes'"), "[training] predict must be "
             "true or false, got 'yes' (str)"),
    "choice": (changed("pipeline", 'recompute = "allways"'), "[pipeline] unknown recompute "
               "'allways'; did you mean 'always'? (known: always, except_last, never)"),
    "list": (changed("training", "timelines = [0]"), "[training] timelines must be a list, each a "
             "whole number (at least 1), got [0] (list)"),
    "one of several types": (changed("pipeline", "split = [1, 'a']"), "[pipeline] split must be a "
                             "list of blocks of each stage or a list of names of modules or a "),
    "nothing to train on": (CONFIG.replace("[data]", "[data]\nheld_out = 1.0"), "[data] held_out "
                            "must be below 1, got 1"),
    "missing": (re.sub("directory.*", "", CONFIG), "[training] lacks directory; add it"),
    "model": (CONFIG.replace('"gpt"', '"gtp"'), "[model] unknown model 'gtp'; did you mean 'gpt'?"),
    "model's argument": (changed("model", "layer = 2"), "[model] 'layer' is no argument of gpt; "
                         "did you mean 'layers'?"),
    "model's value": (CONFIG.replace("width = 16", "width = 15"), "d_model must be a multiple"),
    "no model": (CONFIG.replace('name = "gpt"', ""), "[model] needs either name or factory"),
    "text": (CONFIG.replace("*.txt", "*.text"), "[data] text: no file matches '*.text'"),
    "short text": (CONFIG.replace("batch_size = 4", "batch_size = 400"), "[data] a batch of 400 "
                   "samples of 8 bytes needs"),
    "schedule": (changed("pipeline", 'schedule = "1f2b"'), "[pipeline] unknown schedule '1f2b'"),
    "devices": (changed("pipeline", 'devices = ["cpu"]'), "stages=2 of replicas=1 need 2 devices, "
                "but 1 in each of 1 processes are 1"),
    "optimizer": (changed("optimizer", 'name = "Adamw"'), "[optimizer] torch.optim has no 'Adamw'; "
                  "did you mean 'AdamW'?"),
    "optimizer's argument": (changed("optimizer", "weight_deacy = 1"), "[optimizer] 'weight_deacy' "
                             "is no argument of AdamW; did you mean 'weight_decay'?"),
    "optimizer's value": (CONFIG.replace("lr = 1e-2", "lr = -1.0"), "Invalid learning rate"),
    "scheduler": (CONFIG + '[scheduler]\nname = "Cosine"', "[scheduler] torch.optim.lr_scheduler "
                  "has no 'Cosine'; did you mean 'CosineAnnealingLR' or"),
    "module": (FACTORIES.replace("own_code:model", "no_code:model"), "[model] cannot import "
               "'no_code'"),
    "function": (FACTORIES.replace("own_code:data", "own_code:date"), "[data] 'own_code' has no "
                 "function 'date'; did you mean 'data'?"),
    "no function": (FACTORIES.replace("own_code:data", "own_code:constant"), "has no function "
                    "'constant'"),
    "form": (FACTORIES.replace("own_code:data", "os.system('x')"), "a function is named "
             "'package.module:function'"),
    "factory's argument": (FACTORIES.replace("width = 8", "with = 8"), "[model] 'with' is no "
                           "argument of own_code:model; did you mean 'width'?"),
    "factory's failure": (FACTORIES.replace("width = 8", "fail = true"), "[model] own_code:model "
                          "raised OSError: no weights here"),
    "stream": (FACTORIES.replace("own_code:data", "own_code:stream"), "[data] factory returned an "
               "iterator (generator)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_configurations(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the file, the section and the key; exit status 2."""
    text, message = BAD[name]
    line = fail(capsys, write(folder, text))
    assert message in line
    assert "config.toml" in line
    assert not (folder / "run" / "log.csv").exists()


def test_bad_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "n_steps must be at least 1" in fail(capsys, write(folder), "--steps", "0")


def test_missing_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder)
    assert "did you mean" in fail(capsys, str(folder / "confg.toml"))


class TestText:
    """Batches of a text."""

    TEXT = torch.arange(100, dtype=torch.uint8)

    def test_epoch_has_each_sample_once(self) -> None:
        batches = TextBatches(self.TEXT, 5, 3, seed=1)
        firsts = [int(x) for inputs, _ in batches(0) for x in inputs[:, 0]]
        assert len(firsts) == len(set(firsts)) == 18
        assert len({x % 5 for x in firsts}) == 1
        for inputs, targets in batches(0):
            assert torch.equal(inputs + 1, targets)
        assert [int(x) for inputs, _ in batches(1) for x in inputs[:, 0]] != firsts

    def test_hidden_files_are_left_out(self, tmp_path: Path) -> None:
        """As in a shell: "*" is no copy that an editor has left; a name with a dot is itself."""
        for name in ("a.txt", ".b.txt", "._a.txt"):
            (tmp_path / name).write_text(name)
        assert [file.name for file in text_files(["*.txt"], tmp_path)] == ["a.txt"]
        assert [file.name for file in text_files([".b*"], tmp_path)] == [".b.txt"]

    def test_shares_make_the_batch(self) -> None:
        whole = TextBatches(self.TEXT, 5, 4, seed=1)
        parts = [TextBatches(self.TEXT, 5, 4, seed=1, share=(k, k + 2)) for k in (0, 2)]
        for (batch, _), *shares in zip(whole(3), *(part(3) for part in parts), strict=True):
            assert torch.equal(torch.cat([x for x, _ in shares]), batch)


def start(folder: Path, config: str, *options: str) -> Forked:
    """Start a training in its own process, which takes Ctrl-C."""
    variables = environment(0, 1, free_port())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del variables[name]
    return Forked(["-m", "pipeexec", "train", config, *options], variables, folder / "out.log")


def wait_for_steps(folder: Path, n: int) -> None:
    """Wait until the log has rows of ``n`` steps."""
    log, end = folder / "run" / "log.csv", time.monotonic() + 60
    while not log.exists() or log.read_text().count("\n") <= n:
        assert time.monotonic() < end, "no steps"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_and_continued(folder: Path, number: signal.Signals) -> None:
    """A process that is killed or terminated continues with the same losses."""
    path = write(folder, steps="steps = 100000\ncheckpoint_every = 5")
    process = start(folder, path)
    wait_for_steps(folder, 12)
    process.send_signal(number)
    status = process.wait(60)
    log = (folder / "out.log").read_text()
    n_before = len(losses(folder))
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
    else:
        assert status == 130, log
        assert f"interrupted after step {n_before}" in log
    n = n_before + 3
    assert main(["train", path, "--steps", str(n)]) == 0
    resumed = losses(folder)
    assert main(["train", path, "--steps", str(n), "--fresh"]) == 0
    assert losses(folder) == resumed
    assert len(resumed) == n


@pytest.mark.slow
def test_processes(folder: Path) -> None:
    """Two processes have the losses of one, and continue what it has begun, and the reverse."""
    path = write(folder)
    assert main(["train", path]) == 0
    whole = losses(folder)
    command = ["-m", "pipeexec", "train", path]
    for options in (["--fresh", "--steps", "2"], []):
        statuses, logs = run_to_end([[*command, *options]] * 2, folder)
        assert statuses == [0, 0], logs
        assert logs[1] == ""  # rank 0 prints
    assert losses(folder) == whole
    assert main(["train", path, "--steps", "6"]) == 0
    assert losses(folder)[:4] == whole


TOKENS = """
import torch

def data():
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(64, (8, 16), generator=draw) for _ in range(3)]
    batches = [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x} for x in tokens]
    return batches, batches
"""


@pytest.mark.slow
def test_transformers(folder: Path) -> None:
    """GPT-2, whose head is its embedding, with dropout, clipped: two processes as one."""
    code = (ROOT / "docs/examples/train_gpt/own_gpt2.py").read_text()
    (folder / "own_code.py").write_text(code + TOKENS)
    sizes = "layers = 3\nwidth = 32\nheads = 2\npositions = 32\nwords = 64"
    text = FACTORIES.replace("width = 8", sizes).replace("batch_size = 8", "")
    path = write(folder, text + "[optimizer]\nmax_grad_norm = 0.1\n")
    command = ["-m", "pipeexec", "train", path]
    statuses, logs = run_to_end([command] * 2, folder)
    assert statuses == [0, 0], logs
    shared = TrainingRun.load(folder / "run")
    assert main(["train", path, "--fresh"]) == 0
    alone = TrainingRun.load(folder / "run")
    for column in ("loss", "grad_norm"):
        assert alone.table[column].tolist() == pytest.approx(shared.table[column], rel=1e-5)
    assert alone.evaluations["loss"].tolist() == pytest.approx(shared.evaluations["loss"])


@pytest.mark.slow
def test_replicas_in_processes(folder: Path) -> None:
    """Each process trains a replica on its share of the batch."""
    text = FACTORIES.replace("own_code:data", "own_code:shared").replace(
        "stages = 2", "stages = 1\nreplicas = 2"
    )
    path = write(folder, text)
    command = ["-m", "pipeexec", "train", path]
    statuses, logs = run_to_end([command] * 2, folder)
    assert statuses == [0, 0], logs
    shared = losses(folder)
    alone: Any = text.replace("replicas = 2", "").replace("stages = 1", "stages = 2")
    alone = alone.replace('"own_code:shared"', '"own_code:shared"\nreplicas = [0]\nn_replicas = 1')
    assert main(["train", write(folder, alone), "--fresh"]) == 0
    assert shared == pytest.approx(losses(folder), rel=1e-5)


@pytest.mark.slow
def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of the documentation, with a smaller model and fewer steps."""
    source = ROOT / "docs" / "examples" / "train_gpt"
    text = (source / "config.toml").read_text()
    for key, value in (("layers", 2), ("width", 16), ("context", 16), ("steps", 3)):
        text = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
    text = text.replace("batch_size = 16", "batch_size = 32\nheld_out = 0.002")
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "python_manual.py").write_text((source / "python_manual.py").read_text())
    monkeypatch.chdir(tmp_path)
    assert main(["train", "config.toml"]) == 0
    run = TrainingRun.load(tmp_path / "results" / "train_gpt")
    assert run.losses[-1] < run.losses[0]
    assert run.table["tokens_per_s"].notna().all()
    sys.modules.pop("python_manual", None)
