"""Public callables that are not attacked, and values that are allowed, each with its reason."""

from __future__ import annotations

_PLAIN = "a record of columns or numbers, made by the library; what takes it checks it"
_INSIDE = "part of an engine, called with arrays that it made itself; its callers are attacked"
_WORKER = "part of a device, called by the executor in its own threads"
_DRAWN = "takes what the library made; other types raise Python's own error"
_GROUP = "part of the protocol between processes, which all call alike; the pipeline is attacked"

UNATTACKED: dict[str, str] = {
    "ps.Action": "a named tuple; what takes an order checks its actions",
    "ps.analysis.AutogradOrders": _PLAIN,
    "ps.graph.AutogradEdge": "a named tuple; AutogradGraph checks it",
    "ps.graph.AutogradGraph": "px.autograd_graph makes it",
    "ps.graph.AutogradNode": _PLAIN,
    "ps.calibration.Calibration": "GPU.fit makes it",
    "ps.calibration.Calibration.network": _DRAWN,
    "ps.calibration.Calibration.plot": _DRAWN,
    "ps.ClosedForm": "register checks it",
    "ps.ClosedForm.of": "NaN is its documented answer where a formula fails",
    "ps.costs.CostTable": _PLAIN,
    "ps.costs.CostTable.rows": _INSIDE,
    "ps.scheduling.Counts": "a named tuple; register checks it",
    "ps.Link.unchecked": "says what it is",
    "ps.simulation.Empirical.quantile": _INSIDE,
    "ps.simulation.LogNormal.quantile": _INSIDE,
    "ps.simulation.Normal.quantile": _INSIDE,
    "ps.Network.collective_links": _INSIDE,
    "ps.Network.resolve": _INSIDE,
    "ps.Network.resolve_host": _INSIDE,
    "ps.NodeCollectives.rate": _INSIDE,
    "ps.NodeCollectives.scaled": "Network.scaled checks its factors",
    "ps.Nodes.nic_of": _INSIDE,
    "ps.Nodes.node_of": _INSIDE,
    "ps.Noise.applied": _INSIDE,
    "ps.Noise.device_factors": _INSIDE,
    "ps.Noise.draw": _INSIDE,
    "ps.Noise.keys": _INSIDE,
    "ps.Noise.prepare": _INSIDE,
    "ps.Noise.slowed": _INSIDE,
    "ps.models.Packing": "Transformer.pack makes it",
    "ps.Op": "an enumeration: Python's ValueError names what is none",
    "ps.scheduling.Overlapped": "a named tuple; what takes an order checks its actions",
    "ps.network.Routes": _PLAIN,
    "ps.simulation.Scenarios": _PLAIN,
    "ps.planning.OptimizedSchedule": "optimize makes it",
    "ps.planning.Plan": "plan makes it",
    "ps.planning.PlanChoice": "choice makes it; what takes a configuration checks it",
    "ps.planning.Plans": "plan makes it",
    "ps.Schedule": "not checked when it is made, so that a wrong one can be looked at; verify does",
    "ps.graph.Task": _PLAIN,
    "ps.costs.TaskCosts": "simulate checks it",
    "ps.TaskGraph": "build is for users; verify checks what others make",
    "ps.TaskGraph.is_op": _INSIDE,
    "ps.TaskGraph.of_kinds": _INSIDE,
    "ps.planning.TrainerSettings": "read_megatron and read_torchtitan make it",
    "ps.graph.Tasks": "checked when it is wired",
    "ps.models.Kernel": "a named tuple; GPU.kernel_seconds checks it",
    **{f"ps.plot.{name}": _DRAWN for name in (
        "accuracy", "overlay", "panels", "plan_front", "save")},
    "ps.plot.Style": "plot.style makes it",
    "ps.plot.Style.use": "takes nothing",
    "ps.trace.lanes": _INSIDE,
    "ps.trace.names": _INSIDE,
    "ps.trace.nanoseconds": _INSIDE,
    "ps.trace.slice_event": _INSIDE,
    "ps.trace.write": _INSIDE,
    "px.EmbeddingStage.output_signature": "part of the executor, which asks every stage for it",
    "px.validation.Equivalence": "check_equivalent makes it",
    "px.executor.EvaluationResult": _PLAIN,
    "px.executor.Generation": _PLAIN,
    **{f"px.Experts.{name}": "part of the executor, which runs a layer piece by piece" for name in (
        "combine", "compute", "like_output", "route")},
    "px.LRSchedulers.step": "arguments are torch's, and so are its errors",
    "px.Microbatches.pin_memory": "takes nothing; without a GPU torch refuses it",
    "px.Microbatches.map": "calls the user's function, whose errors are its own",
    "px.GPipe.cpu": "is refused, whatever the arguments",
    "px.GPipe.cuda": "is refused, whatever the arguments",
    "px.GPipe.to": "arguments are torch's, and so are its errors",
    "px.Pipeline.allocated": "needs a GPU; its arguments go where those of device_bytes go",
    "px.distributed.Processes": "join makes it",
    **{f"px.distributed.Processes.{name}": _GROUP for name in (
        "agree", "barrier", "blame", "break_connections", "channel", "check", "close", "fail",
        "gather", "group", "guard", "next_number", "open", "publish", "published", "share",
        "spread", "total")},
    "px.profiling.Profile": _PLAIN,
    "px.projection.Projection": _PLAIN,
    **{f"px.devices.{device}.{name}": _WORKER for device in ("Slice", "Worker") for name in (
        "abandon", "adopt", "await_link", "carry", "close", "from_host", "from_peer", "has_thread",
        "host", "mark", "rejoin", "stream", "synchronize", "to_host", "to_peer", "wait_for_host")},
    "px.devices.Slice": "slices makes it",
    "px.Stages": "split makes it",
    "px.executor.StepResult": _PLAIN,
    "px.training.TrainingRun": "train makes it",
    "px.validation.Validation": _PLAIN,
    "px.devices.Worker": "workers makes it",
}  # fmt: skip

#: By callable and parameter: values that are accepted though no rule of `bad_values` allows them.
ALLOWED: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("ps.Transformer.costs", "lengths"): (
        ("[[1], [1, 2]]", "array"),
        "tokens of documents, and of sequences",
    ),
    ("px.latest_checkpoint", "directory"): (
        ("folder", "missing folder"),
        "without a checkpoint the answer is None",
    ),
    ("px.save_checkpoint", "path"): (("missing folder",), "its parents are made"),
    ("px.Microbatches.split", "dim"): (("-1",), "the last dimension, as in torch"),
    ("ps.Framework", "schedules"): (("['x']",), "a schedule that is registered later"),
    ("px.Pipeline.total", "values"): (("[nan]",), "NaN is a number, and so is its sum"),
    ("ps.Costs", "buckets"): (("[]", "()", "empty array"), "no stage; a graph of any refuses it"),
    ("ps.Costs", "skip_bytes"): (("()",), "no skip, as saved costs have it"),
    ("ps.Costs", "exchange_bytes"): (("()",), "no stage, as kept costs have it"),
    ("ps.plan", "n_jobs"): (("-1",), "one a core, as in ps.sweep"),
    ("ps.plan", "shard_parameters"): (
        ("10**12", "10**30", "10**400"),
        "a device keeps as many stages as it has",
    ),
    **{
        ("ps.plan", name): (("array",), "an array of numbers lists values as a list does")
        for name in (
            "tensor_parallel",
            "pipeline_parallel",
            "data_parallel",
            "microbatch_size",
            "n_chunks",
            "context_parallel",
            "expert_parallel",
            "n_slices",
            "group_size",
        )
    },
    ("ps.Keys", "frequencies"): (("[[1], [1, 2]]",), "tables of one row and of two"),
    ("ps.Keys.from_counts", "counts"): (("[[1], [1, 2]]",), "tables of one row and of two"),
    ("ps.Timeline.from_chrome", "step"): (("int64",), "steps count backwards from -1"),
    **{
        (f"ps.TaskGraph.{name}", option): (("''", "{}", "[]", "empty array"), "none, in any form")
        for name in ("build", "wire")
        for option in ("skips", "tied", "offload_shares")
    },
    **{
        (f"ps.TaskGraph.{name}", "edges"): (("None",), "a chain, as in Placement")
        for name in ("build", "wire")
    },
    ("ps.lower", "offload"): (("0",), "the share 0 of the bytes: none"),
    ("ps.Cluster", "memory"): (("1.5", "10**12", "10**30", "float32"), "bytes of a GPU"),
    ("ps.compare", "memory_limit"): (
        ("0", "1.5", "inf", "1e308", "10**12", "10**30", "float32"),
        "bytes; a row says whether it fits",
    ),
    **{
        (f"ps.{name}", "memory_limit"): (
            ("inf", "1e308", "10**12", "10**30"),
            "more bytes than any order needs",
        )
        for name in ("lower_bound", "optimize", "order_by", "simulate")
    },
    ("ps.register", "placement"): (("lambda", "class"), "a function of the number of devices"),
    ("ps.lower", "skips"): (("{}",), "no skip; of a mapping the keys count"),
    ("px.ShardedEmbedding", "padding_key"): (
        ("-1", "int64"),
        "no row: stands for no key",
    ),
    ("px.ShardedEmbedding.dispatch", "keys"): (("*",), "raised by its phases, once others know"),
    **{
        ("px.train", name): (("lambda", "class"), "a function; what it returns does not matter")
        for name in ("on_step", "on_evaluation", "on_checkpoint")
    },
    ("px.train", "directory"): (("missing folder",), "its parents are made"),
    ("px.projection.Projection.save", "record"): (("{None: None}",), "JSON writes null"),
    ("px.profiling.Profile.save", "record"): (("{None: None}",), "JSON writes null"),
    ("px.validation.Validation.save", "record"): (("{None: None}",), "JSON writes null"),
}
#: Counts of work that is done as often as asked: nothing else is wrong with a large one.
ENDLESS = frozenset({"n_steps", "warm_up", "repeat"})
