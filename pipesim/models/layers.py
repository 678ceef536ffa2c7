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

from pipesim.costs.costs import Costs, PerStage
from pipesim.costs.layer_split import (
    LayerPartition,
    Split,
    check_partition,
    checked_split,
)
from pipesim.costs.partition.balanced_split import balanced_split
from pipesim.errors import ArgumentTypeError, CostsError, check_count, check_text, check_type
from pipesim.models.layer_tables import (
    COLUMNS,
    EXAMPLE,
    NAMES,
    check_header,
    checked_value,
    column_values,
    joint_values,
    read_columns,
)
from pipesim.models.splits.placed_split import Placed, placed_sizes
from pipesim.models.splits.split_problem import LayerModel
from pipesim.network.network import Network
from pipesim.utils.files import check_path
from pipesim.utils.units import Bytes

if TYPE_CHECKING:
    import pandas as pd


#: Columns in which the value of a stage is that of its last layer, not a sum.
_LAST_LAYER = ("output_bytes", "output_seconds")
#: Columns of bytes that a layer holds beyond what it and the layers before it keep.
_WORKSPACES = ("forward_workspace_bytes", "backward_workspace_bytes")


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

    Raises
    ------
    CostsError
        For a missing or unknown column; for columns that are no sequences, have different lengths
        or no values; and for values that are negative, NaN or infinite. Messages name source, layer
        and column. For joint bytes of another shape.

    See Also
    --------
    pipesim.Costs.from_layers : Costs from a file or a DataFrame at once.
    pipesim.plan : Rank the configurations of a training; takes layers as a model.
    pipesim.Transformer : A model by its sizes.

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

    def _repr_html_(self) -> str:
        from pipesim.plot.html_tables import layers_html

        return layers_html(self)

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

        Raises
        ------
        CostsError
            If ``frame`` is no such table; naming layer and column, and the nearest known column.

        Examples
        --------
        >>> import pandas as pd
        >>> import pipesim as ps
        >>> frame = pd.DataFrame({"forward": [1, 4], "backward": [2, 8]})
        >>> ps.Layers.from_frame(frame).seconds
        array([ 3., 12.])
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
        >>> costs = layers.costs("balanced", placement=ps.v_shaped(4))
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

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Layers({"forward": [1, 1, 4], "backward": [2, 2, 8]}).split(2)
        (2, 1)
        """

        def stage_costs(sizes: Sequence[int]) -> Costs:
            """Return the costs of stages of these sizes."""
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
        """Return the costs of stages with these many layers."""
        activations = self.columns.get("activation_bytes", (0.0,) * len(self))
        values: dict[str, Any] = {
            name: tuple(
                _workspace(part, kept) if name in _WORKSPACES else _stage_value(name, stage, part)
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


def _stage_value(name: str, stage: int, part: Sequence[float]) -> float:
    """Return the value of a stage, from those of its layers."""
    return part[-1] if name in _LAST_LAYER else _sum(f"{name} of stage {stage}", part)


def _workspace(part: Sequence[float], kept: Sequence[float]) -> float:
    """Return the most bytes of any layer beyond what all layers of a stage keep."""
    most = later = 0.0
    for nbytes, activations in zip(reversed(part), reversed(kept), strict=True):
        most = max(most, nbytes - later)
        later += activations
    return most


def _sum(what: str, values: Sequence[float]) -> float:
    """Return the exact sum of values; raise `CostsError` if it is too large for a float."""
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
