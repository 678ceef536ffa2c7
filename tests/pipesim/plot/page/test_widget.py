"""The widget of notebooks on the side of Python: what is selected as tables, and updates."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import pipesim as ps
from pipesim.analysis.critical_path import critical_path
from pipesim.analysis.idle import CAUSES, causes_of_gaps
from pipesim.errors import ArgumentError, CapacityError, TimelineError
from pipesim.plot.page.save import widget_program
from pipesim.plot.widget import timeline_widget
from pipesim.plot.widget.make_widget import widget
from pipesim.plot.widget.timeline_widget import LatestValue, TimelineWidget

GRAPH = ps.lower(ps.schedule("1f1b", 4, 8))
COSTS = ps.Costs(forward=1e-3, backward=2e-3, network=ps.Network(latency=1e-4))
TIMELINE = ps.simulate(GRAPH, COSTS)
SLOWER = ps.simulate(GRAPH, ps.Costs(forward=2e-3, backward=5e-3))


def select(view: TimelineWidget, **values: Any) -> None:
    """Set the selection as the page does, which knows the last document."""
    place = {"version": view.version, "panel": 0, "role": "", "simulated": False}
    view.selection = {**place, **values}


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, at most 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_selected_tasks_are_rows_of_the_frame() -> None:
    view = widget(TIMELINE)
    for task in (0, 17, len(GRAPH) - 1):
        select(view, type="task", task=task)
        pd.testing.assert_frame_equal(view.selected_tasks(), TIMELINE.frame.loc[[task]])
        assert view.selected_gap().empty


def test_the_chain_is_the_critical_path_for_the_last_task() -> None:
    view = widget(TIMELINE)
    select(view, type="task", task=int(np.argmax(TIMELINE.end)))
    path = critical_path(TIMELINE)
    pd.testing.assert_frame_equal(view.chain(), path.drop(columns="gap"))
    middle = int(path.index[len(path) // 2])
    select(view, type="task", task=middle)
    assert list(view.chain().index) == list(path.index[: len(path) // 2 + 1])


def test_a_gap_has_its_causes() -> None:
    view = widget([SLOWER, TIMELINE])
    gaps, seconds = causes_of_gaps(TIMELINE)
    for k, (device, previous, task) in enumerate(
        zip(gaps.device, gaps.previous, gaps.task, strict=True)
    ):
        # The page's times may be rounded: they are not looked at.
        select(
            view, panel=1, type="gap", device=int(device), since=0.1, until=0.2,
            previous=int(previous), next=int(task),
        )  # fmt: skip
        (row,) = view.selected_gap().to_dict("records")
        assert (row["device"], row["start"]) == (device, gaps.since[k])
        assert row["end"] == gaps.until[k]
        assert [row[cause] for cause in CAUSES] == seconds[k].tolist()
        assert sum(seconds[k]) == pytest.approx(row["end"] - row["start"])
        assert view.chain().index[-1] == task
        assert view.selected_tasks().empty


def test_roles_of_a_comparison() -> None:
    view = widget({"a run": ps.Comparison(TIMELINE, SLOWER)})
    for role, timeline in (("predicted", TIMELINE), ("measured", SLOWER)):
        select(view, role=role, type="task", task=5)
        assert view.selected_tasks()["end"].item() == timeline.end[5]


def test_nothing_selected() -> None:
    view = widget(TIMELINE)
    assert view.selected_tasks().empty
    assert view.chain().empty
    assert view.selected_gap().empty
    assert list(view.selected_tasks()) == list(TIMELINE.frame)
    assert list(view.chain()) == [*TIMELINE.frame, "waited_for"]


def test_a_selection_in_an_earlier_document_is_none() -> None:
    view = widget(TIMELINE)
    version = view.version
    view._send_content(timeline_widget._checked(SLOWER))
    select(view, version=version, type="task", task=5)
    assert view.selected_tasks().empty


@pytest.mark.parametrize(
    "values",
    [
        {"panel": 1, "type": "task", "task": 0},
        {"type": "task", "task": len(GRAPH)},
        {"type": "task", "task": "0"},
        {"type": "task"},
        {"task": 0},
        {"type": "gap", "device": 0, "previous": 0, "next": 0},
    ],
)
def test_selections_of_nothing_that_is_shown(values: dict[str, Any]) -> None:
    view = widget(TIMELINE)
    select(view, **values)
    with pytest.raises(ArgumentError, match=r"names nothing that is shown|has no idle gap"):
        view.selected_gap()


def test_selections_that_python_has_no_times_of() -> None:
    view = widget([TIMELINE, ps.schedule("1f1b", 4, 8), GRAPH])
    select(view, type="task", task=3, simulated=True)
    with pytest.raises(TimelineError, match=r"simulation of the page.*Reset"):
        view.selected_tasks()
    for panel, name in ((1, "Schedule '1f1b'"), (2, "TaskGraph '1f1b'")):
        select(view, panel=panel, type="task", task=3)
        with pytest.raises(TimelineError, match=f"{name}.*simulate"):
            view.chain()


def test_tasks_that_wait_in_a_circle() -> None:
    """Measured times can contradict the order of a stream, such as those of two messages."""
    costs = ps.Costs(1, 1, output_bytes=2, network=ps.Network(bandwidth=1.0))
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), costs)
    ids = {str(timeline.graph.task(task)): task for task in range(len(timeline))}
    start, end = timeline.start.copy(), timeline.end.copy()
    for name, since, until in (("0SEND_F1", 2, 5), ("0SEND_F0", 5, 6)):
        start[ids[name]], end[ids[name]] = since, until
    view = widget(replace(timeline, start=start, end=end))
    select(view, type="task", task=ids["1F0"])
    with pytest.raises(TimelineError, match=r"0SEND_F[01]\) waited for itself"):
        view.chain()


def test_traits() -> None:
    """The document is sent as bytes, and names in it are texts, whatever they contain."""
    view = widget({"<b>&": TIMELINE}, height=300, title="</script>")
    state = view.get_state()
    assert isinstance(state["document"], bytes)
    assert state["height"] == 300
    assert state["_esm"] == widget_program()
    assert len(view.document) < 5_000
    assert repr(view) == "<TimelineWidget <b>&>"
    data, _ = view._repr_mimebundle_()
    assert set(data) == {"text/plain", "application/vnd.jupyter.widget-view+json"}


def test_show_takes_other_items() -> None:
    view = widget(TIMELINE)
    before = view.document, view.version
    select(view, type="task", task=3)
    view.show({"slow": SLOWER})
    wait_for(lambda: view.version > before[1])
    assert view.document != before[0]
    assert view.selection == {}
    select(view, type="task", task=3)
    assert view.selected_tasks()["end"].item() == SLOWER.end[3]


def test_updates_of_a_fast_loop_are_few_and_end_with_the_last() -> None:
    view = widget(TIMELINE, layout="steps")
    for _ in range(60):
        view.append(TIMELINE)
    view.append(SLOWER, name="last")
    wait_for(lambda: view._sent[1][-1] is SLOWER)
    assert view.version < 10
    assert len(view._content.items) == timeline_widget.KEPT
    assert view.n_left_out == 62 - timeline_widget.KEPT
    names = list(view._content.items)
    assert names[0] == "step 13"
    assert names[-2:] == ["step 61", "last"]


def test_appended_items_need_names_of_their_own() -> None:
    view = widget({"step 2": TIMELINE}, layout="steps")
    with pytest.raises(ArgumentError, match="'step 2'; give another name"):
        view.append(TIMELINE)
    view.append(TIMELINE, "step 3")
    assert list(view._content.items) == ["step 2", "step 3"]


def test_equal_names_get_numbers() -> None:
    view = widget([TIMELINE, TIMELINE, TIMELINE])
    assert list(view._content.items) == ["1f1b", "1f1b (2)", "1f1b (3)"]


def test_refused_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not in the thread of the timer."""
    view = widget(TIMELINE)
    for items in (3, [], [TIMELINE, "1f1b"]):
        with pytest.raises(ArgumentError):
            view.show(items)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="height"):
        widget(TIMELINE, height=10)
    with pytest.raises(ArgumentError, match="did you mean 'steps'"):
        widget(TIMELINE, layout="step")
    monkeypatch.setattr("pipesim.plot.page.save.MAX_TASKS", 10)
    with pytest.raises(CapacityError):
        view.append(TIMELINE)


def test_without_anywidget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "pipesim.plot.widget.timeline_widget")
    with pytest.raises(ArgumentError, match=r"pip install 'pipesim\[widget\]'"):
        widget(TIMELINE)


def test_latest_value() -> None:
    """A put during a call does not wait for it, and the last value is sent."""
    sent: list[int] = []
    may_go_on = threading.Event()

    def send(value: int) -> None:
        if sent:
            may_go_on.wait(20)
        sent.append(value)

    values = LatestValue(send, period=0.01, share=0.5)
    values.put(0)
    for value in range(1, 100):
        values.put(value)  # the timer's call is under way after some of them
        time.sleep(0.001)
    assert sent == [0]
    may_go_on.set()
    wait_for(lambda: sent[-1] == 99)
    assert len(sent) < 5


def test_latest_value_after_an_error() -> None:
    sent: list[int] = []

    def send(value: int) -> None:
        if value < 0:
            raise ValueError(value)
        sent.append(value)

    values = LatestValue(send, period=0.0, share=1.0)
    with pytest.raises(ValueError, match="-1"):
        values.put(-1)
    values.put(1)
    wait_for(lambda: sent == [1])
