"""Where a split cuts: the first call of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from torch import nn

from pipesim.costs.megatron_layout import layout_stages
from pipesim.costs.partition.balanced_split import balanced_split
from pipesim.errors import ArgumentError, check_count, check_list, check_name

__all__ = ["Balance", "Cuts", "first_calls"]

#: What stages have equally much of.
Balance = Literal["blocks", "parameters"]
#: Description of stages: their number, blocks of each, first modules, or Megatron's layout.
Cuts = int | str | Sequence[int] | Sequence[str]


def first_calls(
    model: nn.Module, names: Sequence[str], blocks: frozenset[str], cuts: Cuts, balance: str
) -> list[int]:
    """Return the number of the first call of each stage.

    Calls before the first block belong to the first stage. Other calls that are no blocks belong
    to the stage of the call before them.

    Parameters
    ----------
    model
        The model.
    names
        Module of each call.
    blocks
        Modules that are blocks; if none is called, each call is a block.
    cuts, balance
        As of `pipeexec.split`.

    Raises
    ------
    ArgumentError
        If there are fewer blocks than stages, and for numbers and names that are not the model's.
    """
    if not names:
        raise ArgumentError(
            "the model cannot be cut: its forward calls no module that has parameters"
        )
    places = [k for k, name in enumerate(names) if name in blocks] or list(range(len(names)))
    if isinstance(cuts, str):
        counts = list(layout_stages(cuts, "stages")[0])
    elif isinstance(cuts, int) and not isinstance(cuts, bool):
        counts = _counts(model, names, places, check_count("stages", cuts), balance)
    else:
        values = check_list("stages", cuts, "blocks of each stage, or the first module of each")
        if values and all(isinstance(value, str) for value in values):
            return _calls_of_names(names, values)
        counts = [check_count("stages", value, 0) for value in values]
    if sum(counts) != len(places):
        raise ArgumentError(
            f"stages have {sum(counts)} blocks ({', '.join(map(str, counts))}), but the model has "
            f"{len(places)}, from {names[places[0]]!r} to {names[places[-1]]!r}"
        )
    return _calls_of_counts(names, places, counts)


def _counts(
    model: nn.Module, names: Sequence[str], places: Sequence[int], n: int, balance: str
) -> list[int]:
    """Return the blocks of each of n stages."""
    check_name("balance", balance, ("blocks", "parameters"))
    if n > len(places):
        raise ArgumentError(
            f"stages={n}, but the model has {len(places)} blocks that are not cut: "
            f"{names[places[0]]!r} to {names[places[-1]]!r}; give at most {len(places)} stages"
        )
    if balance == "blocks":
        least, rest = divmod(len(places), n)
        return [least + (k < rest) for k in range(n)]
    sizes = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in names]
    ends = [*places[1:], len(names)]
    weights = [float(sum(sizes[a:b])) for a, b in zip(places, ends, strict=True)]
    weights[0] += sum(sizes[: places[0]])
    return list(balanced_split(weights, n))


def _calls_of_counts(
    names: Sequence[str], places: Sequence[int], counts: Sequence[int]
) -> list[int]:
    """Return the first calls of stages with so many blocks each.

    A first stage without blocks ends before the first block; a last one without begins after the
    last block.
    """
    ends = list(accumulate(counts))
    starts = [0]
    for end in ends[:-1]:
        starts.append(places[end] if end < len(places) else places[-1] + 1)
    for stage, (a, b) in enumerate(zip(starts, [*starts[1:], len(names)], strict=True)):
        if a >= b:
            raise ArgumentError(
                f"stage {stage} of {len(counts)} has no module: only the first and the last may "
                "have 0 blocks, if modules come before or after the blocks"
            )
    return starts


def _calls_of_names(names: Sequence[str], firsts: Sequence[str]) -> list[int]:
    """Return the first calls of stages that begin with some modules."""
    starts = []
    for name in firsts:
        if name not in names:
            whole = [x for x in names if name.startswith(f"{x}.")]
            if whole:
                raise ArgumentError(
                    f"{name!r} is inside {whole[0]!r}, which is not cut; begin a stage with "
                    f"{whole[0]!r} or with the module after it"
                )
            check_name("module of stages", name, names)
        starts.append(names.index(name))
    if starts[:1] != [0]:
        starts.insert(0, 0)
    if starts != sorted(set(starts)):
        k = next(k for k in range(1, len(starts)) if starts[k] <= starts[k - 1])
        raise ArgumentError(
            f"stages must begin in the order of the forward: {names[starts[k]]!r} runs before "
            f"{names[starts[k - 1]]!r}"
        )
    return starts
