"""Timelines inside traces: read back exactly, and refused where the trace was changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_choice import covering
from hypothesis import given
from same_timelines import KINDS, same, timeline_of_kind
from strategies import cases

import pipesim as ps
from pipesim.errors import ArgumentError, TimelineError, UnknownNameError
from pipesim.timeline.tables import to_rows
from pipesim.trace.chrome_json import SAVED, SIGNATURE, signed
from pipesim.utils.texts import CHECKSUM, checksum


@pytest.mark.parametrize(
    ("kind", "ending"), covering(product([*KINDS, "failed"], [".json", ".json.gz"]))
)
def test_round_trip_of_each_kind(kind: str, ending: str, tmp_path: Path) -> None:
    timeline = timeline_of_kind(kind)
    path = tmp_path / f"trace{ending}"
    timeline.to_chrome(path)
    back = ps.Timeline.from_chrome(path)
    assert same(timeline, back)
    assert to_rows(back)[1] == to_rows(timeline)[1]
    assert np.array_equal(back.issue_times, timeline.issue_times)
    assert back.name == timeline.name
    assert ps.Timeline.from_chrome([path], name="mine").name == "mine"


@pytest.mark.slow
@given(case=cases())
def test_round_trip(
    case: tuple[ps.TaskGraph, ps.Costs], tmp_path_factory: pytest.TempPathFactory
) -> None:
    timeline = ps.simulate(*case)
    path = tmp_path_factory.mktemp("trace") / "x.json"
    timeline.to_chrome(path)
    assert same(timeline, ps.Timeline.from_chrome(path))


@pytest.mark.slow
def test_several_timelines(tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    ps.trace.save(path, {"a": timeline_of_kind("plain"), "b": timeline_of_kind("experts")})
    both = ps.trace.load(path)
    assert list(both) == [timeline.name for timeline in both.values()] == ["a", "b"]
    assert same(both["b"], timeline_of_kind("experts"))
    assert same(ps.Timeline.from_chrome(path, name="a"), timeline_of_kind("plain"))
    with pytest.raises(ArgumentError, match=r"both\.json has several .* name=, one of 'a', 'b'"):
        ps.Timeline.from_chrome(path)
    with pytest.raises(UnknownNameError, match=r"unknown timeline 'c' \(known: a, b\)"):
        ps.Timeline.from_chrome(path, name="c")
    ps.trace.save(path, [timeline_of_kind("plain")] * 2)
    assert list(ps.trace.load(path)) == ["1f1b", "1f1b (2)"]


def test_arguments_read_the_events(tmp_path: Path) -> None:
    """Bytes of messages, or gaps that are charged, are not those that were saved."""
    timeline = timeline_of_kind("plain")
    timeline.to_chrome(tmp_path / "x.json")
    assert ps.Timeline.from_chrome(tmp_path / "x.json", output_bytes=3.0).nbytes.max() == 3.0
    charged = ps.Timeline.from_chrome(tmp_path / "x.json", gaps="charge")
    assert charged.end.tolist() != timeline.end.tolist()


def test_viewers_read_the_events_first(tmp_path: Path) -> None:
    """Perfetto ignores what follows a key that it does not know; JSON has no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    timeline_of_kind("failed").to_chrome(tmp_path / "x.json")
    text = (tmp_path / "x.json").read_text()
    content = json.loads(text, parse_constant=refuse)
    assert list(content) == ["displayTimeUnit", "otherData", "traceEvents", SAVED]
    assert content["otherData"][SIGNATURE] == content[SAVED][CHECKSUM]
    assert text.count("\n") == len(content["traceEvents"]) + 2


def edited(path: Path, edit: Callable[[dict[str, Any]], Any], *, sign: bool) -> None:
    """Change a trace, and its checksum if ``sign``."""
    content = json.loads(path.read_text())
    edit(content)
    if sign:
        digest = checksum(signed(content))
        content["otherData"][SIGNATURE] = digest
        if isinstance(content[SAVED], dict):
            content[SAVED][CHECKSUM] = digest
    path.write_text(json.dumps(content))


def timelines(content: dict[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = content[SAVED]["timelines"][0]["columns"]
    return columns


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content["traceEvents"][-1].update(name="x"),
        lambda content: timelines(content)["end"].__setitem__(0, 99.0),
        lambda content: content.pop("otherData") and timelines(content)["end"].reverse(),
        lambda content: content.pop("otherData") and content["traceEvents"].pop(),
        lambda content: content[SAVED].pop(CHECKSUM),
        lambda content: content.update({SAVED: []}),
        lambda content: content["otherData"].update({SIGNATURE: None}),
    ],
)
def test_a_change_by_hand(edit: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    """Of an event or a saved time: neither is taken for what was written."""
    path = tmp_path / "x.json"
    timeline_of_kind("plain").to_chrome(path)
    edited(path, edit, sign=False)
    for read in (ps.Timeline.from_chrome, ps.trace.load):
        with pytest.raises(TimelineError, match=r"was changed after it was written: its checksum"):
            read(path)
    edited(path, lambda content: (content.pop("otherData", 0), content.pop(SAVED)), sign=False)
    assert list(ps.trace.load(path)) == ["step 0"]  # of the events alone


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.update({SAVED: {}}), "must have a name, settings and columns"),
        (lambda content: content[SAVED].update(timelines=[3]), "must have a name, settings and"),
        (lambda content: timelines(content).pop("op"), "column 'op' is missing"),
        (lambda content: timelines(content)["op"].pop(), "lists of the same length"),
        (lambda content: timelines(content).update(op="F"), "lists of the same length"),
        (lambda content: timelines(content).clear(), "lists of the same length"),
        (lambda content: timelines(content)["op"].__setitem__(3, 1), "'op' must have texts"),
        (lambda content: timelines(content)["op"].__setitem__(3, "G"), r"task 3 .* an unknown op"),
        (lambda content: timelines(content)["end"].__setitem__(3, "x"), "numbers or null"),
        (lambda content: timelines(content)["end"].__setitem__(3, -1), "task 3 .* ends before"),
        (lambda content: timelines(content)["stage"].__setitem__(3, 1.5), "whole numbers"),
        (lambda content: timelines(content)["stage"].__setitem__(3, 10**30), "whole numbers"),
        (
            lambda content: content[SAVED]["timelines"][0]["settings"].update(surprise="x"),
            "texts of known names",
        ),
    ],
)
def test_impossible_content(
    edit: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    """What we would not write is refused even with a checksum that matches."""
    path = tmp_path / "x.json"
    timeline_of_kind("plain").to_chrome(path)
    edited(path, edit, sign=True)
    with pytest.raises(TimelineError, match=message):
        ps.Timeline.from_chrome(path)


def test_key_elsewhere(tmp_path: Path) -> None:
    """A trace of another program that mentions the key of our timelines."""
    (tmp_path / "x.json").write_text('{"traceEvents": [], "note": "pipesimTimelines"}')
    with pytest.raises(TimelineError, match=r"read the events .* with Timeline\.from_chrome"):
        ps.trace.load(tmp_path / "x.json")
