"""Steps that add to the gradients of earlier steps, in one or two processes, and the unsplit model.

A model has one or two stages: dense ones, stages with a tied weight, with experts that every
process has or shares out, or a sharded embedding before a dense stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes

WIDTH, SAMPLES, K = 6, 4, 2


class Mode(NamedTuple):
    """Whether there is an optimizer, and whether each step leaves its gradients for the next."""

    has_optimizer: bool
    accumulates: tuple[bool, ...]

    @property
    def n_summed(self) -> int:
        """Last steps whose gradients add up."""
        if not self.has_optimizer:
            return len(self.accumulates)
        earlier = list(reversed(self.accumulates[:-1]))
        return 1 + next((k for k, x in enumerate(earlier) if not x), len(earlier))


MODES = {
    "optimizer": Mode(True, (False, False)),
    "accumulate": Mode(True, (True, False)),
    "accumulate again": Mode(True, (True, True, False, True, False)),
    "no optimizer": Mode(False, (False, False, False)),
}


class Case(NamedTuple):
    """Parts of the model, and the process of each device; devices of a replica are neighbours."""

    part: str
    n_stages: int
    hosts: tuple[int, ...]

    @property
    def n_replicas(self) -> int:
        return len(self.hosts) // self.n_stages

    def __str__(self) -> str:
        return f"{self.part}, {self.n_stages} x {self.n_replicas} on {self.hosts}"


def _dense(experts: nn.Module) -> nn.Module:
    """Return a layer, and experts behind it or none."""
    layers = {"layer": nn.Linear(WIDTH, WIDTH), "tanh": nn.Tanh(), "experts": experts}
    return nn.Sequential(OrderedDict(layers))


def _stages(case: Case, processes: Processes | None) -> list[nn.Module]:
    """Return the stages, always of the same values; without processes those of one."""
    share = (0, 1)
    if case.part == "shared experts" and processes is not None:
        share = (processes.rank, processes.n_ranks)
    stages: list[nn.Module] = []
    for stage in range(case.n_stages):
        torch.manual_seed(stage)  # a sharded embedding draws fewer numbers
        experts: nn.Module = nn.Identity()
        if "experts" in case.part:
            experts = px.Experts(
                lambda: nn.Linear(WIDTH, WIDTH), WIDTH, 4, 2, residual=True, share=share
            )
        if case.part == "embedding" and not stage:
            table = torch.randn(16, WIDTH, dtype=torch.float64)
            if processes is None:
                stages.append(nn.Embedding.from_pretrained(table, freeze=False))
            else:
                stages.append(px.EmbeddingStage(px.ShardedEmbedding.from_full(table, processes)))
        else:
            stages.append(_dense(experts).double())
    if case.part == "tied":
        with torch.no_grad():
            stages[1].layer.weight.copy_(stages[0].layer.weight)  # type: ignore[union-attr,operator,arg-type]
    return stages


def _batches(case: Case, mode: Mode) -> list[list[Tensor]]:
    """Return the inputs of each step and replica."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            torch.randint(16, (SAMPLES,), generator=generator) if case.part == "embedding"
            else torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
            for _ in range(case.n_replicas)
        ]
        for _ in mode.accumulates
    ]  # fmt: skip


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


def _still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def unsplit(case: Case, mode: Mode) -> dict[str, Tensor]:
    """Return the gradients of the unsplit model, by stage and name."""
    stages = _stages(case, None)
    if case.part == "tied":
        stages[1].layer.weight = stages[0].layer.weight  # type: ignore[union-attr]
    model = nn.Sequential(*stages)
    for row in _batches(case, mode)[-mode.n_summed :]:
        output = model(torch.cat(row))
        _loss(output, torch.zeros_like(output)).backward()  # type: ignore[no-untyped-call]
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }


def run(
    processes: Processes | None, row: Sequence[Any], mode: str
) -> tuple[list[dict[str, Tensor]], float | None]:
    """Return the gradients of each copy in this process after the last step, and their norm."""
    own, setting = Case(row[0], row[1], tuple(row[2])), MODES[mode]
    lowering: dict[str, Any] = {"grad_norm": setting.has_optimizer}
    options: dict[str, Any] = {}
    if "experts" in own.part:
        lowering["expert_layers"] = 1
    if own.part == "tied":
        lowering["tied"] = [(0, 1)]
        options["tied"] = [[(0, "layer.weight"), (1, "layer.weight")]]
    if own.part == "embedding":
        lowering["sharded"] = [0]
    if processes is not None:
        lowering["hosts"] = list(own.hosts)
    schedule = ps.schedule("1f1b", own.n_stages, K)
    graph = ps.lower(schedule, n_replicas=own.n_replicas, **lowering)
    rank = 0 if processes is None else processes.rank
    places = [host == rank or processes is None for host in own.hosts]
    has_first, has_last = places[:: own.n_stages], places[own.n_stages - 1 :: own.n_stages]
    with px.Pipeline(
        _stages(own, processes),
        graph,
        ["cpu"] * sum(places),
        _loss,
        _still if setting.has_optimizer else None,
        loss_reduction="sum",
        processes=processes,
        pin_threads=False,
        **options,
    ) as pipeline:
        for values, accumulate in zip(_batches(own, setting), setting.accumulates, strict=True):
            own_values = [
                value for value, is_here in zip(values, has_first, strict=True) if is_here
            ]
            x = torch.cat(own_values) if own_values else None
            y = torch.zeros(SAMPLES * sum(has_last), WIDTH, dtype=torch.float64)
            result = pipeline.step(x, y if len(y) else None, accumulate=accumulate)
        gradients = []
        for slot, module in enumerate(pipeline.modules):
            of_copy = {}
            for name, parameter in module.named_parameters():
                if parameter.grad is None:
                    continue
                if isinstance(module, px.EmbeddingStage):
                    assert processes is not None
                    with torch.no_grad():  # the rows of all processes
                        module.embedding.weight.copy_(parameter.grad)
                    of_copy[f"{slot % own.n_stages}.weight"] = module.embedding.full_weight()
                else:
                    of_copy[f"{slot % own.n_stages}.{name}"] = parameter.grad.clone()
            gradients.append(of_copy)
        norm = None if result.grad_norm is None else float(result.grad_norm)
    return gradients, norm
