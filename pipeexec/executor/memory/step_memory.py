"""`StepMemory`: bytes of activations, gradients, buffers and parameters that devices hold.

A task takes its bytes at its start and gives them back at its end, as in rule 10 of docs/time.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.timeline.memory import in_order_of_time
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]


class Bytes(NamedTuple):
    """Bytes that each task takes at its start and gives back at its end; shape ``(n_tasks,)``."""

    taken: Floats
    given: Floats


@dataclass(frozen=True, eq=False)
class StepMemory:
    """Bytes that each device held over one step, counted tensor by tensor.

    Attributes
    ----------
    timeline
        Timeline of the step. Counting delays the host, so tasks start later than in other steps.
    activations, gradients, buffers
        Bytes that each task took and gave back.
    one_gradient
        Bytes of one gradient a parameter, for each stage of each replica; shape
        ``(n_replicas, n_stages)``. 0 for sharded parameters, of whose gradients a share is always
        held.
    parameters
        Bytes of sharded parameters that each task gathered and freed.
    """

    timeline: Timeline
    activations: Bytes
    gradients: Bytes
    buffers: Bytes
    one_gradient: Floats
    parameters: Bytes

    def at(self, timeline: Timeline) -> StepMemory:
        """Return the same bytes at the times of another step of the same graph."""
        return replace(self, timeline=timeline)

    @property
    def peak_activations(self) -> Floats:
        """Most bytes of activations that each device held; shape ``(n_devices,)``."""
        return self._peaks("activations")

    @property
    def peak_gradients(self) -> Floats:
        """Most bytes of gradients that each device held; shape ``(n_devices,)``."""
        return self._peaks("gradients")

    @property
    def peak_buffers(self) -> Floats:
        """Most bytes of buffers that each device held within reductions; ``(n_devices,)``."""
        return self._peaks("buffers")

    @property
    def peak(self) -> Floats:
        """Most bytes of activations, gathered parameters, and gradients beyond one a parameter.

        The simulator adds these to the bytes that are held throughout. Shape ``(n_devices,)``.
        """
        return self._peaks("total")

    def _peaks(self, column: str) -> Floats:
        most = np.zeros(self.timeline.n_devices)
        frame = self.frame
        np.maximum.at(most, frame["device"].to_numpy(), frame[column].to_numpy())
        return most

    @property
    def frame(self) -> pd.DataFrame:
        """Bytes held after each start and end of a task that changed any.

        ``device``, ``time`` (s), ``activations``, ``gradients``, ``buffers``, ``parameters``, and
        ``total``: activations, gathered parameters, gradients beyond one a parameter. By device,
        then in order of time.
        """
        from pipesim.utils.packages import pandas as pd

        graph = self.timeline.graph
        kinds = self.activations, self.gradients, self.buffers, self.parameters
        changed = np.any([x != 0 for kind in kinds for x in kind], axis=0)
        task, is_end = in_order_of_time(self.timeline, changed, changed)
        place = graph.replica * graph.n_stages + graph.stage
        held = np.zeros((4, graph.n_devices))
        gradients = np.zeros(self.one_gradient.size)
        one, homes = self.one_gradient.ravel(), graph.homes.ravel()
        rows = []
        for number, ends in zip(task.tolist(), is_end.tolist(), strict=True):
            device = int(graph.device[number])
            change = [-kind.given[number] if ends else kind.taken[number] for kind in kinds]
            held[:, device] += change
            gradients[place[number]] += change[1]
            more_gradients = np.maximum(0.0, gradients - one)[homes == device].sum()
            time = (self.timeline.end if ends else self.timeline.start)[number]
            total = held[0, device] + held[3, device] + more_gradients
            rows.append((device, time, *held[:, device], total))
        names = ["device", "time", "activations", "gradients", "buffers", "parameters", "total"]
        return pd.DataFrame(rows, columns=names).astype({"device": "int64"})
