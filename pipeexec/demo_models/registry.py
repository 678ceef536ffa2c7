"""Two small models with real work in them, data to train them on, and the split into stages.

A model is an ``nn.Sequential`` of layers, and a stage is a contiguous run of them: whatever stands
between two layers can be cut. No two layers share a parameter, so the language model's head is not
tied to its embedding. The file is longer than most because all that a ready-made model needs,
from its layers to its data, is in one place: a new model is one row of ``MODELS``.
"""

from __future__ import annotations

import inspect
import math
import random
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeexec.devices.host_memory import check_tensors
from pipesim.errors import ArgumentError, check_count, check_name, number
from pipesim.utils.atomic_write import check_path, read_bytes

__all__ = [
    "MODELS", "ModelSpec", "Workload", "batches", "build_model", "convnet", "cross_entropy", "gpt",
    "image_batch", "split", "text_batch",
]  # fmt: skip

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
BatchMaker = Callable[[int, int], Batch]
Parts = tuple[nn.Sequential, Loss, BatchMaker]
Option = int | float | str | Path | None

_LIBRARY_BYTES = 4 << 20
_FILE_BYTES = 64 << 20
#: What Python and torch need for the modules of a block, at least.
_BYTES_PER_BLOCK = 10_000


class _Embedding(nn.Module):
    """Token plus position: int64 (batch, sequence) to (batch, sequence, d_model)."""

    relative_cost = 0.04

    def __init__(self, vocabulary: int, sequence: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, d_model)
        self.position = nn.Embedding(sequence, d_model)
        self.dropout = _dropout(dropout)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length, longest = tokens.shape[1], self.position.num_embeddings
        if length > longest:
            raise ArgumentError(
                f"the embedding got samples of {length} tokens, and has positions for at most "
                f"{longest}; shorten the samples or build the model with sequence={length}"
            )
        x: Tensor = self.dropout(self.token(tokens) + self.position.weight[:length])
        return x


class _Block(nn.Module):
    """Pre-norm transformer block, causal: (batch, sequence, d_model) to the same."""

    relative_cost = 1.0

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.projection = nn.Linear(d_model, d_model)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model)
        )
        self.dropout = _dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.n_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(attended.transpose(1, 2).flatten(2)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (batch, channels, height, width) to the same."""

    relative_cost = 1.0

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(channels, channels), nn.ReLU(inplace=True), *_conv_norm(channels, channels)
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.body(x) + x)
        return y


def _conv_norm(n_in: int, n_out: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out)


def _dropout(p: float) -> nn.Module:
    # Without dropout there is no nn.Dropout at all, so that the modules tell which stage draws.
    return nn.Dropout(p) if p > 0 else nn.Identity()


def _layer(relative_cost: float, *modules: nn.Module) -> nn.Sequential:
    layer = nn.Sequential(*modules)
    layer.relative_cost = relative_cost  # type: ignore[assignment]
    return layer


def _check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        check_count(name, size)


def _generator(seed: int) -> torch.Generator:
    # Torch takes 64 bits; a longer seed, as of a hash, wraps.
    return torch.Generator().manual_seed(check_count("seed", seed, minimum=0) % (1 << 63))


def _check_parameters(n_parameters: int, **sizes: int) -> None:
    """Raise `CapacityError` for a model that does not fit: its parameters, and its modules."""
    modules = _BYTES_PER_BLOCK * next(iter(sizes.values()))  # the first size is the depth
    item = torch.get_default_dtype().itemsize
    each = ", ".join(f"{name}={size}" for name, size in sizes.items())
    check_tensors(f"a model of {each}", item * n_parameters + modules, "build a smaller one")


def _seeded(layers: Callable[[], list[nn.Module]], seed: int) -> nn.Sequential:
    """Build the layers from ``seed``, and leave the process's random generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(_generator(seed).get_state())
        return nn.Sequential(*layers())


def gpt(
    *,
    n_layers: int = 8,
    d_model: int = 256,
    n_heads: int = 4,
    sequence: int = 128,
    dropout: float = 0.0,
    vocabulary: int = 256,
    seed: int = 0,
) -> nn.Sequential:
    """Build a byte-level GPT: embedding, ``n_layers`` transformer blocks, final norm with head.

    Parameters
    ----------
    n_layers
        Transformer blocks; the model has ``n_layers + 2`` layers.
    d_model
        Width, a multiple of ``n_heads``.
    sequence
        The longest input, in tokens.
    dropout
        Probability, at least 0 and below 1, of dropping an element of the embedding or of a
        residual branch. Attention weights are not dropped.
    seed
        Of the initial weights.

    Returns
    -------
    nn.Sequential
        From int64 (batch, sequence) to logits (batch, sequence, vocabulary).

    Raises
    ------
    ArgumentError
        For a size that is no whole number of at least 1, heads that do not divide the width, or a
        dropout out of range; by the model, for an input longer than ``sequence``.
    """
    _check_sizes(n_layers=n_layers, d_model=d_model, n_heads=n_heads)
    _check_sizes(sequence=sequence, vocabulary=vocabulary)
    if d_model % n_heads:
        raise ArgumentError(
            f"d_model must be a multiple of n_heads, got d_model={d_model} and n_heads={n_heads}; "
            f"take d_model={math.ceil(d_model / n_heads) * n_heads}"
        )
    p = number(dropout)
    if p is None or not 0 <= p < 1:
        raise ArgumentError(
            f"dropout must be a probability of at least 0 and below 1, got {dropout!r}; 0 is none"
        )
    _check_parameters(
        n_layers * (12 * d_model**2 + 13 * d_model) + (2 * vocabulary + sequence) * d_model,
        n_layers=n_layers, d_model=d_model, sequence=sequence, vocabulary=vocabulary,
    )  # fmt: skip
    # 2 d V of a block's 24 d^2 operations a token, and a little for the norm and the loss.
    head_cost = vocabulary / (10 * d_model)
    return _seeded(
        lambda: [
            _Embedding(vocabulary, sequence, d_model, p),
            *(_Block(d_model, n_heads, p) for _ in range(n_layers)),
            _layer(head_cost, nn.LayerNorm(d_model), nn.Linear(d_model, vocabulary, bias=False)),
        ],
        seed,
    )


def convnet(
    *,
    n_blocks: int = 8,
    channels: int = 32,
    image_size: int = 32,
    n_classes: int = 10,
    seed: int = 0,
) -> nn.Sequential:
    """Build a residual network: a stem, ``n_blocks`` blocks of one width, pooling with classifier.

    The model has ``n_blocks + 2`` layers. Its ReLUs work in place and its batch norms keep running
    statistics, so that it asks more of a pipeline than the language model does: statistics are
    those of a micro-batch, and in training mode its outputs depend on the micro-batch size.

    Returns
    -------
    nn.Sequential
        From (batch, 3, image_size, image_size) to logits (batch, n_classes).

    Raises
    ------
    ArgumentError
        For a size that is no whole number of at least 1.
    """
    _check_sizes(n_blocks=n_blocks, channels=channels, image_size=image_size, n_classes=n_classes)
    _check_parameters(
        n_blocks * (18 * channels**2 + 4 * channels) + (27 + n_classes) * channels,
        n_blocks=n_blocks, channels=channels, n_classes=n_classes,
    )  # fmt: skip
    return _seeded(
        lambda: [
            _layer(0.15, *_conv_norm(3, channels), nn.ReLU(inplace=True)),
            *(_ResidualBlock(channels) for _ in range(n_blocks)),
            _layer(0.03, nn.AvgPool2d(image_size), nn.Flatten(), nn.Linear(channels, n_classes)),
        ],
        seed,
    )


def split(
    model: nn.Sequential, n_stages: int | None = None, *, balance: Sequence[int] | None = None
) -> list[nn.Sequential]:
    """Cut a model into contiguous stages, which share its modules and keep their names.

    Without ``balance`` the stages are as even as they can be: of all cuts, the one with the least
    sum of squared stage costs, and of equal ones that with more layers in the later stages, which
    hold fewer activations. A stage costs the sum of its layers' ``relative_cost``. The layers made
    here carry one in units of a block, as measured on a CPU at small sizes; any other layer counts
    1, so that a foreign model is split by its number of layers.

    Parameters
    ----------
    n_stages
        How many stages; may be left out where ``balance`` is given.
    balance
        How many layers each stage gets, in order.

    Raises
    ------
    ArgumentError
        For more stages than layers, a balance of the wrong length or sum, a count that is no whole
        number of at least 1, or a parameter that two stages would share.
    """
    if not isinstance(model, nn.Sequential):
        raise ArgumentError(
            f"only an nn.Sequential can be split, got {type(model).__name__}; "
            "wrap its layers in nn.Sequential"
        )
    if balance is not None:
        counts = _check_balance(balance, n_stages, len(model))
    elif n_stages is not None:
        costs = [float(getattr(layer, "relative_cost", 1.0)) for layer in model]
        counts = _even_counts(costs, check_count("n_stages", n_stages))
    else:
        raise ArgumentError("split got neither n_stages nor balance; give one, as n_stages=2")
    # Not named_children(): that leaves out a layer's second use, as of one nn.ReLU() object.
    named = list(zip(model._modules, model, strict=True))
    ends = [0, *accumulate(counts)]
    stages = [nn.Sequential(OrderedDict(named[start:end])) for start, end in pairwise(ends)]
    _check_unshared(stages)
    return stages


def _even_counts(costs: list[float], n_stages: int) -> list[int]:
    """Return the layer counts of the contiguous split with the least sum of squared costs."""
    n_layers = len(costs)
    if n_stages > n_layers:
        raise ArgumentError(
            f"more stages than layers: got n_stages={n_stages} for a model of {n_layers} layers, "
            f"and each stage needs one; take at most {n_layers} stages or build a deeper model"
        )
    before = [0.0, *accumulate(costs)]
    # best[end]: the least sum of squares, with its counts, of cutting the first `end` layers
    # into the stages so far. Each stage leaves a layer for each of those that follow.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(n_stages):
        best = {
            end: min(
                (total + (before[end] - before[start]) ** 2, [*counts, end - start])
                for start, (total, counts) in best.items()
                if start < end
            )
            for end in range(stage + 1, n_layers - n_stages + stage + 2)
        }
    return best[n_layers][1]


def _check_balance(balance: Sequence[int], n_stages: int | None, n_layers: int) -> list[int]:
    if not isinstance(balance, Iterable):
        raise ArgumentError(
            f"balance must list the layer count of each stage, got {balance!r}; "
            f"give counts of at least 1 that sum to {n_layers}"
        )
    counts = [check_count(f"balance[{stage}]", count) for stage, count in enumerate(balance)]
    if n_stages is not None and check_count("n_stages", n_stages) != len(counts):
        raise ArgumentError(
            f"balance {counts} is for {len(counts)} stages, and n_stages is {n_stages}; "
            "make them agree, or leave out n_stages"
        )
    if sum(counts) != n_layers:
        raise ArgumentError(
            f"balance {counts} shares out {sum(counts)} layers, and the model has {n_layers}; "
            f"give counts of at least 1 that sum to {n_layers}"
        )
    return counts


def _check_unshared(stages: list[nn.Sequential]) -> None:
    owner: dict[int, int] = {}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            first = owner.setdefault(id(parameter), stage)
            if first != stage:
                raise ArgumentError(
                    f"stages {first} and {stage} would share the parameter {name!r}; give each "
                    "its own copy, or put the layers that share it into one stage with balance="
                )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all positions, in nats: a scalar.

    ``logits`` are (batch, ..., classes), as (batch, sequence, vocabulary) or (batch, classes);
    ``targets`` are int64 (batch, ...).
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@cache
def _corpus(path: Path | None, version: tuple[int, int]) -> bytes:
    """Return the bytes of a text; ``version`` makes a changed file a text of its own."""
    if path is not None:
        return read_bytes(path, "the text", ArgumentError, first=_FILE_BYTES)
    data = bytearray()
    for source in sorted(_library().glob("*.py")):
        data += source.read_bytes()
        if len(data) >= _LIBRARY_BYTES:
            break
    return bytes(data)


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def text_batch(batch: int, sequence: int, *, text: Path | None = None, seed: int = 0) -> Batch:
    """Draw samples at random places of a real text, one token a byte.

    The text is the sources of Python's standard library, in the order of their names, up to about
    4 MiB; or a file of the user's, up to 64 MiB. It is read once in a process.

    Returns
    -------
    inputs, targets
        int64 (batch, sequence) each; the targets are the inputs shifted by one byte.

    Raises
    ------
    ArgumentError
        For a text that is missing, unreadable or shorter than ``sequence + 1`` bytes, or a size
        that is no whole number of at least 1.
    """
    batch, sequence = check_count("batch", batch), check_count("sequence", sequence)
    needed = sequence + 1
    text = None if text is None else check_path("text", text)
    try:
        status = (text or _library()).stat()
        corpus = _corpus(text, (status.st_mtime_ns, status.st_size))
    except OSError as error:
        raise ArgumentError(
            f"cannot read the text {text or _library()}: {error.strerror}; "
            f"give a readable file of at least {needed} bytes"
        ) from error
    check_tensors(  # places, a list of each sample, and a tensor of all, which is cut in two
        f"a batch of batch={batch} samples of sequence={sequence}",
        batch * (104 + 32 * needed),
        "give fewer samples, or shorter ones",
    )
    if len(corpus) < needed:
        raise ArgumentError(
            f"the text {text or _library()} has {len(corpus)} bytes, and samples of "
            f"sequence={sequence} need {needed}; give a longer file, or a shorter sequence"
        )
    starts = torch.randint(len(corpus) - sequence, (batch,), generator=_generator(seed)).tolist()
    samples = torch.tensor([list(corpus[start : start + needed]) for start in starts])
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def image_batch(batch: int, image_size: int = 32, n_classes: int = 10, seed: int = 0) -> Batch:
    """Draw synthetic images: stripes whose direction tells the class, under noise.

    No photographs: the images are made up, so that nothing is downloaded, and easy to learn.

    Returns
    -------
    images, classes
        float32 (batch, 3, image_size, image_size), and int64 (batch,) below ``n_classes``.

    Raises
    ------
    ArgumentError
        For a size that is no whole number of at least 1.
    """
    batch, n_classes = check_count("batch", batch), check_count("n_classes", n_classes)
    size, generator = check_count("image_size", image_size), _generator(seed)
    check_tensors(  # stripes, noise, and their sum
        f"a batch of batch={batch} images of image_size={size}",
        batch * (8 + 3 * 3 * size**2 * torch.get_default_dtype().itemsize),
        "give fewer images, or smaller ones",
    )
    classes = torch.randint(n_classes, (batch,), generator=generator)
    angle = (classes * (math.pi / n_classes)).view(-1, 1, 1, 1)
    axis = torch.linspace(-1, 1, size)
    across = torch.cos(angle) * axis + torch.sin(angle) * axis.view(-1, 1)
    colour = torch.arange(3).view(1, 3, 1, 1)
    stripes = torch.sin(3 * math.pi * across + colour)
    return stripes + 0.5 * torch.randn(batch, 3, size, size, generator=generator), classes


def batches(make_batch: BatchMaker, batch: int, seed: int = 0) -> Iterator[Batch]:
    """Yield a new batch a step for ever, the same ones for the same ``seed``."""
    draw = random.Random(check_count("seed", seed, minimum=0))
    while True:
        yield make_batch(batch, draw.getrandbits(31))


@dataclass(frozen=True)
class Workload:
    """A model, its loss and its data: what a training step needs, whatever the model is.

    Attributes
    ----------
    layers
        The whole model, for `split`.
    loss
        From the model's output and the targets to a scalar, a mean over the samples.
    make_batch
        ``make_batch(batch, seed)`` returns inputs and targets.
    options
        Every option the model was built with, for the record.
    """

    layers: nn.Sequential
    loss: Loss
    make_batch: BatchMaker
    options: Mapping[str, Option]


@dataclass(frozen=True)
class ModelSpec:
    """A row of `MODELS`: a line for ``--help``, and what makes layers, loss and data of options."""

    summary: str
    make: Callable[..., Parts]

    @property
    def options(self) -> dict[str, Option]:
        """The options with their defaults, as ``make`` declares them."""
        parameters = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}


def _make_gpt(
    seed: int,
    *,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    sequence: int = 128,
    dropout: float = 0.0,
    text: str | Path | None = None,
) -> Parts:
    model = gpt(
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        sequence=sequence,
        dropout=dropout,
        seed=seed,
    )
    path = None if text is None else check_path("text", text)
    text_batch(1, sequence, text=path)  # A text that cannot be read is found before any work.
    return model, cross_entropy, lambda b, s: text_batch(b, sequence, text=path, seed=s)


def _make_convnet(
    seed: int, *, layers: int = 4, width: int = 32, image_size: int = 32, classes: int = 10
) -> Parts:
    model = convnet(
        n_blocks=layers, channels=width, image_size=image_size, n_classes=classes, seed=seed
    )
    return model, cross_entropy, lambda b, s: image_batch(b, image_size, classes, s)


MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "gpt": ModelSpec("byte-level GPT on real text (Python's sources, or a file)", _make_gpt),
        "convnet": ModelSpec("residual network with batch norm on synthetic images", _make_convnet),
    }
)


def build_model(name: str, *, seed: int = 0, **options: Option) -> Workload:
    """Build a ready-made model of `MODELS` by name; options that are None take their defaults.

    ``layers`` counts blocks: the model has two layers more, its ends.

    Raises
    ------
    ArgumentError
        For an unknown name or option (with the known ones), a bad value, or a text that cannot be
        read.
    """
    spec = MODELS[check_name("model", name, MODELS)]
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        check_name(f"option of model {name!r}:", option, spec.options)
    options = {**spec.options, **given}
    layers, loss, make_batch = spec.make(seed, **options)
    return Workload(layers, loss, make_batch, options)
