"""Headers of messages: what differs is named, absent gradients are allowed, garbage is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor

from pipeexec.distributed import Processes
from pipeexec.distributed.channels import (
    _DTYPES,
    Channel,
    ChannelRoute,
    Content,
    ExpectedMessage,
    LostConnection,
    Mismatch,
    NcclChannel,
    _tensors,
    check_header,
    header,
    mark_absent,
    present_tensors,
)
from pipeexec.distributed.signatures import Entry, Signature, signature
from pipesim.errors import ExecutionError
from pipesim.ops import Op

CONTENT = Content(3, Op.SEND_B, 2, 1, 5, 0)
SIGNATURE = (Entry((2, 4), torch.float32), Entry((), torch.int64), Entry((0, 3), torch.bfloat16))
counts = st.integers(0, 1 << 40)
entries = st.builds(Entry, st.lists(counts, max_size=4).map(tuple), st.sampled_from(_DTYPES))
contents = st.builds(
    Content,
    counts,
    st.sampled_from([Op.SEND_F, Op.SEND_B]),
    *[counts] * 4,
)


@given(content=contents, tensors=st.lists(entries, max_size=4).map(tuple))
def test_a_header_says_what_it_was_made_of(content: Content, tensors: Signature) -> None:
    words = header(content, tensors).tolist()
    assert Content(*words[2:8]) == content
    assert [(_DTYPES[dtype], tuple(shape)) for dtype, shape in _tensors(words)] == [
        (entry.dtype, entry.shape) for entry in tensors
    ]
    assert present_tensors(words) == [True] * len(tensors)
    check_header(words, words, source=1)


@pytest.mark.parametrize(
    ("op", "tensors"), [(Op.SEND_F, "the output"), (Op.SEND_B, "the input gradient")]
)
def test_a_type_that_cannot_be_sent_is_refused(op: Op, tensors: str) -> None:
    entry = Entry((2,), torch.float8_e5m2)
    with pytest.raises(ExecutionError, match=rf"^{tensors} of stage 2 is float8_e5m2 \[2\], whose"):
        header(CONTENT._replace(op=op), (entry,))


def got(
    content: Content = CONTENT, tensors: Signature = SIGNATURE, values: Any = None
) -> list[int]:
    head = header(content, tensors)
    return (head if values is None else mark_absent(head, tensors, values)).tolist()


@pytest.mark.parametrize(
    ("words", "described"),
    [
        (got(CONTENT._replace(step=4)), "2SEND_B5 of step 4 (float32 [2, 4], int64 [], bfloat16"),
        (got(CONTENT._replace(op=Op.SEND_F)), "2SEND_F5 of step 3 ("),
        (got(CONTENT._replace(stage=1)), "1SEND_B5 of step 3 ("),
        (got(CONTENT._replace(microbatch=6)), "2SEND_B6 of step 3 ("),
        (got(CONTENT._replace(path=1)), "2SEND_B5 of step 3 on path 1 ("),
        (got(tensors=(Entry((4, 2), torch.float32), *SIGNATURE[1:])), "(float32 [4, 2], int64 []"),
        (got(tensors=(Entry((2, 4), torch.int32), *SIGNATURE[1:])), "(int32 [2, 4], int64 [], "),
        (got(tensors=(Entry((8,), torch.float32), *SIGNATURE[1:])), "(float32 [8], int64 [], "),
        (got(tensors=SIGNATURE[:2]), "of step 3 (float32 [2, 4], int64 []);"),
        (got(tensors=()), "2SEND_B5 of step 3 (nothing);"),
    ],
)
def test_whatever_differs_is_named(words: list[int], described: str) -> None:
    with pytest.raises(Mismatch) as caught:
        check_header(words, got(), source=7)
    message = str(caught.value)
    wanted = "2SEND_B5 of step 3 (float32 [2, 4], int64 [], bfloat16 [0, 3])"
    assert message.startswith(f"expected {wanted} from rank 7, got "), message
    assert described in message
    assert "every process must run the same graph" in message


@given(flags=st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_gradients_may_be_absent_but_not_activations(flags: tuple[bool, ...]) -> None:
    values = tuple(
        torch.empty(e.shape, dtype=e.dtype) if is_there else None
        for e, is_there in zip(SIGNATURE, flags, strict=True)
    )
    words = got(values=values)
    assert present_tensors(words) == list(flags)
    check_header(words, got(), source=0)
    forward = CONTENT._replace(op=Op.SEND_F)
    if not all(flags):
        with pytest.raises(Mismatch, match="none"):
            check_header(got(forward, values=values), got(forward), source=0)


@given(
    words=st.lists(
        st.one_of(st.integers(-3, 12), st.integers(-(1 << 63), (1 << 63) - 1)),
        min_size=len(got()), max_size=len(got()),
    ),
    kept=st.integers(0, len(got())),
)  # fmt: skip
def test_garbage_is_refused(words: list[int], kept: int) -> None:
    """Whatever stands in place of a header, or of its end, is an error of ours at most."""
    garbled = got()[:kept] + words[kept:]
    try:
        check_header(garbled, got(), source=0)
    except Mismatch:
        return
    stated = zip(_tensors(garbled), _tensors(got()), strict=True)
    assert all(a == b or a == (-1, b[1]) for a, b in stated)


def test_a_message_of_something_else() -> None:
    with pytest.raises(Mismatch, match=r"from rank 2 is not a pipeexec message .*\[5, 2\]\); run"):
        check_header([5, *got()[1:]], got(), source=2)


def test_a_lost_connection_without_a_reason() -> None:
    assert str(LostConnection(3, RuntimeError())).startswith("the connection to rank 3 broke")


# Over a connection


def tensors() -> list[Tensor | None]:
    """Return a tensor of each type, and some that are odd."""
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return [
        *(torch.arange(6).reshape(2, 3).to(dtype) for dtype in _DTYPES),
        whole.T, whole[:, ::2], whole[0].expand(5, 4), torch.tensor(2.5), whole[:, :0], None,
        torch.full((1 << 16,), 0.5),
    ]  # fmt: skip


def exchange(processes: Processes, waits: bool) -> list[Any]:
    """Send every kind of tensor from rank 0 to rank 1, twice, and one message that differs."""
    values, cpu = tuple(tensors()), torch.device("cpu")
    agreed = signature([torch.zeros(3) if x is None else x for x in values])
    channel = Channel(ChannelRoute(0, 1, 0, 1, Op.SEND_B), 40, processes.group(range(2)))
    message = ExpectedMessage.make(header(CONTENT, agreed), agreed, waits=waits)
    other = message._replace(head=header(CONTENT._replace(microbatch=0), agreed))
    assert message.in_one == (not waits)
    if processes.rank == 0:
        for item in (message, message, other):
            channel.finish(item, channel.post(item, values))
        return []
    received: list[Any] = []
    for _ in range(2):
        got = channel.receive(message, channel.accept(message, cpu))
        received.append([None if value is None else value.clone() for value in got])
        channel.post_next_receive(message, cpu)
    posted = channel._ahead
    assert posted is not None
    try:
        channel.accept(message, cpu)
    except Mismatch as error:
        received.append(str(error))
    for work in posted.works:  # for the next test of these ranks: gloo must not lose receives
        work.wait()
    return received


@pytest.mark.parametrize("waits", [False, True])
def test_tensors_of_every_type_and_layout_arrive(waits: bool, two_ranks: Ranks) -> None:
    """As one piece, and a tensor at a time."""
    _, (first, second, refused) = two_ranks.run(exchange, waits=waits)
    for received in (first, second):
        for value, sent in zip(received, tensors(), strict=True):
            if sent is None:
                assert value is None
            else:
                assert value.dtype == sent.dtype
                assert torch.equal(value, sent)
    assert re.match("expected 2SEND_B5 of step 3 .* from rank 0, got 2SEND_B0 of step 3", refused)


class Slow:
    """A process group whose messages are under way for ever; keeps what they send."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send(self, tensors: list[Tensor], *_: Any) -> Any:
        self.sent += tensors
        return SimpleNamespace(wait=lambda: None)


def test_memory_of_a_message_is_used_again_once_it_is_gone() -> None:
    """And not before: of two messages under way, each has its own."""
    group: Any = Slow()
    agreed = signature([torch.zeros(3)])
    channel = Channel(ChannelRoute(0, 1, 0, 1, Op.SEND_F), 40, group)
    message = ExpectedMessage.make(header(CONTENT, agreed), agreed, waits=False)
    channel.finish(message, channel.post(message, (torch.full((3,), 1.0),)))
    for value in (2.0, 3.0):
        channel.post(message, (torch.full((3,), value),))
    first, second, third = group.sent
    assert second.data_ptr() == first.data_ptr()
    assert third.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("absent", [(), (0,), (1,), (0, 1)])
def test_absent_tensors_are_marked(absent: tuple[int, ...]) -> None:
    """The type's number is -1; shapes stay, and so does the header that is kept."""
    agreed = Entry((2, 3), torch.float32), Entry((), torch.float64)
    head = header(Content(5, Op.SEND_B, 1, 0, 0, 0), agreed)
    before = head.clone()
    values = tuple(None if k in absent else torch.zeros(e.shape) for k, e in enumerate(agreed))
    after = mark_absent(head, agreed, values)
    assert torch.equal(head, before)
    assert [word for word in range(len(head)) if after[word] != head[word]] == [
        (9, 13)[k] for k in absent
    ]
    assert all(after[(9, 13)[k]] == -1 for k in absent)


def through_nccl(processes: Processes) -> list[Any]:
    """Send two messages over a channel for GPUs, with gloo in the place of NCCL."""
    values, cpu = tuple(tensors()), torch.device("cpu")
    agreed = signature([torch.zeros(3) if x is None else x for x in values])
    groups = [processes.group(range(2), key=key) for key in ("all", "pair")]
    channel = NcclChannel(ChannelRoute(0, 1, 0, 1, Op.SEND_B), 41, *groups, cpu)
    message = ExpectedMessage.make(header(CONTENT, agreed), agreed, waits=False)._replace(
        in_one=False
    )
    channel.warm_up(processes.rank)
    received: list[Any] = []
    for number in range(2):
        if processes.rank == 0:
            channel.finish(message, channel.post(message, values))
            continue
        received.append(list(channel.receive(message, channel.accept(message, cpu))))
        if not number:
            channel.post_next_receive(message, cpu)
    return received


def test_a_channel_for_gpus_sends_header_token_and_tensors(two_ranks: Ranks) -> None:
    _, messages = two_ranks.run(through_nccl)
    for received in messages:
        for value, sent in zip(received, tensors(), strict=True):
            assert value is None if sent is None else torch.equal(value, sent)
