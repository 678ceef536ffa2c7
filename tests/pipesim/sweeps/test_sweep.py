"""`ps.sweep` and ``pipesim sweep``: the table, what survives a kill, and what is refused."""

from __future__ import annotations

import errno
import inspect
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import psutil
import pytest
from small_sweeps import BASE, RESULTS, sweep

import pipesim as ps
from pipesim.errors import ArgumentError, UnknownNameError
from pipesim.scheduling.registry import _REGISTRY
from pipesim.sweeps.journal import Journal
from pipesim.sweeps.settings import FLAT

FATAL = 13  # micro-batches at which the schedule `own` kills its process
Build = Callable[..., ps.Schedule]


def expected(timeline: ps.Timeline) -> list[float]:
    """Return what a row must say of a timeline."""
    return [
        len(timeline.graph),
        timeline.makespan,
        timeline.bubble_fraction,
        timeline.throughput,
        timeline.memory.peak.max(),
    ]


def results(table: pd.DataFrame) -> list[list[float]]:
    """Return the results of each row but for the seconds that it took."""
    return table[RESULTS[:5]].astype(float).to_numpy().tolist()


@pytest.fixture
def register() -> Iterator[Callable[[Build], Build]]:
    """Return a decorator that registers ``own`` in this process, for this test."""
    form = ps.ClosedForm("0", lambda p, m: 0.0)
    yield ps.register("own", summary="of a test", source="none", bubble=form, activations=form)
    _REGISTRY.pop("own", None)


@pytest.fixture
def log(register: Callable[[Build], Build], tmp_path: Path) -> Path:
    """Register ``own``: 1F1B that notes its micro-batches in a file, and may kill its process.

    It kills none once there is a file ``spare``.
    """
    path, spare = tmp_path / "log", tmp_path / "spare"
    fatal = FATAL

    @register
    def build(n_devices: int, n_microbatches: int) -> ps.Schedule:
        with path.open("a") as file:
            file.write(f"{n_microbatches}\n")
        if n_microbatches == fatal and not spare.exists():
            os.kill(os.getpid(), 9)
        return ps.schedule("1f1b", n_devices, n_microbatches)

    return path


def runs(log: Path) -> list[int]:
    """Return the micro-batches of each run since this was last asked."""
    lines = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return sorted(map(int, lines))


# The table.


@pytest.mark.slow
def test_a_grid_is_every_combination_in_order() -> None:
    """The last key varies fastest; each row equals a simulation of it, in any worker."""
    grid = {
        "schedule": ["1f1b", "gpipe"],
        "n_microbatches": np.array([5, 2]),
        "recompute": ("never", "always"),
    }
    table = sweep(grid, n_jobs=2)
    assert list(table.columns) == [*grid, *RESULTS]
    costs = ps.Costs(1e-3, 2e-3, activation_bytes=1e6)
    points = [(s, m, r) for s in grid["schedule"] for m in (5, 2) for r in ("never", "always")]
    assert list(table[[*grid]].itertuples(index=False, name=None)) == points
    assert results(table) == [
        expected(ps.simulate(ps.lower(ps.schedule(s, 2, m), recompute=r), costs))
        for s, m, r in points
    ]
    assert table["error"].isna().all()
    assert (table["seconds"] > 0).all()


def test_a_list_of_configurations() -> None:
    """Parts override whole costs and networks, and a row its base; objects show as JSON."""
    network = ps.Network(1e-5, 1e9)
    costs = ps.Costs(
        input_grad=1.0, weight_grad=2.0, forward=(1.0, 3.0), activation_bytes=8.0, network=network
    )
    table = sweep(
        [
            {"schedule": "gpipe", "n_microbatches": 3, "backward_order": "forward"},
            {"schedule": "gpipe", "n_microbatches": 3, "costs": costs},
            {"schedule": "1f1b", "n_microbatches": 3, "costs": costs, "latency": 0.5,
             "output_bytes": 4e9, "recompute": "always", "recompute_time": 9.0},
            {"schedule": "1f1b", "n_microbatches": 3, "network": {"latency": 0.25},
             "overlap": False, "n_devices": 3, "forward": [1e-3, 2e-3, 1e-3], "engine": None},
        ]
    )  # fmt: skip
    gpipe, f1b = ps.schedule("gpipe", 2, 3), ps.schedule("1f1b", 2, 3)
    base = ps.Costs(1e-3, 2e-3, activation_bytes=1e6)
    third = ps.Costs.from_dict(
        {**costs.to_dict(), "output_bytes": 4e9, "recompute": 9.0,
         "network": {"latency": 0.5, "bandwidth": 1e9}}
    )  # fmt: skip
    fourth = ps.Costs((1e-3, 2e-3, 1e-3), 2e-3, activation_bytes=1e6, network=ps.Network(0.25))
    assert results(table) == [
        expected(ps.simulate(ps.lower(graph, **options), values))
        for graph, options, values in (
            (ps.schedule("gpipe", 2, 3, backward_order="forward"), {}, base),
            (gpipe, {}, costs),
            (f1b, {"recompute": "always"}, third),
            (ps.schedule("1f1b", 3, 3), {"overlap": False}, fourth),
        )
    ]
    assert json.loads(table["costs"][1]) == json.loads(json.dumps(costs.to_dict()))
    assert table["forward"][3] == "[0.001, 0.002, 0.001]"
    assert pd.isna(table["forward"][0])


def test_an_option_goes_to_the_schedules_that_take_it() -> None:
    """A grid's rows that differ only in what they do not take are one row."""
    grid = {"schedule": ["1f1b", "gpipe"], "backward_order": ["forward", "reverse"]}
    table = sweep(grid, base={**BASE, "n_microbatches": 2})
    assert table["schedule"].tolist() == ["1f1b", "gpipe", "gpipe"]
    assert table["backward_order"].fillna("-").tolist() == ["-", "forward", "reverse"]


def test_bad_values_are_rows(register: Callable[[Build], Build]) -> None:
    """An error of one row, foreseen or not, is in that row, and stops no other."""

    @register
    def build(n_devices: int, n_microbatches: int) -> ps.Schedule:
        raise ZeroDivisionError("of the test")

    row = {"schedule": "1f1b", "n_microbatches": 4}
    table = sweep(
        [
            {**row, "n_devices": 0},
            {**row, "overlap": False, "rendezvous": True},
            {**row, "forward": [1.0, 2.0, 3.0]},
            {**row, "engine": "simpi"},
            {**row, "schedule": "own"},
            row,
        ]
    )
    starts = [
        "n_devices must be at least 1, got 0",
        "graph '1f1b' deadlocks: 2 streams wait for each other; their blocked heads are device 0",
        "forward has 3 values for 2 stages",
        "unknown engine 'simpi'; did you mean 'simpy'?",
        "ZeroDivisionError: of the test",
    ]
    for error, start in zip(table["error"], starts, strict=False):
        assert error.startswith(start)
        assert "\n" not in error
    assert table[RESULTS[:5]].isna().all(axis=1).tolist() == [True] * 5 + [False]
    assert pd.isna(table["error"][5])


GOOD = {"schedule": "1f1b", "n_microbatches": 2}


@pytest.mark.parametrize(
    ("configurations", "message"),
    [
        ({"schedul": ["1f1b"]}, "grid: unknown key 'schedul'; did you mean 'schedule'?"),
        ([GOOD, {**GOOD, "latencey": 1}], "row 1: unknown key 'latencey'; did you mean 'latency'?"),
        ([{**GOOD, 3: 1}], "row 0: unknown key 3"),
        ([GOOD, {**GOOD, "schedule": "1f1"}], "row 1: unknown schedule '1f1'; did you mean '1f1b'"),
        ([{**GOOD, "backward_order": "forward"}], "row 0: schedule '1f1b' takes no option"),
        ([{**GOOD, "costs": {"forwards": 1}}], "unknown key 'forwards'; did you mean 'forward'?"),
        ([{"n_microbatches": 2}], "row 0 has no schedule"),
        ([{"schedule": "1f1b"}], "row 0 has no n_microbatches"),
        ([{**GOOD, "costs": object()}], "row 0: costs must be numbers, text, a Costs"),
        ([{**GOOD, "costs": 3, "forward": 1}], "row 0: costs must be a pipesim.Costs or a mapping"),
        ({"network": [1, 2]}, "grid: network must be a pipesim.Network or a mapping, got 1"),
        ([3], "row 0 must be a mapping of keys to values, got 3"),
        ({"schedule": "1f1b"}, "grid: schedule must be a list of at least one value, got '1f1b'"),
        ({"schedule": []}, "grid: schedule must be a list of at least one value, got []"),
        ([], "there is nothing to sweep"),
        ("1f1b", "sweep takes a mapping"),
    ],
)
def test_refused_before_anything_runs(configurations: Any, message: str, log: Path) -> None:
    """Nothing is run, though a good row stands first."""
    if isinstance(configurations, list) and configurations:
        configurations = [{"schedule": "own", "n_microbatches": 2}, *configurations]
        message = message.replace("row 1", "row 2").replace("row 0", "row 1")
    with pytest.raises(ArgumentError) as caught:
        sweep(configurations)
    assert message in str(caught.value)
    assert isinstance(caught.value, UnknownNameError) == (
        "unknown" in message or "no option" in message
    )
    assert runs(log) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_jobs": 0}, "n_jobs must be a whole number but 0"),
        ({"backend": "locky", "n_jobs": 2}, "joblib cannot use the backend 'locky'"),
        ({"base": {"n_device": 2}}, "base: unknown key 'n_device'; did you mean 'n_devices'?"),
        ({"path": "/no/such/folder/rows"}, "cannot write /no/such/folder/rows: No such file"),
        ({"path": "/dev/full"}, "cannot write /dev/full: it is a folder, a device or a pipe; name"),
        ({"path": "/"}, "cannot write /: it is a folder, a device or a pipe; name a regular file"),
        ({"path": "a\0b"}, "cannot write a\0b: embedded null"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        sweep([GOOD], **options)
    assert str(caught.value).startswith(message)


def test_none_is_as_if_it_were_not_given() -> None:
    grid = {"schedule": ["1f1b"], "recompute": [None, "always"], "n_devices": [None]}
    table = sweep(grid, base={**BASE, "n_microbatches": 2})
    assert table["makespan"].tolist() == pytest.approx([9e-3, 11e-3])


def test_a_formula_that_fails_stops_no_sweep(tmp_path: Path) -> None:
    """Rows and options need the names of a schedule's options, not its closed forms."""

    def fails(n_devices: int, n_microbatches: int) -> float:
        raise ZeroDivisionError

    calls = []

    def counted(n_devices: int, n_microbatches: int) -> float:
        calls.append(n_devices)
        return 0.0

    forms = {"bubble": ps.ClosedForm("1 / 0", fails), "activations": ps.ClosedForm("0", counted)}

    @ps.register("own", summary="", source="", **forms)
    def build(n_devices: int, n_microbatches: int, extra: int = 0) -> ps.Schedule:
        return ps.schedule("1f1b", n_devices, n_microbatches)

    try:
        rows = [{**GOOD, "schedule": name} for name in ("own", "1f1b")]
        table = sweep([{**rows[0], "extra": 3}, rows[1]])
        grid = sweep({"schedule": ["own", "1f1b"], "extra": [1, 2]}, base={**BASE, **GOOD})
    finally:
        _REGISTRY.pop("own")
    assert table["makespan"].tolist() == pytest.approx([9e-3, 9e-3])
    assert grid["schedule"].tolist() == ["own", "own", "1f1b"]
    assert calls == []


def test_a_preset_and_its_options_are_a_network() -> None:
    """As a table, which is the same row as the network itself."""
    table = {"preset": "dgx_h100", "gpus_per_device": 8, "efficiency": 0.8}
    network = ps.Network.preset("dgx_h100", gpus_per_device=8, efficiency=0.8)
    rows = sweep({"network": [table, network]}, base={**BASE, **GOOD, "output_bytes": 40e6})
    assert rows["makespan"][0] == rows["makespan"][1] > 9e-3 + 2 * 1e-3
    with pytest.raises(UnknownNameError, match="unknown key 'eficiency'; did you mean 'efficienc"):
        sweep([{**GOOD, "network": {**table, "eficiency": 1}}])


def test_every_option_of_lower_is_a_key() -> None:
    """A new one needs a place in `pipesim.sweeps.settings`, and nothing else."""
    assert set(inspect.signature(ps.lower).parameters) - {"schedule"} <= set(FLAT)


def test_layers_of_experts_are_lowered() -> None:
    """They name fields of costs too."""
    grid = {"schedule": ["1f1b"], "n_devices": [2], "n_microbatches": [4], "n_replicas": [2],
            "expert_layers": [0, [0, 2]], "expert_replicas": [2], "exchange_dispatch": [0.5],
            "exchange_combine": [0.5], "forward": [1], "backward": [2]}  # fmt: skip
    table = ps.sweep(grid, n_jobs=1)
    graphs = [ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=2, expert_layers=n, expert_replicas=2)
              for n in (0, [0, 2])]  # fmt: skip
    assert table["n_tasks"].tolist() == [len(graph) for graph in graphs]


@pytest.mark.parametrize("progress", [True, False])
def test_progress_bar(progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sweep([GOOD], progress=progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("1/1" in err) == progress


# The file of results.


def test_resume_runs_what_is_missing(log: Path, tmp_path: Path) -> None:
    """Another grid adds rows to the file; a table holds the requested rows, in order."""
    path = tmp_path / "rows.jsonl"
    first = sweep({"schedule": ["own"], "n_microbatches": [1, 2]}, path=path)
    assert runs(log) == [1, 2]
    grid = {"schedule": ["own"], "n_microbatches": [3, 2, 0, 2]}
    second = sweep(grid, path=path)
    assert runs(log) == [3]
    assert second["n_microbatches"].tolist() == [3, 2, 0]
    assert results(second)[1] == results(first)[1]
    assert second["error"][2].startswith("n_microbatches must be")
    pd.testing.assert_frame_equal(sweep(grid, path=path), second)
    assert runs(log) == []
    assert len(path.read_text().splitlines()) == 4
    assert len(pd.read_json(path, lines=True)) == 4
    sweep(grid, path=path, base={**BASE, "forward": 2e-3})
    assert runs(log) == [2, 3]
    configurations = [{"schedule": "own", "n_microbatches": 2}] * 2
    whole = {"n_devices": 2, "costs": ps.Costs(1e-3, 2e-3, activation_bytes=10**6)}
    assert results(sweep(configurations, path=path, base=whole)) == results(first)[1:] * 2
    assert runs(log) == []  # the same costs, given in another way


def test_unforeseen_errors_are_tried_again(
    register: Callable[[Build], Build], tmp_path: Path
) -> None:
    path, switch = tmp_path / "rows.jsonl", tmp_path / "switch"

    @register
    def build(n_devices: int, n_microbatches: int) -> ps.Schedule:
        if not switch.exists():
            raise MemoryError("of the test")
        return ps.schedule("1f1b", n_devices, n_microbatches)

    row = [{**GOOD, "schedule": "own"}]
    assert sweep(row, path=path)["error"][0] == "MemoryError: of the test"
    switch.touch()
    assert pd.isna(sweep(row, path=path)["error"][0])
    switch.unlink()
    assert pd.isna(sweep(row, path=path)["error"][0])


def test_a_line_that_was_cut_short_is_run_again(log: Path, tmp_path: Path) -> None:
    """However little of it is there; the file is whole again afterwards."""
    path = tmp_path / "rows.jsonl"
    grid = {"schedule": ["own"], "n_microbatches": [1, 2]}
    table = sweep(grid, path=path)
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for size in (len(content) - 1, first + 30, first + 1, 1):
        runs(log)
        path.write_bytes(content[:size])
        assert results(sweep(grid, path=path)) == results(table)
        assert runs(log) == ([2] if size > first else [1, 2])
        assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "a note", '{"a": 1}\n', "[]\n"])
def test_a_file_of_something_else_stays_as_it_is(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(ArgumentError, match="line 1 is no row of results; name another file"):
        sweep([GOOD], path=path)
    assert path.read_text() == content


def test_one_sweep_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path), pytest.raises(ArgumentError, match="another process is writing"):
        sweep([GOOD], path=path)
    sweep([GOOD], path=path)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    """It would wait for a writer, or for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ArgumentError, match="it is a folder, a device or a pipe"):
        sweep([GOOD], path=path)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ArgumentError, match=r"may have no locks .* on another") as it:
        sweep([GOOD], path=path)
    assert f"cannot lock {path}: {os.strerror(errno.ENOLCK)}" in str(it.value)


KILLED = """
import time
import pipesim as ps
form = ps.ClosedForm("0", lambda p, m: 0.0)
@ps.register("slow", summary="", source="", bubble=form, activations=form)
def build(n_devices, n_microbatches):
    time.sleep(0.02 if n_microbatches < 4 else 60 if {slow} else 0)
    return ps.schedule("1f1b", n_devices, n_microbatches)
if __name__ == "__main__":
    table = ps.sweep({{"schedule": ["slow"], "n_microbatches": [1, 2, 3, 4, 5]}},
                     base={{"n_devices": 2, "forward": 1, "backward": 2}},
                     n_jobs=2, path="rows.jsonl", progress=False)
    print(table["makespan"].tolist())
"""


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs; one that ended may still be uncollected."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    """What was written stays; workers end with their sweep, whether it is killed or ends well."""
    script, path = tmp_path / "script.py", tmp_path / "rows.jsonl"
    script.write_text(KILLED.format(slow=True))
    process = subprocess.Popen([sys.executable, script], cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    before = path.read_bytes()
    script.write_text(KILLED.format(slow=False))
    again = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert again.stdout == "[6.0, 9.0, 12.0, 15.0, 18.0]\n"
    assert path.read_bytes().startswith(before)
    assert path.read_bytes().count(b"\n") == 5
    assert workers
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [worker for worker in workers if alive(worker)]
    for worker in left:
        worker.kill()  # so that a failure leaves nothing behind either
    assert left == []


# Workers.


@pytest.mark.slow
def test_a_killed_worker_costs_its_row_only(log: Path, tmp_path: Path) -> None:
    """The others are whole. The row is run twice, with others and alone, and again on resuming."""
    path = tmp_path / "rows.jsonl"
    grid = {"schedule": ["own"], "n_microbatches": [1, FATAL, 2]}
    table = sweep(grid, n_jobs=2, path=path)
    assert table["error"].dropna().to_dict() == {
        1: "worker was killed (SIGKILL(-9); out of memory?)"
    }
    good = table.drop(index=1)
    assert good["makespan"].tolist() == pytest.approx((good["n_microbatches"] + 1) * 3e-3)
    assert runs(log).count(FATAL) == 2
    (tmp_path / "spare").touch()
    assert sweep(grid, path=path)["error"].count() == 0
    assert runs(log) == [FATAL]


@pytest.mark.slow
def test_a_schedule_that_cannot_be_sent(register: Callable[[Build], Build]) -> None:
    """Only its rows say so."""
    lock = threading.Lock()

    @register
    def build(n_devices: int, n_microbatches: int) -> ps.Schedule:
        with lock:
            return ps.schedule("1f1b", n_devices, n_microbatches)

    grid = {"schedule": ["1f1b", "own", "gpipe"], "n_microbatches": [1, 2]}
    errors = sweep(grid, n_jobs=2)["error"]
    assert errors.isna().tolist() == [True, True, False, False, True, True]
    assert errors[2] == "cannot be sent to a worker: TypeError: cannot pickle '_thread.lock' object"


@pytest.mark.slow
def test_a_schedule_of_a_module_that_workers_lack(
    register: Callable[[Build], Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions of importable modules are sent by name; elsewhere the module must be there too."""

    def build(n_devices: int, n_microbatches: int) -> ps.Schedule:
        return ps.schedule("1f1b", n_devices, n_microbatches)

    module = types.ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    build.__module__, build.__qualname__, module.build = "only_here", "build", build  # type: ignore[attr-defined]
    register(build)
    table = sweep({"schedule": ["own", "gpipe"], "n_microbatches": [1]}, n_jobs=2)
    assert table["error"].dropna().to_dict() == {
        0: "could not be run in a worker: ModuleNotFoundError: No module named 'only_here'"
    }


def test_workers_have_one_thread_each(register: Callable[[Build], Build]) -> None:
    @register
    def build(n_devices: int, n_microbatches: int) -> ps.Schedule:
        raise RuntimeError(os.environ.get("OMP_NUM_THREADS"))

    assert sweep([{**GOOD, "schedule": "own"}], n_jobs=2)["error"][0] == "RuntimeError: 1"


@pytest.mark.slow
def test_dask_cluster(log: Path) -> None:
    """By joblib's backend; a row that kills its workers is one that says so, here too."""
    dask = pytest.importorskip("dask")
    distributed = pytest.importorskip("distributed")
    grid = {"schedule": ["own", "gpipe"], "n_microbatches": [1, 2]}
    reference = results(sweep(grid))
    dask_settings = {
        "distributed.scheduler.allowed-failures": 1,  # a task may meet a worker that is dying
        # A worker that has no process so long after any of its deaths is given up for good.
        "distributed.deploy.lost-worker-timeout": "600s",
        "distributed.logging": {"distributed": "critical"},
        # A new interpreter, of which this test starts several, imports for seconds.
        "distributed.worker.multiprocessing-method": "forkserver",
    }
    with (
        dask.config.set(dask_settings),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, dashboard_address=None, silence_logs="CRITICAL"
        ) as cluster,
        distributed.Client(cluster),
    ):
        runs(log)
        assert results(sweep(grid, backend="dask")) == reference
        assert runs(log) == [1, 2]
        with joblib.parallel_config(backend="dask", wait_for_workers_timeout=60):
            table = sweep({"schedule": ["own"], "n_microbatches": [1, FATAL, 2]})
    assert table["error"].dropna().to_dict() == {
        1: "worker was killed (signal unknown; out of memory?)"
    }
    assert results(table.drop(index=1)) == reference[:2]


def test_dask_needs_a_client() -> None:
    with pytest.raises(ArgumentError, match=r"cannot use the backend 'dask': .* Dask Client"):
        sweep([GOOD], backend="dask")
