"""The key-value store of all processes: where it listens, and how processes connect to it.

Torch's store has no authentication, and listens on all interfaces of its machine. If rank 0 holds
it, and one interface is known to be enough, it gets a socket that listens on that one only.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from pipeexec.distributed.launch_environment import LaunchEnvironment
from pipesim.errors import ExecutionError

_LOOPBACK = "127.0.0.1"
_GLOO = "GLOO_SOCKET_IFNAME"
_PAUSE = 0.05  # s, between two attempts to connect


class UnreachableError(ExecutionError):
    """Nothing listened at the address of the store while this process tried to connect."""


class StoreConnection:
    """The watchdog's own connection to the store. Several threads use it, and it may hang.

    Attributes
    ----------
    store
        The store; called only by a thread that holds ``lock``. Its calls raise `RuntimeError` once
        the process that holds it has ended.
    lock
        Lets one thread at a time call the store.
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

    Parameters
    ----------
    launch
        Environment of this process.
    timeout
        Seconds that a call of the store may take.
    end
        Time of `time.monotonic` until which to try.

    Raises
    ------
    UnreachableError
        If nothing listens at the address.
    DistError
        If the port is in use, or the connection breaks.
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
