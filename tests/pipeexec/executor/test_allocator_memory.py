"""Memory of the allocator, task by task: where samples are put, how they are summed and drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from fake_cuda import named_gpus
from small_pipelines import cut, data, dense, mse, pipeline

import pipesim as ps
from pipeexec.executor.allocator_memory import Allocated, AllocatorSamples, sample_tasks
from pipesim.errors import ArgumentError


def _graph() -> ps.TaskGraph:
    """0F0, its message, 1F0, 1B0, its message, 0B0; then steps that do nothing."""
    return ps.lower(ps.schedule("gpipe", n_devices=2, n_microbatches=1))


def _task(index: int) -> Any:
    class Task(SimpleNamespace):
        def _replace(self, handler: Any) -> Task:
            return Task(id=self.id, handler=handler)

    return Task(id=index, handler=lambda run, task: None)


def _sampled(levels: list[int], graph: ps.TaskGraph, *indices: int) -> AllocatorSamples:
    """Run fake tasks; the allocator reads ``levels`` one by one, the first before all tasks."""
    readings = iter(levels)
    tasks, samples = sample_tasks(
        [_task(i) for i in range(len(graph))], named_gpus(*indices), lambda gpu: next(readings)
    )
    for task in tasks:
        task.handler(None, task)
    return samples


def _measured() -> tuple[ps.TaskGraph, ps.Timeline]:
    graph = _graph()
    return graph, ps.simulate(graph, ps.Costs(forward=1.0, backward=2.0))


def test_taken_at_the_start_and_given_back_at_the_end() -> None:
    """F of both stages take 10 and 20, B give them back; messages take nothing."""
    graph, timeline = _measured()
    names = [str(graph.task(i)) for i in range(len(graph))]
    level, levels = 5, [5]
    for name in names:
        level += {"0F0": 10, "1F0": 20, "1B0": -20, "0B0": -10}.get(name, 0)
        levels.append(level)
    frame = _sampled(levels, graph, 0, 0).at_task_times(timeline).frame
    changed = frame[frame["nbytes"].diff().fillna(1.0) != 0]
    assert changed.to_dict("list") == {
        "gpu": ["cuda:0"] * 5,
        "time": [0.0, 0.0, 1.0, 4.0, 6.0],
        "nbytes": [5.0, 15.0, 35.0, 15.0, 5.0],
    }


def test_blocks_that_streams_may_read_are_counted() -> None:
    """The most at any task, of each GPU; also what was freed within it stays there."""
    graph, timeline = _measured()
    readings = {"cuda:0": iter([5, 9, 70, 8, *[3] * 99]), "cuda:1": iter(range(100))}
    tasks, samples = sample_tasks(
        [_task(i) for i in range(len(graph))],
        named_gpus(0, 1),
        lambda gpu: 1,
        lambda gpu: next(readings[str(gpu)]),
    )
    for task in tasks:
        task.handler(None, task)
    assert samples.at_task_times(timeline).most_active == {"cuda:0": 70, "cuda:1": len(graph)}


def test_each_gpu_by_itself() -> None:
    graph, timeline = _measured()
    levels = [100, 200] + [
        100 + i // 2 if i % 2 == 0 else 200 for i in range(2, 2 + 2 * len(graph))
    ]
    frame = _sampled(levels, graph, 0, 1).at_task_times(timeline).frame
    assert (frame[frame["gpu"] == "cuda:1"]["nbytes"] == 200).all()
    assert frame[frame["gpu"] == "cuda:0"]["nbytes"].iloc[-1] == 100 + len(graph)
    assert list(frame.groupby("gpu")["time"].first()) == [0.0, 0.0]
    assert all(np.diff(rows["time"]).min() >= 0 for _, rows in frame.groupby("gpu"))


def test_drawn_beside_the_prediction() -> None:
    """The predicted line of a GPU is the sum of its devices'."""
    graph, measured = _measured()
    costs = ps.Costs(forward=1.0, backward=2.0, activation_bytes=1000, parameter_bytes=100)
    predicted = ps.simulate(graph, costs)
    allocated = _sampled([0] * (len(graph) + 1), graph, 0, 0).at_task_times(measured)
    assert isinstance(allocated, Allocated)
    ax = allocated.plot(predicted, ax=plt.figure().add_subplot())
    lines = {line.get_gid(): line for line in ax.get_lines()}
    assert set(lines) == {"measured:cuda:0", "predicted:cuda:0"}
    heights = np.asarray(lines["predicted:cuda:0"].get_ydata())
    assert heights.max() / heights[-1] == pytest.approx((2 * 1000 + 400) / 400)
    assert {line.get_linestyle() for line in ax.get_lines()} == {"-", "--"}
    plt.close(ax.figure)


def test_a_prediction_of_other_devices_is_refused() -> None:
    graph, measured = _measured()
    other = ps.simulate(
        ps.lower(ps.schedule("gpipe", n_devices=3, n_microbatches=1)), ps.Costs(1.0, 2.0)
    )
    allocated = _sampled([0] * (len(graph) + 1), graph, 0, 0).at_task_times(measured)
    with pytest.raises(ArgumentError, match="3 devices, the measured step 2"):
        allocated.plot(other)


def test_cpu_workers_have_no_allocator() -> None:
    with (
        pipeline(cut(dense(2), [1, 1]), _graph(), mse) as subject,
        pytest.raises(ArgumentError, match=r"cpu:0 is no GPU.*device_bytes"),
    ):
        subject.allocated(*data(4))
