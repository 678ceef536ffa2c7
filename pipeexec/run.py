"""One step under way: the plan of each task, and the walk of the host through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import (
    DistError,
    ProcessGroup,
    barrier,
    get_process_group_ranks,
    get_rank,
)

from pipeexec import clocks, transfer
from pipeexec.channels import Asked, Channel, Expected, Lost, Route, Sent
from pipeexec.devices import Device, RemoteDevice
from pipeexec.messages import Content, header
from pipeexec.parts import Part
from pipeexec.paths import reduce_gradients
from pipeexec.processes import Processes
from pipeexec.progress import Progress, StepHeads
from pipeexec.randomness import task_seed
from pipeexec.signatures import Signature, check_values
from pipeexec.stage import Stage, Values
from pipeexec.streams import CpuEvent, Event, InlineStream, Stream
from pipeexec.watch import Failure, Status
from pipesim.errors import ArgumentError
from pipesim.graph import TaskGraph
from pipesim.ops import RECVS, SENDS, Op
from pipesim.timeline import Timeline

__all__ = [
    "WORK",
    "Batch",
    "Planned",
    "Run",
    "expected_messages",
    "place",
    "plan",
    "split_batch",
    "split_batches",
]

Batch = Tensor | tuple[Tensor, ...]
#: Seconds between two looks at whether a step gets on.
_SLICE = 0.1
#: Seconds that the tasks of a step of one process have to end once it was interrupted.
_PATIENCE = 5.0
#: Whose result a task of the key takes, and how many stages on that is; a RECV takes its SEND's.
_SOURCES: Mapping[Op, Mapping[Op, int]] = {
    Op.F: {Op.F: -1, Op.RECV_F: 0},
    Op.B: {Op.B: 1, Op.I: 1, Op.RECV_B: 0},
    Op.I: {Op.B: 1, Op.I: 1, Op.RECV_B: 0},
    Op.SEND_F: {Op.F: 0},
    Op.SEND_B: {Op.B: 0, Op.I: 0},
}


class Planned(NamedTuple):
    """What the host needs to know to issue one task."""

    id: int
    work: Callable[[Run, Planned], None]
    stream: Stream
    device: Device
    stage: Stage
    microbatch: int
    waits: tuple[int, ...]
    source: int
    recomputed: bool
    split: bool
    slot: int
    copies: tuple[int, ...]
    meet: Callable[[Run, Planned], None] | None  # waits for another process before it begins
    channel: Channel | None
    edge: int  # the stage whose outputs, or their gradients, the message holds
    following: int  # the channel's next RECV, which may be asked for early; -1 for none
    members: ProcessGroup | None  # of a reduction over processes
    waiter: Stream | None  # waits until a message that is only posted is gone
    slate: int  # where to note that it runs, for other processes to read; -1 for messages


class Run:
    """One step under way: what tasks hand to each other, their events, and the first failure."""

    def __init__(
        self,
        graph: TaskGraph,
        path: NDArray[np.int64],
        devices: Sequence[Device],
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer | None],
        inputs: Batch | None,
        targets: Batch | None,
        *,
        is_mean: bool,
        number: int,
        timeout: float | None = None,
        processes: Processes | None = None,
    ) -> None:
        m = graph.n_microbatches
        self.graph, self.devices = graph, devices
        here = [d for d, x in enumerate(devices) if not isinstance(x, RemoteDevice)]
        self.numbers = {device: number for number, device in enumerate(here)}  # of those here
        self.modules, self.optimizers = modules, optimizers
        self.number, self.timeout, self.processes = number, timeout, processes
        parts, labels, sizes = split_batches(inputs, targets, m)
        first, last = (
            [devices[d].torch_device for d in graph.homes[path, stage]] for stage in (0, -1)
        )
        self.inputs = _moved(parts, first)
        moved = _moved(labels, last)
        self.targets: list[Any] = (
            moved if isinstance(targets, tuple) else [part[0] if part else None for part in moved]
        )
        self.n_samples = None if inputs is None else sum(sizes)
        self.n_targets = None if targets is None else sum(sizes)
        batches = [sizes[k : k + m // graph.n_batches] for k in range(0, m, m // graph.n_batches)]
        self.weights = [
            size / sum(batch) if is_mean else 1.0 for batch in batches for size in batch
        ]
        self.n_losses = len(batches) if is_mean else 1
        self.losses: list[Tensor | None] = [None] * m
        self.values: list[Values | None] = [None] * len(graph)
        self.clock: clocks.Clocks | None = None
        self.zero = 0.0
        self.began: list[Event | None] = [None] * len(graph)
        self.ended: list[Event | None] = [None] * len(graph)
        self.ran = np.zeros(len(graph), dtype=bool)
        self.nbytes = np.zeros(len(graph))
        self.failure: tuple[int, BaseException] | None = None
        self.stopped: Status | None = None
        self.abandoned = False
        self.seed = torch.initial_seed()
        self.host_seconds = 0.0
        #: Messages between processes: as they should be, those that were asked for, and events
        #: that pass when they are gone.
        self.expected: dict[int, Expected] = {}
        self.asked: dict[int, Asked] = {}
        self.gone: dict[int, CpuEvent] = {}
        self.slate = memoryview(b"") if processes is None else processes.recorder.own
        self._heads_of = StepHeads(graph, self.began, self.ended)
        self._progress = Progress(timeout)
        self._until = float("inf")  # when it is given up, once it was interrupted

    def walk(self, tasks: Sequence[Planned]) -> None:
        """Issue every task, then wait for the devices."""
        try:
            self.issue(tasks)
            self._wait(tasks)
        except BaseException as error:
            self.failure = self.failure or (-1, error)
            if self.processes is None:
                self._until = perf_counter() + _PATIENCE  # a stage may hang
                self._wait(tasks)
            raise
        if not self.abandoned:
            for device in self.devices:
                device.synchronize()

    def issue(self, tasks: Sequence[Planned]) -> None:
        """Give every task to its stream; wait for nothing."""
        began, ended = self.began, self.ended
        self.clock = clocks.start([self.devices[d] for d in self.numbers])
        self.zero = start = perf_counter()
        if self.processes is not None:
            self.slate[0] = self.number
        for task in tasks:
            stream = task.stream
            for needed in task.waits:
                stream.wait_event(ended[needed])  # type: ignore[arg-type]  # issued before
            if task.meet is not None:
                stream.submit(partial(self._guarded, task, task.meet, False))
            began[task.id] = stream.record()
            if task.waiter is not None:
                self.gone[task.id] = CpuEvent()
            stream.submit(partial(self._guarded, task, task.work, True))
            if task.waiter is not None:
                stream.wait_event(self.gone[task.id])
            ended[task.id] = stream.record()
            if task.following >= 0:
                stream.submit(partial(self._guarded, task, _ask_ahead, True))
        self.host_seconds = perf_counter() - start

    def _wait(self, tasks: Sequence[Planned]) -> None:
        """Wait until every stream has run all that it was given, or no longer will."""
        last = {task.stream: event for task in tasks if (event := self.ended[task.id]) is not None}
        for event in last.values():
            while not self.abandoned and not event.wait(_SLICE):
                self._look()

    def _look(self) -> None:
        """Give up if this step will not end."""
        if self.processes is not None:
            failed = self.failure is not None or self.processes.watch.failure is not None
            self.abandoned = failed
        elif self._progress.stalled(self.status()) or perf_counter() > self._until:
            self.abandoned = True

    @property
    def stall(self) -> Failure | None:
        """What holds the step up, if nothing has moved for too long."""
        return self._progress.failure

    def status(self) -> Status:
        """Return what this process's devices are at."""
        if self.stopped is not None:
            return self.stopped
        rank = 0 if self.processes is None else self.processes.rank
        return self._heads_of.status(rank, self.number)

    def _guarded(self, task: Planned, work: Callable[[Run, Planned], None], is_last: bool) -> None:
        """Run a part of a task, unless another has failed; what fails first stops all."""
        if self.failure is not None or self.abandoned:
            self._pass_over(task)
            return
        if task.slate >= 0:
            self.slate[task.slate] = task.id + 1
        try:
            work(self, task)
        except BaseException as error:
            self.fail(task, error)
            self._pass_over(task)
        else:
            self.ran[task.id] = is_last
            if task.slate >= 0:
                self.slate[task.slate] = 0

    def fail(self, task: Planned, error: BaseException) -> None:
        """Note the first failure, and where everything was."""
        if self.failure is None:
            self.stopped = self.status()  # what follows is passed over, and seems to end
            self.failure = task.id, error

    def _pass_over(self, task: Planned) -> None:
        """Let what waits for a message go on that will not be sent."""
        if task.id in self.gone:
            self.gone[task.id].fire()

    def take(self, task: int) -> Values:
        """Return what ``task`` produced, and let go of it."""
        values, self.values[task] = self.values[task], None
        return values or ()

    def seed_of(self, task: Planned) -> int:
        """Return the seed of a task's random numbers."""
        if not task.stage.is_random.get(task.stage.module.training, True):
            return 0
        return task_seed(self.seed, self.number, task.stage.index, task.microbatch)

    def timeline(self, *, is_over: bool = True) -> Timeline:
        """Return when each task ran; NaN for those that did not, or ran in other processes."""
        graph = self.graph
        start, end = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
        for task in np.flatnonzero(self.ran).tolist():
            began, ended = self.began[task], self.ended[task]
            if self.clock is None or began is None or ended is None:
                continue
            if (self.abandoned or not is_over) and not ended.passed():
                continue
            device = self.numbers[int(graph.device[task])]
            start[task] = self.clock.seconds(device, began)
            end[task] = self.clock.seconds(device, ended)
        return Timeline(graph, start, end, self.nbytes)

    def part(self) -> Part:
        """Return what this process measured, on rank 0's clock."""
        zero = self.zero if self.processes is None else self.processes.clock.to_first(self.zero)
        found = {m: x for m, x in enumerate(self.losses) if x is not None}
        losses = {m: float(x) for m, x in found.items()}
        dtype = str(next(iter(found.values())).dtype).removeprefix("torch.") if found else ""
        return Part(zero, self.timeline(), losses, self.host_seconds, loss_dtype=dtype)

    def where(self, index: int) -> str:
        """Return a task's device, stage and micro-batch, as text."""
        return place(self.graph, index)


def place(graph: TaskGraph, index: int) -> str:
    """Return a task's device, stage and micro-batch, as text."""
    task = graph.task(index)
    of = "" if task.microbatch is None else f", micro-batch {task.microbatch}"
    return f"device {task.device}, stage {task.stage}{of}"


def _forward(run: Run, task: Planned) -> None:
    values = run.inputs[task.microbatch] if task.source < 0 else run.take(task.source)
    values = task.stage.forward(
        task.microbatch, values, run.seed_of(task), task.recomputed, task.split
    )
    if task.stage.finish is None:
        run.values[task.id] = values


def _recompute(run: Run, task: Planned) -> None:
    task.stage.recompute(task.microbatch, run.seed_of(task), task.split)


def _backward(run: Run, task: Planned) -> None:
    gradients = () if task.source < 0 else run.take(task.source)
    run.values[task.id] = task.stage.backward(task.microbatch, gradients)


def _input_grad(run: Run, task: Planned) -> None:
    gradients = () if task.source < 0 else run.take(task.source)
    run.values[task.id] = task.stage.input_grad(task.microbatch, gradients)


def _weight_grad(run: Run, task: Planned) -> None:
    task.stage.weight_grad(task.microbatch)


def expected_messages(
    graph: TaskGraph, tasks: Sequence[Planned], agreed: Sequence[Sequence[Signature]]
) -> dict[int, Expected]:
    """Return each message to or from another process as it should be, by its task, in step 0."""
    found = {}
    for task in tasks:
        if task.channel is not None:
            op = task.channel.route.op
            stage, path = task.edge + (op is Op.SEND_B), int(graph.replica[task.id])
            content = Content(0, op, stage, task.microbatch, path)
            signature = agreed[task.edge][task.microbatch]
            head = header(content, signature)
            found[task.id] = Expected.of(head, signature, waits=graph.rendezvous)
    return found


def _checked(run: Run, task: Planned) -> tuple[Channel, Expected, Values]:
    """Return what a SEND sends, which is as agreed, and where."""
    assert task.channel is not None
    message, values = run.expected[task.id], run.values[task.source] or ()
    check_values(values, message.signature, f"what {run.graph.task(task.id)} sends")
    return task.channel, message, values


def _meet_receiver(run: Run, task: Planned) -> None:
    """Wait until the receiver is ready for what comes."""
    channel, message, values = _checked(run, task)
    channel.wait(channel.offer(message, values), channel.route.target_rank)


def _send_away(run: Run, task: Planned) -> None:
    """Send what the receiver is ready for, and wait until it is gone."""
    channel, message, values = _checked(run, task)
    run.nbytes[task.id] = transfer.nbytes(values)
    for value in values:
        if value is not None:  # made on another stream
            task.device.adopt(value, task.stream)
    sent = (channel.send if run.graph.rendezvous else channel.post)(message, values)
    channel.finish(message, sent)
    run.take(task.source)


def _post(run: Run, task: Planned) -> None:
    """Send a message without waiting; an event passes when it is gone."""
    assert task.waiter is not None
    channel, message, values = _checked(run, task)
    run.nbytes[task.id] = transfer.nbytes(values)
    task.waiter.submit(partial(_until_gone, run, task, channel.post(message, values)))
    run.take(task.source)


def _until_gone(run: Run, task: Planned, sent: Sent) -> None:
    assert task.channel is not None
    try:
        task.channel.finish(run.expected[task.id], sent)
    except BaseException as error:
        run.fail(task, error)
    finally:
        run.gone[task.id].fire()


def _accept(run: Run, task: Planned) -> None:
    """Wait until the message is there to be received, and check that it is the right one."""
    assert task.channel is not None
    place = task.device.torch_device
    run.asked[task.id] = task.channel.accept(run.expected[task.id], place)


def _ask_ahead(run: Run, task: Planned) -> None:
    """Ask for the channel's next message, now that this one is delivered."""
    assert task.channel is not None
    task.channel.ask_ahead(run.expected[task.following], task.device.torch_device)


def _receive_from_away(run: Run, task: Planned) -> None:
    assert task.channel is not None
    values = task.channel.receive(run.expected[task.id], run.asked.pop(task.id))
    run.nbytes[task.id] = transfer.nbytes(values)
    run.values[task.id] = transfer.receive(values, task.device, task.device.stream("compute"))


def _send(run: Run, task: Planned) -> None:
    values = run.take(task.source)
    graph = run.graph
    recv = int(graph.pair[task.id])
    target = run.devices[graph.device[recv]]
    run.values[task.id] = transfer.send(values, task.device, task.stream, target)
    run.nbytes[[task.id, recv]] = transfer.nbytes(values)


def _receive(run: Run, task: Planned) -> None:
    consumer = task.device.stream("compute")
    run.values[task.id] = transfer.receive(run.take(task.source), task.device, consumer)


def _meet_members(run: Run, task: Planned) -> None:
    """Wait until every process of a reduction is ready for it."""
    with _among(task.members):
        barrier(group=task.members)


def _reduce(run: Run, task: Planned) -> None:
    if task.copies:
        with _among(task.members):
            reduce_gradients([run.modules[slot] for slot in task.copies], task.members)


@contextmanager
def _among(group: ProcessGroup | None) -> Iterator[None]:
    """Let an error of a collective say that one of its other members was lost."""
    try:
        yield
    except DistError as error:
        raise _lost(group, error) from error
    except RuntimeError as error:
        if group is None or "gloo" not in str(error).lower():
            raise
        raise _lost(group, error) from error


def _lost(group: ProcessGroup | None, error: Exception) -> Lost:
    others = [] if group is None else [r for r in get_process_group_ranks(group) if r != get_rank()]
    return Lost(others[0] if len(others) == 1 else -1, error)


def _step(run: Run, task: Planned) -> None:
    optimizer = run.optimizers[task.slot]
    if optimizer is not None:
        optimizer.step()
    task.stage.stepped(zero_grad=optimizer is not None)


#: How each operation is run; `ALL_TO_ALL` needs many processes.
WORK: Mapping[Op, Callable[[Run, Planned], None]] = {
    Op.F: _forward,
    Op.B: _backward,
    Op.I: _input_grad,
    Op.W: _weight_grad,
    Op.R: _recompute,
    Op.SEND_F: _send,
    Op.RECV_F: _receive,
    Op.SEND_B: _send,
    Op.RECV_B: _receive,
    Op.REDUCE_GRAD: _reduce,
    Op.STEP: _step,
}


def plan(
    graph: TaskGraph,
    stages: Sequence[Stage],
    devices: Sequence[Device],
    processes: Processes | None = None,
) -> list[Planned]:
    """Look up everything about each task of this process that does not change from step to step.

    ``stages`` are those of the first path, then of the next.
    """
    for index in np.flatnonzero(~graph.is_op(frozenset(WORK)))[:1].tolist():
        task = graph.task(index)
        raise ArgumentError(f"{task} cannot be run; lower without {task.op}")
    recomputed, split = (
        {(int(graph.stage[t]), int(graph.microbatch[t])) for t in np.flatnonzero(graph.op == op)}
        for op in (Op.R, Op.W)
    )
    rank = 0 if processes is None else processes.rank
    ranks = [device.rank if isinstance(device, RemoteDevice) else rank for device in devices]
    here = np.array(ranks)[graph.device] == rank
    routes = _routes(graph, ranks)
    if processes is not None:
        own = [device for device in devices if not isinstance(device, RemoteDevice)]
        processes.open(routes.values(), graph.n_devices, own)
    away = {t: route for task, route in routes.items()
            for t in (task, int(graph.pair[task])) if here[t]}  # fmt: skip
    following = {} if graph.rendezvous else _following(away)  # or RECVs would seem to be reached
    blocks = _blocking_streams(graph, away)
    groups = _reduction_groups(graph, ranks, processes)
    mine = [] if processes is None else [d for d, r in enumerate(ranks) if r == rank]
    noted = [(device, stream) for stream in ("compute", "collective") for device in mine]
    slates = {place: number + 1 for number, place in enumerate(noted)}
    planned = []
    for index in np.flatnonzero(here).tolist():
        task = graph.task(index)
        needed = {t for t in graph.precedence[index].tolist()
                  if here[t] and graph.stream[t] != graph.stream[index]}  # fmt: skip
        group = int(graph.group[index])
        members = [] if group < 0 else [t for t in graph.collectives[group].tolist() if here[t]]
        others = [t for t in members if t < index]  # the first one reduces for all
        slot = task.replica * graph.n_stages + task.stage
        device, work = devices[task.device], WORK[task.op]
        stream = device.stream(task.stream, blocks=int(graph.stream[index]) in blocks)
        # CUDA's streams wait by themselves until a message is gone.
        posts = index in away and isinstance(stream, InlineStream)
        if index in away:
            work = _receive_from_away if task.op in RECVS else _post if posts else _send_away
        planned.append(
            Planned(
                id=index,
                work=work,
                stream=stream,
                device=device,
                stage=stages[slot],
                microbatch=-1 if task.microbatch is None else task.microbatch,
                waits=tuple(needed.union(others)),
                source=_source(graph, index),
                recomputed=(task.stage, task.microbatch) in recomputed,
                split=(task.stage, task.microbatch) in split,
                slot=slot,
                copies=() if others else tuple(
                    int(graph.replica[t]) * graph.n_stages + task.stage for t in members
                ),
                meet=_meeting(graph, index, index in away, group in groups and not others),
                channel=(
                    processes.channel(away[index])
                    if index in away and processes is not None else None
                ),
                edge=task.stage - (task.op in (Op.SEND_B, Op.RECV_F)),
                following=following.get(index, -1) if task.op in RECVS else -1,
                members=groups.get(group),
                waiter=device.stream(f"{task.stream} gone", blocks=True) if posts else None,
                slate=slates.get((task.device, task.stream), -1),
            )
        )  # fmt: skip
    return planned


def _meeting(
    graph: TaskGraph, index: int, away: bool, reduces: bool
) -> Callable[[Run, Planned], None] | None:
    """Return what waits for other processes before a task begins."""
    if not away:
        return _meet_members if reduces else None
    if graph.is_op(RECVS)[index]:
        return _accept
    return _meet_receiver if graph.rendezvous else None


def _routes(graph: TaskGraph, ranks: Sequence[int]) -> dict[int, Route]:
    """Return the route of each SEND to another process; ``ranks`` are those of the devices."""
    found = {}
    for task in np.flatnonzero(graph.is_op(SENDS)).tolist():
        source, target = int(graph.device[task]), int(graph.device[graph.pair[task]])
        if ranks[source] != ranks[target]:
            op = Op(graph.op[task])
            found[task] = Route(ranks[source], ranks[target], source, target, op)
    return found


def _blocking_streams(graph: TaskGraph, away: Mapping[int, Route]) -> set[int]:
    """Return the streams whose messages are waited for: all but those that only send ahead."""
    waited = {
        int(graph.stream[task]) for task in away if graph.rendezvous or graph.is_op(RECVS)[task]
    }
    compute = {int(graph.stream[t]) for t in away if graph.task(t).stream == "compute"}
    return waited | compute


def _following(away: Mapping[int, Route]) -> dict[int, int]:
    """Return the next message of the same route after each; they keep the order of the tasks."""
    found, last = {}, dict[Route, int]()
    for task in sorted(away, reverse=True):
        if away[task] in last:
            found[task] = last[away[task]]
        last[away[task]] = task
    return found


def _reduction_groups(
    graph: TaskGraph, ranks: Sequence[int], processes: Processes | None
) -> dict[int, ProcessGroup]:
    """Return the process group of each collective that spans processes; made in one order."""
    if processes is None:
        return {}
    found = {}
    for number in range(len(graph.collectives)):
        members = graph.collectives[number]
        among = sorted({ranks[graph.device[t]] for t in members})
        if len(among) > 1:  # a group for each stage, so that none waits for another's
            stage = int(graph.stage[members[0]])
            found[number] = processes.group(among, key=f"gradients {stage}")
    return found


def _moved(parts: Sequence[Values], devices: Sequence[torch.device]) -> list[Values]:
    """Return the micro-batches on the devices that take them; none for those elsewhere."""
    if not parts:
        return [()] * len(devices)
    return [
        () if device.type == "meta"
        else tuple(None if x is None else x.to(device, non_blocking=True) for x in part)
        for part, device in zip(parts, devices, strict=True)
    ]  # fmt: skip


def _source(graph: TaskGraph, index: int) -> int:
    """Return the task whose result a task takes; -1 for none, as for what takes the batch."""
    op, stage = Op(graph.op[index]), int(graph.stage[index])
    if op in RECVS:
        return int(graph.pair[index])
    for needed in graph.dependencies[index].tolist():
        found = Op(graph.op[needed])
        offset = _SOURCES.get(op, {}).get(found)
        same = graph.microbatch[needed] == graph.microbatch[index]
        if offset is not None and same and graph.stage[needed] == stage + offset:
            return int(needed)
    return -1


def split_batches(
    inputs: Batch | None, targets: Batch | None, n_microbatches: int
) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]], list[int]]:
    """Return the micro-batches of inputs and of targets, and their sizes; see `split_batch`.

    Either may be None, which has no micro-batches.

    Raises
    ------
    ArgumentError
        If there are not as many targets as inputs.
    """
    parts, sizes = ([], []) if inputs is None else split_batch(inputs, n_microbatches, "inputs")
    if targets is None:
        return parts, [], sizes or [1] * n_microbatches
    labels, label_sizes = split_batch(targets, n_microbatches, "targets")
    if inputs is None:
        return [], labels, label_sizes
    if label_sizes != sizes:
        raise ArgumentError(
            f"inputs have {sum(sizes)} samples, targets {sum(label_sizes)}; give as many"
        )
    return parts, labels, sizes


def split_batch(
    batch: Batch, n_microbatches: int, name: str
) -> tuple[list[tuple[Tensor, ...]], list[int]]:
    """Return the micro-batches of a batch, whose sizes differ by one at most, and the sizes.

    Raises
    ------
    ArgumentError
        If it holds no tensors, tensors of different length, or too few samples.
    """
    tensors = batch if isinstance(batch, tuple) else (batch,)
    if not tensors or not all(isinstance(x, Tensor) and x.dim() > 0 for x in tensors):
        raise ArgumentError(
            f"{name} must be a tensor of samples or a tuple of them, got "
            f"{type(batch).__name__}"
            + (f" of {', '.join(map(_described, batch))}" if isinstance(batch, tuple) else "")
        )
    lengths = {len(x) for x in tensors}
    if len(lengths) > 1:
        raise ArgumentError(f"the tensors of {name} have {sorted(lengths)} samples; give as many")
    if min(lengths) < n_microbatches:
        raise ArgumentError(
            f"{name} have {min(lengths)} samples, too few for {n_microbatches} micro-batches; "
            "give a larger batch, or lower a schedule of fewer micro-batches"
        )
    parts = list(zip(*(x.tensor_split(n_microbatches) for x in tensors), strict=True))
    return parts, [len(part[0]) for part in parts]


def _described(value: object) -> str:
    return f"{value.dim()}-d tensor" if isinstance(value, Tensor) else type(value).__name__
