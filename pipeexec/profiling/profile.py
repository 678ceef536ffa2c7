"""`Profile`: measured costs of a pipeline and their tables, kept in a run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeexec.profiling.files import (
    host_shares,
    load_profile,
    plot_transfers,
    read_shares,
    save_profile,
)
from pipeexec.run_directory import (
    checked_record,
    command,
    listed_file,
    read_record,
    write_directory,
)
from pipesim.costs.costs import Costs
from pipesim.utils.files import check_path

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured costs of a pipeline, and the tables that they were computed from.

    Attributes
    ----------
    costs
        Costs for the simulator.
    table
        One row per operation and stage, durations in seconds: ``loaded`` (mean over the tasks of
        all steps), ``spread`` (standard deviation of the steps' means over ``loaded``),
        ``isolated`` (mean with all other devices idle), ``slow_down`` (loaded over isolated).
        ``isolated`` is NaN for I and W, which two stages may run at the same time.
    transfers
        Seconds of messages, one row per pair of devices (``source``, ``target``) and size
        (``nbytes``): medians between ``idle`` devices, and ``loaded``, while they compute.
        ``idle_fit`` and ``loaded_fit`` are the seconds by the fit of that pair.
    fits
        ``latency`` (s), ``bandwidth`` (bytes/s), ``residual`` (mean relative deviation) and ``r2``
        of each pair in each state, indexed by ``source``, ``target`` and ``state``. Source and
        target are -1 for all pairs together.
    host_share
        Seconds in which the host issued the tasks of a loaded step, over its makespan: a mean over
        the steps, and over the hosts of several processes. NaN for runs of older versions.
    launch_share
        ``launch`` of all tasks over the makespan: ``host_share`` without the seconds in which the
        full queues of GPUs blocked the host. A share close to 1 means that the host was the
        bottleneck.

    See Also
    --------
    pipeexec.measure : Make a profile.
    pipeexec.profile : Measure costs without the tables.
    pipeexec.Validation : Predictions from a profile, beside measured steps.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 1, 4))
    >>> x = torch.ones(8, 4)
    >>> with px.Pipeline([torch.nn.Linear(4, 4)], graph, ["cpu"], mse_loss) as pipeline:
    ...     profile = px.measure(pipeline, x, x, n_steps=1)
    >>> profile.table.columns.tolist(), 0 < profile.host_share < 1
    (['loaded', 'spread', 'isolated', 'slow_down'], True)
    """

    costs: Costs
    table: pd.DataFrame
    transfers: pd.DataFrame
    fits: pd.DataFrame
    host_share: float = math.nan
    launch_share: float = math.nan

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the seconds of messages by size, idle and loaded, with their fits.

        Parameters
        ----------
        ax
            Axes to draw into; new ones by default.

        Returns
        -------
        matplotlib.axes.Axes
            The axes; sizes in bytes and times in a fitting unit, both logarithmic.

        Examples
        --------
        >>> import torch
        >>> from matplotlib.figure import Figure
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     profile = px.measure(pipeline, x, x, n_steps=1)
        >>> profile.plot(ax=Figure().subplots()).get_xlabel()
        'Message (bytes)'
        """
        return plot_transfers(self.transfers, ax=ax)

    def save(self, path: Path | str, *, record: Mapping[str, Any] | None = None) -> None:
        """Write a complete run directory, or nothing.

        Its files are ``run.json``, ``costs.json``, ``profile.csv`` (`table`), ``transfers.csv``,
        ``links.csv`` (`fits`), and ``transfers.png`` if there are transfers.

        Parameters
        ----------
        path
            Folder to write. An older run directory at this path is replaced.
        record
            Further entries of ``run.json``, which JSON can hold.

        Raises
        ------
        RunDirectoryError
            If it cannot be written, ``path`` exists and is no run directory, or another process is
            writing it.

        Examples
        --------
        >>> import tempfile, torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph, x = ps.lower(ps.schedule("1f1b", 1, 4)), torch.ones(8, 4)
        >>> with px.Pipeline([torch.nn.Linear(4, 4)], graph, ["cpu"], mse_loss) as pipeline:
        ...     profile = px.measure(pipeline, x, x, n_steps=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     profile.save(f"{folder}/run", record={"seed": 0})
        ...     px.Profile.load(f"{folder}/run").costs == profile.costs
        True
        """
        with write_directory(
            check_path("path", path, "write"),
            {"command": command(), **checked_record(record), **host_shares(self)},
        ) as folder:
            self.costs.save(folder / "costs.json")
            save_profile(folder, self.table, self.transfers, self.fits)

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read a run directory of `save`, or one of a validation that has a profile.

        Parameters
        ----------
        path
            Run directory.

        Returns
        -------
        Profile
            Costs, tables and shares of the host, as they were saved.

        Raises
        ------
        RunDirectoryError
            If a file is missing, truncated or edited, or the run has no profile.

        Examples
        --------
        >>> import tempfile, torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph, x = ps.lower(ps.schedule("1f1b", 1, 4)), torch.ones(8, 4)
        >>> with px.Pipeline([torch.nn.Linear(4, 4)], graph, ["cpu"], mse_loss) as pipeline:
        ...     profile = px.measure(pipeline, x, x, n_steps=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     profile.save(f"{folder}/run")
        ...     px.Profile.load(f"{folder}/run").table.equals(profile.table)
        True
        """
        path = check_path("path", path)
        record = read_record(path)
        costs = Costs.load(listed_file(path, record, "costs.json"))
        return cls(costs, *load_profile(path, record), **read_shares(record))
