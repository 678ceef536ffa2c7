"""Mistakes with `pipeexec.ShardedEmbedding`: arguments, keys, ranks that disagree or are lost."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, run_to_end

import pipeexec as px
from pipeexec.distributed import Processes
from pipeexec.embedding import peers
from pipesim.errors import ArgumentError, ArgumentTypeError, ExecutionError, PeerError, PipeError


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((0, 4), {}, "n_rows must be at least 1, got 0"),
        (([], 4), {}, "n_rows is empty; give the rows of at least one table"),
        (([3, 2.5], 4), {}, r"n_rows\[1\] must be a whole number, got 2.5"),
        (("9", 4), {}, "n_rows must be a whole number, got '9'"),
        ((3, 0), {}, "dim must be at least 1, got 0"),
        ((3, 4, "world"), {}, "process_group must be a torch.distributed.ProcessGroup, .* got str"),
        ((3, 4), {"combiner": "men"}, "unknown combiner 'men'; did you mean 'mean'"),
        ((3, 4), {"gradients": "max"}, "unknown gradients 'max'"),
        ((3, 4), {"placement": "hashed"}, "unknown placement 'hashed'; did you mean 'hash'"),
        ((3, 4), {"placement": "frequency"}, 'placement="frequency" needs counts'),
        ((3, 4), {"counts": [1, 2, 3]}, 'counts are for placement="frequency", but placement is'),
        ((3, 4), {"placement": "frequency", "counts": [1, 2]}, r"tables of \[2\] rows, but n_rows"),
        ((3, 4), {"unique": 1}, "unique must be True or False, got 1"),
        ((3, 4), {"padding_key": 0.5}, "padding_key must be an int or None, got 0.5"),
        ((3, 4), {"dtype": torch.int8}, "dtype must be a floating-point type, got torch.int8"),
    ],
)
def test_arguments_that_are_refused(arguments: Any, options: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        px.ShardedEmbedding(*arguments, **options)


def test_full_rows_that_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"rows of one length, got shapes \[\(3, 2\), \(3, 4\)\]"
    ):
        px.ShardedEmbedding.from_full([torch.ones(3, 2), torch.ones(3, 4)])
    with pytest.raises(ArgumentError, match=r"shape \(rows, dim\), got \(3,\)"):
        px.ShardedEmbedding.from_full(torch.ones(3))


BAD_KEYS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "beyond": ({}, [[0, 1], [2, 5]], "key 5 at (1, 1) of the keys is no row of table 1, "
               "whose keys are 0 to 4; no key was sent"),
    "negative": ({}, [[-1, 1]], "key -1 at (0, 0) of the keys is no row of table 0"),
    "in a bag": ({"combiner": "sum", "padding_key": -1}, [[[1, -1], [-1, 7]]],
                 "key 7 at (0, 1, 1) of the keys is no row of table 1"),
    "of 33 bits": ({}, [[1 << 32, 0]], f"key {1 << 32} at (0, 0) of the keys is no row of table 0"),
    "floats": ({}, [[0.5, 1.5]], "keys must be a tensor of int32 or int64, got torch.float32"),
    "tables": ({}, [[1, 1, 1]], "shape (..., tables), with 2 tables, got (1, 3)"),
    "no bag": ({"combiner": "sum"}, [1, 1], "shape (..., tables, bag), got (2,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_KEYS)
def test_keys_that_are_refused(name: str) -> None:
    options, keys, text = BAD_KEYS[name]
    module = px.ShardedEmbedding([9, 5], 2, **options)
    with pytest.raises(ArgumentError) as caught:
        module(torch.tensor(keys))
    assert text in str(caught.value)


def message(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)]


def refused(processes: Processes) -> list[list[str]]:
    """Let rank 1 have bad keys; the next exchange works."""
    messages = []
    for options, keys, _ in BAD_KEYS.values():
        module = px.ShardedEmbedding([9, 5], 2, processes, **options)
        good = torch.zeros((3, 2, 1) if options else (3, 2), dtype=torch.int64)
        with pytest.raises(PipeError) as caught:
            module(torch.tensor(keys) if processes.rank == 1 else good)
        messages.append(message(caught.value))
        assert module(good).shape == (3, 2, 2)
    return messages


def test_the_others_learn_who_refused_its_keys(two_ranks: Ranks) -> None:
    remote, own = two_ranks.run(refused)
    text = "rank 1 refused its keys, see the error of that rank; no key was sent"
    assert remote == [["PeerError", text]] * len(BAD_KEYS)
    for (kind, error), (_, _, wanted) in zip(own, BAD_KEYS.values(), strict=True):
        assert kind in ("ArgumentError", "ArgumentTypeError")
        assert wanted in error


def disagree(processes: Processes) -> list[list[str]]:
    """Make modules that do not fit together; return the errors."""
    rank = processes.rank
    pair = processes.group(range(2), key="pair")
    wrong: list[tuple[Any, ...]] = [
        ([9, 5 + rank], 2, None, {}),
        (9, 2 + rank, processes, {}),
        (9, 2, None, {"combiner": ["sum", None, None, None][rank]}),
        (3, 2, None, {"placement": "frequency", "counts": [1, 2 + 2 * (rank == 1), 3]}),
        ((0 if rank == 1 else 9), 2, None, {}),
        (9, 2, pair if rank == 0 else None, {}),  # the last: they have met unequally often then
    ]
    messages = []
    for n_rows, dim, group, options in wrong:
        with pytest.raises(PipeError) as caught:
            px.ShardedEmbedding(n_rows, dim, group, **options)
        messages.append(message(caught.value))
    if rank > 1:
        with pytest.raises(ArgumentError) as outside:
            px.ShardedEmbedding(9, 2, pair)
        messages.append(message(outside.value))
    return messages


def test_processes_that_disagree_are_named(four_ranks: Ranks) -> None:
    messages = four_ranks.run(disagree)
    sizes, lengths, combiners, placements, mistakes, groups = zip(
        *(x[:6] for x in messages), strict=True
    )
    assert all(text.startswith("placement by counts of rank 1 is ") for _, text in placements)
    everywhere = "n_rows of rank 1 is [9, 6], that of rank 0 [9, 5]; give every process the same"
    assert {text for _, text in sizes} == {everywhere}
    assert all(text.startswith("dim of rank 1 is 3, that of rank 0 2") for _, text in lengths)
    assert all(
        text.startswith("combiner of rank 1 is None, that of rank 0 'sum'") for _, text in combiners
    )
    text = "process_group of rank 1 has ranks [0, 1, 2, 3], that of rank 0 [0, 1]"
    assert all(error.startswith(text) for _, error in groups)
    assert mistakes[1] == ["ArgumentError", "n_rows must be at least 1, got 0"]
    assert mistakes[0] == ["PeerError", "rank 1 has no embedding: n_rows must be at least 1, got 0"]
    assert "this process is not in process_group" in messages[2][6][1]
    four_ranks.close()


def alone(processes: Processes) -> str:
    """Let rank 0 wait for one that does not come, and then comes."""
    text = ""
    if processes.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers, "_AGREE_SECONDS", 0.1)
            with pytest.raises(PeerError) as caught:
                px.ShardedEmbedding(9, 2)
        text = str(caught.value)
    processes.barrier()
    return text


def test_a_process_that_does_not_come_is_named(two_ranks: Ranks) -> None:
    assert two_ranks.run(alone)[0] == (
        "rank 0 waited 0.1 s for rank 1, which did not answer; every process of the group [0, 1] "
        "must make the embedding"
    )
    two_ranks.close()  # they have met unequally often


def test_phases_out_of_order() -> None:
    exchange = px.ShardedEmbedding(9, 2).dispatch(torch.tensor([1, 2]))
    exchange.counts()
    with pytest.raises(ExecutionError, match="was asked for vectors, and next comes keys"):
        exchange.vectors()
    exchange.keys()
    exchange.lookup()
    exchange.vectors()
    exchange.gradients(torch.ones(2, 2))
    exchange.gradient()
    with pytest.raises(ExecutionError, match="next comes nothing: it is done"):
        exchange.accumulate()


def test_a_graph_is_gone_back_once() -> None:
    output = px.ShardedEmbedding(9, 2)(torch.tensor([1, 2])).sum()
    output.backward(retain_graph=True)
    with pytest.raises(ExecutionError, match="was asked for gradients"):
        output.backward()


def test_keys_of_another_kind() -> None:
    with pytest.raises(ArgumentTypeError, match="got list"):
        px.ShardedEmbedding(9, 2)([1, 2])
    with pytest.raises(ArgumentError, match="keys are on meta, the rows on cpu"):
        px.ShardedEmbedding(9, 2)(torch.empty(3, dtype=torch.int64, device="meta"))


# A lost process


def lose(phase: str) -> None:
    """Be a rank of three, of which number 1 ends just before a phase."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if phase == "keys":
        dist.init_process_group("gloo")
        group: Any = None
    else:
        group = px.join(20.0)
    module = px.ShardedEmbedding(90, 2, group)
    exchange = module.dispatch(torch.arange(30))
    for name in ("counts", "keys", "lookup", "vectors"):
        if rank == 1 and name == phase:
            os._exit(0)
        try:
            getattr(exchange, name)()
        except ExecutionError as error:
            sys.stdout.write(f"{type(error).__name__} {error}\n")
            sys.stdout.flush()
            time.sleep(1)  # the others notice the loss of rank 1 before that of this process
            os._exit(3)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["keys", "vectors"])
def test_a_lost_process_is_named(phase: str, tmp_path: Path) -> None:
    """In a plain group, and in `Processes`: no hang, and which it was."""
    statuses, logs = run_to_end([[__file__, phase]] * 3, tmp_path)
    assert statuses == [3, 0, 3]
    for log in (logs[0], logs[2]):
        assert f"LostConnection the connection to rank 1 broke: in the exchange of {phase}: " in log


if __name__ == "__main__":
    lose(sys.argv[1])
