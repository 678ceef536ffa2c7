"""Python processes forked from one that has loaded the libraries, which takes seconds."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import pytest

_STARTING = threading.Lock()  # tests start processes from several threads
_SERVER = multiprocessing.get_context("forkserver")
# The optimizers of torch load its compiler; this module and `small_pipelines` load pytest and
# hypothesis.
_SERVER.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed", "pytest", "hypothesis", "pandas",
     "matplotlib.figure", "pipeexec.cli", "pipeexec.executor.pipeline", "pipeexec.cli.launch",
     "pipeexec.cli.measured_steps", "pipeexec.validation", "ipykernel.kernelapp", "before_forks"]
)  # fmt: skip


@contextmanager
def _server_settings() -> Iterator[None]:
    """Give the server, which may be started now, its environment."""
    with _STARTING, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # a process with one thread can be forked
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of `before_forks`
        yield


def start_server() -> str:
    """Start the server, and return its address. It ends with this process."""
    with _server_settings():
        forkserver.ensure_running()
    return str(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]


def use_server(address: str) -> None:
    """Fork from the server of another process, which must not end before this one."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    _, server._forkserver_alive_fd = os.pipe()  # forked processes get it; the server has another
    server.ensure_running = lambda: None


class Forked:
    """``python ...`` in a new session; as `subprocess.Popen`, as far as tests need it.

    Parameters
    ----------
    arguments
        Those of the interpreter: ``-m`` and a module, or a script; and what follows.
    environment
        All of its variables.
    log
        Gets what it prints.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        reader, writer = _SERVER.Pipe(duplex=False)
        self._process = _SERVER.Process(
            target=_become, args=(list(arguments), dict(environment), log, reader)
        )
        with _server_settings():
            self._process.start()  # and the server, before the first
        reader.close()
        self.pid: int = self._process.pid or 0
        self.stdin: IO[str] = os.fdopen(os.dup(writer.fileno()), "w")
        writer.close()

    def poll(self) -> int | None:
        """Return its status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its status."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _become(
    arguments: list[str], environment: dict[str, str], log: Path, reader: Connection
) -> None:
    """Become the requested interpreter."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as the environment says
    os.dup2(reader.fileno(), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    first, *rest = arguments
    try:
        if first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(first).parent))
            runpy.run_path(first, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def finalize(main: Callable[[], int], print_error: Callable[[], object]) -> None:
    """Run the main function of a forked script, and end as an interpreter does.

    Other forked processes exit without it: threads that outlive Python do not disturb them.
    """
    try:
        status = main()
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException as error:
        print_error()
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    ctypes.pythonapi.Py_Exit(ctypes.c_int(status))  # of ``sys.exit`` where nobody catches it


class _ForkedScript(Forked):
    """A script whose output is read as text."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        handle, name = tempfile.mkstemp(suffix=".log")
        os.close(handle)
        self._log = Path(name)
        super().__init__(command[1:], env, self._log)

    @property
    def returncode(self) -> int | None:
        """Its status, None while it runs."""
        return self.poll()

    def communicate(self) -> tuple[str, None]:
        """Wait for its end, and return what it printed."""
        self.wait()
        return self._log.read_text(), None


class _Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`, but for scripts that this interpreter would run."""

    def __new__(cls, args: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(args, list) and args[0] == sys.executable and args[1].endswith(".py"):
            return _ForkedScript(args, **options)
        return super().__new__(cls)


def fork_scripts() -> None:
    """Let `subprocess.Popen` fork ``python script.py`` from now on, in a process that is forked.

    Such a process knows the server's address, and would start one of its own nevertheless.
    """
    assert forkserver._forkserver._forkserver_address, "not forked"  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    subprocess.Popen = _Popen  # type: ignore[misc]
