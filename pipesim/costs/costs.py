"""`Costs`: how long each operation takes and how many bytes it moves or holds, stage by stage."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.collective_costs import Buckets, CollectiveCosts, Priced, checked_buckets
from pipesim.costs.exchange_bytes import ExchangeBytes, as_mapping, checked_exchange_bytes
from pipesim.costs.layer_split import Partition, Split
from pipesim.costs.task_costs import CostTable, TaskCosts, message_bytes, message_ends
from pipesim.errors import CostsError, check_count, check_name, check_type, number
from pipesim.graph.graph import TaskGraph
from pipesim.graph.skips import SkipBytes, checked_skip_bytes, skip_text
from pipesim.graph.skips import message_bytes as bytes_of_skips
from pipesim.network.network import ALL_REDUCE, Network
from pipesim.ops import COLLECTIVES, EXCHANGES, RECVS, SENDS, Op
from pipesim.scheduling.placement import Placement
from pipesim.utils.atomic_write import check_path, read_json, write_text
from pipesim.utils.host_memory import check_stages
from pipesim.utils.texts import CHECKSUM, changed, checksum

if TYPE_CHECKING:
    import pandas as pd

    from pipesim.models.layers import Layers
    from pipesim.timeline.timeline import Timeline

__all__ = ["Costs"]

PerStage = float | tuple[float, ...]
#: Field that says how long a collective takes, where that was measured.
MEASURED_COLLECTIVES = {
    "REDUCE_GRAD": "reduce_grad",
    "UNSHARD": "unshard",
    "counts": "exchange_counts",
    "keys": "exchange_keys",
    "vectors": "exchange_vectors",
    "gradients": "exchange_gradients",
    "accumulated": "exchange_accumulated",
}
#: Fields that are no share of what a device has.
_OF_EACH_STAGE = ("launch", "output_bytes", "output_seconds")
_OPTIONAL = (
    *("forward", "backward", "input_grad", "weight_grad", "overlapped", "recompute"),
    *("gradient_bytes", "vector_bytes", "reorder_gradients", *MEASURED_COLLECTIVES.values()),
)


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of each operation: one number for all stages, or one a stage.

    Attributes
    ----------
    forward, backward
        Seconds of F and of B.
    input_grad, weight_grad
        Seconds of I and of W. ``backward`` defaults to their sum.
    overlapped
        Seconds of an F and a B that run as one action; defaults to the sum of both. Where their
        stages differ each counts with its share, as ``forward`` and ``backward`` divide it.
    recompute
        Seconds of R; defaults to ``forward``.
    optimizer_step, launch
        Seconds of STEP, and of the host to issue one task of the stage. A STEP takes its share of
        them where the optimizer is sharded.
    dispatch, reorder, reorder_gradients
        Seconds in which a sharded stage groups the keys of a micro-batch by owner (DISPATCH), puts
        its vectors in order, and sums the gradients of each key (REORDER), where these are tasks of
        their own. ``reorder_gradients`` defaults to ``reorder``.
    reduce_grad, unshard
        Seconds of collectives as they were measured, in place of those that follow from ``network``
        and bytes: of REDUCE_GRAD of all gradients of a stage, and of UNSHARD.
    exchange_counts, exchange_keys, exchange_vectors, exchange_gradients, exchange_accumulated
        Likewise of each ALL_TO_ALL of a sharded stage.
    output_bytes
        Bytes of a stage's output for one micro-batch: the message to the next stage, and its
        gradient on the way back.
    output_seconds
        Seconds that each of these two messages holds its stream, and its links but for those of
        endless bandwidth, besides bytes over bandwidth: of a message that is priced in seconds,
        which latency alone would not hold (rule 4). With ``overlap=False`` it blocks its sender.
    activation_bytes
        Bytes that a stage holds from F to B for one micro-batch, its input included.
    weight_grad_bytes
        Bytes that are held between I and W: of the activations, and gradients of outputs.
    parameter_bytes, optimizer_bytes
        Bytes of a stage's parameters, which UNSHARD gathers, and of its optimizer state, of which
        a replica has its share where the optimizer is sharded; of a sharded stage, of one
        replica's rows.
    gradient_bytes
        Bytes of a stage's gradients, which each replica holds whole (as in ZeRO-1) and REDUCE_GRAD
        moves; defaults to ``parameter_bytes``. Twice those for gradients in 32 bits of parameters
        in 16.
    key_bytes, vector_bytes
        Bytes that a sharded stage of one replica asks for in one micro-batch: of keys, and of their
        vectors (``output_bytes``, if not given), which gradients are as many of. Each replica sends
        an equal part of them to each. Gradients of all micro-batches in one exchange are as many as
        those of each, as if no two of them shared a row; ``exchange_bytes`` may say better.
    exchange_bytes
        Bytes of uneven exchanges, which go before ``key_bytes`` and ``vector_bytes``: a mapping
        from stage to a mapping from exchange (`pipesim.ops.EXCHANGES`) to a matrix of shape
        ``(n_replicas, n_replicas)``, whose row ``i`` is sent by replica ``i``, such as
        ``{0: keys.exchange_bytes(4, dim=64)}`` of `pipesim.Keys`; kept as tuples. None for none.
    buckets
        Of each stage, its buckets of gradients as pairs: the share of the bytes, or of the seconds
        of ``reduce_grad`` as measured beside a backward, which may sum to more than 1; and the
        share of the last backward after which the bucket is complete. None: even shares of both.
    skip_bytes
        Bytes that each skip connection carries for one micro-batch, and its gradient on the way
        back: one number for all, or a mapping from ``(source, target)`` stages, which is kept as
        pairs; None for none. Devices hold them as part of ``activation_bytes``.
    network
        Links between devices.
    all_reduce
        Algorithm of REDUCE_GRAD, ``"ring"`` or ``"tree"``; `Network.all_reduce` has the formulas.

    Raises
    ------
    CostsError
        For values that are negative, NaN, infinite, None or no numbers, naming field and stage.
    UnknownNameError
        For another algorithm.
    """

    forward: PerStage | None = None
    backward: PerStage | None = None
    input_grad: PerStage | None = None
    weight_grad: PerStage | None = None
    overlapped: PerStage | None = None
    recompute: PerStage | None = None
    optimizer_step: PerStage = 0.0
    dispatch: PerStage = 0.0
    reorder: PerStage = 0.0
    reorder_gradients: PerStage | None = None
    launch: PerStage = 0.0
    output_bytes: PerStage = 0.0
    output_seconds: PerStage = 0.0
    activation_bytes: PerStage = 0.0
    weight_grad_bytes: PerStage = 0.0
    parameter_bytes: PerStage = 0.0
    optimizer_bytes: PerStage = 0.0
    gradient_bytes: PerStage | None = None
    reduce_grad: PerStage | None = None
    unshard: PerStage | None = None
    exchange_counts: PerStage | None = None
    exchange_keys: PerStage | None = None
    exchange_vectors: PerStage | None = None
    exchange_gradients: PerStage | None = None
    exchange_accumulated: PerStage | None = None
    key_bytes: PerStage = 0.0
    vector_bytes: PerStage | None = None
    buckets: Buckets | None = None
    exchange_bytes: Mapping[int, Mapping[str, Any]] | ExchangeBytes | None = None
    skip_bytes: Mapping[tuple[int, int], float] | SkipBytes | None = None
    network: Network = field(default_factory=Network)
    all_reduce: str = "ring"

    def __post_init__(self) -> None:
        if not isinstance(self.network, Network):
            raise CostsError(f"network must be a pipesim.Network, got {self.network!r}")
        check_name("all-reduce", self.all_reduce, ALL_REDUCE)
        for name in VALUE_FIELDS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, _checked(name, value))
        object.__setattr__(self, "skip_bytes", checked_skip_bytes(self.skip_bytes))
        object.__setattr__(self, "buckets", checked_buckets(self.buckets))
        object.__setattr__(self, "exchange_bytes", checked_exchange_bytes(self.exchange_bytes))
        if self.forward is None:
            raise CostsError("forward is missing; give the seconds of F, one or one a stage")

    def per_stage(self, name: str, n_stages: int) -> NDArray[np.float64]:
        """Return a field as one value a stage, shape ``(n_stages,)``.

        Raises
        ------
        CostsError
            If it was given for another number of stages, or not at all.
        UnknownNameError
            For a name that is no field.
        ArgumentError
            For a number of stages that is no whole number of at least 1.
        CapacityError
            If so many values would not fit in memory.
        """
        check_stages(check_count("n_stages", n_stages))
        value = getattr(self, check_name("cost", name, VALUE_FIELDS))
        if value is None and name == "recompute":
            return self.per_stage("forward", n_stages)
        if value is None and name == "gradient_bytes":
            return self.per_stage("parameter_bytes", n_stages)
        if value is None and name == "reorder_gradients":
            return self.per_stage("reorder", n_stages)
        if value is None and name == "vector_bytes":
            return self.per_stage("output_bytes", n_stages)
        if value is None and name == "overlapped":
            return self._sum("overlapped", "forward", "backward", n_stages)
        if value is None and name == "backward":
            if self.input_grad is None or self.weight_grad is None:
                raise CostsError(
                    "backward is missing, and so is input_grad or weight_grad; give the seconds "
                    "of B, or of both I and W"
                )
            return self._sum("backward", "input_grad", "weight_grad", n_stages)
        if value is None:
            raise CostsError(f"{name} is missing, but the graph has tasks that need it")
        if isinstance(value, float):
            return np.full(n_stages, value)
        if len(value) != n_stages:
            raise CostsError(
                f"{name} has {len(value)} values for {n_stages} stages; give one, or one a stage"
            )
        return np.array(value)

    def _sum(self, name: str, first: str, second: str, n_stages: int) -> NDArray[np.float64]:
        """Return a field that was not given as the sum of two that were."""
        with np.errstate(over="ignore"):
            total: NDArray[np.float64] = self.per_stage(first, n_stages)
            total = total + self.per_stage(second, n_stages)
        endless = np.flatnonzero(np.isinf(total))
        if len(endless):
            raise CostsError(
                f"{name} of stage {endless[0]}, the sum of {first} and {second}, is too large a "
                f"number: inf; give smaller ones, or {name}"
            )
        return total

    def of(self, graph: TaskGraph) -> TaskCosts:
        """Return the costs of each task of ``graph``.

        Raises
        ------
        CostsError
            If an operation of the graph has none, or they are of another number of stages, or of
            other skips.
        NetworkError
            If a link names a device that the graph does not have.
        ArgumentError
            If it is no graph.
        """
        check_type("graph", graph, TaskGraph, "lower the schedule first")
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # the engines' caller checks that values are finite
            return self._of(graph)

    def _of(self, graph: TaskGraph) -> TaskCosts:
        kinds = graph.kinds
        duration, latency = np.zeros(len(kinds)), np.zeros(len(kinds))
        for op, name in DURATION_OF.items():
            of_op = kinds.op == op
            if of_op.any():
                duration[of_op] = self.per_stage(name, graph.n_stages)[kinds.stage[of_op]]
        sums = (kinds.op == Op.REORDER) & (kinds.part == EXCHANGES.index("gradients"))
        duration[sums] = self.per_stage("reorder_gradients", graph.n_stages)[kinds.stage[sums]]
        if self.overlapped is not None and kinds.overlapped.any():
            self._price_overlaps(graph, duration)
        nbytes = message_bytes(kinds, self.per_stage("output_bytes", graph.n_stages))
        nbytes += bytes_of_skips(kinds, graph.skips, graph.portals, self.skip_sizes)
        transfers = np.flatnonzero(kinds.is_op(SENDS | RECVS))
        source, target = message_ends(kinds, transfers)
        routes = self.network.resolve(source, target, graph.n_devices)
        latency[transfers] = routes.latency
        links = np.full((len(kinds), routes.links.shape[1]), -1, dtype=np.int64)
        is_send = kinds.is_op(SENDS)[transfers]
        sends = transfers[is_send]
        links[sends] = routes.links[is_send]
        fixed = message_bytes(kinds, self.per_stage("output_seconds", graph.n_stages))
        duration[sends] = fixed[sends] + nbytes[sends] / routes.bandwidth[is_send]
        launch = self.per_stage("launch", graph.n_stages)[kinds.stage]
        share = np.ones(len(kinds))
        if kinds.is_op(COLLECTIVES).any():
            priced = Priced(duration, nbytes, links, share)
            duration, nbytes, links, share = self._collectives(graph).price(graph, priced)
        table = CostTable(duration, latency, launch, nbytes, links, share)
        return TaskCosts(table, graph.kind, None, self)

    @property
    def skip_sizes(self) -> SkipBytes | None:
        """``skip_bytes`` as they are kept: one number, or pairs of a skip and its bytes."""
        return checked_skip_bytes(self.skip_bytes)

    def _price_overlaps(self, graph: TaskGraph, duration: NDArray[np.float64]) -> None:
        """Fill the seconds of the halves of overlapped actions."""
        forward, backward, both = (
            self.per_stage(name, graph.n_stages) for name in ("forward", "backward", "overlapped")
        )
        alone = forward + backward
        share = np.divide(forward, alone, out=np.full_like(alone, 0.5), where=alone > 0)
        halves = np.flatnonzero(graph.kinds.overlapped)
        first = (both * share)[graph.kinds.stage[halves]]
        whole = both[graph.kinds.stage[halves]]
        duration[halves] = np.where(graph.kinds.op[halves] == Op.F, first, whole - first)

    def _collectives(self, graph: TaskGraph) -> CollectiveCosts:
        """Return what collectives cost."""
        n_stages = graph.n_stages
        exchange_bytes = as_mapping(checked_exchange_bytes(self.exchange_bytes))
        for stage in exchange_bytes:
            if stage >= n_stages:
                raise CostsError(
                    f"exchange_bytes are of stage {stage}, but the graph has {n_stages} stages, "
                    f"0..{n_stages - 1}; give those of its sharded stages"
                )
            if graph.sharded and stage not in graph.sharded:
                raise CostsError(
                    f"exchange_bytes are of stage {stage}, but the graph was lowered with "
                    f"sharded={list(graph.sharded)}: no other stage exchanges; give theirs"
                )
        bytes_of = {
            field: self.per_stage(name, n_stages)
            for field, name in (
                ("gradient_bytes", "gradient_bytes"),
                ("parameter_bytes", "parameter_bytes"),
                ("key_bytes", "key_bytes"),
                ("vector_bytes", "vector_bytes"),
            )
        }
        measured = {
            name: self.per_stage(field, n_stages)
            for name, field in MEASURED_COLLECTIVES.items()
            if getattr(self, field) is not None
        }
        return CollectiveCosts(
            self.network,
            self.all_reduce,
            measured=measured,
            buckets=self.buckets,
            exchange_bytes=exchange_bytes,
            **bytes_of,
        )

    def in_chunks(self, placement: Placement) -> Costs:
        """Return the costs of the stages of a placement, given those of all that a device holds.

        So that schedules with one and with several stages a device are compared for one model:
        seconds and bytes of a device are shared evenly by its stages, on the first path of a
        bidirectional placement. ``launch``, ``output_bytes`` and ``output_seconds`` stay as they
        are.

        Raises
        ------
        CostsError
            If there is neither one value nor one a device.
        ArgumentError
            If it is no placement.
        """
        check_type("placement", placement, Placement)
        stages = np.array(placement.device_of)
        share = np.bincount(stages)[stages]
        changed: dict[str, Any] = {}
        for name in VALUE_FIELDS:
            value = getattr(self, name)
            if value is None or (name in _OF_EACH_STAGE and isinstance(value, float)):
                continue
            if isinstance(value, tuple) and len(value) != placement.n_devices:
                raise CostsError(
                    f"{name} has {len(value)} values for {placement.n_devices} devices; give one, "
                    "or one a device"
                )
            of_device = np.broadcast_to(np.array(value, dtype=float), placement.n_devices)
            whole = of_device[stages]
            changed[name] = whole if name in _OF_EACH_STAGE else whole / share
        if self.buckets is not None and len(self.buckets) == placement.n_devices:
            changed["buckets"] = tuple(self.buckets[device] for device in placement.device_of)
        return replace(self, **changed)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or TOML; unset fields are left out."""
        values = {name: getattr(self, name) for name in VALUE_FIELDS}
        if isinstance(self.skip_sizes, tuple):
            values["skip_bytes"] = {skip_text(skip): size for skip, size in self.skip_sizes}
        else:
            values["skip_bytes"] = self.skip_sizes
        return {
            **{name: value for name, value in values.items() if value is not None},
            "network": self.network.to_dict(),
            "all_reduce": self.all_reduce,
            **({} if self.buckets is None else {"buckets": self.buckets}),
            **({} if self.exchange_bytes is None else {"exchange_bytes": self._exchange_values()}),
        }

    def _exchange_values(self) -> dict[str, dict[str, Any]]:
        """Return ``exchange_bytes`` as they stand in files."""
        kept = checked_exchange_bytes(self.exchange_bytes)
        return {str(stage): dict(matrices) for stage, matrices in kept or ()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """Read what `to_dict` wrote.

        Raises
        ------
        CostsError
            If it is no mapping, or has an unknown key, naming that and the nearest known one.
        """
        if not isinstance(values, Mapping):
            raise CostsError(
                f"costs must be a mapping of names to values, got {values!r:.60}; "
                'give such as {"forward": 1e-3, "backward": 2e-3}'
            )
        for key in values:
            check_name("cost", key, (*VALUE_FIELDS, *OTHER_FIELDS, "network"))
        network = Network.from_dict(values.get("network", {}))
        return cls(**{**values, "network": network})

    def save(self, path: Path | str) -> None:
        """Write the costs as JSON, whole or not at all.

        A checksum of the values is among them: delete its line if you change the file by hand.

        Raises
        ------
        ArgumentError
            For something that is no path, and a file that cannot be written.
        """
        path, values = check_path("path", path, "write"), self.to_dict()
        text = json.dumps({CHECKSUM: checksum(values), **values}, indent=2) + "\n"
        write_text(path, text)

    @classmethod
    def load(cls, path: Path | str) -> Costs:
        """Read the JSON that `save` wrote, or one written by hand, which needs no checksum.

        Raises
        ------
        ArgumentError
            For something that is no path.
        CostsError
            Naming the file, if it is missing, is no regular file, names a key twice, holds
            something else, or was changed after it was written.
        CapacityError
            For a file that is too large for memory.
        """
        path = check_path("path", path)
        values = read_json(path, "costs from", CostsError)
        if not isinstance(values, dict):
            raise CostsError(f"{path} holds no costs, but {type(values).__name__}")
        costs = cls.from_dict({key: value for key, value in values.items() if key != CHECKSUM})
        if values.get(CHECKSUM, found := checksum(values)) != found:
            raise CostsError(changed(path, f'delete the line "{CHECKSUM}"'))
        return costs

    @classmethod
    def transformer(cls, layers_per_stage: Split, **settings: Any) -> Costs:
        """Return the costs of a transformer's stages, from its sizes.

        Parameters
        ----------
        layers_per_stage
            Layers of each stage, or a number of stages that get as many each, unless
            ``partition="balanced"`` is among the settings.
        **settings
            The fields of `pipesim.Transformer` (``hidden_size``, ``n_heads``, ...; ``n_layers``
            may be left out where the layers of each stage are given) and the arguments of its
            ``costs`` (``microbatch_size``, ``flops_per_second``, ``tensor_parallel``, ...).

        Raises
        ------
        ArgumentError
            For settings that are unknown, missing or impossible.

        Examples
        --------
        >>> costs = Costs.transformer(
        ...     [3, 3, 3, 2], hidden_size=1024, n_heads=16, sequence_length=1024,
        ...     vocabulary_size=50304, microbatch_size=4, flops_per_second=150e12)
        """
        from pipesim.models.transformer import costs_from_sizes

        return costs_from_sizes(layers_per_stage, **settings)

    @classmethod
    def from_layers(
        cls,
        layers: Layers | pd.DataFrame | Path | str,
        split: Split,
        *,
        partition: Partition | None = None,
        launch: PerStage = 0.0,
        network: Network | None = None,
    ) -> Costs:
        """Return the costs of stages made of profiled layers, from CSV or a DataFrame.

        Parameters
        ----------
        layers
            One row a layer; `pipesim.Layers` says which columns there are.
        split
            Layers of each stage, or a number of stages, which are balanced unless ``partition``
            says otherwise.
        partition
            How a number of stages is made of the layers: ``"balanced"`` (the default here), so
            that the slowest stage takes as little time as it can (`pipesim.balanced_split`), or
            ``"even"``, with as many layers each (the default of `Transformer.costs`).
        launch, network
            As in `Costs`.

        Raises
        ------
        CostsError
            For a table that cannot be read, naming file, line and column.
        ArgumentError
            For a split that does not suit the number of layers.
        """
        from pipesim.models.layers import costs_from_layers

        return costs_from_layers(layers, split, partition=partition, launch=launch, network=network)

    @classmethod
    def from_timeline(
        cls,
        timeline: Timeline,
        *,
        average: str = "mean",
        network: Network | None = None,
        **fields: Any,
    ) -> Costs:
        """Return the costs that a timeline shows, to ask what would be if something were changed.

        Seconds of F, B, I, W, R and STEP are averages over the tasks of each stage. A stage that
        only ever ran I and W has their sum for B, one without R has F; I and W are left out where
        some stage has none, since nobody knows the shares of its B. Halves of overlapped actions
        do not count as F and B; ``overlapped`` is the average of a stage's F halves plus that of
        its B halves, where the timeline has any. ``skip_bytes`` are those of its costs, or where it
        has none, of its messages that carry one skip alone. Messages have the sizes of the
        timeline, the bandwidth at which their SENDs went, and as latency what they took beside, on
        average over those that were waited for and whose RECV did not wait for its own stream or
        host; the least of all, which is the most that it can be, where there are none. ``launch``
        is 0 unless it is given: where hosts were in time, it changes nothing, and a trace of
        another framework does not show it. Collectives have their seconds from when their last
        member began (``reduce_grad``, ``unshard``, ``exchange_...``; ``buckets`` where gradients
        have some), which are those of as many replicas on such links; where ``network`` or their
        bytes are given, these say how long they take.

        Parameters
        ----------
        timeline
            Measured or simulated, and whole. Its own costs, where it has any, give the other bytes.
        average
            ``"mean"``, which keeps sums and so predicts makespans best, or ``"median"``.
        network
            Instead of the one that the messages show; ``Network()`` makes them free.
        **fields
            Other fields of `Costs`, instead of what the timeline shows.

        Raises
        ------
        TimelineError
            If tasks of the timeline did not run, or it does not show the bytes of a skip.
        UnknownNameError
            For an unknown average or field.

        Warns
        -----
        AccuracyWarning
            If reductions took more than 1 % of the timeline, ``network`` is given, and neither its
            own costs nor ``fields`` have ``parameter_bytes``. If tasks waited until their host had
            issued them for more than 1 % of the timeline, and ``launch`` is not given.
        """
        from pipesim.analysis.measured_costs import costs_from_timeline

        return costs_from_timeline(timeline, average=average, network=network, **fields)

    def scaled(
        self, factor: float, *, stage: int | None = None, n_stages: int | None = None
    ) -> Costs:
        """Return the same costs with the seconds of all stages, or of one, times a factor.

        Parameters
        ----------
        factor
            0.5 makes a stage twice as fast. Messages and launches keep their times.
        stage
            Which stage; all, if None.
        n_stages
            How many stages there are; needed where costs have one value for all stages, and one of
            them is to be scaled.

        Raises
        ------
        CostsError
            For a factor that is negative or not finite, a stage that these costs do not have, and
            another number of stages than theirs.

        Examples
        --------
        >>> Costs(forward=1, backward=2).scaled(2.5, stage=2, n_stages=4).forward
        (1.0, 1.0, 2.5, 1.0)
        """
        from pipesim.analysis.measured_costs import scaled

        return scaled(self, factor, stage, n_stages)


#: Fields of `Costs` that are plain values, but not of stages.
OTHER_FIELDS = ("skip_bytes", "all_reduce", "buckets", "exchange_bytes")
#: Every field of `Costs` that is a number or one number a stage.
VALUE_FIELDS = tuple(f.name for f in fields(Costs) if f.name not in (*OTHER_FIELDS, "network"))

#: Field that says how long an operation takes; messages and collectives ask the network.
DURATION_OF = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input_grad",
    Op.W: "weight_grad",
    Op.R: "recompute",
    Op.STEP: "optimizer_step",
    Op.DISPATCH: "dispatch",
    Op.REORDER: "reorder",
}


def _checked(name: str, value: object) -> PerStage:
    """Return a float, or a tuple of them."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, (tuple, list)):
        return _checked_number(name, value, "")
    if not value:
        raise CostsError(f"{name} is empty; give one value, or one a stage")
    return tuple(_checked_number(name, v, f" of stage {s}") for s, v in enumerate(value))


def _checked_number(name: str, value: object, where: str) -> float:
    got = number(value)
    if got is None or got < 0 or math.isinf(got):
        unit = "bytes" if name.endswith("bytes") else "seconds"
        raise CostsError(f"{name}{where} must be finite {unit} >= 0, got {value!r}")
    return got
