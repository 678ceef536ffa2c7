"""Megatron's layout strings, such as ``"Et*2|(t*2|)*34t*3|tL"``: the layers of each stage.

The string of ``--pipeline-model-parallel-layout`` in Megatron-LM (docs, "Custom Pipeline Model
Parallel Layout"). Stages are in the order of the model; with several a device, that of chunks.

=========  ===================================================
``E``      embedding, first of all
``t``      a decoder layer
``L``      head and loss, last of all
``|``      border between two stages
``(...)``  a group; may contain groups
``*n``     n times the letter, or the group, before it
``,``      nothing: separates for the eye
=========  ===================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from pipesim.errors import ArgumentError, check_count, check_list, check_text

__all__ = ["layout_sizes", "read_layout", "write_layout"]

_TOKEN = re.compile(r"\*(?P<times>\d{1,9})|(?P<other>[EtL|(),])|(?P<space>\s+)")
#: Most letters of a written-out layout.
_LONGEST = 10**6


def read_layout(text: str) -> tuple[int, ...]:
    """Return the layers of each stage of a layout string of Megatron.

    Raises
    ------
    ArgumentError
        For a value that is no text. For a mistake, with its position; ``m`` (multi-token
        prediction) is not supported. For a layout without embedding first and loss last, and one of
        more than a million letters.

    Examples
    --------
    >>> read_layout("Et*2|(tt|)*3,t|L")
    (2, 2, 2, 2, 1, 0)
    """
    return layout_sizes(text, "text")


def layout_sizes(text: str, name: str) -> tuple[int, ...]:
    """Return the layers of each stage of a layout string; ``name`` is that of the argument."""
    letters = _written_out(check_text(name, text), name)
    if not letters.startswith("E") or not letters.endswith("L") or letters.count("L") > 1:
        raise ArgumentError(f"{name}={text!r} must begin with E, the embedding, and end with L, "
                            "the loss; each stands once")  # fmt: skip
    if letters.count("E") > 1:
        raise ArgumentError(f"{name}={text!r} has {letters.count('E')} embeddings; give one E")
    return tuple(stage.count("t") for stage in letters.split("|"))


def write_layout(layers_per_stage: Sequence[int]) -> str:
    """Return the layout string of Megatron for the layers of each stage of a transformer.

    The first stage has the embedding, too, and the last one has head and loss.

    Raises
    ------
    ArgumentError
        For anything but a list of whole numbers of at least 0.

    Examples
    --------
    >>> write_layout([2, 2, 2, 2, 1, 0])
    'Et*2|(t*2|)*3t|L'
    """
    values = check_list("layers_per_stage", layers_per_stage, "the layers of each stage")
    if not values:
        raise ArgumentError("layers_per_stage is empty; give the layers of each stage")
    first, *middle = (
        check_count(f"layers_per_stage: layers of stage {stage}", size, 0)
        for stage, size in enumerate(values)
    )
    if not middle:
        return f"E{_layers(first)}L"
    *middle, last = middle
    text = f"E{_layers(first)}|"
    for size, stages in groupby(middle):
        count = len(list(stages))
        text += f"({_layers(size)}|)*{count}" if count > 1 else f"{_layers(size)}|"
    return f"{text}{_layers(last)}L"


def _layers(size: int) -> str:
    """Return the letters of some layers."""
    return f"t*{size}" if size > 1 else "t" * size


def _written_out(text: str, name: str) -> str:
    """Return the letters and borders of a layout, without groups and repetitions."""
    # Of each open group: the pieces before and inside it, and the position of its bracket.
    groups: list[tuple[list[str], int]] = [([], 0)]
    position = 0
    while position < len(text):
        pieces = groups[-1][0]
        match = _TOKEN.match(text, position)
        if match is None:
            raise _mistake(name, text, position, "only E, t, L, |, *n, groups and commas are known")
        token = match["other"] or ""
        if match["times"]:
            if not pieces:
                raise _mistake(name, text, position, "nothing stands before it that it repeats")
            pieces.append(_repeated(pieces.pop(), int(match["times"]), name, text))
        elif token == "(":
            groups.append(([], position))
        elif token == ")":
            if len(groups) == 1:
                raise _mistake(name, text, position, "no bracket is open")
            groups.pop()
            groups[-1][0].append("".join(pieces))
        elif token and token != ",":
            pieces.append(token)
        position = match.end()
    if len(groups) > 1:
        raise _mistake(name, text, groups[-1][1], "the bracket is never closed")
    return "".join(groups[0][0])


def _repeated(piece: str, times: int, name: str, text: str) -> str:
    """Return a piece several times, unless that is too long."""
    if len(piece) * times > _LONGEST:
        raise ArgumentError(f"{name}={text!r:.60} has more than {_LONGEST:,} letters")
    return piece * times


def _mistake(name: str, text: str, position: int, reason: str) -> ArgumentError:
    """Return the error of a mistake, which points to it."""
    return ArgumentError(
        f"{name}: mistake at position {position} of the layout, {text[position]!r}: {reason}\n"
        f"    {text}\n    {' ' * position}^"
    )
