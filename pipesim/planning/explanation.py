"""`Explanation`: why one configuration is faster than another, in words and figures."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipesim.analysis.idle import idle_by_cause
from pipesim.costs.costs import Costs
from pipesim.errors import CostsWarning
from pipesim.graph.graph import TaskGraph
from pipesim.network.network import Network
from pipesim.ops import Op
from pipesim.planning.choice import (
    PlanChoice,
    merged_text,
    offload_text,
    placement_of,
    sharding_text,
    slices_text,
)
from pipesim.plot.html_tables import note_html, table_html
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory import costs_of, memory_breakdown
from pipesim.timeline.timeline import Timeline
from pipesim.utils.texts import COLUMNS, format_bytes, format_time

if TYPE_CHECKING:
    import pandas as pd


#: Parts below this share of the longer step, or of the larger memory, are listed together.
_SMALL = 5e-4
#: Shares of the step that predictions do not decide: see the limits in the documentation.
_TIE = 0.03
#: Differences below this share of the step are due to rounding.
_UNSTATED = 1e-9
#: Value of the first configuration and of the second, and their difference.
_Row = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class Explanation:
    """Difference between the steps of two configurations, in parts; `print` it to read it.

    Attributes
    ----------
    first, second
        The configurations.
    seconds
        One row a part of the step: seconds of the ``first`` and the ``second``, and their
        ``difference``, below 0 where the first takes less. ``math.fsum`` of a column is exactly the
        step, or the difference of the two steps. `step_parts` defines the parts.
    memory
        One row a kind of memory, in bytes of the fullest device, with the same columns. The last
        row is the ``total``.
    is_tied
        Whether embedding and head of the model share their matrix.
    """

    first: PlanChoice
    second: PlanChoice
    seconds: pd.DataFrame
    memory: pd.DataFrame
    is_tied: bool = False

    @property
    def difference(self) -> float:
        """Seconds of the first step minus those of the second."""
        return math.fsum(self.seconds["difference"])

    @property
    def headline(self) -> str:
        """The two steps and their difference, in a sentence."""
        first, second = math.fsum(self.seconds["first"]), math.fsum(self.seconds["second"])
        if first == second:
            return f"A and B both take {format_time(first)} a step."
        share = abs(first / second - 1)
        tie = " Measure both: predictions do not decide so small a difference." * (share < _TIE)
        return (
            f"A takes {format_time(first)} a step: {_change(first - second, format_time)} than B "
            f"with {format_time(second)}, or {share:.1%}.{tie}"
        )

    def sentences(self) -> list[str]:
        """Return a sentence for each part of the difference, the largest first."""
        parts = _rows(self.seconds)
        step = max(math.fsum(self.seconds["first"]), math.fsum(self.seconds["second"]))
        shown, rest = _large(parts, _SMALL * step)
        texts = []
        for part in shown:
            reason = part_reason(part, self.first, self.second, is_tied=self.is_tied)
            end = f"; {reason}." if reason else "."
            name = part_name(part, self.first, self.second)
            texts.append(f"{name}: {_changes(parts[part], format_time)}{end}")
        if abs(rest) > _UNSTATED * step:
            texts.append(f"All other parts together: {_change(rest, format_time)}.")
        return texts

    def memory_sentences(self) -> list[str]:
        """Return the memory of the fullest devices, and a sentence for each kind that differs."""
        kinds = _rows(self.memory)
        size, other, change = kinds.pop("total")
        end = f": {_change(change, format_bytes)} than B with {format_bytes(other)}."
        end = end if change else ", as that of B does."
        texts = [f"The fullest device of A needs {format_bytes(size)}{end}"]
        shown, _ = _large(kinds, _SMALL * max(size, other))
        texts += [f"{kind.capitalize()}: {_changes(kinds[kind], format_bytes)}." for kind in shown]
        return texts

    def _lines(self) -> list[str]:
        need, *kinds = self.memory_sentences()
        lines = [f"A: {self.first}", f"B: {self.second}", self.headline]
        lines += [f"  {text}" for text in self.sentences()]
        return [*lines, need, *(f"  {text}" for text in kinds)]

    def __str__(self) -> str:
        wrap = textwrap.TextWrapper(COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
        return "\n".join(map(wrap.fill, self._lines()))

    def __repr__(self) -> str:
        return f"<Explanation: {self.headline}>"

    def _repr_html_(self) -> str:
        steps, sizes = _rows(self.seconds), _rows(self.memory)
        parts = [
            [part_name(part, self.first, self.second), *map(format_time, row)]
            for part, row in steps.items()
        ]
        kinds = [[kind, *map(format_bytes, row)] for kind, row in sizes.items()]
        head = ["A", "B", "A minus B"]
        return "".join(
            [
                *(note_html(line) for line in self._lines()),
                table_html(["part of the step", *head], parts),
                table_html(["memory of the fullest device", *head], kinds),
            ]
        )


def explanation(
    choices: tuple[PlanChoice, PlanChoice],
    seconds: tuple[Mapping[str, float], Mapping[str, float]],
    memory: tuple[Mapping[str, float], Mapping[str, float]],
    *,
    is_tied: bool = False,
) -> Explanation:
    """Return the explanation of two configurations from the parts of their steps and memory."""
    from pipesim.utils.packages import pandas as pd

    first, second = seconds
    differences = {name: first[name] - second[name] for name in first}
    total = math.fsum(first.values()) - math.fsum(second.values())
    largest = max(differences, key=lambda name: abs(differences[name]))
    differences[largest] = 0.0  # rounding is part of the largest
    differences[largest] = math.fsum([total, *(-part for part in differences.values())])
    steps = pd.DataFrame({"first": first, "second": second, "difference": differences})
    sizes = pd.DataFrame({"first": memory[0], "second": memory[1]})
    sizes["difference"] = sizes["first"] - sizes["second"]
    return Explanation(*choices, steps.rename_axis("part"), sizes.rename_axis("kind"), is_tied)


def _rows(table: pd.DataFrame) -> dict[str, _Row]:
    """Return the rows of a table: values of both configurations, and their difference."""
    rows = zip(table.index, table["first"], table["second"], table["difference"], strict=True)
    return {str(name): (float(a), float(b), float(c)) for name, a, b, c in rows}


def _large(parts: Mapping[str, _Row], least: float) -> tuple[list[str], float]:
    """Return the parts that differ by at least this, the largest first; the sum of the others."""
    order = sorted(parts, key=lambda name: -abs(parts[name][2]))
    shown = [name for name in order if abs(parts[name][2]) >= least and parts[name][2]]
    return shown, math.fsum(parts[name][2] for name in order if name not in shown)


def _change(difference: float, text: Callable[[float], str]) -> str:
    """Return a difference in words, such as ``"1.2 s less"``."""
    return f"{text(abs(difference))} {'less' if difference < 0 else 'more'}"


def _changes(row: _Row, text: Callable[[float], str]) -> str:
    """Return a difference and both values in words."""
    return f"{_change(row[2], text)}, {text(row[0])} against {text(row[1])}"


# Settings that explain why a part of the step differs between two configurations.

#: Name of each part of a step in sentences.
_NAMES: Mapping[str, str] = {
    "compute": "Compute",
    "tensor_parallel": "Collectives of tensor parallelism",
    "recompute": "Recompute",
    "warm_up_cool_down": "Bubble of warm-up and cool-down",
    "imbalance": "Bubble of uneven stages",
    "schedule_order": "Bubble of the order",
    "host": "Waits for the host",
    "messages": "Waits for messages between stages",
    "reduction_and_optimizer": "Reduction of gradients and optimizer",
}


#: Names of parts that contain more if a configuration has certain settings.
_LONGER: Mapping[str, tuple[str, Callable[[PlanChoice], bool]]] = {
    "tensor_parallel": (
        "Collectives of tensor, context and expert parallelism",
        lambda choice: choice.context_parallel * choice.expert_parallel > 1,
    ),
    "messages": (
        "Waits for messages between stages and for offloads",
        lambda choice: choice.offload != "none",
    ),
    "reduction_and_optimizer": (
        "Reduction of gradients, gathers of parameters and optimizer",
        lambda choice: choice.shards_parameters,
    ),
}


def part_name(part: str, first: PlanChoice, second: PlanChoice) -> str:
    """Return the name of a part of two configurations in sentences."""
    if part in _LONGER:
        name, applies = _LONGER[part]
        if applies(first) or applies(second):
            return name
    return _NAMES[part]


def part_reason(part: str, first: PlanChoice, second: PlanChoice, *, is_tied: bool = False) -> str:
    """Return the settings behind a part of both configurations in words; "" if they are equal.

    ``is_tied``: whether embedding and head share their matrix.
    """
    text = _SETTINGS[part]
    values = text(first), text(second)
    begins_chain = not first.encoder_tensor_parallel  # with encoders, the embedding is elsewhere
    if is_tied and begins_chain and part == "reduction_and_optimizer":
        places = _tied(first), _tied(second)
        if places[0] != places[1]:
            values = f"{values[0]} and {places[0]}", f"{values[1]} and {places[1]}"
    return "" if values[0] == values[1] else f"{values[0]}, against {values[1]}"


def _kernels(choice: PlanChoice) -> str:
    """Return the sizes that decide how efficient kernels are."""
    sequences = _count(choice.microbatch_size, "sequence")
    return f"micro-batches of {sequences}{slices_text(choice)} and {_layer_share(choice)}"


def _layer_share(choice: PlanChoice) -> str:
    """Return the numbers of GPUs that share a layer, a sequence, all experts and one of them."""
    parts = [f"{_count(choice.tensor_parallel, 'GPU')} a layer"]
    parts += [f"{choice.context_parallel} a sequence"] * (choice.context_parallel > 1)
    parts += [f"{choice.expert_parallel} for the experts"] * (choice.expert_parallel > 1)
    parts += [f"{choice.expert_tensor_parallel} an expert"] * (choice.expert_tensor_parallel > 0)
    if sizes := choice.encoder_tensor_parallel:
        encoders = "an encoder" if len(sizes) == 1 else "encoders"
        parts.append(f"{' and '.join(map(str, sizes))} a layer of {encoders}")
    return ", ".join(parts)


def _depth(choice: PlanChoice) -> str:
    """Return the sizes that decide how long the pipeline fills and drains."""
    chunks = f" of {choice.n_chunks} chunks" if choice.n_chunks > 1 else ""
    count = _count(choice.n_microbatches, "micro-batch", "micro-batches") + slices_text(choice)
    return (
        f"{_schedule(choice)} on {_count(choice.pipeline_parallel, 'device')}{chunks} with {count}"
    )


def _split(choice: PlanChoice) -> str:
    """Return the fewest and the most layers of a stage."""
    few, most = min(choice.layers_per_stage), max(choice.layers_per_stage)
    stages = _count(choice.n_stages, "stage")
    if choice.pipeline_parallel == 1:
        return f"all layers in {stages} of one device"
    if few == most:
        return f"{few} layers in each of {stages}, which differ in embedding, head or layers"
    return f"{few} to {most} layers in each of {stages}"


def _schedule(choice: PlanChoice) -> str:
    return choice.schedule + " for costs" * choice.ordered_for_costs + merged_text(choice)


def _borders(choice: PlanChoice) -> str:
    """Return the number of borders that messages of a micro-batch cross, and what is offloaded."""
    borders = choice.n_stages - 1 if choice.pipeline_parallel > 1 else 0
    copies = f" and {offload_text(choice)}" if choice.offload != "none" else ""
    return f"{_count(borders, 'border')} between stages{copies}"


def _replicas(choice: PlanChoice) -> str:
    """Return the replicas and the optimizer, or how they share parameters."""
    optimizer = f"{'a distributed' if choice.shard_optimizer else 'a whole'} optimizer"
    what = sharding_text(choice) if choice.shards_parameters else optimizer
    return f"{_count(choice.data_parallel, 'replica')} with {what}"


def _tied(choice: PlanChoice) -> str:
    """Return where the matrix of embedding and head is: V placements need no sum over devices."""
    path = placement_of(choice).paths[0]
    return f"tied embeddings on {_count(len({path[0], path[-1]}), 'device')}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


_SETTINGS: Mapping[str, Callable[[PlanChoice], str]] = {
    "compute": _kernels,
    "tensor_parallel": _layer_share,
    "recompute": lambda x: f"{x.recompute} recompute" if x.recompute != "none" else "none",
    "warm_up_cool_down": _depth,
    "imbalance": _split,
    "schedule_order": _schedule,
    "host": _kernels,
    "messages": _borders,
    "reduction_and_optimizer": _replicas,
}


# Seconds of a step, and bytes of its fullest device, split into parts.

#: Parts of a step, in the order of a table.
PARTS = (
    *("compute", "tensor_parallel", "recompute"),
    *("warm_up_cool_down", "imbalance", "schedule_order", "host"),
    *("messages", "reduction_and_optimizer"),
)
#: Parts below this share of the step are due to rounding.
_NOISE = 1e-12
#: Operations that each micro-batch runs once.
_ONCE = frozenset({Op.F, Op.B, Op.I, Op.W})
#: Causes of idle time of each part, without messages and reductions.
_CAUSES = {
    "warm_up_cool_down": ("warm_up", "cool_down"),
    "imbalance": ("imbalance", "straggler"),
    "schedule_order": ("schedule_order",),
    "host": ("host", "latency", "bandwidth", "contention"),
}


def step_parts(timeline: Timeline, rebuilt: Callable[..., Costs] | None = None) -> dict[str, float]:
    """Return the seconds of a simulated step in `PARTS`, whose ``math.fsum`` is its makespan.

    ``rebuilt`` returns the costs without recompute, with the network or without, for costs that
    `Costs.rebuilt` cannot build again.

    The graph is simulated again with some costs removed, one after the other:

    ======================= =======================================================================
    part                    seconds
    ======================= =======================================================================
    reduction_and_optimizer makespan, minus that without REDUCE_GRAD, UNSHARD and STEP; so it has
                            what these cost compute beside them
    messages                the latter, minus that without messages, copies to and from the host
                            (OFFLOAD, RELOAD) and exchanges of experts that are tasks, too
    warm_up_cool_down,      mean idle time of a device in this last simulation, by cause; see
    imbalance,              `pipesim.analysis.idle`. ``host`` is 0 unless the costs have launches.
    schedule_order, host
    recompute               mean of a device: R, and the recompute inside B and I
    tensor_parallel         mean of a device: collectives of tensor, context and expert parallelism
                            inside F, B, I and W
    compute                 mean of a device: the rest of F, B, I and W
    ======================= =======================================================================

    Costs that are of no `Transformer` have no known recompute or collectives inside B; these
    seconds are part of ``compute`` then.
    """
    timeline.check_complete("the parts of a step need")
    graph, costs = timeline.graph, costs_of(timeline)
    steady = replace(
        costs, reduce_grad=0.0, unshard=0.0, optimizer_step=0.0, tied_bytes=0.0, reduce_copies=0.0
    )
    local = replace(steady, network=Network(), output_seconds=0.0, offload=0.0, reload=0.0)
    if graph.kinds.has_segments:
        local = replace(local, exchange_dispatch=0.0, exchange_combine=0.0)
    without_tail = predict_timeline(graph, steady).makespan
    alone = predict_timeline(graph, local)
    idle = idle_by_cause(alone).mean()
    parts = dict.fromkeys(PARTS, 0.0)
    parts["reduction_and_optimizer"] = timeline.makespan - without_tail
    parts["messages"] = without_tail - alone.makespan
    for part, causes in _CAUSES.items():
        parts[part] = float(sum(idle[cause] for cause in causes))
    parts |= _busy_parts(alone, costs, rebuilt)
    return _exact(timeline.makespan, parts)


def _busy_parts(
    alone: Timeline, built: Costs, rebuilt: Callable[..., Costs] | None
) -> dict[str, float]:
    """Return the mean busy seconds of a device: compute, collectives, recompute.

    ``alone`` is the step without messages and reductions; ``built`` are costs as a model gave them.
    """
    graph, whole = alone.graph, float(alone.busy.mean())
    settings = None if built.work is None else built.work.settings
    if rebuilt is None and not (settings and "layers_per_stage" in settings):
        first = _busy_once(graph, built)
        return {"compute": first, "tensor_parallel": 0.0, "recompute": whole - first}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostsWarning)
        if rebuilt is not None:
            once, without_collectives = rebuilt(has_network=True), rebuilt(has_network=False)
        else:
            once = built.rebuilt(recompute="none")
            without_collectives = once.rebuilt(network=Network(host=built.network.host))
    first, compute = _busy_once(graph, once), _busy_once(graph, without_collectives)
    return {"compute": compute, "tensor_parallel": first - compute, "recompute": whole - first}


def _busy_once(graph: TaskGraph, costs: Costs) -> float:
    """Return the mean seconds of a device in F, B, I and W."""
    seconds = costs.of(graph).duration
    return float(seconds[graph.is_op(_ONCE)].sum()) / graph.n_devices


def _exact(total: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Return parts rounded so that their exact sum is ``total``; ``compute`` takes the rest."""
    unit, least = float(np.spacing(total)), _NOISE * total
    rounded = {
        name: float(np.rint(part / unit) * unit) if abs(part) > least else 0.0
        for name, part in parts.items()
    }
    rounded["compute"] = 0.0
    rounded["compute"] = math.fsum([total, *(-part for part in rounded.values())])
    return {name: rounded[name] for name in PARTS}


def memory_parts(timeline: Timeline) -> dict[str, float]:
    """Return the bytes of the fullest device by kind; see `Timeline.memory.breakdown`.

    ``total`` is their sum, the allocator's reserve included.
    """
    table = memory_breakdown(timeline)
    fullest = int(table["total"].to_numpy().argmax())
    return {str(kind): float(table[kind].to_numpy()[fullest]) for kind in table}
