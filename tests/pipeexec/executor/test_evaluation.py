"""Evaluations and predictions: equal to the unsplit model, without a trace in the training."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from process_errors import assert_errors, errors_of, make
from ranks import Ranks
from small_pipelines import Faulty, assert_same, cut, data, dense, mse, orders, pipeline, sgd
from split_models import WORDS, Language
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.thread_settings import one_thread
from pipeexec.distributed import Processes
from pipeexec.embedding.stage import EmbeddingStage
from pipeexec.executor import EvaluationResult
from pipesim.errors import ArgumentError, ExecutionError, RandomnessWarning, StageError
from pipesim.graph.tasks import Tasks

CASES = {
    "gpipe": (4, {}),
    "1f1b": (4, {"recompute": "always"}),
    "interleaved_1f1b": (2, {"streams": "single"}),
    "zbv": (2, {"hosts": "per_device", "host_threads": True}),
    "chimera": (4, {}),
    "pipedream": (4, {}),
}


def noisy(n: int = 4) -> list[nn.Sequential]:
    """Return stages that evaluate differently than they train."""
    torch.manual_seed(1)
    return [
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Tanh())
        for _ in range(n)
    ]


def expected(stages: list[Any], inputs: Tensor, sizes: list[int]) -> Tensor:
    """Return the output of the unsplit model in evaluation mode, micro-batch by micro-batch."""
    whole = nn.Sequential(*copy.deepcopy(stages)).eval()
    with torch.no_grad(), one_thread():
        return torch.cat([whole(x.clone()) for x in inputs.split(sizes)])


def actions(graph: ps.TaskGraph) -> Counter[str]:
    """Return the tasks of a graph as text."""
    return Counter(str(graph.task(k)) for k in range(len(graph)))


@pytest.mark.filterwarnings("ignore::pipesim.errors.BatchNormWarning")
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_unsplit_model(name: str) -> None:
    """In each schedule, before and after a step, with running statistics and without dropout."""
    n_devices, options = CASES[name]
    schedule, stages, (inputs, targets) = ps.schedule(name, n_devices, 4), noisy(), data(13)
    graph = ps.lower(schedule, **options)
    with pipeline(stages, graph, mse, sgd) as subject:
        for _ in range(2):
            output = subject.predict(inputs)
            result = subject.evaluate(inputs, targets)
            assert torch.equal(output, expected(stages, inputs, [4, 3, 3, 3]))
            torch.testing.assert_close(result.loss, mse(output, targets))
            assert result.timeline.complete
            subject.step(inputs, targets)
    assert result.peak_held == (0,) * n_devices
    simulated = ps.lower(schedule, **options, forward_only=True)
    assert actions(result.timeline.graph) == actions(simulated)


@pytest.mark.filterwarnings("ignore::pipesim.errors.BatchNormWarning")
@pytest.mark.parametrize("optimizer", [sgd, None])
@pytest.mark.parametrize("name", ["1f1b", "chimera", "pipedream"])
def test_training_is_bit_equal_with_and_without(name: str, optimizer: Any) -> None:
    """Weights, buffers, gradients, momentum, random numbers and modes are as without evaluation."""
    inputs, targets = data(8)
    results = []
    for evaluates in (False, True):
        torch.manual_seed(3)
        stages = noisy()
        stages[1][2].eval()  # one module has its own mode
        graph = ps.lower(ps.schedule(name, 4, 4))
        losses = []
        with pipeline(stages, graph, mse, optimizer) as subject:
            for _ in range(3):
                state = torch.get_rng_state()
                if evaluates:
                    subject.evaluate(*data(5, seed=1))
                    subject.predict(inputs)
                assert torch.equal(torch.get_rng_state(), state)
                losses.append(subject.step(inputs, targets).loss)
            assert subject.n_steps == 3
        assert [x.training for x in stages[1]] == [True, True, False, True]
        results.append((losses, stages))
    (losses, stages), (other_losses, others) = results
    assert torch.equal(torch.stack(losses), torch.stack(other_losses))
    assert_same(stages, others)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_batches_of_few_samples_have_fewer_microbatches(n: int) -> None:
    """Each micro-batch has one sample at least; the loss is the mean over samples."""
    stages, (inputs, targets) = list(cut(dense(2), [1, 1])), data(n)
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 4))) as subject:
        result = subject.evaluate(inputs, targets)
        assert result.timeline.graph.n_microbatches == min(n, 4)
        sizes = [len(x) for x in torch.arange(n).tensor_split(min(n, 4))]
        assert torch.equal(subject.predict(inputs), expected(stages, inputs, sizes))
        torch.testing.assert_close(result.loss, mse(expected(stages, inputs, sizes), targets))


def test_fewer_samples_than_paths() -> None:
    """Each path of a bidirectional pipeline needs one, and each replica."""
    stages = list(cut(dense(2), [1, 1]))
    with pipeline(stages, ps.lower(ps.schedule("chimera", 2, 4))) as subject:
        assert subject.predict(data(2)[0]).shape == (2, 16)
        with pytest.raises(ArgumentError, match="1 samples for 1 replicas of 2 paths"):
            subject.predict(data(1)[0])


@pytest.mark.parametrize("layout", ["replica_major", "stage_major"])
def test_replicas_in_the_order_of_the_batch(layout: Any) -> None:
    """Samples of the second replica come after those of the first."""
    stages, (inputs, targets) = list(cut(dense(2), [1, 1])), data(9)
    graph = ps.lower(ps.schedule("1f1b", 2, 2), n_replicas=2, layout=layout, shard_optimizer=False,
                     grad_sync="bucketed")  # fmt: skip
    with pipeline(stages, graph, mse, sgd) as subject:
        subject.step(inputs, targets)
        output = subject.predict(inputs)
        assert torch.equal(output, expected(stages, inputs, [3, 2, 2, 2]))
        torch.testing.assert_close(subject.evaluate(inputs, targets).loss, mse(output, targets))


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return the sum over the positive targets, and their number."""
    chosen = target > 0
    return (output - target)[chosen].square().sum(), int(chosen.sum())


def total(output: Tensor, target: Tensor) -> Tensor:
    """Return a sum over samples."""
    return (output - target).square().sum()


@pytest.mark.parametrize("loss_fn", [squares, total])
def test_losses_are_combined_as_those_of_steps(loss_fn: Callable[..., Any]) -> None:
    """Sums, and sums with counts: as the unsplit model, and as the step that follows."""
    stages, (inputs, targets) = list(cut(dense(2), [1, 1])), data(7)
    reduction: Any = "sum" if loss_fn is total else "mean"
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    with pipeline(stages, graph, loss_fn, sgd, loss_reduction=reduction) as subject:
        result = subject.evaluate(inputs, targets)
        step = subject.step(inputs, targets)
    assert torch.equal(result.loss, step.loss)
    assert all(map(torch.equal, result.losses, step.losses))


class Pair(NamedTuple):
    """Two values."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of a model."""

    logits: Tensor
    others: Any = None


class Nested(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make, self.layer = make, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


def predicted(make: Callable[[Tensor], Any], n_microbatches: int = 2) -> tuple[Any, Tensor]:
    """Return the prediction of a last stage that returns ``make(x)``, and the whole ``x``."""
    stages, (inputs, _) = [nn.Identity(), Nested(make)], data(5)
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 2, n_microbatches))) as subject:
        output = subject.predict(inputs)
        stages[1].make = lambda x: x
        return output, subject.predict(inputs)


def test_outputs_are_nested_as_the_models() -> None:
    """Dicts, dataclasses, tuples, lists and None, in any nesting; equal values stay as they are."""
    output, x = predicted(
        lambda x: {
            "pair": Pair(x, [x * 2, None]),
            "output": Output(x + 1, (x.sum(1), "text", 3)),
            "bias": torch.ones(7, 2),
        }
    )
    assert torch.equal(output["pair"].first, x)
    assert torch.equal(output["pair"].second[0], x * 2)
    assert output["pair"].second[1] is None
    assert isinstance(output["output"], Output)
    assert torch.equal(output["output"].logits, x + 1)
    assert torch.equal(output["output"].others[0], x.sum(1))
    assert output["output"].others[1:] == ("text", 3)
    assert torch.equal(output["bias"], torch.ones(7, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: {"loss": x.sum()}, r"output\['loss'\] of the last stage has shapes \(\)"),
        (lambda x: (x, x.T), r"output\[1\] of the last stage has shapes \(16, 3\), \(16, 2\)"),
        (lambda x: [len(x)], r"output\[0\] of the last stage has different values .* 3 and 2"),
        (lambda x: {len(x): x}, r"different nesting .* output\[3\] and output\[2\]; "),
        (lambda x: (x,) * len(x), r"different nesting .* output\[2\] and nothing more; "),
        (lambda x: x if len(x) > 2 else (x,), r"different nesting .* output and output\[0\]; "),
        (lambda x: Output(x, object()), r"output\.others of the last stage is object, which"),
    ],
)
def test_outputs_that_cannot_be_joined(make: Callable[[Tensor], Any], message: str) -> None:
    """The error names the value; one micro-batch alone passes as it is."""
    with pytest.raises(ExecutionError, match=message):
        predicted(make)
    predicted(make, n_microbatches=1)


def test_output_of_a_split_model() -> None:
    """The model's own dict, from a dict of inputs, without dropout."""
    torch.manual_seed(0)
    model = Language(dropout=0.5)
    batch = {"words": torch.randint(WORDS, (5, 6)), "mask": torch.ones(5, 6)}
    stages = px.split(model, 2, sample=batch)
    graph = ps.lower(ps.schedule("1f1b", 2, 2))
    with px.Pipeline(
        stages, graph, ["cpu"] * 2, lambda output, _: output["logits"].sum()
    ) as subject:
        output = subject.predict(batch)
    assert list(output) == ["logits"]
    with torch.no_grad():
        torch.testing.assert_close(output, copy.deepcopy(model).eval()(**batch))


class Watching(nn.Module):
    """Notes modes, and the intermediate tensors that are alive; changes buffers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.modes: list[tuple[bool, bool]] = []
        self.hidden: list[weakref.ref[Tensor]] = []
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = x.sum()
        hidden = self.layer(x)
        self.modes.append((self.training, hidden.requires_grad))
        self.hidden.append(weakref.ref(hidden))
        self.most = max(self.most, sum(ref() is not None for ref in self.hidden))
        return hidden.sin()


def test_nothing_is_kept_and_buffers_are_restored() -> None:
    """Neither activations of other micro-batches, nor values that a forward writes."""
    stages, (inputs, _) = [Watching(), Watching()], data(8)
    buffers = [stage.last for stage in stages]
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 4)), mse) as subject:
        subject.predict(inputs)
    for stage, buffer in zip(stages, buffers, strict=True):
        assert stage.count == 0
        assert stage.last is buffer
        assert stage.modes == [(False, False)] * 4
        assert stage.most == 1
        assert stage.training
    gc.collect()
    assert all(ref() is None for stage in stages for ref in stage.hidden)


class Late(nn.Module):
    """Draws random numbers, but not in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.is_first = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.is_first = False
            return x
        return x + torch.rand(())


def test_random_state_is_restored() -> None:
    """A model that draws where its first forward did not is named; training is as without it."""
    stages = [nn.Linear(16, 16), Late()]
    state = torch.get_rng_state()
    with pipeline(stages, ps.lower(ps.schedule("gpipe", 2, 2))) as subject:
        with pytest.warns(RandomnessWarning):
            subject.predict(data(4)[0])
        assert torch.equal(torch.get_rng_state(), state)
        first, second = (subject.predict(data(4)[0]) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_under_the_callers_modes(mode: Any) -> None:
    """Steps refuse them; batches that are made under them are taken."""
    stages = list(cut(dense(2), [1, 1]))
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 2)), mse, sgd) as subject:
        with mode():
            inputs, targets = data(4)
            output = subject.predict(inputs)
            loss = subject.evaluate(inputs, targets).loss
        assert torch.equal(output, expected(stages, data(4)[0], [2, 2]))
        assert not output.requires_grad
        assert torch.isfinite(loss)
        subject.step(*data(4))


def test_autocast_holds() -> None:
    """As in a step."""
    stages = [nn.Linear(16, 16), nn.Linear(16, 16)]
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 2))) as subject:
        with torch.autocast("cpu", torch.bfloat16):
            assert subject.predict(data(4)[0]).dtype == torch.bfloat16
        assert subject.predict(data(4)[0]).dtype == torch.float32


def test_goes_on_after_a_failure() -> None:
    """The error is that of a step; modes are restored, and training goes on."""
    faulty = Faulty(ValueError("broken"), forward=1)
    stages = [nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), faulty)]
    inputs, targets = data(4)
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 4)), mse, sgd) as subject:
        with pytest.raises(StageError, match=r"1F1 failed .* broken") as caught:
            subject.evaluate(inputs, targets)
        assert caught.value.timeline.graph.forward_only
        assert all(stage.training for stage in stages)
        faulty.repair()
        assert torch.equal(subject.predict(inputs), expected(stages, inputs, [1] * 4))
        subject.step(inputs, targets)


def test_refused_calls() -> None:
    """Batches without targets, graphs without a schedule, and closed pipelines."""
    stages, (inputs, targets) = list(cut(dense(2), [1, 1])), data(4)
    subject = pipeline(stages, ps.lower(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")))
    with pytest.raises(ArgumentError, match="targets are None"):
        subject.evaluate(inputs, None)
    with pytest.raises(ArgumentError, match="inputs are None"):
        subject.predict(None)
    with pytest.raises(ArgumentError, match="inputs have 4 samples, targets 3"):
        subject.evaluate(inputs, targets[:3])
    with pytest.raises(ArgumentError, match="too few"):
        subject.predict(inputs[:0])
    subject.close()
    with pytest.raises(ExecutionError, match="closed"):
        subject.predict(inputs)
    tasks = Tasks(op=[0, 1], device=[0, 0], stage=[0, 0], microbatch=[0, 0], stream=[0, 0])
    with (
        pipeline(stages[:1], ps.TaskGraph.build(tasks)) as other,
        pytest.raises(ArgumentError, match=r"was not made by pipesim\.lower"),
    ):
        other.evaluate(inputs, targets)


def test_pipeline_of_a_forward_only_graph() -> None:
    """It predicts and evaluates, and cannot train."""
    stages, (inputs, targets) = list(cut(dense(2), [1, 1])), data(4)
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 2), forward_only=True)) as subject:
        assert torch.equal(subject.predict(inputs), expected(stages, inputs, [2, 2]))
        with pytest.raises(ExecutionError, match="lowered with forward_only=True"):
            subject.step(inputs, targets)


def test_with_another_graph() -> None:
    """Each pipeline evaluates with its own schedule."""
    stages, (inputs, targets) = list(cut(dense(2), [1, 1])), data(6)
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 2, 2))) as subject:
        first = subject.evaluate(inputs, targets)
        other = subject.with_graph(ps.lower(ps.schedule("gpipe", 2, 3)))
        second = other.evaluate(inputs, targets)
        assert first.timeline.graph.n_microbatches == 2
        assert second.timeline.graph.n_microbatches == 3
        assert type(subject.gather(first)) is EvaluationResult


def over_processes(processes: Processes, name: str, options: dict[str, Any]) -> Any:
    """Train and evaluate with batches of several sizes; return losses and outputs."""
    torch.manual_seed(0)
    stages: list[Any] = noisy()
    graph = ps.lower(ps.schedule(name, 4, 4), **options)
    with px.Pipeline(stages, graph, ["cpu"] * 2, mse, sgd, processes=processes) as subject:
        rows: list[Any] = []
        for n in (8, 5, 3, 8):
            inputs, targets = data(n)
            result = subject.evaluate(
                inputs if processes.rank == 0 or name == "chimera" else None,
                targets if processes.rank == 1 or name == "chimera" else None,
            )
            gathered = subject.gather(result)
            assert gathered.timeline.complete
            try:
                output = subject.predict(inputs)
            except ArgumentError as error:
                output = str(error)
            rows.append((gathered.loss, output))
            subject.step(*data(8))
        return rows, [stages[k].state_dict() for k in (2 * processes.rank, 2 * processes.rank + 1)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
@pytest.mark.filterwarnings("ignore::pipesim.errors.BatchNormWarning")
def test_over_two_processes(two_ranks: Ranks) -> None:
    """Batches of different sizes between steps: as in one process, in both."""
    first, second = two_ranks.run(over_processes, name="1f1b", options={})
    torch.manual_seed(0)
    stages: list[Any] = noisy()
    with pipeline(stages, ps.lower(ps.schedule("1f1b", 4, 4)), mse, sgd) as subject:
        for n, (loss, nothing), (same, output) in zip(
            (8, 5, 3, 8), first[0], second[0], strict=True
        ):
            inputs, targets = data(n)
            assert torch.equal(loss, subject.evaluate(inputs, targets).loss)
            assert torch.equal(same, loss)
            assert nothing is None
            assert torch.equal(output, subject.predict(inputs))
            subject.step(*data(8))
    for stage, state in zip(stages, first[1] + second[1], strict=True):
        assert all(map(torch.equal, stage.state_dict().values(), state.values()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
@pytest.mark.filterwarnings("ignore::pipesim.errors.BatchNormWarning")
def test_bidirectional_over_two_processes(two_ranks: Ranks) -> None:
    """The loss comes from both; no process has the output of the whole batch."""
    first, second = two_ranks.run(over_processes, name="chimera", options={})
    for (loss, refusal), (same, other) in zip(first[0], second[0], strict=True):
        assert torch.equal(loss, same)
        assert "last stages in several processes" in refusal
        assert refusal == other


def replicas(processes: Processes) -> Any:
    """Evaluate with a sharded embedding and one replica a process."""
    torch.manual_seed(0)
    table = px.ShardedEmbedding(12, 16)
    head = nn.Linear(16, 16)
    graph = ps.lower(ps.schedule("gpipe", 2, 2),
                     n_replicas=2, sharded=0)  # fmt: skip
    stages = [EmbeddingStage(table), head]
    keys, n = torch.arange(12).reshape(2, 6)[processes.rank], 3 + processes.rank
    with px.Pipeline(stages, graph, ["cpu"] * 2, mse, sgd, processes=processes) as subject:
        output = subject.predict(keys)
        subject.step(keys, torch.zeros(6, 16))
        loss = subject.gather(subject.evaluate(keys[:n], torch.zeros(n, 16))).loss
        after = subject.predict(keys[:n])
    return output, loss, after, head.weight.detach()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
def test_sharded_embedding_over_two_processes(two_ranks: Ranks) -> None:
    """Each process predicts its own samples, as many as it has; the loss is that of all."""
    first, second = two_ranks.run(replicas)
    assert first[0].shape == second[0].shape == (6, 16)
    after = torch.cat([first[2], second[2]])
    torch.testing.assert_close(first[1], mse(after, torch.zeros(7, 16)))
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[3], second[3])


class Failing(nn.Linear):
    """Raises in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not x.is_meta:
            raise ValueError("on purpose")
        return super().forward(x)


def failing_stage(processes: Processes) -> None:
    """Train a step; then the stage of rank 1 fails."""
    with make(processes, stages=[nn.Linear(16, 16), Failing(16, 16)]) as subject:
        subject.step(*data(8))
        subject.gather(subject.evaluate(*data(6)))


def too_small(processes: Processes) -> None:
    """Each replica of two needs a sample; that of rank 1 has none."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2)
    stages = list(cut(dense(2), [1, 1]))
    with px.Pipeline(stages, graph, ["cpu"] * 2, mse, processes=processes) as subject:
        subject.predict(data(2)[0][: 2 - 2 * processes.rank])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
def test_errors_in_two_processes(two_ranks: Ranks) -> None:
    """Every process ends at once, and names the task and the mistake.

    Rank 0 does not wait for the last stage, unless it asks for the loss.
    """
    text = (
        r"rank 1, step 1: 1F0 failed \(device 1, stage 1, micro-batch 0\): ValueError: on purpose"
    )
    assert_errors(
        errors_of(failing_stage, two_ranks), (f"PeerError: {text}", f"StageError: {text}")
    )
    text = "ArgumentError: inputs have 0 samples"
    assert_errors(errors_of(too_small, two_ranks), (f"PeerError: rank 1 stopped: {text}", text))


def many_shapes(processes: Processes) -> int:
    """Predict batches of more shapes than processes keep messages for, twice."""
    stages = list(cut(dense(2), [1, 1]))
    with make(processes, stages=stages) as subject:
        for n in (*range(1, 36), 1, 35, 2):
            output = subject.predict(data(n)[0])
            assert output is None or output.shape == (n, 16)
        reports = subject._evaluator._runners[4].reports
        assert reports is not None
        return len(reports._messages)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
def test_many_shapes_in_two_processes(two_ranks: Ranks) -> None:
    """Messages of earlier shapes are dropped, and agreed on again."""
    assert two_ranks.run(many_shapes) == [32, 32]
