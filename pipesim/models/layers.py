"""`Layers`: seconds and bytes of each layer of a model, from CSV, and any split into stages.

The layers are in the order of the forward. A stage is a run of neighbours: it takes as long as its
layers together, holds what they hold, and hands on the output of its last layer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import VALUE_FIELDS, Costs, PerStage
from pipesim.costs.layer_split import (
    Partition,
    Split,
    balanced_split,
    check_partition,
    checked_split,
)
from pipesim.errors import (
    ArgumentTypeError,
    CostsError,
    check_count,
    check_text,
    check_type,
    number,
    suggestion,
)
from pipesim.network.network import Network
from pipesim.utils.atomic_write import check_path, read_text
from pipesim.utils.texts import csv_rows, real

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "Layers", "costs_from_layers"]

#: Columns that a profile may have. Of the seconds, `forward` is needed, and `backward` or both
#: `input_grad` and `weight_grad`.
COLUMNS = tuple(name for name in VALUE_FIELDS if name != "launch")
#: Columns of which a stage has what its last layer has.
_OF_LAST = ("output_bytes", "output_seconds")
_EXAMPLE = '{"forward": [1e-3, 1e-3], "backward": [2e-3, 2e-3]}'
#: A column for the reader's eye, which is not read.
_NAMES = "layer"


@dataclass(frozen=True)
class Layers:
    """Seconds and bytes of each layer, for one micro-batch.

    Attributes
    ----------
    columns
        One value a layer for each column that is known: fields of `Costs` that are one number a
        stage, but ``launch``, with their meaning and units there, of a layer instead of a stage.
    source
        Where they come from, for messages; such as the path of a file.

    Raises
    ------
    CostsError
        For a missing or unknown column, columns that are no sequences, of different lengths or
        without layers, and values that are negative, NaN or infinite; naming source, layer and
        column.
    ArgumentTypeError
        For a ``source`` that is no text.

    Examples
    --------
    >>> layers = Layers({"forward": [1, 1, 4], "backward": [2, 2, 8], "output_bytes": [5, 6, 7]})
    >>> layers.costs(2).forward, layers.costs(2).output_bytes
    ((2.0, 4.0), (6.0, 7.0))
    >>> layers.costs([1, 2]).forward
    (1.0, 5.0)
    """

    columns: Mapping[str, Sequence[float]]
    source: str = "layers"

    def __post_init__(self) -> None:
        check_text("source", self.source)
        if not hasattr(self.columns, "items"):
            raise CostsError(
                f"{self.source} must be a mapping of column names to values, got "
                f"{self.columns!r:.60}; give such as {_EXAMPLE}"
            )
        _check_header(self.source, list(self.columns), allowed=COLUMNS)
        checked = {
            name: tuple(
                _checked(f"{self.source}, layer {row}, column {name!r}", name, value)
                for row, value in enumerate(_listed(self.source, name, values))
            )
            for name, values in self.columns.items()
        }
        lengths = {name: len(values) for name, values in checked.items()}
        if len(set(lengths.values())) > 1:
            raise CostsError(f"{self.source}: columns differ in length ({lengths}); give one value "
                             "a layer")  # fmt: skip
        if not checked["forward"]:
            raise CostsError(f"{self.source} has no layers; give a row for each")
        object.__setattr__(self, "columns", checked)

    def __len__(self) -> int:
        return len(self.columns["forward"])

    @classmethod
    def read(cls, path: Path | str) -> Layers:
        """Read a CSV file: a line of column names, then a line a layer, first layer first.

        A column ``layer`` may hold names, which are not read. Empty lines are passed over.

        Raises
        ------
        ArgumentError
            For something that is no path.
        CostsError
            If the file cannot be read, or is no such table; naming file, line and column, and
            the nearest known column.
        CapacityError
            For a file that is too large for memory.
        """
        path = check_path("path", path)
        text = read_text(path, "layers from", CostsError)
        try:
            lines = [(line, row) for line, row in csv_rows(text) if any(map(str.strip, row))]
        except ValueError as error:
            raise CostsError(f"cannot read layers from {path}: {error}") from error
        if not lines:
            raise CostsError(f"{path} is empty; its first line must name columns, of {COLUMNS}")
        header = [name.strip() for name in lines[0][1]]
        _check_header(f"{path}, line {lines[0][0]}", header)
        columns: dict[str, list[float]] = {name: [] for name in header if name != _NAMES}
        for line, row in lines[1:]:
            if len(row) != len(header):
                raise CostsError(
                    f"{path}, line {line}: {len(row)} values for {len(header)} columns; give one "
                    "value a column"
                )
            for name, text in zip(header, row, strict=True):
                if name != _NAMES:
                    where = f"{path}, line {line}, column {name!r}"
                    columns[name].append(_checked(where, name, text))
        return cls(columns, str(path))

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> Layers:
        """Take a `pandas.DataFrame` of one row a layer, with the columns of the CSV file.

        Raises
        ------
        ArgumentTypeError
            For anything but a DataFrame.
        CostsError
            If it is no such table; naming layer and column, and the nearest known column.
        """
        import pandas as pd

        check_type("frame", frame, pd.DataFrame)
        names = [str(name) for name in frame.columns]
        _check_header("frame", names)
        values = {name: frame.iloc[:, i].tolist() for i, name in enumerate(names)}
        values.pop(_NAMES, None)
        return cls(values, "frame")

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of forward and backward of each layer; shape ``(len(layers),)``."""
        backward = self.columns.get("backward")
        if backward is None:
            halves = self.columns["input_grad"], self.columns["weight_grad"]
            backward = tuple(i + w for i, w in zip(*halves, strict=True))
        with np.errstate(over="ignore"):  # `balanced_split` refuses what is endless
            both: NDArray[np.float64] = np.array(self.columns["forward"]) + np.array(backward)
        return both

    def costs(
        self,
        split: Split,
        *,
        partition: Partition | None = None,
        launch: PerStage = 0.0,
        network: Network | None = None,
    ) -> Costs:
        """Return the costs of stages made of these layers.

        Parameters
        ----------
        split
            Layers of each stage, in order, or the number of stages.
        partition
            How a number of stages is made of the layers: ``"balanced"`` (the default), so that the
            slowest takes as little time as it can (`pipesim.balanced_split` of `seconds`), or
            ``"even"``, with as many layers each.
        launch, network
            As in `Costs`.

        Returns
        -------
        Costs
            Seconds and bytes summed over each stage's layers; ``output_bytes`` and
            ``output_seconds`` are those of its last layer.

        Raises
        ------
        ArgumentError
            For a split that does not sum to the number of layers, has an empty stage, or has more
            stages than there are layers.
        CostsError
            If the values of a stage are too large to be added.
        """
        if check_partition(partition, split, "split") and partition != "even":
            split = balanced_split(self.seconds.tolist(), check_count("split", split))
        sizes = checked_split(split, len(self), "split")
        values: dict[str, Any] = {
            name: tuple(
                part[-1] if name in _OF_LAST else _sum(f"{name} of stage {stage}", part)
                for stage, part in enumerate(_parts(column, sizes))
            )
            for name, column in self.columns.items()
        }
        return Costs(**values, launch=launch, network=Network() if network is None else network)


def costs_from_layers(
    layers: Layers | pd.DataFrame | Path | str,
    split: Split,
    *,
    partition: Partition | None = None,
    launch: PerStage = 0.0,
    network: Network | None = None,
) -> Costs:
    """Return `Layers.costs` of the layers of a path, a frame or `Layers`."""
    import pandas as pd

    if isinstance(layers, str | os.PathLike):
        layers = Layers.read(check_path("layers", layers))
    elif not isinstance(layers, Layers):
        if not isinstance(layers, pd.DataFrame):
            raise ArgumentTypeError(
                "layers must be the path of a CSV file, a DataFrame or Layers, got "
                f"{layers!r:.60} ({type(layers).__name__})"
            )
        layers = Layers.from_frame(layers)
    return layers.costs(split, partition=partition, launch=launch, network=network)


def _sum(what: str, values: Sequence[float]) -> float:
    """Return an exact sum, if a float can hold it."""
    try:
        return math.fsum(values)
    except OverflowError:
        raise CostsError(
            f"{what}: the sum of {len(values)} layers, up to {max(values):g} each, is too large a "
            "number; check the table's units"
        ) from None


def _parts(column: Sequence[float], sizes: Sequence[int]) -> Iterator[Sequence[float]]:
    """Yield each stage's share of a column."""
    first = 0
    for size in sizes:
        yield column[first : first + size]
        first += size


def _check_header(
    where: str, names: list[str], allowed: Sequence[str] = (_NAMES, *COLUMNS)
) -> None:
    """Raise for columns that are unknown, named twice or missing."""
    for name in names:
        if name not in allowed:
            raise CostsError(
                f"{where}: unknown column {name!r}{suggestion(name, COLUMNS)} "
                f"(known: {', '.join((_NAMES, *COLUMNS))})"
            )
        if names.count(name) > 1:
            raise CostsError(f"{where}: column {name!r} occurs twice; give it once")
    if "forward" not in names:
        raise CostsError(f"{where}: column 'forward' is missing; give the seconds of F")
    halves = {"input_grad", "weight_grad"} - set(names)
    if len(halves) == 1 or (halves and "backward" not in names):
        missing = "backward" if len(halves) == 2 else min(halves)
        raise CostsError(
            f"{where}: column {missing!r} is missing; give the seconds of B in 'backward', or "
            "those of I and W in 'input_grad' and 'weight_grad'"
        )


def _listed(where: str, name: str, values: object) -> tuple[object, ...]:
    """Return the values of a column, if they are a sequence."""
    try:
        if isinstance(values, (str, bytes, Mapping)):
            raise TypeError  # their parts are letters, numbers and keys
        return tuple(values)  # type: ignore[arg-type]  # raises for what has no values
    except TypeError:
        raise CostsError(
            f"{where}, column {name!r} must be a sequence of one value a layer, got "
            f"{values!r:.60}; give a list, such as {_EXAMPLE}"
        ) from None


def _checked(where: str, name: str, value: object) -> float:
    """Return a value as a float."""
    got = number(real(value) if isinstance(value, str) else value)
    if got is None or not 0 <= got < math.inf:
        unit = "bytes" if name.endswith("bytes") else "seconds"
        raise CostsError(f"{where}: must be finite {unit} >= 0, got {value!r}")
    return got
