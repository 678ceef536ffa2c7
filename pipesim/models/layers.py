"""`Layers`: seconds and bytes of each layer of a model, and costs of any split into stages.

Layers are in the order of the forward. A stage has consecutive layers: its seconds and bytes are
the sums of theirs, and its output is that of its last layer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import (
    LayerPartition,
    Split,
    balanced_split,
    check_partition,
    checked_split,
)
from pipesim.costs.rows import STAGE_ROWS, PerStage
from pipesim.errors import (
    ArgumentTypeError,
    CostsError,
    check_count,
    check_text,
    check_type,
    number,
    suggestion,
)
from pipesim.models.placed_split import LayerModel, Placed, placed_sizes
from pipesim.network.network import Network
from pipesim.utils.checks import checked_names
from pipesim.utils.files import check_path, read_text
from pipesim.utils.texts import Bytes, csv_rows, parse_bytes, parse_float

if TYPE_CHECKING:
    import pandas as pd


#: Columns of bytes that a layer holds beyond what it and the layers before it keep.
_WORKSPACES = ("forward_workspace_bytes", "backward_workspace_bytes")


@checked_names
@dataclass(frozen=True)
class Layers:
    """Seconds and bytes of each layer, for one micro-batch.

    Attributes
    ----------
    columns
        One value a layer for each column. Columns are the fields of `Costs` with one number a
        stage, without ``launch``. Meaning and units are the same, for a layer instead of a stage.
    source
        Source of the columns for messages, such as the path of a file.
    joint_activation_bytes
        Activation bytes of each possible stage, shape ``(len(layers), len(layers))``: row ``a``,
        column ``b`` for a stage of layers ``a`` to ``b``. Tensors that several of its layers keep
        count once. Values with ``a > b`` have no meaning. None (the default): sums of
        ``activation_bytes`` of the layers.

    Examples
    --------
    >>> import pipesim as ps
    >>> layers = ps.Layers({"forward": [1, 1, 4], "backward": [2, 2, 8]})
    >>> layers.costs(2).forward
    (2.0, 4.0)
    >>> layers.costs([1, 2]).forward
    (1.0, 5.0)
    """

    columns: Mapping[str, Sequence[float]]
    source: str = "layers"
    joint_activation_bytes: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        check_text("source", self.source)
        if not hasattr(self.columns, "items"):
            raise CostsError(
                f"{self.source} must be a mapping of column names to values, got "
                f"{self.columns!r:.60}; give such as {EXAMPLE}"
            )
        check_header(self.source, list(self.columns), allowed=COLUMNS)
        checked = {
            name: tuple(
                checked_value(f"{self.source}, layer {row}, column {name!r}", name, value)
                for row, value in enumerate(column_values(self.source, name, values))
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
        if self.joint_activation_bytes is not None:
            joint = joint_values(self.source, self.joint_activation_bytes, len(self))
            object.__setattr__(self, "joint_activation_bytes", joint)

    def __len__(self) -> int:
        return len(self.columns["forward"])

    @classmethod
    def read(cls, path: Path | str) -> Layers:
        r"""Read a CSV file: a line of column names, then a line a layer, first layer first.

        A column ``layer`` may have names, which are ignored. So are empty lines.

        Parameters
        ----------
        path
            The file to read.

        Returns
        -------
        Layers
            Layers in the order of the file.

        Raises
        ------
        CostsError
            If the file cannot be read, or is no such table; naming file, line and column, and
            the nearest known column.
        CapacityError
            For a file that is too large for memory.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> import pipesim as ps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "layers.csv")
        ...     _ = path.write_text("layer,forward,backward\nembedding,1,2\nhead,4,8\n")
        ...     ps.Layers.read(path).columns["forward"]
        (1.0, 4.0)
        """
        path = check_path("path", path)
        return cls(read_columns(path), str(path))

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> Layers:
        """Return the layers of a `pandas.DataFrame` with one row a layer and the columns of `read`.

        Parameters
        ----------
        frame
            One row a layer, first layer first.

        Returns
        -------
        Layers
            Layers in the order of the rows.
        """
        from pipesim.utils.packages import pandas as pd

        check_type("frame", frame, pd.DataFrame)
        names = [str(name) for name in frame.columns]
        check_header("frame", names)
        values = {name: frame.iloc[:, i].tolist() for i, name in enumerate(names)}
        values.pop(NAMES, None)
        return cls(values, "frame")

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of forward plus backward of each layer; shape ``(len(layers),)``."""
        backward = self.columns.get("backward")
        if backward is None:
            halves = self.columns["input_grad"], self.columns["weight_grad"]
            backward = tuple(i + w for i, w in zip(*halves, strict=True))
        with np.errstate(over="ignore"):  # `balanced_split` refuses infinite seconds
            both: NDArray[np.float64] = np.array(self.columns["forward"]) + np.array(backward)
        return both

    def costs(
        self,
        split: Split,
        *,
        partition: LayerPartition | None = None,
        placement: Placed | None = None,
        memory_limit: Bytes | Sequence[Bytes] | None = None,
        launch: PerStage = 0.0,
        network: Network | None = None,
    ) -> Costs:
        """Return the costs of stages made of these layers.

        Parameters
        ----------
        split
            - Layers of each stage, in order, or a layout string of Megatron.
            - The number of stages.
            - With ``placement``: ``"even"`` or ``"balanced"``, for as many stages as it has.
        partition
            How layers are divided among a number of stages. ``"even"``: each stage has as many
            layers. ``"balanced"`` (the default): without ``placement``, the slowest stage takes as
            little time as possible (`pipesim.balanced_split` of `seconds`).
        placement
            What ``"balanced"`` balances.

            - A `pipesim.Placement`: the busiest device, which may have several stages, has as few
              seconds of F and B as possible. Among such splits, stages are as even as possible.
            - A `Schedule`, or a graph that it was lowered to: the simulated step takes as little
              time as possible, so that recompute and messages that block count too. The search
              starts from the split for the placement, and simulates up to 1,000 splits; fewer if
              the graph is large. A schedule is a step of one replica; the graph of
              ``lower(schedule, n_replicas=..., shard_optimizer=...)`` tells replicas.
        memory_limit
            Most bytes of a device, one number or one a device, as in `pipesim.simulate`. Balanced
            splits for a schedule or a graph keep to it.
        launch, network
            As in `Costs`.

        Returns
        -------
        Costs
            Seconds and bytes summed over each stage's layers; ``output_bytes`` and
            ``output_seconds`` are those of its last layer. Its workspace is that of the layer with
            the most bytes beyond the activations of the stage: while a layer runs, those after it
            hold none.

        Raises
        ------
        CostsError
            If the values of a stage are too large to be added, or no split is found that fits in
            memory.

        Examples
        --------
        >>> import pipesim as ps
        >>> layers = ps.Layers({"forward": [1] * 16 + [4], "backward": [2] * 16 + [8]})
        >>> costs = layers.costs("balanced", placement=ps.Placement.v_shaped(4))
        >>> costs.forward
        (1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0)
        """
        sizes = self.split(split, partition=partition, placement=placement,
                           memory_limit=memory_limit, network=network)  # fmt: skip
        costs = self._stage_costs(sizes, launch, network)
        costs.per_stage("launch", len(sizes))  # refuses values of another number of stages
        return costs

    def split(
        self,
        split: Split,
        *,
        partition: LayerPartition | None = None,
        placement: Placed | None = None,
        memory_limit: Bytes | Sequence[Bytes] | None = None,
        network: Network | None = None,
    ) -> tuple[int, ...]:
        """Return the layers of each stage.

        Parameters
        ----------
        split, partition, placement, memory_limit
            As for `costs`.
        network
            As for `costs`; its messages count if ``placement`` is a schedule or a graph.

        Returns
        -------
        tuple
            Numbers of layers, one a stage.

        Raises
        ------
        CostsError
            If no split is found that fits in memory, or the values of a stage are too large to be
            added.
        """

        def stage_costs(sizes: Sequence[int]) -> Costs:
            return self._stage_costs(sizes, 0.0, network)

        if network is not None:
            check_type("network", network, Network)
        model = LayerModel(len(self), stage_costs, has_ends=False)
        placed = placed_sizes(model, split, "split", partition=partition, placement=placement,
                              memory_limit=memory_limit)  # fmt: skip
        if placed is not None:
            return placed
        if check_partition(partition, split, "split") and partition != "even":
            split = balanced_split(self.seconds, check_count("split", split))
        return checked_split(split, len(self), "split")

    def _stage_costs(
        self, sizes: Sequence[int], launch: PerStage, network: Network | None
    ) -> Costs:
        activations = self.columns.get("activation_bytes", (0.0,) * len(self))
        values: dict[str, Any] = {
            name: tuple(
                _workspace(part, kept)
                if name in _WORKSPACES
                else part[-1]  # of the last layer
                if name in ("output_bytes", "output_seconds")
                else _sum(f"{name} of stage {stage}", part)
                for stage, (part, kept) in enumerate(
                    zip(_parts(column, sizes), _parts(activations, sizes), strict=True)
                )
            )
            for name, column in self.columns.items()
        }
        if self.joint_activation_bytes is not None:
            ends = list(accumulate(sizes))
            values["activation_bytes"] = tuple(
                self.joint_activation_bytes[end - size][end - 1]
                for size, end in zip(sizes, ends, strict=True)
            )
        return Costs(**values, launch=launch, network=Network() if network is None else network)


def as_layers(layers: Layers | pd.DataFrame | Path | str) -> Layers:
    """Return layers from any form that `Costs.from_layers` takes."""
    if isinstance(layers, Layers):
        return layers
    if isinstance(layers, str | os.PathLike):
        return Layers.read(check_path("layers", layers))
    from pipesim.utils.packages import pandas as pd

    if isinstance(layers, pd.DataFrame):
        return Layers.from_frame(layers)
    raise ArgumentTypeError(
        "layers must be the path of a CSV file, a DataFrame or Layers, got "
        f"{layers!r:.60} ({type(layers).__name__})"
    )


def _workspace(part: Sequence[float], kept: Sequence[float]) -> float:
    """Return the most bytes of any layer beyond what all layers of a stage keep."""
    most = later = 0.0
    for nbytes, activations in zip(reversed(part), reversed(kept), strict=True):
        most = max(most, nbytes - later)
        later += activations
    return most


def _sum(what: str, values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        raise CostsError(
            f"{what}: the sum of {len(values)} layers, up to {max(values):g} each, is too large a "
            "number; check the table's units"
        ) from None


def _parts(column: Sequence[float], sizes: Sequence[int]) -> Iterator[Sequence[float]]:
    """Yield the values of a column for the layers of each stage."""
    first = 0
    for size in sizes:
        yield column[first : first + size]
        first += size


#: Columns that a profile may have. Of the seconds, `forward` is needed, and `backward` or both
#: `input_grad` and `weight_grad`.
COLUMNS = tuple(k for k, row in STAGE_ROWS.items() if not row.is_rare and k != "launch")
#: A column of names for readers, which is ignored.
NAMES = "layer"
#: Columns to suggest in messages.
EXAMPLE = '{"forward": [1e-3, 1e-3], "backward": [2e-3, 2e-3]}'


def read_columns(path: Path) -> dict[str, list[float]]:
    """Return the columns of a CSV file; see `pipesim.Layers.read` for its form and errors."""
    text = read_text(path, "layers from", CostsError)
    try:
        lines = [(line, row) for line, row in csv_rows(text) if any(map(str.strip, row))]
    except ValueError as error:
        raise CostsError(f"cannot read layers from {path}: {error}") from error
    if not lines:
        raise CostsError(f"{path} is empty; its first line must name columns, of {COLUMNS}")
    header = [name.strip() for name in lines[0][1]]
    check_header(f"{path}, line {lines[0][0]}", header)
    columns: dict[str, list[float]] = {name: [] for name in header if name != NAMES}
    for line, row in lines[1:]:
        if len(row) != len(header):
            raise CostsError(
                f"{path}, line {line}: {len(row)} values for {len(header)} columns; give one "
                "value a column"
            )
        for name, text in zip(header, row, strict=True):
            if name != NAMES:
                where = f"{path}, line {line}, column {name!r}"
                columns[name].append(checked_value(where, name, text))
    return columns


def check_header(where: str, names: list[str], allowed: Sequence[str] = (NAMES, *COLUMNS)) -> None:
    """Raise `CostsError` for columns that are unknown, named twice or missing."""
    for name in names:
        if name not in allowed:
            raise CostsError(
                f"{where}: unknown column {name!r}{suggestion(name, COLUMNS)} "
                f"(known: {', '.join((NAMES, *COLUMNS))})"
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


def column_values(where: str, name: str, values: object) -> tuple[object, ...]:
    """Return the values of a column as a tuple."""
    try:
        if isinstance(values, (str, bytes, Mapping)):
            raise TypeError  # their elements are letters, numbers and keys
        return tuple(values)  # type: ignore[arg-type]  # raises if it has no elements
    except TypeError:
        raise CostsError(
            f"{where}, column {name!r} must be a sequence of one value a layer, got "
            f"{values!r:.60}; give a list, such as {EXAMPLE}"
        ) from None


def checked_value(where: str, name: str, value: object) -> float:
    """Return a value, or the number in a text, as a float."""
    unit, parse = ("bytes", parse_bytes) if name.endswith("bytes") else ("seconds", parse_float)
    result = number(parse(value) if isinstance(value, str) else value)
    if result is None or not 0 <= result < math.inf:
        raise CostsError(f"{where}: must be finite {unit} >= 0, got {value!r}")
    return result


def joint_values(where: str, rows: object, n: int) -> tuple[tuple[float, ...], ...]:
    """Return the bytes of stages by first and last layer."""
    name = "joint_activation_bytes"
    checked = tuple(
        tuple(
            checked_value(f"{where}, {name}, layers {a} to {b}", name, value)
            for b, value in enumerate(column_values(where, name, row))
        )
        for a, row in enumerate(column_values(where, name, rows))
    )
    shape = [len(checked), *{len(row) for row in checked}]
    if shape != [n, n]:
        raise CostsError(
            f"{where}: {name} must be {n} rows of {n} values, for {n} layers, got {len(checked)} "
            f"rows of {', '.join(map(str, shape[1:]))} values"
        )
    return checked


def costs_from_layers(
    layers: Layers | pd.DataFrame | Path | str,
    split: Split,
    *,
    partition: LayerPartition | None = None,
    placement: Placed | None = None,
    memory_limit: Bytes | Sequence[Bytes] | None = None,
    launch: PerStage = 0.0,
    network: Network | None = None,
) -> Costs:
    """Return the costs of stages made of profiled layers, from CSV or a DataFrame.

    Parameters
    ----------
    layers
        One row a layer; `pipesim.Layers` lists the columns.
    split
        Layers of each stage; a number of stages, which are balanced by default; or, with
        ``placement``, ``"even"`` or ``"balanced"``.
    partition
        As for `Layers.costs`, whose default is ``"balanced"``. That of `Transformer.costs` is
        ``"even"`` without ``placement``.
    placement, memory_limit
        As for `Layers.costs`: what is balanced, and the most bytes of a device.
    launch, network
        As in `Costs`.

    Returns
    -------
    Costs
        One value a stage: seconds and bytes summed over its layers; see `Layers.costs`.

    Raises
    ------
    CostsError
        For a table that cannot be read, naming file, line and column.
    """
    return as_layers(layers).costs(
        split,
        partition=partition,
        placement=placement,
        memory_limit=memory_limit,
        launch=launch,
        network=network,
    )
