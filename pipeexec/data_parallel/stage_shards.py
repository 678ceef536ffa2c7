"""Parameters of one stage, of which each process steps, and may hold, a share (ZeRO-1, FSDP).

Parameters of one type are views of a flat tensor, padded to a multiple of the processes::

    flat      | weight 0 1 2 3 4 5 | bias 6 7 |        two processes: shares of four elements
    rank 0    | weight 0 1 2 3     |                   its pieces: part of the weight,
    rank 1              | weight 4 5 | bias 6 7 |      part of the weight, and the bias

The optimizer of a process steps the pieces of its share, each in the group of its parameter.

- Optimizer sharded (ZeRO-1): the share is a part of the flat tensor, which UNSHARD completes.
- Parameters sharded (FSDP): the share is a tensor of its own. UNSHARD allocates the flat tensor and
  fills it, RESHARD frees its memory. A parameter without memory is a stand-in of its shape, whose
  elements are all NaN. Autograd's saved views of the flat tensor are valid again when it has
  memory, as in torch's FSDP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipesim.errors import ArgumentError, ExecutionError


class StageShards:
    """The parameters of a stage in this process, and their exchange with its replicas.

    The parameters of ``module`` become views of the flat tensors. The groups of ``optimizer`` get
    the pieces of this process, whose ``.grad`` it steps; it is None if nothing is trained.
    ``group`` is for calls between steps. With ``frees``, parameters are sharded, and freed between
    their uses.
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
            _all_gather(flat.whole, flat.share, group or self.group)
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

        ``gradients`` has one a parameter of the stage; None for one without. The list is emptied,
        so that their memory is free when they have been reduced. With ``adds``, the sums are added
        to gradients of pieces, such as of earlier micro-batches.
        """
        exists = torch.tensor([x is not None for x in gradients], dtype=torch.int32)
        dist.all_reduce(exists, dist.ReduceOp.MAX, group=group)
        for flat in self.flats:
            places = [self._index[id(p)] for p in flat.parameters]
            buffer = _flat_gradients(flat, places, gradients)
            total = torch.empty_like(flat.gradient) if adds else flat.gradient
            _reduce_scatter(total, buffer, group)
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
    """Return gradients of flat parameters, at ``places`` of a list, as a tensor; empty these."""
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


@dataclass(eq=False)
class Flat:
    """Parameters of one type as one tensor."""

    parameters: list[nn.Parameter]
    starts: list[int]  # first element of each parameter in the flat tensor
    whole: Tensor  # the flat tensor
    share: Tensor  # of this process
    gradient: Tensor  # of the share
    views: list[Tensor]  # part of the flat tensor for each parameter, in its shape
    pieces: list[nn.Parameter | None]  # part of the share for each, a parameter; None if empty

    def bounds(self, index: int, rank: int) -> tuple[int, int]:
        """Return the first and the last element + 1 of a piece in the share; may be empty."""
        size, offset = len(self.share), rank * len(self.share)
        start = self.starts[index]
        end = start + self.parameters[index].numel()
        low, high = max(start, offset) - offset, min(end, offset + size) - offset
        return low, max(low, high)


@torch.no_grad()
def flatten(parameters: list[nn.Parameter], rank: int, n_ranks: int, *, frees: bool) -> Flat:
    """Make parameters views of one tensor, and pieces of the share of this process."""
    starts, n = [], 0
    for parameter in parameters:
        starts.append(n)
        n += parameter.numel()
    size = -(-n // n_ranks)
    whole = parameters[0].new_zeros(size * n_ranks)
    views = []
    for parameter, start in zip(parameters, starts, strict=True):
        view = whole[start : start + parameter.numel()].view(parameter.shape)
        view.copy_(parameter)
        parameter.data = view
        views.append(view)
    share = whole[rank * size : (rank + 1) * size]
    share = share.clone() if frees else share
    flat = Flat(parameters, starts, whole, share, torch.zeros_like(share), views, [])
    for index, parameter in enumerate(parameters):
        low, high = flat.bounds(index, rank)
        piece = nn.Parameter(share[low:high], parameter.requires_grad) if low < high else None
        flat.pieces.append(piece)
    return flat


def _all_gather(whole: Tensor, share: Tensor, group: ProcessGroup) -> None:
    """Gather the shares of all processes; older torch has another name for this."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(whole, share, group=group)


def _reduce_scatter(share: Tensor, whole: Tensor, group: ProcessGroup) -> None:
    """Sum tensors of all processes; each gets its share. Older torch has another name for this."""
    name = "reduce_scatter_single"
    name = name if hasattr(dist, name) else "reduce_scatter_tensor"
    getattr(dist, name)(share, whole, group=group)


#: Optimizers that treat each element by itself, and their state that has one value an element.
_ELEMENT_WISE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.Adamax: ("exp_avg", "exp_inf"),
    torch.optim.NAdam: ("exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: ("exp_avg", "exp_avg_sq"),
    torch.optim.RMSprop: ("square_avg", "momentum_buffer", "grad_avg"),
    torch.optim.Adadelta: ("square_avg", "acc_delta"),
}
#: State of these optimizers that has one value a parameter.
_SCALARS = ("step", "mu_product")


def check_shardable(
    module: nn.Module, stage: int, optimizer: torch.optim.Optimizer | None, what: str
) -> None:
    """Raise `ArgumentError` for parameters or an optimizer that cannot be sharded.

    ``what`` is the argument of `pipesim.lower` that shards, for the message.
    """
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.is_complex() or parameter.is_sparse:
            raise ArgumentError(
                f"{what}, but parameter {name!r} of stage {stage} is a "
                f"{type(parameter).__name__} of {parameter.dtype}; shares are of plain real "
                f"parameters: lower without it"
            )
        if parameter.device.type != "cpu":
            raise ArgumentError(
                f"{what}, but parameter {name!r} of stage {stage} is on {parameter.device}; "
                "shards run on CPU workers, with gloo: lower without it, and save memory there by "
                "recompute or offload (docs/limits.md); ps.simulate has shards for GPUs too"
            )
    for name, layer in module.named_modules():
        if getattr(layer, "sparse", False):
            raise ArgumentError(
                f"{what}, but layer {name!r} of stage {stage} has sparse gradients, which have no "
                "shares; give it sparse=False"
            )
    if optimizer is not None and type(optimizer) not in _ELEMENT_WISE:
        names = ", ".join(kind.__name__ for kind in _ELEMENT_WISE)
        raise ArgumentError(
            f"{what}, but the optimizer of stage {stage} is {type(optimizer).__name__}: a share is "
            "stepped alone, which equals the whole step only if each element is stepped by "
            f"itself; take one of {names}"
        )


class ShardedOptimizer:
    """An optimizer of a stage whose groups have the pieces of this process.

    It was made with whole parameters, so that groups by name or shape are right.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flats: Sequence[Flat],
        rank: int,
        group: ProcessGroup,
    ) -> None:
        self.optimizer, self.flats, self.rank, self.group = optimizer, flats, rank, group
        self._place = {
            id(parameter): (flat, index)
            for flat in flats
            for index, parameter in enumerate(flat.parameters)
        }
        self._whole_groups: list[list[nn.Parameter]] = []
        for param_group in optimizer.param_groups:
            self._whole_groups.append(list(param_group["params"]))
            own = map(self._piece, param_group["params"])
            param_group["params"] = [piece for piece in own if piece is not None]

    def _piece(self, parameter: nn.Parameter) -> nn.Parameter | None:
        flat, index = self._place[id(parameter)]
        return flat.pieces[index]

    def whole(self) -> WholeOptimizer:
        """Return the optimizer as one of whole parameters; all processes must call this."""
        groups = [
            {**param_group, "params": parameters}
            for param_group, parameters in zip(
                self.optimizer.param_groups, self._whole_groups, strict=True
            )
        ]
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for flat in self.flats:
            own = [self.optimizer.state.get(p, {}) if p is not None else {} for p in flat.pieces]
            self._gather_scalars(flat, own, state)
            for name in _ELEMENT_WISE[type(self.optimizer)]:
                self._gather_elements(name, flat, own, state)
        return WholeOptimizer(self, groups, state)

    @torch.no_grad()
    def _gather_elements(
        self,
        name: str,
        flat: Flat,
        own: Sequence[Mapping[str, Any]],
        state: dict[nn.Parameter, dict[str, Any]],
    ) -> None:
        """Add one kind of state that has a value an element to ``state``."""
        present = torch.tensor([isinstance(x.get(name), Tensor) for x in own], dtype=torch.int32)
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self.group)
        if not present.any():
            return
        share = torch.zeros_like(flat.share)
        for index, values in enumerate(own):
            if isinstance(values.get(name), Tensor):
                low, high = flat.bounds(index, self.rank)
                share[low:high] = values[name]
        whole = torch.empty(flat.whole.numel(), dtype=share.dtype)
        _all_gather(whole, share, self.group)
        for index, parameter in enumerate(flat.parameters):
            if present[index]:
                start = flat.starts[index]
                elements = whole[start : start + parameter.numel()]
                state.setdefault(parameter, {})[name] = elements.view(parameter.shape).clone()

    def _gather_scalars(
        self,
        flat: Flat,
        own: Sequence[Mapping[str, Any]],
        state: dict[nn.Parameter, dict[str, Any]],
    ) -> None:
        """Add the state that has one value a parameter to ``state``."""
        for name in _SCALARS:
            values = torch.tensor(
                [float(x[name]) if name in x else -math.inf for x in own], dtype=torch.float64
            )
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
            for parameter, value in zip(flat.parameters, values.tolist(), strict=True):
                if value > -math.inf:
                    number = torch.tensor(value, dtype=torch.float32)
                    state.setdefault(parameter, {})[name] = number

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load a state of whole parameters, as ``load_state_dict`` of an optimizer takes it."""
        state: dict[int, dict[str, Any]] = {}
        groups, n = [], 0
        for param_group, parameters in zip(saved["param_groups"], self._whole_groups, strict=True):
            first = n
            for number, parameter in zip(param_group["params"], parameters, strict=True):
                if self._piece(parameter) is None:
                    continue
                values = saved["state"].get(number)
                if values is not None:
                    state[n] = {key: self._cut(parameter, key, x) for key, x in values.items()}
                n += 1
            groups.append({**param_group, "params": list(range(first, n))})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _cut(self, parameter: nn.Parameter, name: str, value: Any) -> Any:
        """Return the part of a parameter's state for its piece; others as they are."""
        if name not in _ELEMENT_WISE[type(self.optimizer)] or not isinstance(value, Tensor):
            return value
        flat, index = self._place[id(parameter)]
        low, high = flat.bounds(index, self.rank)
        first = self.rank * len(flat.share) + low - flat.starts[index]
        return value.reshape(-1)[first : first + high - low].clone()


@dataclass(eq=False)
class WholeOptimizer:
    """Groups and state of a sharded optimizer, by whole parameters, as an optimizer has them."""

    sharded: ShardedOptimizer
    param_groups: list[dict[str, Any]]
    state: dict[nn.Parameter, dict[str, Any]]

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state of whole parameters; each process takes the part of its share."""
        self.sharded.load(saved)
