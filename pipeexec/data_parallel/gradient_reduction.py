"""Sum gradients over copies of a module: local ones, and those of other processes.

1. Processes agree in one small message which gradients exist, dense or sparse. A sparse gradient
   does not fit into the message of a dense one, and a process without a gradient cannot know.
2. Dense gradients of one type travel in one all-reduce, or in several buckets of at most
   `BUCKET_BYTES` bytes, each through a buffer of its size. A gradient that is alone in its bucket
   needs no buffer. Sums overwrite the gradients.
3. Sparse gradients, those of ``nn.Embedding(sparse=True)``, stay sparse: their rows are gathered.
   Each process sends as many rows as the process with the most has, since neither gloo nor NCCL
   gathers different lengths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

#: Bytes of several gradients in one all-reduce: 25 MiB, as in torch's DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20

#: A gradient's index among the parameters, and the tensor that this process adds to the sum.
Indexed = tuple[int, Tensor]


@torch.no_grad()
def sum_gradients(
    gradients: Sequence[Sequence[Tensor | None]],
    like: Sequence[nn.Parameter],
    group: ProcessGroup | None = None,
) -> list[Tensor | None]:
    """Return the sum of each parameter's gradients, over all copies of all processes.

    Parameters
    ----------
    gradients
        Gradients of each local copy, one a parameter; None for a parameter without. Dense ones of
        the first copy are overwritten.
    like
        The parameters: sums have their types, layouts and devices.
    group
        Process group whose processes all call this, with parameters of the same shapes and types;
        None for this process alone.

    Returns
    -------
    list
        One sum a parameter: None if no process has a gradient, sparse and coalesced if all existing
        gradients are sparse. Dense sums are in the memory of the first copy's gradients, if those
        have the type and the layout of the parameters.
    """
    local = [
        _local_sum([copy[index] for copy in gradients], parameter)
        for index, parameter in enumerate(like)
    ]
    if group is None or not local:
        return local
    sums: list[Tensor | None] = [None] * len(like)
    dense, sparse = _agree_on_kinds(local, like, group)
    for same_dtype in _by_dtype(dense):
        for bucket in _buckets(same_dtype):
            for index, total in _reduce_bucket(bucket, group):
                like_layout = total.stride() == like[index].stride() and not total.is_conj()
                sums[index] = total if like_layout else torch.empty_like(like[index]).copy_(total)
    for index, total in _gather_sparse(sparse, group):
        sums[index] = total
    return sums


def _local_sum(copies: Sequence[Tensor | None], parameter: nn.Parameter) -> Tensor | None:
    """Return the sum over local copies, on the parameter's device."""
    present = [
        # Other layouts are rare, and made dense.
        (x if x.layout in (torch.strided, torch.sparse_coo) else x.to_dense()).to(parameter.device)
        for x in copies
        if x is not None
    ]
    if not present:
        return None
    if all(x.is_sparse for x in present):
        n_sparse = max(x.sparse_dim() for x in present)
        coo = [_to_coo(x, parameter, n_sparse) for x in present]
        return _sum_coo([x._indices() for x in coo], [x._values() for x in coo], parameter.shape)
    total, *others = (x.to_dense() if x.is_sparse else x for x in present)
    return functools.reduce(Tensor.add_, others, total)


def _sum_coo(indices: Sequence[Tensor], values: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the sum of sparse tensors; torch has no other way for those of half precision."""
    return torch.sparse_coo_tensor(
        torch.cat(list(indices), 1), torch.cat(list(values)), tuple(shape), check_invariants=False
    ).coalesce()


def _agree_on_kinds(
    local: Sequence[Tensor | None], like: Sequence[nn.Parameter], group: ProcessGroup
) -> tuple[list[Indexed], list[Indexed]]:
    """Return the tensors that this process adds to dense sums, and to sparse sums.

    A parameter's sum is dense if its gradient is dense in any process. A process without the
    gradient adds zeros to a dense sum, and no rows to a sparse one.
    """
    n_sparse_dims = [0 if x is None or not x.is_sparse else x.sparse_dim() for x in local]
    is_dense = [x is not None and not x.is_sparse for x in local]
    kinds = torch.tensor([is_dense, n_sparse_dims], dtype=torch.int32, device=like[0].device)
    dist.all_reduce(kinds, dist.ReduceOp.MAX, group=group)
    dense: list[Indexed] = []
    sparse: list[Indexed] = []
    for index, (any_dense, n_sparse) in enumerate(kinds.T.tolist()):
        gradient = local[index]
        if any_dense:
            gradient = torch.zeros_like(like[index]) if gradient is None else gradient
            dense.append((index, gradient.to_dense() if gradient.is_sparse else gradient))
        elif n_sparse:
            sparse.append((index, _to_coo(gradient, like[index], n_sparse)))
    return dense, sparse


def _to_coo(gradient: Tensor | None, parameter: nn.Parameter, n_sparse: int) -> Tensor:
    """Return a sparse gradient with ``n_sparse`` sparse dimensions; without rows for None."""
    if gradient is None:
        indices = torch.empty((n_sparse, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[n_sparse:]))
        return torch.sparse_coo_tensor(
            indices, values, parameter.shape, check_invariants=False, is_coalesced=True
        )
    if gradient.sparse_dim() == n_sparse:
        return gradient
    return gradient.to_dense().to_sparse(n_sparse).coalesce()


def _by_dtype(tensors: Sequence[Indexed]) -> Iterator[list[Indexed]]:
    """Yield the tensors of each type, in the same order in every process."""
    for dtype in dict.fromkeys(x.dtype for _, x in tensors):
        yield [(index, x) for index, x in tensors if x.dtype == dtype]


def _buckets(tensors: Sequence[Indexed]) -> Iterator[list[Indexed]]:
    """Yield tensors of one type in buckets of at most `BUCKET_BYTES` bytes; larger ones alone."""
    bucket: list[Indexed] = []
    nbytes = 0
    for index, x in tensors:
        if bucket and nbytes + x.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append((index, x))
        nbytes += x.nbytes
    yield bucket


def _reduce_bucket(tensors: Sequence[Indexed], group: ProcessGroup) -> Iterator[Indexed]:
    """Yield the sums of dense tensors of one type, in one all-reduce; they overwrite the tensors.

    Several tensors are copied to one buffer, and back.
    """
    _, first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous() and not first.is_conj():
        _all_reduce(first, group)
        yield tensors[0]
        return
    flat = torch.cat([x.reshape(-1).to(first.device) for _, x in tensors])
    _all_reduce(flat, group)
    parts = flat.split([x.numel() for _, x in tensors])
    for (index, x), part in zip(tensors, parts, strict=True):
        yield index, x.copy_(part.view(x.shape))


def _all_reduce(tensor: Tensor, group: ProcessGroup) -> None:
    dist.all_reduce(torch.view_as_real(tensor) if tensor.is_complex() else tensor, group=group)


def _gather_sparse(tensors: Sequence[Indexed], group: ProcessGroup) -> Iterator[Indexed]:
    """Yield the sums of sparse tensors.

    All indices travel in one message, and the values of each type in another.
    """
    if not tensors:
        return
    device = tensors[0][1].device
    n_rows = torch.tensor([x._nnz() for _, x in tensors], device=device)
    counts = torch.stack(_all_gather(n_rows, group)).tolist()  # of each process
    most = [max(row_counts) for row_counts in zip(*counts, strict=True)]
    indices = _gather_rows([x.indices().T for _, x in tensors], most, counts, group)
    values: dict[int, list[Tensor]] = {}
    places = {index: place for place, (index, _) in enumerate(tensors)}
    for same_dtype in _by_dtype(tensors):
        chosen = [places[index] for index, _ in same_dtype]
        rows_of_values = _gather_rows(
            [x.values() for _, x in same_dtype],
            [most[place] for place in chosen],
            [[rank_counts[place] for place in chosen] for rank_counts in counts],
            group,
        )
        values.update(zip(chosen, rows_of_values, strict=True))
    for place, (index, x) in enumerate(tensors):
        rows = [part.T.to(x.device) for part in indices[place]]
        yield index, _sum_coo(rows, [part.to(x.device) for part in values[place]], x.shape)


def _gather_rows(
    tensors: Sequence[Tensor],
    most: Sequence[int],
    counts: Sequence[Sequence[int]],
    group: ProcessGroup,
) -> list[list[Tensor]]:
    """Return, for each tensor, the rows that each process has of it, in order of ranks.

    They travel padded. ``tensors`` are the rows of this process, ``(n_rows, ...)``. ``most`` counts
    the rows of each tensor in the process that has the most, and ``counts`` those in each process,
    ``(n_ranks, n_tensors)``.
    """
    device = tensors[0].device
    padded = []
    for x, n in zip(tensors, most, strict=True):
        rows = x.new_zeros((n, *x.shape[1:]), device=device)
        rows[: len(x)] = x
        padded.append(rows.reshape(-1))
    sizes = [len(x) for x in padded]
    gathered: list[list[Tensor]] = [[] for _ in tensors]
    for flat, rank_counts in zip(_all_gather(torch.cat(padded), group), counts, strict=True):
        parts = flat.split(sizes)
        for ranks, part, x, n in zip(gathered, parts, tensors, rank_counts, strict=True):
            shape = x.shape[1:]
            ranks.append(part[: n * math.prod(shape)].view(n, *shape))
    return gathered


def _all_gather(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Return the tensors of all processes, which have one shape."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    if tensor.numel() == 0:  # in every process
        return tensors
    if tensor.is_complex():
        dist.all_gather([torch.view_as_real(x) for x in tensors], torch.view_as_real(tensor), group)
    else:
        dist.all_gather(tensors, tensor, group)
    return tensors
