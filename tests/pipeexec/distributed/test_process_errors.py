"""User mistakes in a pipeline of many processes: each process ends at once, and names the mistake.

Faults of machines (killed processes, hangs) are tested elsewhere.
"""

from __future__ import annotations

import gc
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_errors import TIMEOUT, assert_errors, errors_of, make
from ranks import Ranks
from small_pipelines import cut, data, dense, mse
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.cuda import CudaDevice
from pipeexec.distributed import Processes
from pipeexec.distributed.watchdog import Failure
from pipesim.errors import ArgumentError, ExecutionError, PipeError


class Untensor(nn.Module):
    """Returns no tensor."""

    def forward(self, x: Tensor) -> Any:
        return {"x": x}


class Picky(nn.Module):
    """Takes no zeros."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.any():
            raise ValueError("all zero")
        return x


class FailingStep(torch.optim.SGD):
    """Raises at once."""

    def step(self, closure: Any = None) -> Any:
        raise ValueError("no step")


def other_graph(processes: Processes) -> None:
    make(processes, ["gpipe", "1f1b"][processes.rank])


def other_options_of_the_graph(processes: Processes) -> None:
    make(processes, graph=ps.lower(ps.schedule("gpipe", 2, 4 + processes.rank)))


def other_seed(processes: Processes) -> None:
    torch.manual_seed(processes.rank)
    make(processes, stages=[nn.Tanh(), nn.Tanh()])


def other_reduction(processes: Processes) -> None:
    make(processes, loss_reduction=["mean", "sum"][processes.rank])


def other_optimizer(processes: Processes) -> None:
    make(processes, optimizer=FailingStep if processes.rank else None)


def other_weights(processes: Processes) -> None:
    stages = list(cut(dense(2), [1, 1]))
    if processes.rank:
        with torch.no_grad():
            stages[1][0][0].weight[3, 3] += 1e-6
    make(processes, "chimera", stages)


def too_many_devices(processes: Processes) -> None:
    make(processes, devices=["cpu", "cpu"])


def one_gpu(processes: Processes) -> None:
    """As on a machine with two GPUs, of which both processes name the second."""
    with pytest.MonkeyPatch.context() as patch:
        properties = [SimpleNamespace(uuid=f"c0ffee-{k}") for k in range(2)]
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
        make(processes, devices=["cuda:1"])


def no_such_device(processes: Processes) -> None:
    make(processes, devices=["cpu" if processes.rank else "abacus"])


def no_graph(processes: Processes) -> None:
    make(processes, graph=ps.schedule("gpipe", 2, 4) if processes.rank else None)


def stage_missing(processes: Processes) -> None:
    make(processes, stages=[None, nn.Linear(16, 16)])


def deadlock(processes: Processes) -> None:
    make(processes, graph=ps.lower(ps.schedule("1f1b", 2, 4), overlap=False))


def inputs_missing(processes: Processes) -> None:
    with make(processes) as subject:
        subject.step(None, data(8)[1])


def targets_missing(processes: Processes) -> None:
    with make(processes) as subject:
        subject.step(data(8)[0], None)


def too_few_samples(processes: Processes) -> None:
    with make(processes) as subject:
        subject.step(*data(3))


def no_tensor(processes: Processes) -> None:
    with make(processes, stages=[Untensor(), nn.Linear(16, 16)]) as subject:
        subject.step(*data(8))


def no_zeros(processes: Processes) -> None:
    with make(processes, stages=[Picky(), nn.Linear(16, 16)]) as subject:
        subject.step(*data(8))


def other_batch_later(processes: Processes) -> None:
    with make(processes) as subject:
        subject.step(*data(8))
        subject.step(*data(12))


def other_type_later(processes: Processes) -> None:
    stages = list(cut(dense(2), [1, 1]))
    with make(processes, stages=stages) as subject:
        subject.step(*data(8))
        if processes.rank == 0:
            stages[0].double()
        subject.step(data(8)[0].double(), data(8)[1])


def loss_of_many_elements(processes: Processes) -> None:
    with make(processes, loss_fn=lambda output, target: output - target) as subject:
        subject.step(*data(8))


def leaves_with_an_error(processes: Processes) -> None:
    with processes:
        if processes.rank:
            raise ValueError("of its own")
        processes.barrier()


#: What each rank's error must be.
REFUSED: dict[Callable[[Processes], None], tuple[str, str]] = {
    other_graph: (
        "ArgumentError: the task graph of rank 1 is .*checksum.*that of rank 0.*give every process",
    ) * 2,
    other_options_of_the_graph: ("ArgumentError: the task graph of rank 1",) * 2,
    other_seed: (r"ArgumentError: the seed \(call .* first\) of rank 1 is 1, that",) * 2,
    other_reduction: ("ArgumentError: loss_reduction of rank 1 is 'sum', that of rank 0 'mean'",)
    * 2,
    other_optimizer: ("ArgumentError: whether there is an optimizer of rank 1 is True",) * 2,
    other_weights: ("ArgumentError: stage 1 begins with different weights",) * 2,
    too_many_devices: (r"ArgumentError: the graph has 2 devices, got 4: .*'rank 1: cpu:0'",
                       r"ArgumentError: the graph has 2 devices, got 4: .*'rank 0: cpu:0'"),
    one_gpu: (r"ArgumentError: cuda:1 of rank 0 and cuda:1 of rank 1 are the same GPU \(UUID "
              r"c0ffee-1\).*NCCL refuses .*LOCAL_RANK.*slices\(",) * 2,
    no_such_device: ("ArgumentError: 'abacus' is no device",
                     "PeerError: rank 0 stopped: ArgumentError: 'abacus' is no device"),
    no_graph: ("PeerError: rank 1 stopped: ArgumentError: Pipeline runs a TaskGraph",
               "ArgumentError: Pipeline runs a TaskGraph, got Schedule"),
    stage_missing: ("ArgumentError: stage 0 is on device 0 of this process, but its module is None",
                    "PeerError: rank 0 stopped: ArgumentError: stage 0 is on device 0"),
    deadlock: ("DeadlockError: .*deadlocks: 2 streams wait for each other",) * 2,
    inputs_missing: ("ArgumentError: inputs are None, but this process has the first stage",
                     "PeerError: rank 0 stopped: ArgumentError: inputs are None"),
    targets_missing: ("PeerError: rank 1 stopped: ArgumentError: targets are None",
                      "ArgumentError: targets are None, but this process has the last stage"),
    # Each process checks its batch; the slower one may first learn of the other's error.
    too_few_samples: ("(PeerError: rank 1 stopped: )?ArgumentError: inputs have 3 samples, too",
                      "(PeerError: rank 0 stopped: )?ArgumentError: inputs have 3 samples, too"),
    no_tensor: ("ExecutionError: the output of stage 0 must be a tensor or a tuple .* got dict",
                "PeerError: rank 0 stopped: ExecutionError: the output of stage 0 must be"),
    no_zeros: (r"ExecutionError: stage 0 failed on zeros of float32 \[2, 16\].*all zero",
               "PeerError: rank 0 stopped: ExecutionError: stage 0 failed on zeros"),
    other_batch_later: (
        r"StageError: rank 0, step 1: 0SEND_F0 failed \(device 0, stage 0, micro-batch 0\): "
        r"ExecutionError: the output of 0SEND_F0 is float32 \[3, 16\], but float32 \[2, 16\] was",
        r"PeerError: rank 0, step 1: 0SEND_F0 failed .*meanwhile rank 1 in step 1: "
        r"device 1 before 1F0 "
        r"\(stage 1, micro-batch 0\), waiting for 1RECV_F0 from device 0",
    ),
    other_type_later: (
        r"StageError: rank 0, step 1: 0SEND_F0 failed .*0SEND_F0 is float64 \[2, 16\], but float32",
        "PeerError: rank 0, step 1: 0SEND_F0 failed",
    ),
    loss_of_many_elements: (
        r"PeerError: rank 1, step 0: 1F0 failed .*\n?.*"
        r"meanwhile rank 0 in step 0: device 0 before 0B",
        r"StageError: rank 1, step 0: 1F0 failed \(device 1, stage 1, micro-batch 0\): "
        r"ExecutionError: the loss must be a tensor with one element, got \(2, 16\)",
    ),
    leaves_with_an_error: ("PeerError: rank 1 stopped: ValueError: of its own",
                           "ValueError: of its own"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_every_process_says_what_is_wrong_at_once(
    case: Callable[[Processes], None], two_ranks: Ranks
) -> None:
    messages = errors_of(case, two_ranks)
    assert_errors(messages, REFUSED[case])
    assert not all(message.startswith("PeerError") for message, _ in messages)


def closed_after_a_failure(processes: Processes) -> list[str]:
    """Fail in an optimizer step, then try again."""
    messages = []
    with make(processes, optimizer=FailingStep) as subject:
        for _ in range(2):
            try:
                subject.step(*data(8))
            except ExecutionError as error:
                messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_a_failed_step_closes_the_pipeline_in_every_process(two_ranks: Ranks) -> None:
    """Even where nothing else was under way."""
    for first, second in two_ranks.run(closed_after_a_failure, timeout=TIMEOUT):
        assert re.match("(Stage|Peer)Error: rank [01], step 0: [01]STEP failed", first), first
        assert second.startswith("ExecutionError: the pipeline is closed"), second


def late(processes: Processes, call: str) -> str:
    """Let rank 0 make a call that rank 1 does not make."""
    message = ""
    with make(processes) as subject:
        result = subject.step(*data(8))
        calls = {
            "gather": lambda: subject.gather(result),
            "align": subject.align,
            "with_graph": lambda: subject.with_graph(subject.graph),
        }
        if processes.rank == 0:
            try:
                calls[call]()
            except ExecutionError as error:
                message = f"{type(error).__name__}: {error}"
        else:
            time.sleep(2.0)
    processes.watch.post(Failure("raised", -1, "the end of this test"))
    return message


@pytest.mark.parametrize("call", ["gather", "align", "with_graph"])
def test_a_call_that_one_process_does_not_make(call: str, two_ranks: Ranks) -> None:
    message, _ = two_ranks.run(late, timeout=1.0, call=call)
    assert re.match("PeerError: rank 0 waited 1 s for rank 1, which did not answer; every", message)


def test_the_parts_of_a_loss_are_elsewhere(two_ranks: Ranks) -> None:
    """A result that was not gathered has no loss but where the last stage is."""
    first, second = two_ranks.run(loss_where_it_is)
    assert first.startswith("the loss is computed in another process; every process can have it")
    assert second == ""


def loss_where_it_is(processes: Processes) -> str:
    with make(processes) as subject:
        result = subject.step(*data(8))
        try:
            return "" if result.loss > 0 else "no loss"
        except ExecutionError as error:
            return str(error)


# Calls of the processes


def odd_calls(processes: Processes) -> list[str]:
    """Return the errors of calls that are wrong in every process."""
    messages = [
        error_of(call)
        for call in (
            lambda: processes.gather("text"),  # type: ignore[arg-type]
            lambda: processes.share(object()),
            lambda: processes.total(["x"]),  # type: ignore[list-item]
            lambda: processes.total([1.0] * (1 + processes.rank)),
            lambda: processes.group([0, 2]),
            lambda: processes.group([1, 1]),
            lambda: px.join(5.0 + processes.rank),
        )
    ]
    with px.join(5) as again:
        thread = threading.Thread(target=lambda: messages.append(error_of(again.barrier)))
        if again.rank == 0:
            thread.start()
            while not again._calling.locked():
                time.sleep(1e-3)
            messages.append(error_of(again.barrier))
        processes.barrier()  # of others than the thread's
        if again.rank:
            again.barrier()
        else:
            thread.join()
    again.close()
    messages += [error_of(again.barrier), error_of(lambda: make(again))]
    processes.barrier()
    return messages


def error_of(call: Callable[[], object]) -> str:
    """Return the error of a call, or "" without one."""
    try:
        call()
    except PipeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_odd_calls(two_ranks: Ranks) -> None:
    """Of wrong types, in a second thread, twice, and after the end: an error, at once."""
    for rank, messages in enumerate(two_ranks.run(odd_calls)):
        several = ["", "ExecutionError: another thread waits for the other processes"]
        expected = [
            "ArgumentTypeError: processes exchange bytes, got str",
            "ArgumentError: processes share what JSON can hold, got object",
            "ArgumentTypeError: values must be numbers, got ['x']",
            "ArgumentError: processes give 2 different numbers of values: 1 in rank 0, 2 in rank 1",
            "ArgumentError: ranks of a group must be different ones below 2, got [0, 2]",
            "ArgumentError: ranks of a group must be different ones below 2, got [1, 1]",
            "ArgumentError: timeout differs: 5 in rank 0, 6 in rank 1; give every process the same",
            *(several[::-1] if rank == 0 else []),
            "ExecutionError: these processes were left by close(); join again",
            "ExecutionError: these processes were left by close(); join again",
        ]
        assert len(messages) == len(expected)
        for text, start in zip(messages, expected, strict=True):
            assert text.startswith(start), text
            assert bool(text) == bool(start), text


def in_a_forked_child(processes: Processes) -> list[str]:
    """Return the errors of calls in a child, which shares the connections."""
    reader, writer = os.pipe()
    subject = make(processes)
    if (child := os.fork()) == 0:
        try:
            with processes:
                messages = [
                    error_of(call)
                    for call in (
                        processes.barrier,
                        processes.close,
                        lambda: processes.group([0]),
                        lambda: subject.step(*data(8)),
                        lambda: px.join(1),
                    )
                ]
            os.write(writer, json.dumps(messages).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as file:
        messages = json.load(file)
    subject.step(*data(8))
    return messages


def test_a_forked_child(two_ranks: Ranks) -> None:
    """The child gets errors at once, and its parent trains on."""
    for messages in two_ranks.run(in_a_forked_child):
        assert len(messages) == 5
        for text in messages:
            assert re.match(r"ExecutionError: .*was forked from .*process \d+", text)


@pytest.mark.parametrize("timeout", [0, -1, "soon", float("nan"), True])
def test_pipelines_with_a_wrong_timeout(timeout: Any) -> None:
    stages, graph = cut(dense(1), [1]), ps.lower(ps.schedule("gpipe", 1, 2))
    with pytest.raises(ArgumentError, match="timeout must be a positive number of seconds, or No"):
        px.Pipeline(stages, graph, ["cpu"], mse, timeout=timeout)


def apart(processes: Processes, uuids: list[list[str]]) -> list[str]:
    """Return the names of all devices, of GPUs with these UUIDs in each process."""
    own = uuids[processes.rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeexec.distributed.processes._uuid_of", lambda device: own[device.index])
        devices = [CudaDevice(torch.device("cuda", k)) for k in range(len(own))]
        return [device.name for device in processes.spread(devices)]


@pytest.mark.parametrize("uuids", [[["a"], ["b"]], [["a", "a"], ["b", "b"]], [[""], [""]]])
def test_processes_with_gpus_of_their_own(uuids: list[list[str]], two_ranks: Ranks) -> None:
    """Several devices of a process may be one GPU; what has no UUID cannot be told apart."""
    n = len(uuids[0])
    for rank, names in enumerate(two_ranks.run(apart, timeout=TIMEOUT, uuids=uuids)):
        assert [name.startswith("rank ") for name in names] == [rank == 1] * n + [rank == 0] * n


class Third(nn.Linear):
    """Raises in its third forward."""

    left = 3

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("no")
        return super().forward(x)


def freed(processes: Processes) -> str:
    """Return whether a pipeline whose step failed is freed without the cycle collector."""
    subject = make(processes, stages=[Third(16, 16), nn.Linear(16, 16)])
    reference = weakref.ref(subject)
    gc.collect()
    gc.disable()
    try:
        subject.step(*data(8))
    except PipeError as error:
        name = type(error).__name__
    else:
        return "no error"
    finally:
        del subject
        gc.enable()
    return f"{name}, {'freed' if reference() is None else 'held'}"


def test_a_pipeline_that_failed_is_freed(two_ranks: Ranks) -> None:
    """In every process, once the error was dropped.

    Stages stay where a thread still waits for a message of the step.
    """
    results = two_ranks.run(freed, timeout=TIMEOUT)
    assert results == ["StageError, freed", "PeerError, freed"]
