"""Micro-batches of different shapes: the unsplit model's step, losses, memory, bad input."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from small_pipelines import Nap, mse, pipeline
from torch import Tensor, nn
from torch.utils.data import DataLoader
from unequal import (
    SHAPES,
    assert_like_whole,
    language_stages,
    mean_loss,
    token_loss,
    tokens,
    whole_step,
)

import pipeexec as px
import pipesim as ps
from pipeexec.executor.step_capture import CapturingRunner
from pipeexec.training.recorder import batch_counts
from pipesim.errors import ArgumentError, LossWarning, PipeError
from pipesim.ops import Op


def lowered(name: str, p: int, m: int = 4, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, p, m), **options)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((name, {}) for name in ps.schedules().index),
        ("1f1b", {"merged": True}),
        ("interleaved_1f1b", {"merged": "delayed_w", "group_size": 4}),
    ],
)
def test_any_schedule_is_the_unsplit_model(name: str, order: dict[str, Any]) -> None:
    """Steps, evaluations and outputs; messages of both directions have their own shapes."""
    if name in ("pipedream", "pipedream_2bw"):
        pytest.skip("takes older weights")
    if name in ("seq1f1b", "slimpipe"):
        pytest.skip("takes slices, see test_slices_of_unlike_sequences_are_the_unsplit_model")
    graph = ps.lower(ps.schedule(name, 2, 4, **order))
    stages, batch = language_stages(graph.n_stages), tokens()
    with pipeline(stages, graph, token_loss) as subject:
        result = subject.step(*batch)
        assert_like_whole(result.loss, stages, *batch)
        torch.testing.assert_close(subject.evaluate(*batch).loss, result.loss)
        outputs = subject.predict(batch[0])
    model = nn.Sequential(*stages)
    for output, x in zip(outputs, batch[0], strict=True):
        torch.testing.assert_close(output, model(x))
    sends = graph.op == Op.SEND_F
    timeline = result.timeline
    expected = [8 * 4 * SHAPES[m][0] * SHAPES[m][1] for m in graph.microbatch[sends].tolist()]
    assert timeline.nbytes[sends].tolist() == expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("1f1b", {"recompute": "always"}),
        ("zb_h1", {"recompute": "except_last"}),
        ("1f1b", {"overlap": False}),
        ("gpipe", {"streams": "per_microbatch"}),
        ("dualpipev", {"rendezvous": True}),
        ("1f1b", {"hosts": "per_device", "host_threads": True}),
    ],
)
def test_however_it_is_lowered(name: str, options: dict[str, Any]) -> None:
    graph = lowered(name, 2, **options)
    stages, batch = language_stages(graph.n_stages), tokens()
    with pipeline(stages, graph, token_loss) as subject:
        assert_like_whole(subject.step(*batch).loss, stages, *batch)


class Skipping(nn.Module):
    """Adds the tokens' embedding, which a skip brings to the last stage of the split model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        first = x = self.embedding(ids) * scale
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x + first)


def test_split_models_with_skips_and_keyword_arguments() -> None:
    torch.manual_seed(0)
    model, (ids, targets) = Skipping(), tokens()
    inputs = px.Microbatches([{"scale": torch.full((1,), 2.0), "ids": x} for x in ids])
    pairs = [token_loss(model(**x), y) for x, y in zip(inputs, targets, strict=True)]
    loss = sum(total for total, _ in pairs) / sum(n for _, n in pairs)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    stages = px.split(model, 3, sample=inputs[0])
    with pipeline(stages, lowered("1f1b", 3), token_loss) as subject:
        torch.testing.assert_close(subject.step(inputs, targets).loss, loss.detach())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


class Packed(nn.Module):
    """Takes packed tokens, with the length of their longest sequence as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(16, 8)

    def forward(self, ids: Tensor, bounds: Tensor, longest: int) -> Tensor:
        assert longest == int(bounds.diff().max())
        return self.layer(ids)


def test_packed_sequences_with_other_numbers_in_each_microbatch() -> None:
    """``bounds`` are one longer than the sequences are many: no dimension of samples."""
    rows = [[3, 2], [4], [1, 1, 5]]
    inputs = []
    for lengths in rows:
        bounds = torch.tensor([0, *itertools.accumulate(lengths)])
        ids = torch.arange(sum(lengths))
        inputs.append({"ids": ids, "bounds": bounds, "longest": max(lengths)})
    stages = [Packed(), nn.Linear(8, 4)]
    targets = [torch.zeros(sum(lengths), 4) for lengths in rows]
    dims = {"inputs['bounds']": None}
    with pipeline(stages, lowered("1f1b", 2, 3), mse, batch_dims=dims) as subject:
        loss = subject.step(px.Microbatches(inputs), px.Microbatches(targets)).loss
    whole = stages[1](stages[0].layer(torch.cat([x["ids"] for x in inputs])))
    torch.testing.assert_close(loss, whole.square().mean().detach())


# Losses


def test_means_are_weighted_by_weights_and_a_mean_over_tokens_warns_once() -> None:
    stages, (inputs, targets) = language_stages(2), tokens()
    with pipeline(stages, lowered("1f1b", 2), mean_loss) as subject:
        with pytest.warns(LossWarning, match=r"outputs of Microbatches have unlike shapes beyond"):
            by_samples = subject.step(inputs, targets).loss
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(subject.step(inputs, targets).loss, by_samples)
    expected, _ = whole_step(stages, inputs, targets)
    assert abs(by_samples - expected) > 1e-4
    for stage in stages:
        stage.zero_grad()
    weights = [x.numel() for x in targets]
    weighted = px.Microbatches(list(targets), weights=weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pipeline(stages, lowered("1f1b", 2), mean_loss) as subject:
            result = subject.step(inputs, weighted)
            assert_like_whole(result.loss, stages, inputs, targets)
            torch.testing.assert_close(subject.evaluate(inputs, weighted).loss, expected)


def test_means_over_samples_of_equal_length_are_exact() -> None:
    """Of unlike numbers of samples; no warning, as a mean over tokens is one over samples."""
    stages, batch = language_stages(2), tokens([(1, 5), (4, 5), (2, 5), (1, 5)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pipeline(stages, lowered("gpipe", 2), mean_loss) as subject:
            assert_like_whole(subject.step(*batch).loss, stages, *batch)


def test_sums_add_up() -> None:
    stages, (inputs, targets) = language_stages(2), tokens()

    def total(output: Tensor, target: Tensor) -> Tensor:
        return token_loss(output, target)[0]

    with pipeline(stages, lowered("1f1b", 2), total, loss_reduction="sum") as subject:
        loss = subject.step(inputs, targets).loss
    expected, _ = whole_step(stages, inputs, targets)
    torch.testing.assert_close(loss, expected * sum(x.numel() for x in targets))


@pytest.mark.parametrize(("loss_fn", "is_weighted"), [(token_loss, False), (mean_loss, True)])
def test_accumulated_steps_train_as_one(loss_fn: Any, is_weighted: bool) -> None:
    batches = [tokens(), tokens([(1, 3), (2, 8), (1, 1), (5, 2)], seed=1)]
    trained, plain = language_stages(2), nn.Sequential(*language_stages(2))
    with pipeline(trained, lowered("1f1b", 2), loss_fn, lambda p: torch.optim.SGD(p, 0.5)) as s:
        for (inputs, targets), accumulate in zip(batches, (True, False), strict=True):
            weights = [x.numel() for x in targets] if is_weighted else None
            s.step(inputs, px.Microbatches(list(targets), weights=weights), accumulate=accumulate)
    both = [[*one, *other] for one, other in zip(*batches, strict=True)]
    _, whole = whole_step([plain], *both)
    for one, start, other in zip(
        nn.Sequential(*trained).parameters(), plain.parameters(), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(one, start - 0.5 * other.grad, rtol=1e-4, atol=1e-6)


# Shapes of later steps, training


def test_every_step_may_have_other_shapes() -> None:
    stages = language_stages(2)
    with pipeline(stages, lowered("1f1b", 2), token_loss) as subject:
        for seed, shapes in enumerate((SHAPES, [(1, 2), (2, 3), (1, 1), (5, 4)], SHAPES[::-1])):
            batch = tokens(shapes, seed)
            loss = subject.step(*batch).loss
            torch.testing.assert_close(loss, whole_step(stages, *batch)[0])
        plain = torch.arange(24).reshape(4, 6) % 16
        loss = subject.step(plain, plain).loss
        torch.testing.assert_close(loss, whole_step(stages, [plain], [plain])[0])
        fewer = tuple(px.Microbatches(list(x)[:3]) for x in batch)
        torch.testing.assert_close(subject.evaluate(*fewer).loss, whole_step(stages, *fewer)[0])


def test_train_with_a_loader_counts_all_samples_and_tokens() -> None:
    data = [tokens(SHAPES, seed) for seed in range(3)]
    loader = DataLoader(data, batch_size=None)
    with pipeline(language_stages(2), lowered("1f1b", 2), token_loss) as subject:
        run = px.train(subject, loader, n_steps=3, progress=False)
        assert batch_counts(subject, *data[0]) == {"samples": 8, "tokens": 45}
    assert run.n_steps == 3


# Costs and memory


@pytest.mark.parametrize(
    ("name", "options", "unseen"),
    [
        ("1f1b", {}, [0, 0]),
        ("gpipe", {}, [0, 0]),
        # Tokens that stage 0 keeps for R are no message, so that the simulator has no bytes of
        # them: here those of all micro-batches but the last, which is being recomputed.
        ("gpipe", {"recompute": "always"}, [8 * (12 + 9 + 12), 0]),
    ],
)
def test_memory_to_the_byte(name: str, options: dict[str, Any], unseen: list[int]) -> None:
    """Bytes of each class of shapes, counted alone, give those of the whole step."""
    graph = lowered(name, 2, **options)
    with pipeline(language_stages(2), graph, token_loss) as subject:
        costs = px.profile(subject, *tokens(), n_steps=1, warm_up=0)
        measured = subject.memory(*tokens())
    rows = costs.activation_bytes
    assert rows[0][0] == rows[0][3] != rows[0][1]
    predicted = ps.simulate(graph, costs)
    weights_and_gradients = 2 * costs.per_stage("parameter_bytes", 2)
    peaks = measured.at(predicted).peak
    assert (predicted.memory.peak - weights_and_gradients + unseen).tolist() == peaks.tolist()


@pytest.mark.parametrize("share", ["all", 0.5])
def test_offloaded_bytes_of_each_shape_are_measured(share: Any) -> None:
    """Simulated steps move the bytes of each micro-batch, and hold as many, as measured ones."""
    graph, stages = lowered("gpipe", 2, offload=share), language_stages(2)
    with pipeline(stages, graph, token_loss) as subject:
        costs = px.profile(subject, *tokens(), n_steps=1, warm_up=0)
        result = subject.step(*tokens())
        assert_like_whole(result.loss, stages, *tokens())
    predicted = ps.simulate(graph, costs)
    copies = (graph.op == Op.OFFLOAD) | (graph.op == Op.RELOAD)
    assert copies.any()
    assert predicted.nbytes[copies].tolist() == result.timeline.nbytes[copies].tolist()
    row = costs.offload_bytes[0]
    assert 0 < row[0] == row[3] != row[1]


def test_graphs_that_offload_run_the_given_microbatches() -> None:
    graph, other = lowered("gpipe", 2), lowered("gpipe", 2, 2, offload="all")
    message = (
        r"offloads and has 2 micro-batches, the pipeline 4: .* the given Microbatches; measure"
    )
    with (
        pipeline(language_stages(2), graph, token_loss) as subject,
        pytest.raises(ArgumentError, match=message),
    ):
        px.measure(subject, *tokens(), graphs=[graph, other])


class NapByLength(nn.Module):
    """Sleeps for each token in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Nap(1e-3, 2e-3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[1]):
            x = self.layer(x)
        return x


def naps(n_stages: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 4), NapByLength()) for _ in range(n_stages)]


def vectors(lengths: list[int]) -> tuple[Any, Any]:
    values = [torch.ones(1, n, 4) for n in lengths]
    return px.Microbatches(values), px.Microbatches(values)


def summed(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (output - targets).square().sum(), targets.numel()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_costs_of_each_shape_are_measured(name: str) -> None:
    """Tasks sleep at least 1 ms a token in F and R, and 2 ms in B, or I and W."""
    lengths = [2, 12, 2, 6]
    graph = lowered(name, 2)
    with pipeline(naps(2), graph, summed) as subject:
        costs = px.profile(subject, *vectors(lengths), n_steps=2, warm_up=1)
    assert costs.n_microbatches == 4
    for stage in range(2):
        for field, per_token in (("forward", 1e-3), ("recompute", 1e-3), ("backward", 2e-3)):
            row = getattr(costs, field)[stage]
            assert all(x >= n * per_token for x, n in zip(row, lengths, strict=True)), field
            assert row[0] == row[2], field
            assert len(set(row)) == 3, field  # a value of its own for each shape
        assert costs.activation_bytes[stage][0] < costs.activation_bytes[stage][1]
    assert costs.output_bytes[0] == tuple(16.0 * n for n in lengths)
    assert ps.simulate(graph, costs).makespan > 12 * 3e-3 * 2


@pytest.mark.slow
def test_the_straggler_of_two_replicas_is_seen_and_predicted() -> None:
    """Replica 1 has the long sequences: replica 0 waits for it with its reduction."""
    graph = ps.lower(ps.schedule("1f1b", 1, 2), n_replicas=2)
    with pipeline(naps(1), graph, summed) as subject:
        batch = vectors([2, 2, 12, 12])
        costs = px.profile(subject, *batch, n_steps=2, warm_up=1)
        measured = subject.step(*batch).timeline
    assert np.array(costs.forward).shape == (1, 4)
    for timeline in (ps.simulate(graph, costs), measured):
        assert_straggles(timeline)


def assert_straggles(timeline: ps.Timeline) -> None:
    """Check that device 0 ends its backwards long before device 1, and reduces with it."""
    graph = timeline.graph
    ends = [timeline.end[(graph.op == Op.B) & (graph.device == d)].max() for d in range(2)]
    reduces = timeline.end[graph.op == Op.REDUCE_GRAD]
    assert ends[1] > ends[0]  # by 60 ms, less what other processes delay
    assert (reduces >= ends[1]).all()


def test_validate_takes_them_and_refuses_other_shapes() -> None:
    graphs = {"1f1b": lowered("1f1b", 2)}
    batches = [tokens(SHAPES, k) for k in range(3)]
    run = px.validate(language_stages(2), graphs, ["cpu"] * 2, token_loss, batches, n_steps=1,
                      warm_up=1)  # fmt: skip
    assert run.costs.n_microbatches == 4
    assert run.rows["1f1b"].predicted.makespan > 0
    others = [tokens(SHAPES), *(tokens([(2, 6), (1, 9), (3, 4), (2, 7)]) for _ in range(2))]
    with pytest.raises(ArgumentError, match=r"micro-batch 3 is not as in the first batch, which"):
        px.validate(language_stages(2), graphs, ["cpu"] * 2, token_loss, others, n_steps=1,
                    warm_up=1)  # fmt: skip


# Bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: px.Microbatches([]), "microbatches is empty; give one value a micro-batch"),
        (lambda: px.Microbatches(torch.zeros(4, 2)), "microbatches must be a list, got one tensor"),
        (lambda: px.Microbatches([3, 4]), "microbatches[0] is int without a tensor"),
        (lambda: px.Microbatches([torch.ones(1), None]), "microbatches[1] has value alone, micro"),
        (lambda: px.Microbatches([{"a": torch.ones(1)}, {"b": torch.ones(1)}]), "tensor ['b'], mi"),
        (lambda: px.Microbatches([torch.ones(1, 3), torch.ones(1, 0)]), "microbatches[1] is empty"),
        (lambda: px.Microbatches([{"a": torch.ones(0)}, {"a": torch.ones(1)}]), "[0]['a'] is empt"),
        (lambda: px.Microbatches([torch.ones(1)], weights=[1, 2]), "weights must be 1 finite numb"),
        (lambda: px.Microbatches([torch.ones(1)], weights=[0]), "weights must be 1 finite numbers"),
        (lambda: px.Microbatches([torch.ones(1)], weights="1"), "weights must be a list, got '1'"),
        (lambda: px.Microbatches.split(torch.ones(5, 2), [2, 2]), "lengths add up to 4, but batch"),
        (lambda: px.Microbatches.split(torch.ones(5, 2), [5, 0]), "lengths must be whole numbers"),
        (lambda: px.Microbatches.split(torch.ones(5, 2), [2.5, 2.5]), "lengths must be whole numb"),
        (lambda: px.Microbatches.split(torch.ones(1, 5), [2, 3]), "no tensor of the batch has mor"),
        (lambda: px.Microbatches.split(torch.ones(5), [2, 3], dim=1), "dim=1 is no dimension of b"),
        (lambda: px.Microbatches.split({"n": 3}, [1]), "batch must hold a tensor, got dict"),
    ],
)  # fmt: skip
def test_bad_microbatches(make: Any, message: str) -> None:
    with pytest.raises(PipeError, match=re.escape(message)):
        make()


def test_batches_that_are_refused() -> None:
    inputs, targets = tokens()
    with pipeline(language_stages(2), lowered("1f1b", 2), token_loss) as subject:
        for x, y, message in (
            (px.Microbatches(list(inputs)[:3]), targets,
             "inputs have 3 Microbatches, but a step has 4; give as many, or lower a schedule"),
            (inputs, px.Microbatches([*targets, targets[0]]), "targets have 5 Microbatches, but"),
            (inputs, targets[0], "inputs are Microbatches, but targets are Tensor; give px."),
            (inputs[0], targets, "targets are Microbatches, but inputs are Tensor; give px."),
            (inputs, px.Microbatches([x[:1] for x in targets]),
             "micro-batch 0: inputs have 2 samples, targets 1; give as many"),
            (inputs.map(lambda x: x[:0]), targets.map(lambda x: x[:0]),
             "micro-batch 0 has no samples; leave it out"),
            (px.Microbatches(list(inputs), weights=[1, 1, 1, 1]),
             px.Microbatches(list(targets), weights=[1, 1, 1, 2]),
             "inputs and targets have different weights; give them with the targets"),
            (inputs.map(lambda x: x.float().requires_grad_()), targets,
             "inputs[0] require gradients"),
        ):  # fmt: skip
            for call in (subject.step, subject.check_batch, subject.memory):
                with pytest.raises(ArgumentError, match=re.escape(message)):
                    call(x, y)
        many = px.Microbatches(list(inputs) * 2), px.Microbatches(list(targets) * 2)
        with pytest.raises(ArgumentError, match=r"have 8 Microbatches a replica; give both the sa"):
            subject.evaluate(*many)
        with pytest.raises(ArgumentError, match=r"have 3 or 4 Microbatches a replica; give both t"):
            subject.evaluate(inputs, px.Microbatches(list(targets)[:3]))
        weighted = px.Microbatches(list(targets), weights=[1, 2, 3, 4])
        with pytest.raises(PipeError, match=r"loss_fn returned \(sum, count\), and Microbatches"):
            subject.step(inputs, weighted)
    with (
        pipeline(language_stages(2), lowered("1f1b", 2), mean_loss, loss_reduction="sum") as other,
        pytest.raises(ArgumentError, match=r"weights, which are those of a mean, but loss_reduct"),
    ):
        other.step(inputs, weighted)


def sliced(positions: Sequence[Sequence[int]]) -> tuple[Any, Any, Any, Any]:
    """Return inputs and targets of slices with these positions, and those of whole sequences."""
    wholes = tokens([(2, sum(row)) for row in positions])
    cuts = (
        px.Microbatches([
            part for x, row in zip(whole, positions, strict=True) for part in x.split(list(row), 1)
        ])
        for whole in wholes
    )  # fmt: skip
    return (*cuts, *wholes)


@pytest.mark.parametrize("name", ["seq1f1b", "slimpipe"])
@pytest.mark.parametrize("loss", [token_loss, mean_loss])
@pytest.mark.filterwarnings("error:outputs of Microbatches have unlike shapes")
def test_slices_of_unlike_sequences_are_the_unsplit_model(name: str, loss: Any) -> None:
    """One long sequence, and short ones; slices of a sequence differ too. A mean counts tokens."""
    inputs, targets, *wholes = sliced([[8, 5], [1, 2], [3, 1], [2, 2]])
    graph = ps.lower(ps.schedule(name, 2, 8, n_slices=2))
    stages = language_stages(graph.n_stages)
    with pipeline(stages, graph, loss) as subject:
        result = subject.step(inputs, targets)
        assert_like_whole(result.loss, stages, *wholes)
        torch.testing.assert_close(subject.evaluate(inputs, targets).loss, result.loss)
        subject.check_batch(inputs, targets)
        outputs = subject.predict(inputs)
        first = subject.evaluate(*(px.Microbatches(list(x)[:2]) for x in (inputs, targets)))
        with pytest.raises(ArgumentError, match="have 3 Microbatches a replica; give both the sa"):
            subject.evaluate(*(px.Microbatches(list(x)[:3]) for x in (inputs, targets)))
        message = "are Microbatches, and the graph has n_slices=2 slices a sequence"
        with pytest.raises(ArgumentError, match=message):
            px.profile(subject, inputs, targets)
    model = nn.Sequential(*stages)
    for k, x in enumerate(wholes[0]):
        torch.testing.assert_close(torch.cat(outputs[2 * k : 2 * k + 2], 1), model(x))
    torch.testing.assert_close(first.loss, mean_loss(model(wholes[0][0]), wholes[1][0]))


def test_slices_say_their_sizes_themselves() -> None:
    """Sizes of the pipeline's slices are for batches that it cuts."""
    inputs, targets, *wholes = sliced([[3, 1]] * 4)
    stages, graph = language_stages(2), ps.lower(ps.schedule("seq1f1b", 2, 8, n_slices=2))
    with pipeline(stages, graph, token_loss, slice_sizes=[3, 1]) as subject:
        assert_like_whole(subject.step(inputs, targets).loss, stages, *wholes)


def test_cuda_graphs_refuse_them() -> None:
    with pipeline(language_stages(2), lowered("1f1b", 2), token_loss) as subject:
        subject._runner.__class__ = CapturingRunner  # as with cuda_graph=True, on a GPU
        with pytest.raises(ArgumentError, match=r"and cuda_graph=True repeats a step of one shape"):
            subject.step(*tokens())


def test_gpipe_refuses_them() -> None:
    module = px.GPipe(nn.Sequential(*language_stages(2)), [1, 1], chunks=4)
    with pytest.raises(PipeError, match="Microbatches"):
        module(tokens()[0])


def test_split_cuts_along_any_dimension() -> None:
    batch = {"ids": torch.arange(6).reshape(1, 6), "scale": torch.tensor(2.0), "name": "x"}
    cut = px.Microbatches.split(batch, [1, 3, 2], dim=1)
    assert [x["ids"].tolist() for x in cut] == [[[0]], [[1, 2, 3]], [[4, 5]]]
    assert all(x["scale"] is batch["scale"] and x["name"] == "x" for x in cut)
    assert len(cut) == 3
    assert repr(cut) == "<3 Microbatches: (1, 1), (); (1, 3), (); (1, 2), ()>"
