"""Skip connections: tensors that go from one stage to a later one, besides the pipeline's outputs.

With portals each skip has its own message. Without, one message at each border between two stages
carries all skips that cross it, from stage to stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, CostsError, GraphError, number
from pipesim.graph.tasks import Kinds
from pipesim.utils.texts import parse_bytes

#: Source and target stage.
Skip = tuple[int, int]
#: Bytes of all skips, or of each; a tuple, so that costs can be hashed.
SkipBytes = float | tuple[tuple[Skip, float | tuple[float, ...]], ...]

_EXAMPLE = "[(0, 3), (1, 2)]"


def skip_text(skip: Skip) -> str:
    """Return the text of a skip, such as ``0-3``."""
    return f"{skip[0]}-{skip[1]}"


def skip_from_text(text: str) -> Skip:
    """Read the text of `skip_text`."""
    source, dash, target = text.strip().partition("-")
    digits = source + target
    if not (dash and source and target and digits.isascii() and digits.isdecimal()
            and len(text) < 32):  # fmt: skip
        raise ArgumentError(
            f"{text!r:.60} is no skip connection; write source and target stage, such as '0-3'"
        )
    return int(source), int(target)


def checked_skips(skips: object, n_stages: int) -> tuple[Skip, ...]:
    """Return skips in order."""
    if isinstance(skips, str):
        skips = [skip_from_text(text) for text in skips.split(",") if text.strip()]
    if not isinstance(skips, Iterable):
        raise ArgumentError(f"skips must be pairs of stages, such as {_EXAMPLE}, got {skips!r:.60}")
    most = n_stages * (n_stages - 1) // 2  # more have a duplicate
    pairs = sorted(_checked_pair(skip) for skip in itertools.islice(skips, most + 1))
    for k, (source, target) in enumerate(pairs):
        if not 0 <= source < target < n_stages:
            raise ArgumentError(
                f"skip ({source}, {target}) does not lead from a stage to a later one of 0.."
                f"{n_stages - 1}; give (source, target) with source < target"
            )
        if k and pairs[k - 1] == pairs[k]:
            raise ArgumentError(
                f"skip ({source}, {target}) is given twice; give each pair of stages once, with "
                "the bytes of all tensors that go there"
            )
    return tuple(pairs)


def _checked_pair(skip: object) -> Skip:
    if isinstance(skip, str):
        return skip_from_text(skip)
    stages = list(skip) if isinstance(skip, (tuple, list, np.ndarray)) else []
    whole = all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in stages)
    if len(stages) != 2 or not whole:
        raise ArgumentError(
            f"{skip!r:.60} is no skip; give pairs of stages (source, target), such as {_EXAMPLE}"
        )
    return int(stages[0]), int(stages[1])


def border_crossings(skips: Iterable[Skip], portals: bool) -> dict[Skip, list[int]]:
    """Return, for each message between two stages, the numbers of the skips that it carries."""
    messages: dict[Skip, list[int]] = {}
    for k, (source, target) in enumerate(skips):
        borders = [(source, target)] if portals else [(s, s + 1) for s in range(source, target)]
        for border in borders:
            messages.setdefault(border, []).append(k)
    return dict(sorted(messages.items()))


def skips_of(kinds: Kinds, pairs: tuple[Skip, ...], portals: bool) -> tuple[Skip, ...]:
    """Return the skips of a graph: ``pairs``, or those of its messages if there are none."""
    is_message = (kinds.peer_stage >= 0) & ~kinds.returns_tokens
    if not is_message.any():
        return pairs
    ends = np.sort([kinds.stage[is_message], kinds.peer_stage[is_message]], axis=0)
    named = {(source, target) for source, target in np.unique(ends, axis=1).T.tolist()}
    if not pairs:
        return tuple(sorted(named))
    for source, target in sorted(named.difference(border_crossings(pairs, portals))):
        raise GraphError(
            f"stages {source} and {target} have messages of a skip, but no skip goes that way with "
            f"portals={portals}: there are {', '.join(map(skip_text, pairs))}"
        )
    return pairs


def checked_skip_bytes(value: object) -> SkipBytes | None:
    """Return bytes of skips in the form of `Costs`: a number, or pairs of stages with bytes."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, tuple):
        return _checked_bytes("skip_bytes", value)
    sizes: dict[Skip, float | tuple[float, ...]] = {}
    for entry in value:
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise CostsError(
                "skip_bytes must be bytes, or a mapping such as {(0, 3): 4096}, got "
                f"{value!r:.60}"
            )
        try:
            skip = _checked_pair(entry[0])
        except ArgumentError as error:
            raise CostsError(f"skip_bytes: {error}") from error
        if skip in sizes:
            raise CostsError(f"skip_bytes gives skip {skip_text(skip)} twice; give it once")
        what = f"skip_bytes of {skip_text(skip)}"
        several = isinstance(entry[1], (tuple, list, np.ndarray)) and len(entry[1])
        sizes[skip] = (
            tuple(_checked_bytes(what, size) for size in entry[1])
            if several
            else _checked_bytes(what, entry[1])
        )
    return tuple(sorted(sizes.items()))


def _checked_bytes(what: str, value: object) -> float:
    got = parse_bytes(value) if isinstance(value, str) else number(value)
    if got is None or not 0 <= got < np.inf:
        raise CostsError(f"{what} must be finite bytes >= 0, got {value!r:.60}")
    return got


def _sizes(skip_bytes: SkipBytes | None, skips: tuple[Skip, ...]) -> NDArray[np.float64]:
    """Return the bytes of each skip of a graph; the graph must have all skips that costs name."""
    if not isinstance(skip_bytes, tuple):
        return np.full(len(skips), skip_bytes or 0.0)
    sizes = dict(skip_bytes)
    names = ", ".join(map(skip_text, skips)) or "none"
    for skip in sizes:
        if skip not in skips:
            raise CostsError(
                f"skip_bytes has skip {skip_text(skip)}, which the graph lacks (it has: {names}); "
                "give it to lower(..., skips=), or leave it out"
            )
    for skip in skips:
        if skip not in sizes:
            raise CostsError(
                f"skip_bytes lacks skip {skip_text(skip)} of the graph (it has: {names}); give the "
                "bytes of each, or one number for all"
            )
    return np.array([sizes[skip] for skip in skips])


def message_bytes(
    kinds: Kinds, skips: tuple[Skip, ...], portals: bool, skip_bytes: SkipBytes | None
) -> NDArray[np.float64]:
    """Return the bytes of skips of each kind of message, 0 for others; shape ``(n_kinds,)``."""
    nbytes = np.zeros(len(kinds))
    _sizes(skip_bytes, skips)  # for its error
    own = np.flatnonzero((kinds.peer_stage >= 0) & ~kinds.returns_tokens)
    if not len(own):
        return nbytes
    messages = border_bytes(skips, portals, skip_bytes)
    n_stages = int(kinds.stage.max()) + 1
    ends = np.array([border for border, _ in messages])
    total = np.array([size for _, size in messages])
    border, own_border = (
        pairs[0] * n_stages + pairs[1]
        for pairs in (ends.T, np.sort([kinds.stage[own], kinds.peer_stage[own]], axis=0))
    )
    nbytes[own] = total[np.searchsorted(border, own_border)]
    return nbytes


def border_bytes(
    skips: tuple[Skip, ...], portals: bool, skip_bytes: SkipBytes | None
) -> list[tuple[Skip, float]]:
    """Return the stages between which tensors of skips go, and their bytes."""
    sizes = _sizes(skip_bytes, skips)
    messages = border_crossings(skips, portals)
    return [(border, float(sizes[members].sum())) for border, members in messages.items()]


def input_bytes(
    n_stages: int, skips: tuple[Skip, ...], skip_bytes: SkipBytes | None
) -> NDArray[np.float64]:
    """Return the bytes that skips add to the input of each stage; shape ``(n_stages,)``.

    Without portals, skips that a stage only forwards do not count: no recompute needs them.
    """
    sizes, nbytes = _sizes(skip_bytes, skips), np.zeros(n_stages)
    for (_, target), size in zip(skips, sizes, strict=True):
        nbytes[target] += size
    return nbytes
