"""Split backwards: I gives the input's gradient and leaves the weights' to W, which adds them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_pipelines import (
    assert_same,
    call_within,
    cut,
    dense,
    one_thread,
    orders,
    pipeline,
    unsplit,
)
from strategies import custom_schedules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.convnet import convnet
from pipeexec.demo_models.gpt import gpt
from pipeexec.stages.activation_bytes import ActivationCounter, ActivationMeter
from pipeexec.stages.stage import Stage
from pipesim.errors import StageError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
    found = subject.input_grad(microbatch, gradients)
    subject.weight_grad(microbatch)
    return [*outputs, *found]


def of_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


# Modules


class Tied(nn.Module):
    """Uses one weight three times, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(torch.tanh(self.inner(x)))
        return torch.tanh(x) @ self.inner.weight.t() + F.linear(x, self.inner.weight)


class TiedEmbedding(nn.Module):
    """Embedding and head are one parameter; the padding row gets a gradient from the head only."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8, padding_idx=-1, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.table(tokens)), self.table.weight)


class Products(nn.Module):
    """Calls of matmul and its kind, with parameters on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(normal(8, 8, seed=seed) / 3) for seed in (3, 4))
        self.bias = nn.Parameter(normal(8, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.a + torch.matmul(x, self.b)
        rows = torch.addmm(self.bias, y.flatten(0, -2).tanh(), self.a)
        rows = torch.addmm(self.bias, rows, self.b, beta=0.5) + torch.mm(rows, self.b)
        left = (self.a @ rows.t()).t()
        return (left + rows.mm(self.a)).view_as(x)


class Penalized(nn.Module):
    """Differentiates within its forward, and goes on with the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = self.body(x)
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + slope


class Partly(nn.Module):
    """One branch without gradients, one under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = self.second(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.first(x)
        return self.second(self.first(x)) * still + low.float()


class Checkpointed(nn.Module):
    """Layers within `torch.utils.checkpoint`, between two uses of one without."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, self.outer(x), use_reentrant=self.reentrant))


class Recurrent(nn.Module):
    """A composite function with weights of its own, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class Vectorized(nn.Module):
    """Layers under `torch.func`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.func.vmap(self.linear)(x)


class Marked(Tensor):
    """A tensor of another type."""


class WithSubclass(nn.Module):
    """A layer of a tensor of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.as_subclass(Marked)).as_subclass(Tensor)


class Unused(nn.Module):
    """A layer whose output nobody uses gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.used(x)


def frozen(*names: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def convolutions(n: int, **options: Any) -> nn.Module:
    """Convolutions and their transposes, with every option."""
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1]
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[n - 1]
    return nn.Sequential(
        convolution(4, 8, 3, stride=2, padding=(1,) * n, groups=2),
        nn.ReLU(inplace=True),
        convolution(8, 8, 3, padding="same", dilation=2, bias=False),
        convolution(8, 8, 1, padding="valid"),
        transposed(8, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
    )


class Case(NamedTuple):
    """A stage's module and a micro-batch for it."""

    module: nn.Module
    inputs: tuple[Tensor, ...]


def _tokens() -> tuple[Tensor, ...]:
    return (torch.tensor([[0, 1, 2, 5], [2, 2, 3, 0], [1, 5, 5, 4]]),)


X = normal(3, 4, 8)
CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: Case(nn.Linear(8, 8), (normal(5, 8),)),
    "linear of one sample": lambda: Case(nn.Linear(8, 8), (normal(8),)),
    "linear of a sequence": lambda: Case(nn.Linear(8, 8, bias=False), (X,)),
    "linear of a transpose": lambda: Case(nn.Linear(4, 8), (X.transpose(1, 2),)),
    "linear of nothing": lambda: Case(nn.Linear(8, 8), (X[:0],)),
    "in place": lambda: Case(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(True), nn.Linear(8, 8, False), nn.ReLU(True)),
        (X,),
    ),
    "embedding": lambda: Case(nn.Embedding(6, 8), _tokens()),
    "embedding with padding": lambda: Case(
        nn.Embedding(6, 8, padding_idx=2, scale_grad_by_freq=True), _tokens()
    ),
    "embedding with a norm": lambda: Case(nn.Embedding(6, 8, max_norm=1.0), _tokens()),
    "sparse embedding": lambda: Case(nn.Embedding(6, 8, sparse=True), _tokens()),
    "tied embedding": lambda: Case(TiedEmbedding(), _tokens()),
    "tied": lambda: Case(Tied(), (X,)),
    "products": lambda: Case(Products(), (X,)),
    "transformer": lambda: Case(gpt(n_layers=1, d_model=8, n_heads=2, sequence=4)[1], (X,)),
    "transformer with dropout": lambda: Case(
        gpt(n_layers=1, d_model=8, n_heads=2, sequence=4, dropout=0.5)[1], (X,)
    ),
    "language model": lambda: Case(
        gpt(n_layers=1, d_model=8, n_heads=2, sequence=4, vocabulary=6), _tokens()
    ),
    "torch's transformer": lambda: Case(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (X,)
    ),
    "residual block": lambda: Case(
        nn.Sequential(*convnet(n_blocks=1, channels=4, image_size=8)[:2]), (normal(3, 3, 8, 8),)
    ),
    "channels last": lambda: Case(
        nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), (normal(3, 4, 8, 8),)
    ),
    "convolutions 1d": lambda: Case(convolutions(1), (normal(3, 4, 8),)),
    "convolutions 2d": lambda: Case(convolutions(2), (normal(3, 4, 8, 8),)),
    "convolutions 3d": lambda: Case(convolutions(3), (normal(2, 4, 8, 8, 8),)),
    "uneven padding": lambda: Case(nn.Conv1d(4, 8, 4, padding="same"), (normal(3, 4, 8),)),
    "convolution of one sample": lambda: Case(nn.Conv2d(4, 8, 3), (normal(4, 8, 8),)),
    "batch norm": lambda: Case(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), (normal(5, 8),)
    ),
    "weight norm": lambda: Case(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (X,)),
    "attention": lambda: Case(Attention(), (X,)),
    "recurrent": lambda: Case(Recurrent(), (X,)),
    "checkpointed": lambda: Case(Checkpointed(False), (X,)),
    "checkpointed, reentrant": lambda: Case(Checkpointed(True), (X,)),
    "differentiates": lambda: Case(Penalized(), (X,)),
    "partly without gradients": lambda: Case(Partly(), (X,)),
    "vectorized": lambda: Case(Vectorized(), (X,)),
    "subclass": lambda: Case(WithSubclass(), (X,)),
    "unused": lambda: Case(Unused(), (X,)),
    "frozen weight": lambda: Case(frozen("0.weight", "2.weight"), (X,)),
    "frozen bias": lambda: Case(frozen("0.bias", "2.bias"), (X,)),
    "frozen layer": lambda: Case(frozen("2.weight", "2.bias"), (X,)),
    "frozen": lambda: Case(frozen("0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"),
                           (X,)),
    "doubles": lambda: Case(frozen().double(), (X.double(),)),
    "half": lambda: Case(frozen().bfloat16(), (X.bfloat16(),)),
    "complex": lambda: Case(nn.Linear(8, 8, dtype=torch.complex64), (X.to(torch.complex64),)),
}  # fmt: skip


class Attention(nn.Module):
    """Torch's own attention, whose layers are called out of our sight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


#: A parameter gets one part of its gradient in I, another in W; sparse ones cannot be compared.
MIXED = {"differentiates", "partly without gradients", "products", "tied", "sparse embedding"}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("how", ["FIW", "FRIW"])
@pytest.mark.parametrize("name", CASES)
def test_i_and_w_are_b(name: str, how: str, index: int) -> None:
    """Outputs, gradients and buffers to the last bit, in the second micro-batch too.

    But for gradients of which I adds one part and W another, which are rounded in another order.
    """
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    same = copy.deepcopy(module)
    mine, its = stage(module, index), stage(same, index)
    with one_thread():
        for microbatch in range(2):
            found = run(mine, inputs, how, microbatch)
            expected = run(its, inputs, how.replace("IW", "B"), microbatch)
            for a, b in zip(found, expected, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
            if name not in MIXED:
                assert_same([module], [same])
            expected_gradients = of_parameters(same)
            for key, gradient in of_parameters(module).items():
                torch.testing.assert_close(gradient, expected_gradients[key])
                if gradient is not None:
                    assert gradient.stride() == expected_gradients[key].stride()
    assert mine.counter.current == 0


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


@pytest.mark.parametrize("name", ["linear", "linear of a sequence", "embedding", "tied embedding",
                                  "convolutions 1d", "convolutions 2d", "convolutions 3d",
                                  *WAITS])  # fmt: skip
def test_what_waits_has_no_gradient_before_w(name: str) -> None:
    """And nothing else gets one in W."""
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    subject = stage(module)
    (output,) = subject.forward(0, inputs, 5, False, True)
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
    seen: list[Tensor | None] = []
    watches = kind == "register_hook"
    getattr(module.weight, kind)(lambda x: seen.append(x if watches else x.grad.clone()))
    run(stage(module), (X,), "FIW")
    (gradient,) = seen
    assert gradient is not None
    assert torch.equal(gradient, module.weight.grad)


def test_gradients_of_several_microbatches_add_up() -> None:
    """In the order of their W, whatever that of their I."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    same = copy.deepcopy(module)
    mine, its = stage(module), stage(same)
    batches = [normal(3, 8, seed=seed) for seed in range(3)]
    with one_thread():
        for k in range(3):
            mine.forward(k, (batches[k],), 5, False, True)
            its.forward(k, (batches[k],), 5, False)
        for k in (1, 0, 2):
            mine.input_grad(k, (torch.ones(3, 8),))
        for k in (2, 0, 1):
            mine.weight_grad(k)
            its.backward(k, (torch.ones(3, 8),))
    assert_same([module], [same])


def test_a_tied_weight_needs_one_sum() -> None:
    """Its uses are added to each other first, then to what there was: as autograd does."""
    module = TiedEmbedding()
    same = copy.deepcopy(module)
    for each in (module, same):
        each.table.weight.grad = torch.full((6, 8), 1e4)
    with one_thread():
        run(stage(module), _tokens(), "FIW")
        run(stage(same), _tokens(), "FB")
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
    found = [meter.current]
    gradient = torch.ones_like(output)
    subject.input_grad(0, (gradient,))
    found.append(meter.current)
    assert meter.deferred_peak == meter.current
    subject.weight_grad(0)
    return [*found, meter.current]


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
    """Keeps a tensor in the graph in a way that autograd does not let go of by itself."""

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
    """What waits holds values, not what made them."""
    module = Stashing()
    subject = stage(module)
    (output,) = subject.forward(0, (X,), 5, False, True)
    assert module.kept() is not None
    subject.input_grad(0, (output,))
    assert module.kept() is None


# Steps


@settings(max_examples=25)
@given(schedule=custom_schedules(), recompute=st.sampled_from(["never", "always"]))
def test_parity_of_any_mix_of_backwards(schedule: ps.Schedule, recompute: str) -> None:
    """Each stage and micro-batch with a B or with I and W, against the unsplit model."""
    graph = ps.lower(schedule, recompute=recompute)
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

    losses, found = [], []
    for rows in (SPLIT, WHOLE):
        layers = gpt(n_layers=2, d_model=8, n_heads=2, sequence=4, vocabulary=6, dropout=0.1)
        torch.manual_seed(0)
        graph = ps.lower(orders(*rows), recompute=recompute)
        with pipeline(cut(layers, [2, 2]), graph, loss_fn) as subject:
            losses.append(subject.step(tokens, targets).loss)
        found.append(layers)
    assert torch.equal(*losses)
    assert_same([found[0]], [found[1]])


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
    for mine, its in zip(stages, whole, strict=True):
        torch.testing.assert_close(of_parameters(mine), of_parameters(its))


# Measured costs


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


def test_a_profile_of_whole_backwards_has_no_others() -> None:
    graph = ps.lower(ps.schedule("1f1b", 2, 3))
    with pipeline(cut(dense(2), [1, 1]), graph) as subject:
        costs = px.profile(subject, normal(6, 16), normal(6, 16), n_steps=1, warm_up=1)
    assert costs.input_grad is None
    assert costs.weight_grad is None
    assert costs.weight_grad_bytes == (0, 0)
