"""Shapes of what stages hand on, found without leaving a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_pipelines import assert_same
from torch import Tensor, nn

from pipeexec.distributed.channels import _DTYPES
from pipeexec.distributed.signatures import (
    Entry,
    Signature,
    check_values,
    from_json,
    output_signature,
    signature,
    to_json,
)
from pipesim.errors import ExecutionError

CPU = torch.device("cpu")
GIVEN: Signature = (Entry((4, 8), torch.float32),)


class Replaces(nn.Module):
    """Replaces its buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("n_seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n_seen = self.n_seen + x.shape[0]
        return nn.functional.dropout(self.layer(x), 0.5) + torch.randn(3)


class NeedsData(nn.Module):
    """Looks at its input, and changes its buffer and torch's random numbers in doing so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n_seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.n_seen.add_(1)
        noise = torch.rand_like(x)
        return (x if float(x.sum()) > 1 else noise), (x > 0).long()[:, :2]


class Repeats(nn.Module):
    """Takes integers; what it returns has another type and more dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).bfloat16()


STAGES: dict[str, tuple[Callable[[], nn.Module], Signature, Signature]] = {
    "linear": (lambda: nn.Linear(8, 3), GIVEN, (Entry((4, 3), torch.float32),)),
    "batch norm": (lambda: nn.BatchNorm1d(8), GIVEN, GIVEN),
    "replaced buffer": (Replaces, GIVEN, (Entry((4, 3), torch.float32),)),
    "needs data": (NeedsData, GIVEN, (*GIVEN, Entry((4, 2), torch.int64))),
    "integers": (Repeats, (Entry((2, 3), torch.int64),), (Entry((2, 3, 6), torch.bfloat16),)),
    "in place": (lambda: nn.ReLU(inplace=True), GIVEN, GIVEN),
}


@pytest.mark.parametrize("name", STAGES)
def test_signatures_are_found_without_a_trace(name: str) -> None:
    """Neither parameters, nor gradients, buffers or random numbers change; nothing is fake."""
    make, inputs, expected = STAGES[name]
    stage = make()
    before, random = copy.deepcopy(stage), torch.get_rng_state()
    for _ in range(2):
        assert output_signature(stage, inputs, CPU, 1) == expected
    assert_same([stage], [before])
    assert all(type(x) in (Tensor, nn.Parameter) for x in stage.state_dict(keep_vars=True).values())
    assert torch.equal(torch.get_rng_state(), random)
    values = [torch.ones(e.shape).to(e.dtype) for e in inputs]
    output = stage(*values)
    assert signature(output if isinstance(output, tuple) else (output,)) == expected


def test_a_stage_that_fails_on_zeros() -> None:
    class Fails(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ValueError("no zeros")

    stage = Fails(8)
    before = copy.deepcopy(stage)
    with pytest.raises(
        ExecutionError, match=r"stage 2 failed on zeros of float32 \[4, 8\], .*ValueError: no zeros"
    ):
        output_signature(stage, GIVEN, CPU, 2)
    assert_same([stage], [before])


@pytest.mark.parametrize("output", [None, 3, [torch.zeros(2)], (torch.zeros(2), None)])
def test_a_stage_that_returns_no_tensors(output: Any) -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return output

    with pytest.raises(ExecutionError, match="the output of stage 1 must be a tensor or a tuple"):
        output_signature(Returns(), GIVEN, CPU, 1)


entries = st.builds(
    Entry, st.lists(st.integers(0, 3), max_size=3).map(tuple), st.sampled_from(_DTYPES)
)


@given(expected=st.lists(entries, max_size=4).map(tuple))
def test_signatures_are_written_and_read(expected: Signature) -> None:
    assert from_json(to_json(expected)) == expected
    tensors = [torch.zeros(e.shape, dtype=e.dtype) for e in expected]
    assert signature(tensors) == expected
    check_values(tensors, expected, "it")
    check_values([None] * len(expected), expected, "it")


@given(
    agreed=st.lists(entries, max_size=3).map(tuple), other=st.lists(entries, max_size=3).map(tuple)
)
def test_whatever_differs_from_what_was_agreed_is_refused(
    agreed: Signature, other: Signature
) -> None:
    tensors = [torch.zeros(e.shape, dtype=e.dtype) for e in agreed]
    if agreed == other:
        check_values(tensors, other, "it")
        return
    with pytest.raises(ExecutionError) as caught:
        check_values(tensors, other, "the output of 0SEND_F0")
    message = str(caught.value)
    assert message.startswith(
        f"the output of 0SEND_F0 is {', '.join(map(str, agreed)) or 'nothing'}, but"
    )
    assert f"but {', '.join(map(str, other)) or 'nothing'} was agreed on" in message


def test_autocast_changes_the_type_of_an_output() -> None:
    """Of tensors without data it is not known; see `pipeexec.distributed.signatures`."""
    with torch.autocast("cpu", torch.bfloat16):
        actual = output_signature(nn.Linear(8, 3), GIVEN, CPU, 0)
    assert actual == (Entry((4, 3), torch.bfloat16),)
