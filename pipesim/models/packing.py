"""Documents packed into micro-batches whose seconds are balanced over replicas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError
from pipesim.models.model_sizes import check_size
from pipesim.models.parallel import PARALLEL, Parallel, as_parallel
from pipesim.models.transformer import Transformer
from pipesim.utils.checks import Count, checked
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]


class _Documents(NamedTuple):
    """Documents of a batch, and the GPUs that share each."""

    tokens: Ints
    sizes: Ints
    seconds: Floats  # of a group of `sizes` GPUs
    n_gpus: int  # groups of tensor parallelism in a device
    max_tokens: int  # of a GPU in a micro-batch


class _Group(NamedTuple):
    """GPUs that share documents: how many, the documents' numbers, and their seconds."""

    size: int
    documents: list[int]
    seconds: float


@dataclass(frozen=True, eq=False)
class Packing:
    """Documents of the micro-batches of each replica; `pipesim.Transformer.pack` makes it.

    ``model.costs(..., lengths=packing.lengths, context_parallel=packing.context_parallel)`` has
    their costs, for a graph of ``lower(schedule, n_replicas=...)``.

    Attributes
    ----------
    documents
        Numbers of documents: ``documents[replica][microbatch][group]`` are those that one
        context-parallel group computes, in ascending order.
    lengths
        Tokens of these documents, as ``lengths`` of `pipesim.Transformer.costs`: micro-batches of
        all replicas, of replica 0 first.
    context_parallel
        Sizes of the groups of each micro-batch, likewise; a number if all are equal.
    seconds
        Seconds of forward and backward of each micro-batch through the whole model, on the slowest
        group; shape ``(n_replicas, n_microbatches)``.
    """

    documents: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    lengths: list[Any]
    context_parallel: list[Any]
    seconds: Floats

    @property
    def imbalance(self) -> float:
        """Seconds of the replica with the most over their mean; 1 if all have as many."""
        of_replicas = self.seconds.sum(axis=1)
        return float(of_replicas.max() / of_replicas.mean())

    def __repr__(self) -> str:
        n_replicas, n_microbatches = self.seconds.shape
        return (
            f"<Packing of {n_microbatches} micro-batches on each of {n_replicas} replicas, "
            f"imbalance {self.imbalance:.3f}>"
        )


@checked
def pack_documents(
    model: Transformer,
    documents: Sequence[int],
    *,
    n_replicas: Count = 1,
    max_tokens: Count | None = None,
    n_microbatches: Count | None = None,
    dynamic_context: bool = False,
    **settings: Any,
) -> Packing:
    """Pack documents into micro-batches, such that replicas take about as many seconds.

    Tokens do not tell seconds, since attention grows with the square of a document. Each document
    counts with its seconds in a full micro-batch, by the `costs` of the model.

    Parameters
    ----------
    documents
        Tokens of each document. Where context or sequence parallelism splits sequences, documents
        are padded to tokens that it divides.
    n_replicas
        Replicas of the pipeline. All get as many micro-batches.
    max_tokens
        Most tokens that one GPU of a context-parallel group gets of a micro-batch; None for no
        limit. Megatron-LM's ``--max-seqlen-per-dp-cp-rank``.
    n_microbatches
        Micro-batches of a replica; None for as few as ``max_tokens`` allows.
    dynamic_context
        Whether a document is shared by as few GPUs as ``max_tokens`` allows: the least divisor of
        ``context_parallel``, so that several groups of a device compute other documents at the
        same time. GPUs that would be idle join the slowest groups. Otherwise all
        ``context_parallel`` GPUs of a device share each.
    **settings
        Arguments of `costs`, such as ``gpu``, ``flash_attention`` and ``network``. Without
        ``flash_attention``, masked scores are computed too, and only tokens count.

    Returns
    -------
    Packing
        Documents and seconds of each micro-batch.

    Raises
    ------
    ArgumentError
        If a document is longer than a device may have, or documents do not fit.

    Notes
    -----
    "Longest processing time first": the documents with the most seconds come first, each goes to
    the replica with the least seconds that has room, and so on to a micro-batch of the replica. A
    replica has at most 4/3 of the seconds of the best division if ``max_tokens`` is no limit
    (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), 1969).

    Examples
    --------
    >>> import pipesim as ps
    >>> model = ps.Transformer.preset("llama3_8b")
    >>> packing = model.pack([8192, 4096, 4096, 2048, 2048, 2048, 1024, 1024], n_replicas=2,
    ...                      max_tokens=8192, gpu="h100_sxm", flash_attention=True)
    >>> packing
    <Packing of 2 micro-batches on each of 2 replicas, imbalance 1.027>
    >>> packing.lengths
    [[8192], [2048, 1024, 1024], [4096, 2048], [4096, 2048]]
    """
    for name in ("lengths", "slices"):
        if name in settings:
            raise ArgumentError(f"{name} is no setting of pack, which chooses the lengths")
    if max_tokens is None and (dynamic_context or n_microbatches is None):
        raise ArgumentError(
            "max_tokens is missing; give the most tokens of a GPU, or n_microbatches without "
            "dynamic_context"
        )
    settings = {"microbatch_size": 1, **settings}
    spread = {name: value for name, value in settings.items() if name in PARALLEL}
    parallel = as_parallel(Transformer.costs, settings.get("parallel"), spread)
    c = parallel.context_parallel
    batch = _divided(documents, parallel, max_tokens, dynamic_context)
    total = int(batch.tokens.sum())
    numbers = range(
        -(-total // (n_replicas * c * batch.max_tokens)), len(batch.tokens) // n_replicas + 1
    )
    if n_microbatches is not None:
        numbers = range(n_microbatches, n_microbatches + (n_microbatches in numbers))
    if numbers:  # else there are too few documents
        tokens = total / (n_replicas * c * (n_microbatches or 1))
        per_gpu = batch.max_tokens if max_tokens else tokens
        seconds = _seconds_of_documents(model, settings, parallel, batch, per_gpu)
        batch = batch._replace(seconds=seconds)
    for n in numbers:
        replicas = _packed(batch, n_replicas, n)
        if replicas is not None:
            return _packing(model, settings, parallel, batch, replicas)
    wanted = f"{n_microbatches} micro-batches" if n_microbatches else "micro-batches"
    limit = "" if max_tokens is None else f" of {max_tokens} tokens a GPU"
    raise ArgumentError(
        f"{len(batch.tokens)} documents do not fill {wanted}{limit} on each of {n_replicas} "
        "replicas: each has at least one; give another n_microbatches, a larger max_tokens, or "
        "fewer replicas"
    )


def _divided(
    documents: Sequence[int], parallel: Parallel, max_tokens: int | None, is_dynamic: bool
) -> _Documents:
    """Return padded documents, and how many GPUs share each; they have no seconds yet."""
    if isinstance(documents, (str, bytes)) or not hasattr(documents, "__len__"):
        raise ArgumentError(f"documents must be the tokens of each, got {documents!r:.60}")
    if not len(documents):
        raise ArgumentError("documents are empty; give the tokens of each")
    c = parallel.context_parallel
    sizes = [d for d in range(1, c + 1) if c % d == 0] if is_dynamic else [c]
    rows = []
    limit = sys.maxsize if max_tokens is None else max_tokens
    for k, value in enumerate(documents):
        n = check_size(f"documents[{k}]", value)
        padded = ((_padded(parallel, n, d), d) for d in sizes)
        row = next(((length, d) for length, d in padded if length <= d * limit), None)
        if row is None:
            raise ArgumentError(
                f"documents[{k}] has {n} tokens, but a device takes {c * limit} of a "
                f"micro-batch (max_tokens={max_tokens} x context_parallel={c}); give a larger "
                "max_tokens or context_parallel"
            )
        rows.append(row)
    tokens, used = np.array(rows, dtype=np.int64).T
    if used.max() < c:
        raise ArgumentError(
            f"no document needs more than {used.max()} of the {c} GPUs of context_parallel; give "
            f"context_parallel={used.max()}, and {c // used.max()} times as many replicas"
        )
    return _Documents(tokens, used, np.empty(0), c, min(limit, int(tokens.sum())))


def _grain(parallel: Parallel, size: int) -> int:
    """Return the tokens of which a document has a multiple if ``size`` GPUs share it.

    Two parts a GPU balance the causal mask; sequence parallelism divides each by t.
    """
    parts = 1 if size == 1 else 2 * size
    return parts * (parallel.tensor_parallel if parallel.sequence_parallel else 1)


def _padded(parallel: Parallel, tokens: int, size: int) -> int:
    grain = _grain(parallel, size)
    return -(-tokens // grain) * grain


def _seconds_of_documents(
    model: Transformer,
    settings: Mapping[str, Any],
    parallel: Parallel,
    batch: _Documents,
    per_gpu: float,
) -> Floats:
    """Return the share of each document in the seconds of a micro-batch of ``per_gpu`` tokens.

    With T tokens it takes ``a + b * sum((n / T)^2)`` seconds, where its documents have n tokens:
    a and b follow from one document and from two halves.
    """
    sizes, number = np.unique(batch.sizes, return_inverse=True)
    halves = [int(-(-d * per_gpu // (2 * (g := _grain(parallel, d)))) * g) for d in sizes.tolist()]
    lengths = [row for half in halves for row in ([2 * half], [half, half])]
    whole, divided = (
        _seconds(model, settings, lengths, np.repeat(sizes, 2).tolist()).reshape(-1, 2).T
    )
    squares = np.maximum(2 * (whole - divided), 0)
    share = batch.tokens / (2 * np.array(halves))[number]
    seconds: Floats = (whole - squares)[number] * share + squares[number] * share**2
    return seconds


def _seconds(
    model: Transformer, settings: Mapping[str, Any], lengths: Sequence[Any], context: list[Any]
) -> Floats:
    """Return the seconds of forward and backward of micro-batches through the whole model."""
    run = {**settings, "lengths": lengths, "context_parallel": context}
    costs = model.costs(1, **run)
    both = [np.ravel(np.asarray(x, dtype=float)) for x in (costs.forward, costs.backward)]
    seconds: Floats = np.broadcast_to(both[0], len(lengths)) + both[1]
    return seconds


def _assigned(
    batch: _Documents, members: Iterable[int], loads: Floats, n_bins: int, room: float
) -> list[list[int]] | None:
    """Return documents by bin, "longest processing time first"; None if one finds no room."""
    load, free = np.zeros(n_bins), np.full(n_bins, room)
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    for k in sorted(members, key=lambda k: (-loads[k], k)):
        fits = np.flatnonzero(free >= batch.tokens[k])
        if not len(fits):
            return None
        best = fits[np.argmin(load[fits])]
        bins[best].append(k)
        load[best] += loads[k]
        free[best] -= batch.tokens[k]
    return bins


def _packed(batch: _Documents, n_replicas: int, n: int) -> list[list[list[_Group]]] | None:
    """Return ``n`` micro-batches of each replica; None if documents do not fit, or some lack."""
    on_device = batch.seconds * batch.sizes / batch.n_gpus
    room = n * batch.n_gpus * batch.max_tokens
    replicas = _assigned(batch, range(len(batch.tokens)), on_device, n_replicas, room)
    if replicas is None:
        return None
    packed = [_microbatches(batch, members, n) for members in replicas]
    return [own for own in packed if own is not None] if None not in packed else None


def _microbatches(batch: _Documents, members: list[int], n: int) -> list[list[_Group]] | None:
    """Return the groups of the ``n`` micro-batches of a replica; None if they do not fit.

    Documents of one size are divided among groups, as many as their share of the work allows.
    Groups of about equal seconds run at the same time.
    """
    c = batch.n_gpus
    of_size = {
        d: [k for k in members if batch.sizes[k] == d] for d in set(batch.sizes[members].tolist())
    }
    work = {d: float(d * batch.seconds[own].sum()) for d, own in of_size.items()}
    whole = {d: n * c / d * work[d] / sum(work.values()) for d in work}
    for share in np.linspace(1, 0, 11).tolist():  # the rest is lost to GPUs that no group fits
        groups = {d: _groups(batch, own, d, int(share * whole[d])) for d, own in of_size.items()}
        microbatches = _filled(groups, c)
        if len(microbatches) <= n:
            break
    while len(microbatches) < n:
        more = [d for d in groups if len(groups[d]) < len(of_size[d])]
        if not more:
            return None
        d = max(more, key=lambda d: work[d] / d / len(groups[d]))
        groups[d] = _groups(batch, of_size[d], d, len(groups[d]) + 1)
        microbatches = _filled(groups, c)
    return microbatches if len(microbatches) == n else None


def _groups(batch: _Documents, members: list[int], size: int, n_least: int) -> list[_Group]:
    """Return documents in at least so many groups of GPUs, if there are as many documents."""
    numbers = count(min(max(1, n_least), len(members)))
    divided = (
        _assigned(batch, members, batch.seconds, n, size * batch.max_tokens) for n in numbers
    )
    bins = next(bins for bins in divided if bins is not None)
    return [_Group(size, sorted(own), float(batch.seconds[own].sum())) for own in bins if own]


def _filled(groups: Mapping[int, list[_Group]], c: int) -> list[list[_Group]]:
    """Return the groups of each micro-batch: the slowest first, where GPUs are free."""
    microbatches: list[list[_Group]] = []
    for group in sorted(chain.from_iterable(groups.values()), key=lambda x: -x.seconds):
        fits = (own for own in microbatches if sum(x.size for x in own) + group.size <= c)
        own = next(fits, None)
        if own is None:
            microbatches.append(own := [])
        own.append(group)
    return microbatches


def _grown(
    groups: list[_Group], batch: _Documents, tokens_of: Callable[[_Group, int], list[int]]
) -> list[_Group]:
    """Return groups of which the slowest have the GPUs that would be idle."""
    groups, c = list(groups), batch.n_gpus
    while True:
        free = c - sum(group.size for group in groups)
        larger = [
            (group.seconds, k, size)
            for k, group in enumerate(groups)
            for size in [d for d in range(group.size + 1, group.size + free + 1) if c % d == 0][:1]
            if sum(tokens_of(group, size)) <= size * batch.max_tokens
        ]
        if not larger:
            return groups
        seconds, k, size = max(larger)
        groups[k] = groups[k]._replace(size=size, seconds=seconds * groups[k].size / size)


def _packing(
    model: Transformer,
    settings: Mapping[str, Any],
    parallel: Parallel,
    batch: _Documents,
    replicas: list[list[list[_Group]]],
) -> Packing:
    """Return the packing, with the seconds of each micro-batch by the costs of the model."""

    def tokens_of(group: _Group, size: int) -> list[int]:
        return [_padded(parallel, int(batch.tokens[k]), size) for k in group.documents]

    grown = [[_grown(own, batch, tokens_of) for own in replica] for replica in replicas]
    flat = list(chain.from_iterable(grown))
    lengths: list[Any] = [[tokens_of(group, group.size) for group in own] for own in flat]
    context: list[Any] = [[group.size for group in own] for own in flat]
    if all(sizes == [batch.n_gpus] for sizes in context):
        lengths, context = [groups[0] for groups in lengths], [batch.n_gpus] * len(context)
    seconds = _seconds(model, settings, lengths, context).reshape(len(replicas), -1)
    documents = tuple(
        tuple(tuple(tuple(group.documents) for group in own) for own in replica)
        for replica in grown
    )
    return Packing(documents, lengths, context, seconds)
