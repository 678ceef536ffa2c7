"""Optimizers that step shares of parameters, and their state as that of whole parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeexec.data_parallel.flat_parameters import Flat, all_gather
from pipesim.errors import ArgumentError

#: Optimizers that treat each element by itself, and their state that has one value an element.
ELEMENT_WISE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
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
                "shards run on CPU workers, with gloo: lower without it"
            )
    for name, layer in module.named_modules():
        if getattr(layer, "sparse", False):
            raise ArgumentError(
                f"{what}, but layer {name!r} of stage {stage} has sparse gradients, which have no "
                "shares; give it sparse=False"
            )
    if optimizer is None:
        return
    if type(optimizer) not in ELEMENT_WISE:
        names = ", ".join(kind.__name__ for kind in ELEMENT_WISE)
        raise ArgumentError(
            f"{what}, but the optimizer of stage {stage} is {type(optimizer).__name__}: a share is "
            "stepped alone, which equals the whole step only if each element is stepped by "
            f"itself; take one of {names}"
        )


class ShardedOptimizer:
    """An optimizer of a stage whose groups have the pieces of this process.

    Parameters
    ----------
    optimizer
        Made with whole parameters, so that groups by name or shape are right.
    flats
        Parameters of the stage.
    rank, group
        Number of this process among the stage's replicas, and their process group.
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
            for name in ELEMENT_WISE[type(self.optimizer)]:
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
        all_gather(whole, share, self.group)
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
        if name not in ELEMENT_WISE[type(self.optimizer)] or not isinstance(value, Tensor):
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
