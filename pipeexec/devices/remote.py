"""`RemoteDevice`: a device of another process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NoReturn

import torch

from pipeexec.devices.cpu_streams import CpuStream
from pipeexec.devices.device import Device, Values
from pipeexec.devices.step_lock import StepLock
from pipeexec.devices.streams import Event, Stream


class RemoteDevice:
    """A device of another process: it has a name, and runs nothing in this process."""

    note = ""
    launch = 0.0

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank
        self.torch_device = torch.device("meta")
        self.closed = False
        self.step_lock = StepLock(self.has_thread)

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{self.name} is a device of rank {self.rank}")

    def stream(self, name: str, *, blocks: bool = False) -> Stream:
        """Raise: its streams are in another process."""
        self._refuse()

    def host(self) -> CpuStream:
        """Raise, as `stream` does."""
        self._refuse()

    def has_thread(self, thread: threading.Thread) -> bool:
        """Return False: its streams are in another process."""
        return False

    def mark(self) -> Event:
        """Raise, as `stream` does."""
        self._refuse()

    def rejoin(self, event: Event, values: Values = ()) -> None:
        """Raise, as `stream` does."""
        self._refuse()

    def wait_for_host(self, event: Event) -> None:
        """Do nothing."""

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing."""

    def carry(self, values: Values, target: Device) -> Values:
        """Raise, as `stream` does."""
        self._refuse()

    def await_link(self, values: Values) -> None:
        """Do nothing."""

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        """Raise, as `stream` does."""
        self._refuse()

    def from_host(self, data: torch.Tensor) -> torch.Tensor:
        """Raise, as `stream` does."""
        self._refuse()

    def synchronize(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing but note it."""
        self.closed = True

    abandon = close


def device_ranks(devices: Sequence[Device], own_rank: int) -> list[int]:
    """Return the rank of each device's process; ``own_rank`` is that of this process."""
    return [x.rank if isinstance(x, RemoteDevice) else own_rank for x in devices]
