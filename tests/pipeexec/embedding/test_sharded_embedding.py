"""`pipeexec.ShardedEmbedding` against `nn.Embedding` and `nn.EmbeddingBag` of one process."""

from __future__ import annotations

import copy
import io
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks, run_to_end
from torch import Tensor, nn
from torch.nn import functional

import pipeexec as px
from pipeexec.embedding import peers
from pipeexec.embedding.row_layout import Layout
from pipesim import Keys
from pipesim.costs.row_placement import PLACEMENTS, row_owners
from pipesim.errors import ArgumentError, ArgumentTypeError, ExecutionError, PeerError, PipeError

DIM = 3
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda x: torch.optim.SGD(x, lr=0.1, momentum=0.9),
    "adam": lambda x: torch.optim.Adam(x, lr=0.1),
    "sparse_adam": lambda x: torch.optim.SparseAdam(list(x), lr=0.1),
}


def rows_of(n_rows: Sequence[int]) -> list[Tensor]:
    """Return tables of full rows, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(n, DIM, generator=generator, dtype=torch.float64) for n in n_rows]


def factors(shape: Sequence[int]) -> Tensor:
    """Return the gradient of an output, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


# Against the modules of torch


def learn(processes: px.Processes, n: int, case: dict[str, Any]) -> dict[str, Any] | None:
    """Learn from this rank's keys; return what that gives."""
    group = processes.group(range(n), key="learn")
    if processes.rank >= n:
        return None
    full = rows_of(case["n_rows"])
    module = px.ShardedEmbedding.from_full(
        full if case["several"] else full[0], group, **case["options"]
    )
    keys = case["keys"][processes.rank]
    begin = sum(len(x) for x in case["keys"][: processes.rank])
    whole = factors([sum(map(len, case["keys"])), *case["item"], DIM])
    factor = whole[begin : begin + len(keys)]
    optimizer = OPTIMIZERS[case["optimizer"]](module.parameters())
    run = by_phase if case["by_phase"] else by_autograd
    output = run(module, keys, factor)
    gradient = module.weight.grad
    assert gradient is not None
    gradient = gradient.to_dense() if gradient.is_sparse else gradient.clone()
    optimizer.step()
    after: Any = module.full_weight()
    module.weight.data.copy_(gradient)
    full_gradient: Any = module.full_weight()
    found = {"output": output, "gradient": gradient, "weight": after, "full": full_gradient}
    if not case["several"]:
        found |= {"weight": [after], "full": [full_gradient]}
    return found


def by_autograd(module: px.ShardedEmbedding, keys: Tensor, factor: Tensor) -> Tensor:
    output: Tensor = module(keys)
    (output * factor).sum().backward()
    return output.detach()


def by_phase(module: px.ShardedEmbedding, keys: Tensor, factor: Tensor) -> Tensor:
    """Run two micro-batches, both under way at once."""
    exchanges = [module.dispatch(part) for part in (keys[::2], keys[1::2])]
    for phase in ("counts", "keys", "lookup"):
        for exchange in exchanges:
            getattr(exchange, phase)()
    output = torch.empty_like(factor)
    for start, exchange in enumerate(exchanges):
        output[start::2] = exchange.vectors()
    for start, exchange in enumerate(exchanges):
        exchange.gradients(factor[start::2])
    for exchange in exchanges:
        exchange.accumulate()
    return output


def reference(n: int, case: dict[str, Any]) -> dict[str, Any]:
    """Return what one process gives with all keys; a padding key is a row of zeros beyond."""
    keys, options = torch.cat(case["keys"]).long(), case["options"]
    combiner, padding = options["combiner"], options["padding_key"]
    modules: list[nn.Module] = []
    for table in rows_of(case["n_rows"]):
        weight = torch.cat([table, torch.zeros(1, DIM, dtype=torch.float64)])
        sparse = options["sparse"]
        if combiner is None:
            made: Any = nn.Embedding.from_pretrained(weight, False, len(table), sparse=sparse)
        else:
            made = nn.EmbeddingBag.from_pretrained(
                weight, False, mode=combiner, sparse=sparse, padding_idx=len(table)
            )
        modules.append(made)
    optimizer = OPTIMIZERS[case["optimizer"]](nn.ModuleList(modules).parameters())
    outputs = []
    for table, module in enumerate(modules):
        own = keys[:, table] if case["several"] else keys
        own = torch.where(own == padding, case["n_rows"][table], own) if padding else own
        outputs.append(flat(module, own))
    output = torch.stack(outputs, 1) if case["several"] else outputs[0]
    scale = 1 / n if options["gradients"] == "mean" else 1
    (output * factors(output.shape) * scale).sum().backward()
    weights: list[Any] = [module.weight for module in modules]
    gradients = [w.grad.to_dense()[:-1] if w.grad.is_sparse else w.grad[:-1] for w in weights]
    optimizer.step()
    return {
        "output": output.detach(),
        "gradient": gradients,
        "weight": [w.detach()[:-1] for w in weights],
    }


def flat(module: Any, keys: Tensor) -> Tensor:
    """Return the vectors of keys in more dimensions than `nn.EmbeddingBag` takes, or of none."""
    if isinstance(module, nn.Embedding):
        return module(keys)
    bags = keys.reshape(keys.shape[:-1].numel(), keys.shape[-1])
    # One more key a bag, and one more bag, of padding.
    bags = functional.pad(bags, (0, 1, 0, 1), value=module.padding_idx)
    return module(bags)[:-1].view(*keys.shape[:-1], DIM)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """Return a number of ranks, and what they are to learn from."""
    n = draw(st.integers(1, 4))
    several = draw(st.booleans())
    n_rows = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3 if several else 1))
    combiner = draw(st.sampled_from([None, "sum", "mean"]))
    padding = draw(st.sampled_from([None, -1, 99]))
    item = [len(n_rows)] if several else draw(st.sampled_from([[], [2]]))
    shape = [*item, draw(st.integers(0, 4))] if combiner else item
    sizes = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    step = draw(st.sampled_from([1, n]))  # n: all on one owner
    keys = []
    for size in sizes:
        places = itertools.product(range(size), *map(range, shape))
        tables = [place[1] if several else 0 for place in places]
        rows = [draw(_key(n_rows[table], step, padding)) for table in tables]
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        keys.append(torch.tensor(rows, dtype=dtype).reshape(size, *shape))
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    placement = draw(st.sampled_from(PLACEMENTS))
    counts = [draw(st.lists(st.integers(1, 9), min_size=k, max_size=k)) for k in n_rows]
    return n, {
        "n_rows": n_rows,
        "several": several,
        "item": item,
        "keys": keys,
        "optimizer": optimizer,
        "by_phase": draw(st.booleans()),
        "options": {
            "combiner": combiner,
            "padding_key": padding,
            "gradients": draw(st.sampled_from(["sum", "mean"])),
            "sparse": optimizer == "sparse_adam",
            "placement": placement,
            "unique": draw(st.booleans()),
            "counts": counts if placement == "frequency" else None,
        },
    }


def _key(rows: int, step: int, padding: int | None) -> st.SearchStrategy[int]:
    key = st.integers(0, (rows - 1) // step).map(lambda k: k * step)
    return key if padding is None else st.one_of(key, st.just(padding))


def learn_all(processes: px.Processes, path: str) -> list[Any]:
    return [learn(processes, n, case) for n, case in torch.load(path)]


def test_learns_what_the_modules_of_torch_learn(four_ranks: Ranks, tmp_path: Path) -> None:
    """Outputs, gradients and a step of an optimizer, over drawn keys and one to four ranks."""

    @settings(max_examples=5)
    @given(st.lists(cases(), min_size=4, max_size=8))
    def check_many(many: list[tuple[int, dict[str, Any]]]) -> None:
        torch.save(many, tmp_path / "cases.pt")
        found = four_ranks.run(learn_all, path=str(tmp_path / "cases.pt"))
        for (n, case), *its in zip(many, *found, strict=True):
            check(n, case, its[:n])

    check_many()


def check(n: int, case: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Compare what ranks found with one process: by modulo each has row key // n, of key % n."""
    wanted = reference(n, case)
    close = torch.testing.assert_close
    close(torch.cat([x["output"] for x in found]), wanted["output"])
    start = 0
    for table, rows in enumerate(case["n_rows"]):
        for key in range(rows) if case["options"]["placement"] == "modulo" else ():
            own = found[key % n]["gradient"][start + key // n]
            close(own, wanted["gradient"][table][key], msg=f"gradient of {key} of {table}")
        for each in found:
            close(each["weight"][table], wanted["weight"][table])
            close(each["full"][table], wanted["gradient"][table])
        start += -(-rows // n)


# The article's example


def article(processes: px.Processes) -> dict[str, Any]:
    """Run the phases on rows that hold their key; the gradient of key k is 2**k, of rank 1 more."""
    keys = torch.tensor([[0, 1, 3, 5], [4, 5, 6, 7]][processes.rank])
    full = torch.arange(8.0)[:, None]
    module = px.ShardedEmbedding.from_full(full, processes)
    exchange = module.dispatch(keys)
    exchange.counts()
    exchange.keys()
    exchange.lookup()
    vectors = exchange.vectors()
    exchange.gradients((2.0**keys + 1000 * processes.rank)[:, None])
    exchange.accumulate()
    gradient = module.weight.grad
    assert gradient is not None
    return {
        "rows": module.weight.detach().flatten().tolist(), "vectors": vectors.flatten().tolist(),
        "gradient": gradient.flatten().tolist(), "sent": exchange.sent,
    }  # fmt: skip


def test_example_of_the_article(two_ranks: Ranks) -> None:
    """GPU 0 gets the gradients g0, g4, g6, and GPU 1 g1, g3, g5, g5 and g7."""
    first, second = two_ranks.run(article)
    assert first["rows"] == [0, 2, 4, 6]
    assert second["rows"] == [1, 3, 5, 7]
    assert first["vectors"] == [0, 1, 3, 5]
    assert second["vectors"] == [4, 5, 6, 7]
    assert first["gradient"] == [1, 0, 1016, 1064]
    assert second["gradient"] == [2, 8, 32 + 1032, 1128]
    # Rank 0 asks for 1, 3, 5 and has 4, 6 asked of it; one number each.
    assert first["sent"] == {"counts": 8, "keys": 12, "vectors": 8, "gradients": 12}
    assert second["sent"] == {"counts": 8, "keys": 8, "vectors": 12, "gradients": 8}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_places_of_rows(placement: str) -> None:
    """Each row has one, on the rank that `row_owners` says, and `shards` knows it."""
    n_rows, n = [23, 1, 6], 4
    loads = [np.random.default_rng(rows).random(rows) for rows in n_rows]
    layout = Layout(n_rows, n, several=True, placement=placement, loads=loads)
    owners = row_owners(placement, n_rows, n, loads)
    found: dict[tuple[int, int], int] = {}
    for rank in range(n):
        for table, rows, keys in layout.shards(rank):
            at = torch.arange(layout.rows_per_rank)[rows] + rank * layout.rows_per_rank
            found |= {(table, key): int(a) for key, a in zip(keys.tolist(), at, strict=True)}
    assert sorted(found) == [(t, k) for t, rows in enumerate(n_rows) for k in range(rows)]
    assert len(set(found.values())) == sum(n_rows)
    for (table, key), address in found.items():
        asked = torch.zeros(3, dtype=torch.int32)
        asked[table] = key
        assert layout.addresses(asked, bags=False)[table] == address
        assert address // layout.rows_per_rank == owners[table][key]


def test_duplicates_that_travel() -> None:
    """Padding is asked of nobody, and each gradient comes by itself."""
    module = px.ShardedEmbedding.from_full(
        torch.eye(3), combiner="sum", padding_key=-1, unique=False
    )
    exchange = module.dispatch(torch.tensor([[2, 2, -1], [2, -1, 0]]))
    exchange.counts()
    exchange.keys()
    assert exchange._rows.tolist() == [0, 2, 2, 2]
    exchange.lookup()
    assert exchange.vectors().tolist() == [[0, 0, 2], [1, 0, 1]]
    exchange.gradients(torch.tensor([[1.0, 0, 0], [0, 1, 0]]))
    assert exchange._grads.tolist() == [[0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]]


def test_counts_that_rows_are_dealt_by() -> None:
    """A histogram of keys, or its loads."""
    keys = Keys.zipf([40, 7], [30, 5])
    found = [
        px.ShardedEmbedding([40, 7], 2, placement="frequency", unique=False, counts=counts)
        for counts in (keys, keys.loads(unique=False), [range(40), [1] * 7])
    ]
    states = [module.get_extra_state().tolist() for module in found]
    assert states[0] == states[1] != states[2]
    assert states[0][:5] == [0, 1, 40, 7, -2]
    other = px.ShardedEmbedding([40, 7], 2, placement="hash")
    with pytest.raises(ArgumentError, match=r"placed by frequency, cannot .* placed by hash; keep"):
        other.load_state_dict(found[0].state_dict())


def test_a_key_that_occurs_often_is_sent_once() -> None:
    module = px.ShardedEmbedding.from_full(torch.eye(3), combiner="sum")
    exchange = module.dispatch(torch.tensor([[2, 2, 0], [2, 0, 2]]))
    exchange.counts()
    exchange.keys()
    assert exchange.sent == {"counts": 0, "keys": 0}
    assert exchange._rows.tolist() == [0, 2]
    exchange.lookup()
    assert exchange.vectors().tolist() == [[1, 0, 2], [1, 0, 2]]


# Rows: at first, kept, moved


def test_addresses_of_more_rows_than_32_bits_count() -> None:
    """Of two ranks: row 7 of the second table is that of rank 1, behind half of the first."""
    layout = Layout([5_000_000_000, 9], 2, several=True)
    found = layout.addresses(torch.tensor([[4_999_999_998, 7]]), bags=False)
    assert layout.rows_per_rank == 2_500_000_005
    assert found.tolist() == [[2_499_999_999, 2_500_000_005 + 2_500_000_003]]


def initial(processes: px.Processes) -> list[Tensor]:
    found = []
    dealt = {"placement": "frequency", "counts": Keys.zipf([5000, 3], 100)}
    for n, options in ((1, {}), (2, {}), (3, {"placement": "hash"}), (4, dealt)):
        group = processes.group(range(n), key="initial")
        if processes.rank < n:
            torch.manual_seed(5 + processes.rank)
            module = px.ShardedEmbedding([5000, 3], 4, group, **options)  # type: ignore[arg-type]
            found += module.full_weight()
    return found


def test_initial_rows_do_not_depend_on_the_number_of_ranks(four_ranks: Ranks) -> None:
    """Nor on their placement. They are normal, and of rank 0's random state, whatever others'."""
    found = [rows for each in four_ranks.run(initial) for rows in each]
    for large, small in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(large, found[0])
        assert torch.equal(small, found[1])
    assert abs(found[0].mean()) < 0.02
    assert abs(found[0].std() - 1) < 0.02
    assert abs((found[0].abs() < 1).float().mean() - 0.6827) < 0.01
    assert len(found[0].unique()) > 19_900
    assert not torch.equal(found[0][:3], found[1])


def test_another_module_has_other_rows() -> None:
    first, second = (px.ShardedEmbedding(100, 8).full_weight() for _ in range(2))
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert not torch.isclose(first, second).any()


def kept(processes: px.Processes) -> str:
    module = px.ShardedEmbedding([9, 4], 2, processes)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    other = px.ShardedEmbedding([9, 4], 2, processes)
    other.load_state_dict(state)
    assert torch.equal(other.weight, module.weight)
    again = px.ShardedEmbedding.from_full(module.full_weight(), processes)
    assert torch.equal(again.weight, module.weight)
    clone = copy.deepcopy(module).half()
    assert clone(torch.tensor([[8, 3]])).dtype == torch.float16
    states = [None] * 2
    dist.all_gather_object(states, state)
    with pytest.raises(ArgumentError, match="keep full_weight") as caught:
        other.load_state_dict(states[1 - processes.rank])
    return str(caught.value)


def test_states_are_of_a_rank_and_full_weights_of_all(two_ranks: Ranks) -> None:
    assert two_ranks.run(kept)[0].startswith(
        "a state of rank 1 of 2, tables of [9, 4] rows, cannot be loaded into rank 0 of 2"
    )


def test_one_process_is_an_embedding_of_its_own() -> None:
    """From modules of torch; shapes of any length; without gradients; half precision."""
    full = nn.Embedding(6, 4)
    module = px.ShardedEmbedding.from_full(full)
    keys = torch.randint(6, (2, 1, 5), dtype=torch.int32)
    assert torch.equal(module(keys), full(keys))
    bag = nn.EmbeddingBag(6, 4, mode="mean").bfloat16()
    pooled = px.ShardedEmbedding.from_full([bag, bag], combiner="mean")
    assert repr(pooled) == "ShardedEmbedding([6, 6], 4, rank 0 of 1)"
    with torch.no_grad():
        found = pooled(keys.view(5, 1, 2).expand(5, 2, 2))
    assert torch.equal(
        found[:, 0], functional.embedding_bag(keys.view(5, 2), bag.weight, mode="mean")
    )
    assert pooled(keys.new_empty(0, 2, 3)).shape == (0, 2, 4)


# What goes wrong


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


def refused(processes: px.Processes) -> list[list[str]]:
    """Let rank 1 have bad keys; the next exchange works."""
    found = []
    for options, keys, _ in BAD_KEYS.values():
        module = px.ShardedEmbedding([9, 5], 2, processes, **options)
        good = torch.zeros((3, 2, 1) if options else (3, 2), dtype=torch.int64)
        with pytest.raises(PipeError) as caught:
            module(torch.tensor(keys) if processes.rank == 1 else good)
        found.append(message(caught.value))
        assert module(good).shape == (3, 2, 2)
    return found


def test_the_others_learn_who_refused_its_keys(two_ranks: Ranks) -> None:
    told, own = two_ranks.run(refused)
    text = "rank 1 refused its keys, see the error of that rank; no key was sent"
    assert told == [["PeerError", text]] * len(BAD_KEYS)
    for (kind, error), (_, _, wanted) in zip(own, BAD_KEYS.values(), strict=True):
        assert kind in ("ArgumentError", "ArgumentTypeError")
        assert wanted in error


def disagree(processes: px.Processes) -> list[list[str]]:
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
    found = []
    for n_rows, dim, group, options in wrong:
        with pytest.raises(PipeError) as caught:
            px.ShardedEmbedding(n_rows, dim, group, **options)
        found.append(message(caught.value))
    if rank > 1:
        with pytest.raises(ArgumentError) as outside:
            px.ShardedEmbedding(9, 2, pair)
        found.append(message(outside.value))
    return found


def test_processes_that_disagree_are_named(four_ranks: Ranks) -> None:
    found = four_ranks.run(disagree)
    sizes, lengths, combiners, dealt, mistakes, groups = zip(*(x[:6] for x in found), strict=True)
    assert all(text.startswith("placement by counts of rank 1 is ") for _, text in dealt)
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
    assert "this process is not in process_group" in found[2][6][1]
    four_ranks.close()


def alone(processes: px.Processes) -> str:
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
        "rank 0 waited 0.1 s in vain for rank 1; every process of the group [0, 1] must make the "
        "embedding"
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
            os._exit(3)


@pytest.mark.parametrize("phase", ["keys", "vectors"])
def test_a_lost_process_is_named(phase: str, tmp_path: Path) -> None:
    """In a plain group, and in `Processes`: no hang, and which it was."""
    statuses, logs = run_to_end([[__file__, phase]] * 3, tmp_path)
    assert statuses == [3, 0, 3]
    for log in (logs[0], logs[2]):
        assert f"LostConnection the connection to rank 1 broke: in the exchange of {phase}: " in log


if __name__ == "__main__":
    lose(sys.argv[1])
