"""`Peers`: the processes that share an embedding, as one of them sees the group."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeexec.devices.running_clock import RunningTimer
from pipeexec.distributed.channels import LostConnection
from pipeexec.distributed.flight_recorder import FlightRecorder
from pipeexec.distributed.processes import Processes
from pipesim.errors import ArgumentError, ArgumentTypeError, PeerError, PipeError

#: Time (s) within which all processes must make the same call.
_AGREE_SECONDS = 120.0
#: Keys of the store with the error of processes whose groups differ.
_GROUP_ERROR = "pipeexec/group_error"


class Peers:
    """A group of processes that exchange tensors, all with all.

    Parameters
    ----------
    group
        A process group of torch.distributed, or `Processes`. None: the default group, or this
        process alone if torch.distributed is not initialised.

    Attributes
    ----------
    rank, n
        Rank of this process in the group, and number of processes.
    ranks
        Ranks of the processes in the default group.
    """

    def __init__(self, group: dist.ProcessGroup | Processes | None) -> None:
        self._processes = group if isinstance(group, Processes) else None
        self._recorder: FlightRecorder | None = None
        self._group = group
        self.rank, self.n, self.ranks = 0, 1, [0]
        if (process_group := self.group) is not None:
            self.rank, self.n = process_group.rank(), process_group.size()
            self.ranks = dist.get_process_group_ranks(process_group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for this process alone. Its maker may destroy it."""
        return _process_group(self._group)

    def __deepcopy__(self, memo: object) -> Peers:
        """Return the same object: copies of a module share it."""
        return self

    def agree(self, settings: dict[str, Any] | PipeError) -> int:
        """Check that all processes have the same settings; return a random number that all share.

        A process that has an error instead gives that, and raises it after the others know.
        """
        seed = int(torch.randint(1 << 31, ()))
        if isinstance(settings, PipeError):
            self.share([None, str(settings), 0])
            raise settings
        everyone = self.share([settings, "", seed])
        for rank, (_, error, _) in zip(self.ranks, everyone, strict=True):
            if error:
                raise PeerError(f"rank {rank} has no embedding: {error}")
        first, _, seed = everyone[0]
        for rank, (others, _, _) in zip(self.ranks, everyone, strict=True):
            for name, value in others.items():
                if value != first[name]:
                    raise ArgumentError(
                        f"{name} of rank {rank} is {value!r}, that of rank {self.ranks[0]} "
                        f"{first[name]!r}; give every process the same"
                    )
        if self.n > 1 and self._recorder is None:
            own = self._processes
            recorder = own.recorder if own else FlightRecorder(self.rank)
            if own is None:
                recorder.connect(self.share)
            self._recorder = recorder
        return int(seed)

    def share(self, value: Any) -> list[Any]:
        """Return the value of each process; values are sent as JSON."""
        if self._processes is not None:
            return self._processes.share(value)
        return [value] if self.n == 1 else _share_by_store(value, self.ranks)

    def exchange(
        self, out: Tensor, values: Tensor, receives: Sequence[int], sends: Sequence[int], name: str
    ) -> int:
        """Send rows to every process, in order, and receive as many as they send.

        Return the bytes that this process sent to others. If one has exited, raise
        `LostConnection`.
        """
        if self.n == 1:
            out.copy_(values)
            return 0
        try:
            dist.all_to_all_single(out, values, list(receives), list(sends), group=self.group)
        except RuntimeError as error:
            raise self.lost(error, name) from error
        row_bytes = values[:1].numel() * values.itemsize
        return (sum(sends) - sends[self.rank]) * row_bytes

    def gather(self, values: Tensor, name: str) -> list[Tensor]:
        """Return the values of every process, all of one shape; raises as `exchange` does."""
        if self.n == 1:
            return [values]
        gathered = [torch.empty_like(values) for _ in self.ranks]
        try:
            dist.all_gather(gathered, values, group=self.group)
        except RuntimeError as error:
            raise self.lost(error, name) from error
        return gathered

    def lost(self, error: RuntimeError, name: str) -> LostConnection:
        """Return the error for a failed exchange ``name``, with the exited rank if known."""
        exited = [] if self._recorder is None else self._recorder.wait_for_exit()
        first = (str(error) or type(error).__name__).splitlines()[0]
        cause = RuntimeError(f"in the exchange of {name}: {first}")
        return LostConnection(self.ranks[exited[0]] if exited else -1, cause)


def _process_group(group: object) -> dist.ProcessGroup | None:
    """Return the process group of an argument; None for this process alone."""
    if isinstance(group, Processes):
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        return group.group(range(group.n_ranks), backend, "sharded embedding")
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    # torch gives this to processes outside a group. The type is checked first: == may be an array.
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            "this process is not in process_group; make the embedding in the group's processes only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(
            "process_group must be a torch.distributed.ProcessGroup, "
            f"pipeexec.distributed.Processes or None, got {type(group).__name__}"
        )
    return group


def _share_by_store(value: Any, ranks: list[int]) -> list[Any]:
    """Return the value of each process of a group, sent through the default group's store.

    Each pair of processes counts its exchanges, in all groups. A process thus finds the value of
    the other even if the two have different groups, and compares the groups. A process that finds
    a difference posts an error to all, since others may wait for values that never come.
    """
    world = dist.group.WORLD
    store: Any = None if world is None else world.get_group_store()
    own = dist.get_rank()
    value_keys = {}
    for peer in ranks:
        number = store.add(f"pipeexec/n_shared/{own}/{peer}", 1)
        store.set(f"pipeexec/shared/{own}/{peer}/{number}", json.dumps([ranks, value]))
        value_keys[peer] = f"pipeexec/shared/{peer}/{own}/{number}"
    values: dict[int, Any] = {}
    timer = RunningTimer(_AGREE_SECONDS)
    while True:
        missing = [peer for peer in ranks if peer not in values]
        for peer in missing:
            if store.check([value_keys[peer]]):
                peer_ranks, values[peer] = json.loads(store.get(value_keys[peer]))
                _check_same_group(store, (own, ranks), (peer, peer_ranks))
        if store.check([f"{_GROUP_ERROR}/{own}"]):
            raise ArgumentError(store.get(f"{_GROUP_ERROR}/{own}").decode())
        if not missing:
            return [values[peer] for peer in ranks]
        if timer.is_over:
            raise PeerError(
                f"rank {own} waited {_AGREE_SECONDS:g} s for rank {missing[0]}, which did not "
                f"answer; every process of the group {ranks} must make the embedding"
            )
        time.sleep(1e-3)


def _check_same_group(store: Any, *groups: tuple[int, list[int]]) -> None:
    """Post an error to every process of two groups that differ: rank, and ranks of its group."""
    (first, first_group), (second, second_group) = sorted(groups)
    if first_group == second_group:
        return
    text = (
        f"process_group of rank {second} has ranks {second_group}, that of rank {first} "
        f"{first_group}; give every process the same group"
    )
    for rank in {*first_group, *second_group}:
        store.set(f"{_GROUP_ERROR}/{rank}", text)
