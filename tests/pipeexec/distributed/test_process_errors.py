"""What users get wrong in a pipeline of many processes: every process ends, at once, and says why.

Faults of machines (killed processes, hangs) are tested elsewhere.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_errors import TIMEOUT, assert_errors, ended, make
from ranks import Ranks, environment, free_port, run_to_end
from small_pipelines import cut, data, dense, mse
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.cuda import CudaDevice
from pipeexec.distributed.failure import Failure
from pipeexec.distributed.launch_environment import LaunchEnvironment
from pipeexec.distributed.roll_call import roll_call
from pipeexec.distributed.store import listening_address
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


def other_graph(processes: px.Processes) -> None:
    make(processes, ["gpipe", "1f1b"][processes.rank])


def other_options_of_the_graph(processes: px.Processes) -> None:
    make(processes, graph=ps.lower(ps.schedule("gpipe", 2, 4 + processes.rank)))


def other_seed(processes: px.Processes) -> None:
    torch.manual_seed(processes.rank)
    make(processes, stages=[nn.Tanh(), nn.Tanh()])


def other_reduction(processes: px.Processes) -> None:
    make(processes, loss_reduction=["mean", "sum"][processes.rank])


def other_optimizer(processes: px.Processes) -> None:
    make(processes, optimizer=FailingStep if processes.rank else None)


def other_weights(processes: px.Processes) -> None:
    stages = list(cut(dense(2), [1, 1]))
    if processes.rank:
        with torch.no_grad():
            stages[1][0][0].weight[3, 3] += 1e-6
    make(processes, "chimera", stages)


def too_many_devices(processes: px.Processes) -> None:
    make(processes, devices=["cpu", "cpu"])


def one_gpu(processes: px.Processes) -> None:
    """As on a machine with two GPUs, of which both processes name the second."""
    with pytest.MonkeyPatch.context() as patch:
        found = [SimpleNamespace(uuid=f"c0ffee-{k}") for k in range(2)]
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: found[device.index])
        make(processes, devices=["cuda:1"])


def no_such_device(processes: px.Processes) -> None:
    make(processes, devices=["cpu" if processes.rank else "abacus"])


def no_graph(processes: px.Processes) -> None:
    make(processes, graph=ps.schedule("gpipe", 2, 4) if processes.rank else None)


def stage_missing(processes: px.Processes) -> None:
    make(processes, stages=[None, nn.Linear(16, 16)])


def deadlock(processes: px.Processes) -> None:
    make(processes, graph=ps.lower(ps.schedule("1f1b", 2, 4), overlap=False))


def inputs_missing(processes: px.Processes) -> None:
    with make(processes) as subject:
        subject.step(None, data(8)[1])


def targets_missing(processes: px.Processes) -> None:
    with make(processes) as subject:
        subject.step(data(8)[0], None)


def too_few_samples(processes: px.Processes) -> None:
    with make(processes) as subject:
        subject.step(*data(3))


def no_tensor(processes: px.Processes) -> None:
    with make(processes, stages=[Untensor(), nn.Linear(16, 16)]) as subject:
        subject.step(*data(8))


def no_zeros(processes: px.Processes) -> None:
    with make(processes, stages=[Picky(), nn.Linear(16, 16)]) as subject:
        subject.step(*data(8))


def other_batch_later(processes: px.Processes) -> None:
    with make(processes) as subject:
        subject.step(*data(8))
        subject.step(*data(12))


def other_type_later(processes: px.Processes) -> None:
    stages = list(cut(dense(2), [1, 1]))
    with make(processes, stages=stages) as subject:
        subject.step(*data(8))
        if processes.rank == 0:
            stages[0].double()
        subject.step(data(8)[0].double(), data(8)[1])


def loss_of_many_elements(processes: px.Processes) -> None:
    with make(processes, loss_fn=lambda output, target: output - target) as subject:
        subject.step(*data(8))


def leaves_with_an_error(processes: px.Processes) -> None:
    with processes:
        if processes.rank:
            raise ValueError("of its own")
        processes.barrier()


#: What each rank's error must be.
REFUSED: dict[Callable[[px.Processes], None], tuple[str, str]] = {
    other_graph: (
        "ArgumentError: the task graph of rank 1 is .*checksum.*that of rank 0.*give every process",
    ) * 2,
    other_options_of_the_graph: ("ArgumentError: the task graph of rank 1",) * 2,
    other_seed: (r"ArgumentError: the seed \(call .* first\) of rank 1 is 1, that",) * 2,
    other_reduction: ("ArgumentError: loss_reduction of rank 1 is 'sum', that of rank 0 'mean'",)
    * 2,
    other_optimizer: ("ArgumentError: whether there is an optimizer of rank 1 is True",) * 2,
    other_weights: ("ArgumentError: stage 1 begins with other weights",) * 2,
    too_many_devices: (r"ArgumentError: the graph has 2 devices, got 4: .*'rank 1: cpu:0'",
                       r"ArgumentError: the graph has 2 devices, got 4: .*'rank 0: cpu:0'"),
    one_gpu: (r"ArgumentError: cuda:1 of rank 0 and cuda:1 of rank 1 are the same GPU \(UUID "
              r"c0ffee-1\).*NCCL refuses .*LOCAL_RANK.*slices\(",) * 2,
    no_such_device: ("ArgumentError: 'abacus' is no device",
                     "PeerError: rank 0 stopped: ArgumentError: 'abacus' is no device"),
    no_graph: ("PeerError: rank 1 stopped: ArgumentError: Pipeline runs a TaskGraph",
               "ArgumentError: Pipeline runs a TaskGraph, got Schedule"),
    stage_missing: ("ArgumentError: stage 0 is on device 0, which is of this process, but None is",
                    "PeerError: rank 0 stopped: ArgumentError: stage 0 is on device 0"),
    deadlock: ("DeadlockError: .*deadlocks: 2 streams wait for each other",) * 2,
    inputs_missing: ("ArgumentError: inputs are None, but this process has the first stage",
                     "PeerError: rank 0 stopped: ArgumentError: inputs are None"),
    targets_missing: ("PeerError: rank 1 stopped: ArgumentError: targets are None",
                      "ArgumentError: targets are None, but this process has the last stage"),
    too_few_samples: ("ArgumentError: inputs have 3 samples, too few for 4",
                      "ArgumentError: inputs have 3 samples, too few for 4"),
    no_tensor: ("ExecutionError: the output of stage 0 must be a tensor or a tuple .* got dict",
                "PeerError: rank 0 stopped: ExecutionError: the output of stage 0 must be"),
    no_zeros: (r"ExecutionError: stage 0 failed on zeros of float32 \[2, 16\].*all zero",
               "PeerError: rank 0 stopped: ExecutionError: stage 0 failed on zeros"),
    other_batch_later: (
        r"StageError: rank 0, step 1: 0SEND_F0 failed \(device 0, stage 0, micro-batch 0\): "
        r"ExecutionError: what 0SEND_F0 sends is float32 \[3, 16\], but float32 \[2, 16\] was",
        r"PeerError: rank 0, step 1: 0SEND_F0 failed .*meanwhile rank 1 in step 1: "
        r"device 1 before 1F0 "
        r"\(stage 1, micro-batch 0\), waiting for 1RECV_F0 from device 0",
    ),
    other_type_later: (
        r"StageError: rank 0, step 1: 0SEND_F0 failed .*sends is float64 \[2, 16\], but float32",
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


def refused(processes: px.Processes, name: str) -> tuple[str, float]:
    """Return the error that a case of this file raises, and after how long."""
    return ended(globals()[name], processes)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_every_process_says_what_is_wrong_at_once(
    case: Callable[[px.Processes], None], two_ranks: Ranks
) -> None:
    found = two_ranks.run(refused, timeout=TIMEOUT, name=case.__name__)
    assert_errors(found, REFUSED[case])


def closed_after_a_failure(processes: px.Processes) -> list[str]:
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


def late(processes: px.Processes, call: str) -> str:
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
    assert re.match("PeerError: rank 0 waited 1 s in vain for rank 1; every process", message)


def test_the_parts_of_a_loss_are_elsewhere(two_ranks: Ranks) -> None:
    """A result that was not gathered has no loss but where the last stage is."""
    first, second = two_ranks.run(loss_where_it_is)
    assert first.startswith("the loss is computed in another process; every process can have it")
    assert second == ""


def loss_where_it_is(processes: px.Processes) -> str:
    with make(processes) as subject:
        result = subject.step(*data(8))
        try:
            return "" if result.loss > 0 else "no loss"
        except ExecutionError as error:
            return str(error)


# Calls of the processes


def odd_calls(processes: px.Processes) -> list[str]:
    """Return the errors of calls that are wrong in every process."""
    said = [
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
        thread = threading.Thread(target=lambda: said.append(error_of(again.barrier)))
        if again.rank == 0:
            thread.start()
            while not again._calling.locked():
                time.sleep(1e-3)
            said.append(error_of(again.barrier))
        processes.barrier()  # of others than the thread's
        if again.rank:
            again.barrier()
        else:
            thread.join()
    again.close()
    said += [error_of(again.barrier), error_of(lambda: make(again))]
    processes.barrier()
    return said


def error_of(call: Callable[[], object]) -> str:
    """Return the error of a call, "" where there is none."""
    try:
        call()
    except PipeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_odd_calls(two_ranks: Ranks) -> None:
    """Of wrong types, in a second thread, twice, and after the end: an error, at once."""
    for rank, said in enumerate(two_ranks.run(odd_calls)):
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
        assert len(said) == len(expected)
        for text, start in zip(said, expected, strict=True):
            assert text.startswith(start), text
            assert bool(text) == bool(start), text


def in_a_forked_child(processes: px.Processes) -> list[str]:
    """Return the errors of calls in a child, which shares the connections."""
    reader, writer = os.pipe()
    subject = make(processes)
    if (child := os.fork()) == 0:
        try:
            with processes:
                said = [
                    error_of(call)
                    for call in (
                        processes.barrier,
                        processes.close,
                        lambda: processes.group([0]),
                        lambda: subject.step(*data(8)),
                        lambda: px.join(1),
                    )
                ]
            os.write(writer, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as file:
        said = json.load(file)
    subject.step(*data(8))
    return said


def test_a_forked_child(two_ranks: Ranks) -> None:
    """The child is refused, at once, and its parent goes on."""
    for said in two_ranks.run(in_a_forked_child):
        assert len(said) == 5
        for text in said:
            assert re.match(r"ExecutionError: .*was forked from .*process \d+", text)


def listening(_: px.Processes) -> list[str]:
    """Return the addresses on which this process listens, as the kernel writes them."""
    own = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    rows = [
        row.split()
        for family in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{family}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def test_processes_of_one_machine_listen_on_loopback(two_ranks: Ranks) -> None:
    """Torch's store, which has no authentication, would listen on all interfaces."""
    everyone = two_ranks.run(listening)
    assert all(everyone)
    for address in itertools.chain(*everyone):
        assert address.startswith("0100007F:"), address


@pytest.mark.parametrize(
    ("host", "n_local", "address"),
    [
        ("localhost", None, "127.0.0.1"),
        ("127.0.0.5", None, "127.0.0.5"),
        ("::1", None, "::1"),
        ("192.0.2.9", 2, "127.0.0.1"),
        ("node1", 2, "127.0.0.1"),
        ("192.0.2.9", 1, "192.0.2.9"),
        ("192.0.2.9", None, "192.0.2.9"),
        ("node1", None, ""),  # all: others may know it by another address
    ],
)
def test_where_the_store_listens(host: str, n_local: int | None, address: str) -> None:
    launch = LaunchEnvironment(0, 2, None, n_local, host, 29500, is_agent_store=False, attempt=0)
    assert listening_address(launch) == address


# Joining


@pytest.fixture
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what torchrun sets."""
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_launched")
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_join_needs_the_environment_of_torchrun(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(ArgumentError, match=f"{name} not set in the environment; .*torchrun"):
        px.join()


@pytest.mark.usefixtures("_launched")
@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "first"), ("WORLD_SIZE", "two"), ("LOCAL_RANK", "x"), ("LOCAL_WORLD_SIZE", "x"),
     ("MASTER_PORT", "http"), ("RANK", "2"), ("RANK", "-1"), ("LOCAL_RANK", "-1"),
     ("RANK", "1.0"), ("RANK", "\u0661"), ("RANK", " 1"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-2"),
     ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "3"),
     ("MASTER_PORT", "0"), ("MASTER_PORT", "65536"), ("MASTER_PORT", "9" * 5000),
     ("TORCHELASTIC_RESTART_COUNT", "x")],
)  # fmt: skip
def test_join_in_a_wrong_environment(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=re.escape(value[:99])) as caught:
        px.join(timeout=1.0)
    assert str(caught.value).startswith(f"{name} is "), caught.value


@pytest.mark.parametrize("timeout", [0, -1, "soon", None, float("nan"), float("inf"), True])
def test_join_with_a_wrong_timeout(timeout: Any) -> None:
    with pytest.raises(ArgumentError, match="timeout must be a positive number of seconds, got"):
        px.join(timeout)


@pytest.mark.parametrize("timeout", [0, -1, "soon", float("nan"), True])
def test_pipelines_with_a_wrong_timeout(timeout: Any) -> None:
    stages, graph = cut(dense(1), [1]), ps.lower(ps.schedule("gpipe", 1, 2))
    with pytest.raises(ArgumentError, match="timeout must be a positive number of seconds, or No"):
        px.Pipeline(stages, graph, ["cpu"], mse, timeout=timeout)


def printed_by(text: str, folder: Any) -> str:
    """Return what a script printed, run to its good end by one process."""
    script = folder / "alone.py"
    script.write_text(text)
    statuses, (output,) = run_to_end([[str(script)]], folder)
    assert statuses == [0], output
    return output


def test_a_lone_process_joins_itself(tmp_path: Any) -> None:
    """One process is a pipeline too, with messages to nobody."""
    output = printed_by(
        "import pipeexec as px\n"
        "with px.join(5) as processes:\n"
        "    processes.clock.sample()\n"
        "    print(processes.total([1.5, 2.0]), processes.share('x'), processes)\n",
        tmp_path,
    )
    assert "[1.5, 2.0] ['x'] <rank 0 of 1 processes>" in output


def test_no_thread_is_left_with_tensors(tmp_path: Any) -> None:
    """Threads of process groups end before Python does, of embeddings that are still there too."""
    output = printed_by(
        "import atexit, pathlib\n"
        "def of_gloo():\n"
        "    names = [p.read_text() for p in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "    return sum('gloo_runloop' in name for name in names)\n"
        "atexit.register(lambda: print(before - of_gloo(), 'of', before, 'ended'))\n"
        "import torch, pipeexec as px\n"
        "from pipesim.errors import ArgumentError\n"
        "with px.join(5) as processes:\n"
        "    embedding = px.ShardedEmbedding(8, 2, processes)\n"
        "    embedding(torch.arange(4)).sum().backward()\n"
        "    before = of_gloo()\n"
        "try:\n"
        "    processes.group([0], key='another')\n"
        "except ArgumentError as error:\n"
        "    print(error)\n",
        tmp_path,
    )
    assert "these processes were left by close(); join again" in output
    if "0 of 0 ended" in output:
        pytest.skip("this torch does not name gloo's threads; 2.11 does")
    # The clock's group has no tensors: it is there as long as the processes are.
    assert "4 of 6 ended" in output


def test_the_holder_of_the_store_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others name it, in time; a program at its port that is no store is told from it."""
    port = free_port()
    for name, value in environment(1, 3, port).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(ExecutionError, match=r"rank 1 waited 0.5 s in vain for rank 0, which hol"):
        px.join(0.5)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        with pytest.raises(ExecutionError, match=rf":{port}: the program that listens there has n"):
            px.join(0.5)
    assert time.monotonic() - began < 2 * (0.5 + 5)


def test_a_roll_call() -> None:
    """Who is missing, who comes too late, and what does not suit: each is named."""
    store, first = torch.distributed.HashStore(), LaunchEnvironment(0, 3, 0, 3, "there", 5, True, 0)
    missing = r"rank 0 waited 2 s in vain for rank 1, 2 of 3; there was rank 0 \(process "
    with pytest.raises(ExecutionError, match=missing):
        roll_call(store, first, 2.0, time.monotonic())
    late = "in vain for rank 1, 2 of 3; rank 1 came later; there was rank 0 "
    with pytest.raises(ExecutionError, match=late):
        roll_call(store, first._replace(rank=1), 2.0, time.monotonic() + 9)
    with pytest.raises(ArgumentError, match=r"two processes have RANK 0: process .* and rank 0 "):
        roll_call(store, first, 3.0, time.monotonic() + 9)
    other = "WORLD_SIZE differs: 3 in rank 0, 3 in rank 1, 4 in rank 2; give every process the same"
    with pytest.raises(ArgumentError, match=other):
        roll_call(store, first._replace(rank=2, n_ranks=4), 2.0, time.monotonic() + 9)


def test_a_rank_that_does_not_come(tmp_path: Any) -> None:
    """The first says so, after its timeout."""
    script = tmp_path / "early.py"
    script.write_text(
        "import os, sys\nif os.environ['RANK'] == '0':\n    import pipeexec as px\n    px.join(1)\n"
    )
    statuses, (log, _) = run_to_end([[str(script)]] * 2, tmp_path)
    assert statuses == [1, 0], log
    assert "Error: rank 0 waited 1 s in vain for rank 1 of 2; there was rank 0 (process " in log, (
        log
    )
    assert "check that every process is started" in log


def apart(processes: px.Processes, uuids: list[list[str]]) -> list[str]:
    """Return the names of all devices, of GPUs with these UUIDs in each process."""
    own = uuids[processes.rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeexec.distributed.processes.uuid_of", lambda device: own[device.index])
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


def freed(processes: px.Processes) -> str:
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
    found = two_ranks.run(freed, timeout=TIMEOUT)
    assert found == ["StageError, freed", "PeerError, freed"]
