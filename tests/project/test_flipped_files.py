"""Files of every kind with one bit flipped: refused, or read as if nothing had happened.

A file that we write carries a checksum, or has each value twice in some way. A file that users
write has none: a flip may make another valid file of it, with other values. All that is asserted
then is that it loads, or is refused as a mistake of the user's is.

``FUZZ_EXAMPLES=2000`` flips so many bits of each kind, and prints the counts.
"""

from __future__ import annotations

import gzip
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import ROOT
from small_pipelines import mse

import pipeexec as px
import pipesim as ps
from pipeexec.training import TrainingRun
from pipeexec.training.read_config import read_config
from pipesim.errors import PipeError
from pipesim.simulation import LogNormal
from pipesim.sweeps.settings import cases, read_grid, run

N_FLIPS = int(os.environ.get("FUZZ_EXAMPLES", "12"))
#: Seconds that a file may take to be read or refused.
PATIENCE = 60

SCHEDULE = ps.schedule("zb_h1", 2, 4)
COSTS = ps.Costs(
    forward=(0.125, 0.3),
    input_grad=0.25,
    weight_grad=0.0625,
    output_bytes=4096,
    parameter_bytes=(10.0, 12.0),
    activation_bytes=7,
    network=ps.Network(1e-3, 25e9, [ps.Link(2e-3, 1e9, [(0, 1)])]),
)
GRID = {"schedule": ["gpipe", "1f1b"], "n_microbatches": [2, 3]}
BASE = {"n_devices": 2, "forward": 1e-3, "backward": 2e-3, "activation_bytes": 1e6}

LINKS = """\
source,target,latency,bandwidth,link
0,1,2.5e-6,25e9,first
1,0,2.5e-6,25e9,first
1,2,1e-5,1.5e9,
2,1,1e-5,,
0,2,0.00031,12500000000,second
"""
LAYERS = """\
layer,forward,backward,output_bytes,parameter_bytes
embedding,0.00125,0.0025,1048576,3.5e6
block 0,0.0035,0.0071,1048576,1.25e7
block 1,0.0035,0.0071,1048576,1.25e7
head,0.002,0.004,65536,3.5e6
"""
SETTINGS = """\
devices = 4
microbatches = 8
recompute = "always"
[costs]
forward = 1e-3
backward = [2e-3, 2e-3, 2e-3, 3e-3]
output_bytes = 4194304
network = { latency = 20e-6, bandwidth = 25e9 }
[[schedule]]
name = "gpipe"
[[schedule]]
name = "1f1b"
label = "all kept"
recompute = "never"
[grid]
microbatches = [4, 8]
"""
TORCHTITAN = """\
[training]
local_batch_size = 8
[parallelism]
data_parallel_shard_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
"""
LOG = """\
step,epoch,loss,seconds
1,0,2.125,0.5
2,0,1.75,0.25
3,1,1.5,0.3125
"""
TRAINING = ROOT / "docs" / "examples" / "train_gpt" / "config.toml"


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes
    ----------
    write
        Writes one into a folder, and returns the files of which bits are flipped.
    read
        Reads it through the public API, and returns what can be compared with ``==``.
    by_users
        Whether users write it, without any checksum.
    """

    write: Callable[[Path], list[Path]]
    read: Callable[[Path], Any]
    by_users: bool = False


def written(name: str, save: Callable[[Path], object]) -> Callable[[Path], list[Path]]:
    """Return what writes one file, called ``name``."""

    def write(folder: Path) -> list[Path]:
        save(folder / name)
        return [folder / name]

    return write


def timeline() -> ps.Timeline:
    noise = ps.Noise(seed=1, task=LogNormal(0.3), message=LogNormal(0.3))
    return ps.simulate(ps.lower(SCHEDULE, rendezvous=True), COSTS, noise=noise)


def values(timeline: ps.Timeline) -> list[Any]:
    graph = timeline.graph
    columns = (timeline.start, timeline.end, timeline.nbytes, graph.op, graph.stage, graph.device)
    settings = [graph.rendezvous, graph.host.tolist(), graph.n_replicas, graph.weight_versions]
    return [column.tolist() for column in columns] + settings


def sweep(path: Path) -> str:
    table = ps.sweep(GRID, base=BASE, path=path, n_jobs=1, progress=False)
    return table.drop(columns="seconds").to_csv()


def copied_run(folder: Path) -> list[Path]:
    """Copy the run of the README."""
    shutil.copytree(ROOT / "results" / "quickstart", folder / "run")
    return sorted(path for path in (folder / "run").rglob("*") if path.is_file())


def loaded_run(folder: Path) -> list[Any]:
    loaded = px.load_run(folder / "run")
    rows = [values(x) for row in loaded.rows.values() for x in (row.predicted, row.measured)]
    return [loaded.costs, loaded.table.to_csv(), loaded.clocks, loaded.notes, *rows]


def checkpoint(folder: Path) -> list[Path]:
    """Save a checkpoint that has all kinds of files."""
    torch.manual_seed(0)
    stages = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    graph = ps.lower(ps.schedule("1f1b", 2, 2))
    with px.Pipeline(stages, graph, ["cpu"] * 2, mse, torch.optim.AdamW) as pipeline:
        pipeline.step(torch.ones(4, 2), torch.zeros(4, 2))
        px.save_checkpoint(pipeline, folder / "x", more=[1.5, torch.ones(3)])
    return sorted(path for path in (folder / "x").rglob("*") if path.is_file())


def settings(path: Path) -> list[Any]:
    """Return what a TOML file makes of a simulation, and its grid."""
    timelines = [run(case) for case in cases([], path, {}, other_tables=("grid",))]
    return [read_grid(path), [(timeline.name, timeline.makespan) for timeline in timelines]]


def profiled(path: Path) -> None:
    """Write a rank's trace of torch.profiler, unpacked."""
    source = ROOT / "tests" / "data" / "torch_interleaved" / "rank0.json.gz"
    path.write_bytes(gzip.decompress(source.read_bytes()))
    shutil.copy(source.with_name("rank1.json.gz"), path.with_name("rank1.json.gz"))


DUALPIPEV = ps.schedule("dualpipev", 2, 4)
KINDS = {
    "schedule CSV": Kind(
        written("x.csv", SCHEDULE.save), lambda f: ps.Schedule.load(f / "x.csv")
    ),
    "schedule grid": Kind(
        written("x.txt", SCHEDULE.save), lambda f: ps.Schedule.load(f / "x.txt")
    ),
    "schedule CSV, overlapped": Kind(
        written("x.csv", DUALPIPEV.save), lambda f: ps.Schedule.load(f / "x.csv")
    ),
    "torch CSV with messages": Kind(
        written("x.csv", lambda path: ps.lower(SCHEDULE).save_torch_csv(path)),
        lambda f: ps.Schedule.load(f / "x.csv"),
    ),
    "timeline CSV": Kind(
        written("x.csv", lambda path: timeline().save(path)),
        lambda f: values(ps.Timeline.load(f / "x.csv")),
    ),
    "timeline Parquet": Kind(
        written("x.parquet", lambda path: timeline().save(path)),
        lambda f: values(ps.Timeline.load(f / "x.parquet")),
    ),
    "costs JSON": Kind(written("x.json", COSTS.save), lambda f: ps.Costs.load(f / "x.json")),
    "sweep journal": Kind(written("x.jsonl", sweep), lambda f: sweep(f / "x.jsonl")),
    "chrome JSON": Kind(
        written("x.json", lambda path: timeline().to_chrome(path)),
        lambda f: values(ps.Timeline.from_chrome(f / "x.json")),
    ),
    "chrome JSON, gzip": Kind(
        written("x.json.gz", lambda path: timeline().to_chrome(path)),
        lambda f: values(ps.Timeline.from_chrome(f / "x.json.gz")),
    ),
    "chrome JSON of several": Kind(
        written("x.json", lambda path: ps.trace.save(path, {"a": timeline(), "b": timeline()})),
        lambda f: [values(x) for x in ps.trace.load(f / "x.json").values()],
    ),
    "run directory": Kind(copied_run, loaded_run),
    "record of a run": Kind(
        lambda f: [file for file in copied_run(f) if file.name == "run.json"], loaded_run
    ),
    "checkpoint": Kind(checkpoint, lambda f: str(px.read_checkpoint(f / "x"))),
    "manifest of a checkpoint": Kind(
        lambda f: [file for file in checkpoint(f) if file.suffix == ".json"],
        lambda f: str(px.read_checkpoint(f / "x")),
    ),
    "network CSV": Kind(
        written("x.csv", lambda path: path.write_text(LINKS)),
        lambda f: ps.Network.from_csv(f / "x.csv"),
        by_users=True,
    ),
    "layers CSV": Kind(
        written("x.csv", lambda path: path.write_text(LAYERS)),
        lambda f: ps.Layers.read(f / "x.csv").columns,
        by_users=True,
    ),
    "settings TOML": Kind(
        written("x.toml", lambda path: path.write_text(SETTINGS)),
        lambda f: settings(f / "x.toml"),
        by_users=True,
    ),
    "settings of torchtitan": Kind(
        written("x.toml", lambda path: path.write_text(TORCHTITAN)),
        lambda f: str(ps.read_torchtitan(f / "x.toml", n_layers=8, n_gpus=8)),
        by_users=True,
    ),
    "configuration of a training": Kind(
        written("x.toml", lambda path: shutil.copy(TRAINING, path)),
        lambda f: read_config(f / "x.toml"),
        by_users=True,
    ),
    "log of a training": Kind(
        written("log.csv", lambda path: path.write_text(LOG)),
        lambda f: TrainingRun.load(f).table.to_csv(),
        by_users=True,
    ),
    "trace of torch.profiler": Kind(
        written("rank0.json", profiled),
        lambda f: values(ps.Timeline.from_chrome([f / "rank0.json", f / "rank1.json.gz"])),
        by_users=True,
    ),
}  # fmt: skip


def impatient(*_: object) -> None:
    raise AssertionError(f"a file took more than {PATIENCE} s")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")
@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_bit(name: str, tmp_path: Path, counts: dict[str, Counter[str]]) -> None:
    """Refused by an error of ours, or the same values; never another error, never a hang."""
    kind, count = KINDS[name], counts.setdefault(name, Counter())
    files = kind.write(tmp_path)
    whole, random = kind.read(tmp_path), np.random.default_rng(len(name))
    unflipped = {file: file.read_bytes() for file in files}
    before = signal.signal(signal.SIGALRM, impatient)
    try:
        for _ in range(N_FLIPS):
            file = files[random.integers(len(files))]
            place = int(random.integers(8 * len(unflipped[file])))
            data = bytearray(unflipped[file])
            data[place // 8] ^= 1 << place % 8
            file.write_bytes(data)
            signal.alarm(PATIENCE)
            try:
                value = kind.read(tmp_path)
            except PipeError:
                count["refused"] += 1
            except BaseException as error:
                error.add_note(f"bit {place % 8} of byte {place // 8} of {file.name}")
                raise
            else:
                word = "same" if value == whole else "other value"
                count[word] += 1
                assert kind.by_users or word == "same", (file.name, place // 8, place % 8)
            signal.alarm(0)
            file.write_bytes(unflipped[file])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
