"""Arguments that annotations check."""

from __future__ import annotations

import inspect
import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction as Exact
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, ArgumentTypeError, NetworkError, UnknownNameError
from pipesim.utils.checks import (
    Count,
    Fraction,
    Positive,
    Range,
    Seconds,
    Whole,
    checked,
    checked_as,
)

if TYPE_CHECKING:
    from decimal import Decimal

Streams = Literal["per_peer", "single"]


@checked
def door(
    n: Count = 1,
    /,
    rank: Whole = 0,
    *others: int,
    streams: Streams | Literal["none"] = "per_peer",
    flag: bool = True,
    seconds: Seconds | None = None,
    rate: Annotated[float, Range(0, math.inf, above=True)] = math.inf,
    share: Fraction = 0.5,
    few: Annotated[int, Range(1, 1000)] = 4,
    name: str = "",
    costs: ps.Costs | Literal["measured"] | None = None,
    schedule: Annotated[ps.Schedule | None, "advice"] = None,
    network: Annotated[ps.Network, "give such as ps.Network()"] | None = None,
    loss: Annotated[Callable[..., Any], "loss(output)"] | None = None,
    table: Annotated[Mapping[str, int], "{'a': 1}"] | None = None,
    k: Count | Literal["last"] = "last",
    only_typed: Decimal | None = None,
    sizes: list[int] | None = None,
    folder: Annotated[str, "a folder"] = ".",
    files: Annotated[list[Annotated[str, "a file"]], "files, such as ['a.txt']"] | None = None,
    steps: list[Count] | None = None,
    truth: Annotated[bool, "true or false"] = True,
    **options: bool,
) -> dict[str, Any]:
    """Return the arguments."""
    return locals()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": -1}, ArgumentError, "rank must be at least 0, got -1"),
        ({"rank": 2.0}, ArgumentError, "rank must be a whole number, got 2.0 (float); give an int"),
        ({"rank": True}, ArgumentError, "rank must be a whole number, got True (bool)"),
        ({"few": 1001}, ArgumentError, "few must be at most 1000, got 1001"),
        ({"streams": "singel"}, UnknownNameError, "unknown streams 'singel'; did you mean 'sin"),
        ({"streams": None}, UnknownNameError, "unknown streams None; did you mean 'none'"),
        ({"flag": 1}, ArgumentTypeError, "flag must be True or False, got 1 (int)"),
        ({"seconds": -1}, ArgumentError, "seconds must be a finite number (at least 0), got -1"),
        ({"seconds": math.inf}, ArgumentError, "seconds must be a finite number (at least 0), got"),
        ({"seconds": "1"}, ArgumentTypeError, "seconds must be a finite number (at least 0), got"),
        ({"seconds": math.nan}, ArgumentTypeError, "seconds must be a finite number (at least 0)"),
        ({"rate": 0}, ArgumentError, "rate must be a number (above 0), got 0"),
        ({"share": 1.5}, ArgumentError, "share must be at most 1, got 1.5"),
        ({"name": b"x"}, ArgumentTypeError, "name must be a text, got b'x' (bytes)"),
        ({"costs": 3}, ArgumentTypeError, "costs must be 'measured' or a Costs or None, got 3"),
        ({"costs": "measure"}, UnknownNameError, "unknown costs 'measure'; did you mean 'measu"),
        ({"network": 3}, ArgumentTypeError, "must be a pipesim.Network, got 3 (int); give such as"),
        ({"schedule": 3}, ArgumentTypeError, "schedule must be a pipesim.Schedule, got 3 (int)"),
        ({"loss": 3}, ArgumentTypeError, "loss must be a function, called as loss(output), got 3"),
        ({"share": -1}, ArgumentError, "must be a finite number (at least 0, at most 1), got -1"),
        ({"table": [1]}, ArgumentTypeError, "table must be a mapping, such as {'a': 1}, got [1]"),
        ({"folder": ""}, ArgumentTypeError, "folder must be a folder, got '' (str)"),
        ({"files": []}, ArgumentTypeError, "files must be a list of files, such as ['a.txt'], got"),
        ({"files": ["a", ""]}, ArgumentTypeError, "files must be a list of files, such as ['a.txt"),
        ({"steps": [1, 0]}, ArgumentTypeError, "must be a list, each a whole number (at least 1)"),
        ({"truth": 1}, ArgumentTypeError, "truth must be true or false, got 1 (int)"),
        ({"k": 0}, ArgumentError, "k must be at least 1, got 0"),
        ({"k": "lasst"}, UnknownNameError, "unknown k 'lasst'; did you mean 'last'?"),
        ({"k": 1.5}, ArgumentTypeError, "must be 'last' or a whole number (at least 1), got 1.5"),
    ],
)  # fmt: skip
def test_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        door(**options)
    assert type(caught.value) is error


def test_refused_by_position() -> None:
    with pytest.raises(ArgumentError, match="n must be at least 1, got 0"):
        door(0)
    with pytest.raises(ArgumentError, match="rank must be at least 0, got -1"):
        door(1, -1)


def test_accepted() -> None:
    """Values come as the annotated type; annotations without a check, and Python's own errors."""
    values = door(np.int64(2), 3, -1, flag=np.bool_(False), seconds=Exact(1, 2), rate=np.float32(2),
                  costs="measured", loss=len, table={}, k=2, only_typed=7, sizes="x",
                  others=3, rest=4)  # fmt: skip
    got = values["n"], values["flag"], values["seconds"], values["rate"]
    assert [repr(x) for x in got] == ["2", "False", "0.5", "2.0"]
    assert values["others"] == (-1,)
    assert values["options"] == {"others": 3, "rest": 4}
    assert (values["only_typed"], values["sizes"]) == (7, "x")


def test_signature_and_pickle() -> None:
    assert list(inspect.signature(door).parameters)[:3] == ["n", "rank", "others"]
    assert door.__doc__ == "Return the arguments."
    assert pickle.loads(pickle.dumps(door)) is door  # noqa: S301


@checked_as(NetworkError)
@dataclass(frozen=True)
class Base:
    """A record with a base."""

    size: Count = 1


@checked
@dataclass(frozen=True)
class Record(Base):
    """A record, whose combination is checked after its values."""

    latency: Seconds = 0.0
    bandwidth: Positive = 1.0

    def __post_init__(self) -> None:
        if self.latency > self.bandwidth:
            raise ArgumentError("latency above bandwidth")


def test_dataclass() -> None:
    """Fields, those of bases too, are checked when a record is made or changed."""
    record = Record(1, latency=1)
    assert repr(record) == "Record(size=1, latency=1.0, bandwidth=1.0)"
    assert pickle.loads(pickle.dumps(record)) == record  # noqa: S301
    with pytest.raises(ArgumentError, match="size must be at least 1"):
        Record(size=0)
    with pytest.raises(ArgumentError, match=r"must be a finite number \(above 0\), got 0"):
        replace(record, bandwidth=0)
    with pytest.raises(ArgumentError, match="latency above bandwidth"):
        replace(record, latency=2)
    with pytest.raises(NetworkError, match="size must be at least 1, got 0"):
        Base(0)
