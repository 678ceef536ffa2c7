"""`px.validate` of modules: predicted from calibration steps, run, and compared."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_pipelines import mse, sgd
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.gpipe.skip import pop, skippable, stash
from pipesim.errors import PipeError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")


@skippable(stash=["x"])
class Stash(nn.Module):
    """Stashes its input."""

    def forward(self, x: Tensor) -> Any:
        yield stash("x", x)
        return x.tanh()


@skippable(pop=["x"])
class Pop(nn.Module):
    """Adds what was stashed."""

    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("x"))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), Stash(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Pop()
    )


def batches(n: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    for seed in itertools.count():
        torch.manual_seed(seed)
        yield torch.randn(n, 6), torch.randn(n, 6)


def model(**options: Any) -> px.GPipe:
    return px.GPipe(layers(), [2, 2, 2], devices=["cpu"] * 3, chunks=4, **options)


def test_modules_are_predicted_run_and_compared() -> None:
    """By one set of costs; each trains as the module alone does, calibration left out."""
    models = {
        "plain": model(portals=False, dependencies=False),
        "all": model(threads=False),
    }
    result = px.validate(
        models, loss_fn=mse, batches=batches(), optimizer=sgd, n_steps=3, warm_up=1
    )
    assert list(result.table.index) == ["plain", "all"]
    assert result.rows["plain"].predicted.graph.skips == ((0, 2),)
    assert not result.rows["plain"].predicted.graph.portals
    assert result.costs.skip_sizes == (((0, 2), 48.0),)
    for row in result.rows.values():
        assert row.measured.complete
        assert len(row.makespans) == 3
        assert np.isclose(row.prediction, ps.simulate(row.measured.graph, result.costs).makespan)
    # A step is forward, loss and backward; the first batch warms up.
    whole = layers()
    optimizer = sgd(whole.parameters())
    losses = []
    for x, y in itertools.islice(batches(), 4):
        loss = mse(torch.cat([whole(part) for part in x.chunk(4)]), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    for row in result.rows.values():
        np.testing.assert_allclose(row.losses, losses[1:], rtol=1e-6)
    assert [module.threads for module in models.values()] == [None, False]


def test_memory_is_counted() -> None:
    """Recomputed, a partition holds its inputs and one micro-batch; kept, all of them."""
    models = {
        mode: px.GPipe(
            nn.Sequential(*(x for _ in range(6) for x in (nn.Linear(6, 6), nn.Tanh()))),
            [4, 4, 4], devices=["cpu"] * 3, chunks=4, checkpoint=mode,
        )
        for mode in ("never", "always")
    }  # fmt: skip
    table = px.validate(models, loss_fn=mse, batches=batches(256), n_steps=1, warm_up=1).table
    assert (table["memory_predicted"] > 0).all()
    np.testing.assert_allclose(table["memory_predicted"], table["memory_measured"], rtol=0.2)
    assert table.loc["never", "memory_measured"] > table.loc["always", "memory_measured"]


def test_costs_can_be_given() -> None:
    costs = ps.Costs(forward=1.0, backward=2.0, recompute=1.0, skip_bytes=48)
    result = px.validate(model(), loss_fn=mse, batches=batches(), n_steps=1, warm_up=0, costs=costs)
    assert result.rows["gpipe"].prediction == ps.simulate(model().graph(8), costs).makespan


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ({"a": model(), "b": nn.Linear(1, 1)}, {}, "'b' is no GPipe, got Linear"),
        ({"a": model(), "b": px.GPipe(layers(), [3, 3], chunks=4, devices=["cpu"] * 2)}, {},
         "'b' has balance"),
        ({}, {}, "at least one"),
        (model(), {"graphs": {}}, "its own graph and devices"),
        (model(), {"max_grad_norm": 1.0}, "it takes no max_grad_norm, got 1.0"),
        (model(), {"cuda_graph": True}, "without a CUDA graph"),
        (model(), {"loss_fn": None}, "needs loss_fn"),
        (model(), {"batches": []}, "got 0 batches"),
        (px.GPipe(nn.Sequential(nn.Flatten(), nn.Linear(6, 6)), [1, 1], devices=["cpu"] * 2), {},
         "partition 0 has no parameter that needs a gradient"),
        (model(), {"costs": ps.Costs(1, 2, skip_bytes={(0, 1): 8})}, "the costs do not suit"),
    ],
)  # fmt: skip
def test_mistakes(models: Any, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"loss_fn": mse, "batches": batches(), **options}
    with pytest.raises(PipeError, match=message):
        px.validate(copy.copy(models), **arguments)
