"""Actions and their text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import actions

from pipesim.errors import ArgumentError
from pipesim.ops import COMPUTE, COPIES, RECVS, SCHEDULED, SENDS, TRANSFERS, Action, Op


@given(actions())
def test_text_form_parses_back(action: Action) -> None:
    """`str` and `parse` are inverse for every operation, with and without a micro-batch."""
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Op.F, 0)),
        ("0I12", Action(0, Op.I, 12)),
        ("10W3", Action(10, Op.W, 3)),
        ("1SEND_F3", Action(1, Op.SEND_F, 3)),
        ("1RECV_B3", Action(1, Op.RECV_B, 3)),
        ("0REDUCE_GRAD", Action(0, Op.REDUCE_GRAD)),
        ("3STEP", Action(3, Op.STEP)),
        ("1REDUCE_GRAD.0", Action(1, Op.REDUCE_GRAD, part=0)),
        ("2REDUCE_GRAD.1", Action(2, Op.REDUCE_GRAD, part=1)),
        ("0REDUCE_TIED.3", Action(0, Op.REDUCE_TIED, part=3)),
        ("1GRAD_NORM", Action(1, Op.GRAD_NORM)),
        ("2REDUCE_GRAD7.10", Action(2, Op.REDUCE_GRAD, 7, part=10)),
        ("0ALL_TO_ALL3.counts", Action(0, Op.ALL_TO_ALL, 3, part=0)),
        ("0ALL_TO_ALL3.gradients", Action(0, Op.ALL_TO_ALL, 3, part=3)),
        ("0ALL_TO_ALL.accumulated", Action(0, Op.ALL_TO_ALL, part=4)),
        ("0DISPATCH3", Action(0, Op.DISPATCH, 3)),
        ("0REORDER3.vectors", Action(0, Op.REORDER, 3, part=2)),
        ("0REORDER3.gradients", Action(0, Op.REORDER, 3, part=3)),
        ("0UNSHARD", Action(0, Op.UNSHARD)),
        ("0UNSHARD3.forward", Action(0, Op.UNSHARD, 3, part=0)),
        ("0RESHARD3.backward", Action(0, Op.RESHARD, 3, part=1)),
        ("1OFFLOAD2", Action(1, Op.OFFLOAD, 2)),
        ("1RELOAD2", Action(1, Op.RELOAD, 2)),
    ],
)
def test_text_form_is_torchs(text: str, action: Action) -> None:
    """Stage, operation, micro-batch, as torch.distributed.pipelining writes them."""
    assert str(action) == text
    assert Action.parse(f" {text} ") == action


def test_every_op_is_in_one_set() -> None:
    """A new operation says what it occupies: compute, a transfer, a copy, a collective."""
    collectives = {Op.REDUCE_GRAD, Op.ALL_TO_ALL, Op.UNSHARD, Op.REDUCE_TIED, Op.GRAD_NORM}
    assert set(Op) == COMPUTE | TRANSFERS | COPIES | collectives
    assert sum(map(len, (COMPUTE, SENDS, RECVS, COPIES, collectives))) == len(Op)
    assert SCHEDULED < COMPUTE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2f0",
        "2W0.5",
        "0ALL_TO_ALL0.words",
        "0REORDER0.keys",
        "0UNSHARD0.keys",
        "-1F0",
        "2F-1",
        "2F0 1B0",
        None,
        3,
    ],
)
def test_text_that_is_no_action(text: object) -> None:
    """The text is shown, and an example of what is allowed."""
    with pytest.raises(ArgumentError, match=r"is not an action; .*'2F0'") as caught:
        Action.parse(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)


def test_unknown_operation_gets_a_suggestion() -> None:
    """The nearest operation is named, and all of them."""
    with pytest.raises(ArgumentError, match=r"'1SEND_G3'.*did you mean 'SEND_[FB]'.*known: F, B"):
        Action.parse("1SEND_G3")
