"""`TextBatches`: language-model batches of bytes from text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeexec.devices.host_memory import check_tensors
from pipesim.errors import ArgumentError, check_count
from pipesim.utils.files import read_bytes


class TextBatches:
    """Batches of samples from a text, one token a byte; called with the number of an epoch.

    An epoch cuts the text into samples of ``context`` bytes, from another place each time, and
    yields them in another order. Both depend on the seed and the number of the epoch alone. Bytes
    that do not fill a batch are left out.

    Parameters
    ----------
    text
        Bytes; uint8, shape ``(n,)``.
    context
        Bytes of a sample.
    batch_size
        Samples of a batch of all replicas together.
    seed
        Seed of the orders; None for the order of the text, from its beginning.
    share
        First and last sample of a batch that this process takes; None for all.
    limit
        Most batches of an epoch; None for all.
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
    """Return the bytes of files, one after the other; uint8.

    Raises
    ------
    CapacityError
        If they do not fit in memory.
    """
    n_bytes = sum(file.stat().st_size for file in files)
    check_tensors(f"texts of {n_bytes} bytes", 2 * n_bytes, "give fewer files")
    texts = (read_bytes(file, "the text", ArgumentError) for file in files)
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
