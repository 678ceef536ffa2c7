"""`PlanChoice`, one configuration of a training run, its results and facts of its schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError
from pipesim.graph.options import OffloadTarget
from pipesim.lowering.parameter_shards import ShardParameters
from pipesim.models.parallel import SEARCHED
from pipesim.named_schedules.patterns import Merged
from pipesim.ops import Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ScheduleInfo, options_of_schedules, schedule_info
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints, bincount

#: Schedules whose devices have a stage of the encoders and one of the language model each.
ENCODER_SCHEDULES = tuple(x for x in options_of_schedules() if schedule_info(x).n_modules > 1)
#: Outcome of a configuration.
Status = Literal["simulated", "cannot win", "does not fit", "invalid"]


@dataclass(frozen=True)
class PlanChoice:
    """One configuration of a training run; its values are checked by `Plans.plan`.

    Attributes
    ----------
    tensor_parallel, pipeline_parallel, data_parallel, context_parallel, expert_parallel
        Numbers of GPUs, devices and replicas, as in `pipesim.plan`.
    expert_tensor_parallel
        GPUs that share each expert; 0 for ``tensor_parallel``.
    microbatch_size
        Sequences of a micro-batch.
    n_microbatches
        Micro-batches of a replica in a step; accumulation steps if ``pipeline_parallel`` is 1.
    schedule, n_chunks, n_slices
        Name of the schedule, stages of each device, and slices of each sequence.
    merged, group_size
        Whether F and B run as one action, and micro-batches of a group, as in `pipesim.plan`; None
        for groups of the schedule's own size.
    recompute, shard_optimizer, sequence_parallel, shard_parameters
        As in `pipesim.plan`.
    layers_per_stage
        Layers of each stage.
    ordered_for_costs
        Whether the schedule orders its tasks for the costs, if it can, and not for equal ones.
    offload
        Activations that wait in host memory, as text: ``"none"``, ``"all"``, a share such as
        ``"0.5"``, or ``"longest:0.5"``.
    offload_to
        Where they wait, as in `pipesim.plan`; ``"host"`` if there are none.
    encoder_tensor_parallel
        GPUs that share each layer of an encoder, one number an encoder.

    Examples
    --------
    >>> import pipesim as ps
    >>> layers = ps.Layers({"forward": [1, 1], "backward": [2, 2], "activation_bytes": [9, 9]})
    >>> cluster = ps.Cluster("dgx_h100", n_gpus=2)
    >>> plans = ps.plan(layers, cluster, global_batch=4, schedules="1f1b")
    >>> choice = plans.choice(pipeline_parallel=2)
    >>> print(choice)
    tp1 pp2 dp1, 1f1b, 4 micro-batches of 1
    >>> choice.n_gpus, choice.n_stages
    (2, 2)
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    microbatch_size: int = 1
    n_microbatches: int = 1
    schedule: str = "1f1b"
    n_chunks: int = 1
    recompute: str = "none"
    shard_optimizer: bool = False
    sequence_parallel: bool = False
    layers_per_stage: tuple[int, ...] = ()
    ordered_for_costs: bool = False
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 0
    shard_parameters: ShardParameters = "none"
    offload: str = "none"
    n_slices: int = 1
    merged: Merged = False
    group_size: int | None = None
    encoder_tensor_parallel: tuple[int, ...] = ()
    offload_to: OffloadTarget = "host"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the schedule, without its costs."""
        info, groups = schedule_info(self.schedule), self.group_size
        options = schedule_options(info, self.n_chunks, self.n_slices, self.merged)
        return options if groups is None else {**options, "group_size": groups}

    @property
    def gpus_per_device(self) -> int:
        """GPUs of a device of the pipeline."""
        return self.tensor_parallel * self.context_parallel

    @property
    def shard_options(self) -> dict[str, Any]:
        """Fields that are also of `pipesim.Parallel`."""
        return {name: getattr(self, name) for name in SEARCHED}

    @property
    def n_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.gpus_per_device * self.pipeline_parallel * self.data_parallel

    @property
    def n_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline_parallel * self.n_chunks

    @property
    def n_scheduled(self) -> int:
        """Micro-batches of the schedule of a replica: slices, if sequences are cut into them."""
        return self.n_microbatches * self.n_slices

    @property
    def shards_parameters(self) -> bool:
        """Whether replicas share parameters, gradients and optimizer."""
        return self.shard_parameters != "none"

    @property
    def is_layer_by_layer(self) -> bool:
        """Whether one device gathers parameters stage by stage, as in FSDP."""
        return self.shards_parameters and self.schedule == "naive" and self.pipeline_parallel == 1

    @property
    def optimizer_shares(self) -> int:
        """Replicas that share the optimizer; 1 if each has all of it."""
        return self.data_parallel if self.shard_optimizer or self.shards_parameters else 1

    @property
    def layout_matters(self) -> bool:
        """Whether GPUs are in another order with the stages of a replica in a row."""
        return self.pipeline_parallel > 1 and self.data_parallel > 1

    def __str__(self) -> str:
        if 0 in (self.n_gpus, self.n_microbatches):  # of `partial_choice`
            return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value)
        parts = [
            sizes_text(self),
            self.schedule
            + (f" x{self.n_chunks}" if self.n_chunks > 1 else "")
            + " for costs" * self.ordered_for_costs
            + merged_text(self),
            microbatches_text(self),
        ]
        if self.recompute != "none":
            parts.append(f"{self.recompute} recompute")
        parts += ["distributed optimizer"] * self.shard_optimizer
        parts += [sharding_text(self)] * self.shards_parameters
        parts += ["sequence parallel"] * self.sequence_parallel
        parts += [offload_text(self)] * (self.offload != "none")
        if len(set(self.layers_per_stage)) > 1:
            parts.append(f"{layers_text(self.layers_per_stage)} layers by stage")
        return ", ".join(parts)


class Evaluation(NamedTuple):
    """Step and memory of one configuration, or the reason why it has none.

    - ``step`` is in seconds, as `pipesim.simulate` returns them for the whole cluster; ``bubble``
      is the idle share of all devices (0..1). Both are NaN unless simulated.
    - ``bound`` is a lower bound on ``step``. ``memory`` has the bytes of the fullest device, the
      allocator's reserve included: a lower bound unless simulated. Both are NaN if invalid.
    - ``status`` ``"cannot win"``: its bounds show that it is neither among the best nor on the
      front of time and memory. ``reason`` has the reason of the status in words; empty if
      simulated.
    - ``noisy_step`` is a percentile of the seconds of noisy steps; NaN without noise.
    - ``low`` and ``high`` are the ends of `Timeline.interval` (s); NaN if they are not known.
    """

    choice: PlanChoice
    step: float
    bound: float
    memory: float
    bubble: float
    status: Status
    reason: str = ""
    noisy_step: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")


def invalid(choice: PlanChoice, reason: str, status: Status = "invalid") -> Evaluation:
    """Return a configuration that is ruled out before anything is known of it."""
    nan = math.nan
    return Evaluation(choice, nan, nan, nan, nan, status, reason)


def partial_choice(**settings: Any) -> PlanChoice:
    """Return some settings of many configurations; 0 and "" stand for values that do not matter."""
    none = {field.name: type(getattr(PlanChoice, field.name))() for field in fields(PlanChoice)}
    return PlanChoice(**{**none, **settings})


def with_settings(choice: PlanChoice, **settings: Any) -> PlanChoice:
    """Return a configuration with other settings, as `dataclasses.replace` does.

    It sets all fields at once, since a plan changes tens of thousands of configurations.
    """
    changed = object.__new__(PlanChoice)
    vars(changed).update(vars(choice), **settings)
    return changed


def layer_by_layer(choice: PlanChoice) -> PlanChoice:
    """Return a configuration with a stage for each layer, and for embedding and head, as in FSDP.

    Those with whole parameters, with a pipeline or without known layers stay as they are.
    """
    n_layers = sum(choice.layers_per_stage)
    if not n_layers or choice.pipeline_parallel > 1 or not choice.shards_parameters:
        return choice
    sizes = (0, *(1,) * n_layers, 0)
    return replace(choice, schedule="naive", n_chunks=len(sizes), layers_per_stage=sizes)


def sizes_text(choice: PlanChoice) -> str:
    """Return the sizes of parallelism, such as "tp8 pp4 dp2"; cp, ep and etp if they are used."""
    context, experts = choice.context_parallel, choice.expert_parallel
    parts = [f"tp{choice.tensor_parallel}", f"cp{context}" * (context > 1)]
    parts += [f"pp{choice.pipeline_parallel}", f"dp{choice.data_parallel}"]
    parts += [f"ep{experts}" * (experts > 1)]
    parts += [f"etp{choice.expert_tensor_parallel}" * (choice.expert_tensor_parallel > 0)]
    if choice.encoder_tensor_parallel:
        parts.append(f"encoder tp{'+'.join(map(str, choice.encoder_tensor_parallel))}")
    return " ".join(part for part in parts if part)


def microbatches_text(choice: PlanChoice) -> str:
    """Return number and size of the micro-batches of a replica, such as "8 micro-batches of 1"."""
    word = "micro-batch" if choice.n_microbatches == 1 else "micro-batches"
    return f"{choice.n_microbatches} {word} of {choice.microbatch_size}{slices_text(choice)}"


def slices_text(choice: PlanChoice) -> str:
    """Return the slices of a sequence, such as " in 4 slices"; empty for whole sequences."""
    return f" in {choice.n_slices} slices" if choice.n_slices > 1 else ""


def merged_text(choice: PlanChoice) -> str:
    """Return groups and merged pairs of an order, such as " in groups of 8, F and B merged"."""
    groups = f" in groups of {choice.group_size}" if choice.group_size else ""
    texts = {False: "", True: ", F and B merged", "delayed_w": ", F and I merged"}
    return groups + texts[choice.merged]


def sharding_text(choice: PlanChoice) -> str:
    """Return how replicas share parameters, such as "parameters gathered for every use"."""
    value = choice.shard_parameters
    texts = {"none": "whole parameters", "every": "parameters gathered for every use",
             "step": "parameters gathered once a step"}  # fmt: skip
    if isinstance(value, str):
        return texts[value]
    return f"parameters of {value} {'stage' if value == 1 else 'stages'} gathered"


def offload_text(choice: PlanChoice) -> str:
    """Return the activations that wait elsewhere, such as "offload longest:0.5"."""
    return f"offload {choice.offload}" + " to a peer" * (choice.offload_to == "peer")


def layers_text(sizes: Sequence[int]) -> str:
    """Return the layers of each stage as a sum in order of stages, such as ``"4+5(x14)+6"``.

    The first stage without a layer has the embedding alone, and the last one the head.
    """
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    texts = [f"{size}(x{n})" if n > 1 else str(size) for size, n in runs]
    for end, module in ((0, "embedding"), (-1, "head")):
        if runs and runs[end] == (0, 1):
            texts[end] = f"0({module} alone)"
    return "+".join(texts)


Floats = NDArray[np.float64]


class StageDevices(NamedTuple):
    """Devices of the stages of a placement of one path, for sums and extremes over their stages.

    ``stages`` are in order of their devices. ``starts`` are the positions in ``stages`` of the
    first stage of each device.
    """

    device: Ints
    n_devices: int
    stages: Ints
    starts: Ints

    @classmethod
    def of_placement(cls, placement: Placement) -> StageDevices:
        """Return the devices of the stages of a placement."""
        device = np.array(placement.paths[0])
        stages = np.argsort(device, kind="stable")
        starts = np.searchsorted(device[stages], np.arange(placement.n_devices))
        return cls(device, placement.n_devices, stages, starts)

    @property
    def first(self) -> Ints:
        """First stage of each device."""
        return self.stages[self.starts]

    def sums(self, values: Floats) -> Floats:
        """Return the sum of the values of the stages of each device."""
        return bincount(self.device, values, self.n_devices)

    def least(self, values: Floats) -> Floats:
        """Return the least value of the stages of each device."""
        least: Floats = np.minimum.reduceat(values[self.stages], self.starts)
        return least

    def most(self, values: Floats) -> Floats:
        """Return the largest value of the stages of each device."""
        most: Floats = np.maximum.reduceat(values[self.stages], self.starts)
        return most


class OrderFacts(NamedTuple):
    """Facts of a schedule that hold for any number of micro-batches.

    ``splits_backward``: whether it has I and W. ``schedule`` is the order of few micro-batches.
    """

    devices: StageDevices
    splits_backward: bool
    schedule: Schedule


def placement_of(choice: PlanChoice) -> Placement:
    """Return the placement of the schedule of a choice; errors are those of `order_facts`."""
    return choice_facts(choice).schedule.placement


def hides_exchanges(choice: PlanChoice) -> bool:
    """Return whether exchanges of experts may run behind the compute of another micro-batch."""
    if choice.expert_parallel == 1:
        return False
    return bool(choice.merged) or choice_facts(choice).schedule.overlapped is not None


def choice_facts(choice: PlanChoice) -> OrderFacts:
    """Return `order_facts` of the schedule of a choice."""
    return order_facts(
        choice.schedule, choice.pipeline_parallel, choice.n_chunks, choice.n_slices, choice.merged
    )


def order_facts(
    name: str, n_devices: int, n_chunks: int, n_slices: int = 1, merged: Merged = False
) -> OrderFacts:
    """Return placement and operations of a schedule, from the order of few micro-batches."""
    return order_facts_of(schedule_info(name), n_devices, n_chunks, n_slices, merged)


@lru_cache(maxsize=4096)
def order_facts_of(
    info: ScheduleInfo, n_devices: int, n_chunks: int, n_slices: int = 1, merged: Merged = False
) -> OrderFacts:
    """Return `order_facts` of an entry of the registry, which a later registration replaces."""
    options = schedule_options(info, n_chunks, n_slices, merged)
    counts = [n_slices * k for k in range(-(-n_devices // n_slices), 2 * n_devices + 1)]
    n = next((k for k in counts if info.allows(n_devices, k, **options)), counts[0])
    built = info.make(n_devices, n, **options)
    if built.placement.n_paths > 1 or built.n_batches > 1:
        raise ArgumentError(
            f"schedules has {info.name!r}, whose micro-batches take several paths or belong to "
            "several mini-batches; a plan has one of each"
        )
    if built.n_slices != n_slices:
        raise ArgumentError(
            f"schedules has {info.name!r}, whose micro-batches are {built.n_slices} slices of a "
            f"sequence, got n_slices={n_slices}; give a schedule with an option n_slices"
        )
    devices = StageDevices.of_placement(built.placement)
    return OrderFacts(devices, bool((built.op == Op.I).any()), built)


def takes_slices(name: str) -> bool:
    """Return whether a schedule cuts sequences into a number of slices."""
    return "n_slices" in schedule_info(name).options


def schedule_options(
    info: ScheduleInfo, n_chunks: int, n_slices: int, merged: Merged = False
) -> dict[str, Any]:
    """Return the options of a schedule for numbers of chunks and of slices, if it takes them."""
    values: dict[str, Any] = {"n_chunks": n_chunks, "n_slices": n_slices}
    if merged:
        values["merged"] = merged
    return {name: value for name, value in values.items() if name in info.options}
