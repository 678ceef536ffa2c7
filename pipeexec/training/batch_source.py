"""Batches of a training: epoch after epoch, the place of the next one, and the random states there.

`TextBatches` makes batches of a language model from text files.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeexec.devices.host_memory import check_tensors
from pipesim.errors import ArgumentError, ResumeWarning, check_count
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.files import read_bytes

#: A DataLoader, another iterable, or a function from the number of an epoch to an iterable.
Batches = Iterable[Any] | Callable[[int], Iterable[Any]]


#: Stands for the end of an epoch.
_END = object()


class BatchSource:
    """Batches of a training, epoch after epoch; None for no limit of epochs.

    ``batches`` is an iterable, which is iterated once an epoch, or a function that returns that of
    an epoch. An iterator has one epoch. Messages call it by its ``name``.
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
        self.epoch = self.n_taken = 0  # batches taken from the epoch
        self._iterator: Iterator[Any] | None = None
        self._start: dict[str, Any] = {}

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
                try:
                    return as_inputs_and_targets(batch)
                except ArgumentError as error:
                    raise ArgumentError(f"{self._name}: {error}") from error
            if not self.n_taken:
                raise ArgumentError(
                    f"{self._name}: epoch {self.epoch} has no batches; a DataLoader with "
                    "drop_last=True has none if its dataset is smaller than a batch"
                )
            self.epoch, self.n_taken, self._iterator = self.epoch + 1, 0, None
        return None

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
        """Go to a place: batches that were taken from its epoch before are skipped."""
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


# Inputs and targets.


def as_inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the targets of a batch of a loader.

    A tuple or list of two has inputs and targets. The inputs of a mapping with ``"labels"``, as
    models of transformers take them, are all of it; the targets are these labels.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping) and "labels" in batch:
        return batch, batch["labels"]
    raise ArgumentError(
        f"a batch is {_outline(batch)}, and neither a pair of inputs and targets nor a mapping "
        "with 'labels'; give the loader a collate_fn that returns such a pair"
    )


def _outline(batch: Any) -> str:
    """Return the type of a batch, and keys or types in it."""
    kind = type(batch).__name__
    if isinstance(batch, Mapping):
        return f"a {kind} with {', '.join(map(repr, list(batch)[:8])) or 'nothing'}"
    if isinstance(batch, Tensor):
        return f"a {kind} of shape {tuple(batch.shape)}"
    return f"a {kind} of {len(batch)}" if isinstance(batch, (tuple, list)) else f"a {kind}"


# States of the random-number generators that decide which batches a loader yields, as JSON.


def _generators(loader: object) -> list[torch.Generator]:
    """Return the generators of a DataLoader, of its samplers and of its dataset, if any."""
    sampler, batch_sampler = (getattr(loader, x, None) for x in ("sampler", "batch_sampler"))
    holders = (
        loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None),
        getattr(sampler, "sampler", None), getattr(loader, "dataset", None),
    )  # fmt: skip
    values = (getattr(holder, "generator", None) for holder in holders)
    own = {id(value): value for value in values if isinstance(value, torch.Generator)}
    return list(own.values())


def random_states(loader: object = None) -> dict[str, Any]:
    """Return the states of the global generators, and of those of a loader; JSON can hold them.

    Global are those of torch on the CPU, of Python's `random` and of NumPy.
    """
    version, numbers, gauss = random.getstate()
    kind, words, place, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "torch": _state_text(torch.get_rng_state()),
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), np.asarray(words).tolist(), int(place), int(has_gauss), float(cached)],
        "loader": [_state_text(generator.get_state()) for generator in _generators(loader)],
    }


def restore_random_states(states: Mapping[str, Any], loader: object = None) -> None:
    """Restore what `random_states` returned."""
    torch.set_rng_state(_state_tensor(states["torch"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, words, *rest = states["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))  # noqa: NPY002
    for generator, state in zip(_generators(loader), states["loader"], strict=False):
        generator.set_state(_state_tensor(state))


def _state_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _state_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@contextmanager
def preserved_random_states(loader: object = None) -> Iterator[None]:
    """Restore the states at the end of a block."""
    states = random_states(loader)
    try:
        yield
    finally:
        restore_random_states(states, loader)


# Batches of bytes from text files.


class TextBatches:
    """Batches of samples from a text, one token a byte; called with the number of an epoch.

    An epoch cuts the text into samples of ``context`` bytes, from another place each time, and
    yields them in another order. Both depend on the seed and the number of the epoch alone. Bytes
    that do not fill a batch are left out. Without a seed, samples are in the order of the text,
    from its beginning.

    ``text`` is uint8, shape ``(n,)``. ``batch_size`` is of all replicas together, of which this
    process takes the samples ``share[0]`` to ``share[1]``. ``limit`` is the most batches of an
    epoch. None stands for all.
    """

    def __init__(
        self,
        text: Tensor,
        context: int,
        batch_size: int,
        *,
        seed: int | None = 0,
        share: tuple[int, int] | None = None,
        limit: int | None = None,
    ) -> None:
        self._text, self._seed, self._limit = text, seed, limit
        self.context = check_count("context", context)
        self.batch_size = check_count("batch_size", batch_size)
        self._first, self._end = share or (0, batch_size)
        needed = batch_size * (context + 1) + (context - 1) * (seed is not None)
        if len(text) < needed:
            raise ArgumentError(
                f"a batch of {batch_size} samples of {context} bytes needs {needed} bytes, the "
                f"text has {len(text)}; give longer texts, or a smaller batch_size or context"
            )

    def __call__(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets: int64 ``(batch_size, context)``, targets one byte later."""
        offset, draw = 0, None
        if self._seed is not None:
            draw = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % (1 << 63))
            offset = int(torch.randint(self.context, (), generator=draw))
        samples = self._text[offset:].unfold(0, self.context + 1, self.context)
        order = torch.arange(len(samples)) if draw is None else (
            torch.randperm(len(samples), generator=draw))  # fmt: skip
        n_batches = len(samples) // self.batch_size
        for number in range(n_batches if self._limit is None else min(self._limit, n_batches)):
            first = number * self.batch_size
            batch = samples[order[first + self._first : first + self._end]].long()
            yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def text_files(patterns: Sequence[str], folder: Path) -> list[Path]:
    """Return the files that patterns name, relative to a folder, in order of their names."""
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        root = Path(path.anchor) if path.is_absolute() else folder
        parts = str(path.relative_to(path.anchor)) if path.is_absolute() else str(path)
        # As in a shell, "*" is no hidden file, such as those of editors and systems.
        hides = not path.name.startswith(".")
        matches = sorted(
            file
            for file in root.glob(parts)
            if file.is_file() and not (hides and file.name.startswith("."))
        )
        if not matches:
            raise ArgumentError(
                f"text: no file matches {pattern!r} in {folder}; paths are relative to the folder "
                "of the configuration"
            )
        files += [file for file in matches if file not in files]
    return files


def read_texts(files: Sequence[Path]) -> Tensor:
    """Return the bytes of files, one after the other; uint8."""
    n_bytes = sum(file.stat().st_size for file in files)
    check_tensors(f"texts of {n_bytes} bytes", 2 * n_bytes, "give fewer files")
    texts = (read_bytes(file, "the text", ArgumentError) for file in files)
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
