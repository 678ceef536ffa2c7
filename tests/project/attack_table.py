"""A good call of every public callable: arguments that are right, made anew for each call.

A key is the name that a user writes. A method has the object as ``self``. The other parameters are
found from the signature, and have their defaults.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from nsys_reports import FIRST, report
from places import DATA

import pipesim as ps
from pipesim.calibration import Calibration
from pipesim.costs import TaskCosts, Workload
from pipesim.graph import AutogradGraph, AutogradNode, Tasks
from pipesim.models.gpu import Kernel
from pipesim.planning import OptimizedSchedule, Plans
from pipesim.simulation import Normal, Scenarios

Good = Mapping[str, Any]
#: Measured steps.
MEASURED = [{"model": "gpt2_xl", "microbatch_size": 1, "n_microbatches": 2, "seconds": 0.2}]


@cache
def schedule() -> ps.Schedule:
    return ps.schedule("1f1b", 2, 2)


@cache
def graph() -> ps.TaskGraph:
    return ps.lower(schedule())


@cache
def autograd() -> AutogradGraph:
    return AutogradGraph([AutogradNode("Addmm")], [])


@cache
def costs() -> ps.Costs:
    return ps.Costs(forward=1.0, backward=2.0, output_bytes=8.0, activation_bytes=4.0)


@cache
def sheet_timeline() -> ps.Timeline:
    costs = model().costs(2, gpu="h100_sxm", microbatch_size=1)
    return ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2), step="none"), costs)


def timeline() -> ps.Timeline:
    return ps.simulate(graph(), costs())


@cache
def task_costs() -> TaskCosts:
    return costs().of(graph())


def gpu() -> ps.GPU:
    return ps.GPU(flops=1e12, bandwidth=1e12)


def cluster() -> ps.Cluster:
    return ps.Cluster(
        n_gpus=2,
        gpu=ps.GPU(flops=1e12, bandwidth=1e12, memory=1e9),
        network=ps.Network(nodes=ps.Nodes(2)),
    )


def planned(_: Path) -> Good:
    """Start joblib's processes as `swept` does."""
    swept(_)
    return {"model": model(), "cluster": cluster(), "global_batch": 4, "schedules": "1f1b",
            "pipeline_parallel": 2, "microbatch_size": 1, "progress": False}  # fmt: skip


@cache
def calibration() -> Calibration:
    with warnings.catch_warnings(action="ignore"):
        return ps.GPU.fit(MEASURED, gpu="a100_80gb", constants=["flops"])


@cache
def plans() -> Plans:
    return ps.plan(model(), cluster(), global_batch=4, schedules="1f1b", progress=False)


@cache
def model() -> ps.Transformer:
    return ps.Transformer(
        hidden_size=8, n_layers=4, n_heads=2, sequence_length=4, vocabulary_size=16
    )


@cache
def noise() -> ps.Noise:
    return ps.Noise(seed=0, task=Normal(0.1))


@cache
def scenarios() -> Scenarios:
    return ps.simulate_many(graph(), costs(), noise(), 3, n_jobs=1, progress=False)


def network() -> ps.Network:
    return ps.Network(nodes=ps.Nodes(2))


def layout() -> ps.Layout:
    return ps.Layout(data_parallel=2, expert_parallel=2, pipeline_parallel=2)


def layers() -> ps.Layers:
    return ps.Layers({"forward": [1.0, 2.0], "backward": [2.0, 3.0]})


def tasks() -> Tasks:
    subject = graph()
    stream = np.zeros(len(subject.op), np.int64)
    ids = np.flatnonzero(subject.on_compute)
    return Tasks(
        subject.op[ids],
        subject.device[ids],
        subject.stage[ids],
        subject.microbatch[ids],
        stream[ids],
    )


@cache
def warm_up() -> None:
    """Start joblib's processes, which takes longer than a call may; later sweeps use them."""
    ps.sweep([{"schedule": "gpipe"}], n_jobs=2, progress=False, base=SWEPT)


def swept(_: Path) -> Good:
    warm_up()
    return {"configurations": [{"schedule": "gpipe"}], "n_jobs": 1, "progress": False,
            "base": SWEPT}  # fmt: skip


def _written(path: Path, save: Callable[[Path], None]) -> Path:
    save(path)
    return path


RANKS = DATA / "torch_interleaved"
ORDERS = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
FORWARD = ps.Action(0, ps.Op.F, 0)
BACKWARD = ps.Action(0, ps.Op.B, 1)
SIZES = {"microbatch_size": 1, "flops_per_second": 1e12}
LEVELS = np.array([0.1, 0.5])
SWEPT = {"n_devices": 2, "n_microbatches": 2, "forward": 1.0, "backward": 1.0}
MATRIX = [[0.0, 1.0], [1.0, 0.0]]
TWO = np.array([0, 1])

#: By name, what makes the arguments; it gets a folder.
GOOD: dict[str, Callable[[Path], Good]] = {
    "ps.Action.parse": lambda _: {"text": "0F0"},
    "ps.Cluster": lambda _: {"machine": "dgx_h100", "n_gpus": 8},
    "ps.Cluster.from_dict": lambda _: {"values": {"machine": "dgx_h100", "n_gpus": 8}},
    "ps.Cluster.gpu_numbers": lambda _: {"self": cluster()},
    "ps.Cluster.network": lambda _: {"self": cluster()},
    "ps.Cluster.scaled": lambda _: {"self": cluster()},
    "ps.Cluster.to_dict": lambda _: {"self": cluster()},
    "ps.Cluster.usable_bytes": lambda _: {"self": cluster(), "gpu": cluster().gpu},
    "ps.plan": planned,
    "ps.Comparison": lambda _: {"predicted": timeline(), "measured": timeline()},
    "ps.Comparison.error_parts": lambda _: {"self": ps.Comparison(timeline(), timeline())},
    "ps.Comparison.plot": lambda _: {"self": ps.Comparison(timeline(), timeline())},
    "ps.Comparison.to_html": lambda to: {
        "self": ps.Comparison(timeline(), timeline()), "path": to / "page.html"},
    "ps.Costs": lambda _: {"forward": 1.0, "backward": 2.0},
    "ps.Costs.from_dict": lambda _: {"values": {"forward": 1.0, "backward": 1.0}},
    "ps.Costs.from_layers": lambda _: {"layers": layers(), "split": 2},
    "ps.Costs.from_timeline": lambda _: {"timeline": timeline()},
    "ps.Costs.averaged": lambda _: {"self": costs()},
    "ps.Costs.microbatch": lambda _: {"self": ps.Costs([[1.0, 2.0]], 1.0), "number": 1},
    "ps.Costs.concatenate": lambda _: {"parts": {"vision": (costs(), 2)}},
    "ps.Costs.in_chunks": lambda _: {"self": costs(), "placement": ps.Placement.v_shaped(2)},
    "ps.Costs.load": lambda to: {"path": _written(to / "costs.json", costs().save)},
    "ps.Costs.of": lambda _: {"self": costs(), "graph": graph()},
    "ps.Costs.per_stage": lambda _: {"self": costs(), "name": "forward", "n_stages": 2},
    "ps.Costs.rebuilt": lambda _: {"self": model().costs(2, **SIZES)},
    "ps.Costs.save": lambda to: {"self": costs(), "path": to / "saved.json"},
    "ps.Costs.scaled": lambda _: {"self": ps.Costs([1.0, 2.0], [1.0, 2.0]), "factor": 2.0},
    "ps.Costs.to_dict": lambda _: {"self": costs()},
    "ps.Costs.transformer": lambda _: {
        "layers_per_stage": 2, "microbatch_size": 1, "flops_per_second": 1e12, "hidden_size": 8,
        "n_layers": 4, "n_heads": 2, "sequence_length": 4, "vocabulary_size": 16},
    "ps.simulation.Empirical": lambda _: {"samples": [1.0, 2.0]},
    "ps.simulation.Failures": lambda _: {"every": 10.0, "pause": 1.0},
    "ps.GPU": lambda _: {"flops": 1e12, "bandwidth": 1e12},
    "ps.GPU.fit": lambda _: {
        "rows": MEASURED,
        "gpu": "a100_80gb", "constants": ["flops"]},
    "ps.GPU.kernel_seconds": lambda _: {"self": gpu(), "kernel": Kernel("dropout", nbytes=1e6)},
    "ps.GPU.kernel_shares": lambda _: {"self": gpu(), "kernel": Kernel("dropout", nbytes=1e6)},
    "ps.GPU.preset": lambda _: {"name": "h100_sxm"},
    "ps.GPU.scaled": lambda _: {"self": gpu(), "part": 0.5},
    "ps.GPU.seconds": lambda _: {"self": gpu(), "kernels": [Kernel("dropout", nbytes=1e6)]},
    "ps.Keys": lambda _: {"frequencies": [1.0, 2.0], "n_keys": 3},
    "ps.Keys.busiest": lambda _: {"self": ps.Keys([1.0], 3), "n_ranks": 2},
    "ps.Keys.counted": lambda _: {"keys": np.array([0, 1]), "n_rows": 2},
    "ps.Keys.draw": lambda _: {"self": ps.Keys([1.0], 3), "seed": 0},
    "ps.Keys.exchange_bytes": lambda _: {"self": ps.Keys([1.0], 3), "n_ranks": 2, "dim": 4},
    "ps.Keys.from_counts": lambda _: {"counts": [1, 2]},
    "ps.Keys.load": lambda _: {"self": ps.Keys([1.0], 3), "n_ranks": 2},
    "ps.Keys.loads": lambda _: {"self": ps.Keys([1.0], 3)},
    "ps.Keys.owners": lambda _: {"self": ps.Keys([1.0], 3), "n_ranks": 2},
    "ps.Keys.per_rank": lambda _: {"keys": [ps.Keys([1.0], 3)]},
    "ps.Keys.sent": lambda _: {"self": ps.Keys([1.0], 3), "n_ranks": 2},
    "ps.Keys.uniform": lambda _: {"n_rows": 5, "n_keys": 3},
    "ps.Keys.zipf": lambda _: {"n_rows": 5, "n_keys": 3},
    "ps.Layers": lambda _: {"columns": {"forward": [1.0, 2.0], "backward": [2.0, 3.0]}},
    "ps.Layers.costs": lambda _: {"self": layers(), "split": 2},
    "ps.Layers.from_frame": lambda _: {
        "frame": pd.DataFrame({"forward": [1.0, 2.0], "backward": [2.0, 3.0]})},
    "ps.Layers.split": lambda _: {"self": layers(), "split": 2},
    "ps.Layers.read": lambda to: {
        "path": _written(to / "layers.csv", lambda p: p.write_text("forward,backward\n1,2\n"))},
    "ps.HostLink": lambda _: {},
    "ps.HostLink.from_dict": lambda _: {"values": {"bandwidth": 1.0}},
    "ps.HostLink.grouped": lambda _: {"self": ps.HostLink(), "gpus_per_device": 2},
    "ps.HostLink.to_dict": lambda _: {"self": ps.HostLink()},
    "ps.Link": lambda _: {"latency": 1.0, "bandwidth": 1.0, "pairs": ((0, 1),)},
    "ps.Link.from_dict": lambda _: {
        "values": {"latency": 1.0, "bandwidth": 1.0, "pairs": [[0, 1]]}},
    "ps.Link.to_dict": lambda _: {"self": ps.Link(1.0, 1.0, ((0, 1),))},
    "ps.simulation.LogNormal": lambda _: {"sigma": 0.1},
    "ps.Network": lambda _: {},
    "ps.Network.all_reduce": lambda _: {"self": network(), "nbytes": 1.0, "devices": [0, 1]},
    "ps.Network.all_to_all": lambda _: {"self": network(), "nbytes": 1.0, "devices": [0, 1]},
    "ps.Network.from_csv": lambda to: {
        "path": _written(to / "links.csv", lambda p: p.write_text(
            "source,target,latency,bandwidth\n0,1,1e-6,1e9\n"))},
    "ps.Network.from_dict": lambda _: {"values": {"latency": 1.0}},
    "ps.Network.from_matrix": lambda _: {"latency": MATRIX, "bandwidth": MATRIX},
    "ps.Network.grouped": lambda _: {"self": network(), "gpus_per_device": 2},
    "ps.Network.group_all_gather": lambda _: {"self": network(), "nbytes": 1.0, "n_gpus": 1},
    "ps.Network.group_all_reduce": lambda _: {"self": network(), "nbytes": 1.0, "n_gpus": 1},
    "ps.Layout": lambda _: {"data_parallel": 4, "expert_parallel": 2},
    "ps.Layout.device": lambda _: {"self": layout(), "stage": 1, "replica": 1},
    "ps.Layout.experts": lambda _: {"self": layout(), "gpu": 0, "n_experts": 4},
    "ps.Layout.gpus_of_node": lambda _: {"self": layout(), "node": 0},
    "ps.Layout.groups": lambda _: {"self": layout(), "kind": "ep"},
    "ps.Layout.network": lambda _: {"self": layout(), "machine": "dgx_h100"},
    "ps.Network.preset": lambda _: {"name": "dgx_h100"},
    "ps.Network.scaled": lambda _: {"self": ps.Network(1e-6, 1e9)},
    "ps.Network.to_dict": lambda _: {"self": network()},
    "ps.Network.unlimited": lambda _: {"self": network()},
    "ps.NodeCollectives": lambda _: {"bandwidth": 1.0, "peak_bandwidth": 2.0},
    "ps.Nodes": lambda _: {"devices_per_node": 2},
    "ps.Nodes.grouped": lambda _: {"self": ps.Nodes(2), "gpus_per_device": 2},
    "ps.Nodes.from_dict": lambda _: {"values": {"devices_per_node": 2}},
    "ps.Nodes.to_dict": lambda _: {"self": ps.Nodes(2)},
    "ps.Noise": lambda _: {"seed": 0, "task": Normal(0.1)},
    "ps.simulation.Normal": lambda _: {"std": 0.1},
    "ps.Placement.bidirectional": lambda _: {"n_devices": 2},
    "ps.Placement.from_modules": lambda _: {
        "modules": {"vision": [0], "audio": [1], "language": [2]},
        "feeds": {"vision": "language", "audio": "language"}},
    "ps.Placement.linear": lambda _: {"n_devices": 2},
    "ps.Placement.looped": lambda _: {"n_devices": 2, "n_chunks": 2},
    "ps.Placement.rerouted": lambda _: {
        "n_devices": 2, "n_replicas": 2, "n_microbatches": 4, "speeds": {(0, 1): 0.5},
    },
    "ps.Placement.v_shaped": lambda _: {"n_devices": 2},
    "ps.Placement.waves": lambda _: {"n_devices": 2, "n_waves": 1},
    "ps.Placement": lambda _: {"device_of": [0, 1]},
    "ps.Placement.path_of": lambda _: {"self": ps.Placement.linear(2), "n_microbatches": 2},
    "ps.Placement.stages_of": lambda _: {"self": ps.Placement.linear(2), "device": 0},
    "ps.simulation.Scenarios.percentiles": lambda _: {"self": scenarios()},
    "ps.simulation.Scenarios.timeline": lambda _: {"self": scenarios(), "scenario": 0},
    "ps.planning.Plan.to_megatron": lambda _: {"self": plans().best},
    "ps.planning.Plan.to_torchtitan": lambda _: {"self": plans().best},
    "ps.planning.Plans.choice": lambda _: {"self": plans(), "settings": {"pipeline_parallel": 2}},
    "ps.planning.Plans.explain": lambda _: {"self": plans()},
    "ps.planning.Plans.plan": lambda _: {"self": plans(), "which": 0},
    "ps.planning.Plans.plot": lambda _: {"self": plans()},
    "ps.planning.Plans.summary": lambda _: {"self": plans()},
    "ps.planning.Plans.to_csv": lambda to: {"self": plans(), "path": to / "plans.csv"},
    "ps.planning.Plans.to_megatron": lambda _: {"self": plans()},
    "ps.planning.Plans.to_torchtitan": lambda _: {"self": plans()},
    "ps.Schedule.from_columns": lambda _: {
        "name": "x", "placement": ps.Placement.linear(1), "n_microbatches": 1,
        "devices": [([ps.Op.F, ps.Op.B], [0, 0], [0, 0])]},
    "ps.Schedule.from_orders": lambda _: {"orders": ORDERS},
    "ps.Schedule.grid": lambda _: {"self": schedule()},
    "ps.Schedule.load": lambda to: {"path": _written(to / "orders.csv", schedule().save)},
    "ps.Schedule.place": lambda _: {"self": schedule(), "index": 0},
    "ps.Schedule.save": lambda to: {"self": schedule(), "path": to / "saved.csv"},
    "ps.Schedule.to_html": lambda to: {"self": schedule(), "path": to / "page.html"},
    "ps.Schedule.with_microbatch_order": lambda _: {"self": schedule(), "order": [1, 0]},
    "ps.Schedule.with_name": lambda _: {"self": schedule(), "name": "x"},
    "ps.Schedule.with_slices": lambda _: {"self": schedule(), "n_slices": 1},
    "ps.Schedule.with_updates": lambda _: {
        "self": schedule(), "n_batches": 1, "weight_versions": "one"},
    "ps.Routing": lambda _: {"distribution": "zipf", "parameter": 0.5},
    "ps.Routing.dirichlet": lambda _: {"concentration": 1.0},
    "ps.Routing.from_counts": lambda _: {"counts": [1, 2]},
    "ps.Routing.imbalance": lambda _: {"self": ps.Routing(), "n_experts": 4, "n_ranks": 2},
    "ps.Routing.shares": lambda _: {"self": ps.Routing(), "n_experts": 4},
    "ps.Routing.to_dict": lambda _: {"self": ps.Routing()},
    "ps.Routing.zipf": lambda _: {"exponent": 0.5},
    "ps.Parallel": lambda _: {},
    "ps.Encoder": lambda _: {
        "model": model(), "sequences": 2, "tensor_parallel": [1, 2], "recompute": "full",
    },
    "ps.Framework": lambda _: {},
    "ps.Framework.preset": lambda _: {"name": "megatron_core_2024"},
    "ps.Framework.to_dict": lambda _: {"self": ps.Framework()},
    "ps.models.Shard": lambda _: {"model": model()},
    "ps.models.Shard.stage_bytes": lambda _: {"self": model().shard(), "layers_per_stage": 2},
    "ps.models.Shard.stage_parameters": lambda _: {"self": model().shard(), "layers_per_stage": 2},
    "ps.models.Shard.stages": lambda _: {
        "self": model().shard(), "layers_per_stage": 2, "flops_per_second": 1e12},
    "ps.costs.TaskCosts.of_tasks": lambda _: {"table": task_costs().per_task().table},
    "ps.costs.TaskCosts.per_task": lambda _: {"self": task_costs()},
    "ps.TaskGraph.as_verified": lambda _: {"self": graph()},
    "ps.TaskGraph.build": lambda _: {"tasks": tasks()},
    "ps.TaskGraph.in_topological_order": lambda _: {"self": graph()},
    "ps.TaskGraph.plot": lambda _: {"self": graph()},
    "ps.TaskGraph.save_torch_csv": lambda to: {"self": graph(), "path": to / "torch.csv"},
    "ps.TaskGraph.task": lambda _: {"self": graph(), "index": 0},
    "ps.TaskGraph.wire": lambda _: {"tasks": tasks()},
    "ps.TaskGraph.to_html": lambda to: {"self": graph(), "path": to / "page.html"},
    "ps.TaskGraph.with_name": lambda _: {"self": graph(), "name": "x"},
    "ps.graph.AutogradGraph.plot": lambda _: {"self": autograd()},
    "ps.graph.AutogradGraph.to_html": lambda to: {"self": autograd(), "path": to / "page.html"},
    "ps.graph.Tasks.kinds": lambda _: {"self": tasks()},
    "ps.Timeline": lambda _: {
        "graph": graph(), "start": timeline().start, "end": timeline().end},
    "ps.Timeline.all_rows": lambda _: {"self": timeline()},
    "ps.Timeline.interval": lambda _: {"self": sheet_timeline()},
    "ps.Timeline.memory.changes_that_fit": lambda _: {"self": replace(timeline(), limits=1.0)},
    "ps.Timeline.check_complete": lambda _: {"self": timeline(), "purpose": "a test"},
    "ps.TaskGraph.to_networkx": lambda _: {"self": graph()},
    "ps.Timeline.why.critical_path": lambda _: {"self": timeline()},
    "ps.Timeline.from_chrome": lambda to: {
        "paths": sorted(RANKS.iterdir())},
    "ps.Timeline.from_table": lambda to: {"table": timeline().all_rows()},
    "ps.Timeline.why.idle_by_cause": lambda _: {"self": timeline()},
    "ps.Timeline.load": lambda to: {"path": _written(to / "timeline.csv", timeline().save)},
    "ps.Timeline.memory.host": lambda _: {"self": timeline()},
    "ps.Timeline.memory": lambda _: {"self": timeline()},
    "ps.Timeline.memory.breakdown": lambda _: {"self": timeline()},
    "ps.Timeline.mfu": lambda _: {
        "self": timeline(), "workload": Workload(8, 6), "peak_flops": 1.0},
    "ps.Timeline.plot": lambda _: {"self": timeline()},
    "ps.Timeline.plot.idle": lambda _: {"self": timeline()},
    "ps.Timeline.plot.memory": lambda _: {"self": timeline()},
    "ps.Timeline.save": lambda to: {"self": timeline(), "path": to / "saved.csv"},
    "ps.Timeline.to_html": lambda to: {"self": timeline(), "path": to / "page.html"},
    "ps.Timeline.to_chrome": lambda to: {"self": timeline(), "path": to / "saved.json"},
    "ps.Timeline.with_name": lambda _: {"self": timeline(), "name": "x"},
    "ps.Transformer": lambda _: {
        "hidden_size": 8, "n_layers": 4, "n_heads": 2, "sequence_length": 4, "vocabulary_size": 16},
    "ps.Transformer.balanced_slices": lambda _: {
        "self": model(), "layers_per_stage": 2, "n_slices": 2, **SIZES
    },
    "ps.Transformer.core_flops": lambda _: {"self": model()},
    "ps.Transformer.costs": lambda _: {"self": model(), "layers_per_stage": 2, **SIZES},
    "ps.Transformer.expert_layer_flops": lambda _: {"self": model()},
    "ps.Transformer.head_flops": lambda _: {"self": model()},
    "ps.Transformer.kernels": lambda _: {"self": model(), "gpu": gpu(), "microbatch_size": 1},
    "ps.Transformer.layer_flops": lambda _: {"self": model()},
    "ps.Transformer.linear_flops": lambda _: {"self": model()},
    "ps.Transformer.pack": lambda _: {
        "self": model(), "documents": [4, 8], "n_microbatches": 1, "flops_per_second": 1e12,
    },
    "ps.Transformer.preset": lambda _: {"name": "llama3_8b"},
    "ps.Transformer.recomputed_flops": lambda _: {"self": model()},
    "ps.Transformer.shard": lambda _: {"self": model()},
    "ps.Transformer.step_flops": lambda _: {"self": model()},
    "ps.costs.Workload": lambda _: {"tokens": 8, "flops": 1e3},
    "ps.costs.Workload.from_dict": lambda _: {"values": {"tokens": 8, "flops": 1e3}},
    "ps.costs.Workload.to_dict": lambda _: {"self": Workload(8, 1e3)},
    "ps.audit": lambda _: {"graph": graph(), "costs": costs()},
    "ps.balanced_split": lambda _: {"seconds": [1.0, 2.0, 3.0], "n_stages": 2},
    "ps.autograd_orders": lambda _: {"n_devices": 2, "n_microbatches": 2, "costs": costs()},
    "ps.trace.chakra.save": lambda to: {"prefix": to / "step", "timeline": timeline()},
    "ps.compare": lambda _: {"timelines": {"x": timeline()}},
    "ps.frameworks": lambda _: {},
    "ps.gpus": lambda _: {},
    "ps.trace.hta.save": lambda to: {"directory": to / "hta", "timeline": timeline()},
    "ps.lower": lambda _: {"schedule": schedule()},
    "ps.lower_bound": lambda _: {
        "placement": ps.Placement.linear(2), "n_microbatches": 2, "costs": costs()},
    "ps.machines": lambda _: {},
    "ps.optimize": lambda _: {
        "placement": ps.Placement.linear(2), "n_microbatches": 2, "costs": costs()},
    "ps.order_by": lambda _: {"placement": ps.Placement.linear(2), "n_microbatches": 2},
    "ps.costs.read_layout": lambda _: {"text": "Et*2|tL"},
    "ps.demo": lambda _: {},
    "ps.read_megatron": lambda _: {
        "flags": "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4",
        "n_layers": 4, "n_gpus": 4},
    "ps.read_torchtitan": lambda _: {
        "toml": "[parallelism]\npipeline_parallel_degree = 2", "n_layers": 4, "n_gpus": 4},
    "ps.register": lambda _: {"name": "attacked"},
    "ps.replay": lambda _: {"timeline": timeline()},
    "ps.schedule": lambda _: {"name": "1f1b", "n_devices": 2, "n_microbatches": 2},
    "ps.schedules": lambda _: {"n_devices": 2, "n_microbatches": 2},
    "ps.simulate": lambda _: {"graph": graph(), "costs": costs()},
    "ps.simulate_many": lambda _: {
        "graph": graph(), "costs": costs(), "noise": noise(), "n": 2, "n_jobs": 1,
        "progress": False},
    "ps.sweep": swept,
    "ps.calibration.Calibration.predict": lambda _: {"self": calibration(), "rows": MEASURED},
    "ps.calibration.Calibration.save": lambda to: {"self": calibration(), "path": to / "gpu.json"},
    "ps.calibration.Calibration.to_dict": lambda _: {"self": calibration()},
    "ps.plot.Style.width": lambda _: {"self": ps.plot.style(), "columns": 1},
    "ps.plot.autograd_graph": lambda _: {"graph": autograd()},
    "ps.plot.autograd_graph_html": lambda _: {"graph": autograd()},
    "ps.plot.bars": lambda _: {"table": ps.compare({"x": timeline()})},
    "ps.plot.comparison": lambda _: {"comparison": ps.Comparison(timeline(), timeline())},
    "ps.plot.comparison_html": lambda _: {"comparison": ps.Comparison(timeline(), timeline())},
    "ps.plot.dependencies": lambda _: {"graph": graph()},
    "ps.plot.exchange": lambda _: {"table": pd.DataFrame(
        {"rank": [0], "table": [0], "key": [3], "owner": [0], "row": [3], "sent": [True]})},
    "ps.plot.figure": lambda _: {},
    "ps.plot.graph_html": lambda _: {"graph": graph()},
    "ps.plot.idle": lambda _: {"timeline": timeline()},
    "ps.plot.memory": lambda _: {"timeline": timeline()},
    "ps.plot.paper_style": lambda _: {},
    "ps.plot.schedule_html": lambda _: {"schedule": schedule()},
    "ps.plot.style": lambda _: {},
    "ps.plot.timeline": lambda _: {"timeline": timeline()},
    "ps.plot.timeline_html": lambda _: {"timeline": timeline()},
    "ps.plot.to_html": lambda to: {"path": to / "page.html", "items": timeline()},
    "ps.plot.widget": lambda _: {"items": timeline()},
    "ps.trace.load": lambda to: {
        "path": _written(to / "trace.json", timeline().to_chrome)},
    "ps.trace.nsys_to_chrome": lambda to: {
        "paths": report(to / "report.sqlite", FIRST), "folder": to / "traces"},
    "ps.trace.read_primus": lambda to: {
        "paths": _written(to / "pp_rank_0.json", lambda p: p.write_text(
            '{"1": {"fwd_start": [0], "fwd_end": [1]}}')),
        "placement": ps.Placement.linear(1)},
    "ps.trace.read_timers": lambda to: {
        "path": _written(to / "run.log", lambda p: p.write_text(
            "iteration 1/ 2\ntime (ms) | forward-compute: 1.00"))},
    "ps.trace.save": lambda to: {"path": to / "trace.json", "timelines": timeline()},
    "ps.transformers": lambda _: {},
    "ps.verify": lambda _: {"what": schedule()},
    "ps.costs.write_layout": lambda _: {"layers_per_stage": [2, 1]},
}  # fmt: skip


def _of_optimized(make: Callable[[Path], Good]) -> Callable[[Path], Good]:
    """Return what makes the arguments of a method of `ps.Schedule`, for an optimized one."""

    def arguments(folder: Path) -> Good:
        good = make(folder)
        return {**good, "self": optimized()} if "self" in good else good

    return arguments


@cache
def optimized() -> OptimizedSchedule:
    return ps.optimize(ps.Placement.linear(2), 2, costs(), progress=False)


GOOD |= {
    name.replace("ps.Schedule.", "ps.planning.OptimizedSchedule."): _of_optimized(make)
    for name, make in GOOD.items()
    if name.startswith("ps.Schedule.")
}
