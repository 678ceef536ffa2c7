"""The commands ``pipesim view`` and ``pipesim demo-page``."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
import webbrowser
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_output import fail, succeed
from places import ROOT
from tracing import traced, write

import pipesim as ps
import pipesim.cli.page_commands
from pipesim.cli import main
from pipesim.scheduling.registry import options_of_schedules

COSTS = ps.Costs(
    forward=1e-3,
    backward=2e-3,
    output_bytes=1e6,
    activation_bytes=1e9,
    network=ps.Network(latency=1e-5, bandwidth=1e10),
)
SCHEDULE = ps.schedule("1f1b", 2, 3)
#: Digits of `base64.b85decode`.
B85_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
#: Devices of which each waits for the other's first backward.
DEADLOCK = "0F0,0B0,0F1,0B1\n1B0,1F0,1F1,1B1\n"
#: Tasks, devices and makespan of `SCHEDULE`: (m + p - 1) * 3 ms and 4 messages of 0.11 ms.
LINE = "26 tasks, 2 devices, makespan 12.4 ms"


@pytest.fixture(autouse=True)
def current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of its own, whose name has a space."""
    folder = tmp_path / "my files"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that a browser would have opened; it never does."""
    addresses: list[str] = []

    def record(url: str) -> bool:
        addresses.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", record)
    monkeypatch.setenv("DISPLAY", ":0")
    return addresses


def simulated() -> ps.Timeline:
    return ps.simulate(ps.lower(SCHEDULE), COSTS)


def document(page: Path | str) -> dict[str, Any]:
    """Return the JSON of a page's document; the page names the 85 digits of its text."""
    html = Path(page).read_text(encoding="utf-8")
    text = re.search(r'<script [^>]*id="pipesim-data">([^<]*)</script>', html)
    digits = re.search(r'const digits="([^"]{85})"', html)
    assert text
    assert digits
    code = text[1].translate(str.maketrans(digits[1], B85_DIGITS))
    data = zlib.decompress(base64.b85decode(code))
    size = int.from_bytes(data[:4], "little")
    content: dict[str, Any] = json.loads(data[4 : 4 + size])
    return content


def panels(page: Path | str) -> dict[str, list[str]]:
    """Return the roles of the timelines of each panel by its name."""
    return {p["name"]: [t["role"] for t in p["tracks"]] for p in document(page)["panels"]}


def write_run(folder: Path, *, costs: bool = True) -> Path:
    """Write a run directory of two rows as `pipeexec validate` does."""
    timeline = simulated()
    for name in ("b-never", "a-always"):
        (folder / name).mkdir(parents=True)
        timeline.save(folder / name / "timeline.csv")
        timeline.save(folder / name / "predicted.csv")
    if costs:
        COSTS.save(folder / "costs.json")
    rows: dict[str, Any] = {"b never": {}, "a always": {}}
    (folder / "run.json").write_text(json.dumps({"command": "", "rows": rows}))
    return folder


# Each kind of file.


def test_a_timeline(current: Path, opened: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of a relative path: the page is in the current folder, and is opened there."""
    simulated().save("a step.csv")
    assert succeed(capsys, "view", "a step.csv") == f"a step.html\na step: {LINE}\n"
    assert opened == [(current / "a step.html").as_uri()]
    assert opened[0].endswith("/my%20files/a%20step.html")
    content = document("a step.html")
    assert content["title"] == "a step"
    assert [timeline["unit"] for timeline in content["timelines"]] == ["s"]
    assert content["graphs"][0]["n"] == 26
    assert "memory" not in content["timelines"][0]


@pytest.mark.parametrize("ending", [".parquet", ".PARQUET"])
def test_a_timeline_as_parquet(ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    simulated().save(f"a{ending}")
    assert succeed(capsys, "view", f"a{ending}") == f"a.html\na: {LINE}\n"
    Path("a.parquet").write_text("device,stream\n")
    assert "a.parquet is no whole timeline: it is no Parquet" in fail(capsys, "view", "a.parquet")


def test_costs_give_memory(capsys: pytest.CaptureFixture[str]) -> None:
    simulated().save("a.csv")
    COSTS.save("my costs.json")
    succeed(capsys, "view", "a.csv", "--costs", "my costs.json", "--title", "<b>")
    assert document("a.html")["timelines"][0]["memory"]
    assert document("a.html")["title"] == "<b>"
    assert "<title>&lt;b&gt;</title>" in Path("a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.pt.trace.json.gz"])
def test_a_trace_of_one_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    simulated().to_chrome(name)
    assert succeed(capsys, "view", name) == f"a.html\na: {LINE}\n"


def test_a_trace_with_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """It then has memory, and messages that had no bytes have those of the costs."""
    simulated().to_chrome("a.json")
    COSTS.save("costs.json")
    succeed(capsys, "view", "a.json")
    assert "memory" not in document("a.html")["timelines"][0]
    succeed(capsys, "view", "a.json", "--costs", "costs.json")
    assert {"memory", "nbytes"} <= document("a.html")["timelines"][0].keys()
    content = json.loads(Path("a.json").read_text())
    del content["otherData"], content["pipesimTimelines"]
    Path("a.json").write_text(json.dumps(content))
    succeed(capsys, "view", "a.json")
    assert not {"memory", "nbytes"} & document("a.html")["timelines"][0].keys()
    succeed(capsys, "view", "a.json", "--costs", "costs.json")
    assert {"memory", "nbytes"} <= document("a.html")["timelines"][0].keys()


def test_a_trace_of_several_timelines(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them; beside other files, each has the name of its file in front."""
    ps.trace.save("a.json.gz", {"predicted": simulated(), "measured": simulated()})
    out = succeed(capsys, "view", "a.json.gz", "--out", "x.html")
    assert out == f"x.html\npredicted: {LINE}\nmeasured: {LINE}\n"
    assert len(document("x.html")["timelines"]) == 2
    simulated().save("b.csv")
    out = succeed(capsys, "view", "a.json.gz", "b.csv", "--out", "x.html")
    assert [line.rpartition(":")[0] for line in out.splitlines()[1:]] == [
        "a: predicted", "a: measured", "b",
    ]  # fmt: skip


def test_traces_of_ranks(current: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder; ``--step`` and ``--pattern`` are those of `Timeline.from_chrome`."""
    graph = ps.lower(SCHEDULE, step="none")
    steps = [traced(ps.simulate(graph, ps.Costs(1e-3, seconds))) for seconds in (2e-3, 4e-3)]
    for event in (event for rank in steps[1] for event in rank):
        event["ts"] += 1e6
    (current / "traces").mkdir()
    write(current / "traces", [a + b for a, b in zip(*steps, strict=True)])
    assert "2 devices, makespan 20.0 ms" in succeed(capsys, "view", "traces")
    out = succeed(capsys, "view", "traces/", "--step", 0, "--pattern",
                  "PP:(?P<stage>.)(?P<op>.)(?P<microbatch>.)")  # fmt: skip
    assert out == "traces.html\ntraces: 24 tasks, 2 devices, makespan 12.0 ms\n"
    line = fail(capsys, "view", "traces/rank0.json", "traces/rank1.json")
    assert "of a run of 2" in line
    assert "(here: the folder of these files, or --ranks N)" in line
    assert "rank0: 6 tasks" in succeed(capsys, "view", "traces/rank0.json", "--ranks", 1)
    assert "no range that matches the pattern" in fail(
        capsys, "view", "traces", "--pattern", "(?P<op>x)(?P<microbatch>y)"
    )


def test_a_trace_with_fields(current: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--fields``, ``--ops`` and ``--only`` are objects of JSON."""
    events = [
        {"ph": "X", "name": name, "pid": replica, "tid": 1, "ts": start + 500 * replica, "dur": 10,
         "args": {"mb": 0, "stage": 0}}
        for replica in (0, 1)
        for start, name in enumerate(["fwd", "back", "gc"])
    ]  # fmt: skip
    for event in events:
        event["ts"] *= 10
    (current / "events.json").write_text(json.dumps(events))
    fields = '{"op": "name", "microbatch": "args.mb", "stage": ["args.stage", "([0-9])"]}'
    more = ("--ops", '{"back": "B", "gc": null}', "--only", '{"pid": 1}')
    out = succeed(capsys, "view", "events.json", "--fields", fields, *more)
    assert out == "events.html\nevents: 2 tasks, 1 devices, makespan 20.0 µs\n"
    assert "'back' at 10 us names no operation" in fail(
        capsys, "view", "events.json", "--fields", fields
    )
    assert "is no JSON" in fail(capsys, "view", "events.json", "--fields", "op=name")
    assert "is no object of JSON" in fail(capsys, "view", "events.json", "--only", "0")


@pytest.mark.parametrize("name", ["my.csv", "my.txt"])
def test_a_schedule(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes clock cycles, or with costs seconds."""
    SCHEDULE.save(name)
    COSTS.save("costs.json")
    line = "my: 12 actions, 2 devices, an action a clock cycle (--costs simulates it)"
    assert succeed(capsys, "view", name) == f"my.html\n{line}\n"
    assert document("my.html")["timelines"][0]["unit"] == "cycle"
    assert succeed(capsys, "view", name, "--costs", "costs.json") == f"my.html\nmy: {LINE}\n"
    assert document("my.html")["timelines"][0]["unit"] == "s"


def test_a_schedule_whose_first_device_begins_late(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells before its first action are empty; the action is one of two overlapped ones."""
    Path("late.csv").write_text(",,0F0,,0B0\n\n")
    assert "late: 2 actions, 1 devices" in succeed(capsys, "view", "late.csv")
    ps.schedule("dualpipe", 2, 4).save("pair.csv")
    assert "pair: 18 actions, 2 devices" in succeed(capsys, "view", "pair.csv")


def test_a_schedule_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The page marks where it waits; it cannot be simulated."""
    Path("mine.csv").write_text(DEADLOCK)
    COSTS.save("costs.json")
    out = succeed(capsys, "view", "mine.csv")
    assert out.endswith("mine: 8 actions, 2 devices; it cannot run: schedule 'mine' deadlocks: "
                        "2 streams wait for each other\n")  # fmt: skip
    assert "deadlocks" in document("mine.html")["timelines"][0]["problem"]
    assert "deadlocks" in fail(capsys, "view", "mine.csv", "--costs", "costs.json")


# Run directories.


def test_a_run(current: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Predictions over measured steps, with the costs of the run, in the order of its record."""
    write_run(current / "my run")
    line = "26 tasks, 2 devices, makespan 12.4 ms predicted, 12.4 ms measured (+0.0%)"
    out = succeed(capsys, "view", "my run")
    assert out == f"my run.html\nb never: {line}\na always: {line}\n"
    roles = ["predicted", "measured"]
    assert panels("my run.html") == {"b never": roles, "a always": roles}
    assert all("memory" in timeline for timeline in document("my run.html")["timelines"])
    assert document("my run.html")["title"] == "my run"


def test_a_row_of_a_run(
    current: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the costs of the run, from any folder; another folder's costs are not its own."""
    write_run(current / "run")
    succeed(capsys, "view", "run/b-never")
    assert "memory" in document("b-never.html")["timelines"][0]
    monkeypatch.chdir("run/b-never")
    succeed(capsys, "view", ".", "--out", "x.html")
    assert panels("x.html") == {"b-never": ["predicted", "measured"]}
    assert "memory" in document("x.html")["timelines"][0]
    monkeypatch.chdir(current)
    (current / "run" / "run.json").unlink()
    succeed(capsys, "view", "run/b-never")
    assert "memory" not in document("b-never.html")["timelines"][0]


def test_a_run_of_one_timeline(current: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a prediction; a step that did not end; ``--costs`` replaces those of the run."""
    write_run(current / "run", costs=False)
    COSTS.save("costs.json")  # not of the run
    timeline = simulated()
    (current / "part").mkdir()
    end = timeline.end.copy()
    end[-3:] = float("nan")
    ps.Timeline(timeline.graph, timeline.start, end, timeline.nbytes).save("part/timeline.csv")
    (current / "part" / "run.json").write_text('{"error": "a stage raised"}')
    out = succeed(capsys, "view", "part")
    assert "part: 26 tasks, of which 23 ran, 2 devices, makespan" in out
    assert panels("part.html") == {"part": [""]}
    assert "memory" not in document("part.html")["timelines"][0]
    out = succeed(capsys, "view", "part", "run", "--costs", "costs.json")
    assert list(panels("part-and-1-more.html")) == ["part", "run: b never", "run: a always"]
    assert "memory" in document("part-and-1-more.html")["timelines"][0]


def test_files_that_a_run_does_not_list(current: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy of a row, another prediction and other costs change nothing."""
    run = write_run(current / "run", costs=False)
    record = json.loads((run / "run.json").read_text())
    (run / "a-always" / "predicted.csv").unlink()
    names = [x.relative_to(run).as_posix() for x in run.rglob("*.csv")]
    (run / "run.json").write_text(json.dumps({**record, "files": dict.fromkeys(names, "")}))
    shown = succeed(capsys, "view", "run")
    row = succeed(capsys, "view", "run/a-always", "--out", "row.html")
    shutil.copytree(run / "b-never", run / "copy")
    for place in (run, run / "a-always"):
        ps.simulate(ps.lower(SCHEDULE), ps.Costs(1, 2)).save(place / "predicted.csv")
        COSTS.save(place / "costs.json")
    assert succeed(capsys, "view", "run") == shown
    assert succeed(capsys, "view", "run/a-always", "--out", "row.html") == row
    assert "memory" not in document("run.html")["timelines"][0]
    (run / "run.json").write_text(json.dumps({**record, "files": {}}))
    assert "is a run directory without timelines" in fail(capsys, "view", "run")


def test_a_training(current: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps share the prediction."""
    timeline = simulated()
    for step in ("step-00000002", "step-00000010"):
        (current / "training" / "steps" / step).mkdir(parents=True)
        timeline.save(current / "training" / "steps" / step / "timeline.csv")
    timeline.save("training/predicted.csv")
    Path("training/training.json").write_text("{}")
    shutil.copytree("training/steps", "training/steps (copy)")
    succeed(capsys, "view", "training", "--layout", "steps")
    roles = ["predicted", "measured"]
    steps = {f"steps/step-{step:08}": roles for step in (2, 10)}
    assert panels("training.html") == steps
    assert document("training.html")["layout"] == "steps"
    succeed(capsys, "view", "training/steps/step-00000010")
    assert panels("step-00000010.html") == {"step-00000010": roles}


def test_the_kept_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The one of the README."""
    out = succeed(capsys, "view", ROOT / "results" / "quickstart").splitlines()
    assert out[0] == "quickstart.html"
    assert out[1] == ("gpipe never: 66 tasks, 2 devices, makespan 238 ms predicted, 249 ms "
                      "measured (-4.4%)")  # fmt: skip
    assert list(panels(out[0])) == ["gpipe never", "gpipe always", "1f1b never", "1f1b always"]


def broken_predictions(run: Path) -> str:
    ps.simulate(ps.lower(ps.schedule("gpipe", 2, 5)), COSTS).save(run / "b-never/predicted.csv")
    return "predicted.csv with run/b-never/timeline.csv: predicted"


def broken_record(run: Path) -> str:
    (run / "run.json").write_text('{"rows": ')
    return "cannot read the record run/run.json"


def truncated(run: Path) -> str:
    path = run / "a-always" / "timeline.csv"
    path.write_text(path.read_text()[:300])
    return "run/a-always/timeline.csv is no whole timeline: its last line was cut"


def without_timelines(run: Path) -> str:
    for path in run.glob("*/timeline.csv"):
        path.unlink()
    return "run is a run directory without timelines"


@pytest.mark.parametrize(
    "change", [broken_predictions, broken_record, truncated, without_timelines]
)
def test_broken_runs(
    change: Callable[[Path], str], current: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(current / "run")
    message = change(Path("run"))
    assert message in fail(capsys, "view", "run")
    assert not list(current.glob("*.html"))


# Several files.


def test_several_files(current: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of the same name are told apart by their folders."""
    for folder in ("a", "b"):
        (current / folder).mkdir()
        simulated().save(f"{folder}/step.csv")
    SCHEDULE.save("orders.csv")
    out = succeed(capsys, "view", "a/step.csv", "b/step.csv", "orders.csv").splitlines()
    assert out[0] == "step-and-2-more.html"
    assert list(panels(out[0])) == ["a/step.csv", "b/step.csv", "orders"]
    assert document(out[0])["title"] == "a/step.csv, b/step.csv, orders"
    assert document(out[0])["layout"] == "stack"
    assert "a/step.csv is given twice" in fail(capsys, "view", "a/step.csv", "./a/step.csv")


# The page.


def test_other_files_are_not_replaced(current: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page is; and anything that ``--out`` names."""
    simulated().save("a.csv")
    Path("a.html").write_text("mine")
    assert "a.html exists, and is no page of pipesim" in fail(capsys, "view", "a.csv")
    assert Path("a.html").read_text() == "mine"
    succeed(capsys, "view", "a.csv", "--out", "a.html")
    succeed(capsys, "view", "a.csv", "--title", "again")
    assert document("a.html")["title"] == "again"
    Path("a.html").unlink()
    (current / "a.html").mkdir()
    assert "a.html exists" in fail(capsys, "view", "a.csv")
    Path("gallery.html").write_text("mine")
    assert "gallery.html exists" in fail(capsys, "demo-page")


@pytest.mark.parametrize("browser", ["no", "no display", "no browser", "missing"])
def test_no_browser(
    browser: str,
    opened: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only the path is printed."""

    def missing(url: str) -> bool:
        opened.append(url)
        raise webbrowser.Error("could not locate runnable browser")

    simulated().save("a.csv")
    flags = []
    if browser == "no":
        flags = ["--no-open"]
    elif browser == "no display":
        monkeypatch.setattr("sys.platform", "linux")
        for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
            monkeypatch.delenv(name, raising=False)
    elif browser == "no browser":
        monkeypatch.setattr(webbrowser, "open", lambda url: False)
    else:
        monkeypatch.setattr(webbrowser, "open", missing)
    assert succeed(capsys, "view", "a.csv", *flags) == f"a.html\na: {LINE}\n"
    assert len(opened) == (browser == "missing")


# Mistakes.


def content(name: str) -> bytes:
    """Return the content of a file that cannot be shown."""
    if name in ("cut.csv", "lines.csv"):
        simulated().save(name)
        text = Path(name).read_bytes()
        return text[:710] if name == "cut.csv" else b"".join(text.splitlines(keepends=True)[:12])
    if name in ("cut.json", "cut.json.gz"):
        simulated().to_chrome(name)
        return Path(name).read_bytes()[:500]
    if name == "costs.json":
        COSTS.save(name)
        return Path(name).read_bytes()
    if name == "page.html":
        ps.plot.to_html(name, SCHEDULE)
        return Path(name).read_bytes()
    return {
        "empty.csv": b"",
        "blank.json": b" \n",
        "binary.csv": bytes(range(256)),
        "latin.txt": "größe".encode("latin-1"),
        "table.csv": b"schedule,makespan\n1f1b,0.5\n",
        "run.json": b'{"rows": {}}',
        "other.json": b'{"a": 1}',
        "op.csv": b"device,op\n0,F\n",
        "action.csv": b"0F0,0Q0\n",
        "model.py": b"import torch\n",
    }[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty.csv", "cannot view empty.csv: it is empty; pipesim view shows a timeline"),
        ("blank.json", "it is empty"),
        ("binary.csv", "cannot view binary.csv: it is no text; pipesim view shows"),
        ("latin.txt", r"it begins with 'gr\ufffd\ufffde'; pipesim view shows"),
        ("table.csv", "it begins with 'schedule,makespan'; pipesim view shows"),
        ("model.py", "it begins with 'import torch'; pipesim view shows"),
        ("page.html", "it is a page already; open it in a browser"),
        ("cut.csv", "cut.csv is no whole timeline: its last line was cut"),
        ("lines.csv", "lines.csv is no whole timeline: "),
        ("op.csv", "op.csv is no whole timeline: column 'stream' is missing"),
        ("action.csv", "action.csv: row 1 (device 0), column 2"),
        ("cut.json", "cannot read a trace from cut.json: it was cut"),
        ("cut.json.gz", "cannot read a trace from cut.json.gz: "),
        ("other.json", "other.json is no Chrome trace"),
        ("costs.json", "give it as --costs"),
        ("run.json", "it is the record of a run; give its folder"),
    ],
)
def test_files_that_cannot_be_shown(
    name: str, message: str, current: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = content(name)
    (current / name).write_bytes(data)
    assert message in fail(capsys, "view", name, "--out", "x.html")
    assert not Path("x.html").exists()


def test_folders_that_cannot_be_shown(current: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of runs names one."""
    (current / "empty").mkdir()
    line = fail(capsys, "view", "empty")
    assert "cannot view the folder empty: it has no timeline.csv, no run.json and no trace" in line
    write_run(current / "results" / "first")
    assert "; did you mean results/first?" in fail(capsys, "view", "results")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: FILE (see pipesim view --help)"),
        ([""], "the name of a FILE is empty"),
        (["b.csv"], "cannot read file b.csv: No such file or directory"),
        (["steps.cvs"], "did you mean 'steps.csv'?"),
        (["steps.csv", "--out", "x.pdf"], "'x.pdf' must end in .html, .htm"),
        (["steps.csv", "--out", "no/x.html"], "cannot write no/x.html: No such file or directory"),
        (["steps.csv", "--layout", "grid"], "invalid choice: 'grid'"),
        (["steps.csv", "--costs", ""], "cannot read costs from .: Is a directory"),
        (["steps.csv", "--costs", "b.json"], "cannot read costs from b.json"),
        (["steps.csv", "--costs", "three.json"], "three.json: forward has 3 values for 2 stages"),
        (["steps.csv", "--step", "1", "--ranks", "2"], "leave out --step and --ranks"),
        (["trace.json", "--step", "1.5"], "step must be a whole number, got 1.5"),
        (["trace.json", "--ranks", "x"], "n_ranks must be a whole number, got 'x'"),
        (["trace.json", "--pattern", "("], "pattern '(' is no regular expression"),
        (["steps.csv", "--no-opn"], "unrecognized argument --no-opn; did you mean '--no-open'?"),
    ],
)
def test_mistakes(
    args: list[str], message: str, current: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated().save("steps.csv")
    simulated().to_chrome("trace.json")
    ps.Costs(forward=(1, 2, 3), backward=1).save("three.json")
    assert message in fail(capsys, "view", *args)
    assert not list(current.glob("*.html"))


# The gallery.


@pytest.mark.slow
def test_a_gallery(opened: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """All named schedules take these counts."""
    out = succeed(capsys, "demo-page").splitlines()
    assert out[0] == "gallery.html"
    names = options_of_schedules()
    shape = "4 devices, 8 micro-batches"
    size = Path("gallery.html").stat().st_size
    line = rf"{len(names)} schedules, {shape}, [0-9]+ tasks, {size / 1e3:.1f} kB"
    assert re.fullmatch(line, out[1])
    assert out[2:] == []
    content = document("gallery.html")
    assert [panel["name"] for panel in content["panels"]] == [*names]
    assert (content["title"], content["layout"]) == (f"Schedules on {shape}", "stack")
    assert size < 100_000
    assert opened == []


def test_schedules_that_do_not_take_the_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are left out, and named; if there is no other, it is a mistake."""
    names = dict.fromkeys(("1f1b", "chimera", "interleaved_1f1b", "dualpipe"))
    monkeypatch.setattr(pipesim.cli.page_commands, "options_of_schedules", lambda: names)
    out = succeed(capsys, "demo-page", "-p", 3, "--microbatches", 6, "--out", "three.html")
    first, second, *refused = out.splitlines()
    assert first == "three.html"
    assert second.startswith("2 schedules, 3 devices, 6 micro-batches, ")
    assert [line.split("'")[1] for line in refused] == ["chimera", "dualpipe"]
    assert refused[0].startswith("without: schedule 'chimera' takes an even number of devices")
    assert list(panels("three.html")) == ["1f1b", "interleaved_1f1b"]
    del names["1f1b"], names["interleaved_1f1b"]
    assert "schedule 'chimera' takes" in fail(capsys, "demo-page", "-p", 3)


def test_stages_share_the_costs_of_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that schedules of several stages a device are of the same model; messages take time."""
    names = dict.fromkeys(("1f1b", "interleaved_1f1b", "zbv"))
    monkeypatch.setattr(pipesim.cli.page_commands, "options_of_schedules", lambda: names)
    written: dict[str, ps.Timeline] = {}
    monkeypatch.setattr(
        pipesim.cli.page_commands, "to_html", lambda path, items, title: written.update(items)
    )
    monkeypatch.setattr(pipesim.cli.page_commands, "size_text", lambda path: "0 B")
    succeed(capsys, "demo-page")
    for timeline in written.values():
        assert timeline.busy == pytest.approx([8 * 3e-3] * 4)
        assert timeline.makespan > (1 + 0.058) * 8 * 3e-3  # the lowest bubble without messages
        assert timeline.memory.peak.max() > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-p", "0"], "devices must be at least 1, got 0"),
        (["-m", "x"], "microbatches must be a whole number, got 'x'"),
        (["--out", "gallery"], "'gallery' must end in .html, .htm"),
        (["1f1b"], "unrecognized argument 1f1b"),
    ],
)
def test_mistakes_of_a_gallery(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capsys, "demo-page", *args)
    assert not Path("gallery.html").exists()


# Help.


@pytest.mark.parametrize("command", ["view", "demo-page"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It has an example, and the list of commands has the command."""
    assert f"  pipesim {command} " in succeed(capsys, command, "--help")
    assert re.search(rf"^    {command}\b", succeed(capsys, "--help"), re.MULTILINE)


def test_the_examples_of_the_help_are_understood(
    current: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the files, which are not there."""
    text = succeed(capsys, "view", "--help")
    for line in re.findall(r"^  pipesim (view .*)$", text, re.MULTILINE):
        assert main(shlex.split(line)) == 2
        assert "cannot read file" in capsys.readouterr().err
