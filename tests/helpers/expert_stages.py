"""A model with experts, its stages in one process or in one of several, and the unsplit model."""

from __future__ import annotations

from typing import Any

import torch
from small_pipelines import mse
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes

#: Width, length of a sample, number of micro-batches.
WIDTH, LENGTH, K = 8, 3, 4
N_EXPERTS, RATE = 8, 0.05
#: Layers with experts of a model that is cut into fewer stages; a model of more has one in each.
N_LAYERS = 2


def build(
    share: tuple[int, int] = (0, 1),
    n_layers: int = N_LAYERS,
    has_shared: bool = False,
    **options: Any,
) -> nn.Sequential:
    """Return a model of dense layers, each with experts behind it; always the same weights."""
    torch.manual_seed(0)
    children: list[nn.Module] = []
    for _ in range(n_layers):
        experts = px.Experts(
            lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)),
            WIDTH, N_EXPERTS, 2, share=share, norm=nn.LayerNorm(WIDTH),
            shared=nn.Linear(WIDTH, WIDTH) if has_shared else None,
            **{"residual": True, **options},
        )  # fmt: skip
        children += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), experts]
    return nn.Sequential(*children, nn.Linear(WIDTH, WIDTH)).double()


def cut_evenly(model: nn.Sequential, n_stages: int) -> list[nn.Sequential]:
    """Return stages with equal numbers of layers with experts; the last has the head too."""
    size = (len(model) - 1) // n_stages
    last = n_stages - 1
    return [model[k * size : None if k == last else (k + 1) * size] for k in range(n_stages)]


def lowered(
    schedule: str, n_devices: int, n_stages: int, n_replicas: int, **options: Any
) -> ps.TaskGraph:
    """Return a graph of a model whose layers with experts are two, or one a stage if more.

    ``schedule`` may have a value of ``merged`` behind it, such as ``"1f1b delayed_w"``.
    """
    name, _, merged = schedule.partition(" ")
    order = {"merged": merged if merged == "delayed_w" else True} if merged else {}
    return ps.lower(
        ps.schedule(name, n_devices, K, **order),
        **{
            "n_replicas": n_replicas,
            "hosts": "per_device",
            "expert_layers": max(N_LAYERS, n_stages) // n_stages,
            **options,
        },
    )


def batch(n_replicas: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all replicas, five samples each; micro-batches differ."""
    generator = torch.Generator().manual_seed(1)
    shape = 5 * n_replicas, LENGTH, WIDTH
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer, which would show a gradient that is missing or scaled."""
    return torch.optim.Adam(parameters, RATE)


def train_unsplit(n_replicas: int, n_steps: int, **options: Any) -> dict[str, Any]:
    """Return losses, the gradients of the last step, and weights of the unsplit model, by name."""
    model = build(**options)
    optimizer, (x, y) = adam(model.parameters()), batch(n_replicas)
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "weights": model.state_dict(),
        "evaluated": mse(model(x), y).item(),
    }


def steps(
    processes: Processes,
    schedule: str,
    n_stages: int,
    n_replicas: int,
    shares: bool = True,
    n_steps: int = 2,
    pipeline_options: dict[str, Any] | None = None,
    **lowering: Any,
) -> dict[str, Any]:
    """Train a rank's stages, on one device a rank; return what it then has, and knows of all."""
    n_devices = processes.n_ranks // n_replicas
    graph = lowered(schedule, n_devices, n_stages, n_replicas, **lowering)
    homes = graph.homes.tolist()
    row = next(r for r, devices in enumerate(homes) if processes.rank in devices)
    replica = row * n_replicas // len(homes)  # paths of a bidirectional pipeline share one
    g = lowering.get("expert_replicas") or n_replicas
    share = (replica % g, g) if shares else (0, 1)
    stages = cut_evenly(build(share, max(N_LAYERS, n_stages)), n_stages)
    own = {s for devices in homes for s, d in enumerate(devices) if d == processes.rank}
    x, y = (part.tensor_split(n_replicas)[replica] for part in batch(n_replicas))
    with px.Pipeline(
        [stage if k in own else None for k, stage in enumerate(stages)],
        graph, ["cpu"], mse, adam, processes=processes, pin_threads=False,
        **(pipeline_options or {}),
    ) as pipeline:  # fmt: skip
        results = [pipeline.gather(pipeline.step(x, y)) for _ in range(n_steps)]
        norms = [None if r.grad_norm is None else float(r.grad_norm) for r in results]
        evaluated = pipeline.gather(pipeline.evaluate(x, y)).loss.item()
        state = pipeline.state_dict()
        names = {
            parameter: key
            for slot in pipeline.names.first_slots
            for parameter, key in pipeline.names.parameter_keys(slot).items()
        }
    return {
        "losses": [result.loss.item() for result in results],
        "gradients": {key: p.grad for p, key in names.items()},
        "weights": {key: p.detach() for p, key in names.items()},
        "state_keys": sorted(state),
        "evaluated": evaluated,
        "complete": bool(results[-1].timeline.complete),
        "norms": norms,
    }
