"""User mistakes with replicas and sharded embeddings: every process ends, and names the mistake.

Processes that are lost within a collective, or hang there, are among the faults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from process_errors import assert_errors, errors_of
from ranks import Ranks
from sharded_stage import build_pipeline, lowered, share
from small_pipelines import cut, data, dense, mse
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")


def make(
    processes: Processes,
    stages: Any = None,
    n_own: int = 2,
    **lowering: Any,
) -> px.Pipeline:
    """Return two replicas of two stages, all right but for what is given."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2, **lowering)
    stages = list(cut(dense(2), [1, 1])) if stages is None else stages
    return px.Pipeline(stages, graph, ["cpu"] * n_own, mse, processes=processes)


def stage_of_a_replica_missing(processes: Processes) -> None:
    stages = list(cut(dense(2), [1, 1]))
    make(processes, [stages[0], None if processes.rank else stages[1]])


def too_few_devices(processes: Processes) -> None:
    make(processes, n_own=2 - processes.rank)


def other_weights(processes: Processes) -> None:
    stages = list(cut(dense(2), [1, 1]))
    if processes.rank:
        with torch.no_grad():
            stages[1][0][0].bias[3] += 1e-6
    make(processes, stages)


def other_batch_later(processes: Processes) -> None:
    with make(processes) as subject:
        subject.step(*data(8))
        subject.step(*data(8 - 2 * processes.rank))


def too_few_samples(processes: Processes) -> None:
    with make(processes) as subject:
        subject.step(*data(2 - processes.rank))


def batch_of_another_replica(processes: Processes) -> None:
    """Rank 0 has the first stages, rank 1 the last: both are given the batch of all."""
    with make(processes, layout="stage_major") as subject:
        subject.step(*data(8 - processes.rank))


def optimizer_sharded(processes: Processes) -> None:
    make(processes, shard_optimizer=True)


class Raising(nn.Linear):
    """Raises in rank 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() and x.device.type != "meta":
            raise ValueError("on purpose")
        return super().forward(x)


def stage_of_a_replica_raises(processes: Processes) -> None:
    torch.manual_seed(0)
    with make(processes, [nn.Linear(16, 16), Raising(16, 16)]) as subject:
        subject.step(*data(8))


# With an embedding


def no_embedding(processes: Processes) -> None:
    make(processes, sharded=[0])


def embedding_of_one_process(processes: Processes) -> None:
    groups = [processes.group([rank], key="alone") for rank in range(2)]
    stage = px.EmbeddingStage(px.ShardedEmbedding(16, 16, groups[processes.rank]))
    make(processes, [stage, nn.Linear(16, 16)], sharded=[0])


def replicas_of_an_embedding_in_one_process(processes: Processes) -> None:
    stage = px.EmbeddingStage(px.ShardedEmbedding(16, 16, processes))
    modules = [None, nn.Linear(16, 16)] if processes.rank else [stage, None]
    make(processes, modules, sharded=[0], layout="stage_major")


def key_out_of_range(processes: Processes) -> None:
    """In rank 1, in the second step: nothing of its keys is sent."""
    pipeline, _ = build_pipeline(processes, lowered("looped_bfs", 1, 2), None)
    inputs, targets = share(processes, pipeline.graph)
    with pipeline:
        pipeline.step(inputs, targets)
        if processes.rank == 0:
            pipeline.step(inputs, targets)
        inputs[1][3, 1] = 7
        with mock.patch.object(dist, "all_to_all_single") as sent:
            try:
                pipeline.step(inputs, targets)
            finally:
                assert not sent.called


def key_that_a_stage_makes(processes: Processes) -> None:
    """Known when it comes to the embedding."""
    pipeline, _ = build_pipeline(processes, lowered("gpipe", 3, 3), None)
    inputs, targets = share(processes, pipeline.graph)
    if processes.rank:
        inputs[1][3, 0] = -1
    with pipeline:
        pipeline.step(inputs, targets)


_STAGE = "ArgumentError: stage 1 of replica 1 is on device 3 of this process, but its module is"
_KEY = (
    "stage 0, micro-batch 1: key 7 at \\(1, 1\\) of the keys is no row of table 1, whose keys are 0"
)
_MADE = r"Error: rank 1, step 0: 1ALL_TO_ALL1\.counts failed \(device 4, stage 1, micro-batch 1\): "
#: What each rank's error must be.
REFUSED: dict[Callable[[Processes], None], tuple[str, str]] = {
    stage_of_a_replica_missing: (f"PeerError: rank 1 stopped: {_STAGE}", _STAGE),
    too_few_devices: ("ArgumentError: the graph has 4 devices, got 3: .*'rank 1: cpu:0'",
                      "ArgumentError: the graph has 4 devices, got 3: .*'rank 0: cpu:1'"),
    other_weights: ("ArgumentError: stage 1 begins with different weights .*model from one",)
    * 2,
    other_batch_later: (
        "PeerError: rank 1 stopped: ArgumentError: this process gives 6 samples, but 8 were",
        "ArgumentError: this process gives 6 samples, but 8 were agreed on before the first step",
    ),
    too_few_samples: (
        "PeerError: rank 1 stopped: ArgumentError: inputs have 1 samples",
        "ArgumentError: inputs have 1 samples, too few for 2 micro-batches; give a larger batch",
    ),
    batch_of_another_replica: (
        "ArgumentError: inputs of rank 0 have 4 samples of replica 1, inputs of rank 1 3; give eve",
    ) * 2,
    optimizer_sharded: ("(ArgumentError|PeerError: rank 1 stopped: ArgumentError): "
                        "shard_optimizer=True, but the pipeline has no optimizer",
                        "(ArgumentError|PeerError: rank 0 stopped: ArgumentError): "
                        "shard_optimizer=True, but the pipeline has no optimizer"),
    stage_of_a_replica_raises: (
        r"PeerError: rank 1, step 0: 1F0 failed \(device 3, stage 1, micro-batch 0\): Val",
        r"StageError: rank 1, step 0: 1F0 failed \(device 3, stage 1, micro-batch 0\): Val",
    ),
    no_embedding: ("(ArgumentError|PeerError: rank 1.*): the graph was lowered with stage 0 shar",
                   "(ArgumentError|PeerError: rank 0.*): the graph was lowered with stage 0 shar"),
    embedding_of_one_process: (
        r"(ArgumentError|PeerError: .*): the embedding of stage 0 is spread over processes \[[01]\]"
        r", but the replicas of the stage are in processes \[0, 1\]; give the embedding a group",
    ) * 2,
    replicas_of_an_embedding_in_one_process: (
        r"ArgumentError: stage 0 is sharded over 2 replicas, which are in processes \[0, 0\]; give",
        "PeerError: rank 0 stopped: ArgumentError: stage 0 is sharded over 2 replicas",
    ),
    key_out_of_range: (f"PeerError: rank 1 stopped: ArgumentError: {_KEY}",
                       f"ArgumentError: {_KEY} to 6; no key was sent"),
    key_that_a_stage_makes: (f"Peer{_MADE}ArgumentError: key -1 at", f"Stage{_MADE}Arg"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_every_process_says_what_is_wrong_at_once(
    case: Callable[[Processes], None], two_ranks: Ranks
) -> None:
    messages = errors_of(case, two_ranks)
    assert_errors(messages, REFUSED[case])
