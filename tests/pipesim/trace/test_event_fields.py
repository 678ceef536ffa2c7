"""Traces whose events tell the action of a range by their fields, not by their names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_chrome_import import begin_and_end, microseconds
from tracing import Event, event

import pipesim as ps
from pipesim.errors import ArgumentError, TimelineError
from pipesim.ops import Op

FIELDS: dict[str, Any] = {"op": "name", "microbatch": "args.micro_batch", "stage": "pid"}
OPS = {"forward-compute": "F", "backward-compute": "B"}


def of_worker(item: Event, pid: int, tid: int = 1) -> Event:
    """Return the same event on another row."""
    return {**item, "pid": pid, "tid": tid}


def one_microbatch() -> list[Event]:
    """Return one micro-batch through two stages; process 0 is stage 0, process 1 stage 1."""
    return [
        of_worker(event("forward-compute", 0, 10, "compute", micro_batch=0), 0),
        of_worker(event("forward-compute", 12, 22, "compute", micro_batch=0), 1),
        of_worker(event("backward-compute", 22, 42, "compute", micro_batch=0), 1),
        of_worker(event("backward-compute", 45, 65, "compute", micro_batch=0), 0),
        of_worker(event("epoch", -5, 99, "other"), 0),
    ]


#: Its compute tasks.
EXPECTED = {"0F0": (0, 10), "1F0": (12, 22), "1B0": (22, 42), "0B0": (45, 65)}


def read(directory: Path, events: list[Event], **options: Any) -> dict[str, tuple[float, float]]:
    """Write one file, import it, and return the times of its tasks without transfers."""
    path = directory / "run.json"
    path.write_text(json.dumps(events))
    times = microseconds(ps.Timeline.from_chrome(path, **options))
    return {name: span for name, span in times.items() if "SEND" not in name and "RECV" not in name}


@pytest.mark.parametrize("form", ["complete", "args of begin", "args of end"])
def test_a_process_a_stage(tmp_path: Path, form: str) -> None:
    """Events without a micro-batch are left out; begin and end events join their args.

    An event on a row of a GPU is a range, too, unless a call launched it.
    """
    gpu = {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}}
    events = one_microbatch()
    if form != "complete":
        kept = "BE"[form == "args of end"]
        events = [
            {k: v for k, v in x.items() if k != "args" or x["ph"] == kept}
            for x in begin_and_end(events)
        ]
    assert read(tmp_path, [gpu, *events], fields=FIELDS, ops=OPS) == EXPECTED
    without_stage = {key: FIELDS[key] for key in ("op", "microbatch")}
    assert read(tmp_path, events, fields=without_stage, ops=OPS) == EXPECTED


def test_places(tmp_path: Path) -> None:
    """Nested args, keys with a dot, categories, and numbers as texts and as floats."""
    events = [
        of_worker(
            event("step", x["ts"], x["ts"] + x["dur"], x["name"],
                  where={"stage": f"stage {x['pid']}"}, **{"data.mb": 0.0}), 3
        )
        for x in one_microbatch()
        if x["args"]
    ]  # fmt: skip
    nan = of_worker(event("step", 70, 80, "forward-compute", **{"data.mb": float("nan")}), 3)
    fields = {
        "op": ("cat", "(.*)-compute"),
        "microbatch": "args.data.mb",
        "stage": ("args.where.stage", r"(\d+)"),
        "rank": "args.where.stage",
    }
    times = read(tmp_path, [*events, nan], fields=fields, ops={"forward": Op.F})
    assert times == EXPECTED


def worker_events(replica: int, late: float) -> list[Event]:
    """Return the events of two stages of a replica, in the form of the traces of Lin et al.

    The process is the replica. Each stage has threads of its own, for computation and messages.
    """
    rows = [
        ("forward-compute", 0, 0, 0, 10), ("forward-send", 0, 1, 10, 12),
        ("forward-recv", 1, 1, 10, 12), ("forward-compute", 1, 0, 12, 22),
        ("backward-compute", 1, 0, 22, 42), ("backward-send", 1, 1, 42, 45),
        ("backward-recv", 0, 1, 42, 45), ("backward-compute", 0, 0, 45, 65),
        ("gc", 0, 0, 65, 66), ("optimizer", 0, 0, 66, 70), ("optimizer", 1, 0, 66, 70),
    ]  # fmt: skip
    events: list[Event] = []
    for stage in (0, 1):
        for thread, kind in enumerate(("compute", "pp-comm")):
            tid = 10 * stage + 5 * replica + thread
            name = {"name": f"PP rank {stage}, TP rank 0, {kind}"}
            events.append({"ph": "M", "name": "thread_name", "pid": replica, "tid": tid,
                           "args": name})  # fmt: skip
    for name, stage, thread, start, end in rows:
        args = {"step": 23, "model_chunk": None, "mb_id": None, "seq_id": 0}
        item = event(name, start + late, end + late, name, **args)
        events.append(of_worker(item, replica, 10 * stage + 5 * replica + thread))
    return events


def test_the_form_of_the_straggler_study(tmp_path: Path) -> None:
    """Stages are numbers in the names of threads; one of two replicas is read."""
    place = ("thread_name", r"PP rank (\d+)")
    fields = {"op": "name", "microbatch": "args.seq_id", "stage": place, "rank": place}
    ops = {"gc": None}
    path = tmp_path / "run.json"
    path.write_text(json.dumps([*worker_events(0, 0), *worker_events(1, 500)]))
    for replica in (0, 1):
        timeline = ps.Timeline.from_chrome(path, fields=fields, ops=ops, only={"pid": replica})
        assert microseconds(timeline) == {
            **EXPECTED, "0SEND_F0": (10, 12), "1RECV_F0": (10, 12), "1SEND_B0": (42, 45),
            "0RECV_B0": (42, 45), "0STEP": (66, 70), "1STEP": (66, 70),
        }  # fmt: skip
    assert timeline.n_devices == 2
    for options, message in (
        ({"only": None}, "rank 0 has 0F0 in processes 0 and 1; choose one replica, such as only="),
        ({"only": {"pid": 2}}, "no event with '2' at pid, which is the place in only; .* '0', '1'"),
        (
            {"ops": {}},
            r"'gc' at 65 us names no operation: 'gc'.*leaves it out",
        ),
        ({"ops": {"gcs": None}}, "did you mean 'gcs'"),
    ):
        with pytest.raises(TimelineError, match=message):
            ps.Timeline.from_chrome(
                path, **{"fields": fields, "ops": ops, "only": {"pid": 0}, **options}
            )


def test_replicas_as_processes(tmp_path: Path) -> None:
    """They look like ranks with the same stages, and are refused unless one is chosen."""
    events = [
        {**x, "pid": replica, "args": {**x["args"], "stage": x["pid"]}}
        for replica in (3, 4)
        for x in one_microbatch()
    ]
    fields = {**FIELDS, "stage": "args.stage"}
    with pytest.raises(TimelineError, match=r"0F0 is on ranks 0 and 1; .*\(only=.* chooses one"):
        read(tmp_path, events, fields=fields, ops=OPS)
    assert read(tmp_path, events, fields=fields, ops=OPS, only={"pid": 4}) == EXPECTED


def launch(start: float, correlation: int, tid: int, kernel: tuple[float, float]) -> list[Event]:
    """Return a call that launches a kernel, and the kernel on a GPU."""
    return [
        of_worker(
            event("launch", start, start + 1, "cuda_runtime", correlation=correlation), 7, tid),
        of_worker(event("gemm", *kernel, "kernel", correlation=correlation), 0, 99),
    ]  # fmt: skip


def test_ranks_as_threads(tmp_path: Path) -> None:
    """Ranks share a process: kernels are of the rank whose thread launched them, or refused."""
    events = [of_worker(x, 7, 1 + x["pid"]) for x in one_microbatch() if x["args"]]
    kernels = [*launch(1, 1, 1, (2, 11)), *launch(13, 2, 2, (14, 19))]
    fields = {**FIELDS, "stage": ("tid", "(.)"), "rank": "tid"}
    with pytest.raises(TimelineError, match="0F0 is missing on any rank: the traces have 3 stages"):
        read(tmp_path, [*events, *kernels], fields=fields, ops=OPS)
    del fields["stage"]
    times = read(tmp_path, [*events, *kernels], fields=fields, ops=OPS)
    assert times == {**EXPECTED, "0F0": (0, 9), "1F0": (12, 17), "1B0": (20, 40), "0B0": (43, 63)}
    for x in events:
        x["args"]["rank"] = x["tid"]
    fields["rank"] = "args.rank"
    with pytest.raises(TimelineError, match=r"'launch' at 1 us has no rank at args\.rank, and its"):
        read(tmp_path, [*events, *kernels], fields=fields, ops=OPS)
    apart = [of_worker(x, x["pid"] + (x["tid"] == 2), x["tid"]) for x in [*events, *kernels]]
    assert read(tmp_path, apart, fields=fields, ops=OPS) == times


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"name": "fwd-compute"},
            "event 'fwd-compute' at 0 us names no operation: 'fwd-compute'; d",
        ),
        (
            {"args": {"mb": 3}},
            r"F, has no micro-batch at args\.micro_batch; .* \(it has args\.mb\)",
        ),
        ({"args": {}}, r"F, has no micro-batch at args\.micro_batch \(it has no args\)"),
        ({"args": {"micro_batch": "first"}}, "micro-batch 0 and first, which are no whole numbers"),
        ({"args": {"micro_batch": [0]}}, r"micro-batch 0 and \[0\], which are no whole numbers"),
    ],
)
def test_events_that_are_no_action(tmp_path: Path, change: Event, message: str) -> None:
    """Each is named with its time."""
    first, *others = one_microbatch()
    with pytest.raises(TimelineError, match=message):
        read(tmp_path, [{**first, **change}, *others], fields=FIELDS, ops=OPS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": FIELDS, "pattern": "x"}, "got both pattern and fields"),
        ({"fields": {**FIELDS, "stge": "pid"}}, "unknown field .* 'stge'; did you mean 'stage'"),
        (
            {"fields": {**FIELDS, "stage": "process"}},
            "place of fields 'process'; .* 'process_name'",
        ),
        ({"fields": {**FIELDS, "stage": "args"}}, r"known: args\.KEY, cat, name, pid, process_n"),
        ({"fields": {**FIELDS, "stage": "args..x"}}, r"unknown place of fields 'args\.\.x'"),
        ({"fields": {**FIELDS, "stage": ("pid", "(")}}, r"'\(', for pid, is no regular expression"),
        ({"fields": {**FIELDS, "stage": ("pid", 3)}}, "fields: 3, for pid, is no regular expressi"),
        ({"fields": {**FIELDS, "stage": ("pid", r"\d")}}, "must be a text with one group, such as"),
        ({"fields": {"op": "name"}}, "fields has no 'microbatch'; give its place, such as"),
        ({"fields": "name"}, "fields must be a mapping, got 'name'"),
        ({"ops": {"fwd": "FX"}}, r"unknown operation of ops\['fwd'\] 'FX'"),
        ({"ops": {3: "F"}}, "a word of ops must be a text"),
        ({"ops": ["F"]}, "ops must be a mapping"),
        ({"only": {"pdi": 0}}, "unknown place of only 'pdi'; did you mean 'pid'"),
        ({"only": 0}, "only must be a mapping"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read(tmp_path, one_microbatch(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Its events have args.micro_batch and pid '0', '1': say what these are, such as fields"
             "={'op': 'name', 'microbatch': 'args.micro_batch', 'stage': 'pid'}"),
        ({"fields": {**FIELDS, "stage": "args.stage"}},
         "no event with anything at args.stage, which is the place in fields['stage']; its events "
         "have args with 'micro_batch'"),
        ({"fields": FIELDS, "ops": dict.fromkeys(OPS)},
         "has no event with all of op, microbatch, stage whose operation ops does not leave out"),
    ],
)  # fmt: skip
def test_no_range(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """The message says what the file has, and the next thing to try."""
    with pytest.raises(TimelineError, match=re.escape(message)):
        read(tmp_path, one_microbatch(), **options)


def test_names_with_words_of_the_file(tmp_path: Path) -> None:
    """``ops`` and ``only`` also hold for ranges whose names a pattern matches."""
    events = [{**x, "name": f"{x['name']} {x['pid']} 0"} for x in one_microbatch()]
    replica = [{**x, "ts": x["ts"] + 500, "cat": "replica"} for x in events]
    pattern = r"(?P<op>.*-compute) (?P<stage>.) (?P<microbatch>.)"
    options = {"pattern": pattern, "ops": OPS, "only": {"cat": "compute"}}
    assert read(tmp_path, [*events, *replica], **options) == EXPECTED
    events = [{**x, "name": x["name"].replace("-compute", "-computes")} for x in events]
    pattern = pattern.replace("compute", "computes")
    with pytest.raises(TimelineError, match="names no operation: 'forward-computes'; did you mean"):
        read(tmp_path, events, pattern=pattern)
