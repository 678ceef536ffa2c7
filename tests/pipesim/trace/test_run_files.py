"""Files of all kinds, which `pipesim.trace.load` tells apart by their content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nsys_reports import FIRST, SECOND, report
from tracing import event

import pipesim as ps
from pipesim.cli import main
from pipesim.errors import TimelineError
from pipesim.trace.run_files import LoadedTimelines


def loaded(path: Path) -> LoadedTimelines:
    """Load a path."""
    run = ps.trace.load(path)
    assert isinstance(run, LoadedTimelines)
    assert [timeline.name for timeline in run.values()] == list(run)
    return run


@pytest.fixture
def step() -> ps.Timeline:
    """Return a simulated step."""
    return ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), ps.Costs(forward=1, backward=2))


@pytest.mark.parametrize("name", ["step.csv", "step.parquet", "renamed.dat"])
def test_table(tmp_path: Path, step: ps.Timeline, name: str) -> None:
    """Of `Timeline.save`, whatever its name."""
    path = tmp_path / name
    step.save(path)
    run = loaded(path)
    assert run.source == "table of Timeline.save"
    assert run[path.stem].makespan == 15


def test_saved_trace(tmp_path: Path, step: ps.Timeline) -> None:
    """All timelines of a trace of our own."""
    path = tmp_path / "both.json.gz"
    ps.trace.save(path, {"a": step, "b": step})
    run = loaded(path)
    assert list(run) == ["a", "b"]
    assert run.source == "trace of pipesim.trace.save"


def test_torch_profiler(tmp_path: Path) -> None:
    """The last of two steps: 60 us from its first F to its last B, and 10 us of that B."""
    for rank in range(2):
        path = tmp_path / f"rank{rank}.json"
        events = [
            event(f"PP:{rank}F0", 10 * rank, 10 * rank + 10),
            event(f"PP:{rank}B0", 50 - 20 * rank, 60 - 20 * rank),
            event(f"PP:{rank}F0", 100 + 20 * rank, 120 + 20 * rank),
            event(f"PP:{rank}B0", 160 - 20 * rank, 170 - 20 * rank),
        ]
        path.write_text(json.dumps({"traceEvents": events}))
    run = loaded(tmp_path)
    assert run.source == "Chrome traces of 2 ranks, the last of 2 whole steps"
    assert list(run) == ["step 1"]
    assert run["step 1"].makespan == pytest.approx(70e-6)


def test_nsys(tmp_path: Path) -> None:
    """A report, and a folder with one a rank."""
    one = loaded(report(tmp_path / "all.sqlite", FIRST + SECOND))
    assert one.source == "reports of Nsight Systems of 2 ranks, one whole step"
    (tmp_path / "ranks").mkdir()
    for rank, ranges_of_rank in enumerate((FIRST, SECOND)):
        report(tmp_path / "ranks" / f"{rank}.sqlite", ranges_of_rank)
    assert loaded(tmp_path / "ranks")["step 0"].makespan == pytest.approx(45e-6)
    path = report(tmp_path / "other.sqlite", [(7, "load", 0, 10)])
    with pytest.raises(TimelineError, match=r"other\.sqlite/other\.rank0\.json has no range"):
        ps.trace.load(path)


def primus(folder: Path) -> Path:
    """Write files of two ranks, of which only the first has a third step."""
    for rank, (start, end) in enumerate([(3, 4), (1, 2)]):
        times = {"fwd_start": [0], "fwd_end": [1], "bwd_start": [start], "bwd_end": [end]}
        steps = {str(step): times for step in range(1, 4 - rank)}
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps(steps))
    return folder


def test_primus(tmp_path: Path) -> None:
    """All steps that all ranks have, under the numbers of the files."""
    run = loaded(primus(tmp_path))
    assert run.source == "times of Primus of 2 ranks, 2 steps, 1 without all ranks"
    assert {name: step.makespan for name, step in run.items()} == pytest.approx(
        {"step 1": 4e-3, "step 2": 4e-3}
    )


def test_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command shows files of Primus and reports of Nsight Systems."""
    report(tmp_path / "all.sqlite", FIRST + SECOND)
    (tmp_path / "primus").mkdir()
    files = str(tmp_path / "all.sqlite"), str(primus(tmp_path / "primus"))
    page = tmp_path / "page.html"
    assert main(["view", *files, "--out", str(page), "--no-open"]) == 0
    shown = capsys.readouterr().out.splitlines()[1:]
    assert [line.partition(", makespan")[0] for line in shown] == [
        "all: 8 tasks, 2 devices",
        "primus: step 1: 8 tasks, 2 devices",
        "primus: step 2: 8 tasks, 2 devices",
    ]
    assert main(["view", files[1], "--step", "1", "--out", str(page), "--no-open"]) == 2
    assert "has no ranges, but times of Primus; leave out --step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.log", "time (ms) | forward-compute: 1.00", "pipesim.trace.read_timers"),
        ("run.out", "max time across ranks (ms):\n", "no timeline; read seconds of each operation"),
        ("report.nsys-rep", "\0", "nsys export --type sqlite"),
        ("words.txt", "hello", "begins with b'hello'; pipesim.trace.load reads files of"),
        ("empty", "", "begins with b''"),
        ("model.pt", "PK\0", "begins with b'PK"),
    ],
)
def test_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    """The error says how to read the file, or what can be read."""
    (tmp_path / name).write_text(content)
    with pytest.raises(TimelineError) as error:
        ps.trace.load(tmp_path / name)
    assert message in str(error.value)
    (tmp_path / "empty folder").mkdir()
    with pytest.raises(TimelineError, match="has no timelines; pipesim"):
        ps.trace.load(tmp_path / "empty folder")
