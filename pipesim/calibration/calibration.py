"""`Calibration`: constants that were fitted to measured steps, and how well they predict these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.calibration.calibration_warnings import steps_text
from pipesim.calibration.constants import Constants
from pipesim.calibration.measured_steps import measured_steps
from pipesim.calibration.step_predictions import predicted_seconds, step_predictions
from pipesim.models.gpu import GPU
from pipesim.network.network import Network
from pipesim.utils.files import check_path, write_text
from pipesim.utils.texts import CHECKSUM, checksum

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Calibration:
    """Constants fitted to measured steps; `pipesim.GPU.fit` makes it.

    Attributes
    ----------
    gpu
        GPU with the fitted constants. The others are those that it started from.
    network_efficiency
        Share of the network's bandwidths that messages reach, for the name of a machine of its
        nominal ones; if it was not fitted, that of the file of the GPU to start from, or that of
        `Network.preset`, and 1 for a network.
    network_latency
        Factor of the network's latencies; likewise.
    constants
        One row a constant: ``value``, ``start``, ``standard_error`` (of the logarithm, so 0.1 is
        about 10 %), ``determined`` and ``note``. A constant that the rows do not determine has the
        value that the GPU had before, and a note that says why. Other notes name the bound that a
        value is at, such as ``flops`` at ``peak_flops``, or say that the rows determine it weakly:
        its standard error is above 0.35, a factor of 2 in either direction at 95 %.
    rows
        The measured steps, one row each: their settings, the number of their ``configuration``,
        ``measured`` and ``predicted`` (s), ``error`` (predicted over measured, minus 1),
        ``predicted_left_out`` and ``error_left_out``: the same by constants that are fitted
        without the rows of this configuration.
    """

    gpu: GPU
    network_efficiency: float
    network_latency: float
    constants: pd.DataFrame
    rows: pd.DataFrame
    _start: Constants

    @property
    def errors(self) -> pd.DataFrame:
        """Sizes of the errors: ``mean``, ``median`` and ``worst``, of rows fitted and left out.

        Rows of one configuration count as one in the mean and in the median.
        """
        from pipesim.utils.packages import pandas as pd

        rows = self.rows[["error", "error_left_out"]].abs()
        sizes = rows.groupby(self.rows["configuration"]).mean()
        table = pd.DataFrame({"mean": sizes.mean(), "median": sizes.median(), "worst": rows.max()})
        return table.set_axis(["fitted", "left out"])

    def network(self, gpus_per_device: int = 1) -> Network | None:
        """Return the network with fitted bandwidths and latencies; None if there was none.

        Parameters
        ----------
        gpus_per_device
            GPUs that act as one device, such as a tensor-parallel group. A network that was given
            with groups of GPUs keeps them.

        Raises
        ------
        NetworkError
            For a number of GPUs that does not suit the machine.
        """
        return self._start.fitted_network(
            self.network_efficiency, self.network_latency, gpus_per_device
        )

    def predict(
        self, rows: pd.DataFrame | Sequence[Mapping[str, Any]] | Path | str
    ) -> NDArray[np.float64]:
        """Return the seconds of other steps with the fitted constants.

        Parameters
        ----------
        rows
            Steps as for `pipesim.GPU.fit`; the column ``seconds`` may be missing.

        Returns
        -------
        numpy.ndarray
            Seconds, shape ``(n_rows,)``.

        Raises
        ------
        PipeError
            For rows that are no table of steps, and settings that are wrong, naming the row.
        """
        steps = step_predictions(measured_steps(rows, need_seconds=False))
        return np.array(predicted_seconds(steps, self.gpu, self.network))

    def plot(self, *, ax: Axes | None = None, left_out: bool = True) -> Axes:
        """Draw measured over predicted seconds; see `pipesim.plot.accuracy`.

        The title names the GPU, and whether each step was left out of the fit that predicts it.
        """
        from pipesim.plot.accuracy_plot import accuracy

        column = "predicted_left_out" if left_out else "predicted"
        title = f"{self.gpu.name or 'GPU'}, {'left-out' if left_out else 'fitted'} steps"
        measured, predicted = self.rows["measured"].tolist(), self.rows[column].tolist()
        return accuracy(measured, predicted, ax=ax, title=title)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: ``gpu``, factors of the network, ``constants``, ``errors``.

        ``GPU(**values["gpu"])`` is the fitted GPU. Arguments ``gpu`` take these values whole, too.
        """
        return {
            "gpu": asdict(self.gpu),
            "network_efficiency": self.network_efficiency,
            "network_latency": self.network_latency,
            "constants": self.constants.replace({np.nan: None}).to_dict("index"),
            "errors": self.errors.to_dict("index"),
        }

    def save(self, path: Path | str) -> None:
        """Write `to_dict` as JSON, whole or not at all, with a checksum of the values."""
        path, values = check_path("path", path, "write"), self.to_dict()
        write_text(path, json.dumps({CHECKSUM: checksum(values), **values}, indent=2) + "\n")

    def __repr__(self) -> str:
        mean = float(self.errors["mean"].iloc[1])
        count = self.rows["configuration"].nunique()
        rows = steps_text("rows", len(self.rows), count)
        return (
            f"<Calibration of {self.gpu.name or 'a GPU'}: {len(self.constants)} constants, "
            f"{rows}, mean error of left-out rows {mean:.1%}>"
        )
