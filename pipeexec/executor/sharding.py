"""Shards: each replica of a stage steps, and may hold, a share of its parameters (ZeRO-1, FSDP).

UNSHARD gathers the parameters of a stage, RESHARD frees them, and REDUCE_GRAD gives each replica
the sums of its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.data_parallel.stage_shards import StageShards, WholeOptimizer, check_shardable
from pipeexec.devices.device import device_ranks
from pipeexec.executor.gradient_sync import local_gradients, reduce_gradients
from pipeexec.executor.op_handlers import convert_collective_errors, for_all_members
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.executor.step_part import StepPart
from pipeexec.stages.stage import Stage, StageLike
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Task
from pipesim.ops import Op

#: For each stage, whether its replicas share "none", the "optimizer", or all "parameters".
Kinds = tuple[str, ...]
_ARGUMENTS = {"optimizer": "shard_optimizer=True", "parameters": "shard_parameters"}


def sharding_of(graph: TaskGraph) -> Kinds:
    """Return what the replicas of each stage of a graph share, as its UNSHARDs tell."""
    of_stage = ["none"] * graph.n_stages
    for task in np.flatnonzero(graph.op == Op.UNSHARD):
        is_shard = graph.kinds.gathers_shards[graph.kind[task]]
        of_stage[int(graph.stage[task])] = "parameters" if is_shard else "optimizer"
    return tuple(of_stage)


def sharding_argument(graph: TaskGraph) -> str | None:
    """Return the argument of `pipesim.lower` that lets replicas share something; None if none."""
    sharding = sharding_of(graph)
    kinds = [kind for kind in ("parameters", "optimizer") if kind in sharding]
    return _ARGUMENTS[kinds[0]] if kinds else None


class Sharding(StepPart):
    """What the replicas of each stage share, and the shards of local stages by slot."""

    def __init__(self) -> None:
        self.kinds: Kinds = ()  # of no graph yet
        self.shards: dict[int, StageShards] = {}

    def handlers(self) -> Mapping[Op, Handler]:
        """Return the handlers of gathers."""
        return {Op.UNSHARD: self._unshard, Op.RESHARD: self._reshard}

    def stage_handler(self, task: Task, stage: StageLike) -> Handler | None:
        """Return the handler of a reduction that scatters."""
        scatters = task.op == Op.REDUCE_GRAD and self.kinds[task.stage] != "none"
        return for_all_members(self._reduce) if scatters else None

    def check(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Raise `ArgumentError` if a graph shares other things than the pipeline, or in buckets."""
        what, sharding = sharding_argument(graph), sharding_of(graph)
        check_sharding(graph, self.kinds or sharding)
        if what is None:
            return
        ranks = device_ranks(model.devices, 0 if model.processes is None else model.processes.rank)
        for stage in range(graph.n_stages):
            members = [ranks[device] for device in graph.homes[:, stage]]
            if sharding[stage] != "none" and len(set(members)) < len(members):
                raise ArgumentError(
                    f"{what}, but replicas of stage {stage} are in one process, where they have "
                    "one set of parameters; give each replica a process of its own, or lower "
                    "without it"
                )
        if not graph.forward_only and not (model.zero_grad and (graph.op == Op.STEP).any()):
            missing = (
                "the graph has no STEP" if model.zero_grad else "the pipeline has no optimizer"
            )
            raise ArgumentError(
                f"{what}, but {missing}; replicas share the steps: give an optimizer, and lower "
                'with step="flush", or lower without it'
            )

    def place(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Make the parameters of stages whose replicas share something views of flat tensors."""
        self.kinds, what = sharding_of(graph), sharding_argument(graph)
        if what is None:
            return
        processes, n = model.processes, graph.n_stages
        assert processes is not None  # one process has several replicas
        local = [
            slot
            for slot, module in enumerate(model.modules)
            if self.kinds[slot % n] != "none" and not isinstance(module, RemoteStage)
        ]
        for slot in local:
            check_shardable(model.modules[slot], slot % n, model.optimizers[slot], what)
        ranks = device_ranks(model.devices, processes.rank)
        for stage, kind in enumerate(self.kinds):
            if kind == "none":
                continue
            members = sorted(ranks[device] for device in graph.homes[:, stage])
            group = processes.group(members, key=f"shards {stage}")
            for slot in local:
                module = model.modules[slot]
                if slot % n == stage and any(True for _ in module.parameters()):
                    self.shards[slot] = StageShards(
                        module,
                        model.optimizers[slot],
                        members.index(processes.rank),
                        len(members),
                        group,
                        frees=kind == "parameters",
                    )

    def before(self, step: Step) -> None:
        """Let optimizers step the pieces of this process, which begin without gradients."""
        for slot, shards in self.shards.items():
            shards.pieces.zero_grad(set_to_none=True)
            step.gradients.trained[slot] = shards.pieces
            step.gradients.separate.add(slot)
        step.state[self] = set[int]()  # slots whose pieces have gradients of this step

    def _unshard(self, step: Step, task: PlannedTask) -> None:
        shards = self.shards.get(task.slot)
        if shards is None:  # a stage without parameters
            return
        with convert_collective_errors(task.group):
            shards.gather(task.group)
        step.events.nbytes[task.id] = shards.nbytes
        if isinstance(task.stage, Stage):
            task.stage.forget_storages()
        if task.stage.meter is not None:
            task.stage.meter.ignore_weights(task.slot, shards.whole_tensors)

    def _reshard(self, step: Step, task: PlannedTask) -> None:
        shards = self.shards.get(task.slot)
        if shards is None:
            return
        if task.stage.meter is not None:  # others may get this memory
            task.stage.meter.ignore_weights(task.slot, ())
        shards.free()

    @torch.no_grad()
    def _reduce(self, step: Step, task: PlannedTask) -> None:
        """Sum the gradients of a stage; the pieces of each replica get their part."""
        if task.slot not in self.shards:  # a stage without parameters
            reduce_gradients(step, task)
            return
        (gradients,), (parameters,), is_per_group = local_gradients(step, task)
        assert task.group is not None  # each replica is in a process of its own
        for parameter in () if is_per_group else parameters:
            parameter.grad = None
        scattered = step.state[self]
        self.shards[task.slot].reduce(gradients, task.group, adds=task.slot in scattered)
        scattered.add(task.slot)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the shares at the end of a block."""
        with ExitStack() as stack:
            for shards in self.shards.values():
                stack.enter_context(shards.preserved())
            yield

    @contextmanager
    def whole_parameters(self, *, changes: bool = False) -> Iterator[None]:
        """Give sharded parameters their values in a block; all processes must run it.

        With ``changes``, shares are taken from the parameters at its end.
        """
        with ExitStack() as stack:
            for shards in self.shards.values():
                stack.enter_context(shards.whole(changes=changes))
            yield


def whole_optimizers(model: PlacedModel) -> list[torch.optim.Optimizer | WholeOptimizer | None]:
    """Return the optimizers, sharded ones as ones of whole parameters; all processes call this."""
    shards = model.part(Sharding).shards
    return [
        optimizer
        if slot not in shards or (sharded := shards[slot].optimizer) is None
        else sharded.whole()
        for slot, optimizer in enumerate(model.optimizers)
    ]


def check_sharding(graph: TaskGraph, kinds: Kinds) -> None:
    """Raise `ArgumentError` if a graph shares other things than ``kinds``, or in buckets."""
    own = sharding_of(graph)
    early = np.flatnonzero((graph.kinds.op == Op.UNSHARD) & (graph.kinds.part >= 0))
    if (~graph.kinds.gathers_shards[early]).any():
        raise ArgumentError(
            f"{graph!r} gathers parameters before the forwards of the next step, so that between "
            "steps each replica has old values of the others' shares: this is simulated, not run; "
            'lower with gather_parameters="after_step"'
        )
    for task in np.flatnonzero((graph.op == Op.REDUCE_GRAD) & (graph.part >= 0)):
        if own[int(graph.stage[task])] != "none":
            raise ArgumentError(
                f"stage {graph.stage[task]} of {graph!r} reduces its gradients in buckets, and its "
                "replicas share the optimizer, whose shares are of the whole stage: this is "
                'simulated, not run; take grad_sync="last", "every" or a number'
            )
    for stage, (what, wanted) in enumerate(zip(own, kinds, strict=True)):
        if what != wanted:
            raise ArgumentError(
                f"{graph!r} shards {_words(what)} of stage {stage}, the pipeline {_words(wanted)}; "
                "lower the graph with the same shard_optimizer and shard_parameters, or make "
                "another pipeline"
            )


def _words(what: str) -> str:
    return "nothing" if what == "none" else f"the {what}"
