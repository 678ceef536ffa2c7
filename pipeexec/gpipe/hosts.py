"""`CallHosts`: threads that issue the tasks of one call, a thread a device or one for all.

torchgpipe has a thread a device for forwards, and torch's engine a thread a GPU for backwards. Here
the caller's thread and the engine's only pass tasks on to these threads, each after the tasks that
it needs. So calls can share the threads: no task waits for one that was passed on later.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep

from pipeexec.devices.device import Device, launch_seconds
from pipeexec.devices.streams import CpuStream
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
from pipesim.ops import Op

#: Seconds between two checks of whether the call has failed.
_CHECK_SECONDS = 0.1
Submit = Callable[[Sequence[PlannedTask]], None]


class CallHosts:
    """Hosts of the devices of a call, which wait for each other and for imposed launch times.

    A stream can only wait for an event that was recorded. So a host waits until other hosts have
    submitted the tasks that its next task needs.
    """

    def __init__(self, step: Step, devices: Sequence[Device], per_device: bool) -> None:
        self._step = step
        self._threads = [device.host() for device in (devices if per_device else devices[:1])]
        self._due: dict[CpuStream, float] = defaultdict(float)  # end of the launches so far
        self._n_left = 0  # tasks that are passed on, but not submitted
        self._submitted = threading.Condition()

    def put(self, tasks: Sequence[PlannedTask], submit: Submit) -> None:
        """Let the host of each task submit it, behind the tasks before."""
        with self._submitted:
            self._n_left += len(tasks)
        for task in tasks:
            thread = self._threads[task.stage.index % len(self._threads)]
            thread.submit(partial(self._submit_task, thread, task, submit, perf_counter()))

    def _submit_task(
        self, thread: CpuStream, task: PlannedTask, submit: Submit, earliest: float
    ) -> None:
        """Submit a task after its launch, which does not begin before ``earliest``."""
        step, ends = self._step, self._step.events.end_events
        due = max(self._due[thread], earliest)
        try:
            with self._submitted:
                while not step.has_stopped and any(ends[t] is None for t in task.waits):
                    self._submitted.wait(_CHECK_SECONDS)
                    due = max(due, perf_counter())
            launch = launch_seconds(task.device, Op(step.graph.op[task.id]))
            self._due[thread] = due = due + launch
            if launch and not step.has_stopped and (wait := due - perf_counter()) > 0:
                sleep(wait)
            if not step.has_stopped:
                submit((task,))
        except BaseException as error:
            step.failure = step.failure or (-1, error)
        finally:
            with self._submitted:
                self._n_left -= 1
                self._submitted.notify_all()

    def wait(self) -> None:
        """Block the caller until all tasks were submitted, or the call has failed."""
        with self._submitted:
            while self._n_left:
                self._submitted.wait(_CHECK_SECONDS)
