"""DLRM as two stages: a step of replicas against the unsplit model, sizes, draws and costs."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from places import PUBLISHED
from ranks import Ranks
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as loss_fn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.dlrm import (
    DLRM,
    KAGGLE,
    KAGGLE_ROWS,
    TERABYTE,
    TERABYTE_ROWS,
    DenseStage,
    UnsplitDLRM,
    distinct,
    draw_keys,
    scaled_rows,
)
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

SMALL = DLRM(scaled_rows(KAGGLE_ROWS, 2e-6), 4, (8,), (6,))
#: One operation and one byte a second.
ONE = ps.GPU(flops=1.0, bandwidth=1.0)
RATE, K, SHARES = 0.5, 2, [5, 4]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unsplit() -> UnsplitDLRM:
    """Return the small model, always the same."""
    torch.manual_seed(0)
    return UnsplitDLRM(SMALL)


def _step(processes: Processes) -> dict[str, Any]:
    """Run a step of this rank's replica; return what became of all weights."""
    whole = unsplit()
    embedding = px.ShardedEmbedding.from_full(list(whole.tables), processes)  # type: ignore[arg-type]
    stages = [px.EmbeddingStage(embedding), copy.deepcopy(whole.dense)]
    (numbers, keys), clicks = SMALL.batch(sum(SHARES), generator(1))
    inputs, targets = (
        [part.split(SHARES)[processes.rank] for part in (numbers, keys)],
        clicks.split(SHARES)[processes.rank],
    )
    schedule = ps.schedule("looped_bfs", 1, K, n_chunks=2)
    graph = ps.lower(schedule, n_replicas=2, sharded=[0], hosts="per_device")
    with px.Pipeline(
        stages, graph, ["cpu"], loss_fn, lambda p: torch.optim.SGD(p, RATE), processes=processes
    ) as pipeline:
        result = pipeline.gather(pipeline.step(tuple(inputs), targets))
    output = stages[1](inputs[0], embedding(inputs[1])).detach()  # after the step
    tables, dense = embedding.full_weight(), [p.detach() for p in stages[1].parameters()]
    return {"loss": float(result.loss), "tables": tables, "dense": dense, "output": output}


def test_a_step_of_two_replicas(two_ranks: Ranks) -> None:
    """Loss, then every row and weight after SGD (so every gradient), and outputs with them."""
    whole = unsplit()
    (numbers, keys), clicks = SMALL.batch(sum(SHARES), generator(1))
    optimizer = torch.optim.SGD(whole.parameters(), RATE)
    loss = loss_fn(whole(numbers, keys), clicks)
    loss.backward()
    optimizer.step()
    outputs = whole(numbers, keys).detach().split(SHARES)
    for rank, result in enumerate(two_ranks.run(_step)):
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(result["tables"], [t.weight.detach() for t in whole.tables])
        torch.testing.assert_close(result["dense"], [p.detach() for p in whole.dense.parameters()])
        torch.testing.assert_close(result["output"], outputs[rank])


def test_stages_are_the_unsplit_model() -> None:
    """In one process, without a group: what `stages` returns, under autograd."""
    stages = SMALL.stages()
    whole = UnsplitDLRM(SMALL)
    tables: list[Tensor] = stages[0].embedding.full_weight()
    for table, rows in zip(whole.tables, tables, strict=True):
        table.weight.data.copy_(rows)
    whole.dense.load_state_dict(stages[1].state_dict())
    inputs, _ = SMALL.batch(7, generator())
    output = stages[1](*stages[0](*inputs))
    torch.testing.assert_close(output, whole(*inputs))
    (wanted,) = torch.autograd.grad(whole(*inputs).sum(), [whole.tables[2].weight])
    output.sum().backward()
    start = sum(SMALL.rows[:2])
    gradient = stages[0].embedding.weight.grad[start : start + SMALL.rows[2]]
    torch.testing.assert_close(gradient, wanted)


def test_interaction_by_hand() -> None:
    """The top MLP's input: the bottom MLP's output, then a product of each pair, row by row."""
    torch.manual_seed(0)
    dense = DenseStage(DLRM((9, 9), 2))
    numbers, vectors = torch.randn(1, 13), torch.tensor([[[2.0, 3.0], [5.0, 7.0]]])
    (a, b) = x = dense.bottom(numbers)[0]
    products = [2 * a + 3 * b, 5 * a + 7 * b, torch.tensor(2.0 * 5 + 3 * 7)]
    read = torch.cat([x, torch.stack(products)])
    torch.testing.assert_close(dense(numbers, vectors)[0], dense.top(read))


def test_published_sizes() -> None:
    """Rows and parameters as they are known: 33.8 and 188 million rows, and the top MLP's input."""
    assert (len(KAGGLE_ROWS), sum(KAGGLE_ROWS)) == (26, 33_762_577)
    assert (len(TERABYTE_ROWS), sum(TERABYTE_ROWS)) == (26, 187_767_399)
    assert max(TERABYTE_ROWS) < 40_000_000
    assert (KAGGLE.n_interactions, TERABYTE.n_interactions) == (367, 479)
    with torch.device("meta"):
        dense = UnsplitDLRM(TERABYTE).dense
    widths = [(13, 512), (512, 256), (256, 128)]
    widths += [(479, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    assert sum(p.numel() for p in dense.parameters()) == sum((a + 1) * b for a, b in widths)


def test_scaled() -> None:
    """No table vanishes, and none grows."""
    assert scaled_rows([1000, 10, 3, 5], 0.01) == (10, 4, 3, 4)
    assert scaled_rows([1000, 10, 3, 5], 0.01, least=1) == (10, 1, 1, 1)
    assert KAGGLE.scaled(1) == KAGGLE
    assert KAGGLE.scaled(1e-3).dim == KAGGLE.dim


@pytest.mark.parametrize("skew", [0, 0.7, 1, 1.05, 2])
def test_keys_follow_zipfs_law(skew: float) -> None:
    """Every key is a row, the first is as frequent as the law has it, and as many differ."""
    rows, n = [1, 3, 1000, 100_000], 4000
    keys = draw_keys(rows, n, generator(), skew)
    assert keys.shape == (n, 4)
    assert keys.dtype == torch.int64
    assert (keys >= 0).all()
    assert (keys < torch.tensor(rows)).all()
    assert torch.equal(keys, draw_keys(rows, n, generator(), skew))
    assert not torch.equal(keys, draw_keys(rows, n, generator(1), skew))
    n_distinct = sum(len(column.unique()) for column in keys.unbind(1))
    assert n_distinct == pytest.approx(distinct(rows, n, skew), rel=0.03)
    # Of 3 rows, in the law's continuous form: the integral of x ** -skew from 1 to 2, and to 4.
    power = 1 - skew
    share = 0.5 if skew == 1 else (2**power - 1) / (4**power - 1)
    assert (keys[:, 1] == 0).double().mean().item() == pytest.approx(share, abs=0.03)


def test_costs_by_hand() -> None:
    """One table that every sample looks up evenly, one layer each; rates of 1 say seconds."""
    model, batch = DLRM((1,), 2), 8
    slow = ps.GPU(flops=1e-12, bandwidth=1.0)  # each product is bound by operations
    costs = model.costs(slow, batch, skew=0)
    # bottom 13 x 2, one pair's product (as 2 x 2 of them), top 3 x 1: two operations a multiply-add
    flops = 2 * batch * (13 * 2 + 2 * 2 * 2 + 3)
    assert costs.per_stage("forward", 2)[1] * 1e-12 == pytest.approx(flops, rel=1e-3)
    assert costs.vector_bytes == (2 * 4, 0)  # all samples ask for one row
    assert costs.key_bytes == (4, 0)
    assert costs.parameter_bytes == (2 * 4, 4 * (13 * 2 + 2 + 3 + 1))
    # lookup: row read and written; reordered: it read, 8 written; sorted: 64 bytes a key
    assert costs.per_stage("forward", 2)[0] == 64 * 8 + 2 * 8 + (8 + 8 * 8)
    half = model.costs(ONE, batch, skew=0, dtype=torch.half, n_replicas=4)
    assert half.vector_bytes == (2 * 2, 0)
    assert half.parameter_bytes == costs.parameter_bytes


def test_published_batch_sizes() -> None:
    """Iterations of SOK's benchmark on 8 A100s: of two batch sizes one is fitted, one predicted."""
    path = PUBLISHED / "sok_dlrm.json"
    published = json.loads(path.read_text())["expected"]
    graph = ps.lower(ps.schedule("looped_bfs", 1, 1, n_chunks=2), n_replicas=8, sharded=[0])

    # NVIDIA's data sheet: 156 TFLOP/s in TF32, 2039 GB/s (80 GB), NVLink 300 GB/s each way
    a100 = ps.GPU(flops=156e12, bandwidth=2039e9, launch=5e-6, overhead=2e-6)

    def seconds(batch: int, part: float) -> float:
        network = ps.Network.preset("dgx_a100", efficiency=part)
        costs = TERABYTE.costs(a100.scaled(part), batch // 8, network=network)
        return ps.simulate(graph, costs).makespan

    for rows, part in ((published["8xA100"], 0.295), (published["8xA100_custom_interact"], 0.45)):
        ((fitted_batch, _, fitted, _),) = [row for row in rows if row[:2] == [65536, "FP32"]]
        ((other, _, wanted, _),) = [row for row in rows if row[:2] == [55296, "FP32"]]
        assert seconds(fitted_batch, part) * 1e3 == pytest.approx(fitted, rel=0.01)
        assert seconds(other, part) * 1e3 == pytest.approx(wanted, rel=0.07)


def test_bad_input() -> None:
    """Each says which size is wrong."""
    for bad, text in (
        ({"rows": ()}, "rows is empty"),
        ({"rows": (5, 0)}, r"rows\[1\]"),
        ({"rows": 5}, "rows must be a sequence"),
        ({"dim": 0}, "dim"),
        ({"bottom": (4, 2.5)}, r"bottom\[1\]"),
        ({"n_dense": -1}, "n_dense"),
    ):
        with pytest.raises(ArgumentError, match=text):
            DLRM(**{"rows": (5,), "dim": 2, **bad})
    for factor in (0, -1, 1.5, float("nan"), "x"):
        with pytest.raises(ArgumentError, match="factor"):
            KAGGLE.scaled(factor)  # type: ignore[arg-type]
    for skew in (-1.0, float("inf")):
        with pytest.raises(ArgumentError, match="skew"):
            draw_keys([3], 2, generator(), skew)
    with pytest.raises(ArgumentError, match="n must be"):
        KAGGLE.batch(0, generator())
    with pytest.raises(ArgumentError, match="batch"):
        SMALL.costs(ONE, 0)
