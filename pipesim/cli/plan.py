"""The command that plans a training run: its best configurations on a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipesim.cli.figures import write_plans
from pipesim.cli.plan_arguments import plan_settings
from pipesim.errors import ArgumentError, check_count
from pipesim.models.layers import Layers, as_layers
from pipesim.models.transformer import Transformer
from pipesim.planning.cluster import Cluster
from pipesim.planning.configurations.plan import plan as find_plans
from pipesim.simulation.distributions import LogNormal
from pipesim.simulation.noise import Noise
from pipesim.sweeps.transformer_costs import MODEL, make_model

if TYPE_CHECKING:
    from pipesim.planning.configurations.plans import Plans


def plan(args: argparse.Namespace) -> None:
    """Find the best configurations; print them, and what else was asked for."""
    n_best = check_count("--best", args.best)
    if args.explain is not None:
        check_count("--explain", args.explain, minimum=0)
    settings = plan_settings(args)
    if "global_batch" not in settings:
        raise ArgumentError("global_batch is missing; give --global-batch, or global_batch in TOML")
    if "noise" in settings:
        settings["noise"] = Noise(seed=0, task=LogNormal(settings["noise"]))
    model, cluster = _model(settings.pop("model")), _cluster(settings.pop("cluster"))
    plans = find_plans(model, cluster, n_best=n_best, **settings, progress=sys.stderr.isatty())
    if not plans.complete and not len(plans):
        raise KeyboardInterrupt  # before the first configuration was simulated
    write_plans(args.plot, plans)
    if args.csv:
        plans.to_csv(args.csv)
    print("\n\n".join([plans.summary(n_best), *_further(args, plans)]))
    if not plans.complete:
        raise KeyboardInterrupt


def _further(args: argparse.Namespace, plans: Plans) -> list[str]:
    """Return the explanation and the settings of other programs that are asked for."""
    texts = []
    if args.explain is not None:
        texts.append(str(plans.explain(0, args.explain)))
    if args.megatron:
        texts.append(plans.to_megatron())
    if args.torchtitan:
        texts.append(plans.to_torchtitan(args.order).rstrip())
    elif args.order:
        plans.best.schedule.save(args.order)
    return texts


def _model(values: Mapping[str, Any]) -> Transformer | Layers:
    """Return the transformer of a table of sizes, or the layers of a file."""
    name = values.get("model")
    if isinstance(name, str) and name.lower().endswith(".csv"):
        if len(values) > 1:
            raise ArgumentError(f"{name} has measured layers, whose sizes cannot be changed")
        return as_layers(name)
    for key in values:
        if key not in MODEL:
            raise ArgumentError(f"unknown size {key!r} of a model; known: {', '.join(MODEL[1:])}")
    if not values:
        raise ArgumentError("MODEL is missing; name one, such as llama3_70b, or give its sizes")
    return make_model(values)


def _cluster(values: Mapping[str, Any]) -> Cluster:
    """Return the cluster of a table of its parameters."""
    if "machine" not in values and "network" not in values:
        raise ArgumentError("--cluster is missing; give such as --cluster dgx_h100 --gpus 64")
    return Cluster.from_dict(values)
