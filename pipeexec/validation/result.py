"""`Validation`: predictions beside measured steps, as tables, a figure and a run directory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeexec.profiling.profile import Profile
from pipeexec.validation.result_row import Row
from pipeexec.validation.run_files import read_run, write_run
from pipeexec.validation.summary import validation_html, validation_text
from pipesim.analysis.error_attribution import PARTS
from pipesim.costs.costs import Costs

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


#: Columns of `Validation.table` for `Row.error_interval`.
_INTERVAL_COLUMNS = ("error_mean", "error_low", "error_high")


@dataclass(frozen=True, eq=False, repr=False)
class Validation:
    """Predictions of graphs and their measured steps.

    Attributes
    ----------
    rows
        One row a graph, by name.
    costs, profile
        Costs and profile of the predictions, of the last repeat. ``profile`` is None if costs were
        given, and for run directories of older versions.
    clocks
        Offset of each process's clock from rank 0's; see
        `pipeexec.distributed.process_clock.Alignment`.
    notes
        Notes on the measured times, such as that links are imposed.
    record
        Entries of the ``run.json`` that `load_run` read: ``command``, ``date`` in UTC,
        ``versions``, ``hardware`` and the user's ``record`` of `save`. Empty for others.

    See Also
    --------
    pipeexec.validate : Make a validation.
    pipeexec.load_run : Read a validation that was saved.
    pipeexec.Profile : Tables of the calibration.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graphs = {"1f1b": ps.lower(ps.schedule("1f1b", 2, 4))}
    >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
    >>> batches, costs = [(x, x)] * 2, ps.Costs(forward=1e-3, backward=2e-3, output_bytes=32)
    >>> validation = px.validate(
    ...     stages, graphs, ["cpu"] * 2, mse_loss, batches, n_steps=1, costs=costs
    ... )
    >>> list(validation.rows), validation.table.columns[:3].tolist()
    (['1f1b'], ['predicted', 'measured', 'error'])
    """

    rows: dict[str, Row]
    costs: Costs
    profile: Profile | None = None
    clocks: tuple[dict[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return validation_text(self)

    def _repr_html_(self) -> str:
        return validation_html(self)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a graph.

        - ``predicted``, ``measured``: makespan (s); mean over repeats, median over steps.
        - ``error``, ``worst``, ``replay``: signed relative errors; median over steps, largest of
          a step, and median of the replayed steps.
        - ``error_mean``, ``error_low``, ``error_high``: mean of these errors and the ends of its
          95 % interval; see `Row.error_interval`.
        - ``bubble_predicted``, ``bubble_measured``: bubble fraction, 0 to 1.
        - ``memory_predicted``, ``memory_measured``: peak bytes of the fullest device.
        """
        from pipesim.utils.packages import pandas as pd

        rows = {
            name: {
                "predicted": row.prediction,
                "measured": row.measurement,
                "error": row.error,
                "worst": row.worst_error,
                "replay": float(np.median(row.replay_errors)),
                **dict(zip(_INTERVAL_COLUMNS, row.error_interval, strict=True)),
                "bubble_predicted": row.predicted.bubble_fraction,
                "bubble_measured": row.measured.bubble_fraction,
                "memory_predicted": float(row.predicted.peak_memory.max()),
                "memory_measured": float(max(row.peak_memory)),
            }
            for name, row in self.rows.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("graph")

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Differences of every pair of rows, and whether the prediction names the faster one.

        - ``predicted``, ``measured``: difference of the makespans (s).
        - ``noise``: median absolute deviation of the measured difference over the rounds (s).
        - ``beyond_noise``: whether the measured difference is larger than the noise.
        - ``right``: whether both differences have the same sign.
        """
        from pipesim.utils.packages import pandas as pd

        rows = []
        for (a, first), (b, second) in itertools.combinations(self.rows.items(), 2):
            difference = np.array(first.makespans) - np.array(second.makespans)
            measured = float(np.median(difference))
            noise = float(np.median(np.abs(difference - measured)))
            predicted = first.prediction - second.prediction
            rows.append(
                {
                    "pair": f"{a} - {b}",
                    "predicted": predicted,
                    "measured": measured,
                    "noise": noise,
                    "beyond_noise": abs(measured) > noise,
                    "right": bool(np.sign(predicted) == np.sign(measured)),
                }
            )
        columns = ["pair", "predicted", "measured", "noise", "beyond_noise", "right"]
        return pd.DataFrame(rows, columns=columns).set_index("pair")

    @cached_property
    def parts(self) -> pd.DataFrame:
        """Parts of the error of each row, means over its steps (s).

        Indexed by ``graph``: ``measured`` makespan, ``error`` (predicted minus measured), and the
        parts of the error that `pipesim.analysis.error_attribution` explains. Rows of older run
        directories are left out.
        """
        from pipesim.utils.packages import pandas as pd

        rows = {name: row.parts[["measured", *PARTS]].mean()
                for name, row in self.rows.items() if row.parts is not None}  # fmt: skip
        table = pd.DataFrame.from_dict(rows, orient="index", columns=["measured", *PARTS])
        table.insert(1, "error", table[list(PARTS)].sum(axis=1))
        return table.rename_axis("graph")

    @cached_property
    def ops(self) -> pd.DataFrame:
        """Errors of each operation in each stage of each row; see `accuracy.op_errors`.

        Indexed by ``graph``, ``op`` and ``stage``. Rows of older run directories are left out.
        """
        from pipesim.utils.packages import pandas as pd

        tables = {name: row.ops for name, row in self.rows.items() if row.ops is not None}
        return pd.concat(tables, names=["graph"]) if tables else pd.DataFrame()

    def figure(self, **options: Any) -> Figure:
        """Draw the prediction of every row over its median step.

        Parameters
        ----------
        **options
            Those of `pipesim.plot.overlay`, such as ``width`` (inches) and ``transfers``.

        Returns
        -------
        matplotlib.figure.Figure
            One axes a row, under each other, on one time axis.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graphs = {"1f1b": ps.lower(ps.schedule("1f1b", 2, 4))}
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> batches, costs = [(x, x)] * 2, ps.Costs(forward=1e-3, backward=2e-3, output_bytes=32)
        >>> validation = px.validate(
        ...     stages, graphs, ["cpu"] * 2, mse_loss, batches, n_steps=1, costs=costs
        ... )
        >>> len(validation.figure().axes)
        1
        """
        from pipesim.plot.comparisons import overlay

        return overlay({name: row.comparison for name, row in self.rows.items()}, **options)

    def save(
        self,
        path: Path | str,
        *,
        record: Mapping[str, Any] | None = None,
        figures: bool = True,
    ) -> None:
        """Write a run directory, whole or not at all.

        - ``run.json``, ``costs.json``, ``table.csv``, ``overlay.png`` and ``overlay.pdf``;
        - with a profile, the files of `Profile.save`;
        - for each row, a folder with ``timeline.csv`` (the median step), ``predicted.csv``,
          ``parts.csv`` (parts of each step's error) and ``ops.csv``.

        Parameters
        ----------
        path
            Folder to write.
        record
            Further entries of ``run.json``.
        figures
            Whether to draw the figures, which takes seconds. The validation of `load_run` can draw
            them later.

        Raises
        ------
        RunDirectoryError
            If the folder cannot be written, ``path`` is something else, or another process is
            writing it.

        Examples
        --------
        >>> import tempfile, torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graphs = {"1f1b": ps.lower(ps.schedule("1f1b", 1, 4))}
        >>> stages, x = [torch.nn.Linear(4, 4)], torch.ones(8, 4)
        >>> validation = px.validate(stages, graphs, ["cpu"], mse_loss, [(x, x)] * 2, n_steps=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     validation.save(f"{folder}/run", figures=False)
        ...     px.load_run(f"{folder}/run").table.index.tolist()
        ['1f1b']
        """
        write_run(self, path, record, figures=figures)


def load_run(path: Path | str) -> Validation:
    """Read a run directory; the result prints its command, hardware, makespans and errors.

    Parameters
    ----------
    path
        Run directory that `pipeexec.Validation.save` or the command ``pipeexec validate`` has
        written.

    Returns
    -------
    Validation
        The validation, with the record of its run.

    Raises
    ------
    RunDirectoryError
        If a file is missing, truncated or edited.

    See Also
    --------
    pipeexec.Validation.save : Write such a directory.
    pipeexec.Profile.load : Read its profile alone.

    Examples
    --------
    >>> import tempfile, torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graphs = {"1f1b": ps.lower(ps.schedule("1f1b", 1, 4))}
    >>> stages, x = [torch.nn.Linear(4, 4)], torch.ones(8, 4)
    >>> validation = px.validate(stages, graphs, ["cpu"], mse_loss, [(x, x)] * 2, n_steps=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     validation.save(f"{folder}/run", record={"seed": 0}, figures=False)
    ...     px.load_run(f"{folder}/run").record["seed"]
    0
    """
    return Validation(**read_run(path))
