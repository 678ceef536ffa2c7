"""`px.workers`: CPU workers between which messages take the time of a link."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from small_pipelines import cut, data, dense, mse
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.ops import Op

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

#: 100 ms a message of 8 x 16 floats, and 50 ms more until it is there.
LINK = ps.Network(latency=0.05, bandwidth=4 * 16 * 8 / 0.1)


def seconds(timeline: ps.Timeline, *ops: Op) -> Any:
    """Return how long the tasks of some operations took."""
    return timeline.duration[timeline.graph.is_op(frozenset(ops))]


def test_messages_take_the_time_of_their_link() -> None:
    """A SEND holds its bytes' time, its RECV ends a latency after them."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), step="none")
    with px.Pipeline(cut(dense(2), [1, 1]), graph, px.workers(2, link=LINK), mse) as pipeline:
        timeline = pipeline.step(*data(16)).timeline
        assert "imposed" in " ".join(pipeline.notes)
    assert (seconds(timeline, Op.SEND_F, Op.SEND_B) >= 0.1).all()
    recvs = timeline.graph.is_op(frozenset({Op.RECV_F, Op.RECV_B}))
    since = timeline.end[recvs] - timeline.start[timeline.graph.pair[recvs]]
    assert (since >= 0.15).all()


@pytest.mark.measures_time
@pytest.mark.parametrize("copies", [True, False])
def test_copy_streams_carry_beside_what_computes(copies: bool) -> None:
    """The second forward of the first partition waits for the copy of the first, or does not."""

    class Nap(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.001)
            return x

    model = px.GPipe(
        nn.Sequential(Nap(), Nap()), [1, 1],
        devices=px.workers(2, link=LINK), chunks=2, copy_streams=copies,
    )  # fmt: skip
    x = torch.rand(16, 16, requires_grad=True)
    model(x).sum().backward()
    timeline = model.timeline()
    task_ids = {str(timeline.graph.task(k)): k for k in range(len(timeline))}
    overlaps = timeline.start[task_ids["0F1"]] < timeline.end[task_ids["0SEND_F0"]]
    assert overlaps == copies


def test_devices_that_were_given_are_not_copied() -> None:
    """A copy of the module has plain workers."""
    model = px.GPipe(nn.Sequential(*dense(2)), [1, 1], devices=px.workers(2, link=LINK), chunks=2)
    x = torch.rand(16, 16)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_shared_links_are_refused() -> None:
    with pytest.raises(ArgumentError, match="each pair of devices a link of its own"):
        px.workers(2, link=ps.Network.preset("dgx_h100"))
    with pytest.raises(ArgumentError, match="n must be"):
        px.workers(0, link=LINK)
