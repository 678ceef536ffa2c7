"""Models from a function: values as those of the whole model after the same seed, or an error."""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Forked
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils import parametrizations, parametrize

import pipeexec as px
from pipesim.errors import PipeError

WIDTH = 6


class Block(nn.Module):
    """A layer with parameters, and buffers of all kinds of constructors."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def made_by(*changes: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """Return a function that makes a block for each change, one before and one after them."""

    def make() -> nn.Module:
        return nn.Sequential(*(Block(x) for x in (lambda _: None, *changes, lambda _: None)))

    return make


def state(module: nn.Module) -> dict[str, Tensor]:
    return dict((*module.named_parameters(), *module.named_buffers()))


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002  the one that constructors use


def end() -> list[Any]:
    state = torch.get_rng_state().tolist()
    return [state, random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002


def check(make: Callable[[], nn.Module], sample: Any = None) -> None:
    """Compare each stage alone with the whole model."""
    seed()
    whole, at_end = make(), end()
    expected, names = state(whole), set()
    for k in range(2):
        seed()
        sample = torch.ones(2, WIDTH) if sample is None else sample
        stage = px.split(make, 2, sample=sample, only=[k])[k]
        assert end() == at_end
        for name, value in state(stage).items():
            name = stage.model_name(name)
            assert not value.is_meta, name
            if (name in expected and value.stride() != (0,) * value.dim()) or value.dim() == 0:
                assert value.dtype == expected[name].dtype, name
                assert torch.equal(value, expected[name]), name
                assert value.requires_grad == expected[name].requires_grad, name
                names.add(name)
    assert names == expected.keys()


def orthogonal(m: Any) -> None:
    init.orthogonal_(m.layer.weight)


def orthogonal_wide(m: Any) -> None:
    m.wide = nn.Parameter(torch.empty(3, 8, 2))
    init.orthogonal_(m.wide, gain=2.0)


def sparse(m: Any) -> None:
    init.sparse_(m.layer.weight, 0.3)


def dirac(m: Any) -> None:
    m.kernel = nn.Parameter(torch.empty(4, 4, 3))
    init.dirac_(m.kernel)
    init.eye_(m.layer.weight)


def truncated(m: Any) -> None:
    init.trunc_normal_(m.layer.weight, std=0.5, a=-0.4, b=0.6)


def truncated_far(m: Any) -> None:
    init.trunc_normal_(m.layer.weight, mean=0.0, std=1.0, a=2.0, b=3.0)


def data_is(m: Any) -> None:
    m.layer.weight.data = torch.randn(WIDTH, WIDTH) * 0.01


def data_scaled(m: Any) -> None:
    m.layer.weight.data = m.layer.weight.data / 10


def data_from_list(m: Any) -> None:
    m.layer.bias.data = torch.tensor([1.0, 2, 3, 4, 5, 6])
    m.layer.bias.data[2] = torch.randn(())


def data_from_numpy(m: Any) -> None:
    values = np.random.randn(WIDTH, WIDTH).astype("float32")  # noqa: NPY002
    m.layer.weight.data = torch.from_numpy(values)
    values[1] = 0


def data_of_a_buffer(m: Any) -> None:
    m.register_buffer("scale", torch.tensor([1.0, 2.0]))
    m.scale.data = torch.randn(3, 4)


def copied_from_numpy(m: Any) -> None:
    values = np.random.randn(WIDTH, WIDTH)  # noqa: NPY002
    with torch.no_grad():
        m.layer.weight.copy_(torch.from_numpy(values))
    values[:] = 0


def python_random(m: Any) -> None:
    m.layer.weight.data.fill_(random.random())
    m.order = nn.Parameter(torch.tensor([random.gauss(0, 1) for _ in range(4)]))


def seeded(m: Any) -> None:
    torch.manual_seed(7)
    init.normal_(m.layer.weight)


def forked(m: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        init.normal_(m.layer.weight)


def state_of_generator(m: Any) -> None:
    before = torch.get_rng_state()
    init.normal_(m.layer.weight)
    torch.set_rng_state(before)
    init.normal_(m.layer.bias)


def own_generator(m: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    init.normal_(m.layer.weight, generator=generator)
    m.noise = nn.Parameter(torch.randn(4, generator=generator))
    m.register_buffer("order", torch.randperm(5, generator=generator))
    m.layer.bias.data.uniform_(generator=generator)


def generator_of_the_device(m: Any) -> None:
    generator = torch.Generator(device=m.layer.weight.device).manual_seed(5)
    m.layer.weight.data = torch.rand(
        WIDTH, WIDTH, generator=generator, device=m.layer.weight.device
    )


def seed_from_a_draw(m: Any) -> None:
    torch.manual_seed(int(torch.randint(1000, ()).item()))
    init.normal_(m.layer.weight)


def gamma(m: Any) -> None:
    with torch.no_grad():
        m.layer.weight.copy_(torch.distributions.Gamma(2.0, 1.0).sample((WIDTH, WIDTH)))


def distributions(m: Any) -> None:
    ones = torch.ones(3)
    m.a = nn.Parameter(torch.distributions.Beta(ones, 2 * ones).sample())
    m.b = nn.Parameter(torch.distributions.Dirichlet(torch.rand(4)).sample())
    m.c = nn.Parameter(torch.distributions.StudentT(ones * 3).sample((2,)))
    m.d = nn.Parameter(torch.distributions.Laplace(0.0, ones).sample())
    m.e = nn.Parameter(torch.distributions.Poisson(ones * 4).sample((3,)))
    m.register_buffer("f", torch.distributions.Categorical(torch.rand(5)).sample((3,)))
    m.register_buffer("g", torch.distributions.Binomial(20, torch.rand(5)).sample())


def draws_of_tensors(m: Any) -> None:
    m.a = nn.Parameter(torch.normal(torch.randn(5), 0.3))
    m.b = nn.Parameter(torch.normal(torch.zeros(5), torch.rand(5)))
    m.c = nn.Parameter(torch.bernoulli(torch.rand(7)))
    m.d = nn.Parameter(torch.empty(5).bernoulli_(torch.rand(5)))
    m.register_buffer("e", torch.multinomial(torch.rand(8), 3))
    m.f = nn.Parameter(torch.poisson(torch.rand(6) * 9))
    m.g = nn.Parameter(torch.randn_like(m.f) + torch.rand_like(m.a).sum())
    m.h = nn.Parameter(nn.functional.dropout(torch.ones(9), 0.5))
    m.register_buffer("i", torch.randint_like(m.f, 3, 30))


def draws_in_place(m: Any) -> None:
    for k, name in enumerate(("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_")):
        setattr(m, f"p{k}", nn.Parameter(getattr(torch.empty(40), name)()))
    m.q = nn.Parameter(torch.empty(20).geometric_(0.3))
    m.register_buffer("r", torch.empty(5, dtype=torch.int64).random_(3, 9))


def part_of_a_tensor(m: Any) -> None:
    with torch.no_grad():
        m.layer.weight[0].normal_()
        m.layer.weight[:, 1:3].uniform_()
        m.layer.weight.t()[4].exponential_()


def transposed_draw(m: Any) -> None:
    m.w = nn.Parameter(torch.empty(20, 30).t())
    init.normal_(m.w)


def rejection(m: Any) -> None:
    while True:
        init.normal_(m.layer.weight)
        if bool((m.layer.weight > 1.5).any()) and (m.layer.bias < 1).all():
            break


def loop_of_values(m: Any) -> None:
    w = m.layer.weight.data
    while w.abs().max() > 0.2:
        w.mul_(0.8)
        w[0, 0] += torch.rand(()) * 0.01


def by_values(m: Any) -> None:
    w = m.layer.weight.data
    w[w > 0.1] = 0.5
    m.chosen = nn.Parameter(w[w > 0])
    m.register_buffer("where", w.nonzero())
    m.register_buffer("unique", torch.unique(torch.randint(5, (9,))))
    m.layer.bias.data = m.chosen.data[:WIDTH].clone()


def reads(m: Any) -> None:
    m.layer.weight.data.mul_(m.layer.weight.std().item())
    m.a = nn.Parameter(torch.tensor(m.layer.bias.tolist()) * 2)
    m.b = nn.Parameter(torch.tensor([float(x) for x in m.layer.weight[0].detach()]))
    m.c = nn.Parameter(torch.full((3,), max(m.layer.bias).item()))
    m.d = nn.Parameter(torch.ones(int(torch.randint(2, 9, ()))))
    if torch.equal(m.a, m.layer.bias) or torch.allclose(m.a, m.layer.bias):
        init.zeros_(m.layer.weight)
    if 0.5 in m.layer.weight:
        init.ones_(m.layer.weight)


def lazy_rates(m: Any) -> None:
    m.rates = [x.item() for x in torch.linspace(0, 1, 4)]
    m.a = nn.Parameter(torch.full((2,), m.rates[2]) * torch.tensor(m.rates[:2]))


def double(m: Any) -> None:
    m.layer.double()
    init.uniform_(m.layer.weight)
    m.layer.float()


def half(m: Any) -> None:
    m.layer.half()
    m.layer.weight.data.div_(3)
    m.other = nn.Linear(3, 3, dtype=torch.bfloat16)
    m.layer.to(torch.float32)


def on_the_cpu(m: Any) -> None:
    m.layer.to("cpu")
    same = m.layer.weight.data.cpu()
    same.mul_(2)
    m.layer.bias.data.to(device=torch.device("cpu")).add_(1)
    m.layer.bias.data.to(torch.tensor(1.0)).add_(1)
    with torch.device("cpu"):
        m.other = nn.Linear(3, 3)
    m.third = nn.Parameter(torch.randn(3, device=m.layer.weight.device))
    m.fourth = nn.Parameter(m.layer.bias.new_tensor([1, 2]) * m.layer.bias.new_ones(2))
    m.fifth = nn.Parameter(torch.tensor([1.0, 2], device=m.layer.weight.device))
    if m.layer.weight.is_meta or not m.layer.weight.is_cpu:
        init.zeros_(m.layer.weight)


def default_dtype(m: Any) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        m.other = nn.Linear(3, 3)
        m.a = nn.Parameter(torch.randint(9, (4,)) / 3)
    finally:
        torch.set_default_dtype(torch.float32)


def elements(m: Any) -> None:
    with torch.no_grad():
        m.layer.weight[2, 2] = 7
        m.layer.weight[1] = torch.tensor([1.0, 2, 3, 4, 5, 6])
        m.layer.weight[torch.arange(3), torch.tensor([3, 4, 5])] = torch.randn(3)
        m.layer.bias[m.layer.bias.argmax()] = -1
        m.layer.bias[1:3] = 9
        m.layer.weight[..., -1].zero_()


def shapes_in_place(m: Any) -> None:
    w = torch.randn(2, 3)
    w.t_()
    w[0] = 5
    v = w.clone().unsqueeze_(0)
    v.transpose_(0, 2).squeeze_()
    m.w, m.v = nn.Parameter(w), nn.Parameter(v)
    r = torch.ones(4)
    r.resize_(2)
    r.mul_(3)
    m.r = nn.Parameter(r)
    s = torch.rand(4)
    s.set_(w.view(-1)[1:3] if w.is_contiguous() else w.t()[0])
    s.add_(1)
    m.s = nn.Parameter(s.clone())


def views(m: Any) -> None:
    flat = torch.randn(12)
    m.a, m.b = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:].view(2, 4).t())
    flat[::2] = 1
    m.register_buffer("c", m.layer.weight.data[1])
    m.layer.weight.data.neg_()
    parts = torch.randn(4, 6).chunk(2)
    parts[1].zero_()
    m.d = nn.Parameter(torch.cat(parts, 1))
    vector = nn.utils.parameters_to_vector(m.layer.parameters())
    nn.utils.vector_to_parameters(vector * 2, m.layer.parameters())


def complex_values(m: Any) -> None:
    z = torch.randn(4, dtype=torch.complex64)
    m.z = nn.Parameter(z.conj())
    m.y = nn.Parameter(z.conj().imag * 2)
    real = torch.view_as_real(z)
    real[0] = 1
    angles = torch.outer(torch.arange(5), 1.0 / 10 ** (torch.arange(0, 4, 2) / 4))
    m.register_buffer("rotary", torch.polar(torch.ones_like(angles), angles))
    m.x = nn.Parameter(torch.fft.fft(torch.randn(8)))


def computed_buffers(m: Any) -> None:
    m.norm = nn.BatchNorm1d(WIDTH)
    m.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
    m.register_buffer("causal", torch.full((4, 4), float("-inf")).triu(1), persistent=False)
    steps = torch.arange(0, WIDTH, 2).float()
    m.register_buffer("inv_freq", 1.0 / 10000 ** (steps / WIDTH))
    places = torch.zeros(8, WIDTH)
    position = torch.arange(8).unsqueeze(1)
    places[:, 0::2] = torch.sin(position * torch.exp(steps * -math.log(10000.0) / WIDTH))
    m.register_buffer("places", places)
    m.register_buffer("mixed", torch.rand(8) + torch.arange(8))
    m.register_buffer("counts", torch.arange(4.0).copy_(torch.rand(4)))
    m.register_buffer("tri", torch.tril_indices(3, 3))


def linear_algebra(m: Any) -> None:
    q, r = torch.linalg.qr(torch.randn(5, 3))
    m.a = nn.Parameter(q @ r.diag().sign().diag())
    u, s, vh = torch.linalg.svd(m.layer.weight.data, full_matrices=False)
    m.layer.weight.data = u @ vh
    m.b = nn.Parameter(torch.linalg.eigh(torch.ones(3, 3) + torch.eye(3)).eigenvalues * s[0])
    m.c = nn.Parameter(torch.linalg.inv(torch.randn(3, 3)))
    m.d = nn.Parameter(torch.matrix_exp(torch.rand(3, 3)))
    m.e = nn.Parameter(torch.linalg.solve(torch.rand(3, 3), torch.rand(3)).sort().values)
    m.f = nn.Parameter(torch.linalg.cholesky(torch.eye(3) * 2))
    m.g = nn.Parameter(vh.mH.contiguous())


def copies_of_parameters(m: Any) -> None:
    m.other = copy.deepcopy(m.layer)
    m.third = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        m.third.weight.copy_(m.layer.weight)
    m.third.load_state_dict(m.layer.state_dict())
    m.layer.weight.data.mul_(2)
    m.ema = copy.deepcopy(m.third).requires_grad_(False)


def tied(m: Any) -> None:
    m.other = nn.Linear(WIDTH, WIDTH)
    m.other.weight = m.layer.weight
    m.layer.bias.requires_grad_(False)
    init.constant_(m.other.weight, 0.5)


def residual_scale(m: Any) -> None:
    for name, p in m.named_parameters():
        if name.endswith("weight"):
            p.data.normal_(mean=0.0, std=0.02 / math.sqrt(2 * 12))
        else:
            p.data.zero_()
    with torch.no_grad():
        m.layer.weight /= 3


def weight_norm(m: Any) -> None:
    m.layer = parametrizations.weight_norm(m.layer)


def spectral_norm(m: Any) -> None:
    m.layer = parametrizations.spectral_norm(m.layer)


def orthogonal_parametrization(m: Any) -> None:
    m.layer = parametrizations.orthogonal(m.layer)


def orthogonal_by_exponential(m: Any) -> None:
    m.layer = parametrizations.orthogonal(m.layer, orthogonal_map="matrix_exp")


class Symmetric(nn.Module):
    """Makes a matrix symmetric."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


def symmetric(m: Any) -> None:
    parametrize.register_parametrization(m.layer, "weight", Symmetric())
    m.layer.weight = torch.randn(WIDTH, WIDTH)


def old_spectral_norm(m: Any) -> None:
    m.other = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


def recurrent(m: Any) -> None:
    m.lstm = nn.LSTM(WIDTH, 4, num_layers=2, bidirectional=True)
    for name, p in m.lstm.named_parameters():
        if "weight_hh" in name:
            init.orthogonal_(p)
        elif "bias" in name:
            p.data[4:8].fill_(1)


def attention(m: Any) -> None:
    m.attention = nn.MultiheadAttention(WIDTH, 2)
    m.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 8)
    m.convolution = nn.Conv2d(3, 4, 3)
    m.embedding = nn.Embedding(7, 3, padding_idx=2)
    m.bag = nn.EmbeddingBag(7, 3)
    m.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.PReLU()])


def pretrained(m: Any) -> None:
    m.embedding = nn.Embedding.from_pretrained(torch.rand(4, 3))
    m.layer.load_state_dict({"weight": torch.arange(36.0).view(6, 6), "bias": torch.ones(6)})
    m.assigned = nn.Linear(2, 2)
    m.assigned.load_state_dict({"weight": torch.eye(2), "bias": torch.rand(2)}, assign=True)


def skipped(m: Any) -> None:
    m.other = nn.utils.skip_init(nn.Linear, 3, 3)
    init.normal_(m.other.weight)
    init.zeros_(m.other.bias)


def foreach(m: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(m.layer.parameters()), 2.0)
        torch.add(m.layer.bias, 1, out=m.layer.bias.data)


def trained(m: Any) -> None:
    optimizer = torch.optim.SGD(m.layer.parameters(), lr=0.1)
    for _ in range(2):
        m.layer(torch.randn(3, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def swapped(m: Any) -> None:
    other = nn.Linear(WIDTH, WIDTH)
    torch.utils.swap_tensors(m.layer.weight, other.weight)
    m.layer.weight, m.layer.bias = nn.Parameter(m.layer.weight.data.t()), other.bias


def legacy(m: Any) -> None:
    m.a = nn.Parameter(torch.Tensor(3, 2))
    init.xavier_uniform_(m.a)
    m.b = nn.Parameter(torch.FloatTensor(4).uniform_())
    m.c = nn.Parameter(torch.FloatTensor([1, 2]))
    m.d = nn.Parameter(m.a.data.new(2).fill_(3))


def quantiles(m: Any) -> None:
    limit = m.layer.weight.abs().flatten().kthvalue(20).values
    m.layer.weight.data = m.layer.weight.data * (m.layer.weight.abs() > limit)
    m.register_buffer("histogram", torch.histc(m.layer.weight.data, 4))
    m.register_buffer("order", m.layer.bias.argsort(descending=True))
    m.register_buffer("repeated", torch.repeat_interleave(torch.randint(1, 3, (3,))))


def tried_forward(m: Any) -> None:
    m.convolution = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.LazyConv2d(2, 1)
    )
    n = m.convolution(torch.randn(2, 3, 8, 8)).flatten(1).shape[1]
    m.other = nn.Linear(n, 2)


def trained_by_lbfgs(m: Any) -> None:
    x = torch.randn(8, WIDTH)
    optimizer = torch.optim.LBFGS(m.layer.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (m.layer(x) - x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def clustered(m: Any) -> None:
    points = torch.randn(30, 2)
    centers = points[torch.randperm(30)[:3]].clone()
    for _ in range(3):
        nearest = torch.cdist(points, centers).argmin(1)
        for k in range(3):
            if (nearest == k).sum() > 0:
                centers[k] = points[nearest == k].mean(0)
    m.centers = nn.Parameter(centers)


def chosen_greedily(m: Any) -> None:
    rows: list[Tensor] = []
    for row in torch.randn(20, 3):
        if not rows or min((row - x).norm() for x in rows) > 0.5:
            rows.append(row)
    m.rows = nn.Parameter(torch.stack(rows))


def normalized_in_turns(m: Any) -> None:
    w = m.layer.weight.data.abs()
    for _ in range(5):
        w /= w.sum(0, keepdim=True)
        w = w / w.sum(1, keepdim=True)
    m.layer.weight.data = w


def formatted(m: Any) -> None:
    m.text = f"{m.layer.weight.mean():.3f} {m.layer.weight}"
    m.layer.weight.data.fill_(float(m.text.split()[0]))


def failed_draw(m: Any) -> None:
    try:
        m.layer.weight.data.normal_(std=-1)
    except RuntimeError:
        m.layer.weight.data.normal_(std=2)


def from_the_meta_device(m: Any) -> None:
    with torch.device("meta"):
        layers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    m.a, m.b = layers[0].to_empty(device="cpu"), layers[1]
    m.a.load_state_dict(m.layer.state_dict())
    m.b.load_state_dict({k: x.clone() for k, x in m.layer.state_dict().items()}, assign=True)


def other_layouts(m: Any) -> None:
    m.a = nn.Parameter(torch.empty_strided((3, 4), (1, 3)).normal_())
    m.b = nn.Parameter(torch.as_strided(torch.randn(10), (3, 3), (3, 1), 1))
    m.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    init.kaiming_normal_(m.convolution.weight)
    with torch.inference_mode():
        w = torch.randn(WIDTH, WIDTH)
    m.layer.weight.data.copy_(w)


def tensors_with_data(m: Any) -> None:
    data = torch.arange(6.0)
    m.layer.bias.data = data
    data.mul_(2)
    scale = torch.tensor([1.0, 2.0])
    torch.add(torch.rand(2), 1, out=scale)
    scale += torch.rand(2)
    m.register_buffer("scale", scale)


def old_weight_norm(m: Any) -> None:
    m.other = nn.utils.weight_norm(nn.Linear(3, 3))


EQUAL = [
    orthogonal, orthogonal_wide, sparse, dirac, truncated, truncated_far, data_is, data_scaled,
    data_from_list, data_from_numpy, data_of_a_buffer, copied_from_numpy, python_random, seeded,
    forked, state_of_generator, own_generator, generator_of_the_device, seed_from_a_draw, gamma,
    distributions, draws_of_tensors, draws_in_place, part_of_a_tensor, transposed_draw, rejection,
    loop_of_values, by_values, reads, lazy_rates, double, half, on_the_cpu, default_dtype, elements,
    shapes_in_place, views, complex_values, computed_buffers, linear_algebra, copies_of_parameters,
    tied, residual_scale, weight_norm, spectral_norm, orthogonal_parametrization,
    orthogonal_by_exponential, symmetric, old_spectral_norm, recurrent, attention, pretrained,
    skipped, foreach, trained, swapped, legacy, quantiles, tried_forward, trained_by_lbfgs,
    clustered, chosen_greedily, normalized_in_turns, formatted, failed_draw, from_the_meta_device,
    other_layouts, tensors_with_data, old_weight_norm,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("first", range(0, len(EQUAL), 8))
def test_values_are_those_of_the_whole_model(first):
    """Of eight kinds of blocks at a time, as a split takes longer than they do."""
    check(made_by(*EQUAL[first : first + 8]))


def numpy(m: Any) -> None:
    m.layer.weight.detach().numpy()[:] = 1


def array(m: Any) -> None:
    np.asarray(m.layer.weight.detach())[:] = 1


def address(m: Any) -> None:
    if m.layer.weight.data_ptr() == m.layer.bias.data_ptr():
        init.zeros_(m.layer.weight)


def undefined(m: Any) -> None:
    m.other = nn.Parameter(torch.empty(3, 3))


def undefined_copy(m: Any) -> None:
    m.other = nn.Parameter(torch.empty(3, 3).double())


def sparse_tensor(m: Any) -> None:
    m.register_buffer("sparse", torch.eye(3).to_sparse())


def user_error(m: Any) -> None:
    raise ValueError("width must be even")


REFUSED = {
    numpy: r"the constructor takes the memory of a tensor \(Tensor.numpy\)",
    array: r"the constructor takes the memory of a tensor \(Tensor.__array__\)",
    address: r"the constructor takes the memory of a tensor \(Tensor.data_ptr\)",
    undefined: "the constructor gives no values to 1.other: its memory is as of torch.empty",
    undefined_copy: "the constructor gives no values to 1.other",
    sparse_tensor: "the constructor fails where px.split runs it without data: NotImplementedError",
    user_error: "the constructor fails .* without data: ValueError: width must be even",
}


@pytest.mark.parametrize("change", REFUSED)
def test_constructors_that_need_the_whole_model(change):
    message = f"{REFUSED[change]}.*make the model and give it itself"
    with pytest.raises(PipeError, match=message):
        px.split(made_by(change), 2, sample=torch.ones(2, WIDTH), only=[0, 1])


class Scaled(nn.Module):
    """A recurrent layer, after tensors of all kinds but parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.scale, self.shifts = torch.rand(WIDTH), [torch.rand(WIDTH), torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x * self.scale + self.shifts[0] + self.shifts[1])[0]


class Shifted(nn.Module):
    """A buffer, and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_tensors_that_are_no_parameters():
    """Tensors in attributes and lists of modules, and buffers of modules without parameters."""

    def make() -> nn.Module:
        return nn.Sequential(Scaled(), Shifted(), Scaled(), nn.Linear(WIDTH, WIDTH))

    x = torch.ones(2, 3, WIDTH)
    seed()
    expected = make()(x)
    seed()
    stages = px.split(make, 2, sample=x)
    assert torch.equal(stages[1](*stages[0](x)), expected)


MEMORY = """
import resource, torch, pipeexec as px
from torch import nn

def layer():
    result = nn.Linear(1000, 1000)
    nn.init.trunc_normal_(result.weight, std=0.5, a=-1.5, b=1.5)
    result.weight.data = result.weight.data / result.weight.norm().item()
    return result

def make(n=24):
    return nn.Sequential(*(layer() for _ in range(n)))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 4e3  # layers

px.split(lambda: make(6), 3, sample=torch.ones(1, 1000), only=[1])
before = peak()
px.split(make, 12, sample=torch.ones(1, 1000), only=[1])
print(peak() - before)
"""


def test_one_other_layer_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """Of 24 layers, with all values that the constructor reads."""
    script, log = tmp_path / "memory.py", tmp_path / "memory.log"
    script.write_text(MEMORY)
    assert Forked([str(script)], os.environ, log).wait() == 0, log.read_text()
    assert float(log.read_text()) < 14  # trunc_normal_ takes eight, and memory is trimmed at times
