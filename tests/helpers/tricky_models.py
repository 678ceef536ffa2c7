"""Small models whose forwards are hard to split, by group: reads, writes, state, modes and others.

Each model trains without a split. `split_verdicts` compares the split model with it. Most models
have four blocks, so that two to four stages cut them in several places. Batches differ from sample
to sample, so that a value of the sample is wrong for a later micro-batch.

Random models have outputs that do not depend on the numbers, if all uses of a number get the same
one. A pipeline may then draw other numbers than the model.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS = 6, 9

#: Function of a number of samples and a generator.
Batch: TypeAlias = Callable[[int, Generator], Any]


@dataclass(frozen=True)
class Case:
    """A model, and its batches.

    Attributes
    ----------
    name
        Group and name.
    make
        Makes the model; draws the same parameters after the same seed.
    batch
        Makes a batch of so many samples.
    tolerance
        Largest difference of equal results; larger for models of 32 bits.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Batch
    tolerance: float = 1e-9

    @property
    def group(self) -> str:
        """First part of the name."""
        return self.name.partition(": ")[0]

    def __str__(self) -> str:
        return self.name


#: All models by name.
CASES: dict[str, Case] = {}


def floats(n: int, generator: Generator) -> Tensor:
    """Return a batch of one tensor."""
    return torch.randn(n, WIDTH, generator=generator)


def masked(n: int, generator: Generator) -> dict[str, Tensor]:
    """Return a batch with a mask; every sample has one entry at least that is True."""
    mask = torch.rand(n, WIDTH, generator=generator) > 0.4
    mask[:, 1] = True
    return {"x": floats(n, generator), "mask": mask}


def pairs(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return a batch of two tensors."""
    return floats(n, generator), floats(n, generator)


def words(n: int, generator: Generator) -> Tensor:
    """Return a batch of integers; some are negative, as for padding."""
    return torch.randint(-1, WORDS, (n, 5), generator=generator)


def add(
    group: str, name: str, make: Callable[[], nn.Module], batch: Batch, tolerance: float = 1e-9
) -> None:
    """Add a model to `CASES`."""
    name = f"{group}: {name}"
    assert name not in CASES, name
    CASES[name] = Case(name, make, batch, tolerance)


def case(
    group: str, batch: Batch = floats, tolerance: float = 1e-9
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Return a decorator that adds a class to `CASES`."""

    def decorate(kind: type[nn.Module]) -> type[nn.Module]:
        add(group, kind.__name__, kind, batch, tolerance)
        return kind

    return decorate


class Blocks(nn.Module):
    """Four linear layers; subclasses call them in their own forwards."""

    n_blocks = 4

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(self.n_blocks)])

    def block(self) -> nn.Module:
        """Return a block."""
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


# Reads: numbers and shapes that Python gets from a tensor.

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda m: m.sum().item(),
    "int": lambda m: int(m.sum()),
    "float": lambda m: float(m.sum()),
    "bool": lambda m: 1 if m[0, 2] else 3,
    "not": lambda m: 1 if not m[0, 2] else 3,
    "is_nonzero": lambda m: 1 if torch.is_nonzero(m[0, 2]) else 3,
    "comparison": lambda m: 2 if m.sum() > 6 else 3,
    "index of range": lambda m: len(range(m.sum())),
    "tolist": lambda m: sum(m.tolist()[0]),
    "numpy": lambda m: int(m.numpy().sum()),
    "np.asarray": lambda m: int(np.asarray(m).sum()),
    "np.from_dlpack": lambda m: int(np.from_dlpack(m.to(torch.uint8)).sum()),
    "nonzero().shape": lambda m: m.nonzero().shape[0],
    "nonzero as a tuple": lambda m: len(m.nonzero(as_tuple=True)[0]),
    "torch.where of one argument": lambda m: len(torch.where(m)[0]),
    "argwhere": lambda m: len(torch.argwhere(m)),
    "len(unique())": lambda m: len((m * torch.arange(1, WIDTH + 1)).unique()),
    "unique_consecutive": lambda m: torch.unique_consecutive(m).shape[0],
    "x[mask].shape": lambda m: m[m].numel(),
    "masked_select": lambda m: torch.masked_select(m, m).numel(),
    "repeat_interleave": lambda m: torch.repeat_interleave(m[0].long()).shape[0],
    "bincount": lambda m: torch.bincount((m.long() * torch.arange(WIDTH)).flatten()).numel(),
    "max of Python": lambda m: int(max(m.long().sum(0))),
    "sum of Python over rows": lambda m: sum(float(row.sum()) for row in m),
    "sorted": lambda m: float(sorted(m.long().sum(0))[1]),
    "torch.equal": lambda m: 1 if torch.equal(m[0], m[1]) else 3,
    "torch.allclose": lambda m: 1 if torch.allclose(m[:, 0].long(), m[:, 2].long()) else 3,
    "in": lambda m: 1 if 2 in m.long().sum(0) else 3,
    "argmax as an index": lambda m: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0][m.long().sum(0).argmin()],
    "index of a list by item": lambda m: [1, 2, 3, 4][int(m.sum()) % 4],
    "slice by a tensor": lambda m: len([1] * 9 + [2] * 9) - len(([1] * 18)[: m.sum()]),
    "format": lambda m: float(f"{m.sum():d}"),
    "str": lambda m: str(m).count("True"),
    "storage": lambda m: sum(m.untyped_storage().tolist()),
    "copy to numpy by hand": lambda m: int(np.array([int(v) for v in m.flatten()]).sum()),
    "key of a dict": lambda m: {0: 1.0, 1: 3.0}[int(m[0, 2])],
    "any": lambda m: 1 if (m.sum(1) > 4).any() else 3,
    "all": lambda m: 1 if (m.sum(1) > 3).all() else 3,
    "math of Python": lambda m: 2.0 ** m.sum(),
    "divmod of Python": lambda m: divmod(int(m.sum()), 3)[1],
}


class ReadsInput(Blocks):
    """Scales the last output by a number that the forward reads from an input."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks[0].read = read  # not an attribute of the model alone: blocks may have it, too

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * (0.5 + 0.1 * self.blocks[0].read(mask))


class ReadsInputEarly(Blocks):
    """Reads a number from an input before the first block; the last output is scaled by it."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scale = 0.5 + 0.1 * self.read(mask)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * scale


class ReadsValue(Blocks):
    """Scales the last output by a number that the forward reads between the middle blocks."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        scale = 0.5 + 0.1 * self.read((x > 0).detach())
        x = torch.tanh(self.blocks[2](x))
        return torch.tanh(self.blocks[3](x)) * scale


def _make_reads(kind: type[nn.Module], read: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return kind(read)

    return make


for _name, _read in READS.items():
    if _name in ("tolist", "nonzero().shape", "item"):
        add("reads", f"{_name}, of an input at the end", _make_reads(ReadsInput, _read), masked)
    add("reads", f"{_name}, of an input", _make_reads(ReadsInputEarly, _read), masked)
    add("reads", f"{_name}, of a value", _make_reads(ReadsValue, _read), floats)


@case("reads")
class MaskIndexBetweenBlocks(Blocks):
    """Packs entries by a boolean mask between blocks, and puts them back at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        keep = x.sum(1) > x.sum(1).min()
        packed = x[keep]
        for block in self.blocks[1:]:
            packed = torch.tanh(block(packed))
        return torch.zeros_like(x).index_put((keep,), packed)


@case("reads", masked)
class MaskIndexOfInput(Blocks):
    """Packs the samples that a mask of the batch selects, and returns the mean of their rows."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = torch.cat([x[mask[:, 0]], x])
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.mean(0, keepdim=True)


@case("reads")
class IndexByComputedIds(Blocks):
    """Permutes rows between blocks by ids that are computed from the values."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        order = x[:, 0].argsort()
        x = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](x[order]))))
        return torch.tanh(self.blocks[3](x))[order.argsort()] * (1 + order.unsqueeze(1))


class _Packing(nn.Linear):
    """Returns the rows whose first value is positive, and one row more."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        return torch.cat([y[y[:, 0] > 0], y.mean(0, keepdim=True)])


@case("reads")
class BlockPacksByMask(Blocks):
    """The second block returns a number of rows that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = _Packing(WIDTH, WIDTH)


@case("reads")
class ShapeOfPackedOutput(Blocks):
    """The number of rows that a block returns scales the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = _Packing(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[1](torch.tanh(self.blocks[0](x)))
        z = torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](y))))
        return z * y.shape[0]


class _Topk(nn.Linear):
    """Returns the largest values; the input tells how many."""

    def forward(self, x: Tensor) -> Tensor:
        k = 1 + int((x > 0).sum()) % (WIDTH - 1)
        return F.pad(torch.tanh(super().forward(x)).topk(k, 1).values, (0, WIDTH - k))


class _ShortTopk(nn.Linear):
    """Returns the largest values without padding; the input tells how many."""

    def forward(self, x: Tensor) -> Tensor:
        k = 1 + int((x > 0).sum()) % (WIDTH - 1)
        return torch.tanh(super().forward(x)).topk(k, 1).values


@case("reads")
class TopkInBlock(Blocks):
    """A block takes a number of values that depends on the data; its shape does not."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _Topk(WIDTH, WIDTH)


@case("reads")
class WidthOfBlockOutput(Blocks):
    """The width of a block's output depends on the data; the glue pads it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = _ShortTopk(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](torch.tanh(self.blocks[0](x)))
        width = x.shape[1]
        x = torch.tanh(self.blocks[2](F.pad(x, (0, WIDTH - width))))
        return self.blocks[3](x) / width


@case("reads")
class BranchOnValue(Blocks):
    """Another activation after the third block, by a value after the first one."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        is_large = x.mean() > 0
        x = self.blocks[2](torch.tanh(self.blocks[1](x)))
        x = torch.sigmoid(x) if is_large else torch.tanh(x)
        return self.blocks[3](x)


@case("reads")
class LoopUntilSmall(Blocks):
    """Halves a value until it is small; the number of rounds depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        norm, rounds = x.detach().norm(), 0
        while norm > 0.3:
            norm, rounds = norm / 2, rounds + 1
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        return x * rounds


@case("reads")
class SplitBySizesOfData(Blocks):
    """Splits rows by sizes that tolist returns, and scales each part differently."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        n = int((x[:, 0] > 0).sum())
        first, second = x.split([n, len(x) - n])
        x = torch.cat([first * 2, second * 3])
        return torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](x))))


@case("reads")
class TryOnValue(Blocks):
    """An index that is out of range for some data is caught by the forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        try:
            scale = [2.0, 3.0][int((x > 0).sum()) % 4]
        except IndexError:
            scale = 5.0
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        return x * scale


@case("reads")
class GradientOfValue(Blocks):
    """The forward itself calls torch.autograd.grad between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.blocks[0](x))
        if y.requires_grad:
            (slope,) = torch.autograd.grad(y.square().sum(), y, retain_graph=True)
        else:
            slope = 2 * y
        x = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](y))))
        return self.blocks[3](x) + slope.detach()


# Writes: operations in place.


@case("writes")
class ResidualInPlace(Blocks):
    """Adds each block's output to its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x += torch.tanh(block(x.clone()))
        return x


@case("writes")
class ResidualInPlaceOnInput(Blocks):
    """Adds each block's output to the model's input in place."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x += torch.tanh(block(x.clone()))
        return x


@case("writes")
class SubtractInPlace(Blocks):
    """Centres a value in place after each block; the value is also an argument of later ones."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        y = torch.tanh(first)
        for block in self.blocks[1:]:
            first.sub_(0.5)
            y = torch.tanh(block(y)) + first
        return y


@case("writes", words)
class ClampIds(Blocks):
    """Clamps the ids in place after a mask was computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        keep = (ids >= 0).unsqueeze(-1)
        ids.clamp_(min=0)
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x)) * keep
        return x


@case("writes", words)
class ClampIdsLate(Blocks):
    """Clamps the ids in place at the end, where they are gathered once more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids + 1)
        keep = ids >= 0
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        ids.clamp_(min=0)
        x = torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](x))))
        return x * ids.unsqueeze(-1) * keep.unsqueeze(-1)


@case("writes")
class ScaleInput(Blocks):
    """Doubles the input in place between all blocks; the input is added at the end."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        for block in self.blocks:
            y = torch.tanh(block(y))
            x.mul_(2)
        return y + x


@case("writes")
class ZeroInputAfterUse(Blocks):
    """Fills the input with zeros after the first block; the last block takes it again."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.blocks[0](x.clone()))
        x.zero_()
        y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](y))))
        return self.blocks[3](y + x)


@case("writes", masked)
class MaskedFillAcrossBorders(Blocks):
    """Fills a value in place after each block; the value crosses all borders."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = self.blocks[0](x)
        y = torch.tanh(first)
        for index, block in enumerate(self.blocks[1:]):
            first.masked_fill_(mask.roll(index, 1), 0.25 * index)
            y = torch.tanh(block(y)) + first
        return y


@case("writes", masked)
class MaskAssignment(Blocks):
    """Assigns to entries under a mask: x[mask] = 0."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
            x = x + 1
            x[mask] = 0
        return x


@case("writes", masked)
class MaskChangedInPlace(Blocks):
    """Inverts the mask in place after each block."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * mask.to(x.dtype)
            mask.logical_not_()
        return x + mask


@case("writes")
class WriteThroughSlice(Blocks):
    """Writes through a slice of a value that later stages need."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.blocks[0](x)) + 0
        y = self.blocks[1](first.clone())
        first[:, :2] += 1
        y = self.blocks[2](torch.tanh(y))
        first[:, 1:4] *= 2
        return self.blocks[3](torch.tanh(y)) + first


@case("writes")
class WriteThroughView(Blocks):
    """Keeps a view of a value, and writes through it after the next block."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x) * 1
        view = first.view(-1)
        y = torch.tanh(self.blocks[1](first.clone()))
        view.mul_(0.5)
        y = torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](y))))
        return y + first


@case("writes")
class WriteThroughTranspose(Blocks):
    """Writes through the transpose of a value; the value itself is the last addend."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x) * 1
        across = first.t()
        y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first.clone()))))
        across[0] += 1
        return torch.tanh(self.blocks[3](y)) + first


@case("writes")
class WriteToBaseOfView(Blocks):
    """Writes to a value of which a later stage has a view."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x) * 1
        view = first[:, :3]
        y = torch.tanh(self.blocks[1](first.clone()))
        first += 1
        y = torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](y))))
        return torch.cat([y[:, :3] + view, y[:, 3:]], 1)


@case("writes")
class WriteThroughSlices(Blocks):
    """Writes to slices of one tensor, one after each block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        buffer = torch.cat([x, x, x], 1)
        parts = [buffer[:, k * WIDTH : (k + 1) * WIDTH] for k in range(3)]
        for block, part in zip(self.blocks[1:], parts, strict=True):
            x = torch.tanh(block(x))
            part.mul_(x)
        return x + parts[0] - 2 * parts[1] + 3 * parts[2]


class _ReluFirst(nn.Sequential):
    """A block that writes into its argument."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))


@case("writes")
class BlockWritesArgument(Blocks):
    """Blocks begin with ReLU(inplace=True); the residual sees what they write."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _ReluFirst()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            x = x + block(x)
        return x


@case("writes")
class BlockWritesSharedArgument(Blocks):
    """Each block writes into the output of the first one, which is the last addend."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _AddsOne()

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.blocks[0](x, x * 1))
        shared, y = first * 1, first
        for block in self.blocks[1:]:
            y = torch.tanh(block(y, shared))
        return y + shared


class _AddsOne(nn.Linear):
    """A block that adds one to its second argument."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        shared += 1
        return super().forward(x)


class _Passes(nn.Module):
    """A block with a parameter that returns its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.bias)


class _PassesView(nn.Linear):
    """A block that returns a view of its input, and a new value."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :3], torch.tanh(super().forward(x.clone()))


@case("writes")
class BlockReturnsInput(Blocks):
    """Blocks return their input; the glue writes to it, and the first value is added at the end."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _Passes()

    def forward(self, x: Tensor) -> Tensor:
        first = y = torch.tanh(x) * 1
        for block in self.blocks:
            y = block(y)
            y += 0.25
        return first * y


@case("writes")
class BlockReturnsView(Blocks):
    """Blocks return a view of their input; the glue writes to it."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _PassesView()

    def forward(self, x: Tensor) -> Tensor:
        first = y = torch.tanh(x) * 1
        for block in self.blocks:
            view, z = block(y)
            view *= 2
            y = z + y
        return first + y


@case("writes")
class IdentityBlock(Blocks):
    """An identity between blocks returns its input, which the glue writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        kept = self.identity(x)
        y = torch.tanh(self.blocks[1](x.clone()))
        x += 1
        y = torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](y))))
        return y + kept


@case("writes")
class OutArgument(Blocks):
    """torch.add with out= writes to a buffer that is made before the first block."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
            torch.add(total, x.detach(), out=total)
        return x + total


@case("writes")
class CollectOutputs(Blocks):
    """Collects the outputs of all blocks in one preallocated tensor."""

    def forward(self, x: Tensor) -> Tensor:
        everything = x.new_zeros(self.n_blocks, *x.shape)
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            everything[index] = x
        return everything.sum(0) * everything[0]


@case("writes")
class CollectByCopy(Blocks):
    """Copies outputs into rows of torch.empty; the last stage reads all of them."""

    def forward(self, x: Tensor) -> Tensor:
        everything = torch.empty(len(x), self.n_blocks * WIDTH)
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            everything[:, index * WIDTH : (index + 1) * WIDTH].copy_(x)
        return everything


@case("writes")
class ReluOnSkip(Blocks):
    """F.relu_ on a skip connection that two later blocks use."""

    def forward(self, x: Tensor) -> Tensor:
        skip = self.blocks[0](x)
        y = torch.tanh(self.blocks[1](skip.clone()))
        F.relu_(skip)
        y = torch.tanh(self.blocks[2](y + skip))
        skip = skip * 1
        F.elu_(skip, 0.5)
        return self.blocks[3](y + skip)


@case("writes")
class WriteAfterCut(Blocks):
    """Writes to the output of each block right after it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.tanh_()
            x = x + 0
            x.mul_(1.5).add_(0.1)
        return x


@case("writes")
class WriteBeforeUse(Blocks):
    """An alias of the output is kept before the write, and used after the next block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x)
            kept = x
            x.mul_(0.5)
            x = torch.tanh(x * 1) + kept
        return self.blocks[3](x)


@case("writes")
class WriteToDetached(Blocks):
    """Writes through detach, which shares memory with the value."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x) * 1
        y = torch.tanh(self.blocks[1](first.clone()))
        first.detach().add_(1)
        y = torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](y))))
        return y + first


@case("writes")
class WriteToData(Blocks):
    """Writes to ``.data`` of a value that crosses borders."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x) * 1
        y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first.clone()))))
        first.data.mul_(2)
        return torch.tanh(self.blocks[3](y)) + first


@case("writes")
class WriteThroughNumpy(Blocks):
    """Writes through an array of numpy that shares memory with the input."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x.clone()))))
        x.numpy()[:, 0] += 1
        return torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](y)))) + x


@case("writes")
class SetData(Blocks):
    """Replaces ``.data`` of the input between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x.clone()))))
        x.data = x.data * 3
        return torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](y)))) + x


@case("writes")
class ScatterInPlace(Blocks):
    """scatter_add_ and index_add_ into a running value."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), WIDTH)
        for block in self.blocks:
            x = torch.tanh(block(x))
            total.scatter_add_(1, torch.zeros(len(x), 1, dtype=torch.long), x[:, :1])
            total.index_add_(1, torch.tensor([2]), x[:, 2:3])
        return x + total


@case("writes")
class SwapInPlace(Blocks):
    """Swaps two columns of a value in place after each block."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x) * 1
        y = first.clone()
        for block in self.blocks[1:]:
            first[:, [0, 1]] = first[:, [1, 0]]
            y = torch.tanh(block(y)) + first
        return y


@case("writes", pairs)
class WriteOneInputToOther(Blocks):
    """Copies one input into the other between blocks."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x.clone()))))
        y.copy_(x * 2)
        return torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](z)))) + y


@case("writes")
class ResizeInPlace(Blocks):
    """unsqueeze_ and squeeze_ change the shape of a value in place."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x) * 1
        y = torch.tanh(self.blocks[1](first.clone()))
        first.unsqueeze_(0)
        y = torch.tanh(self.blocks[2](y))
        return torch.tanh(self.blocks[3](y)) + first.sum(0) * first.dim()


# State: buffers, attributes, random numbers.


@case("state")
class NormBetweenBlocks(Blocks):
    """BatchNorm without parameters between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH, affine=False) for _ in self.blocks])

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = torch.tanh(norm(block(x)))
        return x


@case("state")
class OneNormForAll(Blocks):
    """One BatchNorm without parameters that is called after each block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(self.norm(block(x)))
        return x


@case("state")
class NormBlocks(Blocks):
    """BatchNorm with parameters inside blocks."""

    def block(self) -> nn.Module:
        """Return a block."""
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


def _sequential_norms() -> nn.Module:
    """Return a Sequential of linear layers and norms without parameters."""
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False)]
    return nn.Sequential(*parts)


add("state", "sequential with norms without parameters", _sequential_norms, floats)


class _Counted(Blocks):
    """A model with a buffer that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


@case("state")
class CountInPlace(_Counted):
    """The forward counts its calls: ``self.count += 1``."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


@case("state")
class CountReplaced(_Counted):
    """The forward counts its calls: ``self.count = self.count + 1``."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x)


@case("state")
class CountAtEnd(_Counted):
    """The forward counts its calls after the last block, and scales the output by the count."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.count += 1
        return x * self.count


@case("state")
class CountAtBegin(_Counted):
    """The forward counts its calls at the beginning, and scales the output by the count."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class _CountingBlock(nn.Module):
    """A block that counts its calls in a buffer, by replacing it or in place."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.linear, self.replaces = nn.Linear(WIDTH, WIDTH), replaces
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.count = self.count + 1
        else:
            self.count += 1
        return torch.tanh(self.linear(x)) * self.count.clone()


add("state", "blocks replace a buffer",
    lambda: nn.Sequential(*(_CountingBlock(True) for _ in range(4))), floats)  # fmt: skip
add("state", "blocks change a buffer",
    lambda: nn.Sequential(*(_CountingBlock(False) for _ in range(4))), floats)  # fmt: skip


@case("state")
class AverageOfActivations(Blocks):
    """A moving average of activations between blocks, which is subtracted from them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(self.n_blocks, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if self.training:
                self.average[index].lerp_(x.detach().mean(0), 0.1)
            x = x - self.average[index]
        return x


@case("state")
class NonPersistentAverage(Blocks):
    """A moving average in a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.blocks[3](torch.tanh(self.blocks[2](x))) + self.average


@case("state")
class AttributeReplaced(Blocks):
    """The forward keeps an activation of the middle as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        self.last = x.detach().clone()
        return self.blocks[3](torch.tanh(self.blocks[2](x)))


@case("state")
class AttributeFeedsLater(Blocks):
    """The forward keeps an activation as an attribute, and adds it after the last block."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.blocks[0](x))
        x = self.hidden
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        result = x + self.hidden
        del self.hidden
        return result


@case("state")
class RecurrentState(Blocks):
    """The output of a micro-batch is an input of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.previous = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x + self.previous)
        self.previous = x.detach().mean()
        return x


@case("state")
class CounterOfPython(Blocks):
    """A Python counter of the model that scales the output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@case("state")
class CounterAtEnd(Blocks):
    """A Python counter of the model that changes after the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.calls += 1
        return x


class _CallCounter(nn.Linear):
    """A block with a Python counter that scales its output."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


@case("state")
class CounterInBlock(Blocks):
    """Python counters in blocks."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _CallCounter()


class _Noted(nn.Linear):
    """A block that keeps its last mean as an attribute, for the glue."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean = y.detach().mean()
        return y


@case("state")
class AttributeOfBlock(Blocks):
    """The glue at the end reads attributes that blocks have set."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _Noted()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * sum(block.mean for block in self.blocks)


class _Penalized(nn.Linear):
    """A block that keeps a penalty with a gradient as an attribute."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.penalty = y.square().mean()
        return y


@case("state")
class PenaltiesOfBlocks(Blocks):
    """The sum of penalties that blocks keep is part of the output, as in mixtures of experts."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _Penalized()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = super().forward(x)
        result = {"x": x, "penalty": sum(block.penalty for block in self.blocks)}
        for block in self.blocks:
            del block.penalty
        return result


@case("state")
class ListOfMeans(Blocks):
    """A list of numbers that grows by one each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        self.means.append(float(x.detach().mean()))
        x = self.blocks[3](torch.tanh(self.blocks[2](x)))
        return x * (1 + sum(self.means))


@case("state")
class ListOfValues(Blocks):
    """A list in which blocks' outputs are collected, and which is cleared at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.values.append(x)
        result = torch.stack(self.values).sum(0)
        self.values.clear()
        return result


@case("state")
class CacheOfShape(Blocks):
    """A cache of positions that the first forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.places is None:
            self.places = torch.arange(x.shape[1], dtype=x.dtype) / WIDTH
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.places
        return x


@case("state")
class CacheOfData(Blocks):
    """A scale that the data of the first forward sets, for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        if self.scale is None:
            self.scale = x.detach().abs().mean()
        return self.blocks[3](torch.tanh(self.blocks[2](x))) / self.scale


@case("state")
class CacheByKey(Blocks):
    """A dict of masks by their size."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.ones(len(x), len(x)).tril()
        for block in self.blocks:
            x = torch.tanh(self.cache[len(x)] @ block(x))
        return x


@case("state")
class InitializedByData(Blocks):
    """A parameter of the model gets its first value from the data of the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        if not self.is_set:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
            self.is_set.fill_(True)
        return self.blocks[3](torch.tanh(self.blocks[2](x * self.scale)))


@case("state")
class SpectralNorm(Blocks):
    """Blocks with spectral_norm, which iterates in each forward."""

    def block(self) -> nn.Module:
        """Return a block."""
        return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


@case("state")
class WeightNorm(Blocks):
    """Blocks with weight_norm, a parametrization of two parameters."""

    def block(self) -> nn.Module:
        """Return a block."""
        return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


@case("state")
class SpectralNormOfModel(Blocks):
    """A parametrization of the model's own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        nn.utils.parametrizations.spectral_norm(self, "mix")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x)))) @ self.mix
        return self.blocks[3](torch.tanh(self.blocks[2](x)))


@case("state")
class RunningMaximum(Blocks):
    """A running maximum of activations, by torch.maximum with out=."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.full((WIDTH,), -9.0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
            torch.maximum(self.largest, x.detach().amax(0), out=self.largest)
        return x / (1 + self.largest.abs())


@case("state")
class QueueInBuffer(Blocks):
    """A queue of representations with a pointer, as in contrastive learning."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        result = x @ self.queue.clone().t()
        place = int(self.place)
        self.queue[place : place + len(x)] = x.detach()
        self.place[...] = (place + len(x)) % 8
        return torch.cat([result, x], 1)


@case("state")
class DropoutFunction(Blocks):
    """F.dropout in the forward; the mask is used in two places, and has no effect if it is one."""

    def forward(self, x: Tensor) -> Tensor:
        noise = F.dropout(torch.ones_like(x), 0.5, training=self.training)
        x = torch.tanh(self.blocks[0](x)) + noise
        x = torch.tanh(self.blocks[1](x - noise))
        x = torch.tanh(self.blocks[2](x)) + noise
        return self.blocks[3](x - noise)


@case("state")
class RandomInForward(Blocks):
    """torch.rand in the forward; it is added after the first block, subtracted after the last."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(len(x), WIDTH)
        x = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))))
        return self.blocks[3](x) + noise - noise.clone()


@case("state")
class RandomOnTwoStages(Blocks):
    """torch.rand in the forward: added before the second block, subtracted before the last."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(len(x), WIDTH)
        x = torch.tanh(self.blocks[0](x))
        y = x + noise
        x = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](x))))
        return self.blocks[3](x + (y - noise))


@case("state")
class RandomInPlace(Blocks):
    """normal_ fills a tensor between blocks; its sign is applied twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        sign = torch.empty(len(x), 1).normal_().sign()
        x = x * sign
        x = torch.tanh(self.blocks[1](x * sign))
        x = torch.tanh(self.blocks[2](x)) * sign
        return self.blocks[3](x * sign)


@case("state")
class DropoutModule(Blocks):
    """An nn.Dropout between blocks; all that depends on its mask cancels at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        dropped = self.dropout(torch.ones_like(x))
        x = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](x))) + dropped - dropped.clone())
        return self.blocks[3](x) + dropped - dropped.clone()


@case("state")
class DropoutThatKeeps(Blocks):
    """An nn.Dropout of probability zero after each block."""

    def block(self) -> nn.Module:
        """Return a block."""
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))


@case("state")
class OwnGenerator(Blocks):
    """Noise from a generator that is an attribute of the model; micro-batches take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        noise = torch.rand(x.shape, generator=self.generator)
        x = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](x + noise))))
        return self.blocks[3](x)


@case("state")
class GeneratorOfNumpy(Blocks):
    """A number of a numpy generator, which is an attribute, scales the output."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(5)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.generator.random()
        return super().forward(x) * scale


# Modes: training, gradients, autocast, order of calls.


@case("modes")
class OtherWayInEval(Blocks):
    """The order of blocks in eval mode is another one."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if self.training else reversed(self.blocks):
            x = torch.tanh(block(x))
        return x


@case("modes")
class FewerBlocksInEval(Blocks):
    """The second block is for training alone."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if self.training or index != 1:
                x = torch.tanh(block(x))
        return x


@case("modes")
class MoreGlueInEval(Blocks):
    """In eval mode, a skip connection is added to the output."""

    def forward(self, x: Tensor) -> Tensor:
        first = y = torch.tanh(self.blocks[0](x))
        for block in self.blocks[1:]:
            y = torch.tanh(block(y))
        return y if self.training else y + first


@case("modes")
class MaskNeededInEval(Blocks):
    """In eval mode, the input is added to the output."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else y + x


@case("modes")
class OtherWayWithoutGradients(Blocks):
    """Without gradients, the skip connection is a different one."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.blocks[0](x))
        second = torch.tanh(self.blocks[1](first))
        y = self.blocks[3](torch.tanh(self.blocks[2](second)))
        return y + first if torch.is_grad_enabled() else y + 2 * second


@case("modes")
class ScaleByGradientMode(Blocks):
    """A block's input is scaled by whether gradients are computed."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * (2.0 if torch.is_grad_enabled() else 3.0)
        return x


@case("modes")
class ScaleByRequiresGrad(Blocks):
    """A factor depends on whether the value requires gradients."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * (2.0 if x.requires_grad else 3.0)
        return x


@case("modes")
class AuxiliaryInTraining(Blocks):
    """A second output in training alone, from the middle."""

    def forward(self, x: Tensor) -> Any:
        middle = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        y = self.blocks[3](torch.tanh(self.blocks[2](middle)))
        return (y, middle.mean(1)) if self.training else y


@case("modes")
class FlipByPython(Blocks):
    """Python's random flips the sign at both ends; as blocks are odd functions, this cancels."""

    def block(self) -> nn.Module:
        """Return a block."""
        return nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sign = -1.0 if random.random() < 0.5 else 1.0
        return super().forward(x * sign) * sign


@case("modes")
class FlipByNumpy(Blocks):
    """numpy's global random flips the sign at both ends."""

    def block(self) -> nn.Module:
        """Return a block."""
        return nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sign = -1.0 if np.random.rand() < 0.5 else 1.0  # noqa: NPY002
        return super().forward(x * sign) * sign


@case("modes")
class LayerdropByPython(Blocks):
    """Python's random chooses the order of two blocks that commute."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _Shift()

    def forward(self, x: Tensor) -> Tensor:
        order = [0, 1, 2, 3]
        if self.training and random.random() < 0.5:
            order = [0, 2, 1, 3]
        for index in order:
            x = self.blocks[index](x)
        return torch.tanh(x)


class _Shift(nn.Module):
    """A block that adds a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@case("modes")
class DropBlockOnData(Blocks):
    """A block is skipped for some micro-batches, by their data."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != 2 or x.mean() > 0:
                x = torch.tanh(block(x))
        return x


@case("modes")
class EarlyExit(Blocks):
    """The forward returns after the second block for some micro-batches."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if index == 1 and x[0, 0] > 0:
                return x
        return x


@case("modes")
class OrderByData(Blocks):
    """Blocks are called in another order for some micro-batches."""

    def forward(self, x: Tensor) -> Tensor:
        for index in [0, 1, 2, 3] if x.sum() > 0 else [1, 0, 2, 3]:
            x = torch.tanh(self.blocks[index](x))
        return x


@case("modes")
class LateOrderByData(Blocks):
    """The last two blocks change places for some micro-batches."""

    def forward(self, x: Tensor) -> Tensor:
        for index in [0, 1, 2, 3] if x.sum() > 0 else [0, 1, 3, 2]:
            x = torch.tanh(self.blocks[index](x))
        return x


@case("modes")
class ExpertByData(Blocks):
    """One of two middle blocks runs, by the data."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        x = torch.tanh(self.blocks[1 if x.mean() > 0 else 2](x))
        return self.blocks[3](x)


@case("modes")
class RepeatByData(Blocks):
    """The second block runs once or twice, by the data."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        for _ in range(1 + int(x.mean() > 0)):
            x = torch.tanh(self.blocks[1](x))
        return self.blocks[3](torch.tanh(self.blocks[2](x)))


class _Checkpointed(nn.Module):
    """A block that recomputes its activations."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.linear, self.use_reentrant = nn.Linear(WIDTH, WIDTH), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(
            lambda v: torch.tanh(self.linear(v)), x, use_reentrant=self.use_reentrant
        )
        return y


@case("modes")
class CheckpointInBlock(Blocks):
    """Gradient checkpointing inside blocks."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _Checkpointed(use_reentrant=False)


@case("modes")
class ReentrantCheckpointInBlock(Blocks):
    """Reentrant gradient checkpointing inside blocks."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _Checkpointed(use_reentrant=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0].linear(x))
        for block in self.blocks:
            x = block(x)
        return x


@case("modes")
class CheckpointAroundBlocks(Blocks):
    """Gradient checkpointing by the forward, around each block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=False))
        return x


@case("modes")
class CheckpointAroundTwo(Blocks):
    """Gradient checkpointing by the forward, around pairs of blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for first, second in ((0, 1), (2, 3)):
            x = checkpoint(self._pair, first, second, x, use_reentrant=False)
        return x

    def _pair(self, first: int, second: int, x: Tensor) -> Tensor:
        return torch.tanh(self.blocks[second](torch.tanh(self.blocks[first](x))))


@case("modes", tolerance=1e-6)
class AutocastInForward(Blocks):
    """Autocast inside the forward, in 32 and 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = torch.tanh(block(x))
        return x.double()


@case("modes", tolerance=1e-6)
class AutocastOfSomeBlocks(Blocks):
    """Autocast for the middle blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x.float()))
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](x))))
        return self.blocks[3](x.float()).double()


@case("modes")
class NoGradientsInMiddle(Blocks):
    """The first two blocks run without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        return self.blocks[3](torch.tanh(self.blocks[2](x)))


@case("modes")
class DetachedSkip(Blocks):
    """A skip connection that is detached after the cut."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.blocks[0](x))
        y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first))))
        return self.blocks[3](y) + first.detach()


@case("modes")
class HookOnValue(Blocks):
    """The forward registers a hook on a value, which scales its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.blocks[0](x))
        if first.requires_grad:
            first.register_hook(lambda gradient: gradient * 2)
        y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first))))
        return self.blocks[3](y) + first


@case("modes")
class HookOnLateValue(Blocks):
    """The forward registers a hook on the first value after the third block."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.blocks[0](x))
        y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first))))
        if first.requires_grad:
            first.register_hook(lambda gradient: gradient * 2)
        return self.blocks[3](y) + first


# Construction: parameters of the model itself, and modules in several places.


@case("construction")
class ClassToken(Blocks):
    """A learned token before the others; the output is that of the token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x.unsqueeze(1)], 1)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x.mean(1, keepdim=True)
        return x[:, 0]


@case("construction")
class PositionTable(Blocks):
    """A table of positions that is added before the first block and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places) + self.places


@case("construction")
class ScaleOfEachLayer(Blocks):
    """A list of learned scales that the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in self.blocks])

    def forward(self, x: Tensor) -> Tensor:
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = x + scale * torch.tanh(block(x))
        return x


@case("construction")
class ScaleOfAllLayers(Blocks):
    """One learned vector of which each layer uses one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, self.n_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + self.scales[index] * torch.tanh(block(x))
        return x


@case("construction")
class ScaleReadByPython(Blocks):
    """A learned scale that the forward reads with item."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * self.scale + self.scale.item()


@case("construction")
class UnusedBlocks(Blocks):
    """Two of six blocks are never called."""

    n_blocks = 6

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 2, 3, 5):
            x = torch.tanh(self.blocks[index](x))
        return x


@case("construction")
class ExpandedBuffers(Blocks):
    """Buffers that are expanded views."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((1, 1), 0.5).expand(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.shift
        return x


@case("construction", words)
class TiedHead(Blocks):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS + 1, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(super().forward(self.embed(ids + 1)))


@case("construction", words)
class TiedHeadByFunction(Blocks):
    """The weight of the embedding is used by F.linear at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(super().forward(self.embed(ids + 1)), self.embed.weight)


@case("construction")
class WeightOfOtherBlock(Blocks):
    """The forward reads the weight of the first block after the last one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.blocks[0].weight)


@case("construction")
class WeightInsideOtherBlock(Blocks):
    """The forward reads a parameter that is deep inside of the first block."""

    def block(self) -> nn.Module:
        """Return a block."""
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.blocks[0][0].weight)


@case("construction")
class WeightPenalty(Blocks):
    """The squares of all weights are part of the output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x, sum(block.weight.square().sum() for block in self.blocks)


@case("construction")
class ParameterWritten(Blocks):
    """The forward scales a parameter of the model in place, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9)
        return super().forward(x) + self.scale


@case("construction")
class WeightsClamped(Blocks):
    """The forward clamps the weights of all blocks before it uses them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks:
                block.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class _Clamped(nn.Linear):
    """A block that clamps its own weight."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@case("construction")
class WeightsClampedInBlocks(Blocks):
    """Each block clamps its own weight in its forward."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _Clamped()


@case("construction")
class OneBlockTwice(Blocks):
    """The first block is the last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3] = self.blocks[0]


@case("construction")
class OneBlockForAll(nn.Module):
    """One block that is called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(4):
            x = torch.tanh(self.block(x)) + index
        return x


@case("construction")
class BlockThatKnowsModel(Blocks):
    """A block that reads a parameter of another one, by a reference that is no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = _Borrowing(self.blocks[0])


class _Borrowing(nn.Linear):
    """A block that adds the bias of another one."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__(WIDTH, WIDTH)
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.others[0].bias


@case("construction")
class FrozenBlock(Blocks):
    """The second block does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


@case("construction")
class SharedBuffer(Blocks):
    """All blocks have one buffer, which each of them changes."""

    def __init__(self) -> None:
        super().__init__()
        count = torch.zeros(())
        for block in self.blocks:
            block.register_buffer("count", count)

    def block(self) -> nn.Module:
        """Return a block."""
        return _SharedCount(WIDTH, WIDTH)


class _SharedCount(nn.Linear):
    """A block that adds one to its buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) + 0.1 * self.count


@case("construction")
class MethodOfBlock(Blocks):
    """The forward calls a method of the first block that is not its forward."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _Invertible(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0].inverse(super().forward(x))


class _Invertible(nn.Linear):
    """A block with a second method."""

    def inverse(self, x: Tensor) -> Tensor:
        """Return the product with the transposed weight."""
        return (x - self.bias) @ self.weight


@case("construction")
class ForwardCalledDirectly(Blocks):
    """The forward calls ``block.forward`` and not the block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block.forward(x)) if block is self.blocks[2] else torch.tanh(block(x))
        return x


@case("construction")
class LazyLayers(Blocks):
    """A block of which the glue reads in_features and the class."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.Linear)
            x = torch.tanh(block(x)) * block.in_features
        return x


# Hooks.


def _make_hooked(attach: Callable[[Any], None], kind: type[nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = kind()
        attach(model)
        return model

    return make


def _double_output(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 2


def _shift_input(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] + 1, *args[1:])


def _count(module: nn.Module, *_: Any) -> None:
    module.calls = getattr(module, "calls", 0) + 1


def _double_gradient(
    _: nn.Module, inputs: tuple[Tensor | None, ...], __: Any
) -> tuple[Tensor | None, ...]:
    return tuple(x if x is None else 2 * x for x in inputs)


def _double_output_gradient(_: nn.Module, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(2 * x for x in outputs)


def _add_to_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.add_(0.01)  # the same in every order of backwards


class InnerSequential(nn.Module):
    """A Sequential of blocks inside of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(torch.tanh(x)))


class Groups(nn.Module):
    """Two groups of two blocks, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = torch.tanh(group(x))
        return x


class ManyGroups(nn.Module):
    """Four containers of Sequential, which are no elements of one list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Residual() for _ in range(2)))
        self.second = nn.Sequential(*(Residual() for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Residual(nn.Module):
    """A residual around one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class PlainSequential(nn.Sequential):
    """A model that is a Sequential."""

    def __init__(self) -> None:
        super().__init__(*(Residual() for _ in range(4)))


HOOKS: dict[str, tuple[Callable[[Any], None], type[nn.Module]]] = {
    "forward hook of a block changes the output": (
        lambda m: m.blocks[1].register_forward_hook(_double_output), Blocks),
    "forward pre-hook of a block changes the input": (
        lambda m: m.blocks[2].register_forward_pre_hook(_shift_input), Blocks),
    "forward hook of the model changes the output": (
        lambda m: m.register_forward_hook(_double_output), Blocks),
    "forward pre-hook of the model changes the input": (
        lambda m: m.register_forward_pre_hook(_shift_input), Blocks),
    "forward hook of a Sequential model": (
        lambda m: m.register_forward_hook(_double_output), PlainSequential),
    "forward pre-hook of a Sequential model": (
        lambda m: m.register_forward_pre_hook(_shift_input), PlainSequential),
    "forward hook of an inner Sequential": (
        lambda m: m.body.register_forward_hook(_double_output), InnerSequential),
    "forward hook of a group": (
        lambda m: m.groups[0].register_forward_hook(_double_output), Groups),
    "forward hook of a cut container": (
        lambda m: m.first.register_forward_hook(_double_output), ManyGroups),
    "forward pre-hook of a cut container": (
        lambda m: m.second.register_forward_pre_hook(_shift_input), ManyGroups),
    "full backward hook of a block": (
        lambda m: m.blocks[2].register_full_backward_hook(_double_gradient), Blocks),
    "full backward pre-hook of a block": (
        lambda m: m.blocks[2].register_full_backward_pre_hook(_double_output_gradient), Blocks),
    "full backward hook of the model": (
        lambda m: m.register_full_backward_hook(_double_gradient), Blocks),
    "full backward pre-hook of the model": (
        lambda m: m.register_full_backward_pre_hook(_double_output_gradient), Blocks),
    "full backward hook of a cut container": (
        lambda m: m.second.register_full_backward_hook(_double_gradient), ManyGroups),
    "hook of a parameter": (
        lambda m: m.blocks[1].weight.register_hook(lambda g: 2 * g), Blocks),
    "post-accumulate hook of a parameter": (
        lambda m: m.blocks[1].weight.register_post_accumulate_grad_hook(_add_to_gradient), Blocks),
    "hook that counts calls of a block": (
        lambda m: m.blocks[1].register_forward_hook(_count), Blocks),
    "hook that counts calls of the model": (
        lambda m: m.register_forward_hook(_count), Blocks),
    "pre-hook that counts calls of the model": (
        lambda m: m.register_forward_pre_hook(_count), Blocks),
    "backward hook that counts": (
        lambda m: m.blocks[1].register_full_backward_hook(_count), Blocks),
    "hook of the state dict": (
        lambda m: m.register_state_dict_post_hook(
            lambda _, state, *__: state.update(extra=torch.ones(2))), Blocks),
}  # fmt: skip

for _name, (_attach, _kind) in HOOKS.items():
    add("hooks", _name, _make_hooked(_attach, _kind), floats)


@case("hooks")
class ForwardReplaced(Blocks):
    """The forward of one block is replaced by a function, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        block, original = self.blocks[1], self.blocks[1].forward
        block.forward = lambda x: 2 * original(x)


# Outputs.


@dataclasses.dataclass
class Result:
    """A result of two tensors and a text."""

    x: Tensor
    norm: Tensor
    name: str = "result"


@case("outputs")
class OutputDict(Blocks):
    """A dict with values of several stages."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        values = {"input": x}
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            values[f"hidden {index}"] = x
        return values


@case("outputs")
class OutputDataclass(Blocks):
    """A dataclass."""

    def forward(self, x: Tensor) -> Result:
        x = super().forward(x)
        return Result(x, x.norm(dim=1))


@case("outputs")
class OutputWithNone(Blocks):
    """A tuple with None, a number, and a value of the first stage."""

    def forward(self, x: Tensor) -> tuple[Tensor, None, float, Tensor]:
        first = self.blocks[0](x)
        y = first
        for block in self.blocks[1:]:
            y = block(torch.tanh(y))
        return y, None, 0.5, first


@case("outputs")
class OutputNested(Blocks):
    """Nested lists, one list a block."""

    def forward(self, x: Tensor) -> list[Any]:
        result: list[Any] = []
        for block in self.blocks:
            x = torch.tanh(block(x))
            result.append([x, [x.mean(1)]])
        return result


@case("outputs")
class OutputTwoLosses(Blocks):
    """Two losses, the first one from the middle."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        middle = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        y = self.blocks[3](torch.tanh(self.blocks[2](middle)))
        return {"loss": y.square().mean(), "auxiliary": middle.abs().mean()}


@case("outputs")
class OutputScalar(Blocks):
    """One number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@case("outputs")
class OutputInteger(Blocks):
    """Integers beside the values: the largest entry of each sample after the first block."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.tanh(self.blocks[0](x))
        y = first
        for block in self.blocks[1:]:
            y = torch.tanh(block(y))
        return y, first.argmax(1), y.argmax(1)


@case("outputs")
class OutputOfMiddle(Blocks):
    """The output is that of the first block; others are called without effect."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.blocks[0](x))
        y = first
        for block in self.blocks[1:]:
            y = torch.tanh(block(y))
        return first + 0 * y


@case("outputs")
class OutputIsInput(Blocks):
    """The input is one of the outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


@case("outputs")
class OutputTwice(Blocks):
    """One tensor twice in the output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y


@case("outputs")
class OutputNumberOfData(Blocks):
    """A Python number that depends on the data is an output."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        first = torch.tanh(self.blocks[0](x))
        y = first
        for block in self.blocks[1:]:
            y = torch.tanh(block(y))
        return y, float(first.detach().mean())


class _DictBlock(nn.Linear):
    """A block that takes and returns a dict."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, values: dict[str, Any]) -> dict[str, Any]:
        x = torch.tanh(super().forward(values["x"]))
        return {**values, "x": x, "n": values["n"] + 1, "sum": values["sum"] + float(x.mean())}


@case("outputs")
class BlocksPassDicts(Blocks):
    """Blocks pass dicts with tensors and numbers; the number depends on the data."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _DictBlock()

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        values: dict[str, Any] = {"x": x, "n": 0, "sum": 0.0}
        for block in self.blocks:
            values = block(values)
        return values["x"] * values["n"], values["sum"]


class _ChangesDict(nn.Linear):
    """A block that changes a dict of its caller."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, values: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(super().forward(x))
        values[f"{len(values)}"] = x.mean(1)
        return x


@case("outputs")
class BlocksFillDict(Blocks):
    """Blocks put tensors into a dict that the forward returns."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _ChangesDict()

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values: dict[str, Tensor] = {}
        for block in self.blocks:
            x = block(x, values)
        return x, values


# Aliases, identities, arguments and transforms.


class _TwoNames(nn.Linear):
    """A block that returns a value, and a view of it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y[:, :3]


@case("writes")
class BlockReturnsTwoNames(Blocks):
    """A block returns a value and a view of it; a write to the view later changes the value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = _TwoNames()

    def forward(self, x: Tensor) -> Tensor:
        first, view = self.blocks[0](x)
        y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first.clone()))))
        view += 1
        return torch.tanh(self.blocks[3](y)) + first


@case("writes")
class BlockWritesOtherName(Blocks):
    """The third block writes to a view that the first one returned beside the value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.blocks[2] = _TwoNames(), _AddsOne()

    def forward(self, x: Tensor) -> Tensor:
        first, view = self.blocks[0](x)
        y = torch.tanh(self.blocks[1](first.clone()))
        y = torch.tanh(self.blocks[2](y, view))
        return torch.tanh(self.blocks[3](y)) + first


@case("writes")
class WriteToScratch(Blocks):
    """A tensor that is made in the forward, and depends on no input, is changed by each layer."""

    def forward(self, x: Tensor) -> Tensor:
        step = torch.zeros(())
        for block in self.blocks:
            step += 1
            x = torch.tanh(block(x)) * step.clone()
        return x


@case("writes")
class WriteToParameterData(Blocks):
    """The forward changes ``.data`` of the first block's bias after the last block."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.blocks[0].bias.data.mul_(0.5)
        return x


@case("construction")
class StridesOfValue(Blocks):
    """The glue asks whether a value is contiguous, after two more blocks."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.blocks[0](x))
        across = first.t()
        y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first))))
        return self.blocks[3](y) * (1.0 if across.is_contiguous() else 2.0)


@case("construction")
class StridesOfBlockOutput(Blocks):
    """A block returns a transposed value; the glue after two more blocks asks for its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = _Transposed()

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first))))
        return self.blocks[3](y) * (1.0 if first.is_contiguous() else 2.0) + first.stride(0)


class _Transposed(nn.Linear):
    """A block whose output is not contiguous."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x).t().contiguous()).t()


@case("construction")
class IdentityOfValues(Blocks):
    """The glue asks whether a block returned its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = _Passes()

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.blocks[0](x)) * 1
        y = self.blocks[1](first)
        z = torch.tanh(self.blocks[2](y.clone()))
        return self.blocks[3](z) * (2.0 if y is first else 1.0)


@case("construction")
class GradientFunction(Blocks):
    """The glue asks whether the first value has a grad_fn, after two more blocks."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.blocks[0](x))
        y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first))))
        return self.blocks[3](y) * (2.0 if first.grad_fn is not None else 1.0)


class _Scaled(nn.Linear):
    """A block that takes a number."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float, index: int) -> Tensor:
        return torch.tanh(super().forward(x)) * scale + index


@case("construction", masked)
class NumberToBlock(Blocks):
    """Blocks take a number that the forward reads from the mask with tolist."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _Scaled()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scale = float(len([v for row in mask.tolist() for v in row if v]))
        for index, block in enumerate(self.blocks):
            x = block(x, scale=scale / 4, index=index)
        return x


class _NotedList(nn.Linear):
    """A block that takes a list of tensors, and appends to it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, values: list[Tensor]) -> list[Tensor]:
        values.append(torch.tanh(super().forward(values[-1])))
        return values


@case("construction")
class BlocksAppendToList(Blocks):
    """Blocks append to one list, which they take and return."""

    def block(self) -> nn.Module:
        """Return a block."""
        return _NotedList()

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for block in self.blocks:
            values = block(values)
        return torch.stack(values).sum(0) * len(values)


@case("construction")
class FunctionalCall(Blocks):
    """torch.func.functional_call runs a block with twice its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index == 2:
                weights = {name: 2 * p for name, p in block.named_parameters()}
                x = torch.tanh(torch.func.functional_call(block, weights, (x,)))
            else:
                x = torch.tanh(block(x))
        return x


@case("construction")
class VectorizedBlocks(Blocks):
    """torch.vmap runs each block sample by sample."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(torch.vmap(block)(x))
        return x


class _TwiceGradient(torch.autograd.Function):
    """Identity whose gradient is doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@case("construction")
class OwnFunction(Blocks):
    """An autograd.Function between blocks, also on a skip connection."""

    def forward(self, x: Tensor) -> Tensor:
        first = y = torch.tanh(self.blocks[0](x))
        for block in self.blocks[1:]:
            y = torch.tanh(block(_TwiceGradient.apply(y))) + _TwiceGradient.apply(first)
        return y


@case("state")
class SeedInForward(Blocks):
    """The forward seeds torch's random numbers, so that its noise is the same each time."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng([]):
            torch.manual_seed(11)
            noise = torch.rand(WIDTH)
        for block in self.blocks:
            x = torch.tanh(block(x)) + noise
        return x


@case("state")
class SeedBetweenBlocks(Blocks):
    """The forward seeds a generator of its own between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            generator = torch.Generator().manual_seed(index)
            x = torch.tanh(block(x)) + torch.rand(WIDTH, generator=generator)
        return x


@case("state")
class ModuleGrows(Blocks):
    """The forward registers a buffer in its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.full((WIDTH,), 0.5))
        return super().forward(x) + self.shift


@case("state")
class CounterOfList(Blocks):
    """A Python counter inside a dict of the model, which chooses a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        self.statistics["calls"] += 1
        scale = 1 + self.statistics["calls"] % 3
        return self.blocks[3](torch.tanh(self.blocks[2](x * scale))) * scale


@case("modes")
class InferenceInMiddle(Blocks):
    """A value of inference mode is used as a constant by later blocks."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            shift = torch.tanh(self.blocks[0](x)).mean(0)
        y = torch.tanh(self.blocks[1](x))
        y = torch.tanh(self.blocks[2](y + shift.clone()))
        return self.blocks[3](y)


@case("modes")
class ModeSwitched(Blocks):
    """The forward switches the mode of the third block to eval, and back."""

    def block(self) -> nn.Module:
        """Return a block."""
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            was_training = block.training
            block.train(was_training and index != 2)
            x = block(x)
            block.train(was_training)
        return x


@case("modes")
class GradientsSwitchedOff(Blocks):
    """The forward switches requires_grad of a parameter by its call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.requires_grad_(bool(x.sum() > 0))
        x = super().forward(x * self.scale)
        self.scale.requires_grad_(True)
        return x


@case("modes", masked)
class SkipWithoutMask(Blocks):
    """A block is called only if the mask has many entries."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != 3 or len(mask.nonzero()) > 7:
                x = torch.tanh(block(x))
        return x + 0


def nested(n: int, generator: Generator) -> dict[str, Any]:
    """Return a batch with a dict in it."""
    return {"x": floats(n, generator), "more": {"y": floats(n, generator)}}


@case("writes", nested)
class BatchDictChanged(Blocks):
    """The forward puts a value into a dict of the batch."""

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> Tensor:
        more["y"] = more["y"] * 2
        x = super().forward(x + more["y"])
        return x + more["y"]
