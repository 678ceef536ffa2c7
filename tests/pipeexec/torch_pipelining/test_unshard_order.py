"""Where parameters are gathered and freed, against torch.distributed.pipelining's own pass."""

from __future__ import annotations

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import pipesim as ps
from pipesim.ops import Action, Op, Overlapped

#: Schedules that torch has too, with several stages a device, or V-shaped.
SCHEDULES = (
    ("1f1b", {}), ("gpipe", {}), ("interleaved_1f1b", {"n_chunks": 2}), ("zbv", {}),
    ("interleaved_1f1b", {"n_chunks": 4}), ("looped_bfs", {"n_chunks": 3}),
    ("interleaved_zb", {"n_chunks": 2}), ("dualpipev", {}),
)  # fmt: skip
_PASSES = {Op.UNSHARD: 0, Op.RESHARD: 1}


def of_torch(
    order: list[Action | Overlapped], window: int
) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return, for each gather and each free of torch, the stage and the use next to it.

    W is left out, since it uses no parameters here; torch gathers them for W too.
    """
    texts = [str(a) for a in order if isinstance(a, Overlapped) or a.op != Op.W]
    actions = [torch_schedules._Action.from_str(text) for text in texts]
    lowered = torch_schedules._add_unshard_reshard(actions, window)
    gathers, frees = [], []
    for k, action in enumerate(lowered):
        stage, name = action.stage_index, action.computation_type.name
        if name == "UNSHARD":
            gathers.append((stage, next(u for u in map(str, lowered[k:]) if uses(u, stage))))
        elif name == "RESHARD":
            frees.append((stage, next(u for u in map(str, lowered[k::-1]) if uses(u, stage))))
    return gathers, frees


def uses(action: str, stage: int) -> bool:
    """Return whether an action in torch's text form computes on a stage."""
    halves = action.removesuffix("OVERLAP_F_B").strip("()").split(";")
    return any(
        (a := Action.parse(half)).stage == stage and a.op in (Op.F, Op.B, Op.I)
        for half in halves
        if "SHARD" not in half
    )


@pytest.mark.parametrize(("name", "options"), SCHEDULES)
@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_the_same_gathers_and_frees(name: str, options: dict[str, int], window: int) -> None:
    """A number k as ``shard_parameters`` keeps the stages that ``max_active_stages=k`` keeps."""
    schedule = ps.schedule(name, 2, 8, **options)
    graph = ps.lower(schedule, n_replicas=2, shard_parameters=window)
    for device, order in enumerate(schedule.orders):
        gathers, frees = of_torch(order, window)
        added: dict[Op, list[tuple[int, Action]]] = {op: [] for op in _PASSES}
        for task in np.flatnonzero(graph.is_op(frozenset(_PASSES)) & (graph.device == device)):
            action = graph.task(int(task)).action
            added[action.op].append((action.stage, action))
        for op, wanted in ((Op.UNSHARD, gathers), (Op.RESHARD, frees)):
            assert len(added[op]) == len(wanted)
            left = list(wanted)
            for stage, action in added[op]:
                letters = "F" if action.part == 0 else "BI"
                own = {f"{stage}{letter}{action.microbatch}" for letter in letters}
                (match,) = [pair for pair in left if pair[0] == stage and halves(pair[1]) & own]
                left.remove(match)


def halves(action: str) -> set[str]:
    """Return the actions of an action in torch's text form."""
    return set(action.removesuffix("OVERLAP_F_B").strip("()").split(";"))
