"""Ranks in processes of their own, which run functions of the tests; started once for many.

``python ranks.py FOLDER`` is one of them: it reads lines of JSON, each of which names a function
that takes `pipeexec.distributed.Processes`, and leaves what it returns in the folder.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate

import torch
from forked import Forked

#: What a rank runs: takes the processes, and whatever JSON can hold; returns what
#: `torch.load` can read.
Case = Callable[Concatenate[Any, ...], Any]


#: Ports below those that Linux gives to connections, from 32768 on: so many for each worker.
_FIRST_PORT, _PORTS, _WORKERS = 20000, 1000, 12
_port_numbers = itertools.count(os.getpid())


def free_port() -> int:
    """Return a free port, which neither a connection nor another worker of these tests gets."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _WORKERS
    for number in _port_numbers:
        port = _FIRST_PORT + worker * _PORTS + number % _PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError  # the numbers have no end


def environment(rank: int, n_ranks: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun would give a rank, over loopback, on one core."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


@contextmanager
def running(commands: Sequence[Sequence[str]], folder: Path) -> Iterator[list[Forked]]:
    """Start a process a rank; at the end none is left. Each writes to ``RANK.log``."""
    ranks: list[Forked] = []
    port = free_port()
    try:
        for rank, command in enumerate(commands):
            variables = environment(rank, len(commands), port)
            ranks.append(Forked(command, variables, folder / f"{rank}.log"))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
            process.stdin.close()


def run_to_end(
    commands: Sequence[Sequence[str]], folder: Path, seconds: float = 60
) -> tuple[list[int | None], list[str]]:
    """Run a process a rank; return exit statuses, None where one was killed late, and outputs."""
    end = time.monotonic() + seconds
    with running(commands, folder) as ranks:
        while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
            time.sleep(0.01)
        statuses = [rank.poll() for rank in ranks]
    return statuses, [(folder / f"{rank}.log").read_text() for rank in range(len(commands))]


class Ranks:
    """Ranks that wait for functions to run; they start at the first.

    Parameters
    ----------
    n
        How many.
    folder
        Where they leave what they return and print.
    """

    def __init__(self, n: int, folder: Path) -> None:
        self.n, self.folder = n, folder
        self._running: Any = None
        self._processes: list[Forked] = []
        self._n_cases = 0
        self._timeout = 0.0  # of the processes

    def run(
        self, case: Case, *, timeout: float = 20.0, seconds: float = 60.0, **options: Any
    ) -> list[Any]:
        """Let every rank run a function; return what each returned.

        Ranks keep their `Processes` from case to case; they start anew where one failed, or
        ``timeout`` changed. Fails the test with what the ranks printed where one raises, dies or
        is late.
        """
        if timeout != self._timeout:
            self.close()
        if not self._processes:
            command = [__file__, str(self.folder), str(timeout)]
            for file in self.folder.glob("*.ready"):
                file.unlink()
            self._running = running([command] * self.n, self.folder)
            self._processes = self._running.__enter__()
            self._timeout = timeout
        number = self._n_cases
        self._n_cases += 1
        line = json.dumps([number, case.__module__, case.__qualname__, options])
        files = [self.folder / f"{number}.{rank}.pt" for rank in range(self.n)]
        try:
            for process in self._processes:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            self._wait_for(files, seconds)
        except (AssertionError, OSError) as error:
            raise AssertionError(f"{error}\n{self._give_up()}") from error
        results = [torch.load(file) for file in files]
        for file in files:
            file.unlink()
        if any(x["failed"] for x in results):
            self.close()
        errors = [f"rank {rank}: {x['error']}" for rank, x in enumerate(results) if "error" in x]
        assert not errors, "\n".join([*errors, self._logs()])
        return [x["value"] for x in results]

    def _wait_for(self, files: Sequence[Path], seconds: float) -> None:
        end = time.monotonic() + seconds
        while missing := [file.name for file in files if not file.exists()]:
            dead = [rank for rank, x in enumerate(self._processes) if x.poll() is not None]
            assert not dead, f"rank {dead} ended"
            assert time.monotonic() < end, f"{missing} not there after {seconds} s"
            time.sleep(2e-3)

    def _give_up(self) -> str:
        """End the ranks, of which the next case starts new ones; return what they printed."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)  # prints where each thread stands
        time.sleep(0.5)
        self.close()
        return self._logs()

    def _logs(self) -> str:
        """Return what the ranks printed."""
        logs = [self.folder / f"{rank}.log" for rank in range(self.n)]
        return "\n".join(f"rank {k}:\n{log.read_text()}" for k, log in enumerate(logs))

    def close(self) -> None:
        """End the ranks."""
        if self._running is not None:
            self._running.__exit__(None, None, None)
        self._running, self._processes = None, []


def meet(folder: Path) -> None:
    """Block until all ranks have loaded their libraries: on a loaded machine that takes long."""
    (folder / f"{os.environ['RANK']}.ready").touch()
    while len(list(folder.glob("*.ready"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def _serve(folder: Path, timeout: float) -> None:
    """Run the cases that come, and leave what they return, or the text of their error."""
    import faulthandler
    import traceback

    from empty_figures import empty_figures
    from few_messages import few_messages

    import pipeexec as px

    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    meet(folder)
    processes = px.join(timeout)
    for line in sys.stdin:
        number, module, name, options = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            with few_messages(), empty_figures():
                case = getattr(importlib.import_module(module), name)
                answer["value"] = case(processes, **options)
        except Exception:
            answer["error"] = traceback.format_exc()
        answer["failed"] = "error" in answer or processes.watch.failure is not None
        part = folder / f"{number}.{processes.rank}.part"
        torch.save(answer, part)
        part.rename(folder / f"{number}.{processes.rank}.pt")


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), float(sys.argv[2]))
