"""Traces of another framework as timelines: by hand, from simulations, and of a real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import custom_schedules, named_schedules
from tracing import DATA, Event, event, ranges, traced, write

import pipesim as ps
from pipesim.errors import AccuracyWarning, TimelineError, UnknownNameError
from pipesim.ops import COMPUTE, RECVS, SENDS, Op
from pipesim.trace.chrome_import import load
from pipesim.trace.clock_offsets import TOLERATED

#: One micro-batch through two stages, ranges of 10 us, on one clock.
GPIPE_1 = (ranges("0F0 . . 0B0"), ranges(". 1F0 1B0"))


def microseconds(timeline: ps.Timeline) -> dict[str, tuple[float, float]]:
    """Return start and end of each task, by its action."""
    return {
        str(timeline.graph.task(k)): (
            round(timeline.start[k] * 1e6, 3), round(timeline.end[k] * 1e6, 3)
        )
        for k in range(len(timeline))
    }  # fmt: skip


def read(directory: Path, *ranks: list[Event], **options: Any) -> ps.Timeline:
    """Write a trace a rank and import them."""
    return ps.Timeline.from_chrome(write(directory, ranks), **options)


def test_by_hand(tmp_path: Path) -> None:
    """Time begins with the step. What was waited for arrives when it is used."""
    ranks = (
        [event("PP:0F0", 500, 510), event("PP:0B0", 535, 545)],
        [event("PP:1F0", 513, 523), event("PP:1B0", 523, 533)],
    )
    timeline = read(tmp_path, *ranks, output_bytes=64, name="mine")
    assert microseconds(timeline) == {
        "0F0": (0, 10), "0SEND_F0": (10, 10), "1RECV_F0": (10, 13), "1F0": (13, 23),
        "1B0": (23, 33), "1SEND_B0": (33, 33), "0RECV_B0": (33, 35), "0B0": (35, 45),
    }  # fmt: skip
    assert timeline.name == "mine"
    assert timeline.graph.streams == (
        (0, "compute"), (0, "send:1"), (0, "recv:1"), (1, "compute"), (1, "send:0"), (1, "recv:0")
    )  # fmt: skip
    assert set(timeline.nbytes[timeline.graph.is_op(SENDS | RECVS)]) == {64}


def test_what_was_not_waited_for(tmp_path: Path) -> None:
    """A message that comes while its device computes takes as long as those that are waited for."""
    timeline = read(
        tmp_path,
        ranges("0F0 0F1 . . . . 0B0 0B1"),
        [*ranges("1F0", 20, 11), *ranges("1F1 1B0 1B1", 10, 33)],
    )
    times = microseconds(timeline)
    assert times["1RECV_F0"] == (10, 11)
    assert times["0SEND_F1"] == (20, 20)
    assert times["0RECV_B0"] == (53, 60)
    assert times["1RECV_F1"] == (20, 24)  # between the 1 us and the 7 us of the others
    assert times["1F1"] == (33, 43)


def test_gaps_are_charged(tmp_path: Path) -> None:
    """To the task that follows, unless its message left in between."""
    ranks = (
        [*ranges("0F0"), *ranges("0F1", 10, 12), *ranges("0B0 0B1", 10, 70)],
        [event("PP:1F0", 15, 31), event("PP:1F1", 33, 43), *ranges("1B0 1B1", 10, 44)],
    )
    times = microseconds(read(tmp_path, *ranks, gaps="charge"))
    assert times["0F1"] == (10, 22)  # posting a message
    assert times["1F0"] == (15, 31)  # waited
    assert times["1F1"] == (31, 43)  # fetched a message that was there
    assert times["1B0"] == (43, 54)
    assert times["0B0"] == (70, 80)  # waited
    assert times["0B1"] == (80, 90)
    kept = microseconds(read(tmp_path, *ranks))
    assert kept["1F1"] == (33, 43)


def test_recorded_transfers(tmp_path: Path) -> None:
    """A SEND keeps its times; a RECV that was posted early ends when its consumer starts."""
    sent, posted = event("PP:0SEND_F0", 11, 14), event("PP:1RECV_F0", 1, 2)
    ranks = (
        [*ranges("0F0"), sent, event("PP:0B0", 60, 70), event("PP:0RECV_B0", 58, 59)],
        [posted, event("PP:1F0", 20, 30), event("PP:1B0", 30, 40)],
    )
    times = microseconds(read(tmp_path, *ranks))
    assert times["0SEND_F0"] == (11, 14)
    assert times["1RECV_F0"] == (11, 20)
    assert times["1SEND_B0"] == (40, 40)
    assert times["0RECV_B0"] == (58, 60)


def test_kernels_of_the_autograd_thread(tmp_path: Path) -> None:
    """A GPU's task lasts from its first kernel to its last, whichever thread launched them."""
    second = [
        event("PP:1F0", 0, 20),
        event("cudaLaunchKernel", 5, 6, "cuda_runtime", correlation=1),
        event("gemm", 30, 50, "kernel", tid=99, correlation=1),
        event("PP:1B0", 20, 45),
        event("PP:1B0", 55, 56, "gpu_user_annotation", tid=99),
        event("cudaLaunchKernel", 21, 22, "cuda_runtime", correlation=2),
        event("loss", 50, 52, "kernel", tid=99, correlation=2),
        event("cudaLaunchKernel", 25, 26, "cuda_runtime", tid=2, correlation=3),
        event("gemm", 53, 60, "kernel", tid=99, correlation=3),
        event("cudaLaunchKernelExC", 40, 41, "cuda_driver", tid=2, correlation=4),
        event("Memset", 60, 75, "gpu_memset", tid=99, correlation=4),
        event("cudaLaunchKernel", 42, 43, "cuda_runtime", tid=2, correlation=5),
        event("ncclDevKernel_AllReduce", 70, 99, "kernel", tid=98, correlation=5),
        event("cudaLaunchKernel", 60, 61, "cuda_runtime", correlation=6),
        event("of no range", 90, 95, "kernel", tid=99, correlation=6),
        event("PP:1SEND_B0", 46, 50),
        event("cudaLaunchKernel", 47, 48, "cuda_runtime", correlation=7),
        event("ncclDevKernel_SendRecv", 76, 80, "kernel", tid=98, correlation=7),
    ]
    first = [event("PP:0F0", 0, 10), event("PP:0B0", 85, 90)]
    times = microseconds(read(tmp_path, first, second))
    assert times["1F0"] == (30, 50)
    assert times["1B0"] == (50, 75)
    assert times["1SEND_B0"] == (76, 80)
    assert times["0RECV_B0"] == (76, 85)


@pytest.mark.parametrize("kernel", ["ncclDevKernel_Generic", "mscclKernel_Sum", "vendor_copy"])
@pytest.mark.parametrize("runtime", ["cuda_runtime", "hip_runtime", "xpu_runtime"])
def test_kernels_that_communication_launches(tmp_path: Path, kernel: str, runtime: str) -> None:
    """They are no work of the range, whatever their name, and carry out its transfers."""
    first = [
        event("PP:0F0", 0, 40),
        event("launch", 5, 6, runtime, correlation=1),
        event("gemm", 30, 50, "kernel", tid=99, correlation=1),
        event("c10d::send", 20, 30, "cpu_op"),
        event("launch", 25, 26, runtime, correlation=2),
        event(kernel, 52, 90, "kernel", tid=98, correlation=2),
        event("PP:0B0", 200, 210),
    ]
    second = [event("PP:1F0", 95, 105), event("PP:1B0", 105, 115)]
    assert microseconds(read(tmp_path, first, second))["0F0"] == (0, 20)


@pytest.mark.parametrize(
    ("call", "work", "args"),
    [
        ("xpu_runtime", "kernel", {}),
        ("privateuse1_runtime", "kernel", {}),
        ("mtia_runtime", "mtia_ccp_events", {"device": 0, "stream": 3}),
        ("hpu_op", "hpu_kernel", {"device": 0, "stream": 3}),
        ("cpu_op", "vendor_work", {"device": 0, "stream": 3}),
        ("cpu_op", "vendor_work", None),
    ],
)
def test_launches_of_any_back_end(
    tmp_path: Path, call: str, work: str, args: dict[str, Any] | None
) -> None:
    """A call is a launch if work of a device has its correlation; waits of a device are no work."""
    gpu = {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "NPU 0"}}
    kernel = event("gemm", 30, 50, work, tid=99, correlation=1, **(args or {}))
    first = [
        event("PP:0F0", 0, 40),
        event("aten::mm", 5, 6, call, correlation=1),
        event("aten::add", 7, 8, "cpu_op", correlation=0),
        {**kernel, "pid": 0},
        {**event("wait", 20, 60, "cuda_sync", correlation=1, device=0, stream=3), "pid": 0},
        {**event("none", 20, 70, work, correlation=0, device=0, stream=3), "pid": 0},
        event("PP:0B0", 200, 210),
    ]
    second = [event("PP:1F0", 95, 105), event("PP:1B0", 105, 115)]
    rows = [gpu, *first] if args is None else first
    assert microseconds(read(tmp_path, rows, second))["0F0"] == (0, 20)


@pytest.mark.parametrize("summed", ["vendor_sum", "ncclDevKernel_AllReduce"])
@pytest.mark.parametrize("call", ["record_param_comms", "nccl:recv 1<-0", "c10d::recv_"])
def test_kernels_of_unknown_names_that_communicate(tmp_path: Path, call: str, summed: str) -> None:
    """They are no work of the F around their call, and carry out the transfer around their call."""
    first = [
        event("PP:0F0", 0, 40),
        event("launch", 5, 6, "cuda_runtime", correlation=1),
        event("gemm", 30, 50, "kernel", tid=99, correlation=1),
        event(call, 20, 30),
        event("launch", 25, 26, "cuda_runtime", correlation=2),
        event("vendor_copy", 52, 90, "kernel", tid=98, correlation=2),
        event("PP:0SEND_F0", 40, 50),
        event("launch", 41, 42, "cuda_runtime", correlation=3),
        event("vendor_copy", 90, 94, "kernel", tid=98, correlation=3),
        event("PP:0B0", 200, 210),
        event("PP:0REDUCE_GRAD", 210, 220),
        event("launch", 212, 213, "cuda_runtime", correlation=4),
        event(summed, 230, 250, "kernel", tid=98, correlation=4),
    ]
    times = microseconds(
        read(tmp_path, first, [event("PP:1F0", 95, 105), event("PP:1B0", 105, 115)])
    )
    assert times["0F0"] == (0, 20)
    assert times["0SEND_F0"] == (60, 64)
    assert times["0REDUCE_GRAD"] == (200, 220)


def test_waiting_is_no_work(tmp_path: Path) -> None:
    """A call that waits for its message, works, and sends: only the work counts, as in GPipe."""
    second = [
        event("Forward 0", 0, 40),
        event("c10d::recv_", 1, 2, "cpu_op"),
        event("gloo:recv", 2, 15),
        event("aten::mm", 17, 35, "cpu_op"),
        event("c10d::send", 36, 38, "cpu_op"),
        event("Backward 0", 40, 60),
    ]
    first = [event("Forward 0", 0, 10), event("Backward 0", 60, 70)]
    times = microseconds(read(tmp_path, first, second))
    assert times["1F0"] == (15, 36)
    assert times["1B0"] == (40, 60)


def test_a_call_that_only_waits(tmp_path: Path) -> None:
    """Stage 0 does nothing in torch's I: it lasts from its message's arrival."""
    first = [
        event("PP:0F0", 0, 10),
        event("aten::mm", 1, 9, "cpu_op"),
        event("gloo:recv", 10, 41),
        event("PP:0I0", 12, 42),
        event("PP:0W0", 42, 50),
    ]
    times = microseconds(read(tmp_path, first, ranges(". . 1F0 1B0")))
    assert times["0I0"] == (41, 42)


def test_nested_ranges(tmp_path: Path) -> None:
    """Each has what no inner one covers, the same action the inner one alone."""
    second = [
        event("PP:1F0", 10, 20), event("PP:1F0", 12, 18),
        event("PP:1I0", 20, 40), event("PP:1W0", 23, 30),
        event("cudaLaunchKernel", 24, 25, "cuda_runtime", tid=2, correlation=1),
        event("gemm", 50, 60, "kernel", tid=99, correlation=1),
    ]  # fmt: skip
    first = [*GPIPE_1[0][:1], event("PP:0B0", 70, 80), event("PP:0B0", 71, 79)]
    times = microseconds(read(tmp_path, first, second))
    assert times["0B0"] == (71, 79)
    assert times["1F0"] == (12, 18)
    assert times["1I0"] == (30, 40)
    assert times["1W0"] == (50, 60)


@pytest.mark.parametrize("step", [0, 1, -1, -2])
def test_steps(tmp_path: Path, step: int) -> None:
    """Parts of steps at both ends do not count; the default is the last whole one."""
    second = [
        *ranges("1B0 1F1 1B1", 10),
        *ranges("1F0 1B0 1F1 1B1", 11, 100),
        *ranges("1F0 1B0 1F1 1B1", 12, 200),
        *ranges("1F0 1B0", 10, 300),
    ]
    first = [
        *ranges("0B1", 10, 31),
        *ranges("0F0 0F1 0B0 0B1", 11, 89),
        *ranges("0F0 0F1 0B0 0B1", 12, 188),
        *ranges("0F0", 10, 290),
    ]
    paths = write(tmp_path, [first, second])
    with pytest.warns(AccuracyWarning, match="joining the clocks"):
        imported = load(paths, step=step)
    assert imported.n_steps == 2
    length = 11 if step in (0, -2) else 12
    times = microseconds(imported.timeline)
    assert times["1F0"][1] - times["1F0"][0] == length


@pytest.mark.parametrize("packed", [False, True])
def test_names_of_ones_own(tmp_path: Path, packed: bool) -> None:
    """A regular expression; other words; a stage a rank; files of a directory; compressed."""
    ranks = [
        [event("mine/fwd/0", 0, 10), event("mine/bwd/0", 30, 40), event("mine/optimizer/", 40, 41)],
        [event("mine/fwd/0", 10, 20), event("mine/bwd/0", 20, 30)],
    ]
    write(tmp_path, ranks, packed=packed)
    pattern = r"mine/(?P<op>\w+)/(?P<microbatch>\d*)"
    with pytest.raises(TimelineError, match=r"rank0\.json.*, .*rank1\.json.*\) of a run of 3; g"):
        ps.Timeline.from_chrome(tmp_path, pattern=pattern, n_ranks=3)
    (tmp_path / "._rank0.json").write_text("of a system, not of the run")
    times = microseconds(ps.Timeline.from_chrome(tmp_path, pattern=pattern))
    assert times["1F0"] == (10, 20)
    assert times["0STEP"] == (40, 41)


def test_torchs_other_actions(tmp_path: Path) -> None:
    """Gathering of parameters is left out; reductions have a stream of their own."""
    first = [*GPIPE_1[0], event("PP:0UNSHARD", -5, -1), event("PP:0REDUCE_GRAD", 41, 44)]
    timeline = read(tmp_path, first, GPIPE_1[1])
    assert microseconds(timeline)["0REDUCE_GRAD"] == (41, 44)
    assert (0, "collective") in timeline.graph.streams
    assert ps.replay(timeline).makespan == pytest.approx(
        43e-6
    )  # the host's 1 us between is no task's


def test_a_timeline_has_the_name_of_its_file_or_folder(tmp_path: Path) -> None:
    """As in `pipesim view`: of several files, that of their folder."""
    folder = tmp_path / "run-7"
    folder.mkdir()
    paths = []
    for rank, events in enumerate(GPIPE_1):
        paths.append(folder / f"rank{rank}.pt.trace.json")
        paths[-1].write_text(json.dumps(events))
    assert ps.Timeline.from_chrome(folder).name == "run-7"
    assert ps.Timeline.from_chrome(paths).name == "run-7"
    assert ps.Timeline.from_chrome(paths, name="mine").name == "mine"


def test_the_order_of_files_counts_where_they_name_no_rank(tmp_path: Path) -> None:
    paths = []
    for rank, events in enumerate(GPIPE_1):
        paths.append(tmp_path / f"{'ba'[rank]}.json")
        paths[-1].write_text(json.dumps(events))
    assert microseconds(ps.Timeline.from_chrome(paths))["0F0"] == (0, 10)


def timelines(schedule: ps.Schedule, seconds: list[float], latency: float) -> ps.Timeline:
    """Simulate a schedule with some durations."""
    forward, half = seconds[:8], [x / 2 for x in seconds[8:]]
    n = schedule.n_stages
    costs = ps.Costs(
        forward=tuple(forward[s % 8] for s in range(n)),
        backward=tuple(2 * half[s % 8] for s in range(n)),
        input_grad=tuple(half[s % 8] for s in range(n)),
        weight_grad=tuple(half[-s % 8] for s in range(n)),
        network=ps.Network(latency=latency),
    )
    return ps.simulate(ps.lower(schedule, step="none", hosts="per_device"), costs)


durations = st.lists(st.integers(1, 40).map(lambda x: x * 1e-3), min_size=16, max_size=16)
#: Ranges of compute tasks alone do not show that the F of an overlapped action waits for its B's
#: message; test_chrome_overlaps has ranges that do.
any_schedule = st.one_of(named_schedules(4), custom_schedules(only_chains=True)).filter(
    lambda schedule: schedule.placement.n_paths == 1 and schedule.overlapped is None
)


@pytest.mark.slow
@given(any_schedule, durations, st.sampled_from([1e-4, 3e-3]))
def test_a_simulated_run_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    schedule: ps.Schedule,
    seconds: list[float],
    latency: float,
) -> None:
    """Any schedule: the same compute tasks at the same times, in a graph that replays to them."""
    timeline = timelines(schedule, seconds, latency)
    paths = write(tmp_path_factory.mktemp("traces"), traced(timeline))
    back = ps.Timeline.from_chrome(paths)
    ps.verify(back.graph)
    expected, actual = microseconds(timeline), microseconds(back)
    assert expected.keys() == actual.keys()
    computed = back.graph.is_op(COMPUTE)
    for task in np.flatnonzero(computed).tolist():
        name = str(back.graph.task(task))
        assert actual[name] == pytest.approx(expected[name], abs=0.01)
    assert ps.replay(back).makespan == pytest.approx(timeline.makespan, abs=1e-8)
    needs = back.graph.dependencies
    assert (back.start[needs.rows] >= back.end[needs.values] - 1e-12).all()


@given(durations, st.lists(st.integers(-60, 60), min_size=3, max_size=3))
def test_clocks_are_joined(
    tmp_path_factory: pytest.TempPathFactory, seconds: list[float], ahead: list[int]
) -> None:
    """Clocks that are seconds apart end up so that no message is used before it was sent.

    The first and last micro-batch are waited for both ways, so that the bounds are as far apart
    as a message takes there and back.
    """
    latency = 1e-3
    timeline = timelines(ps.schedule("gpipe", 4, 2), seconds, latency)
    shifts = [0.0, *map(float, ahead)]
    imported = load(write(tmp_path_factory.mktemp("traces"), traced(timeline, shifts)))
    assert imported.residual <= TOLERATED
    wrong = np.array(shifts) + imported.offsets
    assert np.abs(np.diff(wrong)).max() <= latency + 1e-6
    assert imported.timeline.makespan == pytest.approx(timeline.makespan, abs=4 * latency)


def test_one_clock_is_left_alone(tmp_path: Path) -> None:
    """Where messages do not contradict it; a base time in nanoseconds belongs to it."""
    schedule = ps.schedule("1f1b", 3, 4)
    timeline = timelines(schedule, [1e-3] * 16, 2e-4)
    traces = traced(timeline, [0.0, -5.0, 7.0])
    paths = []
    for rank, (events, base) in enumerate(zip(traces, (10, 15, 3), strict=True)):
        directory = tmp_path / str(rank)
        directory.mkdir()
        info = {"rank": rank, "world_size": 3}
        paths += write(directory, [events], baseTimeNanoseconds=base * 10**9, distributedInfo=info)
    imported = load(paths)
    assert imported.offsets.tolist() == [0, 0, 0]
    assert imported.residual <= 1e-9
    assert imported.timeline.makespan == pytest.approx(timeline.makespan)


def test_clocks_that_cannot_be_joined(tmp_path: Path) -> None:
    """Each rank uses a message before the other sends it, whatever the offset: by how much."""
    ranks = ranges("0F0 0B0", 100), ranges("1F0 1B0", 100)
    with pytest.warns(AccuracyWarning, match=r"still used 1\.00e-04 s before it was sent"):
        imported = load(write(tmp_path, ranks))
    assert imported.residual == pytest.approx(100e-6)


def test_a_real_run() -> None:
    """Torch's interleaved 1F1B on two ranks: replayed and simulated about as it ran."""
    for step in (0, 1):
        imported = load(DATA, step=step)
        timeline = imported.timeline
        counts = timeline.frame["op"].value_counts().to_dict()
        assert counts == {
            **dict.fromkeys(("F", "B"), 16),
            **dict.fromkeys(("SEND_F", "RECV_F", "SEND_B", "RECV_B"), 12),
            "REDUCE_GRAD": 4,
        }
        assert imported.n_steps == 2
        assert imported.residual == 0
        assert 0.04 < timeline.makespan < 0.08
        replayed = ps.replay(timeline)
        assert -0.15 < ps.Comparison(replayed, timeline).makespan_error <= 0
        simulated = ps.simulate(timeline.graph, ps.Costs.from_timeline(timeline, parameter_bytes=0))
        assert -0.3 < ps.Comparison(simulated, timeline).makespan_error < 0.1
        assert ps.compare({"run": timeline, "replayed": replayed}).shape == (2, 5)


def test_a_real_runs_waits_are_no_work() -> None:
    """Its F ranges begin by waiting for the message; no F lasts much longer than the others."""
    frame = load(DATA).timeline.frame
    forwards = frame[frame["op"] == "F"]
    assert ((forwards["end"] - forwards["start"]) < 3e-3).all()


def test_plots(tmp_path: Path) -> None:
    """An imported timeline draws like any other."""
    assert read(tmp_path, *GPIPE_1).plot().get_title() is not None


Change = Callable[[list[list[Event]]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[0].pop(), r"0B0 is missing on rank 0: the traces have 2 stages and 1 micro"),
        (lambda r: r[1].__setitem__(1, event("PP:1I0", 20, 30)), "1W0 is missing on rank 1"),
        (lambda r: r[1].__setitem__(1, event("PP:1W0", 20, 30)), "1I0 is missing on rank 1"),
        (lambda r: r[1].append(event("PP:3F0", 0, 1)), "2F0 is missing on any rank"),
        (lambda r: r[1].append(event("PP:1B0", 40, 50)), "1B0 is there twice in a step"),
        (lambda r: r[1].append(event("PP:1FF0", 40, 50)), "'PP:1FF0' names no operation: 'FF'"),
        (lambda r: r[1].append(event("PP:1B", 40, 50)), "'PP:1B' names no micro-batch"),
        (lambda r: r[0].append(event("PP:(0F1;0W0)OVERLAP_F_B", 4, 5)), "overlaps F with W; write"),
        (lambda r: r[1].append(event("PP:0F0", 40, 50)), "0F0 is on ranks 0 and 1"),
        (lambda r: r[1].append(event("PP:0W7", 40, 50)), "stage 0 is on ranks 0 and 1"),
        (lambda r: r[0][0].update(dur=-1), r"duration of event 0, 'PP:0F0', must be .* got -1"),
        (lambda r: r[0][0].update(dur=float("nan")), "duration of event 0, .* got nan"),
        (lambda r: r[0][1].update(ts=float("inf")), "time of event 1, .* got inf"),
        (lambda r: r[0][1].pop("ts"), "time of event 1, 'PP:0B0', must be .* got None"),
        (lambda r: r[0][1].update(ts="soon"), "time of event 1, .* got 'soon'"),
        (
            lambda r: r[1].__setitem__(slice(None), [event("step", 0, 1), event("data", 1, 2)]),
            "has no range that names the action of a stage: its ranges are 'step', 'data'. Each",
        ),
        (lambda r: r[1].clear(), "it has no ranges, operations or kernels. Each forward"),
        (lambda r: r.pop(), r"got the traces of 1 ranks \(.*rank0.json\) of a run of 2; give"),
    ],
)
def test_bad_traces(tmp_path: Path, change: Change, message: str) -> None:
    """Each names the file, or the action and its rank, and says what to do."""
    ranks = [[dict(e) for e in events] for events in GPIPE_1]
    change(ranks)
    info = {"world_size": 2}
    paths = write(tmp_path, ranks)
    for rank, path in enumerate(paths):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "distributedInfo": {"rank": rank, **info}}))
    with pytest.raises(TimelineError, match=message):
        ps.Timeline.from_chrome(paths)


@pytest.mark.parametrize("names", [["step"], [f"layer {k}" * 30 for k in range(99)], []])
def test_a_trace_without_ranges_says_so_in_words(tmp_path: Path, names: list[str]) -> None:
    """The message begins with what was found, goes on with what is needed, and has no pattern."""
    events = [event(name, k, k + 1) for k, name in enumerate(names)]
    operation = [event("aten::mm", 0, 1, "cpu_op")]
    with pytest.raises(TimelineError) as caught:
        read(tmp_path, [*events, *operation])
    text = str(caught.value).removeprefix(str(tmp_path / "rank0.json"))
    content = f"its ranges are '{names[0]:.50}"[:40] if names else "no ranges, but 1 operations"
    assert content in text[:120]
    assert "'PP:0F0'" in text
    assert "(?P" not in text
    assert len(text) < 800


def begin_and_end(events: list[Event]) -> list[Event]:
    """Return complete events as begin and end events, in order of their times."""
    marks = []
    for k, item in enumerate(events):
        base = {key: value for key, value in item.items() if key not in ("ph", "dur", "ts")}
        start, end = item["ts"], item["ts"] + item["dur"]
        marks.append(((start, 1, k, 0), {**base, "ph": "B", "ts": start}))
        after = (1, k, 1) if end == start else (0, -k, 0)  # inner ranges end first
        marks.append(((end, *after), {**base, "ph": "E", "ts": end}))
    return [mark for _, mark in sorted(marks, key=lambda x: x[0])]


@pytest.mark.parametrize("form", ["sorted", "begins first", "unnamed ends", "asynchronous"])
def test_begin_and_end_events_are_ranges(tmp_path: Path, form: str) -> None:
    """They give the timeline of complete events, in any order of rows, and nest by thread."""
    step = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), ps.Costs(forward=1e-3, backward=2e-3))
    outer = [event("step", -1e3, 99e3)]
    complete = [[*outer, *rows] for rows in traced(step)]
    events = [begin_and_end(rows) for rows in complete]
    if form == "begins first":
        events = [sorted(rows, key=lambda x: x["ph"]) for rows in events]
    if form == "unnamed ends":
        events = [[{k: v for k, v in x.items() if x["ph"] == "B" or k in ("ph", "pid", "tid", "ts")}
                   for x in rows] for rows in events]  # fmt: skip
    if form == "asynchronous":
        events = [[{**x, "ph": x["ph"].lower(), "id": x["name"]} for x in rows] for rows in events]
    (tmp_path / "x").mkdir()
    (tmp_path / "be").mkdir()
    expected = read(tmp_path / "x", *complete)
    actual = read(tmp_path / "be", *events)
    assert microseconds(actual) == microseconds(expected)
    assert actual.makespan == pytest.approx(step.makespan)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([("B", "PP:0F0", 3.5)], r"event 0 begins range 'PP:0F0' at 3\.5 us, and no event ends"),
        ([("E", "PP:0F0", 4)], "event 0 ends range 'PP:0F0' at 4 us, where no range is open"),
        ([("E", None, 4)], "event 0 ends a range at 4 us, where no range is open"),
        (
            [("B", "PP:0F0", 1), ("B", "x", 2), ("E", "PP:0F0", 3), ("E", "x", 4)],
            "event 2 ends range 'PP:0F0' at 3 us, where range 'x' at 2 us is open",
        ),
        ([("B", "PP:0F0", "now"), ("E", "PP:0F0", 3)], "the time of event 0, .* got 'now'"),
        ([("B", "PP:0F0", 1), ("E", "PP:0F0", None)], "the time of event 1, .* got None"),
    ],
)
def test_begin_and_end_events_that_make_no_pair(
    tmp_path: Path, events: list[tuple[str, str | None, Any]], message: str
) -> None:
    """Each is named, with its time."""
    rows = [{"ph": ph, "name": name, "ts": ts, "pid": 1, "tid": 1} for ph, name, ts in events]
    with pytest.raises(TimelineError, match=message):
        read(tmp_path, rows)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", r"pattern '\(' is no regular expression: .*; write such as"),
        (3, "pattern 3 is no regular expression"),
        (r"PP:(?P<stage>\d+)(?P<microbatch>\d+)", "has no group 'op'; it needs"),
        (r"PP:(?P<op>\d+)F", "has no group 'microbatch'"),
        (r"PP:(?P<stage>\d+)(?P<op>F)(?P<microbatch>.*)|x", "1B0 is missing|0B0 is missing"),
        (r"(?P<op>P)P:(?P<microbatch>\d+).*", "'PP:0F0' names no operation: 'P'"),
        (r"PP:(?P<stage>..)(?P<microbatch>\d)(?P<op>)", "names no operation: ''"),
        (r"PP:(?P<microbatch>\d(?P<op>[FB]))\d", "which are no whole numbers"),
        (r"nothing (?P<op>F)(?P<microbatch>\d)", "has no range that matches the pattern 'nothing"),
    ],
)
def test_bad_patterns(tmp_path: Path, pattern: Any, message: str) -> None:
    """Before any file is read, where that is known."""
    with pytest.raises(TimelineError, match=message):
        read(tmp_path, *GPIPE_1, pattern=pattern)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 1}, "there is no step 1: .* has 1 whole steps"),
        ({"step": -2}, "there is no step -2"),
        ({"n_ranks": 0}, "got the traces of 2 ranks .* of a run of 0"),
        ({"n_ranks": 3}, "got the traces of 2 ranks .* of a run of 3"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TimelineError, match=message):
        read(tmp_path, *GPIPE_1, **options)


def test_bad_gaps(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown way with gaps 'drop'"):
        read(tmp_path, *GPIPE_1, gaps="drop")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-40], r"rank0\.json: it was cut, at character \d+ of \d+"),
        (lambda data: b"hello", "it is no JSON there, at character 0 of 5"),
        (lambda data: data.replace(b":", b";", 1), "it is no JSON there, at character 14"),
        (lambda data: b"", "at character 0 of 0"),
        (lambda data: b"\x1f\x8b\x08" + data, "cannot read a trace"),
        (lambda data: b"\xff\xfe" + data, "cannot read a trace"),
        (lambda data: b"3", "is no Chrome trace: it has no list 'traceEvents'"),
        (lambda data: b'{"traceEvents": 3}', "is no Chrome trace"),
        (lambda data: b"[" * 100_000, "cannot read a trace"),
    ],
)
def test_bad_files(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    """Cut, of another kind, or damaged: the file is named, and where."""
    paths = write(tmp_path, GPIPE_1)
    paths[0].write_bytes(damage(paths[0].read_bytes()))
    with pytest.raises(TimelineError, match=message):
        ps.Timeline.from_chrome(paths)


@pytest.mark.parametrize("end", ["", ",", ",\n", "]", ",]", " ,\n ]\n"])
def test_arrays_that_writers_left_open(tmp_path: Path, end: str) -> None:
    """The format lets an array lack its bracket, so that a program that crashes leaves a trace."""
    for rank, events in enumerate(GPIPE_1):
        rows = ",\n".join(map(json.dumps, events))
        (tmp_path / f"rank{rank}.json").write_text(f"[{rows}{end}")
    assert microseconds(ps.Timeline.from_chrome(tmp_path))["1B0"] == (20, 30)


@pytest.mark.parametrize(
    "text",
    [
        '[{"ph": "X", "name": "a"}, {"ph": "X", "na',
        '[{"ph": "X", "name": "a"}, {"ph": "X", "args": {"sizes": [1]',
        '[{"ph": "X", "name": "a"}, {"ph": "X", "args": {"mb": 1}',
        '[{"ph": "X", "name": "a"} {"ph": "X"}',
        '[{"ph": "X", "name": "a"},,',
        '{"traceEvents": [{"ph": "X", "name": "a"},',
        '{"traceEvents": [{"ph": "X", "name": "a"}]',
    ],
)
def test_files_that_were_cut(tmp_path: Path, text: str) -> None:
    """Within an event, or within an object, which needs its end."""
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(TimelineError, match=r"x\.json: .*, at character \d+ of \d+ \(.*; export"):
        ps.Timeline.from_chrome(tmp_path / "x.json")


def test_a_cut_compressed_file(tmp_path: Path) -> None:
    paths = write(tmp_path, GPIPE_1, packed=True)
    paths[1].write_bytes(paths[1].read_bytes()[:-20])
    with pytest.raises(TimelineError, match=r"cannot read a trace from .*rank1\.json\.gz"):
        ps.Timeline.from_chrome(paths)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match="there is no trace in"):
        ps.Timeline.from_chrome(tmp_path)
    with pytest.raises(TimelineError, match=r"cannot read a trace from .*x\.json"):
        ps.Timeline.from_chrome(tmp_path / "x.json")
    with pytest.raises(TimelineError, match="got no traces"):
        ps.Timeline.from_chrome([])


def test_a_rank_twice(tmp_path: Path) -> None:
    paths = write(tmp_path, GPIPE_1)
    with pytest.raises(TimelineError, match="are both of rank 0"):
        ps.Timeline.from_chrome([paths[0], paths[0]])


def test_a_rank_without_a_stage(tmp_path: Path) -> None:
    """Such as one that only loads data: its trace is no part of the pipeline."""
    idle = [event("PP:9REDUCE_GRAD", 0, 1)]
    with pytest.raises(TimelineError):
        read(tmp_path, *GPIPE_1, idle)


def test_orders_that_cannot_run(tmp_path: Path) -> None:
    """A backward before its forward on one clock."""
    with pytest.raises(TimelineError, match="0B0 begins before the F that it needs"):
        read(tmp_path, ranges("0B0 0F0"), ranges("1F0 1B0"))


def test_every_op_has_a_word() -> None:
    """A new operation can be imported at once."""
    from pipesim.trace.range_names import WORDS

    assert set(WORDS.values()) == set(Op)
