"""`StageShards`: parameters of one stage, of which each process steps, and may hold, a share.

Parameters are views of flat tensors (`pipeexec.data_parallel.flat_parameters`). The optimizer of a
process steps the pieces of its share, each in the group of its parameter.

- Optimizer sharded (ZeRO-1): the share is a part of the flat tensor, which UNSHARD completes.
- Parameters sharded (FSDP): the share is a tensor of its own. UNSHARD allocates the flat tensor and
  fills it, RESHARD frees its memory. A parameter without memory is a stand-in of its shape, whose
  elements are all NaN. Autograd's saved views of the flat tensor are valid again when it has
  memory, as in torch's FSDP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeexec.data_parallel.flat_parameters import Flat, all_gather, flatten, reduce_scatter
from pipeexec.data_parallel.sharded_optimizer import ShardedOptimizer
from pipesim.errors import ExecutionError


class StageShards:
    """The parameters of a stage in this process, and their exchange with its replicas.

    Parameters
    ----------
    module
        The stage; its parameters become views of the flat tensors.
    optimizer
        Optimizer of the stage, whose groups get the pieces; None if nothing is trained.
    rank, n_ranks
        Number of this process among those of the stage's replicas, and their number.
    group
        Process group for calls between steps.
    frees
        Whether parameters are sharded, and freed between their uses.

    Attributes
    ----------
    pieces
        The pieces of this process, whose ``.grad`` the optimizer steps.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        rank: int,
        n_ranks: int,
        group: ProcessGroup,
        *,
        frees: bool,
    ) -> None:
        self.rank, self.group, self.frees = rank, group, frees
        parameters = list(module.parameters())
        dtypes = dict.fromkeys(p.dtype for p in parameters)
        self.flats = [
            flatten([p for p in parameters if p.dtype == dtype], rank, n_ranks, frees=frees)
            for dtype in dtypes
        ]
        # Kept also while parameters have memory: meters of activations know parameters by their
        # addresses, which no tensor of a step may get.
        self._stand_ins = [torch.full((), math.nan).to(flat.whole) for flat in self.flats]
        self._index = {id(p): number for number, p in enumerate(parameters)}
        self.pieces = nn.ParameterList(
            [x for flat in self.flats for x in flat.pieces if x is not None]
        )
        self.optimizer = (
            None if optimizer is None else ShardedOptimizer(optimizer, self.flats, rank, group)
        )
        if frees:
            self.free()

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensors, while they have memory."""
        return sum(flat.whole.numel() * flat.whole.element_size() for flat in self.flats)

    @property
    def whole_tensors(self) -> list[Tensor]:
        """The flat tensors."""
        return [flat.whole for flat in self.flats]

    @torch.no_grad()
    def gather(self, group: ProcessGroup | None = None) -> None:
        """Gather all shares into the flat tensors; all processes of the replicas must call this."""
        for flat in self.flats:
            if self.frees:
                flat.whole.untyped_storage().resize_(flat.whole.numel() * flat.whole.element_size())
            all_gather(flat.whole, flat.share, group or self.group)
            for parameter, view in zip(flat.parameters, flat.views, strict=True):
                if self.frees:
                    parameter.data = view

    @torch.no_grad()
    def free(self) -> None:
        """Free the memory of the flat tensors; parameters become stand-ins."""
        for flat, stand_in in zip(self.flats, self._stand_ins, strict=True):
            for parameter in flat.parameters:
                parameter.data = stand_in.expand(parameter.shape)
            flat.whole.untyped_storage().resize_(0)

    @contextmanager
    def whole(self, *, changes: bool = False) -> Iterator[None]:
        """Give parameters their values in a block; all processes of the replicas must run it.

        With ``changes``, the share is taken from the parameters at the end.
        """
        if not self.frees:
            yield
            return
        self.gather()
        try:
            yield
            if changes:
                for flat in self.flats:
                    size = len(flat.share)
                    flat.share.copy_(flat.whole[self.rank * size : (self.rank + 1) * size])
        finally:
            self.free()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the share, and the gradients of its pieces, at the end of a block."""
        shares = [flat.share.clone() for flat in self.flats]
        gradients = [None if p.grad is None else p.grad.clone() for p in self.pieces]
        try:
            yield
        finally:
            with torch.no_grad():
                for flat, share in zip(self.flats, shares, strict=True):
                    flat.share.copy_(share)
            for piece, gradient in zip(self.pieces, gradients, strict=True):
                piece.grad = gradient

    @torch.no_grad()
    def reduce(self, gradients: list[Tensor | None], group: ProcessGroup, *, adds: bool) -> None:
        """Sum gradients over the replicas; each process gets those of its share, in its pieces.

        Parameters
        ----------
        gradients
            One a parameter of the stage; None for one without. The list is emptied, so that their
            memory is free when they have been reduced.
        group
            Process group of the replicas.
        adds
            Whether the sums are added to gradients of pieces, such as of earlier micro-batches.

        Raises
        ------
        ExecutionError
            For a sparse gradient.
        """
        exists = torch.tensor([x is not None for x in gradients], dtype=torch.int32)
        dist.all_reduce(exists, dist.ReduceOp.MAX, group=group)
        for flat in self.flats:
            places = [self._index[id(p)] for p in flat.parameters]
            buffer = _flat_gradients(flat, places, gradients)
            total = torch.empty_like(flat.gradient) if adds else flat.gradient
            reduce_scatter(total, buffer, group)
            for index, (place, piece) in enumerate(zip(places, flat.pieces, strict=True)):
                if piece is None or not exists[place]:
                    continue
                low, high = flat.bounds(index, self.rank)
                if not adds:
                    piece.grad = flat.gradient[low:high]
                elif piece.grad is None:
                    piece.grad = flat.gradient[low:high].copy_(total[low:high])
                else:
                    piece.grad.add_(total[low:high])


def _flat_gradients(flat: Flat, places: list[int], gradients: list[Tensor | None]) -> Tensor:
    """Return the gradients of flat parameters as one tensor, and empty their entries.

    ``places`` are the numbers of the parameters in ``gradients``.
    """
    buffer = torch.zeros(flat.whole.numel(), dtype=flat.whole.dtype)
    for place, start, parameter in zip(places, flat.starts, flat.parameters, strict=True):
        gradient, gradients[place] = gradients[place], None
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise ExecutionError(
                f"a gradient of shape {tuple(gradient.shape)} is {gradient.layout}, which has no "
                "shares; make dense gradients, or lower without shards"
            )
        buffer[start : start + parameter.numel()] = gradient.reshape(-1)
    return buffer
