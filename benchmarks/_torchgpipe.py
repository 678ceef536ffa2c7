"""torchgpipe's published steps: models, settings and figures.

What each row of the ablation does (torchgpipe's benchmarks/unet-timeline/main.py):

- without dependencies, the order of the backward is that of autograd's threads, a race on GPUs
  (`pipesim.autograd_orders`). Taken here is the slowest, with every recompute of a stage before its
  first backward: a model, not a fact. On a CPU the engine does so in the last stage alone. For the
  model speaks the published memory, which is near what this order holds, and far from others';
- without streams, copies are on the default streams of both GPUs, which both wait for a copy to
  begin and to end: no overlap, and rendezvous. The copy of a gradient is issued before the
  recompute, which so waits for it;
- without portals, skips go beside the output from stage to stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _amoebanet import amoebanet_d

from pipeexec.demo_models.image_models import unet
from pipeexec.demo_models.layer_costs import LayerCosts, layer_costs

PUBLISHED = Path(__file__).parent.parent / "tests" / "published"

_DEFAULT_STREAM = {"overlap": False, "rendezvous": True, "recompute_waits": True}
#: What the switches of the ablation are in the simulation.
ABLATION: dict[str, dict[str, Any]] = {
    "baseline": {**_DEFAULT_STREAM, "portals": False, "recompute_first": True},
    "dependency": {**_DEFAULT_STREAM, "portals": False},
    "dependency+streams": {"portals": False},
    "dependency+streams+portals": {},
}


class Figures(NamedTuple):
    """Samples a second, the part of the time that GPUs compute, and GiB on all of them.

    NaN stands for what was not published.
    """

    speed: float
    utilization: float = nan
    memory: float = nan


class PublishedRow(NamedTuple):
    """One published row: what ran, and what came out.

    Attributes
    ----------
    layers
        Counts the layers for a micro-batch of so many samples, with the factor of Winograd's
        algorithm (`pipeexec.demo_models.layer_costs`).
    switches
        Further arguments of `pipesim.lower`.
    """

    name: str
    layers: Callable[[int, float], LayerCosts]
    balance: tuple[int, ...]
    n_microbatches: int
    batch: int
    recompute: str
    switches: dict[str, Any]
    published: Figures


def read(name: str) -> dict[str, Any]:
    """Return a file of published figures."""
    values: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text())
    return values


def ablation() -> list[PublishedRow]:
    """Return the four rows of the U-Net (5, 64)."""
    file = read("torchgpipe_unet_timeline_ablation")
    inputs = file["inputs"]
    return [
        PublishedRow(
            name, unet_layers, tuple(inputs["balance"]), inputs["chunks"], inputs["batch"],
            "except_last", switches,
            Figures(got["samples_per_s"], got["gpu_utilization_pct"] / 100, got["peak_memory_GiB"]),
        )
        for name, switches in ABLATION.items()
        for got in [file["expected"][name]]
    ]  # fmt: skip


def amoebanet() -> list[PublishedRow]:
    """Return the nine rows of AmoebaNet-D (18, 256).

    The last batch of an epoch, which is smaller, is left out.
    """
    file = read("torchgpipe_amoebanet_speed")
    return [
        PublishedRow(
            row["id"], amoebanet_layers, tuple(row["balance"]), row["chunks"], row["batch"],
            row["checkpoint"], {}, Figures(file["expected"][row["id"]]["samples_per_s"]),
        )
        for row in file["inputs"]["rows"]
    ]  # fmt: skip


@cache
def unet_layers(n_samples: int, winograd: float) -> LayerCosts:
    """Count the layers of the U-Net (5, 64) for images of 192 x 192."""
    with torch.device("meta"):
        return layer_costs(unet(), torch.empty(n_samples, 3, 192, 192), winograd=winograd)


@cache
def amoebanet_layers(n_samples: int, winograd: float) -> LayerCosts:
    """Count the layers of AmoebaNet-D (18, 256) for images of 224 x 224."""
    with torch.device("meta"):
        images = torch.empty(n_samples, 3, 224, 224)
        return layer_costs(amoebanet_d(18, 256), images, winograd=winograd)
