"""`pipeexec.ShardedEmbedding` against `nn.Embedding` and `nn.EmbeddingBag` of one process."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.embedding.row_layout import RowLayout
from pipesim import Keys
from pipesim.costs.keys import PLACEMENTS, row_owners
from pipesim.errors import ArgumentError, PeerError
from pipesim.ops import EXCHANGES, Op

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


def learn(processes: Processes, n: int, case: dict[str, Any]) -> dict[str, Any] | None:
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
    values = {"output": output, "gradient": gradient, "weight": after, "full": full_gradient}
    if not case["several"]:
        values |= {"weight": [after], "full": [full_gradient]}
    return values


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
            whole: Any = nn.Embedding.from_pretrained(weight, False, len(table), sparse=sparse)
        else:
            whole = nn.EmbeddingBag.from_pretrained(
                weight, False, mode=combiner, sparse=sparse, padding_idx=len(table)
            )
        modules.append(whole)
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


def learn_all(processes: Processes, path: str) -> list[Any]:
    return [learn(processes, n, case) for n, case in torch.load(path)]


def test_learns_what_the_modules_of_torch_learn(four_ranks: Ranks, tmp_path: Path) -> None:
    """Outputs, gradients and a step of an optimizer, over drawn keys and one to four ranks."""

    @settings(max_examples=5)
    @given(st.lists(cases(), min_size=4, max_size=8))
    def check_many(many: list[tuple[int, dict[str, Any]]]) -> None:
        torch.save(many, tmp_path / "cases.pt")
        results = four_ranks.run(learn_all, path=str(tmp_path / "cases.pt"))
        for (n, case), *its in zip(many, *results, strict=True):
            check(n, case, its[:n])

    check_many()


def check(n: int, case: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Compare what ranks found with one process: by modulo each has row key // n, of key % n."""
    wanted = reference(n, case)
    close = torch.testing.assert_close
    close(torch.cat([x["output"] for x in results]), wanted["output"])
    start = 0
    for table, rows in enumerate(case["n_rows"]):
        for key in range(rows) if case["options"]["placement"] == "modulo" else ():
            own = results[key % n]["gradient"][start + key // n]
            close(own, wanted["gradient"][table][key], msg=f"gradient of {key} of {table}")
        for result in results:
            close(result["weight"][table], wanted["weight"][table])
            close(result["full"][table], wanted["gradient"][table])
        start += -(-rows // n)


# The article's example


def article(processes: Processes) -> dict[str, Any]:
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


ROWS = [23, 6]


def batch_of(rank: int) -> Tensor:
    """Return keys of two tables, in which some occur often; rank 1 has fewer."""
    generator = torch.Generator().manual_seed(rank)
    return torch.stack(
        [torch.randint(n // 2, (9 - 4 * rank,), generator=generator) for n in ROWS], 1
    )


def exchanged(processes: Processes) -> list[dict[str, int]]:
    """Return the bytes that exchanges send, of each placement, once and with duplicates."""
    sent = []
    for placement, unique in itertools.product(PLACEMENTS, (True, False)):
        counts = predicted_keys() if placement == "frequency" else None
        module = px.ShardedEmbedding(
            ROWS, DIM, processes, placement=placement, unique=unique, counts=counts
        )
        exchange = module.dispatch(batch_of(processes.rank))
        for phase in ("counts", "keys", "lookup"):
            getattr(exchange, phase)()
        exchange.gradients(exchange.vectors())
        sent.append(exchange.sent)
    return sent


def predicted_keys() -> Keys:
    return Keys.per_rank([Keys.counted(batch_of(rank).numpy(), ROWS) for rank in range(2)])


def test_bytes_of_a_batch_are_those_predicted(two_ranks: Ranks) -> None:
    """Of every exchange and rank, to the byte; so are those of a simulated timeline."""
    cases = itertools.product(PLACEMENTS, (True, False))
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2, sharded=[0])
    for (placement, unique), *sent in zip(cases, *two_ranks.run(exchanged), strict=True):
        nbytes = predicted_keys().exchange_bytes(2, DIM, placement=placement, unique=unique)
        timeline = ps.simulate(graph, ps.Costs(1, 2, exchange_bytes={0: nbytes}))
        for part, name in enumerate(EXCHANGES[:4]):
            exchanges = (graph.op == Op.ALL_TO_ALL) & (graph.part == part)
            assert timeline.nbytes[exchanges].tolist() == [own[name] for own in sent], name


# Tables of exchanges


def explained(processes: Processes, keys: list[list[int]], **options: Any) -> dict[str, Any]:
    """Explain a training step, and run it; return both, and rows and gradients of this rank."""
    own, full = torch.tensor(keys[processes.rank]), torch.arange(1.0, 9)[:, None] * torch.ones(2)
    module = px.ShardedEmbedding.from_full([full], processes, **options)
    output = module(own[:, None])
    gradient = factors(output.shape).float() * (1 + processes.rank)
    tables = {"table": module.explain(own[:, None], gradient),
              "without": module.explain(own[:, None])}  # fmt: skip
    assert module.weight.grad is None
    output.backward(gradient)
    grad = module.weight.grad
    assert grad is not None
    return {
        "rows": module.weight.detach(), "grad": grad, "given": gradient[:, 0],
        **{name: table.to_dict("list") for name, table in tables.items()},
    }  # fmt: skip


def test_the_table_of_the_articles_exchange(two_ranks: Ranks) -> None:
    """Row key // 2 of rank key % 2; key 5 of both ranks gives its row two gradients."""
    keys = [[0, 1, 3, 5], [4, 5, 6, 7]]
    first, second = two_ranks.run(explained, keys=keys)
    table, without = (pd.DataFrame(first[name]) for name in ("table", "without"))
    pd.testing.assert_frame_equal(table, pd.DataFrame(second["table"]))
    assert table["rank"].tolist() == [0] * 4 + [1] * 4
    assert table["position"].tolist() == [*range(4)] * 2
    assert table["key"].tolist() == keys[0] + keys[1]
    assert table["owner"].tolist() == [0, 1, 1, 1, 0, 1, 0, 1]
    assert table["row"].tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    assert table["sent"].all()
    norms = first["given"].norm(dim=1).tolist()
    assert table["gradient_norm"].tolist() == pytest.approx(norms + [2 * x for x in norms])
    assert table["vector_norm"].tolist() == pytest.approx(
        [2**0.5 * (key + 1) for key in [*keys[0], *keys[1]]]
    )
    sent = pd.crosstab(table["rank"], table["owner"]).values
    assert sent.tolist() == [[1, 3], [2, 2]]
    assert without[["gradient_norm", "row_gradient_norm"]].isna().all().all()
    pd.testing.assert_frame_equal(without[table.columns[:-2]], table[table.columns[:-2]])


@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_table_says_what_rows_are(placement: str, unique: bool, two_ranks: Ranks) -> None:
    """Norms are those of the owner's rows and of their gradients after a backward."""
    keys = [[7, -1, 7, 2, 0], [-1, 7]]
    results = two_ranks.run(
        explained, keys=keys, placement=placement, unique=unique, padding_key=-1,
        counts=[[*range(1, 9)]] if placement == "frequency" else None,
    )  # fmt: skip
    table = pd.DataFrame(results[0]["table"])
    padding = table[table["key"] < 0]
    assert (padding[["owner", "row"]] == -1).all().all()
    assert not padding["sent"].any()
    assert padding.iloc[:, -3:].isna().all().all()
    assert table["sent"].sum() == (4 if unique else 5)
    kept = table[table["key"] >= 0]
    for line in kept.itertuples():
        owner = results[line.owner]
        assert owner["rows"][line.row].tolist() == [line.key + 1] * 2
        assert line.vector_norm == pytest.approx(owner["rows"][line.row].norm().item())
        assert line.row_gradient_norm == pytest.approx(owner["grad"][line.row].norm().item())
    gradients = torch.cat([x["given"] for x in results])
    for (rank, key), lines in kept.groupby(["rank", "key"]):
        parts = gradients[lines.index]
        wanted = [parts.sum(0).norm().item()] * len(lines) if unique else parts.norm(dim=1).tolist()
        assert lines["gradient_norm"].tolist() == pytest.approx(wanted), (rank, key)


def refused_gradient(processes: Processes) -> str:
    module = px.ShardedEmbedding(9, 2, processes)
    gradient = torch.ones(3, 2 + processes.rank)
    error = ArgumentError if processes.rank else PeerError
    with pytest.raises(error) as caught:
        module.explain(torch.tensor([1, 2, 3]), gradient)
    exchange = module.dispatch(torch.tensor([1, 2, 3]))
    exchange.counts()
    assert repr(exchange) == (
        f"<Exchange of rank {processes.rank} of 2: next phase keys, bytes sent {{'counts': 8}}>"
    )
    return str(caught.value)


def test_a_gradient_of_another_shape(two_ranks: Ranks) -> None:
    """No process waits for the one that gave it."""
    other, own = two_ranks.run(refused_gradient)
    assert own.startswith("gradient must be that of the vectors, of shape (3, 2), got (3, 3)")
    assert other.startswith("rank 1 refused its keys")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_places_of_rows(placement: str) -> None:
    """Each row has one, on the rank that `row_owners` says, and `shards` knows it."""
    n_rows, n = [23, 1, 6], 4
    loads = [np.random.default_rng(rows).random(rows) for rows in n_rows]
    layout = RowLayout(n_rows, n, several=True, placement=placement, loads=loads)
    owners = row_owners(placement, n_rows, n, loads)
    addresses: dict[tuple[int, int], int] = {}
    for rank in range(n):
        for table, rows, keys in layout.shards(rank):
            local = torch.arange(layout.rows_per_rank)[rows] + rank * layout.rows_per_rank
            addresses |= {(table, key): int(a) for key, a in zip(keys.tolist(), local, strict=True)}
    assert sorted(addresses) == [(t, k) for t, rows in enumerate(n_rows) for k in range(rows)]
    assert len(set(addresses.values())) == sum(n_rows)
    for (table, key), address in addresses.items():
        column = torch.zeros(3, dtype=torch.int32)
        column[table] = key
        assert layout.addresses(column, bags=False)[table] == address
        assert address // layout.rows_per_rank == owners[table][key]


def test_duplicates_that_travel() -> None:
    """Padding is requested from no process, and each gradient is sent separately."""
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
    modules = [
        px.ShardedEmbedding([40, 7], 2, placement="frequency", unique=False, counts=counts)
        for counts in (keys, keys.loads(unique=False), [range(40), [1] * 7])
    ]
    states = [module.get_extra_state().tolist() for module in modules]
    assert states[0] == states[1] != states[2]
    assert states[0][:5] == [0, 1, 40, 7, -2]
    other = px.ShardedEmbedding([40, 7], 2, placement="hash")
    with pytest.raises(ArgumentError, match=r"placed by frequency, cannot .* placed by hash; keep"):
        other.load_state_dict(modules[0].state_dict())


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
    layout = RowLayout([5_000_000_000, 9], 2, several=True)
    addresses = layout.addresses(torch.tensor([[4_999_999_998, 7]]), bags=False)
    assert layout.rows_per_rank == 2_500_000_005
    assert addresses.tolist() == [[2_499_999_999, 2_500_000_005 + 2_500_000_003]]


def initial(processes: Processes) -> list[Tensor]:
    rows = []
    by_frequency = {"placement": "frequency", "counts": Keys.zipf([5000, 3], 100)}
    for n, options in ((1, {}), (2, {}), (3, {"placement": "hash"}), (4, by_frequency)):
        group = processes.group(range(n), key="initial")
        if processes.rank < n:
            torch.manual_seed(5 + processes.rank)
            module = px.ShardedEmbedding([5000, 3], 4, group, **options)  # type: ignore[arg-type]
            rows += module.full_weight()
    return rows


def test_initial_rows_do_not_depend_on_the_number_of_ranks(four_ranks: Ranks) -> None:
    """Nor on their placement. They are normal, and of rank 0's random state, whatever others'."""
    tables = [rows for result in four_ranks.run(initial) for rows in result]
    for large, small in zip(tables[::2], tables[1::2], strict=True):
        assert torch.equal(large, tables[0])
        assert torch.equal(small, tables[1])
    assert abs(tables[0].mean()) < 0.02
    assert abs(tables[0].std() - 1) < 0.02
    assert abs((tables[0].abs() < 1).float().mean() - 0.6827) < 0.01
    assert len(tables[0].unique()) > 19_900
    assert not torch.equal(tables[0][:3], tables[1])


def test_another_module_has_other_rows() -> None:
    first, second = (px.ShardedEmbedding(100, 8).full_weight() for _ in range(2))
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert not torch.isclose(first, second).any()


def kept(processes: Processes) -> str:
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
        output = pooled(keys.view(5, 1, 2).expand(5, 2, 2))
    assert torch.equal(
        output[:, 0], functional.embedding_bag(keys.view(5, 2), bag.weight, mode="mean")
    )
    assert pooled(keys.new_empty(0, 2, 3)).shape == (0, 2, 4)
