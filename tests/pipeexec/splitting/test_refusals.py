"""Every refusal of a split names module, line and advice, and the advice works.

A row has a model that is refused, parts of the message, and models that follow its advice. Their
stages are equal to them, or a step runs.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipeexec as px
import pipesim as ps
from pipesim.errors import PipeError

SOURCES = Path(px.__file__).parent / "splitting"
WIDTH = 4
X = torch.linspace(-1, 1, 6 * WIDTH).reshape(6, WIDTH)
#: Characters of a message, without the line of the model's code that it cites.
MOST_CHARACTERS = 300

Forward = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    """Four blocks, and other modules; a function is the forward."""

    def __init__(self, forward: Forward, block: Callable[..., nn.Module], **modules: Any) -> None:
        super().__init__()
        self.code = forward
        self.blocks = nn.ModuleList([block(WIDTH, WIDTH) for _ in range(4)])
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def plain(m: Model, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = torch.tanh(block(x))
    return x


def build(
    forward: Forward = plain, block: Callable[..., nn.Module] = nn.Linear, **modules: Any
) -> Model:
    torch.manual_seed(0)
    return Model(forward, block, **{name: make() for name, make in modules.items()})


def split(model: nn.Module, stages: Any = 2, **options: Any) -> px.Stages:
    return px.split(model, stages, sample=X, **options)


def cut(
    forward: Forward = plain,
    block: Callable[..., nn.Module] = nn.Linear,
    stages: Any = 2,
    **modules: Any,
) -> None:
    """Split a model; its stages are equal to it."""
    assert split(build(forward, block, **modules), stages).check(X + 1) < 1e-6


def run(stages: px.Stages, batch: Tensor = X, **lowering: Any) -> None:
    """Run a step and an evaluation."""
    graph = ps.lower(
        ps.schedule("gpipe", 2, 3), tied=getattr(stages, "tied_stages", ()), **lowering
    )
    with px.Pipeline(stages, graph, ["cpu"] * 2, lambda y, _: y.square().mean()) as pipeline:
        pipeline.step(batch, torch.zeros(len(batch)))
        pipeline.evaluate(batch, torch.zeros(len(batch)))


class Keeps(nn.Linear):
    """A block that keeps a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.kept = y * 2
        return y


class Pair(nn.Linear):
    """A block that returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y * 2


def reads_kept(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) + m.blocks[0].kept


def reads_kept_early(m: Model, x: Tensor) -> Tensor:
    x = m.blocks[1](m.blocks[0](x)) + m.blocks[0].kept
    return m.blocks[3](m.blocks[2](x))


def takes_returned(m: Model, x: Tensor) -> Tensor:
    x, kept = m.blocks[0](x)
    for block in m.blocks[1:]:
        x, _ = block(x)
    return x + kept


def with_dropout(m: Model, x: Tensor) -> Tensor:
    mask = F.dropout(torch.ones_like(x))
    return plain(m, x * mask) * mask


class Noise(nn.Module):
    """Random numbers of torch, of no module of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x)


def with_drop(m: Model, x: Tensor) -> Tensor:
    mask = m.drop(torch.ones_like(x))
    return plain(m, x * mask) * mask


def nested(*sizes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*sizes), nn.Tanh())


class Squares(nn.Module):
    """A block that returns the square of its weight, too."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(*sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.inner.weight.square().sum()


def reads_weight(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * m.blocks[0][0].weight.square().sum()


def takes_square(m: Model, x: Tensor) -> Tensor:
    x, square = m.blocks[0](x)
    for block in m.blocks[1:]:
        x, _ = block(x)
    return x * square


def reads_weight_early(m: Model, x: Tensor) -> Tensor:
    x = m.blocks[1](m.blocks[0](x)) * m.blocks[0][0].weight.square().sum()
    return m.blocks[3](m.blocks[2](x))


class Passes(nn.Linear):
    """A block that returns a view of its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y.view_as(y), y


def writes_view(m: Model, x: Tensor) -> Tensor:
    view, x = m.blocks[0](x)
    view *= 2
    y = m.blocks[1](x)[1]
    return m.blocks[3](m.blocks[2](y)[1])[1]


def writes_clone(m: Model, x: Tensor) -> Tensor:
    view, x = m.blocks[0](x)
    view = view.clone()
    view *= 2
    y = m.blocks[1](x)[1]
    return m.blocks[3](m.blocks[2](y)[1])[1] + view


def scale() -> nn.Parameter:
    return nn.Parameter(torch.ones(WIDTH))


def writes_parameter(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.mul_(0.9)
    return plain(m, x * m.scale)


def reads_parameter(m: Model, x: Tensor) -> Tensor:
    return plain(m, x * m.scale)


def steps_with_writes_between() -> None:
    model = build(reads_parameter, scale=scale)
    stages = split(model)
    for _ in range(2):
        run(stages)
        with torch.no_grad():
            model.scale.mul_(0.9)


class Clamps(nn.Linear):
    """A block that changes its parameter."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def steps_with_clamps_between() -> None:
    model = build()
    stages = split(model)
    for _ in range(2):
        run(stages)
        with torch.no_grad():
            for block in model.blocks:
                block.weight.clamp_(-0.1, 0.1)


def counted(model: Model) -> Model:
    model.register_buffer("count", torch.zeros(()))
    return model


def counts(m: Model, x: Tensor) -> Tensor:
    m.count += 1
    return plain(m, x) * m.count


def counts_between(m: Model, x: Tensor) -> Tensor:
    x = m.blocks[1](m.blocks[0](x))
    m.count += 1
    return m.blocks[3](m.blocks[2](x * m.count))


class Counts(nn.Linear):
    """A block that changes a buffer, and reads it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


def keeps_number(m: Model, x: Tensor) -> Tensor:
    m.n_calls = getattr(m, "n_calls", 0) + 1
    return plain(m, x)


def reads_last(m: Model, x: Tensor) -> Tensor:
    """Shift the values of a block by those that another one had for the last batch."""
    x = m.blocks[0](x)
    y = m.blocks[1](x if m.last is None else x + m.last.data)
    z = m.blocks[2](x)
    m.last = z.detach().mean(0)
    return m.blocks[3](torch.tanh(y) + z)


def asks_for_last(m: Model, x: Tensor) -> Tensor:
    return plain(m, x if m.last is None else 1 * x) + keep_last(m, x)


def keep_last(m: Model, x: Tensor) -> Tensor:
    m.last = m.blocks[0](x).detach().mean(0)
    return m.last


class KeepsNumber(nn.Linear):
    """A block that counts in an attribute."""

    n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return super().forward(x)


def count_only(m: Model, x: Tensor) -> Tensor:
    m.count += 1
    return plain(m, x)


class Norm(nn.BatchNorm1d):
    """A batch norm of the width."""

    def __init__(self, *_: int) -> None:
        super().__init__(WIDTH)


def one_norm(m: Model, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = m.norm(block(x))
    return x


def norm_twice(m: Model, x: Tensor) -> Tensor:
    x = m.norm(m.norm(m.blocks[0](x)))
    for block in m.blocks[1:]:
        x = block(x)
    return x


def norms(m: Model, x: Tensor) -> Tensor:
    for block, norm in zip(m.blocks, m.norms, strict=True):
        x = norm(block(x))
    return x


def four_norms() -> nn.Module:
    return nn.ModuleList([Norm() for _ in range(4)])


class Counter(nn.Linear):
    """A block that takes another number in each forward, of which no module tells."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.numbers = count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.numbers)


def dropout_before(m: Model, x: Tensor) -> Tensor:
    return plain(m, F.dropout(x, training=m.training))


def drop_before(m: Model, x: Tensor) -> Tensor:
    return plain(m, m.drop(x))


def doubles_positive(m: Model, x: Tensor) -> Tensor:
    """Write in place to the value behind the second block, if the batch begins above zero."""
    is_positive = float(x[0, 0]) > 0
    for index, block in enumerate(m.blocks):
        x = block(x)
        if index == 1 and is_positive:
            x.mul_(2)
    return x


def run_doubling(sample: Tensor) -> None:
    run(px.split(build(doubles_positive), 2, sample=sample))


class Detaches(nn.Linear):
    """A block without a gradient, if the batch begins below zero."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.detach() if float(x.detach()[0, 0]) < 0 else y


def detaching() -> Model:
    model = build()
    model.blocks[0], model.blocks[1] = nn.Identity(), Detaches(WIDTH, WIDTH)
    return model


def run_detaching(sample: Tensor, batch: Tensor) -> None:
    run(px.split(detaching(), ["blocks.2"], sample=sample), batch)


def check(model: nn.Module, stages: Any = 2) -> None:
    assert split(model, stages).check(X + 1) < 1e-6


def asks_type(m: Model, x: Tensor) -> Tensor:
    assert type(m.blocks[3]) is nn.Linear
    return plain(m, x)


class Checkpointed(nn.Linear):
    """A block with a checkpoint."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x + 0 * self.bias, use_reentrant=self.is_reentrant)


class Reentrant(Checkpointed):
    """A block with a reentrant checkpoint."""

    is_reentrant = True


def checkpoint_of_two(m: Model, x: Tensor) -> Tensor:
    x = checkpoint(lambda y: m.blocks[1](m.blocks[0](y)), x, use_reentrant=False)
    return m.blocks[3](m.blocks[2](x))


def checkpoint_of_each(m: Model, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


class Number(nn.Linear):
    """A block that returns a number that depends on the data, beside a tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        y = super().forward(x)
        return y, float(y.detach().sum())


class Tensors(nn.Linear):
    """A block that returns a tensor of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.detach().sum()


def multiplies(m: Model, x: Tensor) -> Tensor:
    for block in m.blocks:
        x, number = block(x)
        x = x * number
    return x


def fails_on_long(m: Model, x: Tensor) -> Tensor:
    if len(x) > 5:
        raise ValueError("too many samples")
    return plain(m, x)


class Rows(nn.Linear):
    """A block that reads numbers from large batches alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * float(y.detach().sum()) if len(x) > 3 else y


class Reader(nn.Linear):
    """A block whose shape depends on data of large batches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[: 1 + int(x.sum() > 100)] if len(x) > 3 else super().forward(x)


def random_sign(m: Model, x: Tensor) -> Tensor:
    sign = -1.0 if random.random() < 0.5 else 1.0
    return plain(m, x * sign)


def late_numpy_sign(m: Model, x: Tensor) -> Tensor:
    x = plain(m, x)
    return x * np.random.rand()  # noqa: NPY002


class Sign(nn.Linear):
    """A block that draws a number of Python."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (-1.0 if random.random() < 0.5 else 1.0)


def hook_on_value(m: Model, x: Tensor) -> Tensor:
    first = m.blocks[0](x)
    if first.requires_grad:
        first.register_hook(lambda gradient: gradient * 2)
    for block in m.blocks[1:]:
        first = block(first)
    return first


class Hooked(nn.Linear):
    """A block that gives its result a hook."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * 1
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return y


class Functions(nn.Module):
    """A model of functions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.eye(WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.linear(x, weight)
        return x.reshape(x.shape[0], 2, 2)


class Dropping(Functions):
    """One whose graph holds for one mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, training=self.training))


class Branching(Functions):
    """One that torch.export refuses."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Modules(nn.Module):
    """The same with modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.sum() > 0 else -x
        for layer in self.layers:
            x = layer(x)
        return x


class Scales(Modules):
    """One that takes a number."""

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return super().forward(x * factor)


def by_sum(order: tuple[int, ...]) -> Forward:
    """Return a forward that calls blocks in an order if the batch is positive."""

    def forward(m: Model, x: Tensor) -> Tensor:
        for k in order if x.sum() > 1 else range(4):
            x = torch.tanh(m.blocks[k](x))
        return x

    return forward


def with_first(use: Callable[..., Tensor], lasts: bool = False) -> Forward:
    """Return a forward that uses what its first block returned, at its end, if inputs are large."""

    def forward(m: Model, x: Tensor) -> Tensor:
        first = m.blocks[0](x)
        y = m.blocks[2](m.blocks[1](first))
        return use(m.blocks[3], first, y) if lasts or x.sum() > 1 else m.blocks[3](y)

    return forward


def reads_first(block: nn.Module, first: Tensor, y: Tensor) -> Tensor:
    return block(y) * (2 if first.sum() > 0 else 3)


def lists_first(block: nn.Module, first: Tensor, y: Tensor) -> Tensor:
    return block(y) * len([x for x in first.tolist() if x[0] > 0])


def writes_first(block: nn.Module, first: Tensor, y: Tensor) -> Tensor:
    rows = torch.zeros_like(y)
    rows[1:] = first[1:]
    return block(rows * 2)


def reads_written(block: nn.Module, first: Tensor, y: Tensor) -> Tensor:
    rows = torch.zeros_like(y)
    rows += first
    return block(y) * (2 if rows.max() > 0 else 3)


def run_with_first(use: Callable[..., Tensor], sample: Tensor) -> None:
    px.split(build(with_first(use)), 2, sample=sample)(X.abs())


def right_with_first(use: Callable[..., Tensor]) -> list[Callable[[], object]]:
    """Return runs whose samples, or all batches, use what the first block returned."""
    return [lambda: run_with_first(use, X.abs()), lambda: cut(with_first(use, lasts=True))]


def without_one(m: Model, x: Tensor) -> Tensor:
    for k in (0, 1, 2) if x.sum() > 1 else (0, 1, 3):
        x = m.blocks[k](x)
    return x


def other_order_in_evaluation(m: Model, x: Tensor) -> Tensor:
    for block in m.blocks if m.training else reversed(m.blocks):
        x = block(x)
    return x


def fewer_in_evaluation(m: Model, x: Tensor) -> Tensor:
    for block in m.blocks if m.training else m.blocks[:3]:
        x = block(x)
    return x


def other_order_without_gradients(m: Model, x: Tensor) -> Tensor:
    for block in m.blocks if torch.is_grad_enabled() else reversed(m.blocks):
        x = block(x)
    return x


def other_values_without_gradients(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * (2 if torch.is_grad_enabled() else 3)


class MoreInEvaluation(nn.Linear):
    """A block that returns one more tensor in evaluation mode."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y if self.training else (y, y)


def of_any(m: Model, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = block(x)
        x = x if isinstance(x, Tensor) else x[0]
    return x


def evaluated(stages: px.Stages) -> Tensor:
    for stage in stages:
        stage.eval()
    with torch.no_grad():
        return stages(X)


def trained_in_evaluation(stages: px.Stages) -> Tensor:
    for stage in stages:
        stage.train()
    return stages(X)


def without_gradients(stages: px.Stages) -> Tensor:
    with torch.no_grad():
        return stages(X)


def evaluation_equals(model: nn.Module) -> None:
    stages = split(model.eval())
    with torch.no_grad():
        torch.testing.assert_close(evaluated(stages), model(X))


def inference(m: Model, x: Tensor) -> Tensor:
    with torch.inference_mode():
        shift = m.blocks[0](x).mean(0)
    x = m.blocks[1](x)
    return m.blocks[3](m.blocks[2](x + shift.clone()))


def no_gradient(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        shift = m.blocks[0](x).mean(0)
    x = m.blocks[1](x)
    return m.blocks[3](m.blocks[2](x + shift.clone()))


def writes_sometimes(m: Model, x: Tensor) -> Tensor:
    is_large = x.sum() > 1
    x = m.blocks[0](x)
    if is_large:
        x.detach().mul_(2)
    y = m.blocks[1](x)
    return m.blocks[3](m.blocks[2](x)) + y


def writes_clone_sometimes(m: Model, x: Tensor) -> Tensor:
    is_large = x.sum() > 1
    x = m.blocks[0](x)
    if is_large:
        x = x.clone().mul_(2)
    y = m.blocks[1](x)
    return m.blocks[3](m.blocks[2](x)) + y


def hooked(place: str, *, backward: bool = False) -> Model:
    model = build()
    module = model.get_submodule(place)
    if backward:
        module.register_full_backward_hook(lambda *_: None)
    else:
        module.register_forward_hook(lambda *_: None)
    return model


def hooks_later(change: Callable[[px.Stages, Model], object]) -> px.Stages:
    model = build()
    stages = split(model)
    change(stages, model)
    stages(X)
    return stages


def tied(*, is_hooked: bool = False) -> Model:
    model = build()
    model.blocks[3].weight = model.blocks[0].weight
    if is_hooked:
        model.blocks[0].weight.register_hook(lambda gradient: gradient)
    return model


def asks_gradient(m: Model, x: Tensor) -> Tensor:
    x = m.blocks[0](x)
    y = m.blocks[2](m.blocks[1](x))
    return m.blocks[3](y) * (2 if x.grad_fn is not None else 3)


class Counting(nn.Linear):
    """A block that counts its calls, in Python or in a buffer."""

    def __init__(self, *sizes: int, is_buffer: bool = False) -> None:
        super().__init__(*sizes)
        if is_buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def leaves_mode(m: Model, x: Tensor) -> Tensor:
    m.blocks[1].eval()
    return plain(m, x)


def sets_mode_back(m: Model, x: Tensor) -> Tensor:
    training = m.blocks[1].training
    m.blocks[1].eval()
    x = plain(m, x)
    m.blocks[1].train(training)
    return x


def with_generator(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) + torch.rand(WIDTH, generator=torch.Generator().manual_seed(1))


def with_fixed_numbers(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) + torch.arange(WIDTH) / WIDTH


def cut_graph(model: nn.Module) -> None:
    """Cut the graph of a model; the stages are equal to it."""
    assert px.split(model, 2, sample=X, way="graph").check(X + 1) < 1e-6


def maker(change: Callable[[nn.Linear], object]) -> Callable[[], nn.Module]:
    """Return a function that makes a model and changes its first layer."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        change(layers[0])
        return nn.Sequential(*layers)

    return make


def made_and_given(change: Callable[[nn.Linear], object]) -> list[Callable[[], object]]:
    return [lambda: check(maker(change)())]


def by_numpy(layer: nn.Linear) -> None:
    layer.weight.detach().numpy()[:] = 1


def with_data(layer: nn.Linear) -> None:
    values = torch.arange(WIDTH * 1.0)
    torch.frexp(layer.bias.detach(), out=(values, torch.empty(WIDTH, dtype=torch.int32)))


def undefined(layer: nn.Linear) -> None:
    layer.other = nn.Parameter(torch.empty(2))


def defined(layer: nn.Linear) -> None:
    layer.other = nn.Parameter(torch.zeros(2))


def sparse(layer: nn.Linear) -> None:
    layer.register_buffer("dense", torch.eye(3).to_sparse().to_dense())


def written_without_kernel(layer: nn.Linear) -> None:
    torch.nonzero(layer.weight.detach(), out=torch.empty(0, 2, dtype=torch.long))


def on_gpu(layer: nn.Linear) -> None:
    layer.register_buffer("other", torch.empty(2, device="mps"))


def without_data(layer: nn.Linear) -> None:
    layer.other = nn.Parameter(torch.empty(0, device="meta"))


class Refusal(NamedTuple):
    """A refusal.

    Attributes
    ----------
    text
        Part of the message, as it stands in the source.
    wrong
        A call that is refused.
    parts
        Other parts of the message: names, line and advice.
    right
        Calls that follow the advice.
    """

    text: str
    wrong: Callable[[], object]
    parts: list[str]
    right: list[Callable[[], object]]


def only(stages: list[int]) -> px.Stages:
    return px.split(lambda: build(), 2, sample=X, only=stages)


REFUSALS: dict[str, Refusal] = {
    "a tensor that a block keeps": Refusal(
        "computes and does not return, such as a cache",
        lambda: cut(reads_kept, Keeps),
        ["stage 1 ", "`return plain(m, x) + m.blocks[0].kept` (test_refusals.py, line ",
         "'blocks.0'", "switch that off", "let 'blocks.0' return it",
         "one stage has 'blocks.0' and all modules after it"],
        [lambda: cut(plain, Keeps), lambda: cut(takes_returned, Pair)],
    ),
    "a tensor that a block keeps for a time": Refusal(
        "computes and does not return, such as a cache",
        lambda: cut(reads_kept_early, Keeps),
        ["one stage has 'blocks.0' to 'blocks.2'"],
        [lambda: cut(reads_kept_early, Keeps, [3, 1])],
    ),
    "random numbers for two stages": Refusal(
        "they would draw different numbers",
        lambda: cut(with_dropout),
        ["stages 0 and 1 ", "`mask = F.dropout(torch.ones_like(x))` (test_refusals.py, line ",
         "in the forward of a module, such as nn.Dropout"],
        [lambda: cut(with_drop, drop=nn.Dropout), lambda: cut(with_drop, drop=Noise)],
    ),
    "a parameter inside another block": Refusal(
        "read it in ",
        lambda: cut(reads_weight, nested),
        ["stage 1 ", "'blocks.0.0.weight'", "weight.square().sum()` (test_refusals.py, line ",
         "'blocks.0'", "return the result", "one stage has 'blocks.0' and all modules after it"],
        [lambda: cut(takes_square, Squares)],
    ),
    "a parameter inside another block for a time": Refusal(
        "read it in ",
        lambda: cut(reads_weight_early, nested),
        ["one stage has 'blocks.0' to 'blocks.2'"],
        [lambda: cut(reads_weight_early, nested, [3, 1])],
    ),
    "a write to a view": Refusal(
        "the forward writes in place, at ",
        lambda: cut(writes_view, Passes, [1, 3]),
        ["`view *= 2` (test_refusals.py, line ", "the output of 'blocks.0'", "stage 1 ",
         "a clone()", "one stage has 'blocks.0' to 'blocks.1'"],
        [lambda: cut(writes_clone, Passes, [1, 3]), lambda: cut(writes_view, Passes)],
    ),
    "a parameter that the forward changes": Refusal(
        "the forward changes the parameter ",
        lambda: cut(writes_parameter, scale=scale),
        ["'scale'", "`m.scale.mul_(0.9)` (test_refusals.py, line ", "change it between steps"],
        [steps_with_writes_between],
    ),
    "a parameter that a block changes": Refusal(
        "a block changes its parameter ",
        lambda: cut(plain, Clamps),
        ["'blocks.0.weight'", "change it between steps"],
        [steps_with_clamps_between],
    ),
    "a buffer of two stages": Refusal(
        "need it; change it and read it in one block",
        lambda: split(counted(build(counts))),
        ["'count'", "`m.count += 1` (test_refusals.py, line ", "stages 0 and 1 ",
         "cut so that one stage does both"],
        [lambda: cut(plain, Counts), lambda: check(counted(build(counts_between)))],
    ),
    "an attribute of the model": Refusal(
        "where each stage would change its own",
        lambda: cut(keeps_number),
        ["Model changes n_calls", "change it in a block", "a buffer"],
        [lambda: cut(plain, KeepsNumber), lambda: check(counted(build(count_only)))],
    ),
    "a tensor of the batch before": Refusal(
        "where each stage would change its own",
        lambda: split(build(reads_last, last=lambda: None), 4),
        ["Model changes last", "change it in a block", "a buffer"],
        [lambda: cut(asks_for_last, last=lambda: None)],
    ),
    "a batch norm of several stages": Refusal(
        "changes buffers or attributes of its own",
        lambda: cut(one_norm, norm=Norm),
        ["stages 0 and 1 ", "'norm'", "one stage has all its calls", "a module of its own"],
        [lambda: cut(norm_twice, norm=Norm), lambda: cut(norms, norms=four_norms)],
    ),
    "a batch norm of several stages in training mode": Refusal(
        "changes buffers or attributes of its own",
        lambda: trained_in_evaluation(split(build(one_norm, norm=Norm).eval())),
        ["stage 0 cannot run in training mode", "'norm'", "a module of its own"],
        [lambda: trained_in_evaluation(split(build(norms, norms=four_norms).eval()))],
    ),
    "forwards that differ": Refusal(
        "two forwards of ",
        lambda: check(build(plain, Counter)),
        ["Model differ", "nothing but buffers"],
        [lambda: check(build(plain, Counts))],
    ),
    "random numbers of one stage": Refusal(
        "the stages draw other random numbers than ",
        lambda: check(build(dropout_before)),
        ["Model", "`return plain(m, F.dropout(x, training=m.training))` (test_refusals.py, line ",
         "nn.Dropout", "call model.eval() and split again"],
        [lambda: check(build(drop_before, drop=nn.Dropout)),
         lambda: check(build(dropout_before).eval())],
    ),
    "a type of a block": Refusal(
        "stages fail where the model does not: ",
        lambda: cut(asks_type),
        ["AssertionError", "`assert type(m.blocks[3]) is nn.Linear` (test_refusals.py, line ",
         "use their results alone"],
        [cut],
    ),
    "reentrant checkpoints": Refusal(
        "cannot be compared by torch.autograd.grad",
        lambda: check(build(plain, Reentrant)),
        ["Model", "use_reentrant=False"],
        [lambda: check(build(plain, Checkpointed))],
    ),
    "a checkpoint of two blocks": Refusal(
        "the model's forward has a checkpoint of several modules",
        lambda: cut(checkpoint_of_two),
        ["'blocks.0'", "each of them alone"],
        [lambda: cut(checkpoint_of_each)],
    ),
    "a number that a block returns": Refusal(
        "returns a number beside tensors",
        lambda: cut(multiplies, Number),
        ["'blocks.0'", "return it as a tensor"],
        [lambda: cut(multiplies, Tensors)],
    ),
    "a sample that fails": Refusal(
        " fails on the sample: ",
        lambda: px.split(build(fails_on_long), 2, sample=X),
        ["ValueError: too many samples",
         '`raise ValueError("too many samples")` (test_refusals.py, line ',
         "give a sample that the model takes"],
        [lambda: px.split(build(fails_on_long), 2, sample=X[:4])],
    ),
    "a batch that fails": Refusal(
        "give a batch that the model takes",
        lambda: px.split(build(fails_on_long), 2, sample=X[:4]).report(X),
        ["stage 0", "ValueError: too many samples", "(test_refusals.py, line "],
        [lambda: px.split(build(fails_on_long), 2, sample=X[:4]).report(X[:3])],
    ),
    "a shape of another batch": Refusal(
        "of another stage returns is not known: ",
        lambda: px.split(build(plain, Rows), 2, sample=X[:3])(X),
        ["'blocks.0'", "split with such a sample"],
        [lambda: px.split(build(plain, Rows), 2, sample=X)(X)],
    ),
    "random numbers of Python": Refusal(
        "the forward draws random numbers of Python or numpy outside of its blocks",
        lambda: cut(random_sign),
        ["`x = torch.tanh(block(x))` (test_refusals.py, line ", "draw them inside of a block"],
        [lambda: cut(plain, Sign)],
    ),
    "random numbers of numpy at the end": Refusal(
        "the forward draws random numbers of Python or numpy outside of its blocks",
        lambda: cut(late_numpy_sign),
        ["before its end"],
        [lambda: cut(plain, Sign)],
    ),
    "a hook on a value": Refusal(
        "the forward gives a tensor a hook outside of its blocks",
        lambda: cut(hook_on_value),
        ["`first.register_hook(lambda gradient: gradient * 2)` (test_refusals.py, line ",
         "register it inside a block"],
        [lambda: cut(plain, Hooked)],
    ),
    "functions alone": Refusal(
        "calls no module that has parameters",
        lambda: split(Branching()),
        ["Branching", "torch.export does not help (", "let modules have parameters"],
        [lambda: check(Modules())],
    ),
    "a shape of torch.export": Refusal(
        "but torch.export fixed it to ",
        lambda: split(Functions())(torch.ones(2, 2, 2)),
        ["(2, 2, 2)", "(any, 4)", "split again with a sample of this shape"],
        [lambda: split(Functions())(torch.ones(2, WIDTH))],
    ),
    "a gradient that the sample did not need": Refusal(
        "needs a gradient, which the sample's did not",
        lambda: run_detaching(X[:2], X.abs()),
        ["'blocks.1'", "split with such a sample"],
        [lambda: run_detaching(X.abs(), X.abs())],
    ),
    "a write that the sample did not do": Refusal(
        "writes in place to a value of another stage",
        lambda: run_doubling(X[:2]),
        ["stage 1", "write to a clone()", "split with a sample that takes this way"],
        [lambda: run_doubling(X[4:])],
    ),
    "a write to a missing value": Refusal(
        "writes in place to a value of another stage",
        lambda: run_with_first(lambda block, first, y: block(y + first.mul_(2)), -X.abs()),
        ["stage 1", "write to a clone()", "split with a sample that takes this way"],
        [lambda: run_with_first(lambda block, first, y: block(y + first.mul_(2)), X.abs()),
         lambda: cut(with_first(lambda block, first, y: block(y + 2 * first.clone()), True))],
    ),
    "a mode of torch.export": Refusal(
        " cannot run in ",
        lambda: evaluated(split(Dropping())),
        ["stage 0", "evaluation mode", "torch.export has one mode, and Dropping",
         "call model.eval() and split again"],
        [lambda: evaluation_equals(Dropping())],
    ),
    "a mode of torch.export in training": Refusal(
        " cannot run in ",
        lambda: trained_in_evaluation(split(Dropping().eval())),
        ["stage 0", "training mode", "call model.train() and split again"],
        [lambda: trained_in_evaluation(split(Dropping()))],
    ),
    "a block that the sample did not call": Refusal(
        ", which that of the sample did not; stages take one way",
        lambda: px.split(build(without_one), 2, sample=-X.abs())(X.abs()),
        ["'blocks.2'", "`x = m.blocks[k](x)` (test_refusals.py, line ", "let all batches take it",
         "split with a sample that does"],
        [lambda: px.split(build(without_one), 2, sample=X.abs())(X.abs()), cut],
    ),
    "another order of blocks": Refusal(
        ", where that of the sample ",
        lambda: px.split(build(by_sum((0, 2, 1, 3))), 2, sample=-X.abs())(X.abs()),
        ["'blocks.2'", "called 'blocks.1'", "(test_refusals.py, line ", "let all batches take it",
         "split with a sample that does"],
        [lambda: px.split(build(by_sum((0, 2, 1, 3))), 2, sample=X.abs())(X.abs()), cut],
    ),
    "more calls of blocks": Refusal(
        ", where that of the sample ",
        lambda: px.split(build(by_sum((0, 1, 2, 3, 3))), 2, sample=-X.abs())(X.abs()),
        ["'blocks.3'", "ended", "(test_refusals.py, line ", "let all batches take it",
         "split with a sample that does"],
        [lambda: px.split(build(by_sum((0, 1, 2, 3, 3))), 2, sample=X.abs())(X.abs()), cut],
    ),
    "fewer calls of blocks": Refusal(
        "the forward returns without calling ",
        lambda: px.split(build(by_sum((0, 1, 2))), 2, sample=-X.abs())(X.abs()),
        ["'blocks.3'", "let all batches take it", "split with a sample that does"],
        [lambda: px.split(build(by_sum((0, 1, 2))), 2, sample=X.abs())(X.abs()), cut],
    ),
    "a value that the sample did not read": Refusal(
        "a value that its stage did not receive",
        lambda: run_with_first(reads_first, -X.abs()),
        ["`return block(y) * (2 if first.sum() > 0 else 3)` (test_refusals.py, line ",
         "let all batches take it", "split with a sample that does"],
        right_with_first(reads_first),
    ),
    "a value that the sample did not list": Refusal(
        "a value that its stage did not receive",
        lambda: run_with_first(lists_first, -X.abs()),
        ["for x in first.tolist() if x[0] > 0", "(test_refusals.py, line "],
        right_with_first(lists_first),
    ),
    "a value that the sample did not give a block": Refusal(
        "as the forward of the sample did not need it there",
        lambda: run_with_first(lambda block, first, y: block(y + first), -X.abs()),
        ["'blocks.3' takes a value that stage 1", "let all batches take it",
         "split with a sample that does"],
        right_with_first(lambda block, first, y: block(y + first)),
    ),
    "a value that the sample did not write": Refusal(
        "as the forward of the sample did not need it there",
        lambda: run_with_first(writes_first, -X.abs()),
        ["'blocks.3' takes a value that stage 1"],
        right_with_first(writes_first),
    ),
    "a value that the sample did not write and read": Refusal(
        "a value that its stage did not receive",
        lambda: run_with_first(reads_written, -X.abs()),
        ["`return block(y) * (2 if rows.max() > 0 else 3)` (test_refusals.py, line "],
        right_with_first(reads_written),
    ),
    "a value that the sample did not return": Refusal(
        "as the forward of the sample did not need it there",
        lambda: run_with_first(lambda block, first, y: block(y) + first, -X.abs()),
        ["the forward returns a value that stage 1", "let all batches take it",
         "split with a sample that does"],
        right_with_first(lambda block, first, y: block(y) + first),
    ),
    "another order in evaluation mode": Refusal(
        " cannot run in ",
        lambda: evaluated(split(build(other_order_in_evaluation))),
        ["stage 0", "evaluation mode without gradients", "'blocks.3'", "'blocks.0'",
         "call model.eval() and split again"],
        [lambda: evaluation_equals(build(other_order_in_evaluation))],
    ),
    "another order in training mode": Refusal(
        " cannot run in ",
        lambda: trained_in_evaluation(split(build(other_order_in_evaluation).eval())),
        ["stage 0", "training mode with gradients", "call model.train() and split again"],
        [lambda: cut(other_order_in_evaluation)],
    ),
    "fewer blocks in evaluation mode": Refusal(
        " cannot run in ",
        lambda: evaluated(split(build(fewer_in_evaluation))),
        ["evaluation mode", "its forward ends where that of the sample called 'blocks.3'",
         "call model.eval() and split again"],
        [lambda: evaluation_equals(build(fewer_in_evaluation))],
    ),
    "more tensors in evaluation mode": Refusal(
        " cannot run in ",
        lambda: evaluated(split(build(of_any, MoreInEvaluation))),
        ["evaluation mode", "'blocks.0' returns another number of tensors",
         "call model.eval() and split again"],
        [lambda: evaluation_equals(build(of_any, MoreInEvaluation))],
    ),
    "another order without gradients": Refusal(
        " cannot run in ",
        lambda: without_gradients(split(build(other_order_without_gradients))),
        ["without gradients", "'blocks.3'", "not depend on torch.is_grad_enabled()"],
        [lambda: run(split(build()), recompute="always")],
    ),
    "other values without gradients": Refusal(
        "the model returns other values without gradients than with them",
        lambda: without_gradients(split(build(other_values_without_gradients))),
        ["stage 0", "training mode", "lower the schedule with recompute='never'"],
        [lambda: run(split(build(other_values_without_gradients)), recompute="never")],
    ),
    "a value of inference mode": Refusal(
        "it is a tensor of torch.inference_mode",
        lambda: cut(inference),
        ["stage 0", "what 'blocks.0' returned", "use torch.no_grad in its place"],
        [lambda: cut(no_gradient)],
    ),
    "a write that the sample lacks": Refusal(
        "it was changed in place after that",
        lambda: px.split(build(writes_sometimes), 2, sample=-X.abs())(X.abs()),
        ["stage 0", "what 'blocks.0' returned", "a clone()", "a sample for which it writes"],
        [lambda: px.split(build(writes_clone_sometimes), 2, sample=-X.abs())(X.abs()),
         lambda: px.split(build(writes_sometimes), 2, sample=X.abs())(X.abs())],
    ),
    "hooks of the model": Refusal(
        " has hooks, and stages would each run them",
        lambda: split(hooked("")),
        ["'Model'", "add them to its blocks", "remove them"],
        [lambda: check(hooked("blocks.1")), cut],
    ),
    "a backward hook at the end of a stage": Refusal(
        " has a backward hook and ends stage ",
        lambda: split(hooked("blocks.1", backward=True)),
        ["'blocks.1'", "stage 0", "cut behind another module", "give its parts the hook"],
        [lambda: check(hooked("blocks.1", backward=True), [3, 1])],
    ),
    "hooks after the split": Refusal(
        " of the model has got or lost hooks since pipeexec.split",
        lambda: hooks_later(lambda _, m: m.blocks[1].register_forward_hook(lambda *_: None)),
        ["'blocks.1'", "stage.model.get_submodule('blocks.1')"],
        [lambda: hooks_later(
            lambda s, _: s[0].model.get_submodule("blocks.1").register_forward_hook(
                lambda *_: None))],
    ),
    "hooks of a parameter of two stages": Refusal(
        "hooks would run for one of them",
        lambda: split(tied(is_hooked=True)),
        ["stages [0, 1]", "'blocks.0.weight'", "remove its hooks", "one stage has it"],
        [lambda: check(tied()), lambda: check(tied(is_hooked=True), 1)],
    ),
    "stages that differ": Refusal(
        "the stages differ from ",
        lambda: cut(asks_gradient),
        ["Model in training mode", "requires_grad", "check=False"],
        [lambda: run(split(build(asks_gradient), check=False)), cut],
    ),
    "stages of other processes": Refusal(
        "only a pipeexec.Pipeline of all processes can run them",
        lambda: only([1])(X),
        ["stages [0]"],
        [lambda: only([0, 1])(X)],
    ),
    "stages in another order": Refusal(
        "give all stages of one split in their order",
        lambda: run(list(reversed(split(build())))),
        ["stage 0 of 2 is stage 1 of 2"],
        [lambda: run(split(build()))],
    ),
    "a schedule of other stages": Refusal(
        "give a schedule of as many stages",
        lambda: split(build()).report(schedules=[ps.schedule("gpipe", 3, 4)]),
        ["'gpipe' has 3 stages", "the split 2", "split into as many"],
        [lambda: split(build()).report(schedules=[ps.schedule("gpipe", 2, 4)]),
         lambda: split(build(), 3).report(schedules=[ps.schedule("gpipe", 3, 4)])],
    ),
    "a batch of another nesting": Refusal(
        "the batch is nested as ",
        lambda: split(build())({"x": X}),
        ["(x=Tensor)", "(Tensor)", "in the same form"],
        [lambda: split(build())(X)],
    ),
    "another value that is no tensor": Refusal(
        "values that are no tensors are those of the sample",
        lambda: px.split(Scales(), 2, sample=(X, 2.0))((X, 3.0)),
        ["inputs[1] is 3.0", "it was 2.0", "split again with a sample of these values"],
        [lambda: px.split(Scales(), 2, sample=(X, 3.0))((X, 3.0))],
    ),
    "a sample without a tensor": Refusal(
        "sample has no tensor",
        lambda: px.split(build(), 2, sample=3),
        ["got int", "a tensor, a tuple of positional arguments, or a dict"],
        [lambda: px.split(build(), 2, sample=X), lambda: px.split(build(), 2, sample=(X,)),
         lambda: px.split(build(), 2, sample={"x": X})],
    ),
    "a loss that fails": Refusal(
        "loss_fn fails on the model's output",
        lambda: split(build()).check(X, lambda y: y.loss),
        ["AttributeError"],
        [lambda: split(build()).check(X, lambda y: y.sum())],
    ),
    "a loss of many elements": Refusal(
        "loss_fn must return a tensor of one element that has a gradient",
        lambda: split(build()).check(X, lambda y: y),
        ["got tensor("],
        [lambda: split(build()).check(X, lambda y: y.sum())],
    ),
    "a mode that stays": Refusal(
        "in another mode than it had (",
        lambda: cut(leaves_mode),
        ["'blocks.1'", "training=False", "set modes outside of the forward", "set them back"],
        [lambda: cut(sets_mode_back), cut],
    ),
    "a model whose graph can be cut": Refusal(
        "; or give way='graph', which can cut this model",
        lambda: cut(with_dropout),
        ["(test_refusals.py, line "],
        [lambda: cut_graph(build(with_dropout))],
    ),
    "a graph without data": Refusal(
        "way='graph' needs a model with data",
        lambda: split(maker(defined), way="graph"),
        ["give the model itself"],
        [lambda: cut_graph(maker(defined)())],
    ),
    "a backward hook and a graph": Refusal(
        " has a backward hook, which a graph of torch.export does not run",
        lambda: cut_graph(hooked("blocks.0", backward=True)),
        ["'blocks.0'", "remove it", "way='modules'"],
        [lambda: cut_graph(build()), lambda: check(hooked("blocks.0", backward=True))],
    ),
    "state and a graph": Refusal(
        "which a graph of torch.export does not do",
        lambda: cut_graph(build(plain, Counting)),
        ["'blocks.0.calls'", "make it a buffer", "way='modules'"],
        [lambda: cut_graph(build(plain, partial(Counting, is_buffer=True))),
         lambda: cut(plain, Counting)],
    ),
    "no graph": Refusal(
        "torch.export makes no graph of ",
        lambda: cut_graph(build(by_sum((0, 2, 1, 3)))),
        ["Model", "data-dependent", "way='modules'"],
        [lambda: cut_graph(build()), lambda: px.split(build(by_sum((0, 2, 1, 3))), 2, sample=X)],
    ),
    "a generator in a graph": Refusal(
        "the graph keeps an object that the forward makes, a generator",
        lambda: cut_graph(build(with_generator)),
        ["torch.export makes no graph of Model", "way='modules'"],
        [lambda: cut_graph(build(with_fixed_numbers)), lambda: cut(with_generator)],
    ),
    "a constructor that takes memory": Refusal(
        "takes the memory of a tensor",
        lambda: split(maker(by_numpy)),
        ["Tensor.numpy", "make the model and give it itself"],
        made_and_given(by_numpy),
    ),
    "a constructor that makes sparse tensors": Refusal(
        "the constructor fails where px.split runs it without data: ",
        lambda: split(maker(sparse)),
        ["NotImplementedError", "make the model and give it itself"],
        made_and_given(sparse),
    ),
    "a constructor that writes to tensors with data and without": Refusal(
        "into tensors with data and without",
        lambda: split(maker(with_data)),
        ["frexp", "make the model and give it itself"],
        made_and_given(with_data),
    ),
    "a constructor that writes by a function without a kernel": Refusal(
        ", which fails without data (",
        lambda: split(maker(written_without_kernel)),
        ["nonzero", "make the model and give it itself"],
        made_and_given(written_without_kernel),
    ),
    "a constructor that uses a GPU": Refusal(
        ", not on the CPU",
        lambda: split(maker(on_gpu)),
        ["mps", "make the model and give it itself"],
        [],
    ),
    "a constructor that makes tensors without data": Refusal(
        "the constructor takes a tensor without data that it did not make",
        lambda: split(maker(without_data)),
        ["make the model and give it itself"],
        made_and_given(without_data),
    ),
    "a constructor that leaves memory as it is": Refusal(
        "the constructor gives no values to ",
        lambda: split(maker(undefined)),
        ["0.other", "initialize it", "make the model and give it itself"],
        [lambda: check(maker(defined)), *made_and_given(undefined)],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
@pytest.mark.parametrize("name", REFUSALS)
def test_the_advice_of_a_refusal_works(name: str) -> None:
    text, wrong, parts, right = REFUSALS[name]
    with pytest.raises(PipeError) as caught:
        wrong()
    message = str(caught.value)
    own = re.sub(r"`.*` \(\S+, line \d+\)|; or give way='graph', .*", "", message)
    assert len(own) <= MOST_CHARACTERS
    assert all(part in message for part in (text, *parts)), message
    for follow in right:
        follow()


def _literal(node: ast.expr) -> str:
    """Return the constant parts of a text, with a mark for others."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(x.value) if isinstance(x, ast.Constant) else "{}" for x in parts)


def _refusals(path: Path) -> list[str]:
    """Return the messages of all refusals in a file."""
    result = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("ArgumentError", "ArgumentTypeError", "ExecutionError", "_refused"):
                texts = (x for x in node.args if isinstance(x, ast.JoinedStr | ast.Constant))
                result += [_literal(x) for x in texts]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("refused["):
            result += [_literal(x) for x in ast.walk(node.value) if isinstance(x, ast.JoinedStr)]
            if isinstance(node.value, ast.Constant):
                result.append(node.value.value)
    return result


#: Messages about arguments of `split` and of calls with its stages, which have tests of their own.
ARGUMENTS = (
    "must be bytes, a number of 0 to", "must name stages of 0 to", "model must be an nn.Module",
    ", chain=False), and other modules are beside it", "and the stages have {}; give a schedule of",
    "stages of way='graph' are a chain; give way='modules' with chain=False",
)  # fmt: skip
#: Texts around messages that have rows.
FRAMES = ("the constructor {}; make the model and give it itself", "{}; {}")


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda x: x.stem)
def test_every_refusal_has_a_row(path: Path) -> None:
    texts = [row.text for row in REFUSALS.values()]
    messages = [] if path.name == "cuts.py" else _refusals(path)
    messages = [x for x in messages if x not in FRAMES]
    missing = [x for x in messages if not any(text in x for text in (*texts, *ARGUMENTS))]
    assert not missing
