"""Modules whose backward can be split into I and W, with their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeexec.demo_models.gpt import gpt
from pipeexec.demo_models.image_models import convnet


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
    """Differentiates within its forward, and computes with the gradient."""

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
    """A composite function that has weights, and a layer."""

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
    """A layer whose output is unused gets no gradient."""

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


def tokens_of_samples() -> tuple[Tensor, ...]:
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
    "embedding": lambda: Case(nn.Embedding(6, 8), tokens_of_samples()),
    "embedding with padding": lambda: Case(
        nn.Embedding(6, 8, padding_idx=2, scale_grad_by_freq=True), tokens_of_samples()
    ),
    "embedding with a norm": lambda: Case(nn.Embedding(6, 8, max_norm=1.0), tokens_of_samples()),
    "sparse embedding": lambda: Case(nn.Embedding(6, 8, sparse=True), tokens_of_samples()),
    "tied embedding": lambda: Case(TiedEmbedding(), tokens_of_samples()),
    "tied": lambda: Case(Tied(), (X,)),
    "products": lambda: Case(Products(), (X,)),
    "transformer": lambda: Case(gpt(n_layers=1, d_model=8, n_heads=2, sequence=4)[1], (X,)),
    "transformer with dropout": lambda: Case(
        gpt(n_layers=1, d_model=8, n_heads=2, sequence=4, dropout=0.5)[1], (X,)
    ),
    "language model": lambda: Case(
        gpt(n_layers=1, d_model=8, n_heads=2, sequence=4, vocabulary=6), tokens_of_samples()
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
