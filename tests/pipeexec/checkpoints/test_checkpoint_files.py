"""Files of checkpoints: whole or not at all, damaged ones, leftovers, and kills at any moment."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from small_pipelines import data, mse, pipeline
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.checkpoints import directory, save
from pipeexec.run_lock import run_lock
from pipesim.errors import CheckpointError
from pipesim.utils.texts import CHECKSUM, checksum

SCRIPT = Path(__file__).with_name("save_until_killed.py")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def small(seed: int = 0) -> px.Pipeline:
    """Return a pipeline that has run a step."""
    torch.manual_seed(seed)
    stages = [nn.Linear(16, 16), nn.Linear(16, 16)]
    p = pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 2)), mse, adam)
    p.step(*data(4))
    return p


def content(p: px.Pipeline) -> str:
    return str([p.state_dict(), p.optimizer_state_dict(), p.n_steps, torch.get_rng_state()])


# Damaged files.

DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-2]),
    "empty": lambda file: file.write_bytes(b""),
    "flipped": lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\x7f"),
    "missing": lambda file: file.unlink(),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(damage: str, tmp_path: Path) -> None:
    """Nothing is loaded, whichever file it is; the one before is the latest whole one."""
    with small() as p:
        px.save_checkpoint(p, tmp_path / "step-1", more=torch.ones(2))
        whole = px.save_checkpoint(p, tmp_path / "step-2", more=torch.ones(2))
    assert px.latest_checkpoint(tmp_path) == whole
    spare = shutil.copytree(whole, tmp_path / "spare")
    with small(1) as p:
        before = content(p)
        for file in sorted(x for x in spare.rglob("*") if x.is_file()):
            path = whole / file.relative_to(spare)
            DAMAGES[damage](path)
            with pytest.raises(CheckpointError, match=f"{path.name}") as caught:
                px.load_checkpoint(p, whole)
            assert str(whole) in str(caught.value)
            assert content(p) == before
            path.unlink(missing_ok=True)
            shutil.copy(file, path)
        shutil.rmtree(spare)
        assert px.latest_checkpoint(tmp_path) == whole
        DAMAGES[damage](whole / "model" / "model-00001-of-00002.safetensors")
        assert px.latest_checkpoint(tmp_path) == tmp_path / "step-1"
        px.load_checkpoint(p, tmp_path / "step-1")


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "n_steps": (lambda x: x.update(n_steps=5), "its checksum does not match: it was cut or edited"),
    "format": (lambda x: x.update(format="x"), "it is that of no checkpoint"),
    "version": (lambda x: x.update(version=2), "version is 2, allowed is 1"),
    "lacking": (lambda x: x.pop("tensors"), "it has no valid 'tensors'"),
    "file": (lambda x: x["files"].update({"../x": {}}), r"'\.\./x' is no file of a checkpoint"),
    "type": (lambda x: x["tensors"]["model"]["0.bias"].__setitem__(1, "torch.load"),
             r"'0\.bias' is torch\.load in the checkpoint"),
    "shape": (lambda x: x["tensors"]["model"]["0.bias"].__setitem__(0, [2]), r"shape \(2,\)"),
    "shapes": (lambda x: x["tensors"].update(model=3), "it has no valid 'tensors'"),
    "sizes": (lambda x: x["tensors"]["model"]["0.bias"].__setitem__(0, [-1]), "no valid 'tensors'"),
    "steps": (lambda x: x.update(n_steps=-5), r"no valid 'n_steps': got -5, allowed: a whole"),
    "steps too": (lambda x: x.update(n_steps=True), "it has no valid 'n_steps': got True"),
    "seed": (lambda x: x.update(seed=2**70), "it has no valid 'seed': got 1180591620717411303424"),
    "seeds": (lambda x: x.update(seed=-1), "it has no valid 'seed': got -1"),
    "time": (lambda x: x.update(saved=float("nan")), "it has no valid 'saved': got nan"),
    "rows": (lambda x: x.update(rows={"0.": {"n_rows": 3}}), "it has no valid 'rows'"),
    "none": (lambda x: x.update(random=[]), "it has no valid 'random'"),
    "device": (lambda x: x["random"][0].update(gpu="AA=="), "has no valid random state"),
    "rate": (lambda x: x["optimizer"]["param_groups"][0].update(lr="0.1"), "the state has lr='0.1"),
    "flag": (lambda x: x["optimizer"]["param_groups"][0].update(maximize=2), "maximize=2 for a gr"),
    "betas": (lambda x: x["optimizer"]["param_groups"][0].update(betas=[1]), r"betas=\[1\] for a"),
    "kind": (lambda x: x["objects"].update(more={"$": "eval", "items": []}), "no value of a check"),
    "random": (lambda x: x.update(random=[{"cpu": "AA=="}]), "has no valid random state"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_manifests_that_were_edited(edit: str, tmp_path: Path) -> None:
    """Refused by name, also if the checksum was made to match."""
    with small() as p:
        path = px.save_checkpoint(p, tmp_path / "x", more=[1])
        manifest = json.loads((path / "checkpoint.json").read_text())
        change, message = EDITS[edit]
        change(manifest)
        if edit != "n_steps":
            manifest[CHECKSUM] = checksum(manifest)
        (path / "checkpoint.json").write_text(json.dumps(manifest))
        before = content(p)
        with pytest.raises(CheckpointError, match=message):
            px.load_checkpoint(p, path)
        assert content(p) == before
        if edit == "type":
            with pytest.raises(CheckpointError, match=r"'torch\.load' is no type of tensors"):
                px.read_checkpoint(path)


def test_files_that_the_manifest_does_not_list(tmp_path: Path) -> None:
    """A copy of an older shard has the same keys; it is not read, nor is a file of no tensors."""
    with small() as p:
        old = px.save_checkpoint(p, tmp_path / "old", more=torch.zeros(2))
        p.step(*data(4))
        path = px.save_checkpoint(p, tmp_path / "new", more=torch.ones(2))
        expected, before = content(p), str(px.read_checkpoint(path))
    for part in ("model", "optimizer", "objects"):
        shutil.copy(next((old / part).glob("*1-of*.safetensors")), path / part / "zz.safetensors")
    assert str(px.read_checkpoint(path)) == before
    (path / "model" / "no-tensors.safetensors").write_bytes(b"no tensors")
    assert str(px.read_checkpoint(path)) == before
    assert px.latest_checkpoint(tmp_path) == path
    with small(1) as p:
        assert px.load_checkpoint(p, path)["more"].tolist() == [1, 1]
        assert content(p) == expected


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    with small() as p:
        for name, message in {
            "nothing": "cannot read the manifest",
            "file": "cannot read",
            "folder": r"is no whole checkpoint: it has no checkpoint\.json",
        }.items():
            with pytest.raises(CheckpointError, match=message):
                px.load_checkpoint(p, tmp_path / name)
        for name in ("file", "folder"):
            with pytest.raises(CheckpointError, match=rf"{name} .*choose another name"):
                px.save_checkpoint(p, tmp_path / name)
        with pytest.raises(CheckpointError, match="cannot write"):
            px.save_checkpoint(p, tmp_path / "file" / "x")
    assert px.latest_checkpoint(tmp_path) is None
    assert px.latest_checkpoint(tmp_path / "nothing") is None
    with pytest.raises(CheckpointError, match=r"cannot read .*file"):
        px.latest_checkpoint(tmp_path / "file")


# Whole or not at all.


def test_an_error_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at any of the files; then no other file is left."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with small() as p:
        px.save_checkpoint(p, tmp_path / "x")
        p.step(*data(4))
        for name in ("write_tensors", "write_index", "write_manifest", "publish"):
            with monkeypatch.context() as patch:
                patch.setattr(save, name, full)
                with pytest.raises(CheckpointError, match="No space left on device; make room"):
                    px.save_checkpoint(p, tmp_path / "x")
            assert [file.name for file in tmp_path.iterdir()] == ["x"]
        assert px.read_checkpoint(tmp_path / "x")["n_steps"] == 1


def test_a_failed_publication_restores_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two renames fails: the older checkpoint has its name, and nothing is left."""
    rename = os.rename

    def refused(source: Path, target: Path) -> None:
        if source.name.endswith(".part"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    with small() as p:
        path = px.save_checkpoint(p, tmp_path / "x")
        p.step(*data(4))
        with monkeypatch.context() as patch:
            patch.setattr(directory.os, "rename", refused)
            with pytest.raises(CheckpointError, match=r"cannot write .*x: No space left on device"):
                px.save_checkpoint(p, path)
            with pytest.raises(CheckpointError, match="No space left on device"):
                px.save_checkpoint(p, tmp_path / "new")
        assert [file.name for file in tmp_path.iterdir()] == ["x"]
        assert px.read_checkpoint(path)["n_steps"] == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_kill_between_two_renames(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both checkpoints are whole, and none has the name; the older one is loaded."""
    rename, calls = os.rename, []

    def killed(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) > 1 - first:
            raise SystemExit  # nothing runs after a kill
        rename(source, target)

    with small() as p:
        path = px.save_checkpoint(p, tmp_path / "x")
        p.step(*data(4))
        with monkeypatch.context() as patch:
            patch.setattr(directory.os, "rename", killed)
            patch.setattr(save.shutil, "rmtree", lambda *_, **__: None)
            with pytest.raises(SystemExit):
                px.save_checkpoint(p, path)
        assert path.exists() == first
        assert len(list(tmp_path.glob(".x.*.part"))) == 1
        assert px.latest_checkpoint(tmp_path) == path
        assert px.load_checkpoint(p, path) == {}
        assert px.read_checkpoint(path)["n_steps"] == p.n_steps == 1
        px.save_checkpoint(p, tmp_path / "y")
        assert px.latest_checkpoint(tmp_path) == tmp_path / "y"
        assert not list(tmp_path.glob(".*.part"))
        assert px.read_checkpoint(path)["n_steps"] == 1
        px.save_checkpoint(p, path)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["x", "y"]


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_files_that_another_process_wrote_elsewhere(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that processes do not share, or that shows a file before all its bytes."""
    original = save._write_own

    def write_own(folder: Path, *args: Any) -> dict[str, Any]:
        facts = original(folder, *args)
        DAMAGES[damage](folder / sorted(facts)[0])
        return facts

    monkeypatch.setattr(save, "_write_own", write_own)
    with small() as p, pytest.raises(CheckpointError, match="of another process is not there; giv"):
        px.save_checkpoint(p, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_an_older_checkpoint_that_was_removed_in_part(tmp_path: Path) -> None:
    """Without a manifest it is none: the whole one beside it is found, loaded, and restored."""
    with small() as p:
        path = px.save_checkpoint(p, tmp_path / "x")
        part = tmp_path / ".x.000000000000.old"
        shutil.copytree(path, part)
        (part / "checkpoint.json").unlink()
        path.rename(tmp_path / ".x.111111111111.old")
        assert px.latest_checkpoint(tmp_path) == path
        assert px.read_checkpoint(path)["n_steps"] == 1
        px.save_checkpoint(p, tmp_path / "y")
        assert px.read_checkpoint(path)["n_steps"] == 1


def test_the_latest_is_the_one_saved_last(tmp_path: Path) -> None:
    """A run that began anew has fewer steps; and `keep` keeps it."""
    with small() as p:
        p.step(*data(4))
        px.save_checkpoint(p, tmp_path / "step-2")
    with small() as p:
        path = px.save_checkpoint(p, tmp_path / "step-1")
        assert px.latest_checkpoint(tmp_path) == path
        px.save_checkpoint(p, tmp_path / "step-0", keep=2)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["step-0", "step-1"]


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    with small() as p:
        path = px.save_checkpoint(p, tmp_path / "x")
    state = px.read_checkpoint(path)["model"]
    before = copy.deepcopy(state)
    for file in (path / "model").glob("*.safetensors"):
        with file.open("r+b") as f:
            f.seek(-16 * 16 * 4, os.SEEK_END)
            f.write(bytes(16 * 16 * 4))
    assert all(torch.equal(state[key], before[key]) for key in before)


def test_leftovers_of_others_stay_while_they_write(tmp_path: Path) -> None:
    parts = [tmp_path / f".{name}.0123456789ab.part" for name in ("a", "b")]
    for part in parts:
        part.mkdir()
    (tmp_path / ".c.0123456789ab.other").mkdir()
    with small() as p:
        is_locked, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with run_lock(tmp_path / "a"):
                is_locked.set()
                may_end.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        is_locked.wait(20)
        with pytest.raises(CheckpointError, match=r"is writing .*a; wait for its end"):
            px.save_checkpoint(p, tmp_path / "a")
        px.save_checkpoint(p, tmp_path / "x")
        may_end.set()
        thread.join()
    assert [part.exists() for part in parts] == [True, False]
    assert (tmp_path / ".c.0123456789ab.other").exists()


def test_folders_with_files_of_others(tmp_path: Path) -> None:
    """A save names such a file and changes nothing; a damaged checkpoint is replaced."""
    for folder in ("text", "manifest", "empty"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "notes").write_text("precious")
    (tmp_path / "text" / "checkpoint.json").write_text("mine")
    (tmp_path / "manifest" / "checkpoint.json").write_text('{"format": "another"}')
    (tmp_path / "empty" / "checkpoint.json").touch()
    with small() as p:
        for folder in ("text", "manifest"):
            with pytest.raises(CheckpointError, match=rf"{folder} exists and is no checkpoint"):
                px.save_checkpoint(p, tmp_path / folder)
        path = px.save_checkpoint(p, tmp_path / "x-1")
        (path / "model" / "notes").write_text("precious")
        for folder, name in {"empty": "notes", "x-1": "model/notes"}.items():
            with pytest.raises(CheckpointError, match=rf"{folder} has the file '{name}', which sa"):
                px.save_checkpoint(p, tmp_path / folder)
        px.save_checkpoint(p, tmp_path / "x-2")
        px.save_checkpoint(p, tmp_path / "x-3", keep=1)  # x-1 stays: others have put a file there
        manifest = tmp_path / "x-3" / "checkpoint.json"
        manifest.write_bytes(manifest.read_bytes()[:-9])
        p.step(*data(4))
        assert px.read_checkpoint(px.save_checkpoint(p, tmp_path / "x-3"))["n_steps"] == 2
    assert all(
        (tmp_path / x / "notes").exists() for x in ("text", "manifest", "empty", "x-1/model")
    )
    assert sorted(x.name for x in tmp_path.iterdir() if x.name[0] == "x") == ["x-1", "x-3"]


@pytest.mark.parametrize("name", [".x.0123456789ab.part", ".x.0123456789ab.old", ".x.lock"])
def test_names_of_temporary_folders(name: str, tmp_path: Path) -> None:
    """Such a folder would be removed by the next save, or keep others from locking theirs."""
    with small() as p:
        with pytest.raises(CheckpointError, match=r"has the name of a temporary file, .*step-100"):
            px.save_checkpoint(p, tmp_path / name)
        px.save_checkpoint(p, tmp_path / ".x.0123456789a.part")
        px.save_checkpoint(p, tmp_path / "other")
    assert sorted(x.name for x in tmp_path.iterdir()) == [".x.0123456789a.part", "other"]


def test_keep_looks_at_the_last_number(tmp_path: Path) -> None:
    """Another number in the name is that of another model or run."""
    with small() as p:
        for name in ("gpt3-step-1", "v1.5", "gpt2-step-1", "gpt2-step-3", "v2.6"):
            px.save_checkpoint(p, tmp_path / name)
        px.save_checkpoint(p, tmp_path / "gpt2-step-2", keep=1)
        px.save_checkpoint(p, tmp_path / "v1.6", keep=1)
        px.save_checkpoint(p, tmp_path / "last", keep=1)
    names = ["gpt2-step-2", "gpt3-step-1", "last", "v1.6", "v2.6"]
    assert sorted(x.name for x in tmp_path.iterdir()) == names


def test_keep(tmp_path: Path) -> None:
    """The newest ones of this name, whatever their digits; others stay."""
    with small() as p:
        for name in ("final", "step-9", "step-10", "step-100", "step-20"):
            px.save_checkpoint(p, tmp_path / name, keep=None if name == "final" else 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["final", "step-100", "step-20"]
    assert px.latest_checkpoint(tmp_path) == tmp_path / "step-20"


# Kills.


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    """The latest checkpoint is whole, and as new as the process said before it was killed."""
    seed = random.SystemRandom().randrange(1 << 30)
    draw, environment = random.Random(seed), dict(os.environ)
    folder, note, log = tmp_path / "run", tmp_path / "saved", tmp_path / "log"
    least = 0
    for kill in range(3):
        note.unlink(missing_ok=True)
        process = Forked([str(SCRIPT), str(folder), str(note)], environment, log)
        try:
            end = time.monotonic() + 60
            while not note.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(1e-3)
            time.sleep(draw.uniform(0, 0.2))
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
        where = f"kill {kill} of seed {seed}"
        least = max(least, int(note.read_text()))
        latest = px.latest_checkpoint(folder)
        assert latest is not None, where
        for path in (latest, folder / "same"):
            saved = px.read_checkpoint(path)
            assert saved["objects"]["n"] == saved["n_steps"], where
            assert all((x == saved["n_steps"]).all() for x in saved["model"].values()), where
            assert saved["n_steps"] >= least, where
    with small() as p:
        copy.deepcopy(px.load_checkpoint(p, latest))
        px.save_checkpoint(p, folder / "same")
    assert not list(folder.glob(".*.part"))
    assert not list(folder.glob(".*.old"))
