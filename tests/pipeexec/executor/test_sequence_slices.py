"""Steps of sequences in slices against the unsplit model: loss, gradients, bytes; and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from small_pipelines import Nap, call_within, gradients, pipeline, sgd
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.gpt import gpt
from pipeexec.distributed import Processes
from pipeexec.executor import StepResult
from pipesim.errors import ArgumentError, ArgumentTypeError, ExecutionError, PipeError, StageError

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning"),
]

VOCABULARY = 11


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def counted_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over tokens of even numbers, and how many they are."""
    kept = targets % 2 == 0
    losses = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * kept.flatten()).sum(), kept.sum()


def tokens(n_samples: int = 4, n_positions: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, VOCABULARY, (n_samples, n_positions + 1), generator=generator)
    return row[:, :-1], row[:, 1:]


def small_gpt(n_stages: int, dropout: float = 0.0) -> tuple[nn.Sequential, list[nn.Sequential]]:
    """Return a GPT in double precision, and its stages."""
    model = gpt(n_layers=2 * n_stages - 2, d_model=8, n_heads=2, sequence=16,
                vocabulary=VOCABULARY, dropout=dropout).double()  # fmt: skip
    ends = np.linspace(0, len(model), n_stages + 1).round().astype(int).tolist()
    return model, [model[a:b] for a, b in pairwise(ends)]


def split_backward(schedule: ps.Schedule) -> ps.Schedule:
    """Return a schedule with I and W in place of each B."""
    orders = [
        [x for a in order
         for x in ([a] if a.op == ps.Op.F else [a._replace(op=ps.Op.I), a._replace(op=ps.Op.W)])]
        for order in schedule.orders
    ]  # fmt: skip
    return ps.Schedule.from_orders(orders, placement=schedule.placement).with_slices(
        schedule.n_slices
    )


def late_weight_gradients() -> ps.Schedule:
    """Return an order whose W come long after their I, and one backward that is not split."""
    return ps.Schedule.from_orders([
        ["0F0", "0F1", "0F2", "0I2", "0I1", "0B0", "0W1", "0W2"],
        ["1F0", "1F1", "1F2", "1B2", "1I1", "1I0", "1W0", "1W1"],
    ]).with_slices(3)  # fmt: skip


def both_ways() -> ps.Schedule:
    """Return a sequence in two slices on each path of a bidirectional pipeline."""
    return ps.Schedule.from_orders(
        [
            ["0F0", "0F1", "1F2", "1F3", "1B3", "1B2", "0B1", "0B0"],
            ["0F2", "0F3", "1F0", "1F1", "1B1", "1B0", "0B3", "0B2"],
        ],
        placement=ps.Placement.bidirectional(2),
    ).with_slices(2)


SCHEDULES: dict[str, Callable[[], ps.Schedule]] = {
    "two slices": lambda: ps.schedule("seq1f1b", 2, 4),
    "three slices on three devices": lambda: ps.schedule("seq1f1b", 3, 6, n_slices=3),
    "one sequence": lambda: ps.schedule("seq1f1b", 2, 4, n_slices=4),
    "chunks": lambda: ps.schedule("slimpipe", 2, 4),
    "all forwards first": lambda: ps.schedule("gpipe", 2, 6).with_slices(6),
    "I and W": lambda: split_backward(ps.schedule("seq1f1b", 2, 6, n_slices=3)),
    "late W": late_weight_gradients,
    "both ways": both_ways,
}


def check(
    graph: ps.TaskGraph,
    batch: tuple[Tensor, Tensor],
    loss_fn: Any = token_loss,
    whole_loss: Any = token_loss,
    **options: Any,
) -> StepResult:
    """Run a step, an evaluation and a prediction; the unsplit model must give the same."""
    model, stages = small_gpt(graph.n_stages)
    whole = copy.deepcopy(model)
    loss = whole_loss(whole(batch[0]), batch[1])
    loss.backward()
    with pipeline(stages, graph, loss_fn, **options) as subject:
        result = call_within(60, lambda: subject.step(*batch))
        close(result.loss, loss)
        for own, other in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            close(own[1].grad, other[1].grad, own[0])
        close(subject.evaluate(*batch).loss, loss)
        close(subject.predict(batch[0]), whole(batch[0]))
    return result


def close(own: Tensor, other: Tensor, name: str = "") -> None:
    """Check equality up to rounding of double precision."""
    torch.testing.assert_close(
        own.double(), other.detach(), rtol=1e-9, atol=1e-12, msg=lambda text: f"{name}: {text}"
    )


# Parity with the unsplit model


@pytest.mark.parametrize(
    ("name", "recompute"),
    [*((name, "never") for name in SCHEDULES),
     *((name, "always") for name in ("two slices", "chunks", "late W", "both ways"))],
)  # fmt: skip
def test_parity(name: str, recompute: str) -> None:
    """Slices of 4, 3, 2 or 6 positions, and two or more sequences or one."""
    check(ps.lower(SCHEDULES[name](), recompute=recompute), tokens())


@pytest.mark.parametrize(
    "options",
    [
        {"hosts": "per_device"},
        {"hosts": "per_device", "host_threads": True, "recompute": "always"},
        {"overlap": False},
        {"streams": "single"},
        {"streams": "per_microbatch"},
        {"n_replicas": 2},
        {"n_replicas": 2, "grad_sync": 3},
        {"recompute": "except_last"},
    ],
    ids=str,
)
def test_parity_however_it_is_lowered(options: dict[str, Any]) -> None:
    check(ps.lower(ps.schedule("seq1f1b", 2, 6, n_slices=3), **options), tokens())


def test_slices_and_micro_batches_of_unlike_lengths() -> None:
    """Five samples in two micro-batches, and 11 positions in slices of 4, 4 and 3."""
    graph = ps.lower(ps.schedule("seq1f1b", 2, 6, n_slices=3))
    result = check(graph, tokens(5, 11))
    assert result.timeline.complete


def test_counts_are_those_of_all_slices() -> None:
    """A mean over some tokens, as (sum, count); slices have different counts."""

    def whole_loss(output: Tensor, targets: Tensor) -> Tensor:
        total, count = counted_loss(output, targets)
        return total / count

    graph = ps.lower(ps.schedule("seq1f1b", 2, 6, n_slices=3))
    check(graph, tokens(5, 11), counted_loss, whole_loss)


def test_sums() -> None:
    def summed(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

    graph = ps.lower(ps.schedule("seq1f1b", 2, 4))
    check(graph, tokens(), summed, summed, loss_reduction="sum")


def test_training_is_that_of_the_unsplit_model() -> None:
    """Losses and weights of four steps."""
    model, stages = small_gpt(2)
    whole = copy.deepcopy(model)
    optimizer = sgd(whole.parameters())
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4), recompute="always")
    with pipeline(stages, graph, token_loss, sgd) as subject:
        for _ in range(4):
            loss = token_loss(whole(tokens()[0]), tokens()[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            close(subject.step(*tokens()).loss, loss)
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        close(own, other)


def test_dropout_draws_the_same_numbers_when_recomputed() -> None:
    losses = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        _, stages = small_gpt(2, dropout=0.3)
        graph = ps.lower(ps.schedule("seq1f1b", 2, 4), recompute=recompute)
        with pipeline(stages, graph, token_loss) as subject:
            loss = subject.step(*tokens()).loss
        losses.append([loss, *gradients(stages)])
    assert all(map(torch.equal, *losses))


def test_frozen_stages() -> None:
    """Keys of a frozen first stage need no gradient; those of the second do."""
    model, stages = small_gpt(2)
    stages[0].requires_grad_(False)
    whole = copy.deepcopy(model)
    token_loss(whole(tokens()[0]), tokens()[1]).backward()
    with pipeline(stages, ps.lower(ps.schedule("seq1f1b", 2, 4)), token_loss) as subject:
        subject.step(*tokens())
    assert all(p.grad is None for p in stages[0].parameters())
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        if own.requires_grad:
            close(own.grad, other.grad)


class _Positions(nn.Module):
    """Embeds tokens, and positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 8)
        self.position = nn.Linear(1, 8)

    def forward(self, token: Tensor, position: Tensor, scale: Tensor) -> Tensor:
        return self.token(token) + self.position(position.unsqueeze(-1)) * scale


def test_tensors_that_all_samples_share() -> None:
    """Positions of shape (1, n) are cut like the sequences; other values are given whole."""
    torch.manual_seed(0)
    model = [_Positions().double(), nn.Linear(8, VOCABULARY).double()]
    whole = copy.deepcopy(model)
    inputs, targets = tokens()
    batch = (inputs, torch.arange(12.0).double()[None] / 12, torch.full((1, 1), 0.5).double())
    loss = token_loss(whole[1](whole[0](*batch)), targets)
    loss.backward()
    with pipeline(model, ps.lower(ps.schedule("seq1f1b", 2, 4)), token_loss) as subject:
        close(subject.step(batch, targets).loss, loss)
    close(model[0].position.weight.grad, whole[0].position.weight.grad)


def test_positions_first() -> None:
    """Tensors of (positions, samples): the sample dimension is named, and that of the positions."""

    class Last(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x.transpose(0, 1))

    model, stages = small_gpt(2)
    whole = copy.deepcopy(model)
    inputs, targets = tokens()
    loss = token_loss(whole(inputs), targets)
    loss.backward()
    with pipeline(
        [Last(stages[0]), stages[1]],
        ps.lower(ps.schedule("seq1f1b", 2, 4)),
        lambda output, target: token_loss(output, target.transpose(0, 1)),
        batch_dims={"inputs": 1, "targets": 1},
        slice_dim=0,
    ) as subject:
        close(subject.step(inputs.T.contiguous(), targets.T.contiguous()).loss, loss)
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        close(own.grad, other.grad)


def test_a_smaller_batch_is_evaluated() -> None:
    """One sample for two micro-batches runs a graph of one sequence."""
    model, stages = small_gpt(2)
    inputs, targets = tokens(1)
    with pipeline(stages, ps.lower(ps.schedule("seq1f1b", 2, 4)), token_loss) as subject:
        close(subject.evaluate(inputs, targets).loss, token_loss(model(inputs), targets))
        close(subject.predict(inputs), model(inputs))
        subject.step(*tokens())  # the training graph is as before


def test_slices_of_given_sizes() -> None:
    """Such as those of equal seconds: a step, an evaluation and a prediction of the model."""
    batch = tokens()
    length = batch[0].shape[1]
    graph = ps.lower(ps.schedule("seq1f1b", 2, 6, n_slices=3))
    check(graph, batch, slice_sizes=[length - 4, 3, 1])
    _, stages = small_gpt(2)
    with pytest.raises(ArgumentError, match=r"slice_sizes has 2 slices, but graph .* n_slices=3"):
        pipeline(stages, graph, token_loss, slice_sizes=[length - 1, 1])
    with (
        pipeline(stages, graph, token_loss, slice_sizes=[1, 1, 1]) as subject,
        pytest.raises(ArgumentError, match=f"have {length} positions, but slice_sizes sum to 3"),
    ):
        subject.evaluate(*batch)


def test_other_graphs_run_the_same_stages() -> None:
    """With slices and without, in turns; gradients add up."""
    model, stages = small_gpt(2)
    whole = copy.deepcopy(model)
    for _ in range(3):
        token_loss(whole(tokens()[0]), tokens()[1]).backward()
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 4)), token_loss) as subject:
        sliced = subject.with_graph(ps.lower(ps.schedule("seq1f1b", 2, 4)))
        for one in (subject, sliced, subject):
            one.step(*tokens())
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        close(own.grad, other.grad)


def test_a_step_after_one_that_failed() -> None:
    """Keys and values of the failed step are gone."""
    model, stages = small_gpt(2)
    inputs, targets = tokens()
    with pipeline(stages, ps.lower(ps.schedule("seq1f1b", 2, 4)), token_loss) as subject:
        with pytest.raises(StageError):
            subject.step(torch.full_like(inputs, VOCABULARY), targets)
        subject.step(inputs, targets)
        assert all(not stage.slices._slices for stage in subject.stages)
        close(subject.evaluate(inputs, targets).loss, token_loss(model(inputs), targets))


def test_accumulated_steps() -> None:
    """Two steps of half a batch each train as one of the whole batch."""
    model, stages = small_gpt(2)
    whole = copy.deepcopy(model)
    inputs, targets = tokens()
    token_loss(whole(inputs), targets).backward()
    optimizer = sgd(whole.parameters())
    optimizer.step()
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4))
    with pipeline(stages, graph, token_loss, sgd) as subject:
        subject.step(inputs[:2], targets[:2], accumulate=True)
        subject.step(inputs[2:], targets[2:])
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        close(own, other)


@pytest.mark.parametrize("versions", ["stashed", "double_buffered"])
def test_mini_batches_of_whole_sequences(versions: Any) -> None:
    """With a learning rate of 0, the loss is that of the unsplit model."""
    model, stages = small_gpt(2)
    schedule = ps.schedule("seq1f1b", 2, 8).with_updates(2, versions)
    with pipeline(
        stages, ps.lower(schedule), token_loss, lambda p: torch.optim.SGD(p, lr=0.0)
    ) as subject:
        close(subject.step(*tokens()).loss, token_loss(model(tokens()[0]), tokens()[1]))


def test_split_models() -> None:
    """`px.split` keeps the caches of a model."""
    model, _ = small_gpt(2)
    whole = copy.deepcopy(model)
    loss = token_loss(whole(tokens()[0]), tokens()[1])
    stages = px.split(model, 2, sample=tokens()[0])
    with pipeline(stages, ps.lower(ps.schedule("seq1f1b", 2, 4)), token_loss) as subject:
        close(subject.step(*tokens()).loss, loss)


def step_of_rank(processes: Processes, recompute: str) -> list[Any]:
    """Return loss, loss of an evaluation, prediction and gradients of this rank's stage."""
    torch.manual_seed(0)
    _, stages = small_gpt(2)
    inputs, targets = tokens(5, 11)
    graph = ps.lower(ps.schedule("seq1f1b", 2, 6, n_slices=3), recompute=recompute)
    with px.Pipeline(stages, graph, ["cpu"], token_loss, processes=processes) as subject:
        result = subject.gather(subject.step(inputs, targets))
        evaluated = subject.gather(subject.evaluate(inputs, targets)).loss
        output = subject.predict(inputs)
        return [result.loss, evaluated, output, gradients([stages[processes.rank]])]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_parity_in_two_processes(two_ranks: Ranks, recompute: str) -> None:
    model, _ = small_gpt(2)
    inputs, targets = tokens(5, 11)
    loss = token_loss(model(inputs), targets)
    loss.backward()
    outcomes = two_ranks.run(step_of_rank, recompute=recompute)
    for own_loss, *_ in outcomes:
        close(own_loss, loss)
    close(outcomes[1][2], model(inputs))
    own = [x for *_, rows in outcomes for x in rows]
    for gradient, parameter in zip(own, model.parameters(), strict=True):
        close(gradient, parameter.grad)


# Bytes and seconds


class Attention(nn.Module):
    """One head without projections: queries, keys and values are thirds of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.cache = px.KeyValueCache()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (x * self.scale).chunk(3, dim=-1)
        keys, values = self.cache.append(key.contiguous(), value.contiguous())
        n = query.shape[-2]
        later = torch.ones(n, keys.shape[-2], dtype=torch.bool).triu(keys.shape[-2] - n + 1)
        scores = (query @ keys.transpose(-1, -2)).masked_fill(later, -torch.inf)
        return torch.cat([scores.softmax(-1) @ values, key, value], dim=-1)


def attention_stages(width: int = 6) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), Attention()).double() for _ in range(2)]


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def real_batch(n: int = 2, positions: int = 8, width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(n, positions, width, generator=generator).double() for _ in range(2))


@pytest.mark.slow
def test_compiled_stages() -> None:
    stages, (x, y) = attention_stages(), real_batch()
    whole = nn.Sequential(*copy.deepcopy(stages))
    loss = square_loss(whole(x), y)
    loss.backward()
    compiled = [torch.compile(stage, backend="aot_eager") for stage in stages]
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4))
    with pipeline(compiled, graph, square_loss, timeout=None) as subject:
        close(subject.step(x, y).loss, loss)
    own = [p for stage in stages for p in stage.parameters()]
    for parameter, other in zip(own, whole.parameters(), strict=True):
        close(parameter.grad, other.grad)


@pytest.mark.parametrize("name", ["two slices", "I and W", "all forwards first"])
def test_each_slice_gives_back_what_it_took(name: str) -> None:
    """Keys and values count in the activations of their slice, until its B or I."""
    graph = ps.lower(SCHEDULES[name]())
    batch = real_batch(12 // graph.n_slices, 12)
    with pipeline(attention_stages(), graph, square_loss) as subject:
        subject.step(*batch)
        memory = subject.memory(*batch)
    acquired, released = memory.activations
    place = graph.stage.astype(int) * graph.n_microbatches + graph.microbatch
    computes = graph.is_op(frozenset({ps.Op.F, ps.Op.B, ps.Op.I, ps.Op.W}))
    total = np.bincount(place[computes], (acquired - released)[computes])
    assert (total == 0).all()
    assert acquired[graph.op == ps.Op.F].min() > 0


def test_bytes_that_recomputed_slices_keep() -> None:
    """By hand: F keeps the input, and keys and values of all slices but the last.

    A slice has 2 samples, 4 positions, width 6, in 8 bytes: an input has 384. Keys and values have
    a third of it each.
    """
    orders = [
        ["0F0", "0F1", "0R1", "0B1", "0R0", "0B0"],
        ["1F0", "1F1", "1R1", "1B1", "1R0", "1B0"],
    ]
    graph = ps.lower(ps.Schedule.from_orders(orders).with_slices(2))
    batch = real_batch()
    with pipeline(attention_stages(), graph, square_loss) as subject:
        subject.step(*batch)
        memory = subject.memory(*batch)
    kept = {
        str(graph.task(k)): memory.activations.taken[k] - memory.activations.given[k]
        for k in np.flatnonzero(graph.op == ps.Op.F)
    }
    # Inputs of stage 0 are slices of the batch, which count as activations of their slice.
    assert kept == {"0F0": 384 + 256, "0F1": 384, "1F0": 384 + 256, "1F1": 384}


def test_peaks_are_as_predicted() -> None:
    """With profiled costs, to the byte, while whole sequences are in flight."""
    graph = ps.lower(ps.schedule("gpipe", 2, 4).with_slices(4))
    batch = real_batch(2, 8)
    with pipeline(attention_stages(), graph, square_loss) as subject:
        costs = px.profile(subject, *batch, n_steps=1, warm_up=1)
        memory = subject.memory(*batch)
    timeline = ps.simulate(graph, costs)
    static = np.array(costs.per_stage("parameter_bytes", 2)) * 2  # and a gradient of each
    assert (timeline.memory.peak - static == memory.peak_activations).all()


def test_bytes_between_input_and_weight_gradients() -> None:
    """What W needs of a slice is measured with a sequence of one slice's length."""
    graph = ps.lower(split_backward(ps.schedule("seq1f1b", 2, 4)))
    with pipeline(attention_stages(), graph, square_loss) as subject:
        costs = px.profile(subject, *real_batch(4), n_steps=1, warm_up=1)
    # The linear layer's input and the gradient of its output: 2 * 4 * 6 * 8 bytes each.
    assert costs.per_stage("weight_grad_bytes", 2).tolist() == [2 * 384, 2 * 384]


@pytest.mark.measures_time
def test_seconds_are_as_predicted() -> None:
    """Stages that sleep 5 ms a slice and direction. Other processes can delay a measured step."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6), Nap(5e-3, 5e-3)).double() for _ in range(2)]
    graph = ps.lower(ps.schedule("seq1f1b", 2, 8, n_slices=4))
    batch = real_batch(2, 8)
    result = px.validate(
        stages, {"seq1f1b": graph}, ["cpu"] * 2, square_loss, [batch] * 5, n_steps=2, warm_up=1
    )
    row = result.rows["seq1f1b"]
    assert (8 + 1) * 10e-3 < row.predicted.makespan < 2 * (8 + 1) * 10e-3
    assert row.predicted.makespan < 1.2 * row.measured.makespan


# The cache outside of a pipeline


def test_a_cache_outside_of_a_pipeline_keeps_nothing() -> None:
    cache = px.KeyValueCache()
    key, value = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert cache.append(key, value) == (key, value)
    assert [cache.offset(3), cache.offset(3)] == [0, 0]
    expected = F.scaled_dot_product_attention(key, key, value, is_causal=True)
    assert torch.equal(cache(key, key, value), expected)
    expected = F.scaled_dot_product_attention(key, key, value)
    assert torch.equal(px.KeyValueCache(causal=False).attend(key, key, value), expected)
    for other in (copy.deepcopy(cache), copy.copy(cache)):
        assert other.causal
        assert other._call is None
    assert not list(cache.parameters())
    assert cache.state_dict() == {}
    assert repr(px.KeyValueCache(causal=False)) == "KeyValueCache(causal=False)"


def test_bad_arguments_of_a_cache() -> None:
    cache, x = px.KeyValueCache(), torch.randn(2, 3, 4)
    with pytest.raises(PipeError, match="causal"):
        px.KeyValueCache(causal="no")  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match=r"takes no attn_mask, but dropout_p, .* its mask is causal"
    ):
        cache.attend(x, x, x, attn_mask=x)
    with pytest.raises(ArgumentError, match="takes no is_causal"):
        cache.attend(x, x, x, is_causal=False)
    with pytest.raises(ArgumentTypeError, match=r"value must be a tensor .* got shape \(3,\)"):
        cache.append(x, torch.ones(3))
    with pytest.raises(ArgumentTypeError, match=r"key must be a tensor .* got int"):
        cache.append(1, x)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="query has 2, key has 3, value has 3 positions"):
        cache.attend(x[:, :2], x, x)
    with pytest.raises(ArgumentError, match="key has 3, value has 2 positions"):
        cache.append(x, x[:, :2])
    with pytest.raises(PipeError, match="n_positions"):
        cache.offset(-1)


# Refused, with why


class _Unaware(nn.Module):
    """Causal attention without a cache; or with one, but torch's mask."""

    def __init__(self, has_cache: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.cache = px.KeyValueCache() if has_cache else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        keys, values = (x, x) if self.cache is None else self.cache.append(x, x)
        return F.scaled_dot_product_attention(x, keys, values, is_causal=True)


def with_stage(module: nn.Module) -> list[nn.Module]:
    return [nn.Linear(6, 6), module]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: px.KeyValueCache(causal=False),
         r"stage 1 \(KeyValueCache\) cannot run sequences in 2 slices: it has causal=False: its "
         "positions attend to later ones.*run a schedule without slices"),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.MultiheadAttention(6, 2)),
         r"1 of stage 1 \(MultiheadAttention\).*own slice alone; call pipeexec.KeyValueCache"),
        (lambda: nn.TransformerEncoderLayer(6, 2), "TransformerEncoderLayer.*own slice alone"),
        (lambda: nn.LSTM(6, 6), "LSTM.*begins every slice with a new state"),
    ],
)  # fmt: skip
def test_modules_that_slices_would_change(module: Callable[[], nn.Module], message: str) -> None:
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4))
    with pytest.raises(ArgumentError, match=message):
        pipeline(with_stage(module()), graph, square_loss)
    whole = ps.lower(ps.schedule("1f1b", 2, 4))
    with (
        pipeline(with_stage(module()), whole, square_loss) as subject,
        pytest.raises(ArgumentError, match=message),
    ):
        subject.with_graph(graph)


@pytest.mark.parametrize(
    ("has_cache", "message"),
    [
        (False, "with the 4 positions of one slice, so that it does not attend to the slices"),
        (True, "4 queries and 8 keys: torch then aligns the first query with the first key"),
    ],
)
def test_attention_that_misses_earlier_slices(has_cache: bool, message: str) -> None:
    """The first forward of a second slice finds it."""
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4))
    with pipeline(with_stage(_Unaware(has_cache)), graph, square_loss) as subject:
        batch = tuple(x.float() for x in real_batch())
        with pytest.raises(StageError, match="1F1") as error:
            subject.step(*batch)
    assert isinstance(error.value.__cause__, ExecutionError)
    assert message in str(error.value.__cause__)
    assert "KeyValueCache.attend" in str(error.value.__cause__)


class _Sometimes(nn.Linear):
    """Does not call its cache for the first slice."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.cache, self.n_calls = px.KeyValueCache(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return super().forward(x) + (self.cache.offset(1) if self.n_calls > 1 else 0)


def test_a_cache_that_is_not_called_for_each_slice() -> None:
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4))
    batch = tuple(x.float() for x in real_batch())
    with (
        pipeline(with_stage(_Sometimes()), graph, square_loss) as subject,
        pytest.raises(StageError) as error,
    ):
        subject.step(*batch)
    assert "1 times for a slice, but 0 times for an earlier one" in str(error.value.__cause__)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.ones(4, 12, 6), torch.ones(4)), r"targets have shape \(4,\).*no positions in dim"),
        ((torch.ones(4), torch.ones(4, 12)), r"inputs have shape \(4,\)"),
        ((torch.ones(4, 12, 6), torch.ones(4, 10, 6)), "targets have 10 positions.*inputs 12"),
        ((torch.ones(4, 1, 6), torch.ones(4, 1, 6)), "1 positions cannot be cut into 2 slices"),
        ((torch.ones(1, 8, 6), torch.ones(1, 8, 6)), "too few for 2 micro-batches"),
    ],
)
def test_batches_that_cannot_be_cut(batch: tuple[Tensor, Tensor], message: str) -> None:
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4))
    with pipeline(with_stage(nn.Linear(6, 6)), graph, square_loss) as subject:
        for call in (subject.step, subject.check_batch):
            with pytest.raises(ArgumentError, match=message):
                call(*batch)


@pytest.mark.parametrize("slice_dim", [-1, 1.0, "1", True, None])
def test_bad_slice_dim(slice_dim: Any) -> None:
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4))
    with pytest.raises(ArgumentTypeError, match="slice_dim must be the dimension"):
        pipeline(with_stage(nn.Linear(6, 6)), graph, square_loss, slice_dim=slice_dim)


def test_graphs_of_other_slices_are_not_profiled_together() -> None:
    two, four = (ps.lower(ps.schedule("seq1f1b", 2, 4, n_slices=k)) for k in (2, 4))
    stages = with_stage(nn.Linear(6, 6))
    batch = tuple(x.float() for x in real_batch(4))
    with (
        pipeline(stages, two, square_loss) as subject,
        pytest.raises(ArgumentError, match=r"n_slices=4.*measure each with its own pipeline"),
    ):
        px.measure(subject, *batch, graphs=[four])
    with pytest.raises(ArgumentError, match="validate graphs of equal n_slices"):
        px.validate(stages, {"a": two, "b": four}, ["cpu"] * 2, square_loss, [batch] * 9)
