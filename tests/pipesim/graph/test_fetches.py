"""Fetches, UNSHARD and RELOAD, start a number of compute tasks before the task that needs them."""

from __future__ import annotations

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.graph import Tasks
from pipesim.graph.tasks import StreamKind
from pipesim.ops import Action, Op

_STREAMS = {
    Op.OFFLOAD: StreamKind.OFFLOAD,
    Op.RELOAD: StreamKind.RELOAD,
    Op.UNSHARD: StreamKind.UNSHARD,
}


def one_device(actions: str, **options: object) -> ps.TaskGraph:
    """Return the graph of some actions on one device; a ``+`` marks halves that overlap."""
    texts = actions.split()
    parsed = [Action.parse(text.rstrip("+")) for text in texts]
    tasks = Tasks(
        op=np.array([a.op for a in parsed]),
        device=np.zeros(len(parsed), dtype=int),
        stage=np.array([a.stage for a in parsed]),
        microbatch=np.array([-1 if a.microbatch is None else a.microbatch for a in parsed]),
        stream=np.array([_STREAMS.get(a.op, StreamKind.COMPUTE) for a in parsed]),
        overlapped=np.array([text.endswith("+") for text in texts], dtype=int),
        part=np.array([a.part for a in parsed]),
    )
    return ps.TaskGraph.build(tasks, **options)  # type: ignore[arg-type]


def needs(graph: ps.TaskGraph, action: str) -> set[str]:
    """Return the actions that the task of an action needs."""
    (task,) = (k for k in range(len(graph)) if str(graph.task(k)) == action)
    return {str(graph.task(int(needed))) for needed in graph.dependencies[task]}


@pytest.mark.parametrize(("prefetch", "before"), [(0, "0B1"), (1, "0B2"), (2, "0F2"), (5, None)])
def test_a_fetch_waits_for_an_earlier_task(prefetch: int, before: str | None) -> None:
    """RELOAD of micro-batch 0 may run beside as many tasks as ``prefetch`` says."""
    graph = one_device("0F0 0OFFLOAD0 0F1 0F2 0B2 0B1 0RELOAD0 0B0", prefetch=prefetch)
    assert needs(graph, "0RELOAD0") == {"0OFFLOAD0"} | ({before} - {None})
    assert needs(graph, "0B0") == {"0F0", "0RELOAD0"}


def test_parameters_are_gathered_for_a_forward_and_a_backward() -> None:
    graph = one_device(
        "0UNSHARD0.forward 0F0 0RESHARD0.forward 0F1 0UNSHARD0.backward 0B0 0RESHARD0.backward 0B1",
        prefetch=0,
    )
    assert needs(graph, "0UNSHARD0.forward") == set()
    assert needs(graph, "0F0") == {"0UNSHARD0.forward"}
    assert needs(graph, "0RESHARD0.forward") == {"0F0"}
    assert needs(graph, "0UNSHARD0.backward") == {"0F1", "0RESHARD0.forward"}
    assert needs(graph, "0B0") == {"0F0", "0UNSHARD0.backward"}
    assert needs(graph, "0RESHARD0.backward") == {"0B0"}


def test_halves_of_an_overlapped_action_count_as_one() -> None:
    """A fetch for the B does not wait for the F beside it, which starts with the B."""
    graph = one_device("0F0 0OFFLOAD0 0F1 0RELOAD0 0F2+ 0B0+ 0B1 0B2", prefetch=0)
    assert needs(graph, "0RELOAD0") == {"0OFFLOAD0", "0F1"}
    assert needs(graph, "0F2") == {"0F0", "0RELOAD0"}
    ps.verify(graph)
    later = one_device("0F0 0OFFLOAD0 0F2+ 0B2+ 0F1 0RELOAD0 0B0 0B1", prefetch=1)
    assert needs(later, "0RELOAD0") == {"0OFFLOAD0", "0F2", "0B2"}  # both halves have ended


def test_prefetch_is_a_count() -> None:
    with pytest.raises(ArgumentError, match=r"prefetch must be .*at least 0, got -1"):
        one_device("0F0 0B0", prefetch=-1)
