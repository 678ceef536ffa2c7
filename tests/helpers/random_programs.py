"""Models whose forwards are random programs: blocks, and glue that reads and writes between them.

A program is a list of instructions, drawn from a seed. Each reads or writes values, which are
matrices of a sample a row, or numbers that Python has read. Values are named by how many values
back they were made: 0 is the last one, so that a program without one of its instructions is a
program, too.

``python tests/helpers/random_programs.py 7`` prints the program of seed 7 and its verdicts, without
instructions that the first wrong verdict does not need.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor, nn
from tricky_models import WIDTH, Case


class Instruction(NamedTuple):
    """An operation, two values or numbers by how far back they are, and a constant."""

    name: str
    a: int = 0
    b: int = 0
    constant: float = 0.5


class Memory:
    """Values and numbers of one forward."""

    def __init__(self, x: Tensor, mask: Tensor, ids: Tensor) -> None:
        self.values, self.mask, self.ids = [x], mask, ids
        self.numbers: list[float] = [1.0]

    def value(self, back: int) -> Tensor:
        """Return a value by how far back it was made."""
        return self.values[-1 - back % len(self.values)]

    def number(self, back: int) -> float:
        """Return a number by how far back it was read."""
        return self.numbers[-1 - back % len(self.numbers)]


Operation: TypeAlias = Callable[[Memory, Instruction], Any]

#: Operations that make a value of other ones.
NEW: dict[str, Operation] = {
    "add": lambda m, i: m.value(i.a) + m.value(i.b),
    "mean": lambda m, i: 0.5 * m.value(i.a) + 0.25 * m.value(i.b),
    "multiply": lambda m, i: torch.tanh(m.value(i.a).clone()) * m.value(i.b).clone(),
    "copy": lambda m, i: m.value(i.a).clone(),
    "tanh": lambda m, i: torch.tanh(m.value(i.a)) * 1,
    "times mask": lambda m, i: m.value(i.a) * m.mask.to(torch.get_default_dtype()),
    "where": lambda m, i: torch.where(m.mask.clone(), m.value(i.a), m.value(i.b)),
    "gather": lambda m, i: m.value(i.a).gather(1, m.ids.clone() % WIDTH),
    "columns by ids": lambda m, i: m.value(i.a)[:, (m.ids[0] % WIDTH).clone()],
    "plus ids": lambda m, i: m.value(i.a) + 0.1 * m.ids,
    "rows in order": lambda m, i: m.value(i.a)[m.value(i.b).detach().sum(1).argsort()],
    "largest first": lambda m, i: m.value(i.a).sort(1).values,
    "scale": lambda m, i: m.value(i.a) * (0.5 + 0.05 * m.number(i.b)),
    "choose": lambda m, i: m.value(i.a) if m.number(i.b) > 4 else m.value(i.b),
    "power": lambda m, i: _repeated(m.value(i.a), int(m.number(i.b)) % 3),
    "packed": lambda m, i: _packed(m.value(i.a), m.value(i.b).detach().sum(1) > 0),
    "detached": lambda m, i: m.value(i.a).detach() + m.value(i.b),
}
#: Operations that make a view, or a second name.
VIEWS: dict[str, Operation] = {
    "same": lambda m, i: m.value(i.a),
    "slice": lambda m, i: m.value(i.a)[:],
    "view": lambda m, i: m.value(i.a).view(-1, WIDTH),
    "transpose twice": lambda m, i: m.value(i.a).t().t(),
    "flip of strides": lambda m, i: m.value(i.a).unsqueeze(0).squeeze(0),
    "view as": lambda m, i: m.value(i.a).view_as(m.value(i.b)),
}
#: Operations that write to a value, to the mask or to the ids.
WRITES: dict[str, Operation] = {
    "mul_": lambda m, i: m.value(i.a).mul_(1.25),
    "add_ constant": lambda m, i: m.value(i.a).add_(i.constant),
    "add_ value": lambda m, i: m.value(i.a).add_(m.value(i.b).clone()),
    "+= to columns": lambda m, i: m.value(i.a)[:, :2].add_(i.constant),
    "clamp_": lambda m, i: m.value(i.a).clamp_(-i.constant - 0.5, i.constant + 0.5),
    "masked_fill_": lambda m, i: m.value(i.a).masked_fill_(m.mask.clone(), i.constant),
    "= under mask": lambda m, i: m.value(i.a).__setitem__(m.mask.clone(), i.constant),
    "= in column": lambda m, i: m.value(i.a).__setitem__((slice(None), 1), i.constant),
    "transpose row mul_": lambda m, i: m.value(i.a).t()[0].mul_(2),
    "every second": lambda m, i: m.value(i.a).view(-1)[::2].add_(i.constant),
    "copy_": lambda m, i: m.value(i.a).copy_(m.value(i.b).clone() * 0.5),
    "copy_ to column": lambda m, i: m.value(i.a)[:, 2].copy_(m.value(i.b)[:, 0].clone()),
    "relu_": lambda m, i: torch.relu_(m.value(i.a)),
    "zero_": lambda m, i: m.value(i.a).zero_(),
    "index_add_": lambda m, i: m.value(i.a).index_add_(
        1, torch.tensor([1]), m.value(i.b)[:, :1].clone()),
    "add_ to detached": lambda m, i: m.value(i.a).detach().add_(i.constant),
    "add_ to data": lambda m, i: m.value(i.a).data.add_(i.constant),
    "add_ number": lambda m, i: m.value(i.a).add_(0.05 * m.number(i.b)),
    "add_ if": lambda m, i: m.value(i.a).add_(i.constant) if m.number(i.b) > 4 else None,
    "invert mask": lambda m, _: m.mask.logical_not_(),
    "mask column": lambda m, _: m.mask[:, 1].fill_(True),
    "clamp_ ids": lambda m, _: m.ids.clamp_(max=4),
    "add_ to ids": lambda m, _: m.ids.add_(1),
}  # fmt: skip
#: Operations that read a number.
READS: dict[str, Operation] = {
    "item": lambda m, i: (m.value(i.a) > 0).sum().item(),
    "int": lambda m, i: int((m.value(i.a) > 0).sum()),
    "bool": lambda m, i: 6 if m.value(i.a).sum() > 0 else 2,
    "tolist": lambda m, i: sum((m.value(i.a) > 0).sum(0).tolist()),
    "numpy": lambda m, i: int((m.value(i.a).detach().numpy() > 0).sum()),
    "nonzero": lambda m, i: (m.value(i.a) > 0).nonzero().shape[0],
    "masked": lambda m, i: m.value(i.a)[m.value(i.b) > 0].shape[0],
    "masked_select": lambda m, i: m.value(i.a).masked_select(m.mask).numel(),
    "unique": lambda m, i: len(m.ids.unique()),
    "equal": lambda m, i: 6 if torch.equal(m.value(i.a), m.value(i.b)) else 2,
    "argmax": lambda m, i: int(m.value(i.a).sum(0).argmax()),
    "mask sum": lambda m, _: int(m.mask.sum()),
    "mask tolist": lambda m, _: sum(map(sum, m.mask.tolist())),
    "mask shape": lambda m, _: m.mask.nonzero().shape[0],
    "ids item": lambda m, _: m.ids.max().item(),
    "ids numpy": lambda m, _: int(m.ids.numpy().sum()) % 9,
    "size": lambda m, i: m.value(i.a).shape[0],
}  # fmt: skip
#: Operations on the state of the model: of the model, its memory and an instruction.
STATES: dict[str, Callable[[Any, Memory, Instruction], Any]] = {
    "count in place": lambda s, m, i: s.count.add_(1),
    "count replaced": lambda s, m, i: setattr(s, "count", s.count + 1),
    "plus count": lambda s, m, i: m.values.append(m.value(i.a) + 0.1 * s.count),
    "average in place": lambda s, m, i: s.average.lerp_(m.value(i.a).detach().mean(0), 0.25),
    "average replaced": lambda s, m, i: setattr(
        s, "average", 0.75 * s.average + 0.25 * m.value(i.a).detach().mean(0)),
    "plus average": lambda s, m, i: m.values.append(m.value(i.a) + s.average.clone()),
    "calls": lambda s, m, i: setattr(s, "calls", s.calls + 1),
    "read calls": lambda s, m, i: m.numbers.append(s.calls),
    "keep": lambda s, m, i: setattr(s, "kept", m.value(i.a).detach().mean()),
    "plus kept": lambda s, m, i: m.values.append(m.value(i.a) + s.kept),
    "times scale": lambda s, m, i: m.values.append(m.value(i.a) * s.scale),
    "in training": lambda s, m, i: m.values.append(m.value(i.a) + (0.5 if s.training else 0.25)),
    "norm": lambda s, m, i: m.values.append(s.norm(m.value(i.a).clone())),
}  # fmt: skip


def _repeated(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = torch.tanh(x) + 0.1
    return x


def _packed(x: Tensor, keep: Tensor) -> Tensor:
    """Return a value of which the rows to keep are changed apart from the others."""
    return torch.zeros_like(x).index_put((keep,), 2 * x[keep])


class _ReluBefore(nn.Sequential):
    """A block that writes to its argument."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))


class _Residual(nn.Module):
    """A block with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _Shift(nn.Module):
    """A block that adds a vector to its argument in place, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.bias)


class _Normed(nn.Sequential):
    """A block with a batch norm."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


_BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": partial(nn.Linear, WIDTH, WIDTH),
    "residual": _Residual,
    "relu": _ReluBefore,
    "shift": _Shift,
    "norm": _Normed,
}


class RandomProgram(nn.Module):
    """A model whose forward runs instructions.

    Parameters
    ----------
    instructions
        The instructions; ``block`` calls the next block.
    blocks
        Kind of each block.
    """

    def __init__(self, instructions: Sequence[Instruction], blocks: Sequence[str]) -> None:
        super().__init__()
        self.instructions = tuple(instructions)
        names = {name for name, *_ in instructions}
        self.blocks = nn.ModuleList([_BLOCKS[kind]() for kind in blocks])
        if any("count" in name for name in names):
            self.register_buffer("count", torch.zeros(()))
        if any("average" in name for name in names):
            self.register_buffer("average", torch.zeros(WIDTH))
        if "times scale" in names:
            self.scale = nn.Parameter(torch.ones(WIDTH))
        if "norm" in names:
            self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.calls, self.kept = 0, torch.zeros(())

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor) -> Any:
        memory, blocks = Memory(x, mask, ids), iter(self.blocks)
        for instruction in self.instructions:
            name = instruction.name
            if name == "block":
                memory.values.append(next(blocks)(memory.value(instruction.a)))
            elif name == "block of a copy":
                memory.values.append(next(blocks)(memory.value(instruction.a).clone()))
            elif name in NEW:
                memory.values.append(NEW[name](memory, instruction))
            elif name in VIEWS:
                memory.values.append(VIEWS[name](memory, instruction))
            elif name in WRITES:
                WRITES[name](memory, instruction)
            elif name in STATES:
                STATES[name](self, memory, instruction)
            else:
                memory.numbers.append(READS[name](memory, instruction))
        scale = 1 + 0.05 * memory.number(0) + 0.02 * memory.number(1)
        return memory.value(0) * scale + 0.5 * memory.value(2), memory.value(3)


def program(draw: random.Random) -> tuple[list[Instruction], list[str]]:
    """Return random instructions, and the kinds of blocks."""
    kinds = draw.choices(list(_BLOCKS), [10, 5, 2, 1, 1], k=draw.randint(4, 5))
    weights = [(NEW, 5), (VIEWS, 2), (WRITES, draw.choice([0, 3, 6]))]
    weights += [(READS, draw.choice([0, 2])), (STATES, draw.choice([0, 0, 1]))]
    tables: list[dict[str, Any]] = [table for table, _ in weights]
    result = []
    for _ in kinds:
        for table in draw.choices(tables, [weight for _, weight in weights], k=draw.randint(0, 3)):
            result.append(_instruction(draw, draw.choice(list(table))))
        name = draw.choice(["block", "block of a copy", "block of a copy"])
        result.append(Instruction(name, draw.choice([0, 0, 0, 1])))
    for table in draw.choices(tables, [weight for _, weight in weights], k=draw.randint(0, 3)):
        result.append(_instruction(draw, draw.choice(list(table))))
    names = " ".join(name for name, *_ in result)
    result += [Instruction("times mask")] * ("mask" in names and draw.random() < 0.5)
    result += [Instruction("plus ids")] * ("ids" in names and draw.random() < 0.5)
    return result, kinds


def _instruction(draw: random.Random, name: str) -> Instruction:
    back = draw.choices(range(8), [6, 5, 4, 3, 2, 2, 1, 1], k=2)
    return Instruction(name, *back, draw.choice([0.25, 0.5, 1.0]))


def batch(n: int, generator: Generator) -> dict[str, Tensor]:
    """Return a batch for a program."""
    return {
        "x": torch.randn(n, WIDTH, generator=generator),
        "mask": torch.rand(n, WIDTH, generator=generator) > 0.5,
        "ids": torch.randint(WIDTH, (n, WIDTH), generator=generator),
    }


def random_case(seed: int) -> Case:
    """Return the first random model of a seed that trains without a split."""
    draw = random.Random(seed)
    while True:
        instructions, kinds = program(draw)
        if trains(instructions, kinds):
            return Case(f"random: {seed}", partial(RandomProgram, instructions, kinds), batch)


def trains(instructions: Sequence[Instruction], kinds: Sequence[str]) -> bool:
    """Return whether a model of a program has gradients for all blocks, and no large values."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return all(
                _runs(RandomProgram(instructions, kinds), batch(2, Generator().manual_seed(seed)))
                for seed in (0, 1, 2)
            )
    finally:
        torch.set_default_dtype(dtype)


def _runs(model: RandomProgram, values: dict[str, Tensor]) -> bool:
    try:
        output = sum(x.square().sum() for x in model(**values))
        output.backward()
    except RuntimeError:  # of autograd: a value was needed that is written
        return False
    is_trained = all(p.grad is not None for p in model.blocks.parameters())
    return is_trained and float(output.detach()) < 1e4


def _shrunk(
    instructions: list[Instruction], kinds: list[str], is_wrong: Callable[[Case], bool]
) -> list[Instruction]:
    """Return the program without instructions that are not needed for a wrong verdict."""
    index = 0
    while index < len(instructions):
        fewer = instructions[:index] + instructions[index + 1 :]
        is_block = instructions[index].name.startswith("block")
        if not is_block and trains(fewer, kinds):
            case = Case("random: shrunk", partial(RandomProgram, fewer, kinds), batch)
            if is_wrong(case):
                instructions = fewer
                continue
        index += 1
    return instructions


def main() -> None:
    """Print programs and verdicts."""
    from split_verdicts import CONFIGURATIONS, is_right, verdict

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    for seed in parser.parse_args().seeds:
        model = random_case(seed).make
        instructions, kinds = map(list, model.args)  # type: ignore[attr-defined]
        for configuration in CONFIGURATIONS:
            text = verdict(random_case(seed), configuration)
            print(f"{seed}: {configuration}: {text}")
            if is_right(text):
                continue
            kind = text[:6]
            instructions = _shrunk(
                instructions, kinds,
                lambda case, x=configuration, kind=kind: verdict(case, x).startswith(kind),
            )  # fmt: skip
            break
        print("  blocks:", ", ".join(kinds))
        for instruction in instructions:
            print(f"  {instruction.name} (a={instruction.a}, b={instruction.b}, "
                  f"constant={instruction.constant})")  # fmt: skip


if __name__ == "__main__":
    main()
