"""`Costs`: seconds and bytes of each operation, for each stage, and their text in one line.

Longer than other files, as it is one class whose docstrings are most of it: they define the unit
and meaning of each field. `pipesim.costs.pricing` has the work behind `Costs.of`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.cost_fields import (
    Workload,
    check_experts,
    check_whole_layers,
    checked_workload,
)
from pipesim.costs.layer_split import layout_copies, read_layout, write_layout
from pipesim.costs.microbatch_costs import (
    averaged,
    costs_of_microbatch,
    each_microbatch,
    n_microbatches_of,
    n_stages_of,
)
from pipesim.costs.pricing import price
from pipesim.costs.rows import (
    LAYER_SECONDS,
    ROWS,
    STAGE_ROWS,
    CostFields,
    given_rows,
)
from pipesim.costs.task_costs import TaskCosts
from pipesim.errors import CostsError, CostsWarning, check_count, check_name, check_type
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import checked_tied
from pipesim.graph.skips import SkipBytes, checked_skip_bytes
from pipesim.network.network import Network
from pipesim.scheduling.memory_checks import check_stages
from pipesim.scheduling.placement import Placement
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked_names
from pipesim.utils.files import check_path, read_json, write_text
from pipesim.utils.texts import (
    CHECKSUM,
    checksum,
    checksum_mismatch,
    format_bytes,
    format_time,
)

if TYPE_CHECKING:
    from pipesim.analysis.measured_costs import costs_from_timeline
    from pipesim.models.layers import costs_from_layers
    from pipesim.models.model_costs import costs_from_sizes
    from pipesim.ops import Op


#: Parts that costs may be of, where schedules have several stages a device.
Per = Literal["device", "layers"]
PER = ("device", "layers")


@checked_names
@dataclass(frozen=True)
class Costs(CostFields):
    """Seconds and bytes of each operation: one value for all stages, one a stage, or more.

    Fields of operations on one micro-batch may also have one value a stage and micro-batch, as
    nested sequences or an array of shape ``(n_stages, n_microbatches)``. One row stands for all
    stages. If replicas have other micro-batches, give ``n_replicas * n_microbatches`` values a
    stage: first those of replica 0. Fields of whole stages, such as ``optimizer_step`` and
    ``parameter_bytes``, have one value a stage at most. Bytes may be texts such as ``"2GiB"``.

    Attributes
    ----------
    forward, backward
        Seconds of F and of B.
    input_grad, weight_grad
        Seconds of I and of W. ``backward`` defaults to their sum.
    overlapped
        Seconds of an F and a B that run as one action; defaults to the sum of both. If their stages
        differ, each counts with its share: the ratio of ``forward`` to ``backward`` of the stage.
        An F and an I take the same share of the sum of both.
    recompute
        Seconds of R; defaults to ``forward``.
    optimizer_step, launch
        Seconds of STEP, and of the host to issue one task of the stage. If the optimizer is
        sharded, a replica takes its share of ``optimizer_step`` and of ``grad_norm``.
    launch_by_op
        Seconds of the host to issue one task of these operations, in place of ``launch``: a mapping
        of names such as ``"STEP"``, kept as pairs. ``{"messages": 0}`` stands for SEND_F, RECV_F,
        SEND_B and RECV_B, which then need no launch. None for none.
    grad_norm
        Seconds in which a device computes the norm of the gradients of a stage (GRAD_NORM). The
        all-reduce of 8 bytes over all devices is added by ``network``. The devices begin together,
        so that the slowest counts; stages of one replica on a device add up.
    dispatch, reorder, reorder_gradients
        Seconds in which a sharded stage groups the keys of a micro-batch by owner (DISPATCH), puts
        its vectors in order, and sums the gradients of each key (REORDER), if these are separate
        tasks. ``reorder_gradients`` defaults to ``reorder``.
    reduce_grad, unshard
        Measured seconds of REDUCE_GRAD of all gradients of a stage, and of UNSHARD. Measured
        seconds replace those that follow from ``network`` and bytes.
    reduce_tied
        Measured seconds of REDUCE_TIED; those of the lowest stage of a group count.
    expert_layers
        Number of layers with experts of a stage, whose tokens GPUs of several replicas exchange.
        Whole numbers; 0 (the default) for none.
    dispatch_bytes, combine_bytes
        Bytes that one GPU contributes to the exchange before, and after, the experts of one layer
        for one micro-batch, the part that it keeps included. The backward moves as many.
    exchange_dispatch, exchange_combine
        Seconds of one such exchange; None (the default) for those that follow from ``network`` and
        bytes. A graph without tasks for them has them in F, B, I and R: these take longer by the
        seconds of both, times ``expert_layers``.
    segments
        For each stage, the shares of F, of B and of I between its exchanges, in the order of time:
        three tuples, each of ``2 * expert_layers + 1`` shares that sum to 1. The first segment of F
        ends with the router and the shared experts of the first layer with experts; the second
        has its experts; the third has the sum of their results, and all up to the next router.
        ``forward``, ``backward`` and ``input_grad`` are seconds without exchanges. None (the
        default) for even shares.
    expert_parameter_bytes, expert_gradient_bytes, expert_optimizer_bytes
        Parts of ``parameter_bytes``, ``gradient_bytes`` and ``optimizer_bytes`` that are of experts
        of which each of ``expert_replicas`` replicas has others.
    expert_replicas
        Number of replicas that together have all experts, g; 1 (the default) if each has all.
        Replicas from ``kg`` on to ``kg + g - 1`` are such a group. Gradients of experts are
        reduced, and a sharded optimizer is shared, among every g-th replica.
    reduced_share
        Share of the other gradients that a GPU reduces over the replicas, and of the parameters
        that it gathers: 1 (the default), or less if GPUs of a device have copies of them, of which
        each then reduces a part (context parallelism).
    gradient_exchange
        How replicas that share an optimizer sum gradients: ``"reduce_scatter"`` (the default), or
        ``"all_reduce"``, which moves twice as many bytes.
    exchanged_gradients
        Bytes of gradients while replicas exchange them, over ``gradient_bytes``: 1 (the default),
        or 2 for sums in 16 bits that are exchanged in 32.
    overlap_cost
        Share of its speed that compute loses beside a collective of its device which sends 210 GB/s
        or more a GPU, 0 to 1; beside a slower one, its part by bytes a second. An all-gather over
        NVLink took 0.43 of the speed of products and of attention on A100
        (https://github.com/NVIDIA/nccl/issues/1428). 0 (the default): overlap is free. Collectives
        lose nothing. Rule 5 in docs/time.md has the formula, and what it leaves out.
    reduce_copies
        Seconds of STEP that replicas do not share, in addition to ``optimizer_step``: those in
        which the GPUs of a device sum the gradients of such copies, and passes over all gradients.
    offload, reload
        Measured seconds of OFFLOAD and of RELOAD of a micro-batch.
    exchange_counts, exchange_keys, exchange_vectors, exchange_gradients, exchange_accumulated
        Measured seconds of each ALL_TO_ALL of a sharded stage.
    output_bytes
        Bytes of a stage's output for one micro-batch: the message to the next stage, and its
        gradient on the way back.
    output_seconds
        Seconds that each of these two messages holds its stream and links, in addition to bytes
        over bandwidth. Links of infinite bandwidth are never held. Use it for messages whose cost
        is known in seconds: latency holds neither stream nor link (rule 4). With
        ``overlap=False`` these seconds block the sender.
    activation_bytes
        Bytes that a stage holds from F to B for one micro-batch, its input included.
    offload_bytes
        Bytes of them that OFFLOAD moves to host memory, for one micro-batch that is not recomputed;
        by default the share of ``activation_bytes`` with which the graph was lowered. Measured ones
        are those of whole tensors.
    weight_grad_bytes
        Bytes that a stage holds between I and W: activations, and gradients of outputs.
    forward_workspace_bytes, backward_workspace_bytes
        Bytes that a stage holds only while a task runs, beyond ``activation_bytes``: F and R, and
        B, I and W. They are temporary tensors, such as gradients of activations.
    kv_cache_bytes
        Bytes of keys and values of one micro-batch that F keeps in a forward-only graph of slices,
        until the F of the last slice of its sequence on the stage.
    parameter_bytes, optimizer_bytes
        Bytes of a stage's parameters, which UNSHARD gathers, and of its optimizer state. If the
        optimizer is sharded, a replica has its share of the state. For a sharded stage, both are
        those of one replica's rows.
    gradient_bytes
        Bytes of a stage's gradients, which REDUCE_GRAD moves; defaults to ``parameter_bytes``.
        Each replica holds all of them (as in ZeRO-1). Give twice ``parameter_bytes`` for 32-bit
        gradients of 16-bit parameters.
    key_bytes, vector_bytes
        Bytes that a sharded stage of one replica asks for in one micro-batch: of keys, and of their
        vectors. Gradients of vectors have as many bytes. ``vector_bytes`` defaults to
        ``output_bytes``. Each replica sends an equal part of them to each replica. An exchange of
        the gradients of all micro-batches moves the sum of theirs, as if no two micro-batches used
        the same row; ``exchange_bytes`` can be more exact.
    exchange_bytes
        Bytes of uneven exchanges, used instead of ``key_bytes`` and ``vector_bytes``: a mapping
        from stage to a mapping from exchange (`pipesim.ops.EXCHANGES`) to a matrix of shape
        ``(n_replicas, n_replicas)``, whose row ``i`` is sent by replica ``i``, such as
        ``{0: keys.exchange_bytes(4, dim=64)}`` of `pipesim.Keys`. The diagonal is not sent, and not
        among the bytes of the timeline. Kept as tuples. None for none.
    buckets
        For each stage, its buckets of gradients as pairs of shares. The first is the share of the
        bytes, or of the seconds of ``reduce_grad`` as measured during a backward; these may sum to
        more than 1. The second is the share of the last backward after which the bucket is
        complete. None: even shares of both.
    skip_bytes
        Bytes that each skip connection carries for one micro-batch, and its gradient on the way
        back: one number for all, or a mapping from ``(source, target)`` stages, which is kept as
        pairs; None for none. Devices hold them as part of ``activation_bytes``.
    tied_bytes
        Bytes of the gradients of a parameter of which several stages have copies, such as a tied
        embedding: one number, or one for each group of tied stages. REDUCE_TIED takes as long as
        their sum over the group's devices takes on ``network``, with the faster of ring and tree.
        A graph that was lowered without ``tied`` has no such task: one number is then that of each
        group of `tied_stages`, or of the first and the last stage. STEP of a group's stages takes
        as much longer as the sum takes, unless one device has all copies. 0 (the default) for none.
    tied
        Groups of stages with such copies, as `pipesim.lower` takes them, such as ``[(2, 5)]``:
        those of `tied_stages` then. Empty (the default) for those of a `Transformer`.
    last_logits
        Whether these are costs of a server, as `Transformer.costs` returns them with
        ``last_logits=True``: without a loss, so that they price forward-only graphs alone.
    network
        Links between devices. The times of messages, reductions and exchanges follow from it.
        Collectives of tensor parallelism are part of F, B, I, W and R: they follow from the
        network that `Transformer.costs` was given. `rebuilt` builds costs for another network.
    all_reduce
        Algorithm of REDUCE_GRAD: ``"ring"``, ``"tree"`` or ``"fastest"`` of both;
        `Network.all_reduce` has the formulas.
    workload
        Tokens and FLOPs of a micro-batch and the GPUs, a `Workload` or a mapping of its fields;
        None if unknown. Throughput in tokens, MFU and the memory limit follow from it, and no
        times.
    memory_reserve
        Share of the bytes of tensors that a device holds besides them: memory that the caching
        allocator keeps in blocks which are too small or only partly used. `Timeline.memory.peak`
        leaves it out; `Timeline.memory.breakdown` shows it. 0, the default, is an ideal allocator.

    See Also
    --------
    pipesim.Transformer.costs : Costs of a transformer, from its sizes and a GPU.
    pipesim.Layers.costs : Costs of stages made of profiled layers.
    pipesim.simulate : Predict a timeline from a task graph and costs.
    pipesim.Network : Links, from which the seconds of messages follow.

    Examples
    --------
    Two equal stages. A step of GPipe takes ``(2 + 2 - 1) * (1 + 2)`` seconds.

    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", n_devices=2, n_microbatches=2))
    >>> ps.simulate(graph, ps.Costs(forward=1, backward=2)).makespan
    9.0

    Three micro-batches, of which the second is twice as long.

    >>> costs = ps.Costs(forward=[[1, 2, 1]], backward=[[2, 4, 2]])
    >>> costs.microbatch(1).forward, costs.averaged().backward
    (2.0, 2.6666666666666665)
    """

    def __post_init__(self) -> None:
        for name, row in ROWS.items():
            value = getattr(self, name)
            if value is not row.default:
                object.__setattr__(self, name, row.check(name, value))
        check_experts(self)
        if self.forward is None:
            raise CostsError("forward is missing; give the seconds of F, one or one a stage")
        n_microbatches_of(self)  # refuses fields of different numbers

    def __repr__(self) -> str:
        return costs_text(self)

    if TYPE_CHECKING:  # registered by the rooms that have them
        from_layers = staticmethod(costs_from_layers)
        from_timeline = staticmethod(costs_from_timeline)
        transformer = staticmethod(costs_from_sizes)

    @cached_property
    def n_microbatches(self) -> int | None:
        """Number of micro-batches that fields have values for; None if all have the same."""
        return n_microbatches_of(self)

    def microbatch(self, number: int) -> Costs:
        """Return the costs of one micro-batch, as one value a stage.

        Parameters
        ----------
        number
            Number of the micro-batch, counted from 0. If replicas differ, those of replica 0 come
            first.

        Returns
        -------
        Costs
            The same costs if all micro-batches have equal ones.
        """
        return costs_of_microbatch(self, number)

    def averaged(self) -> Costs:
        """Return the averages over micro-batches, as one value a stage.

        Returns
        -------
        Costs
            The same costs if all micro-batches have equal ones.
        """
        return averaged(self)

    def per_stage(self, name: str, n_stages: int) -> NDArray[np.float64]:
        """Return a field as one value a stage.

        Parameters
        ----------
        name
            Name of a field with numbers, such as ``"forward"``.
        n_stages
            Number of stages, at least 1.

        Returns
        -------
        numpy.ndarray
            Seconds or bytes, as the field has them; shape ``(n_stages,)``. A field that was not
            given has its default, such as the sum of I and W for ``"backward"``.

        Raises
        ------
        CostsError
            If the field was given for another number of stages, not at all, or with values that
            differ between micro-batches: take those of one `microbatch`, or `averaged` ones.
        """
        column = self._columns.get(name) if isinstance(name, str) else None
        if column is not None and type(n_stages) is int and len(column) == n_stages:
            return column.copy()
        check_stages(check_count("n_stages", n_stages))
        self._columns[name] = self._column(check_name("cost", name, STAGE_ROWS), n_stages)
        return self._columns[name].copy()

    def _column(self, name: str, n_stages: int) -> NDArray[np.float64]:
        value = getattr(self, name)
        if value is None and name == "backward" and None in (self.input_grad, self.weight_grad):
            raise CostsError(
                "backward is missing, and so is input_grad or weight_grad; give the seconds of B, "
                "or of both I and W"
            )
        if value is None and STAGE_ROWS[name].substitutes:
            return self._sum(name, STAGE_ROWS[name].substitutes, n_stages)
        if value is None:
            remedy = f"give {name}, the seconds of these tasks"
            if name in ("input_grad", "weight_grad"):
                remedy = (
                    "give input_grad and weight_grad, the seconds of I and of W, beside or in "
                    "place of backward"
                )
            raise CostsError(f"{name} is missing, but the graph has tasks that need it; {remedy}")
        if isinstance(value, float):
            return np.full(n_stages, value)
        if isinstance(value[0], tuple):
            raise CostsError(
                f"{name} has values that differ between micro-batches, but one a stage is needed "
                "here; take Costs.microbatch(number) or Costs.averaged()"
            )
        if len(value) != n_stages:
            raise CostsError(
                f"{name} has {len(value)} values for {n_stages} stages; give one, or one a stage"
            )
        return np.array(value)

    @cached_property
    def _columns(self) -> dict[str, NDArray[np.float64]]:
        """Results of `per_stage` for the last number of stages, by field."""
        return {}

    def __getstate__(self) -> dict[str, Any]:  # equal costs have equal pickles
        return {name: getattr(self, name) for name in ROWS}

    def _sum(self, name: str, others: Sequence[str], n_stages: int) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):
            columns = [self.per_stage(other, n_stages) for other in others]
            total: NDArray[np.float64] = np.sum(columns, axis=0)
        infinite = np.flatnonzero(np.isinf(total))
        if len(infinite):
            raise CostsError(
                f"{name} of stage {infinite[0]}, the sum of {' and '.join(others)}, is too large a "
                f"number: inf; give smaller ones, or {name}"
            )
        return total

    def of(self, graph: TaskGraph) -> TaskCosts:
        """Return the costs of each task of ``graph``.

        Parameters
        ----------
        graph
            A lowered schedule, with as many stages as these costs.

        Returns
        -------
        TaskCosts
            Seconds, bytes and links, one value a task.

        Raises
        ------
        CostsError
            If an operation of the graph has no cost, or if these costs are for another number of
            stages or for other skip connections.
        NetworkError
            If a link names a device that the graph does not have.
        """
        check_type("graph", graph, TaskGraph, "lower the schedule first")
        with np.errstate(over="ignore", invalid="ignore"):
            return price(self, graph)

    @property
    def skip_sizes(self) -> SkipBytes | None:
        """``skip_bytes`` as stored: one number, or pairs of a skip connection and its bytes."""
        return checked_skip_bytes(self.skip_bytes)

    @property
    def work(self) -> Workload | None:
        """``workload`` as stored: a `Workload`, or None."""
        return checked_workload(self.workload)

    @property
    def layout(self) -> str | None:
        """Layers of each stage as a layout string of Megatron; None unless of a `Transformer`.

        It is a value for ``--pipeline-model-parallel-layout`` of Megatron-LM, and for the
        ``layers_per_stage`` of `transformer`. `pipesim.costs.read_layout` returns the numbers.
        """
        settings = self._settings
        split = settings.get("layers_per_stage")
        n_stages = n_stages_of(self.forward) or 1
        if isinstance(split, list) and n_stages == len(split):
            return write_layout(split, mtp_layers=settings.get("mtp_layers", 0))
        if isinstance(split, str) and n_stages == len(read_layout(split)):
            return split
        return None  # of no transformer, or no longer of these stages, as after `in_chunks`

    @property
    def tied_stages(self) -> tuple[tuple[int, ...], ...]:
        """Groups of stages with copies of one matrix, as ``tied`` of `pipesim.lower` takes them.

        Those of a `Transformer`: embedding and LM head if they are tied; the embedding that
        multi-token prediction uses; the LM head of losses on several stages. Those of ``tied`` if
        that is set, as in costs of several modules. Empty for other costs.
        """
        if self.tied:
            return checked_tied(self.tied)
        n_stages = n_stages_of(self.forward) or 1
        if self.tied_bytes and self._settings.get("vocabulary_parallel"):
            p = len(self._settings["layers_per_stage"])
            return tuple((k, 2 * p + k) for k in range(p)) if n_stages == 3 * p + 1 else ()
        layout = self.layout if self.tied_bytes else None
        if layout is None:
            return ()
        return layout_copies(layout, is_tied=self._settings["tied_embeddings"])

    @property
    def _settings(self) -> Mapping[str, Any]:
        """Settings of the workload; none without."""
        return (None if self.work is None else self.work.settings) or {}

    @checked_names
    def in_chunks(self, placement: Placement, per: Per | None = None) -> Costs:
        """Return the costs of the stages of a placement, where these costs are those of devices.

        With them, schedules with one and with several stages a device are compared for one model.
        The stages of a device share its seconds and bytes evenly. A slow device is then slow in all
        its stages. Costs of slow *layers*, such as those of a large vocabulary, need
        ``per="layers"``, which cuts the model. A stage of a bidirectional placement is on several
        devices: with slow devices among them it has no cost of its own, and is refused.
        ``launch``, ``output_bytes``, ``output_seconds``, the bytes of workspaces, and bytes and
        seconds of one exchange of experts are not shared. ``segments`` become even.

        Parameters
        ----------
        placement
            Device of each stage, with as many devices as these costs have stages.
        per
            - ``"device"`` (the default): values are those of devices, as a device may be slow.
            - ``"layers"``: values are those of as many equal parts of the model, in order of its
              layers. Each part is cut evenly into consecutive stages, whatever device has them.

        Returns
        -------
        Costs
            One value for each stage of the placement.

        Raises
        ------
        CostsError
            If numbers of values and devices differ, or devices of one stage differ in their
            seconds: `Noise.slow_devices` makes them slow.

        Warns
        -----
        CostsWarning
            If devices have several stages and differ in their seconds, and ``per`` is not given:
            slow devices and slow layers have different best schedules.

        Examples
        --------
        Device 0 has stages 0 and 3, each with half of its seconds.

        >>> import pipesim as ps
        >>> costs = ps.Costs(forward=(2, 4), backward=(4, 8))
        >>> costs.in_chunks(ps.Placement.v_shaped(2)).forward
        (1.0, 2.0, 2.0, 1.0)

        The second half of the model is slower, and has stages 2 and 3:

        >>> costs.in_chunks(ps.Placement.v_shaped(2), per="layers").forward
        (1.0, 1.0, 2.0, 2.0)
        """
        check_type("placement", placement, Placement)
        n_stages, n_devices = placement.n_stages, placement.n_devices
        by_layers = check_name("per", "device" if per is None else per, PER) == "layers"
        if not by_layers and (slow := self._seconds_that_differ()):
            if per is None and n_stages > n_devices:
                warn_caller(
                    "the seconds of devices differ, and all stages of a slow device are slow; if "
                    "layers of the model are slow, give per='layers' (costs.in_chunks, sweeps and "
                    "--per), which cuts the model in order of its layers",
                    CostsWarning,
                )
            paths = np.array(placement.paths)
            for name, values in slow.items():
                if len(values) == n_devices and np.ptp(np.array(values)[paths], axis=0).any():
                    raise CostsError(
                        f"{name} differs among devices that have the same stage, which has one "
                        "cost on all of them; slow devices are pipesim.Noise(slow_devices={2: 1.5})"
                        " of pipesim.simulate, and slow layers per='layers'"
                    )
        if by_layers and n_stages % n_devices:
            raise CostsError(
                f"per='layers' cuts {n_devices} parts of the model into {n_stages} stages, which "
                "do not divide evenly; give costs of layers, as Layers.costs takes them"
            )
        if self.tied and n_stages > n_devices:
            raise CostsError(
                f"tied={list(self.tied)} names stages of these costs, not of the {n_stages} stages "
                "of the placement; leave it out with dataclasses.replace(costs, tied=()), and give "
                "it to the result"
            )
        if self.n_microbatches is not None:
            unit: Per = "layers" if by_layers else "device"
            return each_microbatch(lambda costs: costs.in_chunks(placement, unit), self)
        device = np.array(placement.device_of)
        if by_layers:
            device = np.arange(n_stages) * n_devices // n_stages
        n_sharing = np.bincount(device)[device]
        changed: dict[str, Any] = {}
        for name, row in given_rows(self).items():
            value = getattr(self, name)
            if row.whole and isinstance(value, float):
                continue
            if isinstance(value, tuple) and len(value) != placement.n_devices:
                raise CostsError(
                    f"{name} has {len(value)} values for {placement.n_devices} devices; give one, "
                    "or one a device"
                )
            per_device = np.broadcast_to(np.array(value, dtype=float), placement.n_devices)
            whole = per_device[device]
            changed[name] = whole if row.whole else whole / n_sharing
        check_whole_layers(changed.get("expert_layers"))
        if self.segments is not None:
            changed["segments"] = None  # shares of a device's stages are unknown
        if self.buckets is not None and len(self.buckets) == placement.n_devices:
            changed["buckets"] = tuple(self.buckets[k] for k in device.tolist())
        return replace(self, **changed)

    def _seconds_that_differ(self) -> dict[str, tuple[float, ...]]:
        """Return fields of seconds whose values differ."""
        values = {
            name: getattr(self, name)
            for name in (*LAYER_SECONDS.values(), "overlapped", "optimizer_step")
        }
        return {name: x for name, x in values.items() if isinstance(x, tuple) and len(set(x)) > 1}

    @classmethod
    def concatenate(
        cls, parts: Mapping[str, tuple[Costs, int]], network: Network | None = None
    ) -> Costs:
        """Return the costs of modules of one pipeline, stage after stage.

        Each module has costs of its own: those of an encoder with two GPUs of tensor parallelism,
        and of a language model with eight. They are for `Placement.from_modules`, which numbers
        stages in the same order.

        - Values of stages and micro-batches are joined. If a field is missing in one module, its
          substitute stands for it, such as ``forward`` for ``recompute``.
        - Stages of ``skip_bytes`` and ``tied`` get the numbers that they have in the pipeline. A
          module whose ``tied_bytes`` are of its first and last stage gets the group of both.
        - Fields of the whole pipeline, such as ``network``, ``all_reduce`` and ``last_logits``,
          are those of the modules that do not have the default; ``workload`` is left out.

        Parameters
        ----------
        parts
            Costs and number of stages of each module.
        network
            Network of all devices; None for that of the modules.

        Returns
        -------
        Costs
            One value for each stage of the pipeline.

        Raises
        ------
        CostsError
            If modules have different values of a field of the whole pipeline, or a field that has
            no substitute is missing in one module.

        Examples
        --------
        >>> import pipesim as ps
        >>> vision = ps.Costs(forward=1, backward=2)
        >>> language = ps.Costs(forward=(3, 3, 4), backward=6, recompute=2)
        >>> costs = ps.Costs.concatenate({"vision": (vision, 1), "language": (language, 3)})
        >>> costs.forward, costs.recompute
        ((1.0, 3.0, 3.0, 4.0), (1.0, 2.0, 2.0, 2.0))
        """
        from pipesim.costs.concatenation import concatenate

        return concatenate(parts, network)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or TOML; unset fields are left out.

        Returns
        -------
        dict
            Fields by name. Numbers are in seconds or bytes; infinite bandwidth is None.
        """
        values = ((name, row, getattr(self, name)) for name, row in ROWS.items())
        return {
            name: row.write(value)
            for name, row, value in values
            if value is not None and not (row.is_rare and value == row.default)
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """Return the costs in a mapping that `to_dict` returned.

        Parameters
        ----------
        values
            Fields by name; ``network`` is a mapping as in `Network.from_dict`. Missing fields have
            their defaults.

        Returns
        -------
        Costs
            Equal to the costs that `to_dict` was called on.
        """
        if not isinstance(values, Mapping):
            raise CostsError(
                f"costs must be a mapping of names to values, got {values!r:.60}; "
                'give such as {"forward": 1e-3, "backward": 2e-3}'
            )
        for key in values:
            check_name("cost", key, ROWS)
        network = Network.from_dict(values.get("network", {}))
        return cls(**{**values, "network": network})

    def save(self, path: Path | str) -> None:
        """Write the costs as JSON, whole or not at all.

        The file has a checksum of its values: delete that line if you change the file by hand.

        Parameters
        ----------
        path
            File to write, such as ``"costs.json"``. A file of that name is replaced.
        """
        path, values = check_path("path", path, "write"), self.to_dict()
        text = json.dumps({CHECKSUM: checksum(values), **values}, indent=2) + "\n"
        write_text(path, text)

    @classmethod
    def load(cls, path: Path | str) -> Costs:
        """Read a JSON file that `save` wrote, or one written by hand, which needs no checksum.

        Parameters
        ----------
        path
            The file to read. Its keys are those of `from_dict`.

        Returns
        -------
        Costs
            Costs of the file, with defaults for missing fields.

        Raises
        ------
        CostsError
            Naming the file, if it is missing, is no regular file, names a key twice, has no such
            content, or was changed after it was written.
        CapacityError
            For a file that is too large for memory.

        Examples
        --------
        A file written by hand:

        >>> import pathlib, tempfile
        >>> import pipesim as ps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "costs.json")
        ...     _ = path.write_text('{"forward": 1, "backward": 2}')
        ...     ps.Costs.load(path)
        <Costs of any number of stages: F 1.00 s, B 2.00 s>
        """
        path = check_path("path", path)
        values = read_json(path, "costs from", CostsError)
        if not isinstance(values, dict):
            raise CostsError(f"{path} holds no costs, but {type(values).__name__}")
        costs = cls.from_dict({key: value for key, value in values.items() if key != CHECKSUM})
        if CHECKSUM in values and values[CHECKSUM] != checksum(values):
            raise CostsError(checksum_mismatch(path, f'delete the line "{CHECKSUM}"'))
        return costs

    def rebuilt(self, *, network: Network | None = None, **changes: Any) -> Costs:
        """Return the costs of the same transformer with another network or other settings.

        All seconds and bytes are computed again, those of collectives between the GPUs of a device
        included. Later changes, such as by `scaled` and `in_chunks`, are not kept.

        Parameters
        ----------
        network
            By default that of these costs.
        **changes
            Settings of `transformer` that differ, such as ``gpu="h200"``, ``recompute="full"`` or
            ``layers_per_stage=[8, 8]``.

        Returns
        -------
        Costs
            One value a stage, as `transformer` returns them.

        Examples
        --------
        >>> import pipesim as ps
        >>> nodes = ps.Network.preset("dgx_h100", gpus_per_device=4)
        >>> costs = ps.Costs.transformer(
        ...     [2, 2], hidden_size=1024, n_heads=16, sequence_length=1024, vocabulary_size=50304,
        ...     microbatch_size=4, gpu="h100_sxm", tensor_parallel=4, network=nodes)
        >>> costs.rebuilt(network=nodes.scaled(bandwidth=0.1)).forward[0] > costs.forward[0]
        True
        """
        settings = self._settings
        if "layers_per_stage" not in settings:
            raise CostsError(
                "costs are of no transformer, so that they cannot be built again; "
                "Transformer.costs gives costs that can, or use replace(costs, ...)"
            )
        network = self.network if network is None else network
        opposite = {"gpu": "flops_per_second", "flops_per_second": "gpu"}
        dropped = [opposite[name] for name in changes if name in opposite]
        kept = {name: value for name, value in settings.items() if name not in dropped}
        return Costs.transformer(**{**kept, **changes}, network=network)

    @checked_names
    def scaled(
        self,
        factor: float,
        *,
        op: Op | str | None = None,
        stage: int | None = None,
        n_stages: int | None = None,
    ) -> Costs:
        """Return these costs with the seconds of operations multiplied by a factor.

        Parameters
        ----------
        factor
            0.5 makes operations twice as fast. Messages and launches keep their times.
        op
            The operation to scale, such as ``"B"``; None for all that compute. Other operations
            keep their seconds, such as R if F is scaled, with two exceptions. I and W are the
            parts of B, so that ``"B"`` scales them too. The part of F or B in ``overlapped`` is
            scaled with it. ``"I"`` and ``"W"`` leave B as it is: they change nothing in a graph
            whose backwards are B alone.
        stage
            The stage to scale; None for all.
        n_stages
            Number of stages; needed to scale one stage of costs with one value for all stages.

        Returns
        -------
        Costs
            With as many values in each field as these costs, or one a stage if one stage was
            scaled.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Costs(forward=1, backward=2).scaled(2.5, stage=2, n_stages=4).forward
        (1.0, 1.0, 2.5, 1.0)
        >>> ps.Costs(forward=(1, 1), backward=(2, 2)).scaled(0.5, op="B", stage=1).backward
        (2.0, 1.0)
        """
        from pipesim.costs.scaling import scaled

        return scaled(self, factor, op, stage, n_stages)


def replace_stages(costs: Costs, names: Sequence[str], rows: Sequence[tuple[float, ...]]) -> Costs:
    """Return costs with other values of stages, faster than `dataclasses.replace`.

    The fields ``names`` have one value a stage. ``rows`` are the new values of each stage.
    """
    table = np.array(rows).T
    values = dict(zip(names, zip(*rows, strict=True), strict=True))
    if not 0 <= table.min() <= table.max() < math.inf:
        return replace(costs, **values)  # type: ignore[arg-type]  # raises
    changed = object.__new__(type(costs))
    columns = dict(zip(names, table, strict=True))
    changed.__dict__.update({**costs.__dict__, **values, "_columns": columns})
    return changed


#: Fields of the line, and their names there.
_SHOWN = {
    "forward": "F",
    "backward": "B",
    "input_grad": "I",
    "weight_grad": "W",
    "output_bytes": "messages",
    "activation_bytes": "activations",
    "parameter_bytes": "parameters",
    "optimizer_bytes": "optimizer",
}


def costs_text(costs: Costs) -> str:
    """Return such as ``<Costs of 4 stages: F 10.2 to 12.1 ms, B 20.4 ms, messages 32.0 MiB>``.

    Fields that are not given, and bytes that are 0, are left out.
    """
    parts = []
    for name, shown in _SHOWN.items():
        value = getattr(costs, name)
        is_bytes = name.endswith("bytes")
        if value is not None and not (is_bytes and np.max(value) == 0):
            parts.append(f"{shown} {_range_text(value, format_bytes if is_bytes else format_time)}")
    n_stages = n_stages_of_costs(costs)
    count = "any number of" if n_stages is None else n_stages
    n = costs.n_microbatches
    parts += [f"{n} micro-batches"] * (n is not None)
    return f"<Costs of {count} stage{'s' * (n_stages != 1)}: {', '.join(parts)}>"


def n_stages_of_costs(costs: Costs) -> int | None:
    """Return the number of stages of costs; None if they have one value for all."""
    sizes = (n for name in STAGE_ROWS if (n := n_stages_of(getattr(costs, name))))
    return max(sizes, default=None)


def _range_text(value: float | tuple[float, ...], form: Callable[[float], str]) -> str:
    low, high = form(float(np.min(value))), form(float(np.max(value)))
    if low == high:
        return low
    number, unit = low.split(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"
