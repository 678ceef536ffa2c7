"""`LoweringOptions`, the options of `pipesim.lower` that a task graph keeps, and their values.

An option of stages, devices or replicas may have one value for all, or one for each. It is checked
here, and written as text to files and read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import (
    ArgumentError,
    GraphError,
    UnknownNameError,
    check_count,
    check_name,
    number,
)
from pipesim.graph.skips import Skip, checked_skips, skip_from_text, skip_text, skips_of
from pipesim.graph.tasks import Kinds
from pipesim.ops import Op
from pipesim.scheduling.placement import Edges, checked_edges, skip_edges
from pipesim.scheduling.schedule import Schedule, Versions
from pipesim.utils.checks import Count, Whole, checked
from pipesim.utils.csr import Ints
from pipesim.utils.texts import parse_float, parse_int

#: One host, a host a device, or the number of each device's host.
Hosts = Literal["one", "per_device"] | Sequence[int] | NDArray[np.integer[Any]]
HOSTS = ("one", "per_device")
_ADVICE = "give the number of each device's host"


def host_of_devices(hosts: object, n_devices: int) -> NDArray[np.int64]:
    """Return the number of the host of each device, of all replicas; shape ``(n_devices,)``.

    ``hosts`` is ``"one"``, ``"per_device"``, or the number of each device's host: whole numbers
    from 0 without gaps. Also as text, ``"0,0,1,1"``.
    """
    numbers, example = _host_numbers(hosts), [device // 2 for device in range(min(n_devices, 4))]
    if numbers is None:
        try:
            is_one = check_name("hosts", hosts, HOSTS) == "one"
        except UnknownNameError as error:
            raise UnknownNameError(f"{error}; or {_ADVICE}, such as {example}") from None
        return np.zeros(n_devices, np.int64) if is_one else np.arange(n_devices)
    if len(numbers) != n_devices:
        raise ArgumentError(
            f"hosts has {len(numbers)} numbers, for a graph of {n_devices} devices (of all "
            f"replicas); {_ADVICE}, such as {example}"
        )
    for device, value in enumerate(numbers):
        is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_whole or not 0 <= value < n_devices:
            raise ArgumentError(
                f"hosts: device {device} has host {value!r:.40}; hosts have whole numbers from 0 "
                f"to {n_devices - 1} at most: {_ADVICE}, such as {example}"
            )
    missing = set(range(max(numbers))).difference(numbers)
    if missing:
        raise ArgumentError(
            f"hosts names host {max(numbers)}, but no device has host {min(missing)}; number "
            "hosts from 0 without gaps"
        )
    return np.array(numbers, dtype=np.int64)


def _host_numbers(hosts: object) -> list[Any] | None:
    """Return the numbers in a list, an array or a text; None for anything else."""
    if isinstance(hosts, str):
        words = hosts.replace(",", " ").split()
        are_numbers = all(w.isascii() and w.isdecimal() and len(w) < 10 for w in words)
        return [int(word) for word in words] if words and are_numbers else None
    if isinstance(hosts, np.ndarray):
        return hosts.tolist() if hosts.ndim == 1 else None
    return list(hosts) if isinstance(hosts, (list, tuple, range)) else None


def hosts_text(host: NDArray[np.int64]) -> str:
    """Return ``one``, ``per_device``, or numbers such as ``0 0 1 1``, for `host_of_devices`."""
    if not host.any():
        return "one"
    return "per_device" if (host == np.arange(len(host))).all() else " ".join(map(str, host))


#: Between the values of stages, as text.
_BETWEEN = "/"


def _values_of_stages(
    name: str, value: object, n_stages: int, default: object, example: object, part: str = "stage"
) -> list[Any] | None:
    """Return the values of a sequence or a mapping, one a stage; None for another value.

    Stages that a mapping does not name have the ``default``. ``part``: ``"stage"``, or
    ``"device"`` for values of devices.
    """
    if isinstance(value, Mapping):
        if not value:
            raise ArgumentError(
                f"{name} is a mapping that names no {part}; give such as {{0: {example!r}}}"
            )
        for stage in value:
            if check_count(f"{name}: a {part}", stage, 0) >= n_stages:
                raise ArgumentError(
                    f"{name} names {part} {stage}; there are {n_stages} {part}s, 0..{n_stages - 1}"
                )
        return [value.get(stage, default) for stage in range(n_stages)]
    if not isinstance(value, (list, tuple)):
        return None
    if len(value) != n_stages:
        raise ArgumentError(
            f"{name} has {len(value)} values, and there are {n_stages} {part}s; give one "
            f"value for all, one a {part}, or a mapping from {part}s"
        )
    return list(value)


def values_text(values: object) -> str:
    """Return the text that `parse_values` reads."""
    return _BETWEEN.join(map(str, values if isinstance(values, tuple) else (values,)))


def parse_values(text: str) -> str | int | tuple[str | int, ...]:
    """Read a value, or one a stage or device: ``"every"``, ``"2"``, ``"every/2/last"``."""
    values = tuple(text if (k := parse_int(text)) is None else k for text in text.split(_BETWEEN))
    return values if len(values) > 1 else values[0]


# Compute tasks that a fetch may run beside: one number, or one a device.

#: As a graph has it.
Prefetch: TypeAlias = int | tuple[int, ...]
#: As users give it.
PrefetchArgument: TypeAlias = int | str | Sequence[int] | Mapping[int, int]


def checked_prefetch(prefetch: PrefetchArgument, n_devices: int) -> Prefetch:
    """Return the option ``prefetch``: one number if devices have the same, else one a device.

    Texts have the numbers of devices between slashes, ``"1/2/2"``. Devices that a mapping does not
    name have 1.
    """
    own = parse_values(prefetch) if isinstance(prefetch, str) else prefetch
    values = _values_of_stages("prefetch", own, n_devices, 1, 2, "device")
    if values is None:
        return check_count("prefetch", own, 0)
    counts = tuple(check_count(f"prefetch of device {d}", x, 0) for d, x in enumerate(values))
    return counts[0] if len(set(counts)) == 1 else counts


def prefetch_by_device(prefetch: Prefetch, n_devices: int, most: int) -> Ints:
    """Return the number of each device, at most ``most``; shape ``(n_devices,)``."""
    values = prefetch if isinstance(prefetch, tuple) else (prefetch,) * n_devices
    return np.array([min(value, most) for value in values], dtype=np.int64)


# Values of the option ``offload``: the activations that leave the device, of all stages or each.
#
# A value is ``"none"``, ``"all"``, a share of the bytes of each micro-batch such as 0.5, the text
# ``"longest:0.5"``: the half of the micro-batches whose activations live longest, or ``"above:4"``:
# those beyond 4 that the device would hold at once. As text, values of stages stand between
# slashes: ``"all/0.5/none"``.

#: Where they go: to the memory of the host, or of the device i to that of p - 1 - i.
OffloadTarget = Literal["host", "peer"]


def paired_devices(homes: Ints) -> Ints:
    """Return the other device of each pair, i and p - 1 - i of the p devices of a replica.

    ``homes`` are those of a graph. The middle one of an odd number is its own.
    """
    pairs: Ints = np.arange(int(homes.max(initial=0)) + 1)
    for own in homes:
        devices = np.unique(own[own >= 0])
        pairs[devices] = devices[::-1]
    return pairs


#: One value, as users give it.
OffloadValue: TypeAlias = str | float
#: As users give it for all stages.
OffloadArgument: TypeAlias = OffloadValue | Sequence[OffloadValue] | Mapping[int, OffloadValue]
_LONGEST, _ABOVE = "longest:", "above:"
_ALLOWED = (
    '"none", "all", a share of the bytes of each micro-batch from 0 to 1, or the text '
    '"longest:0.5" for the half of the micro-batches that live longest, or "above:4" for those '
    "beyond 4 that a device would hold"
)


@dataclass(frozen=True)
class StageOffload:
    """Activations to offload: of a stage, or of all stages together."""

    #: Share of the bytes of each selected micro-batch, 0 to 1.
    share: float = 1.0
    #: Share of the micro-batches that is selected, those that live longest first; 1 for all.
    longest: float = 1.0
    #: Micro-batches that stay, while those that are needed last are selected; 0 selects all.
    above: int = 0

    @property
    def is_none(self) -> bool:
        """Whether nothing is offloaded."""
        return self.share == 0 or self.longest == 0

    @property
    def text(self) -> str:
        """The text that `checked_offload` reads."""
        if self.is_none:
            return "none"
        if self.longest < 1:
            return f"{_LONGEST}{self.longest!r}"
        if self.above:
            return f"{_ABOVE}{self.above}"
        return "all" if self.share == 1 else repr(self.share)


def checked_offload(
    offload: OffloadArgument, n_stages: int
) -> StageOffload | tuple[StageOffload, ...]:
    """Return the value for all stages together, or one a stage if they were given."""
    if isinstance(offload, str) and _BETWEEN in offload:
        offload = offload.split(_BETWEEN)
    values = _values_of_stages("offload", offload, n_stages, "none", "all")
    if values is None:
        return _checked_offload_value(offload, "offload")
    return tuple(_checked_offload_value(x, f"offload of stage {s}") for s, x in enumerate(values))


def _checked_offload_value(value: object, name: str) -> StageOffload:
    if isinstance(value, str):
        text = value.strip()
        if text in ("none", "all"):
            return StageOffload(float(text == "all"))
        if text.startswith(_ABOVE) and (count := parse_int(text.removeprefix(_ABOVE))):
            return StageOffload(above=check_count(f"{name}: a number of micro-batches", count))
        share = parse_float(text.removeprefix(_LONGEST))
        if share is not None and 0 <= share <= 1:
            is_longest = text.startswith(_LONGEST)
            return StageOffload(longest=share) if is_longest else StageOffload(share)
    else:
        share = None if isinstance(value, (bool, np.bool_)) else number(value)
        if share is not None and 0 <= share <= 1:
            return StageOffload(share)
    raise ArgumentError(f"{name} must be {_ALLOWED}; got {value!r:.60}")


def checked_shares(shares: Sequence[float] | str, n_stages: int) -> tuple[float, ...]:
    """Return the shares of stages that OFFLOADs move, one a stage; empty if all are 1."""
    listed = shares.split(_BETWEEN) if isinstance(shares, str) and shares else shares
    if isinstance(listed, str) and not listed:
        listed = ()
    if not isinstance(listed, (list, tuple, np.ndarray)):
        raise ArgumentError(f"offload_shares must be numbers, one a stage, got {shares!r:.60}")
    values = [parse_float(x) if isinstance(x, str) else number(x) for x in listed]
    for stage, share in enumerate(values):
        if share is None or not 0 < share <= 1:
            raise ArgumentError(
                f"offload_shares of stage {stage} must be above 0 and at most 1, the share of the "
                f"bytes of activations that OFFLOAD moves; got {listed[stage]!r:.60}"
            )
    if values and len(values) != n_stages:
        raise ArgumentError(
            f"offload_shares has {len(values)} values for {n_stages} stages; give one a stage"
        )
    of_stages = tuple(float(x) for x in values if x is not None)
    return () if all(share == 1 for share in of_stages) else of_stages


# When replicas reduce gradients

GradSync = Literal["last", "every", "bucketed"]
GRAD_SYNC: tuple[GradSync, ...] = get_args(GradSync)
#: As a graph has it: one value for all stages, or one a stage. A number k is every k micro-batches.
GradSyncs: TypeAlias = str | int | tuple[str | int, ...]
#: As users give it.
GradSyncArgument: TypeAlias = str | int | Sequence[str | int] | Mapping[int, str | int]


def checked_grad_sync(grad_sync: GradSyncArgument, n_stages: int, batch_size: int) -> GradSyncs:
    """Return when gradients are reduced: one value if all stages have the same, else one a stage.

    ``grad_sync`` is ``"last"``, ``"every"``, ``"bucketed"``, a number of micro-batches, or one of
    these a stage: in a sequence, as text between slashes, or in a mapping from stages, whose other
    stages have ``"last"``.
    """
    if isinstance(grad_sync, str) and grad_sync not in GRAD_SYNC:
        grad_sync = parse_values(grad_sync)
    listed = _values_of_stages("grad_sync", grad_sync, n_stages, "last", "every")
    if listed is None:
        return _checked_times(grad_sync, "grad_sync", batch_size)
    values = [
        _checked_times(value, f"grad_sync of stage {stage}", batch_size)
        for stage, value in enumerate(listed)
    ]
    return values[0] if len(set(values)) == 1 else tuple(values)


def _checked_times(value: object, name: str, batch_size: int) -> str | int:
    """Return the value of one stage; 1 and the size of a mini-batch become modes."""
    if isinstance(value, str):
        return check_name(name, value, GRAD_SYNC)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ArgumentError(
            f"{name} must be {', '.join(map(repr, GRAD_SYNC))}, or a whole number k, to reduce "
            f"after every k micro-batches; got {value!r} ({type(value).__name__})"
        )
    k = check_count(name, value)
    if batch_size % k:
        divisors = ", ".join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)
        raise ArgumentError(
            f"{name} reduces after every {k} micro-batches, which do not divide the {batch_size} "
            f"of a mini-batch; give one of {divisors}"
        )
    if k == batch_size:
        return "last"
    return "every" if k == 1 else k


def grad_sync_by_stage(grad_sync: GradSyncs, n_stages: int) -> tuple[str | int, ...]:
    """Return the value of each stage."""
    return grad_sync if isinstance(grad_sync, tuple) else (grad_sync,) * n_stages


def group_sizes(grad_sync: GradSyncs, n_stages: int) -> Ints:
    """Return the number of micro-batches after which each stage reduces its gradients.

    0 for once a mini-batch, with ``"last"`` and ``"bucketed"``. Shape ``(n_stages,)``.
    """
    sizes = {"every": 1, "last": 0, "bucketed": 0}
    values = grad_sync_by_stage(grad_sync, n_stages)
    groups: Ints = np.array([sizes[x] if isinstance(x, str) else x for x in values], dtype=np.int64)
    return groups


# Groups of tied stages: stages with copies of one parameter, such as an embedding and a head.
#
# The copies of a group are equal: REDUCE_TIED sums their gradients once a mini-batch. A text has
# the stages of a group between ``-``, and groups between commas: ``"0-7"``, ``"0-3-7,1-2"``.

#: Stages of each group, in rising order.
Tied: TypeAlias = tuple[tuple[int, ...], ...]
#: Groups that a graph may have.
_MOST_GROUPS = 1000


def checked_tied(tied: Iterable[Iterable[int]] | str, n_stages: int = 2**31) -> Tied:
    """Return the groups of tied stages, each in rising order."""
    groups = tuple(_stages_of(group, tied) for group in _listed_groups(tied))
    for group in groups:
        for stage in group:
            if check_count("tied: a stage", stage, 0) >= n_stages:
                raise ArgumentError(
                    f"tied names stage {stage}; there are {n_stages} stages, 0..{n_stages - 1}"
                )
        if len(group) < 2 or len(set(group)) < len(group):
            raise ArgumentError(
                f"tied has the group {group!r}; a group has two or more different stages with "
                "copies of one parameter, such as (0, 3)"
            )
    return tuple(tuple(sorted(map(int, group))) for group in groups)


def check_tied_kinds(kinds: Kinds, tied: Tied) -> None:
    """Raise `GraphError` for a REDUCE_TIED of no group, or of a stage outside its group."""
    for row in np.flatnonzero(kinds.op == Op.REDUCE_TIED).tolist():
        stage, part = int(kinds.stage[row]), int(kinds.part[row])
        if not 0 <= part < len(tied) or stage not in tied[part]:
            raise GraphError(
                f"{stage}REDUCE_TIED has part {part}, the number of its group of tied stages, but "
                f"tied is {list(tied)!r}; give the groups as tied=, such as [(0, 3)]"
            )


def tied_text(tied: Tied) -> str:
    """Return the text that `checked_tied` reads."""
    return ",".join("-".join(map(str, group)) for group in tied)


def _listed_groups(tied: Iterable[Iterable[int]] | str) -> list[object]:
    if isinstance(tied, str):
        return [part.strip() for part in tied.split(",")]
    try:
        if isinstance(tied, (Mapping, bytes)):
            raise TypeError
        groups: list[object] = list(itertools.islice(tied, _MOST_GROUPS + 1))
    except TypeError:
        raise _wrong_tied(tied) from None
    if len(groups) > _MOST_GROUPS:
        raise ArgumentError(f"tied has more than {_MOST_GROUPS} groups; give fewer")
    return groups


def _stages_of(group: object, tied: object) -> tuple[int, ...]:
    if isinstance(group, str):
        numbers = [parse_int(text) for text in group.split("-")]
        stages = tuple(number for number in numbers if number is not None)
        if len(stages) < len(numbers):
            raise _wrong_tied(tied)
        return stages
    if not isinstance(group, (tuple, list)):
        raise _wrong_tied(tied)
    return tuple(group)


def _wrong_tied(tied: object) -> ArgumentError:
    return ArgumentError(
        "tied must be groups of stages with copies of one parameter, such as [(0, 3)], or the text "
        f"'0-3', got {tied!r:.60}"
    )


@dataclass(frozen=True, eq=False)
class LoweredSchedule:
    """Schedule and arguments of the call of `pipesim.lower` that made a graph.

    ``lower(x.schedule, **x.arguments)`` makes an equal graph.
    """

    schedule: Schedule
    arguments: Mapping[str, Any]


@checked
@dataclass(frozen=True)
class LoweringOptions:
    """Options of `pipesim.lower` that hold for a whole graph, checked and normalized.

    A `TaskGraph` has most as attributes too.
    """

    #: Labels: which micro-batches are recomputed, and whether transfers overlap compute. The tasks
    #: show both.
    recompute: str = "never"
    overlap: bool = True
    rendezvous: bool = False
    #: Whether hosts are threads of one process, which wait for each other (rule 7).
    host_threads: bool = False
    #: Number of mini-batches, each with its own optimizer step.
    n_batches: Count = 1
    #: Micro-batches ``k * n_slices`` and the next ``n_slices - 1`` are the slices of one sequence.
    n_slices: Count = 1
    #: As `pipesim.lower` describes: one value, or one a stage if stages differ. The backwards that
    #: a REDUCE_GRAD needs are, for ``"every"``, those of its micro-batch; for a number k, those of
    #: the k micro-batches up to its own; otherwise those of the whole mini-batch.
    grad_sync: GradSyncs = "last"
    #: Versions of the weights that F uses, as `pipesim.Schedule` describes.
    weight_versions: Versions = "one"
    #: Edges of stages that are no chain, as `pipesim.Placement.edges`. Those to a stage that is not
    #: the next one are the graph's skips: their messages have the form of a skip's.
    edges: Edges = ()
    #: Source and target stage of each skip connection, sorted.
    skips: tuple[Skip, ...] = ()
    #: Whether each skip has its own message. Otherwise one message carries all skips that cross the
    #: border between two stages.
    portals: bool = True
    #: Whether the graph is an evaluation: it has no backwards, so F keeps no activations.
    forward_only: bool = False
    #: First slices of each sequence, its prompt; others are decode steps. 0 for no decode steps.
    prompt_slices: Whole = 0
    #: Stages of each group with copies of one parameter, in rising order.
    tied: Tied = ()
    #: Number of compute tasks of a device that a fetch, UNSHARD or RELOAD, may run beside before
    #: its consumer; see `pipesim.graph.dependencies`. One number, or one a device of the graph.
    prefetch: Prefetch = 1
    #: Number of consecutive replicas that exchange the tokens of experts; 0 for all.
    expert_replicas: Whole = 0
    #: Share of the bytes of a micro-batch's activations that an OFFLOAD moves, one a stage, above
    #: 0 and at most 1; empty if all are 1. The tasks show which micro-batches are offloaded.
    offload_shares: tuple[float, ...] = ()
    #: Where OFFLOADs move activations.
    offload_to: OffloadTarget = "host"
    #: None for a graph that `pipesim.lower` did not make. Not compared.
    source: LoweredSchedule | None = field(default=None, compare=False, repr=False)
    #: Number of equal replicas for which the one of the graph stands; see
    #: `pipesim.simulation.equal_replicas`.
    n_equal: Count = 1

    def __post_init__(self) -> None:
        if not self.edges:
            return
        skips = skip_edges(self.edges)
        if not self.portals or self.skips not in ((), skips):
            raise ArgumentError(
                f"stages have the edges {list(self.edges)}, so that their skips are "
                f"{list(skips)}, with portals=True; got skips={list(self.skips)} and portals="
                f"{self.portals}: leave both out"
            )
        object.__setattr__(self, "skips", skips)

    @classmethod
    def of_schedule(cls, schedule: Schedule, **options: Any) -> LoweringOptions:
        """Return the options of a schedule's compute tasks, and others by name."""
        return cls(
            n_batches=schedule.n_batches,
            n_slices=schedule.n_slices,
            weight_versions=schedule.weight_versions,
            edges=schedule.placement.edges,
            **options,
        )

    @classmethod
    def checked(cls, kinds: Kinds, n_microbatches: int, **options: Any) -> LoweringOptions:
        """Return the options of a graph of these kinds, from arguments of `TaskGraph.build`."""
        n_stages = int(kinds.stage.max(initial=0)) + 1
        edges = options.get("edges", ())
        is_chain = isinstance(edges, tuple) and not edges
        options["edges"] = checked_edges(None if is_chain else edges, n_stages)
        options["skips"] = checked_skips(options.get("skips", ()), n_stages)
        record = cls(**options)
        if record.forward_only and kinds.is_op(frozenset({Op.B, Op.I, Op.W, Op.R})).any():
            raise GraphError(
                "forward_only=True, but the graph has tasks of a backward, whose forward keeps "
                "activations; leave forward_only out"
            )
        if n_microbatches % record.n_batches:
            raise GraphError(
                f"{n_microbatches} micro-batches cannot be shared evenly by "
                f"n_batches={record.n_batches}"
            )
        batch_size = n_microbatches // record.n_batches
        if batch_size % record.n_slices:
            raise GraphError(
                f"{batch_size} micro-batches of a mini-batch are no whole number of sequences of "
                f"n_slices={record.n_slices}; give a divisor"
            )
        if record.prompt_slices and not (record.forward_only and record.n_slices > 1):
            raise GraphError(
                f"prompt_slices={record.prompt_slices} are those of sequences in several slices of "
                "a forward-only graph; give n_slices and forward_only=True, or leave it out"
            )
        groups = checked_tied(record.tied, n_stages)
        check_tied_kinds(kinds, groups)
        if record.offload_to == "peer":
            alone = np.flatnonzero(paired_devices(kinds.homes) == np.arange(kinds.homes.max() + 1))
            moves = np.isin(kinds.device, alone) & (kinds.op == Op.OFFLOAD)
            if moves.any():
                raise GraphError(
                    f'offload_to="peer", but device {kinds.device[moves][0]} is the middle of its '
                    "pipeline and has no peer; leave out its OFFLOADs"
                )
        return replace(
            record,
            grad_sync=checked_grad_sync(record.grad_sync, n_stages, batch_size),
            skips=skips_of(kinds, record.skips, record.portals),
            tied=groups,
            offload_shares=checked_shares(record.offload_shares, n_stages),
            prefetch=checked_prefetch(record.prefetch, int(kinds.device.max(initial=0)) + 1),
        )

    def texts(self) -> dict[str, str]:
        """Return the `FILE_OPTIONS` that are not the default, as texts."""
        values = {x.name: getattr(self, x.name) for x in fields(self) if x.name in FILE_OPTIONS}
        return {
            name: _TEXTS[name][0](value) if name in _TEXTS else str(value)
            for name, value in values.items()
            if value != getattr(LoweringOptions, name)
        }


#: Options that the tasks of a graph do not show, so that its files have them.
FILE_OPTIONS = tuple(
    field.name
    for field in fields(LoweringOptions)
    if field.name not in ("recompute", "overlap", "source", "n_equal")
)
#: Text of an option that is neither a flag, a count nor a name, and what reads the text. Values are
#: checked with the graph.
_TEXTS: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "grad_sync": (values_text, parse_values),
    "skips": (
        lambda skips: " ".join(map(skip_text, skips)),
        lambda text: [skip_from_text(skip) for skip in text.split()],
    ),
    "edges": (
        lambda edges: " ".join(map(skip_text, edges)),
        lambda text: [skip_from_text(edge) for edge in text.split()],
    ),
    "tied": (lambda tied: tied_text(tied).replace(",", " "), str.split),
    "prefetch": (values_text, str),
    "offload_shares": (lambda shares: _BETWEEN.join(map(repr, shares)), str),
}


def parse_option(name: str, text: str) -> Any:
    """Return ``hosts``, or one of `LoweringOptions.texts`, as an argument of `TaskGraph.build`."""
    if name in _TEXTS:
        return _TEXTS[name][1](text)
    usual = getattr(LoweringOptions, name, text)
    if isinstance(usual, bool):
        return check_name(name, text, ("False", "True")) == "True"
    count = parse_int(text)
    if isinstance(usual, int) and count is None:
        raise ArgumentError(f"{name} is no number but {text!r}")
    return count if isinstance(usual, int) else text
