"""How processes join: addresses, the environment of torchrun, timeouts, and missing ranks."""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, environment, free_port, run_to_end

import pipeexec as px
from pipeexec.distributed import Processes
from pipeexec.distributed.store import LaunchEnvironment, listening_address
from pipesim.errors import ArgumentError, ExecutionError


def listening(_: Processes) -> list[str]:
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


def printed_by(text: str, folder: Any) -> str:
    """Return what a script printed, run to its good end by one process."""
    script = folder / "alone.py"
    script.write_text(text)
    statuses, (output,) = run_to_end([[str(script)]], folder)
    assert statuses == [0], output
    return output


@pytest.mark.slow
def test_a_lone_process_joins_itself(tmp_path: Any) -> None:
    """One process is a pipeline too, which sends no messages."""
    output = printed_by(
        "import pipeexec as px\n"
        "with px.join(5) as processes:\n"
        "    processes.clock.sample()\n"
        "    print(processes.total([1.5, 2.0]), processes.share('x'), processes)\n",
        tmp_path,
    )
    assert "[1.5, 2.0] ['x'] <rank 0 of 1 processes>" in output


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_holder_of_the_store_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others name it, in time; a program at its port that is no store is told from it."""
    port = free_port()
    for name, value in environment(1, 3, port).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(ExecutionError, match=r"rank 1 waited 0.5 s for rank 0, which holds the"):
        px.join(0.5)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        with pytest.raises(ExecutionError, match=rf":{port}: the program that listens there has n"):
            px.join(0.5)
    assert time.monotonic() - began < 2 * (0.5 + 5)


@pytest.mark.slow
def test_a_rank_that_does_not_come(tmp_path: Any) -> None:
    """The first says so, after its timeout."""
    script = tmp_path / "early.py"
    script.write_text(
        "import os, sys\nif os.environ['RANK'] == '0':\n    import pipeexec as px\n    px.join(1)\n"
    )
    statuses, (log, _) = run_to_end([[str(script)]] * 2, tmp_path)
    assert statuses == [1, 0], log
    message = "Error: rank 0 waited 1 s for rank 1 of 2, which did not answer; there was rank 0 (pr"
    assert message in log, log
    assert "check that every process is started" in log
