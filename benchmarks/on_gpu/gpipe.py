"""Step ``gpipe`` of ``benchmarks/gpu.py``: the module, with each of its mechanisms and without."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from on_gpu.bench import Bench
from on_gpu.gradients import GRADIENTS
from on_gpu.report import Report
from pipeexec.demo_models.image_models import unet
from pipeexec.validation.accuracy import Row
from pipeexec.validation.result import Validation
from pipesim.ops import Op

#: Largest error of the makespan.
TARGET = 0.05
#: Between slices: slow enough to show.
LINK = ps.Network(latency=20e-6, bandwidth=5e9)
#: As torchgpipe's baseline: messages on the streams that compute, and R behind its gradient.
_ONE_STREAM = {"copy_streams": False, "recompute_waits": True, "portals": False}
ROWS: dict[str, dict[str, Any]] = {
    "none": {"dependencies": False, **_ONE_STREAM},
    "+ dependency": _ONE_STREAM,
    "+ streams": {"portals": False},
    "+ portals": {},
}


def gpipe(bench: Bench, report: Report) -> None:
    """Compare gradients with the plain module's; then validate a U-Net, a line a row."""
    n, m = bench.pick(4, 2), 4
    torch.manual_seed(0)
    layers = unet(*((3, 2, 32) if not bench.dry else (2, 1, 4)), dropout=0.0)
    inputs = torch.rand(m * bench.pick(4, 1), 3, *[bench.pick(128, 16)] * 2)
    targets = torch.rand(len(inputs), 1, *inputs.shape[2:])
    balance = [len(layers) * (j + 1) // n - len(layers) * j // n for j in range(n)]
    models = {}
    for name, switches in ROWS.items():
        devices = bench.devices(n, LINK)
        models[name] = px.GPipe(
            copy.deepcopy(layers), balance, devices=devices, chunks=m, **switches
        )
        error = gradient_error(models[name], layers, bench, inputs, targets, m)
        report.check(error <= GRADIENTS, f"gradients, {name}: {error:.1e} (limit {GRADIENTS:g})")
    validation = px.validate(
        models,
        loss_fn=nn.functional.mse_loss,
        batches=iter(lambda: (inputs, targets), None),
        n_steps=bench.pick(5, 1),
        warm_up=bench.pick(3, 1),
    )
    for name, values in _rows(validation):
        report.record("gpipe", row=name, **values)
        gain = values["gain_measured"]
        line = (
            f"{name:>14} predicted {values['predicted'] * 1e3:8.2f} ms, measured "
            f"{values['measured'] * 1e3:8.2f} ms, error {values['error']:+.1%}, worst "
            f"{values['worst']:+.1%}, utilization {values['utilization_measured']:.1%}"
        )
        if gain is not None:
            line += f", gain {gain:.3f} (predicted {values['gain_predicted']:.3f})"
        report.time(abs(values["error"]) <= TARGET, line)
    bench.keep(validation, "ablation", slices=n, link=LINK.to_dict())
    engine_orders(models["none"], bench, report, inputs, targets)


def engine_orders(
    model: px.GPipe, bench: Bench, report: Report, inputs: Tensor, targets: Tensor
) -> None:
    """Run steps without dependencies; say how many orders of R and B torch's engine took."""
    predicted, orders, makespans = _backward_order(model.graph(len(inputs))), [], []
    for _ in range(bench.pick(20, 3)):
        nn.functional.mse_loss(model(inputs), targets.to(model.devices[-1])).backward()
        timeline = model.timeline()
        orders.append(_backward_order(timeline.graph))
        makespans.append(timeline.makespan)
    model.zero_grad()
    fastest, median, slowest = np.quantile(makespans, [0, 0.5, 1])
    report.record(
        "engine-orders", steps=len(orders), orders=len(set(orders)),
        as_on_a_cpu=orders.count(predicted), fastest=fastest, median=median, slowest=slowest,
        most_frequent=max(orders, key=orders.count),
    )  # fmt: skip
    report.add(
        f"{len(orders)} steps without dependencies: {len(set(orders))} orders, "
        f"{orders.count(predicted)} as on a CPU, {fastest * 1e3:.2f} to {slowest * 1e3:.2f} ms"
    )


def _backward_order(graph: ps.TaskGraph) -> str:
    """Return R and B of each device, in order, as text."""
    computes = [queue for (_, name), queue in zip(graph.streams, graph.queues, strict=True)
                if name == "compute"]  # fmt: skip
    kinds = [[t for t in queue.tolist() if graph.op[t] in (Op.R, Op.B)] for queue in computes]
    return ", ".join(" ".join(str(graph.task(t)) for t in tasks) for tasks in kinds)


def _rows(validation: Validation) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the values of each row; gains are over the row above, None for the first."""
    above = None
    for name, row in validation.table.iterrows():
        steps = validation.rows[str(name)]
        gain = (None, None) if above is None else gains(above, steps)
        above = steps
        yield str(name), {
            **{key: float(row[key]) for key in ("predicted", "measured", "error", "worst")},
            "gain_predicted": gain[0], "gain_measured": gain[1],
            "utilization_predicted": 1 - float(row["bubble_predicted"]),
            "utilization_measured": 1 - float(row["bubble_measured"]),
        }  # fmt: skip


def gains(above: Row, row: Row) -> tuple[float, float]:
    """Return how many times as fast a row is as the one above: predicted, and measured."""
    return (
        above.prediction / row.prediction,
        float(np.median(above.makespans) / np.median(row.makespans)),
    )


def gradient_error(
    model: px.GPipe, layers: nn.Sequential, bench: Bench, inputs: Tensor, targets: Tensor, m: int
) -> float:
    """Return how far gradients are from the plain module's, relative to the largest."""
    whole = copy.deepcopy(layers).to(bench.gpu)
    outputs = torch.cat([whole(part) for part in inputs.to(bench.gpu).chunk(m)])
    nn.functional.mse_loss(outputs, targets.to(bench.gpu)).backward()
    nn.functional.mse_loss(model(inputs), targets.to(model.devices[-1])).backward()
    errors = [
        float((own.grad.cpu() - its.grad.cpu()).abs().max() / its.grad.abs().max().cpu())
        for own, its in zip(model.parameters(), whole.parameters(), strict=True)
        if own.grad is not None and its.grad is not None and its.grad.any()
    ]
    model.zero_grad()
    return float(np.max(errors))  # NaN if any is
