"""The sum of gradients over copies of a module: local ones, and those of other processes.

Processes first agree on which gradients there are, dense or sparse, in one small message: a sparse
gradient would not fit into the message of a dense one, and a process that has none cannot know.
Then all dense gradients of a type travel in one all-reduce, or in several of at most `MESSAGE`
bytes, each through a buffer of its size; a gradient that is a message alone needs no buffer. Sums
take the memory of the gradients. Sparse gradients, those of ``nn.Embedding(sparse=True)``, stay
sparse: their rows are gathered, as many as the process with the most has, since neither gloo nor
NCCL gathers different lengths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

__all__ = ["MESSAGE", "summed"]

#: Bytes of several gradients in one all-reduce: 25 MiB, as in torch's DistributedDataParallel.
MESSAGE = 25 * 2**20

#: A gradient's place among the parameters, and what this process adds to it.
Mine = tuple[int, Tensor]


@torch.no_grad()
def summed(
    gradients: Sequence[Sequence[Tensor | None]],
    like: Sequence[nn.Parameter],
    group: ProcessGroup | None = None,
) -> list[Tensor | None]:
    """Return the sum of each parameter's gradients, over all copies of all processes.

    Parameters
    ----------
    gradients
        Those of each local copy, one a parameter; None where a parameter has none. Dense ones of
        the first copy are overwritten.
    like
        The parameters: sums have their types, layouts and devices.
    group
        Of the processes, all of which call this with parameters of the same shapes and types; None
        for this one alone.

    Returns
    -------
    list
        One sum a parameter: None where nobody has a gradient, sparse and coalesced where all that
        there are are sparse. Dense sums are in the memory of the first copy's gradients, where
        those have the type and the layout of the parameters.
    """
    local = [
        _local_sum([copy[index] for copy in gradients], parameter)
        for index, parameter in enumerate(like)
    ]
    if group is None or not local:
        return local
    found: list[Tensor | None] = [None] * len(like)
    dense, sparse = _agreed(local, like, group)
    for of_dtype in _by_dtype(dense):
        for message in _messages(of_dtype):
            for index, total in _reduced(message, group):
                found[index] = _laid_out(total, like[index])
    for index, total in _gathered(sparse, group):
        found[index] = total
    return found


def _local_sum(copies: Sequence[Tensor | None], parameter: nn.Parameter) -> Tensor | None:
    """Return the sum over local copies, on the parameter's device."""
    there = [_known(x).to(parameter.device) for x in copies if x is not None]
    if not there:
        return None
    if all(x.is_sparse for x in there):
        n_sparse = max(x.sparse_dim() for x in there)
        alike = [_in_coordinates(x, parameter, n_sparse) for x in there]
        return _joined([x._indices() for x in alike], [x._values() for x in alike], parameter.shape)
    total, *others = (x.to_dense() if x.is_sparse else x for x in there)
    return functools.reduce(Tensor.add_, others, total)


def _joined(indices: Sequence[Tensor], values: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the sum of sparse tensors; torch adds those of half precision in no other way."""
    return torch.sparse_coo_tensor(
        torch.cat(list(indices), 1), torch.cat(list(values)), tuple(shape), check_invariants=False
    ).coalesce()


def _known(gradient: Tensor) -> Tensor:
    """Return a gradient as strided or in coordinates; other layouts are rare, and made dense."""
    if gradient.layout in (torch.strided, torch.sparse_coo):
        return gradient
    return gradient.to_dense()


def _agreed(
    local: Sequence[Tensor | None], like: Sequence[nn.Parameter], group: ProcessGroup
) -> tuple[list[Mine], list[Mine]]:
    """Return what this process adds to the sums that are dense, and to those that are sparse.

    A parameter's gradient is dense if it is so anywhere. Where this process has none, it adds
    zeros, or no rows.
    """
    n_sparse_dims = [0 if x is None or not x.is_sparse else x.sparse_dim() for x in local]
    is_dense = [x is not None and not x.is_sparse for x in local]
    kinds = torch.tensor([is_dense, n_sparse_dims], dtype=torch.int32, device=like[0].device)
    dist.all_reduce(kinds, dist.ReduceOp.MAX, group=group)
    dense: list[Mine] = []
    sparse: list[Mine] = []
    for index, (any_dense, n_sparse) in enumerate(kinds.T.tolist()):
        mine = local[index]
        if any_dense:
            mine = torch.zeros_like(like[index]) if mine is None else mine
            dense.append((index, mine.to_dense() if mine.is_sparse else mine))
        elif n_sparse:
            sparse.append((index, _in_coordinates(mine, like[index], n_sparse)))
    return dense, sparse


def _in_coordinates(mine: Tensor | None, parameter: nn.Parameter, n_sparse: int) -> Tensor:
    """Return a sparse gradient with ``n_sparse`` sparse dimensions; without rows for none."""
    if mine is None:
        indices = torch.empty((n_sparse, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[n_sparse:]))
        return torch.sparse_coo_tensor(
            indices, values, parameter.shape, check_invariants=False, is_coalesced=True
        )
    if mine.sparse_dim() == n_sparse:
        return mine
    return mine.to_dense().to_sparse(n_sparse).coalesce()


def _by_dtype(tensors: Sequence[Mine]) -> Iterator[list[Mine]]:
    """Yield the tensors of each type, in an order that is the same in every process."""
    for dtype in dict.fromkeys(x.dtype for _, x in tensors):
        yield [(index, x) for index, x in tensors if x.dtype == dtype]


def _messages(tensors: Sequence[Mine]) -> Iterator[list[Mine]]:
    """Yield tensors of one type in messages of at most `MESSAGE` bytes; larger ones alone."""
    message: list[Mine] = []
    nbytes = 0
    for index, x in tensors:
        if message and nbytes + x.nbytes > MESSAGE:
            yield message
            message, nbytes = [], 0
        message.append((index, x))
        nbytes += x.nbytes
    yield message


def _reduced(tensors: Sequence[Mine], group: ProcessGroup) -> Iterator[Mine]:
    """Yield the sums of dense tensors of one type, in one all-reduce; they overwrite the tensors.

    All are copied to one buffer, and back, but for a tensor alone.
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


def _laid_out(total: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a sum with the parameter's layout; a copy if it has another."""
    if total.stride() == parameter.stride() and not total.is_conj():
        return total
    return torch.empty_like(parameter).copy_(total)


def _gathered(tensors: Sequence[Mine], group: ProcessGroup) -> Iterator[Mine]:
    """Yield the sums of sparse tensors: all indices in one message, values in one a type."""
    if not tensors:
        return
    device = tensors[0][1].device
    n_rows = torch.tensor([x._nnz() for _, x in tensors], device=device)
    counts = torch.stack(_all_gather(n_rows, group)).tolist()  # of each process
    most = [max(of_tensor) for of_tensor in zip(*counts, strict=True)]
    indices = _gathered_rows([x.indices().T for _, x in tensors], most, counts, group)
    values: dict[int, list[Tensor]] = {}
    places = {index: place for place, (index, _) in enumerate(tensors)}
    for of_dtype in _by_dtype(tensors):
        at = [places[index] for index, _ in of_dtype]
        found = _gathered_rows(
            [x.values() for _, x in of_dtype],
            [most[place] for place in at],
            [[of_rank[place] for place in at] for of_rank in counts],
            group,
        )
        values.update(zip(at, found, strict=True))
    for place, (index, x) in enumerate(tensors):
        rows = [part.T.to(x.device) for part in indices[place]]
        yield index, _joined(rows, [part.to(x.device) for part in values[place]], x.shape)


def _gathered_rows(
    tensors: Sequence[Tensor],
    most: Sequence[int],
    counts: Sequence[Sequence[int]],
    group: ProcessGroup,
) -> list[list[Tensor]]:
    """Return the rows that each process has of each tensor, which travel padded to the most."""
    device = tensors[0].device
    padded = []
    for x, n in zip(tensors, most, strict=True):
        rows = x.new_zeros((n, *x.shape[1:]), device=device)
        rows[: len(x)] = x
        padded.append(rows.reshape(-1))
    sizes = [len(x) for x in padded]
    found: list[list[Tensor]] = [[] for _ in tensors]
    for flat, of_rank in zip(_all_gather(torch.cat(padded), group), counts, strict=True):
        for parts, part, x, n in zip(found, flat.split(sizes), tensors, of_rank, strict=True):
            shape = x.shape[1:]
            parts.append(part[: n * math.prod(shape)].view(n, *shape))
    return found


def _all_gather(mine: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Return the tensors of all processes, which are of one shape."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    if mine.numel() == 0:  # in every process
        return found
    if mine.is_complex():
        dist.all_gather([torch.view_as_real(x) for x in found], torch.view_as_real(mine), group)
    else:
        dist.all_gather(found, mine, group)
    return found
