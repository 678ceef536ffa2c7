"""`ShapeClasses`: micro-batches of equal shapes, which a calibration measures once for all of them.

Replicas may have micro-batches of other shapes. Each takes turns with its own ones, and all run as
many in a calibration step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeexec.distributed.processes import guard_processes
from pipeexec.executor.pipeline import Pipeline
from pipeexec.profiling.task_seconds import measured_fields
from pipeexec.stages.batches import Batch
from pipeexec.stages.microbatches import Microbatches, shapes_as_text
from pipesim.analysis.measured_costs import output_bytes
from pipesim.analysis.microbatch_seconds import microbatch_values
from pipesim.costs.microbatch_costs import MICROBATCH_FIELDS
from pipesim.graph.copies import copy_of_replicas
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class ShapeClasses(NamedTuple):
    """Classes of the micro-batches of a step, and those that a calibration runs.

    Attributes
    ----------
    number
        Class of each micro-batch; shape ``(n_shares, n_microbatches)``.
    order
        Micro-batches that each replica runs one after the other in a calibration; shape
        ``(n_shares, n)``. Each class of the replica is among them.
    """

    number: Ints
    order: Ints

    @property
    def measured(self) -> Ints:
        """Class of each micro-batch in ``order``."""
        return np.take_along_axis(self.number, self.order, axis=1)

    def batches(self, batch: Batch, local: Sequence[int], columns: Sequence[int]) -> Batch:
        """Return the `Microbatches` of some columns of ``order``, for the replicas ``local``."""
        m = self.number.shape[1]
        rows = enumerate(self.order[list(local)][:, list(columns)].tolist())
        return batch.take([position * m + k for position, row in rows for k in row])

    def fields(self, timelines: Sequence[Timeline], *, with_split: bool) -> dict[str, Floats]:
        """Return the fields of `Costs` that differ between micro-batches.

        The timelines are those of calibration steps. Shape of each: ``(n_stages, n_shares *
        n_microbatches)``; 0 for stages without the operation.
        """
        return {
            **{
                name: self._seconds(timelines, op, part)
                for op, part, name in measured_fields(timelines[0].graph, with_split)
                if name in MICROBATCH_FIELDS
            },
            "output_bytes": self._output_bytes(timelines[-1]),
        }

    def _seconds(self, timelines: Sequence[Timeline], op: Op, part: int | None) -> Floats:
        """Return the mean seconds of an operation on each micro-batch."""
        graph = timelines[0].graph
        is_task = (graph.op == op) & (graph.microbatch >= 0)
        tasks = np.flatnonzero(is_task if part is None else is_task & (graph.part == part))
        copy = copy_of_replicas(graph.homes)[graph.replica[tasks]]
        # Calibration steps may begin with the order again, to split the other backwards.
        column = graph.microbatch[tasks] % self.order.shape[1]
        place = graph.stage[tasks], self.measured[copy, column]
        sums, counts = np.zeros((2, graph.n_stages, int(self.number.max()) + 1))
        np.add.at(sums, place, np.mean([timeline.duration[tasks] for timeline in timelines], 0))
        np.add.at(counts, place, 1)
        means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        return self._spread(means)

    def _output_bytes(self, timeline: Timeline) -> Floats:
        """Return the bytes of the messages of each micro-batch."""
        largest = output_bytes(timeline)
        values = microbatch_values(timeline, {"output_bytes": largest})["output_bytes"]
        n_shares, n = self.order.shape
        rows = values.reshape(len(values), n_shares, -1)[:, :, :n].reshape(len(values), -1)
        return self.of_measured(rows)

    def of_measured(self, values: Floats) -> Floats:
        """Return values of all micro-batches from those of ``order``, a column each."""
        means = np.zeros((len(values), int(self.number.max()) + 1))
        means[:, self.measured.ravel()] = values
        return self._spread(means)

    def most(self, values: Floats) -> Floats:
        """Return the largest value of each class, in place of those of its micro-batches."""
        largest = np.zeros((len(values), int(self.number.max()) + 1))
        np.maximum.at(largest.T, self.number.ravel(), values.T)
        return self._spread(largest)

    def _spread(self, of_class: Floats) -> Floats:
        """Return the values of all micro-batches from those of each class, a column each."""
        return of_class[:, self.number.ravel()]


def shape_classes(pipeline: Pipeline, inputs: Batch, targets: Any) -> ShapeClasses | None:
    """Return the classes of the `Microbatches` of all processes; None for another batch.

    All processes must call this.
    """
    if not isinstance(inputs, Microbatches):
        return None
    shares, m = pipeline.shares, pipeline.graph.n_microbatches
    texts = [f"{x} {y}" for x, y in zip(shapes_as_text(inputs), shapes_as_text(targets),
                                        strict=True)]  # fmt: skip
    own = {share: texts[k * m : (k + 1) * m] for k, share in enumerate(shares.local)}
    rows = [own[share] for share in sorted(own)]
    if pipeline.processes is not None:
        with guard_processes(pipeline.processes):
            texts_of = _merged(pipeline.processes.share(list(own.items())))
        rows = [texts_of[share] for share in sorted(texts_of)]
    names = dict.fromkeys(text for row in rows for text in row)
    classes = {text: k for k, text in enumerate(names)}
    number = np.array([[classes[text] for text in row] for row in rows], dtype=np.int64)
    return ShapeClasses(number, _order(number, pipeline.graph.n_devices))


def _merged(by_rank: Sequence[Sequence[tuple[int, list[str]]]]) -> Mapping[int, list[str]]:
    return {share: texts for row in by_rank for share, texts in row}


def _order(number: Ints, n_devices: int) -> Ints:
    """Return the first micro-batch of each class in turns, so many that all devices are busy.

    They are an odd number: of twice as many, every second one is each of them once.
    """
    firsts = [np.unique(row, return_index=True)[1] for row in number]
    most = max(map(len, firsts))
    least = min(number.shape[1], n_devices)
    n = max(most, least) + 1
    n += 1 - n % 2
    return np.array([list(_turns(sorted(row.tolist()), n)) for row in firsts], dtype=np.int64)


def _turns(values: Sequence[int], n: int) -> Iterator[int]:
    """Yield ``n`` values, from the first again after the last."""
    for k in range(n):
        yield values[k % len(values)]
