"""`DeviceTicks`: as many labels of devices as fit the axes when they are drawn.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import Locator

from pipesim.plot.paper_figure import axes_size, thinned_ticks


class DeviceTicks(Locator):
    """Ticks of a vertical axis with a row a device.

    A layout may change the height of the axes after their ticks were set.

    Parameters
    ----------
    ax
        Axes of the ticks.
    n_devices
        Number of rows.
    line
        Height of a line of labels (points).
    """

    def __init__(self, ax: Axes, n_devices: int, line: float) -> None:
        self.ax = ax
        self.n_devices = n_devices
        self.line = line

    def __call__(self) -> list[int]:
        """Return the devices with a label."""
        return thinned_ticks(self.n_devices, max(1, int(axes_size(self.ax)[1] / self.line)))

    def tick_values(self, vmin: float, vmax: float) -> list[int]:
        """Return the same devices for any limits of the axis."""
        return self()
