"""The launcher's environment, and the key-value store of all processes: where it listens.

Torch's store has no authentication, and listens on all interfaces of its machine. If rank 0 holds
it, and one interface is known to be enough, it gets a socket that listens on that one only.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store, TCPStore

from pipesim.errors import ArgumentError, ExecutionError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ADVICE = "start the processes with torchrun --nproc-per-node 2 -m pipeexec run"
_MAX_PORT = 65535
#: More digits than any of these numbers has; Python refuses to convert very long ones.
_MAX_DIGITS = 18


class LaunchError(ArgumentError):
    """A missing or wrong environment variable of the launcher; ``variable`` is its name."""

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(f"{message}; {_ADVICE}")
        self.variable = variable


class LaunchEnvironment(NamedTuple):
    """Rank of this process and address of the store, as the launcher has set them."""

    rank: int
    n_ranks: int
    local_rank: int | None  # on its machine; None if not set
    n_local: int | None  # processes of its machine; None if not set
    host: str
    port: int
    is_agent_store: bool  # whether torchrun holds the store; otherwise rank 0 does
    attempt: int  # how often torchrun has restarted the processes

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """Read the environment variables of torchrun."""
        missing = [name for name in _NEEDED if not os.environ.get(name)]
        if missing:
            raise LaunchError(missing[0], f"{', '.join(missing)} not set in the environment")
        n_ranks = _count("WORLD_SIZE", 1)
        rank = _count("RANK", 0, n_ranks, "WORLD_SIZE")
        n_local = _count("LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in os.environ else None
        if n_local is not None and n_local > n_ranks:
            raise LaunchError(
                "LOCAL_WORLD_SIZE",
                f"LOCAL_WORLD_SIZE is {n_local}, more than WORLD_SIZE, which is {n_ranks}",
            )
        local_rank = None
        if "LOCAL_RANK" in os.environ:
            limit = "WORLD_SIZE" if n_local is None else "LOCAL_WORLD_SIZE"
            local_rank = _count("LOCAL_RANK", 0, n_local or n_ranks, limit)
        port = _count("MASTER_PORT", 1)
        if port > _MAX_PORT:
            raise LaunchError(
                "MASTER_PORT",
                f"MASTER_PORT is {port} in the environment; a port is at most {_MAX_PORT}",
            )
        attempt = "TORCHELASTIC_RESTART_COUNT"
        return cls(
            rank,
            n_ranks,
            local_rank,
            n_local,
            os.environ["MASTER_ADDR"],
            port,
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            _count(attempt, 0) if os.environ.get(attempt) else 0,
        )

    @property
    def address(self) -> str:
        """Address of the store, as text."""
        return f"{self.host}:{self.port}"

    @property
    def holder(self) -> int | None:
        """The rank that holds the store; None if it is the launcher."""
        return None if self.is_agent_store else 0

    @property
    def is_on_one_machine(self) -> bool:
        """Whether the launcher has started all processes on one machine."""
        return self.n_local == self.n_ranks

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.n_ranks}"


def _count(name: str, least: int, limit: int | None = None, limiter: str = "") -> int:
    """Return the whole number in an environment variable, below ``limit``."""
    text = os.environ[name]
    if not re.fullmatch(r"-?[0-9]+", text) or len(text) > _MAX_DIGITS:
        raise LaunchError(name, f"{name} is {text!r} in the environment, which is no whole number")
    value = int(text)
    if value < least:
        raise LaunchError(name, f"{name} is {value} in the environment; it is {least} at least")
    if limit is not None and value >= limit:
        raise LaunchError(
            name, f"{name} is {value} in the environment; it is below {limiter}, which is {limit}"
        )
    return value


_LOOPBACK = "127.0.0.1"
_GLOO = "GLOO_SOCKET_IFNAME"
_PAUSE = 0.05  # s, between two attempts to connect


class UnreachableError(ExecutionError):
    """Nothing listened at the address of the store while this process tried to connect."""


class StoreConnection:
    """The watchdog's own connection to the store. Several threads use it, and it may hang.

    Only a thread that holds ``lock`` calls ``store``. Its calls raise `RuntimeError` once the
    process that holds it has ended.
    """

    def __init__(self, store: Store) -> None:
        self.store: Any = store
        self.lock = threading.Lock()

    def abandon(self) -> None:
        """Replace a store that does not answer by one whose calls raise `RuntimeError`.

        The lock is replaced too: a thread that waits for the store holds the old one for ever.
        """
        self.store, self.lock = _SilentStore(), threading.Lock()


class _SilentStore:
    """Replacement of a store that does not answer."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the store does not answer")


def machine() -> str:
    """Return a name of this machine, equal in all processes that reach each other by loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def listening_address(launch: LaunchEnvironment) -> str:
    """Return the address on which rank 0 listens; an empty text for all interfaces.

    - Loopback, if the launcher places all processes on one machine, or the store's address is
      ``localhost``.
    - The store's address, if it is numeric.
    - All interfaces, if it is a name: other machines may resolve it to another address.
    """
    if launch.is_on_one_machine or launch.host == "localhost":
        return _LOOPBACK
    try:
        return str(ipaddress.ip_address(launch.host))
    except ValueError:
        return ""


def open_store(launch: LaunchEnvironment, timeout: float, end: float) -> Store:
    """Return a connection to the store; rank 0 makes the store first if the launcher has not.

    A call of the store may take ``timeout`` seconds. ``end`` is the time of `time.monotonic` until
    which to try. It raises `UnreachableError` if nothing listens at the address, and DistError if
    the port is in use, or the connection breaks.
    """
    is_master = launch.holder == launch.rank
    host = launch.host
    if launch.is_on_one_machine and not launch.is_agent_store:
        host = _LOOPBACK
    handle = None
    if is_master:
        handle = _listening(listening_address(launch), launch.port)
    else:
        _wait_until_reached(host, launch, end)
    return TCPStore(
        host,
        launch.port,
        launch.n_ranks,
        is_master,
        timedelta(seconds=timeout),
        wait_for_workers=False,  # the roll call names the ranks that are missing
        multi_tenant=True,
        master_listen_fd=handle,
    )


def _listening(address: str, port: int) -> int | None:
    """Return the handle of a socket that listens on one address.

    Return None if torch has to make the socket:

    - it listens on all interfaces;
    - the address belongs to no interface of this machine;
    - the port is in use, perhaps by another store of this process.
    """
    if not address:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(socket.SOMAXCONN)
            return listener.detach()  # the store closes it
    except OSError:
        return None


def _wait_until_reached(host: str, launch: LaunchEnvironment, end: float) -> None:
    """Block until something listens; torch itself would try for over twice its timeout."""
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((host, launch.port), timeout=max(left, _PAUSE)).close()
        except OSError as error:
            if left <= _PAUSE:
                raise UnreachableError(str(error.strerror or error)) from error
            time.sleep(_PAUSE)
        else:
            return


@contextmanager
def gloo_on_loopback(is_on_one_machine: bool) -> Iterator[None]:
    """Let process groups made in the block listen on loopback, unless the user chose otherwise.

    Gloo reads its interface from the environment only.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if not is_on_one_machine or loopback is None or _GLOO in os.environ:
        yield
        return
    os.environ[_GLOO] = loopback
    try:
        yield
    finally:
        os.environ.pop(_GLOO, None)
