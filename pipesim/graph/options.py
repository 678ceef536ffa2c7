"""`LoweringOptions`: the options of `pipesim.lower` that a task graph keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipesim.errors import GraphError, check_count, check_flag, check_name, check_text
from pipesim.graph.grad_sync import GradSyncArgument, GradSyncs, checked_grad_sync
from pipesim.graph.offload_values import checked_shares
from pipesim.graph.skips import Skip, skips_of
from pipesim.graph.tasks import Kinds
from pipesim.graph.tied_stages import Tied, check_tied_kinds, checked_tied
from pipesim.ops import Op
from pipesim.scheduling.schedule import VERSIONS, Schedule, Versions

_BACKWARDS = frozenset({Op.B, Op.I, Op.W, Op.R})


@dataclass(frozen=True, eq=False)
class LoweredSchedule:
    """Schedule and arguments of the call of `pipesim.lower` that made a graph.

    ``lower(x.schedule, **x.arguments)`` makes an equal graph.
    """

    schedule: Schedule
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class LoweringOptions:
    """Options of `pipesim.lower` that hold for a whole graph, checked and normalized.

    Attributes
    ----------
    recompute, overlap
        Labels: which micro-batches are recomputed, and whether transfers overlap compute. The tasks
        show both.
    rendezvous
        Whether a SEND waits until its RECV is reached (rule 6).
    host_threads
        Whether hosts are threads of one process, which wait for each other (rule 7).
    n_batches
        Number of mini-batches, each with its own optimizer step.
    n_slices
        Number of slices of a sequence: micro-batches ``k * n_slices`` and the next
        ``n_slices - 1`` are the slices of one sequence; 1 without slices.
    grad_sync
        When gradients are reduced, as `pipesim.lower` describes: one value, or one a stage if
        stages differ. The backwards that a REDUCE_GRAD needs are, for ``"every"``, those of its
        micro-batch; for a number k, those of the k micro-batches up to its own; otherwise those of
        the whole mini-batch.
    weight_versions
        Which weights F uses, as `pipesim.Schedule` describes.
    skips
        ``(source, target)`` stages of each skip connection, sorted.
    portals
        Whether each skip has its own message. Otherwise one message carries all skips that cross
        the border between two stages.
    forward_only
        Whether the graph is an evaluation: it has no backwards, so F keeps no activations.
    tied
        Stages of each group with copies of one parameter, in rising order.
    prefetch
        Number of compute tasks of a device that a fetch, UNSHARD or RELOAD, may run beside before
        its consumer; see `pipesim.graph.fetches`.
    expert_replicas
        Number of consecutive replicas that exchange the tokens of experts; 0 for all.
    offload_shares
        Share of the bytes of a micro-batch's activations that an OFFLOAD moves, one a stage, above
        0 and at most 1; empty if all are 1. The tasks show which micro-batches are offloaded.
    source
        Schedule and arguments of `pipesim.lower`; None for a graph from elsewhere. Not compared.
    n_equal
        Number of equal replicas for which the one of the graph stands; see
        `pipesim.simulation.one_of_replicas`.
    """

    recompute: str = "never"
    overlap: bool = True
    rendezvous: bool = False
    host_threads: bool = False
    n_batches: int = 1
    n_slices: int = 1
    grad_sync: GradSyncs = "last"
    weight_versions: Versions = "one"
    skips: tuple[Skip, ...] = ()
    portals: bool = True
    forward_only: bool = False
    tied: Tied = ()
    prefetch: int = 1
    expert_replicas: int = 0
    offload_shares: tuple[float, ...] = ()
    source: LoweredSchedule | None = field(default=None, compare=False, repr=False)
    n_equal: int = 1

    @classmethod
    def checked(
        cls,
        kinds: Kinds,
        n_microbatches: int,
        *,
        recompute: str = "never",
        n_batches: int = 1,
        n_slices: int = 1,
        grad_sync: GradSyncArgument = "last",
        weight_versions: Versions = "one",
        skips: Iterable[Skip] = (),
        portals: bool = True,
        forward_only: bool = False,
        tied: Iterable[Iterable[int]] | str = (),
        prefetch: int = 1,
        expert_replicas: int = 0,
        offload_shares: Sequence[float] | str = (),
        **flags: bool,
    ) -> LoweringOptions:
        """Return the options of a graph of these kinds, from arguments of `TaskGraph.build`.

        Raises
        ------
        GraphError
            If a forward-only graph has tasks of a backward, if mini-batches have unequal numbers of
            micro-batches, or parts of a sequence, a message carries none of the skips, or a
            REDUCE_TIED is of no group.
        """
        for name, flag in (flags | {"portals": portals, "forward_only": forward_only}).items():
            check_flag(name, flag)
        if forward_only and kinds.is_op(_BACKWARDS).any():
            raise GraphError(
                "forward_only=True, but the graph has tasks of a backward, whose forward keeps "
                "activations; leave forward_only out"
            )
        if n_microbatches % check_count("n_batches", n_batches):
            raise GraphError(
                f"{n_microbatches} micro-batches cannot be shared evenly by n_batches={n_batches}"
            )
        if n_microbatches // n_batches % check_count("n_slices", n_slices):
            raise GraphError(
                f"{n_microbatches // n_batches} micro-batches of a mini-batch are no whole number "
                f"of sequences of n_slices={n_slices}; give a divisor"
            )
        check_name("weight_versions", weight_versions, VERSIONS)
        n_stages = int(kinds.stage.max(initial=0)) + 1
        groups = checked_tied(tied, n_stages)
        check_tied_kinds(kinds, groups)
        return cls(
            recompute=check_text("recompute", recompute),
            n_batches=n_batches,
            n_slices=n_slices,
            grad_sync=checked_grad_sync(grad_sync, n_stages, n_microbatches // n_batches),
            weight_versions=weight_versions,
            skips=skips_of(kinds, skips, portals),
            portals=portals,
            forward_only=forward_only,
            tied=groups,
            prefetch=check_count("prefetch", prefetch, 0),
            expert_replicas=check_count("expert_replicas", expert_replicas, 0),
            offload_shares=checked_shares(offload_shares, n_stages),
            source=None,
            **flags,
        )
