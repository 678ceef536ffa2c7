"""Split backwards: I gives the input's gradient and leaves the weights' to W, which adds them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small_pipelines import assert_same, call_within, cut, dense, orders, pipeline, unsplit
from split_backward_cases import (
    CASES,
    MIXED,
    TiedEmbedding,
    X,
    frozen,
    normal,
    tokens_of_samples,
)
from strategies import custom_schedules
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.gpt import gpt
from pipeexec.devices.thread_settings import current_autocast, one_thread
from pipeexec.stages.activations import ActivationCounter, ActivationMeter
from pipeexec.stages.stage import Stage
from pipesim.errors import StageError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")

CPU = torch.device("cpu")


def stage(module: nn.Module, index: int = 1) -> Stage:
    return Stage(module, index, CPU, ActivationCounter())


def run(subject: Stage, inputs: tuple[Tensor, ...], how: str, microbatch: int = 0) -> list[Any]:
    """Run one micro-batch; return outputs and gradients of the inputs."""
    split, again = "W" in how, "R" in how
    outputs = subject.forward(microbatch, inputs, 5, again, split)
    if again:
        subject.recompute(microbatch, 5, split)
    gradients = tuple(
        normal(*x.shape, seed=2).to(x.dtype) if x.is_floating_point() or x.is_complex() else None
        for x in outputs
    )
    if not split:
        return [*outputs, *subject.backward(microbatch, gradients)]
    input_gradients = subject.input_grad(microbatch, gradients)
    subject.weight_grad(microbatch)
    return [*outputs, *input_gradients]


def of_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


# Modules


@pytest.mark.slow
@pytest.mark.parametrize(("how", "index"), [("FRIW", 0), ("FIW", 1)])
@pytest.mark.parametrize("name", CASES)
def test_i_and_w_are_b(name: str, how: str, index: int) -> None:
    """Outputs, gradients and buffers to the last bit, in the second micro-batch too.

    But for gradients of which I adds one part and W another, which are rounded in another order.
    """
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    same = copy.deepcopy(module)
    split, whole = stage(module, index), stage(same, index)
    with one_thread():
        for microbatch in range(2):
            actual = run(split, inputs, how, microbatch)
            expected = run(whole, inputs, how.replace("IW", "B"), microbatch)
            for a, b in zip(actual, expected, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
            if name not in MIXED:
                assert_same([module], [same])
            expected_gradients = of_parameters(same)
            for key, gradient in of_parameters(module).items():
                torch.testing.assert_close(gradient, expected_gradients[key])
                if gradient is not None:
                    assert gradient.stride() == expected_gradients[key].stride()
    assert split.counter.current == 0


AUTOCAST = ["linear", "linear of a sequence", "linear of one sample", "in place", "embedding",
            "tied embedding", "tied", "products", "transformer", "convolutions 1d",
            "convolutions 2d", "batch norm", "attention", "partly without gradients", "doubles",
            "half", "frozen weight", "frozen bias"]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", AUTOCAST)
def test_i_and_w_are_b_under_autocast(name: str, dtype: torch.dtype) -> None:
    """To the last bit: weights are cast in F, and their gradients in W."""
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    same = copy.deepcopy(module)
    split, whole = stage(module), stage(same)
    with torch.autocast("cpu", dtype):
        for subject in (split, whole):
            subject.begin_step(current_autocast())
    with one_thread():
        actual, expected = run(split, inputs, "FIW"), run(whole, inputs, "FB")
    for a, b in zip(actual, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert_same([module], [same])


# What waits


#: Parameters that wait for W, of the cases where not all of them do, or none.
WAITS = {
    "linear of one sample": set(),
    "embedding with a norm": set(),
    "sparse embedding": set(),
    "convolution of one sample": set(),
    "batch norm": {"0.weight", "0.bias", "2.weight", "2.bias"},
    "attention": set(),
    "recurrent": {"head.weight", "head.bias"},
    "subclass": set(),
    "complex": set(),
    "weight norm": set(),
    "unused": {"used.weight", "used.bias"},
    "frozen weight": {"3.weight", "3.bias"},
    "frozen bias": {"0.weight", "2.weight", "3.weight", "3.bias"},
    "frozen": set(),
    "checkpointed": {"outer.weight", "outer.bias"},
    "checkpointed, reentrant": {"outer.weight", "outer.bias"},
    "uneven padding": set(),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["linear", "linear of a sequence", "embedding", "tied embedding",
                                  "convolutions 1d", "convolutions 2d", "convolutions 3d",
                                  *WAITS])  # fmt: skip
def test_what_waits_has_no_gradient_before_w(name: str, autocast: bool) -> None:
    """And nothing else gets one in W."""
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    subject = stage(module)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        subject.begin_step(current_autocast())
    try:
        (output,) = subject.forward(0, inputs, 5, False, True)
    except RuntimeError as error:  # of bfloat16, which not every processor has
        if "primitive descriptor" in str(error):
            pytest.skip("oneDNN has no such layer for this processor")
        raise
    assert all(gradient is None for gradient in of_parameters(module).values())
    subject.input_grad(0, (torch.ones_like(output),))
    before = {key for key, gradient in of_parameters(module).items() if gradient is not None}
    subject.weight_grad(0)
    after = {key for key, gradient in of_parameters(module).items() if gradient is not None}
    everything = {key for key, p in module.named_parameters() if p.requires_grad}
    assert after - before == WAITS.get(name, everything)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_called_once(kind: str) -> None:
    """In I, since a parameter with hooks does not wait."""
    module = nn.Linear(8, 8)
    values: list[Tensor | None] = []
    watches = kind == "register_hook"
    getattr(module.weight, kind)(lambda x: values.append(x if watches else x.grad.clone()))
    run(stage(module), (X,), "FIW")
    (gradient,) = values
    assert gradient is not None
    assert torch.equal(gradient, module.weight.grad)


def test_gradients_of_several_microbatches_add_up() -> None:
    """In the order of their W, whatever that of their I."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    same = copy.deepcopy(module)
    split, whole = stage(module), stage(same)
    batches = [normal(3, 8, seed=seed) for seed in range(3)]
    with one_thread():
        for k in range(3):
            split.forward(k, (batches[k],), 5, False, True)
            whole.forward(k, (batches[k],), 5, False)
        for k in (1, 0, 2):
            split.input_grad(k, (torch.ones(3, 8),))
        for k in (2, 0, 1):
            split.weight_grad(k)
            whole.backward(k, (torch.ones(3, 8),))
    assert_same([module], [same])


def test_a_tied_weight_needs_one_sum() -> None:
    """Its uses are added to each other first, then to what there was: as autograd does."""
    module = TiedEmbedding()
    same = copy.deepcopy(module)
    for model in (module, same):
        model.table.weight.grad = torch.full((6, 8), 1e4)
    with one_thread():
        run(stage(module), tokens_of_samples(), "FIW")
        run(stage(same), tokens_of_samples(), "FB")
    assert_same([module], [same])


def test_an_input_that_is_changed_too_early_is_an_error() -> None:
    """As it is without a split: its old value is needed."""

    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y = self.linear(x)
            x.zero_()
            return y

    subject = stage(Early())
    subject.forward(0, (X,), 5, False, True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        subject.input_grad(0, (X,))


def test_arguments_that_torch_refuses_are_torch_s_to_refuse() -> None:
    """With its own message, as without a split."""

    class Wrong(nn.Module):
        def __init__(self, call: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
            super().__init__()
            self.weight, self.call = nn.Parameter(torch.ones(4, 4, 3)), call

        def forward(self, x: Tensor) -> Tensor:
            return self.call(x, self.weight)

    wrong: list[Callable[[Tensor, nn.Parameter], Tensor]] = [
        lambda x, w: F.linear(x, w[0].detach().requires_grad_()),
        lambda x, w: F.conv1d(x, w, groups=0),
        lambda x, w: F.conv1d(x, w, padding="same", stride=2),
        lambda x, w: F.conv1d(x, w, None, 1, 0, 1, 1, 1),  # type: ignore[call-arg]
        lambda x, w: F.conv1d(x, w, stride="a"),  # type: ignore[arg-type]
        lambda x, w: F.linear("x", w),  # type: ignore[arg-type]
        lambda x, w: torch.mm(x, w),
        lambda x, w: F.embedding(x, w),
    ]
    for call in wrong:
        messages = []
        for split in (False, True):
            with pytest.raises(Exception) as caught:  # noqa: PT011
                stage(Wrong(call)).forward(0, (normal(2, 4, 8),), 5, False, split)
            messages.append((type(caught.value), str(caught.value).split("\n")[0]))
        assert messages[0] == messages[1]


# Bytes held


def metered(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[int]:
    """Return bytes held after F, I and W, in a second micro-batch: a first is given copies."""
    subject = stage(module)
    run(subject, inputs, "FIW")
    subject.meter = meter = ActivationMeter([*module.parameters(), *module.buffers()])
    (output,) = subject.forward(0, inputs, 5, False, True)
    levels = [meter.current]
    gradient = torch.ones_like(output)
    subject.input_grad(0, (gradient,))
    levels.append(meter.current)
    assert meter.deferred_peak == meter.current
    subject.weight_grad(0)
    return [*levels, meter.current]


@pytest.mark.parametrize(
    ("module", "after_f", "after_i"),
    [
        (nn.Linear(8, 4), 8, 8 + 4),  # input, gradient of the output
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh()), 8 + 8, 8 + 8),
        (nn.Sequential(nn.Linear(8, 2), nn.Sigmoid(), nn.Tanh(), nn.Softmax(-1)), 8 + 6, 8 + 2),
        (nn.Tanh(), 8 + 8, 0),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 8 + 8, 4 * 8),
        (frozen("0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"), 8 + 8, 0),
        (nn.LayerNorm(8), 8 + 2, 0),  # input, mean, deviation
    ],
)
def test_bytes_between_i_and_w_by_hand(module: nn.Module, after_f: int, after_i: int) -> None:
    """Rule 10: inputs and output gradients of layers with weights, 5 samples of floats each."""
    assert metered(module, (normal(5, 8),)) == [5 * 4 * after_f, 5 * 4 * after_i, 0]


def test_a_stage_holds_less_after_i() -> None:
    """Where much lies between its layers: the activations of a transformer block go."""
    block = gpt(n_layers=1, d_model=32, n_heads=2, sequence=16)[1]
    after_f, after_i, after_w = metered(block, (normal(2, 16, 32),))
    assert after_w == 0 < after_i < after_f


class Stash(torch.autograd.Function):
    """Keeps a tensor in the graph in a way that autograd alone does not release."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
        ctx.kept = kept
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Stashing(nn.Module):
    """A layer of what a `Stash` passes on; notes whether that still keeps its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.ones(3)
        self.kept = weakref.ref(kept)
        return self.linear(Stash.apply(x, kept))


def test_the_graph_is_gone_after_i() -> None:
    """Deferred weight gradients hold values, not the graph that computed them."""
    module = Stashing()
    subject = stage(module)
    (output,) = subject.forward(0, (X,), 5, False, True)
    assert module.kept() is not None
    subject.input_grad(0, (output,))
    assert module.kept() is None


# Steps


@pytest.mark.slow
@given(schedule=custom_schedules(only_chains=True), recompute=st.sampled_from(["never", "always"]))
def test_parity_of_any_mix_of_backwards(schedule: ps.Schedule, recompute: str) -> None:
    """Each stage and micro-batch with a B or with I and W, against the unsplit model."""
    graph = ps.lower(schedule.with_slices(1), recompute=recompute)
    stages = cut(dense(graph.n_stages), [1] * graph.n_stages)
    whole = copy.deepcopy(stages)
    n = 2 * graph.n_microbatches + 1
    inputs, targets = normal(n, 16), normal(n, 16, seed=2)
    loss = unsplit(whole, graph, inputs, targets)
    with pipeline(stages, graph) as subject:
        result = call_within(60, lambda: subject.step(inputs, targets))
    assert torch.equal(result.loss, loss)
    assert_same(stages, whole)


SPLIT = "0F0 0F1 0I0 0W0 0F2 0I1 0I2 0W1 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
WHOLE = "0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_parity_of_a_language_model(recompute: str) -> None:
    """Dropout, embedding, norms, attention and a loss: the gradients of whole backwards."""
    tokens, targets = torch.arange(24).view(6, 4) % 6, torch.arange(24).view(6, 4) % 5

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    losses, trained = [], []
    for rows in (SPLIT, WHOLE):
        layers = gpt(n_layers=2, d_model=8, n_heads=2, sequence=4, vocabulary=6, dropout=0.1)
        torch.manual_seed(0)
        graph = ps.lower(orders(*rows), recompute=recompute)
        with pipeline(cut(layers, [2, 2]), graph, loss_fn) as subject:
            losses.append(subject.step(tokens, targets).loss)
        trained.append(layers)
    assert torch.equal(*losses)
    assert_same([trained[0]], [trained[1]])


class Explodes(nn.Module):
    """Raises in its backward, after a linear layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.armed = nn.Linear(16, 16), True

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(self.hook)
        return self.linear(y)

    def hook(self, gradient: Tensor) -> None:
        if self.armed:
            raise ValueError("boom")


def test_a_failed_i_leaves_nothing_behind() -> None:
    """The next step is as if there had been none."""
    graph = ps.lower(orders("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"))
    stages = [nn.Linear(16, 16), Explodes()]
    whole = copy.deepcopy(stages)
    whole[1].armed = False
    inputs, targets = normal(4, 16), normal(4, 16, seed=2)
    with pipeline(stages, graph) as subject:
        with pytest.raises(StageError, match=r"1I0 failed .*boom"):
            subject.step(inputs, targets)
        stages[1].armed = False
        for module in stages:
            module.zero_grad()
        subject.step(inputs, targets)
        assert [held.current for held in subject.held] == [0, 0]
    unsplit(whole, graph, inputs, targets)
    for actual, wanted in zip(stages, whole, strict=True):
        torch.testing.assert_close(of_parameters(actual), of_parameters(wanted))


# Measured costs


@pytest.mark.slow
def test_both_kinds_of_backward_are_measured() -> None:
    """And the bytes between I and W, by hand: input and output gradient of a linear layer."""
    graph = ps.lower(orders(*SPLIT))
    stages = [nn.Linear(16, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh())]
    with pipeline(stages, graph) as subject:
        profile = px.measure(subject, normal(6, 16), normal(6, 16, seed=2), n_steps=2, warm_up=1)
    costs = profile.costs
    for name in ("backward", "input_grad", "weight_grad"):
        values = getattr(costs, name)
        assert len(values) == 2, name
        assert min(values) > 0, name
    assert costs.weight_grad_bytes == (2 * 4 * (16 + 8), 2 * 4 * (8 + 16))
    assert {"I", "W", "B"} <= {op for op, _ in profile.table.index}
    for rows in (SPLIT, WHOLE):
        assert ps.simulate(ps.lower(orders(*rows)), costs).makespan > 0


@pytest.mark.slow
def test_a_profile_of_whole_backwards_has_no_others() -> None:
    graph = ps.lower(ps.schedule("1f1b", 2, 3))
    with pipeline(cut(dense(2), [1, 1]), graph) as subject:
        costs = px.profile(subject, normal(6, 16), normal(6, 16), n_steps=1, warm_up=1)
    assert costs.input_grad is None
    assert costs.weight_grad is None
    assert costs.weight_grad_bytes == (0, 0)
