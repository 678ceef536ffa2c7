"""A field of a record that a place forgets: files, flags, sweeps, prices, plans, pages.

Options of `lower` and fields of `Costs` and `Parallel` are read from their signatures, so a new one
fails here until it has an example, and then until each place knows it.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from command_output import succeed
from places import ROOT
from same_timelines import same

import pipesim as ps
from pipeexec.training import train_config
from pipeexec.training.read_config import SECTIONS
from pipesim.costs import Workload
from pipesim.costs.rows import ROWS, STAGE_ROWS
from pipesim.models.parallel import PARALLEL, SEARCHED, ParallelSettings
from pipesim.sweeps.settings import FLAT, LOWERING, transformer_costs
from pipesim.timeline.task_bytes import changes

#: Each option of `lower` with a value that is not its default, and the options that it needs.
OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "except_last"},
    "overlap": {"overlap": False},
    "streams": {"streams": "single"},
    "rendezvous": {"rendezvous": True},
    "hosts": {"hosts": "per_device"},
    "host_threads": {"host_threads": True, "hosts": "per_device"},
    "issue_order": {"issue_order": "stage_major"},
    "step": {"step": "none"},
    "n_replicas": {"n_replicas": 2},
    "layout": {"layout": "stage_major", "n_replicas": 2},
    "grad_sync": {"grad_sync": "every", "n_replicas": 2},
    "n_buckets": {"n_buckets": 2, "grad_sync": "bucketed", "n_replicas": 2},
    "shard_optimizer": {"shard_optimizer": True, "n_replicas": 2},
    "gather_parameters": {
        "gather_parameters": "before_forward",
        "shard_optimizer": True,
        "n_replicas": 2,
    },
    "sharded": {"sharded": [0], "n_replicas": 2},
    "exchange_work": {"exchange_work": "compute", "sharded": [0], "n_replicas": 2},
    "prefetch_keys": {"prefetch_keys": True, "sharded": [0], "n_replicas": 2},
    "sparse_grad_sync": {"sparse_grad_sync": "last", "sharded": [0], "n_replicas": 2},
    "skips": {"skips": [(0, 2)]},
    "portals": {"portals": False, "skips": [(0, 2)]},
    "recompute_first": {"recompute_first": True, "recompute": "always"},
    "recompute_waits": {"recompute_waits": True, "recompute": "always", "overlap": False},
    "forward_only": {"forward_only": True},
    "prompt_slices": {"prompt_slices": 1, "forward_only": True, "n_slices": 2},
    "tied": {"tied": [(0, 3)]},
    "grad_norm": {"grad_norm": True},
    "prefetch": {"prefetch": [2, 0, 1, 3], "offload": "all"},
    "offload": {"offload": 0.5},
    "offload_to": {"offload_to": "peer", "offload": "all"},
    "shard_parameters": {"shard_parameters": "every", "n_replicas": 2},
    "expert_layers": {"expert_layers": 1, "n_replicas": 2},
    "expert_replicas": {"expert_replicas": 2, "expert_layers": 1, "n_replicas": 4},
    "blocking_messages": {"blocking_messages": True},
    "framework": {"framework": {"grad_sync": "bucketed"}, "n_replicas": 2},
}
NETWORK = ps.Network(latency=0.01, bandwidth=64, host=ps.HostLink(bandwidth=32))
#: A number of each unit.
NUMBERS = {"seconds": 0.5, "bytes": 4.0, "shares": 0.5, "numbers of layers": 1.0}
#: Costs of which network and bytes give the seconds of messages and collectives.
DERIVED = ps.Costs(**{
    **{name: NUMBERS[row.unit] for name, row in STAGE_ROWS.items() if row.default == 0},
    "forward": 1.0, "backward": 2.5, "input_grad": 1.25, "weight_grad": 1.125,
    "activation_bytes": 16.0, "parameter_bytes": 48.0, "optimizer_bytes": 96.0,
    "tied_bytes": 8.0, "network": NETWORK, "memory_reserve": 0.1,
    "skip_bytes": {(0, 2): 10.0}, "expert_replicas": 2,
})  # fmt: skip
#: Another value of each field of `Costs` with a form of its own.
CHANGES: dict[str, Any] = {
    "buckets": [[(0.75, 0.25), (0.25, 1.0)]] * 4,
    "exchange_bytes": {0: {"keys": [[1, 2], [3, 4]]}},
    "skip_bytes": {(0, 2): 20.0},
    "network": ps.Network(latency=0.02, bandwidth=64, host=ps.HostLink(bandwidth=32)),
    "all_reduce": "tree",
    "workload": Workload(tokens=10, flops=100),
    "memory_reserve": 0.2,
    "expert_replicas": 1,
    "segments": [[(0.5, 0.25, 0.25)] * 3] * 4,
    "launch_by_op": {"messages": 0.0, "STEP": 0.25},
    "gradient_exchange": "all_reduce",
    "exchanged_gradients": 2.0,
    "overlap_cost": 0.5,
    "tied": [(0, 2)],
    "last_logits": True,
}


def lowered(schedule: str = "gpipe", n_slices: int = 1, **options: Any) -> ps.TaskGraph:
    """Return a graph of four devices and four micro-batches."""
    return ps.lower(ps.schedule(schedule, 4, 4).with_slices(n_slices), **options)


def costs_of(graph: ps.TaskGraph, costs: ps.Costs = DERIVED) -> ps.Costs:
    """Return costs without what the graph does not have."""
    if not graph.skips:
        costs = replace(costs, skip_bytes=None)
    return costs if graph.n_replicas > 1 else replace(costs, expert_replicas=1)


def test_all_options_have_an_example() -> None:
    """Add an option of `lower` above, with a value that is not the default."""
    assert OPTIONS.keys() == inspect.signature(ps.lower).parameters.keys() - {"schedule"}


@pytest.mark.parametrize("option", OPTIONS)
def test_files_keep_each_option(option: str, tmp_path: Path) -> None:
    """It changes tasks, times or bytes of a step, which is what each kind of file returns."""
    chosen = OPTIONS[option]
    others = {name: value for name, value in chosen.items() if name != option}
    graph, without = lowered(**chosen), lowered(**others)
    timeline = ps.simulate(graph, costs_of(graph))
    costs = replace(costs_of(without), expert_replicas=without.n_replicas)
    usual = ps.simulate(without, costs)
    assert not same(timeline, usual) or any(
        not np.array_equal(x, y)
        for x, y in zip(changes(graph, costs), changes(without, costs), strict=True)
    )
    for name in ("step.csv", "step.parquet"):
        timeline.save(tmp_path / name)
        read = ps.Timeline.load(tmp_path / name, costs=timeline.costs)
        assert same(timeline, read), name
        np.testing.assert_array_equal(read.graph.host, graph.host)
        labels = {"recompute": "", "overlap": True, "source": None}  # which the tasks show
        assert replace(read.graph.options, **labels) == replace(graph.options, **labels)
        assert ps.simulate(read.graph, read.costs).makespan == timeline.makespan
    timeline.to_chrome(tmp_path / "step.json")
    assert same(timeline, ps.Timeline.from_chrome(tmp_path / "step.json"))


def test_flags_and_sweeps_know_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    """`pipesim simulate` has a flag, TOML files a key, and sweeps a setting."""
    assert set(LOWERING.values()) == OPTIONS.keys()
    assert OPTIONS.keys() <= FLAT.keys()
    text = succeed(capsys, "simulate", "--help", "lowering").replace("[no-]", "")
    assert not [key for key in LOWERING if f"--{key.replace('_', '-')}" not in text]


def test_all_costs_have_an_example() -> None:
    """Add a field of `Costs` with a form of its own to `CHANGES`, with another value."""
    names = {x.name for x in fields(ps.Costs)}
    assert names == ROWS.keys()
    assert CHANGES.keys() == {name for name, row in ROWS.items() if row.item in ("", "skip")}


def with_change(name: str) -> ps.Costs:
    """Return costs with another value of one field."""
    if name in CHANGES:
        return replace(DERIVED, **{name: CHANGES[name]})
    value, row = getattr(DERIVED, name), ROWS[name]
    number = NUMBERS[row.unit]
    if value == row.default:
        return replace(DERIVED, **{name: number if row.default else 3 * number})
    return replace(DERIVED, **{name: value + number})


@pytest.mark.parametrize("name", [x.name for x in fields(ps.Costs)])
def test_files_keep_each_cost(name: str, tmp_path: Path) -> None:
    """Dictionaries, files and pickles return equal costs."""
    costs = with_change(name)
    assert costs != DERIVED
    costs.save(tmp_path / "costs.json")
    for copy in (
        ps.Costs.from_dict(costs.to_dict()),
        ps.Costs.load(tmp_path / "costs.json"),
        pickle.loads(pickle.dumps(costs)),  # noqa: S301 - of our own
    ):
        assert copy == costs


#: Schedules and options whose graphs have all operations between them.
GRAPHS: list[tuple[str, dict[str, Any]]] = [
    ("gpipe", {"recompute": "always", "offload": "all", "skips": [(0, 2)]}),
    ("gpipe", {"offload": "all", "tied": [(0, 3)], "grad_norm": True}),
    ("gpipe", {"n_replicas": 2, "sharded": [0], "exchange_work": "compute"}),
    ("gpipe", {"n_replicas": 2, "sharded": [0], "sparse_grad_sync": "last"}),
    ("gpipe", {"n_replicas": 2, "shard_optimizer": True, "grad_sync": "bucketed"}),
    ("gpipe", {"n_replicas": 2, "expert_layers": 1}),
    ("zb_h1", {}),
    ("dualpipev", {}),
    ("seq1f1b", {"forward_only": True}),
]


def prices(graph: ps.TaskGraph, costs: ps.Costs) -> list[object]:
    """Return times, bytes and throughput of a step, or why it has none."""
    try:
        timeline = ps.simulate(graph, costs_of(graph, costs))
    except ps.errors.CostsError as error:
        return [str(error)]
    tokens = timeline.costs and timeline.costs.workload and timeline.tokens_per_second
    arrays = (timeline.start, timeline.end, timeline.nbytes, timeline.memory.peak_host)
    return [timeline.memory.breakdown().to_csv(), tokens, *(array.tobytes() for array in arrays)]


@pytest.fixture(scope="module")
def graphs() -> list[ps.TaskGraph]:
    """Return the graphs above."""
    counts = {"dualpipev": 8}
    return [
        ps.lower(ps.schedule(name, 4, counts.get(name, 4)), **options) for name, options in GRAPHS
    ]


@pytest.mark.parametrize("name", [x.name for x in fields(ps.Costs)])
def test_each_cost_is_priced(name: str, graphs: list[ps.TaskGraph]) -> None:
    """Another value changes a time, or bytes, of a step."""
    changed = with_change(name)
    assert any(prices(graph, changed) != prices(graph, DERIVED) for graph in graphs)


def test_graphs_have_all_operations(graphs: list[ps.TaskGraph]) -> None:
    """Those of sharded parameters are priced as those of a sharded optimizer are."""
    ops = {ps.Op(op) for graph in graphs for op in np.unique(graph.op)}
    assert set(ps.Op) - ops == {ps.Op.RESHARD}


#: Each field of `Parallel` with another value, and the fields that it needs.
SPREAD: dict[str, dict[str, Any]] = {
    "microbatch_size": {"microbatch_size": 2},
    "tensor_parallel": {"tensor_parallel": 2},
    "sequence_parallel": {"sequence_parallel": True, "tensor_parallel": 2},
    "recompute": {"recompute": "full"},
    "flash_attention": {"flash_attention": True},
    "scatter_gather": {"scatter_gather": True, "tensor_parallel": 2},
    "fused_loss": {"fused_loss": True},
    "context_parallel": {"context_parallel": 2},
    "context_exchange": {"context_exchange": "all_gather", "context_parallel": 2},
    "context_balance": {"context_balance": False, "context_parallel": 2, "flash_attention": True},
    "context_shards_optimizer": {"context_shards_optimizer": False, "context_parallel": 2},
    "expert_parallel": {"expert_parallel": 2},
    "expert_tensor_parallel": {
        "expert_tensor_parallel": 1, "tensor_parallel": 2, "sequence_parallel": True
    },
    "routing": {"routing": ps.Routing.zipf(1), "expert_parallel": 2},
    "expert_exchange": {"expert_exchange": "hierarchical", "expert_parallel": 8},
    "dispatch_element_bytes": {"dispatch_element_bytes": 1, "expert_parallel": 2},
    "gradient_passes": {"gradient_passes": True},
    "framework": {"framework": ps.Framework(fused_norm=False)},
    "precision": {"precision": "fp8"},
}  # fmt: skip
EXPERTS = ps.Transformer(
    hidden_size=256, n_layers=4, n_heads=8, sequence_length=16384, vocabulary_size=64, n_experts=16,
    experts_per_token=4, bytes_per_gradient=4, dropout=False,
)  # fmt: skip
CLUSTER = ps.Cluster(
    n_gpus=8, gpu="h100_sxm", network=ps.Network(nodes=ps.Nodes(4, 1e-6, 4e11, 5e-6, 5e10))
)
#: Fields of `Parallel` that are no flag of ``pipesim plan``: routing is a table of TOML files.
NO_FLAG = {"routing"}
#: Fields of `Parallel` that `TrainerSettings.cost_options` lacks: flags of Megatron-LM and settings
#: of torchtitan that give them do not change the pipeline, and are among those ignored.
READ = {*SEARCHED, "expert_exchange", "flash_attention", "framework", "precision"}
NOT_READ = set(PARALLEL) - READ


def spread_costs(parallel: ps.Parallel | None = None, **settings: Any) -> ps.Costs:
    """Return the costs of two stages with experts, spread with these settings."""
    record = ps.Parallel(**{**(parallel.settings if parallel else {}), **settings})
    options = {"microbatch_size": 1, **settings} if parallel is None else settings
    return EXPERTS.costs(
        [2, 2], gpu="h100_sxm", network=CLUSTER.network(record.n_gpus), parallel=parallel, **options
    )


def test_all_settings_of_parallel_have_an_example() -> None:
    """Add a field of `Parallel` above; `ParallelSettings` has the same names and types."""
    assert tuple(SPREAD) == PARALLEL
    hints, types = get_type_hints(ps.Parallel), get_type_hints(ParallelSettings)
    assert types.keys() == set(PARALLEL)
    assert {name for name in PARALLEL if hints[name] != types[name]} == {"routing", "framework"}


@pytest.mark.parametrize("name", PARALLEL)
def test_costs_know_each_setting_of_parallel(name: str) -> None:
    """It changes costs, in each way to give it, and files keep it."""
    chosen = SPREAD[name]
    others = {key: value for key, value in chosen.items() if key != name}
    costs = spread_costs(**chosen)
    assert costs != spread_costs(**others)
    record = ps.Parallel(**{"microbatch_size": 1, **others})
    assert spread_costs(parallel=record, **{name: chosen[name]}) == costs
    assert ps.Costs.from_dict(costs.to_dict()).rebuilt(network=costs.network) == costs
    table = {**vars(EXPERTS), "microbatch_size": 1, "gpu": "h100_sxm", "layers_per_stage": [2, 2]}
    settings = {"transformer": {**table, **chosen}, "network": costs.network.to_dict()}
    assert transformer_costs(settings, ps.Placement.linear(2)) == costs
    assert name in ("recompute", "framework") or FLAT[name] == ("costs", "transformer", name)


@pytest.mark.parametrize("name", PARALLEL)
def test_plans_know_each_setting_of_parallel(name: str) -> None:
    """It changes the step or the memory of a configuration, or is a setting of configurations."""
    chosen = SPREAD[name]

    def planned(**settings: Any) -> list[float]:
        usual = dict.fromkeys(("tensor_parallel", "microbatch_size", "expert_parallel"), 1)
        flags = dict.fromkeys(("flash_attention", "sequence_parallel"), False)
        options = {
            **usual, **flags, "recompute": "none", "expert_tensor_parallel": 0, **settings
        }  # fmt: skip
        plan = ps.plan(
            EXPERTS, CLUSTER, global_batch=16, pipeline_parallel=1, schedules="1f1b",
            progress=False, **options,
        ).best  # fmt: skip
        assert plan.choice.shard_options.items() >= {k: options[k] for k in usual}.items()
        return [plan.step, plan.evaluation.memory, *plan.costs.output_bytes]

    others = {key: value for key, value in chosen.items() if key != name}
    assert planned(**chosen) != planned(**others)


def test_flags_and_trainers_know_each_setting_of_parallel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`pipesim plan` has a flag, and settings of trainers give it to `costs`, or a list has it."""
    text = succeed(capsys, "plan", "--help")
    text = text.replace("[no-]", "")
    lacking = {name for name in PARALLEL if f"--{name.replace('_', '-')}" not in text}
    assert lacking == NO_FLAG
    flags = "--micro-batch-size 1 --num-layers 4 --expert-model-parallel-size 2"
    flags += " --moe-token-dispatcher-type alltoall"
    options = ps.read_megatron(flags).cost_options
    assert set(PARALLEL) - options.keys() == NOT_READ


@pytest.mark.parametrize("section", SECTIONS)
def test_trainings_know_each_key_of_a_configuration(section: str) -> None:
    """The page lists it, and a training reads it."""
    page = (ROOT / "docs" / "how_to" / "train.md").read_text()
    listed = re.search(
        rf"^\[{section}\]\n((?:.+\n)+)", page.split("All sections and keys")[1], re.M
    )
    assert listed, section
    keys = {key.name for key in fields(SECTIONS[section])}
    assert keys - set(re.findall(r"\w+", listed[1])) == set()
    read = {
        x.attr
        for x in ast.walk(ast.parse(inspect.getsource(train_config)))
        if isinstance(x, ast.Attribute)
    }
    assert keys - read == set()
