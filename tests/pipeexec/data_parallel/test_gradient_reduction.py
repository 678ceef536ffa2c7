"""Sums of gradients over copies and processes: dense, sparse or absent, of any type."""

from __future__ import annotations

import copy
import os
import re
import sys
import time
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from small_pipelines import mse
from stall_trap import stall_trap
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.data_parallel import gradient_reduction
from pipeexec.data_parallel.gradient_reduction import sum_gradients

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64")
#: Shapes with their layouts: plain, channels last, a table of rows, a number.
SHAPES: dict[str, Any] = {"plain": (3, 4), "last": (2, 3, 2, 2), "table": (6, 2), "number": ()}


def _parameter(shape: str, dtype: str) -> nn.Parameter:
    value = torch.zeros(SHAPES[shape], dtype=getattr(torch, dtype))
    return nn.Parameter(value.to(memory_format=torch.channels_last) if shape == "last" else value)


def _gradient(kind: str, parameter: nn.Parameter, seed: int) -> Tensor | None:
    """Return a gradient of small integers, whose sums are exact in every type."""
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        x = torch.randint(-4, 5, shape, generator=generator).to(parameter.dtype)
        return x * (1 - 2j) if x.is_complex() else x

    if kind == "sparse":  # as that of an embedding: rows that may repeat, none in some
        rows = torch.randint(0, len(parameter), (1, seed % 4), generator=generator)
        values = drawn(rows.shape[1], *parameter.shape[1:])
        return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=True)
    if kind == "cells":  # each cell by itself
        return drawn(*parameter.shape).to_sparse()
    if kind == "strided":
        return drawn(*parameter.shape[::-1]).permute(*range(parameter.dim())[::-1])
    return drawn(*parameter.shape)


class _Calls:
    """Counts the calls of torch.distributed's functions."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        for name in ("all_reduce", "all_gather"):
            patch.setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.counts[name] += 1
            return call(*args, **options)

        return counted


def _sum_case(
    processes: Any,
    n: int,
    parameters: list[list[str]],
    kinds: list[list[list[str]]],
    message: int = gradient_reduction.BUCKET_BYTES,
) -> dict[str, int]:
    """Sum gradients of ``kinds`` (process, copy, parameter) over ``n`` of the ranks."""
    group = _group(n)
    if processes.rank >= n:
        return {}
    like = [_parameter(*parameter) for parameter in parameters]
    gradients = {
        (rank, copy, p): _gradient(kinds[rank][copy][p], like[p], rank + 5 * copy + 17 * p)
        for rank, copy, p in product(range(n), range(len(kinds[0])), range(len(like)))
    }
    own = [
        [gradients[processes.rank, copy, p] for p in range(len(like))]
        for copy in range(len(kinds[0]))
    ]
    # Others are needed as they were, to check the sums.
    own = [[None if x is None else x.clone() for x in copy] for copy in own]
    with pytest.MonkeyPatch.context() as patch:
        calls = _Calls(patch)
        patch.setattr(gradient_reduction, "BUCKET_BYTES", message)
        sums = sum_gradients(own, like, group)
    for p, (got, parameter) in enumerate(zip(sums, like, strict=True)):
        _check_sum(
            got, [x for key, x in gradients.items() if key[2] == p and x is not None], parameter
        )
        first = own[0][p]
        if first is not None and not first.is_sparse and first.stride() == parameter.stride():
            assert got is not None
            assert got.data_ptr() == first.data_ptr()  # allocates no memory
    return dict(calls.counts)


_GROUPS: dict[int, dist.ProcessGroup] = {}


def _group(n: int) -> dist.ProcessGroup:
    """Return a group of the first ranks, which is made once."""
    if n not in _GROUPS:
        _GROUPS[n] = dist.new_group(range(n))
    return _GROUPS[n]


def _check_sum(got: Tensor | None, gradients: list[Tensor], parameter: nn.Parameter) -> None:
    if not gradients:
        assert got is None
        return
    assert got is not None
    wanted = torch.stack([x.to_dense() for x in gradients]).sum(0)
    assert got.is_sparse == all(x.is_sparse for x in gradients)
    assert (got.dtype, got.shape) == (parameter.dtype, parameter.shape)
    assert torch.equal(got.to_dense(), wanted)
    if got.is_sparse:
        assert got.is_coalesced()
    else:
        assert got.stride() == parameter.stride()


@st.composite
def _sums(draw: st.DrawFn) -> dict[str, Any]:
    n, n_copies = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    parameters = draw(
        st.lists(st.tuples(st.sampled_from(sorted(SHAPES)), st.sampled_from(DTYPES)), max_size=5)
    )
    kinds = {
        "plain": ["dense", "strided", "none", "sparse"],
        "last": ["dense", "strided", "none"],
        "table": ["sparse", "none", "sparse", "dense", "cells"],
        "number": ["dense", "none"],
    }
    one = st.tuples(*(st.sampled_from(kinds[shape]) for shape, _ in parameters))
    copies = st.lists(one, min_size=n_copies, max_size=n_copies)
    return {"n": n, "parameters": parameters, "message": draw(st.sampled_from([1, 100, 2**20])),
            "kinds": draw(st.lists(copies, min_size=n, max_size=n))}  # fmt: skip


@settings(phases=[Phase.generate])  # to find a smaller case, ranks that fail would start anew
@given(options=_sums())
def test_sums_over_copies_and_processes(four_ranks: Ranks, options: dict[str, Any]) -> None:
    four_ranks.run(_sum_case, **options)


@pytest.mark.parametrize(
    ("parameters", "kinds", "all_reduce", "all_gather"),
    [
        # What there is, then all dense gradients at once.
        (["float32"] * 3, [["dense"] * 3, ["dense", "none", "strided"]], 2, 0),
        # One a type.
        (["float32", "float64", "float32"], [["dense"] * 3] * 2, 3, 0),
        # Numbers of rows, indices, values.
        (["float32"] * 2, [["sparse", "sparse"], ["none", "sparse"]], 1, 3),
        (["float32", "float64"], [["sparse", "sparse"], ["sparse", "none"]], 1, 4),
        (["float32", "float32"], [["sparse", "dense"], ["sparse", "none"]], 2, 3),
        # No process has one.
        (["float32"], [["none"], ["none"]], 1, 0),
    ],
)
def test_takes_few_messages(
    two_ranks: Ranks,
    parameters: list[str],
    kinds: list[list[str]],
    all_reduce: int,
    all_gather: int,
) -> None:
    wanted = {"all_reduce": all_reduce, "all_gather": all_gather}
    for calls in two_ranks.run(
        _sum_case,
        n=2,
        parameters=[["table", dtype] for dtype in parameters],
        kinds=[[of_rank] for of_rank in kinds],
    ):
        assert calls == {name: n for name, n in wanted.items() if n}


def test_many_gradients_go_in_several_messages(two_ranks: Ranks) -> None:
    """Of three of 48 bytes, two in one message of at most 100."""
    kinds = [[["dense"] * 3]] * 2
    calls = two_ranks.run(
        _sum_case, n=2, parameters=[["table", "float32"]] * 3, kinds=kinds, message=100
    )
    assert calls == [{"all_reduce": 3}] * 2


def test_sums_in_one_process_without_a_group() -> None:
    like = [_parameter("table", "float32") for _ in range(4)]
    copies = [
        [
            _gradient(kind, p, seed)
            for seed, (kind, p) in enumerate(zip(kinds, like, strict=True), 1)
        ]
        for kinds in (["dense", "sparse", "none", "sparse"], ["strided", "none", "none", "dense"])
    ]
    for got, gradients, parameter in zip(
        sum_gradients([[None if x is None else x.clone() for x in row] for row in copies], like),
        zip(*copies, strict=True),
        like,
        strict=True,
    ):
        if got is not None and not got.is_sparse:  # one gradient keeps its layout
            got = got.contiguous()
        _check_sum(got, [x for x in gradients if x is not None], parameter)


def _embedding_case(processes: Any) -> None:
    """Run a bidirectional pipeline whose first stage is an embedding, and check its gradients."""
    torch.manual_seed(3)
    stages = [nn.Embedding(50, 16, sparse=True), nn.Linear(16, 16)]
    whole = copy.deepcopy(stages)
    keys, targets = torch.randint(0, 50, (8,)), torch.randn(8, 16)
    graph = ps.lower(ps.schedule("chimera", n_devices=2, n_microbatches=4))
    with px.Pipeline(stages, graph, ["cpu"], mse, processes=processes) as subject:
        with stall_trap():  # it has stalled once, for an unknown reason
            subject.step(keys, targets)
        # Its stage of the first path, and its copy of the other stage.
        own = subject.modules[processes.rank], subject.modules[3 - processes.rank]
    mse(nn.Sequential(*whole)(keys), targets).backward()
    for module, its in zip(own, (whole[processes.rank], whole[1 - processes.rank]), strict=True):
        for p, wanted in zip(module.parameters(), its.parameters(), strict=True):
            assert p.grad is not None
            assert wanted.grad is not None
            assert p.grad.is_sparse == wanted.grad.is_sparse
            torch.testing.assert_close(p.grad.to_dense(), wanted.grad.to_dense())


def _slow_case(processes: Any) -> None:
    """Fail once the trap has begun to write; the end of its block waits for the rest."""
    processes.barrier()
    length = os.fstat(sys.stderr.fileno()).st_size
    with stall_trap(0.2):
        while os.fstat(sys.stderr.fileno()).st_size == length:
            time.sleep(0.05)
    raise ValueError("on purpose")


def test_the_trap_of_the_stall_shows_every_process(two_ranks: Ranks) -> None:
    """Stacks of all threads, the watchdog's too, and the time that the machine was stolen."""
    with pytest.raises(AssertionError) as caught:
        two_ranks.run(_slow_case)
    _, *logs = re.split(r"^rank \d:\n", str(caught.value), flags=re.MULTILINE)
    assert len(logs) == 2
    for log in logs:
        assert re.search(r"stall trap: process \d+ after .*; seconds of all cores: .*steal", log)
        assert "in _slow_case" in log
        assert "watchdog.py" in log


def test_sparse_gradients_of_a_bidirectional_pipeline(two_ranks: Ranks) -> None:
    two_ranks.run(_embedding_case)
