"""`BatchSource`: batches epoch after epoch, and the place of the next one, for checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeexec.training.loader_batches import as_inputs_and_targets
from pipeexec.training.random_states import random_states, restore_random_states
from pipesim.errors import ArgumentError, ResumeWarning
from pipesim.utils.caller_warnings import warn_caller

#: A DataLoader, another iterable, or a function from the number of an epoch to an iterable.
Batches = Iterable[Any] | Callable[[int], Iterable[Any]]


#: Stands for the end of an epoch.
_END = object()


class BatchSource:
    """Batches of a training, epoch after epoch.

    Parameters
    ----------
    batches
        An iterable of batches, which is iterated once an epoch, or a function that returns that of
        an epoch. An iterator has one epoch.
    epochs
        Number of epochs; None for no limit.
    name
        Name of the argument, for messages.

    Attributes
    ----------
    epoch, n_taken
        Number of the epoch, from 0, and of the batches taken from it.
    """

    def __init__(self, batches: Batches, epochs: int | None, name: str = "batches") -> None:
        is_iterable = isinstance(batches, Iterable) and not isinstance(batches, (str, Mapping))
        if not is_iterable and not callable(batches):
            raise ArgumentError(
                f"{name} must be a DataLoader, another iterable of batches, or a function from "
                f"the number of an epoch to one, got {batches!r:.60} ({type(batches).__name__})"
            )
        self._batches, self._name = batches, name
        if isinstance(batches, Iterator):
            if epochs is not None and epochs > 1:
                raise ArgumentError(
                    f"{name} is an iterator ({type(batches).__name__}), which has one epoch, but "
                    f"epochs={epochs}; give a DataLoader, a list, or a function from the number "
                    "of an epoch to an iterable"
                )
            epochs = 1
        self.epochs = epochs
        self.epoch = self.n_taken = 0
        self._iterator: Iterator[Any] | None = None
        self._start: dict[str, Any] = {}
        self._last = ""

    @property
    def loader(self) -> Batches | None:
        """The iterable of all epochs; None for a function, whose iterables are its own."""
        return self._batches if isinstance(self._batches, Iterable) else None

    def next(self) -> tuple[Any, Any] | None:
        """Return inputs and targets of the next batch; None after the last epoch."""
        while self.epochs is None or self.epoch < self.epochs:
            if self._iterator is None:
                self._iterator = self._begin_epoch()
            batch = next(self._iterator, _END)
            if batch is not _END:
                self.n_taken += 1
                self._latest = batch
                return self._parts(batch)
            if not self.n_taken:
                raise ArgumentError(
                    f"{self._name}: epoch {self.epoch} has no batches; a DataLoader with "
                    "drop_last=True has none if its dataset is smaller than a batch"
                )
            self.epoch, self.n_taken, self._iterator = self.epoch + 1, 0, None
        return None

    def _parts(self, batch: Any) -> tuple[Any, Any]:
        """Return inputs and targets of a batch."""
        try:
            return as_inputs_and_targets(batch)
        except ArgumentError as error:
            raise ArgumentError(f"{self._name}: {error}") from error

    def _begin_epoch(self) -> Iterator[Any]:
        """Return the batches of an epoch; an epoch that was begun before begins as it did then."""
        batches = self._batches
        names = ("sampler", "batch_sampler")
        parts: list[Any] = [batches, *(getattr(batches, name, None) for name in names)]
        for part in parts:
            if hasattr(part, "set_epoch"):  # of torch's DistributedSampler, for example
                part.set_epoch(self.epoch)
        self._start = random_states(self.loader)
        if isinstance(batches, Iterable):
            return iter(batches)
        try:
            return iter(batches(self.epoch))
        except Exception as error:  # of the user's code
            raise ArgumentError(
                f"{self._name}({self.epoch}) must return an iterable of batches: it raised "
                f"{type(error).__name__}: {error!s:.300}"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next batch, after at least one.

        It has the random state at the beginning of the epoch, from which a loader that shuffles
        yields the same order again, and the digest of the last batch. If the loader has a
        ``state_dict``, as torchdata's StatefulDataLoader does, that is the place.
        """
        own = getattr(self._batches, "state_dict", None)
        return {
            "epoch": self.epoch,
            "n_taken": self.n_taken,
            "start": self._start,
            "digest": digest(self._latest),
            "loader": None if own is None else own(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place: batches that were taken from its epoch before are skipped.

        Warns
        -----
        ResumeWarning
            If the last batch that is skipped is not the one that was trained on.
        """
        self.epoch, n_taken = int(state["epoch"]), int(state["n_taken"])
        if state["loader"] is not None and hasattr(self._batches, "load_state_dict"):
            self._batches.load_state_dict(state["loader"])
            self._start, self.n_taken = state["start"], n_taken
            self._iterator = iter(self._batches)  # type: ignore[arg-type]
            return
        restore_random_states(state["start"], self.loader)
        self._iterator, self.n_taken = self._begin_epoch(), 0
        batch = None
        while self.n_taken < n_taken:
            batch = next(self._iterator, _END)
            if batch is _END:
                raise ArgumentError(
                    f"{self._name}: epoch {self.epoch} has {self.n_taken} batches, but {n_taken} "
                    "were taken before; continue with the same batches, or in a new directory"
                )
            self.n_taken += 1
        self._latest = batch
        if digest(batch) != state["digest"]:
            warn_caller(
                f"batch {n_taken} of epoch {self.epoch} is not the one that this run trained on "
                "before: what follows differs from a run without interruption. Usual reasons are "
                "data that changed, random numbers from elsewhere than torch, random and numpy, "
                "and persistent workers; a function from the number of an epoch to its batches "
                "can seed a torch.Generator",
                ResumeWarning,
            )


def digest(batch: Any) -> str:
    """Return a digest of the values of a batch, however it is nested."""
    sums = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            sums.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            sums.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            sums.update(f"{type(leaf).__name__} {leaf!r:.300}".encode())
    return sums.hexdigest()
