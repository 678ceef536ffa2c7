"""Balance: contiguous blocks of layers that cost about as much."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeexec.gpipe.balance import balance_by_size, balance_by_time, balance_costs
from pipeexec.gpipe.skip import pop, skippable, stash
from pipesim.errors import ArgumentError

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def cut(costs: list[int], ends: tuple[int, ...]) -> list[int]:
    bounds = [0, *ends, len(costs)]
    return [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]


@given(COSTS, st.data())
def test_no_other_split_is_better(costs: list[int], data: st.DataObject) -> None:
    """Against all of them: the costliest block, then the sum of squares."""
    partitions = data.draw(st.integers(1, len(costs)))
    lengths = balance_costs(costs, partitions)
    assert len(lengths) == partitions
    assert sum(lengths) == len(costs)
    assert min(lengths) > 0
    ends = tuple(itertools.accumulate(lengths))[:-1]
    best = min(
        (max(blocks), sum(x * x for x in blocks))
        for other in itertools.combinations(range(1, len(costs)), partitions - 1)
        if (blocks := cut(costs, other))
    )
    blocks = cut(costs, ends)
    assert (max(blocks), sum(x * x for x in blocks)) == best


def test_by_hand() -> None:
    assert balance_costs([1, 1, 1, 1, 4], 2) == [4, 1]
    assert balance_costs([1, 5, 2, 3], 3) == [1, 1, 2]  # [2, 1, 1] differ less, but one has 6
    assert balance_costs([5, 1, 1, 1], 3) == [1, 1, 2] or balance_costs([5, 1, 1, 1], 3) == [
        1,
        2,
        1,
    ]
    assert balance_costs([0, 0, 0], 3) == [1, 1, 1]


class Sleep(nn.Module):
    """Takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Any) -> Any:
        time.sleep(self.seconds)
        return x


def test_by_time() -> None:
    model = nn.Sequential(*(Sleep(ms * 1e-3) for ms in (60, 1, 1, 1, 1, 20)))
    assert balance_by_time(2, model, torch.zeros(1, 1), timeout=0.0, device="cpu") == [1, 5]
    assert balance_by_time(3, model, torch.zeros(1, 1), timeout=0.05, device="cpu") == [1, 4, 1]


def test_by_time_counts_the_backward() -> None:
    class SlowBackward(nn.Module):
        def forward(self, x: Any) -> Any:
            y = x * 1
            y.register_hook(lambda _: time.sleep(20e-3))
            return y

    model = nn.Sequential(SlowBackward(), *(Sleep(2e-3) for _ in range(3)))
    sample = torch.zeros(1, 1, requires_grad=True)
    assert balance_by_time(2, model, sample, timeout=0.0, device="cpu") == [1, 3]


def test_the_module_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    balance_by_time(2, model, torch.randn(8, 4), timeout=0.0, device="cpu")
    balance_by_size(2, model, torch.randn(8, 4), device="cpu")
    assert not model.training
    assert not model[0].training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Wide(nn.Module):
    """Saves as many times its input as it is told."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: Any) -> Any:
        for _ in range(self.n):
            x = x.exp()
        return x


def test_by_size_of_activations() -> None:
    model = nn.Sequential(Wide(1), Wide(2), Wide(3), Wide(4), Wide(5), Wide(6))
    sample = torch.zeros(7, 100, requires_grad=True)
    assert balance_by_size(2, model, sample, device="cpu") == [4, 2]


def test_by_size_of_parameters() -> None:
    """With many micro-batches, parameters count most; with more copies of them, more."""
    model = nn.Sequential(*(nn.Linear(n, n) for n in [8] * 6), Wide(9))
    sample = torch.zeros(64, 8, requires_grad=True)
    assert balance_by_size(2, model, sample, device="cpu", param_scale=0.0) == [6, 1]
    many = balance_by_size(2, model, sample, chunks=64, device="cpu", param_scale=100.0)
    assert many in ([3, 4], [4, 3])


class Sees(nn.Module):
    """Passes its input on, and notes how many samples it has."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __deepcopy__(self, _: Any) -> Any:
        return self  # copies note in the same list

    def forward(self, x: Any) -> Any:
        self.sizes.append(len(x))
        return x * 1


def test_by_size_of_the_first_micro_batch() -> None:
    """Of an uneven batch it is the largest: what fits holds the others too."""
    sizes: list[int] = []
    balance_by_size(1, nn.Sequential(Sees(sizes)), torch.zeros(7, 1), chunks=3, device="cpu")
    assert sizes == [3]


def test_tuples_and_skips() -> None:
    @skippable(stash=["x"])
    class First(nn.Module):
        def forward(self, pair: Any) -> Any:
            yield stash("x", pair[0] * 1)
            return pair[0] * 2, pair[1]

    @skippable(pop=["x"])
    class Last(nn.Module):
        def forward(self, pair: Any) -> Any:
            x = yield pop("x")
            return pair[0] * x

    model = nn.Sequential(First(), nn.Identity(), Last())
    sample = torch.ones(4, 2, requires_grad=True), torch.ones(4, dtype=torch.long)
    assert len(balance_by_time(3, model, sample, timeout=0.0, device="cpu")) == 3
    assert len(balance_by_size(3, model, sample, device="cpu")) == 3


@pytest.mark.parametrize("partitions", [0, -1, 1.5, "2"])
def test_a_wrong_number_of_partitions(partitions: Any) -> None:
    with pytest.raises(ArgumentError, match="partitions must be"):
        balance_costs([1, 2, 3], partitions)


def test_too_few_layers() -> None:
    with pytest.raises(ArgumentError, match="sequence is shorter than intended partitions"):
        balance_by_time(2, nn.Sequential(nn.Identity()), torch.zeros(1), timeout=0, device="cpu")


def test_gradients_that_are_there() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        balance_by_time(2, model, torch.ones(1, 1), device="cpu")
