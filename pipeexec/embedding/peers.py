"""`Peers`: the processes over which an embedding's rows are spread, seen from one of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeexec.distributed.channels import LostConnection
from pipeexec.distributed.flight_recorder import FlightRecorder
from pipeexec.distributed.processes import Processes
from pipesim.errors import ArgumentError, ArgumentTypeError, PeerError, PipeError

__all__ = ["Peers"]

#: Seconds that processes have to come to the same call.
_AGREE_SECONDS = 120.0
#: Where the store says that groups are unlike.
_APART = "pipeexec/apart"


class Peers:
    """Processes that exchange tensors, all with all, and know each other's numbers.

    Parameters
    ----------
    group
        A process group of torch.distributed, `Processes`, or None for the default group, and for
        this process alone where there is none.

    Raises
    ------
    ArgumentError
        If this process is not one of the group.

    Attributes
    ----------
    rank, n
        Number of this process in the group, and how many there are.
    ranks
        Their numbers in the default group.
    """

    def __init__(self, group: dist.ProcessGroup | Processes | None) -> None:
        self._processes = group if isinstance(group, Processes) else None
        self._recorder: FlightRecorder | None = None
        self._given = group
        self.rank, self.n, self.ranks = 0, 1, [0]
        if (found := self.group) is not None:
            self.rank, self.n = found.rank(), found.size()
            self.ranks = dist.get_process_group_ranks(found)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for this process alone. It is its maker's, who may end it."""
        return _group_of(self._given)

    def __deepcopy__(self, memo: object) -> Peers:
        """Copies of a module have the same peers."""
        return self

    def meet(self, settings: dict[str, Any] | PipeError) -> int:
        """Check that all have the same settings; return a number that is the same for all.

        Raises
        ------
        ArgumentError
            Naming the first setting that differs, in every process.
        PeerError
            If another has an error in place of settings, or does not come.
        """
        seed = int(torch.randint(1 << 31, ()))
        if isinstance(settings, PipeError):
            self._share([None, str(settings), 0])
            raise settings
        everyone = self._share([settings, "", seed])
        for rank, (_, error, _) in zip(self.ranks, everyone, strict=True):
            if error:
                raise PeerError(f"rank {rank} has no embedding: {error}")
        wanted, _, seed = everyone[0]
        for rank, (its, _, _) in zip(self.ranks, everyone, strict=True):
            for name, value in its.items():
                if value != wanted[name]:
                    raise ArgumentError(
                        f"{name} of rank {rank} is {value!r}, that of rank {self.ranks[0]} "
                        f"{wanted[name]!r}; give every process the same"
                    )
        if self.n > 1 and self._recorder is None:
            own = self._processes
            recorder = own.recorder if own else FlightRecorder(self.rank)
            if own is None:
                recorder.connect(self._share)
            self._recorder = recorder
        return int(seed)

    def _share(self, value: Any) -> list[Any]:
        """Return what each process gave, as JSON."""
        if self._processes is not None:
            return self._processes.share(value)
        return [value] if self.n == 1 else _exchanged(value, self.ranks)

    def exchange(
        self, out: Tensor, values: Tensor, receives: Sequence[int], sends: Sequence[int], what: str
    ) -> int:
        """Send rows to every process, in order, and receive as many as they send.

        Returns the bytes that this process sent to others.

        Raises
        ------
        LostConnection
            If a process is gone.
        """
        if self.n == 1:
            out.copy_(values)
            return 0
        try:
            dist.all_to_all_single(out, values, list(receives), list(sends), group=self.group)
        except RuntimeError as error:
            raise self.lost(error, what) from error
        each = values[:1].numel() * values.itemsize
        return (sum(sends) - sends[self.rank]) * each

    def gather(self, values: Tensor, what: str) -> list[Tensor]:
        """Return the values of every process, which have one shape.

        Raises
        ------
        LostConnection
            If a process is gone.
        """
        if self.n == 1:
            return [values]
        found = [torch.empty_like(values) for _ in self.ranks]
        try:
            dist.all_gather(found, values, group=self.group)
        except RuntimeError as error:
            raise self.lost(error, what) from error
        return found

    def lost(self, error: RuntimeError, what: str) -> LostConnection:
        """Return what a collective's error means: which process is gone, where that is known."""
        gone = [] if self._recorder is None else self._recorder.wait_for_exit()
        first = (str(error) or type(error).__name__).splitlines()[0]
        cause = RuntimeError(f"in the exchange of {what}: {first}")
        return LostConnection(self.ranks[gone[0]] if gone else -1, cause)


def _group_of(group: object) -> dist.ProcessGroup | None:
    """Return the process group that is meant; None for this process alone."""
    if isinstance(group, Processes):
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        return group.group(range(group.n_ranks), backend, "sharded embedding")
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    # What torch gives a process in place of a group; compared with an array there is no one answer.
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            "this process is not in process_group; make the embedding in the group's processes only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(
            "process_group must be a torch.distributed.ProcessGroup, pipeexec.Processes or None, "
            f"got {type(group).__name__}"
        )
    return group


def _exchanged(value: Any, ranks: list[int]) -> list[Any]:
    """Return what each process of a group gave, by the default group's store.

    Each two processes count how often they have met, in whatever groups, so that they find each
    other's words, and can compare groups, even where one thinks of another group. Who finds that
    tells all, since some would wait for words that were never meant for them.
    """
    world = dist.group.WORLD
    store: Any = None if world is None else world.get_group_store()
    own = dist.get_rank()
    places = {}
    for peer in ranks:
        number = store.add(f"pipeexec/met/{own}/{peer}", 1)
        store.set(f"pipeexec/words/{own}/{peer}/{number}", json.dumps([ranks, value]))
        places[peer] = f"pipeexec/words/{peer}/{own}/{number}"
    found: dict[int, Any] = {}
    end = time.monotonic() + _AGREE_SECONDS
    while True:
        missing = [peer for peer in ranks if peer not in found]
        for peer in missing:
            if store.check([places[peer]]):
                its_ranks, found[peer] = json.loads(store.get(places[peer]))
                if its_ranks != ranks:
                    _tell_apart(store, (own, ranks), (peer, its_ranks))
        if store.check([f"{_APART}/{own}"]):
            raise ArgumentError(store.get(f"{_APART}/{own}").decode())
        if not missing:
            return [found[peer] for peer in ranks]
        if time.monotonic() > end:
            raise PeerError(
                f"rank {own} waited {_AGREE_SECONDS:g} s in vain for rank {missing[0]}; every "
                f"process of the group {ranks} must make the embedding"
            )
        time.sleep(1e-3)


def _tell_apart(store: Any, *groups: tuple[int, list[int]]) -> None:
    """Tell every process of two unlike groups which two processes have them."""
    (own, its_own), (peer, other) = sorted(groups)
    text = (
        f"process_group of rank {peer} has ranks {other}, that of rank {own} {its_own}; give every "
        "process the same group"
    )
    for rank in {*its_own, *other}:
        store.set(f"{_APART}/{rank}", text)
