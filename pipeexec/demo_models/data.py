"""Batches to train the demo models on: text, synthetic images, and batches of replicas."""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pipeexec.demo_models.construction import generator
from pipeexec.devices.host_memory import check_tensors
from pipesim.errors import ArgumentError, check_count
from pipesim.utils.files import check_path, read_bytes

#: Inputs and targets of a training step.
LabelledBatch = tuple[Tensor, Tensor]
#: Called with the number of samples and a seed.
BatchMaker = Callable[[int, int], LabelledBatch]

#: Bytes of the standard library's sources that are read, and of a file of the user's.
_LIBRARY_BYTES = 4 << 20
_FILE_BYTES = 64 << 20


def text_batch(
    batch: int, sequence: int, *, text: Path | None = None, seed: int = 0
) -> LabelledBatch:
    """Draw samples at random places of a real text, one token a byte.

    By default the text is the source code of Python's standard library, files in the order of
    their names, up to about 4 MiB. ``text`` names another file, of which up to 64 MiB are read.
    A process reads a text once.

    Returns
    -------
    inputs, targets
        int64 (batch, sequence) each; the targets are the inputs shifted by one byte.
    """
    batch, sequence = check_count("batch", batch), check_count("sequence", sequence)
    needed = sequence + 1
    text = None if text is None else check_path("text", text)
    try:
        status = (text or _library()).stat()
        corpus = _corpus(text, (status.st_mtime_ns, status.st_size))
    except OSError as error:
        raise ArgumentError(
            f"cannot read the text {text or _library()}: {error.strerror}; "
            f"give a readable file of at least {needed} bytes"
        ) from error
    check_tensors(  # starts, one list per sample, and a tensor of all samples, which is cut in two
        f"a batch of batch={batch} samples of sequence={sequence}",
        batch * (104 + 32 * needed),
        "give fewer samples, or shorter ones",
    )
    if len(corpus) < needed:
        raise ArgumentError(
            f"the text {text or _library()} has {len(corpus)} bytes, and samples of "
            f"sequence={sequence} need {needed}; give a longer file, or a shorter sequence"
        )
    starts = torch.randint(len(corpus) - sequence, (batch,), generator=generator(seed)).tolist()
    samples = torch.tensor([list(corpus[start : start + needed]) for start in starts])
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def image_batch(
    batch: int, image_size: int = 32, n_classes: int = 10, seed: int = 0
) -> LabelledBatch:
    """Draw synthetic images: noisy stripes whose direction depends on the class.

    The images are easy to learn, and nothing is downloaded.

    Returns
    -------
    images, classes
        float32 (batch, 3, image_size, image_size), and int64 (batch,) below ``n_classes``.
    """
    batch, n_classes = check_count("batch", batch), check_count("n_classes", n_classes)
    size, random_numbers = check_count("image_size", image_size), generator(seed)
    check_tensors(  # stripes, noise, and their sum
        f"a batch of batch={batch} images of image_size={size}",
        batch * (8 + 3 * 3 * size**2 * torch.get_default_dtype().itemsize),
        "give fewer images, or smaller ones",
    )
    classes = torch.randint(n_classes, (batch,), generator=random_numbers)
    angle = (classes * (math.pi / n_classes)).view(-1, 1, 1, 1)
    axis = torch.linspace(-1, 1, size)
    across = torch.cos(angle) * axis + torch.sin(angle) * axis.view(-1, 1)
    colour = torch.arange(3).view(1, 3, 1, 1)
    stripes = torch.sin(3 * math.pi * across + colour)
    return stripes + 0.5 * torch.randn(batch, 3, size, size, generator=random_numbers), classes


def batches(make_batch: BatchMaker, batch: int, seed: int = 0) -> Iterator[LabelledBatch]:
    """Yield a new batch per step without end; the same ``seed`` yields the same batches."""
    draw = random.Random(check_count("seed", seed, minimum=0))
    while True:
        yield make_batch(batch, draw.getrandbits(31))


def replicas_of(rank: int, n_ranks: int, n_replicas: int) -> range:
    """Return the replicas whose stages a process runs, where ranks take replicas in order."""
    return range(rank * n_replicas // n_ranks, -(-(rank + 1) * n_replicas // n_ranks))


def replica_batches(
    make_batch: BatchMaker, batch: int, seed: int, replicas: Sequence[int]
) -> Iterator[LabelledBatch]:
    """Yield the batches of some replicas, concatenated, without end.

    Each replica has ``batch`` samples a step. They depend on ``seed`` and the replica alone, not
    on the process.
    """
    sources = [batches(make_batch, batch, seed + replica) for replica in replicas]
    for parts in zip(*sources, strict=True):
        inputs, targets = zip(*parts, strict=True)
        yield torch.cat(inputs), torch.cat(targets)


@cache
def _corpus(path: Path | None, version: tuple[int, int]) -> bytes:
    """Return the bytes of a text; a changed file has another ``version``, and is read again."""
    if path is not None:
        return read_bytes(path, "the text", ArgumentError, first=_FILE_BYTES)
    data = bytearray()
    for source in sorted(_library().glob("*.py")):
        data += source.read_bytes()
        if len(data) >= _LIBRARY_BYTES:
            break
    return bytes(data)


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))
