"""Where a split cuts: the first call of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from pipeexec.splitting.balance.limited_split import limited_split
from pipesim.costs.megatron_layout import layout_stages
from pipesim.costs.partition.balanced_split import balanced_split
from pipesim.errors import ArgumentError, check_count, check_list, check_name
from pipesim.utils.units import format_bytes

#: What stages have equally much of.
Balance = Literal["blocks", "parameters", "time", "memory"]
#: Description of stages: their number, blocks of each, first modules, or Megatron's layout.
Cuts = int | str | Sequence[int] | Sequence[str]


class Balancing(NamedTuple):
    """Quantity that cuts balance between stages, and the limit of a stage.

    Attributes
    ----------
    balance, memory_limit
        As of `pipeexec.split`.
    weights
        Returns the weight of each call for a balance.
    """

    balance: str
    memory_limit: float | None
    weights: Callable[[str], Sequence[float]]


def first_calls(
    names: Sequence[str], blocks: frozenset[str], cuts: Cuts, balancing: Balancing
) -> list[int]:
    """Return the number of the first call of each stage.

    Calls before the first block belong to the first stage. Other calls that are no blocks belong
    to the stage of the call before them.

    Parameters
    ----------
    names
        Module of each call.
    blocks
        Modules that are blocks; if none is called, each call is a block.
    cuts
        As of `pipeexec.split`.
    balancing
        Weights of calls.
    """
    check_name("balance", balancing.balance, get_args(Balance))
    starts = _starts(names, blocks, cuts, balancing)
    if balancing.memory_limit is not None:
        _check_bytes(names, starts, balancing, is_least=isinstance(cuts, int))
    return starts


def _starts(
    names: Sequence[str], blocks: frozenset[str], cuts: Cuts, balancing: Balancing
) -> list[int]:
    """Return the number of the first call of each stage."""
    places = [k for k, name in enumerate(names) if name in blocks] or list(range(len(names)))
    if isinstance(cuts, str):
        counts = list(layout_stages(cuts, "stages")[0])
    elif isinstance(cuts, int) and not isinstance(cuts, bool):
        counts = _counts(names, places, check_count("stages", cuts), balancing)
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


def _counts(names: Sequence[str], places: Sequence[int], n: int, balancing: Balancing) -> list[int]:
    """Return the blocks of each of n stages."""
    if n > len(places):
        raise ArgumentError(
            f"stages={n}, but the model has {len(places)} blocks that are not cut: "
            f"{names[places[0]]!r} to {names[places[-1]]!r}; give at most {len(places)} stages"
        )
    balance, limit, weights = balancing
    if balance == "blocks":
        least, rest = divmod(len(places), n)
        counts = [least + (k < rest) for k in range(n)]
        block_weights = [1.0] * len(places)
    else:
        block_weights = _sums(weights(balance), places)
        counts = list(balanced_split(block_weights, n))
    if limit is None:
        return counts
    nbytes = _sums(weights("memory"), places)
    if max(_sums(nbytes, [0, *accumulate(counts[:-1])])) <= limit:
        return counts
    fitting = limited_split(block_weights, nbytes, n, limit)
    # Without a split that fits, the one with the least bytes shows by how much.
    return list(balanced_split(nbytes, n) if fitting is None else fitting)


def _sums(weights: Sequence[float], starts: Sequence[int]) -> list[float]:
    """Return the sums of weights from each start to the next; the first one begins at 0."""
    ends = [*starts[1:], len(weights)]
    return [float(sum(weights[a:b])) for a, b in zip([0, *starts[1:]], ends, strict=True)]


def _check_bytes(
    names: Sequence[str], starts: Sequence[int], balancing: Balancing, *, is_least: bool
) -> None:
    """Raise if a stage has more bytes than the limit; ``is_least`` if no other cuts have less."""
    sums, limit = _sums(balancing.weights("memory"), starts), balancing.memory_limit
    if limit is not None and max(sums) > limit:
        stage = sums.index(max(sums))
        first, last = starts[stage], [*starts[1:], len(names)][stage] - 1
        raise ArgumentError(
            f"memory_limit={limit:g}, but stage {stage} of {len(starts)}, {names[first]!r} to "
            f"{names[last]!r}, needs {sums[stage]:.0f} bytes ({format_bytes(sums[stage])}) for "
            "parameters, gradients, optimizer state and the activations of one sample; "
            + ("no other cuts need less" if is_least else "that is the least limit for these cuts")
            + ". Give a higher limit, more stages, or a sample of a smaller micro-batch"
        )


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
