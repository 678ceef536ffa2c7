"""`PlannedTask`: the properties of a task that are the same in every step, and its handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import ProcessGroup

from pipeexec.devices.device import Device
from pipeexec.devices.streams import Stream
from pipeexec.distributed.channels import Channel
from pipeexec.stages.stage import StageLike

if TYPE_CHECKING:
    from pipeexec.executor.step import Step


class Source(NamedTuple):
    """A task whose result is the input of another task, or a part of it.

    Attributes
    ----------
    task, slot
        Number in the graph, and slot of its stage.
    edge
        Number of the edge whose tensors are taken, among those to the stage of a backward. -1: all
        of the result.
    n_consumers
        Number of tasks that take the result.
    """

    task: int
    slot: int = 0
    edge: int = -1
    n_consumers: int = 1


class PlannedTask(NamedTuple):
    """Everything that the host needs to issue a task; the same in every step.

    Attributes
    ----------
    id, stage, microbatch, part
        Number in the graph, stage, micro-batch (-1 for none), and part: the number of a bucket of
        gradients, or of a part of an exchange (-1 for none).
    slot
        Number of the stage's copy: replica times number of stages, plus stage.
    global_microbatch
        Number of the micro-batch among the micro-batches of all replicas.
    is_recomputed, is_split
        Whether the micro-batch has an R, and a W, in this stage.
    waits
        Tasks on other streams of this process whose end the stream waits for.
    sources
        Tasks whose results are the input: one for each edge of stages that brings a part of it, in
        the order of the stages. Empty if there is none, or for a micro-batch of the batch.
    sync
        The task's part in collectives of replicas, if any.
    remote
        The task's part in work with other processes; None in a pipeline of one process.
    """

    id: int
    stage: StageLike
    microbatch: int
    part: int
    slot: int
    global_microbatch: int
    is_recomputed: bool
    is_split: bool
    device: Device
    stream: Stream
    waits: tuple[int, ...]
    sources: tuple[Source, ...]
    handler: Handler
    sync: ReplicaSync | None = None
    remote: Remote | None = None

    @property
    def source(self) -> int:
        """Number of the task whose result is the input; -1 for none.

        Only F, B and I may have several.
        """
        return self.sources[0].task if self.sources else -1

    @property
    def copies(self) -> tuple[int, ...]:
        """Slots of the copies of this process whose gradients the task reduces."""
        return () if self.sync is None else self.sync.copies

    @property
    def group(self) -> ProcessGroup | None:
        """Process group of the task's collective; None within one process."""
        return None if self.remote is None else self.remote.group


class ReplicaSync(NamedTuple):
    """Part in collectives of a member, or of a backward whose gradients are reduced.

    Attributes
    ----------
    leader
        Task that does the work for all members of this process; -1 for that task itself.
    copies
        Slots of the copies of this process whose gradients the task reduces.
    n_buckets
        Number of buckets of the stage whose gradients the task reduces; 0 without buckets.
    n_buckets_marked
        Number of bucket-ready events that a backward sets; 0 without buckets.
    milestones
        Bucket-ready events that a reduction waits for, as (backward, bucket).
    """

    leader: int = -1
    copies: tuple[int, ...] = ()
    n_buckets: int = 0
    n_buckets_marked: int = 0
    milestones: tuple[tuple[int, int], ...] = ()


class Remote(NamedTuple):
    """Part of a task that involves other processes; see `pipeexec.executor.remote_messages`.

    Attributes
    ----------
    before_start, after_end
        Functions that run on the task's stream before the task starts and after it ends.
    send_waiter
        Stream that waits until a posted message is sent, if the task only posts it.
    task_slot
        Word of the flight recorder that holds the task while it runs; -1 for none.
    """

    channel: Channel | None = None
    group: ProcessGroup | None = None
    before_start: Handler | None = None
    after_end: Handler | None = None
    send_waiter: Stream | None = None
    task_slot: int = -1


#: Function that runs a task, or a part of it, in a step.
Handler = Callable[["Step", PlannedTask], None]
