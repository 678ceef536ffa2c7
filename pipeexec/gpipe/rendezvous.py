"""`Rendezvous`: both ends of a message wait for each other, as on default streams.

A SEND begins once the stream of its target has reached the RECV (rule 6 of docs/time.md). Until
then it holds the stream of its source. On CUDA a stream can only wait for an event that was
recorded. So the host submits a SEND and its RECV together, when both are the next tasks of their
streams. It keeps back the tasks behind either of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

from pipeexec.executor.planned_task import PlannedTask
from pipeexec.gpipe.hosts import Submit


class Rendezvous:
    """Tasks of each partition that the host keeps back, in the order of its stream.

    Parameters
    ----------
    recvs
        The RECV of each SEND, by the number of the SEND.
    last
        Number of the task that was submitted last, by partition.
    """

    def __init__(
        self, recvs: Mapping[int, PlannedTask], last: Mapping[int, int], n_partitions: int
    ) -> None:
        self._recvs, self._last = recvs, dict(last)
        self._received = {recv.id for recv in recvs.values()}
        self._queues: list[deque[PlannedTask]] = [deque() for _ in range(n_partitions)]
        # One thread submits. Others, and tasks within which nodes of autograd run, add their tasks.
        self._lock, self._has_more = threading.Lock(), False

    def put(self, j: int, tasks: Sequence[PlannedTask], submit: Submit) -> None:
        """Add tasks of partition ``j``, in the order of its stream; submit those that can go."""
        self._queues[j].extend(tasks)
        self._has_more = True
        while self._has_more and self._lock.acquire(blocking=False):
            try:
                self._has_more = False
                while any(self._advance(queue, submit) for queue in self._queues):
                    pass
            finally:
                self._lock.release()

    def _advance(self, queue: deque[PlannedTask], submit: Submit) -> bool:
        """Submit tasks of a queue until one has to wait; return whether any was submitted."""
        has_submitted = False
        while queue and queue[0].id not in self._received:
            task = queue[0]
            pair: tuple[PlannedTask, ...] = (task,)
            if (recv := self._recvs.get(task.id)) is not None:
                target = recv.stage.index
                if not (others := self._queues[target]) or others[0] is not recv:
                    break
                others.popleft()
                reached = (self._last[target],) if target in self._last else ()
                pair = task._replace(waits=reached), recv
            queue.popleft()
            self._last |= {task.stage.index: task.id for task in pair}
            submit(pair)
            has_submitted = True
        return has_submitted
