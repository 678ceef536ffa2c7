"""A sharded embedding as a stage: the step of one process that has all rows and the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executing import mse
from ranks import Ranks
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

ROWS, DIM, DENSE, RATE, K = (30, 7), 4, 5, 0.5, 2
SIZES = [5, 4]


class Top(nn.Module):
    """Dense features and vectors to one number."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(DENSE, 2 * DIM)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.top(torch.tanh(self.bottom(dense) * vectors.flatten(1)))


def model() -> tuple[list[Tensor], nn.Module]:
    """Return tables and the rest, always the same."""
    torch.manual_seed(0)
    return [torch.randn(rows, DIM) for rows in ROWS], Top()


def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense features, keys (also repeated ones, and rows that nobody asks for), targets."""
    generator = torch.Generator().manual_seed(1)
    keys = [torch.randint(rows // 2, (n,), generator=generator) for rows in ROWS]
    dense = torch.randn(n, DENSE, generator=generator)
    return dense, torch.stack(keys, 1), torch.randn(n, 1, generator=generator)


def unsplit(n_steps: int) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Return losses, tables and other weights after steps of one process."""
    weights, top = model()
    tables = nn.ModuleList(nn.Embedding.from_pretrained(w, freeze=False) for w in weights)
    optimizer = torch.optim.SGD([*tables.parameters(), *top.parameters()], RATE)
    dense, keys, y = batch(sum(SIZES))
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        vectors = torch.stack([t(k) for t, k in zip(tables, keys.unbind(1), strict=True)], 1)
        loss = mse(top(dense, vectors), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [t.weight.detach() for t in tables], [p.detach() for p in top.parameters()]


def lowered(n_replicas: int, n_devices: int, backward: str = "B") -> ps.TaskGraph:
    """Return the graph of both stages on one device, or on one each."""
    if n_devices == 2:
        schedule = ps.schedule("zb_h1" if backward == "I" else "1f1b", 2, K)
    else:
        schedule = ps.schedule("looped_bfs", 1, K, n_chunks=2)
    return ps.lower(schedule, n_replicas=n_replicas, sharded=[0], hosts="per_device")


def _steps(processes: px.Processes, n_devices: int, backward: str) -> dict[str, Any]:
    """Run two steps of two replicas."""
    n_replicas, replica = 2, processes.rank * n_devices // 2 if n_devices == 1 else 0
    n_replicas = 2
    per_rank = n_replicas * n_devices // processes.n_ranks
    replica = processes.rank * per_rank // n_devices
    own = range(
        processes.rank * per_rank % n_devices, (processes.rank * per_rank % n_devices) + per_rank
    )
    weights, top = model()
    holders = sorted({r * n_devices // per_rank for r in range(n_replicas)})
    group = processes.group(holders, key="embedding")
    stages: list[nn.Module | None] = [None, top]
    if 0 in own:
        stages[0] = px.EmbeddingStage(px.ShardedEmbedding.from_full(weights, group))
    if n_devices == 2 and 1 not in own:
        stages[1] = None
    dense, keys, y = (part.split(SIZES)[replica] for part in batch(sum(SIZES)))
    graph = lowered(n_replicas, n_devices, backward)
    pipeline = px.Pipeline(
        stages, graph, ["cpu"] * per_rank, mse, lambda p: torch.optim.SGD(p, RATE),
        processes=processes,
    )  # fmt: skip
    losses = [pipeline.gather(pipeline.step((dense, keys), y)).loss.item() for _ in range(2)]
    result = pipeline.gather(pipeline.step((dense, keys), y))
    found = {"losses": losses, "complete": bool(result.timeline.complete)}
    pipeline.close()
    return found


@pytest.mark.parametrize(("n_devices", "backward"), [(1, "B")])
def test_two_replicas(two_ranks: Ranks, n_devices: int, backward: str) -> None:
    losses, tables, others = unsplit(2)
    for rank in two_ranks.run(_steps, n_devices=n_devices, backward=backward):
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank["complete"]
