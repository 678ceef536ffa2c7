"""Calls of layers with experts at which the host of a GPU waits, counted on the stand-in."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from expert_stages import WIDTH, K, batch, build, lowered
from fake_cuda import FakeCuda, FakeGpu
from small_pipelines import mse, sgd
from torch.utils._python_dispatch import TorchDispatchMode

import pipeexec as px

#: Operators whose results have a size that the GPU computes, or that copy a number to the host.
WAITS = {
    "aten::_local_scalar_dense",  # item, float, int, bool
    "aten::_unique2",
    "aten::bincount",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
#: Operators that do so if an index is a mask.
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}


class Waits(TorchDispatchMode):
    """Counts the calls of this thread at which the host would wait.

    Attributes
    ----------
    places
        Number of calls, by operator and by the module that calls it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        has_no_size = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        if name in WAITS or has_no_size or (name in INDEXING and _has_mask(args[1])):
            self.places[name, _caller()] += 1
        return func(*args, **kwargs)


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(x is not None and x.dtype == torch.bool for x in indices)


def _caller() -> str:
    """Return the innermost module of pipeexec that is running."""
    frame = sys._getframe()
    while frame.f_back is not None:
        name: str = frame.f_globals["__name__"]
        if name.startswith("pipeexec."):
            return name
        frame = frame.f_back
    return ""


@contextmanager
def counted_waits(patch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Count waits in this block."""
    waits, tolist = Waits(), torch.Tensor.tolist

    def counted_tolist(tensor: torch.Tensor) -> Any:  # no operator of torch's
        waits.places["tolist", _caller()] += 1
        return tolist(tensor)

    with patch.context() as own, waits:
        own.setattr(torch.Tensor, "tolist", counted_tolist)
        yield waits


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_host_waits_once_a_dispatch(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """Replicas share the wait; combines, gradients and experts need none."""
    FakeCuda().install(monkeypatch)
    graph = lowered(schedule, 1, 1, 2, hosts="one", expert_layers=1)
    gpus = [FakeGpu(k) for k in range(graph.n_devices)]
    with px.Pipeline([build(n_layers=1)], graph, gpus, mse, sgd) as pipeline:
        pipeline.step(*batch(2))
        with counted_waits(monkeypatch) as waits:
            pipeline.step(*batch(2))
    assert waits.places == {
        ("tolist", "pipeexec.experts.stage"): K,
        ("tolist", "pipeexec.executor.step_result"): 1,  # losses, after the step
    }


def test_a_layer_alone_waits_for_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    (layer,) = (m for m in build(n_layers=1) if isinstance(m, px.Experts))
    with counted_waits(monkeypatch) as waits:
        layer(torch.ones(6, WIDTH, dtype=torch.float64)).sum().backward()
    assert waits.places == {("tolist", "pipeexec.experts.layer"): 1}


def test_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.tensor([2, 0, 1])
    with counted_waits(monkeypatch) as waits:
        counts.repeat_interleave(counts, output_size=3)
        assert not waits.places
        counts.repeat_interleave(counts)
        counts.bincount()
        counts.unique()
        counts[counts > 0]
        int(counts[0])
        counts.sum().item()
        counts.tolist()
    assert sum(waits.places.values()) == 7


def test_a_layer_may_compute_in_its_own_way() -> None:
    """A class that changes `compute` does so in a pipeline as alone."""

    class Doubled(px.Experts):
        def compute(self, rows: torch.Tensor, counts: torch.Tensor, own: range) -> torch.Tensor:
            return 2 * super().compute(rows, counts, own)

    torch.manual_seed(0)
    model = torch.nn.Sequential(Doubled(lambda: torch.nn.Linear(4, 4), 4, n_experts=4))
    x, graph = torch.randn(8, 4), lowered("1f1b", 1, 1, 2, expert_layers=1)
    wanted = mse(model(x), x)
    with px.Pipeline([model], graph, ["cpu"] * 2, mse) as pipeline:
        assert pipeline.step(x, x).loss.item() == pytest.approx(wanted.item())
