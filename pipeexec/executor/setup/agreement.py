"""Check that processes agree before they run a pipeline: on graph, weights, shapes of messages."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.devices.device import Device, Values
from pipeexec.devices.remote import RemoteDevice
from pipeexec.distributed.channels import ExpectedMessage
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.signatures import (
    Signature,
    from_json,
    output_signature,
    signature,
    to_json,
)
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.remote_messages import expected_messages
from pipeexec.executor.step_inputs import StepInputs
from pipeexec.experts.gradient_groups import part_of_experts, shared_out
from pipeexec.nesting import Arguments
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify


def agree_on_graph(graph: TaskGraph, processes: Processes) -> int:
    """Check that every process has the same graph, and that its messages cannot deadlock.

    A message between processes waits for its receiver, even in a graph without rendezvous.

    Raises
    ------
    DeadlockError
        If sends and receives would block each other in these orders.
    """
    checksum = hashlib.sha256()
    precedence, members = graph.precedence, graph.collectives
    columns: list[NDArray[Any]] = [
        graph.op,
        graph.stage,
        graph.microbatch,
        graph.device,
        graph.stream,
        graph.pair,
    ]
    columns += [graph.replica, graph.part, graph.group, precedence.ptr]
    columns += [precedence.values, members.values]
    for column in columns:
        checksum.update(column.tobytes())
    words = (graph.rendezvous, graph.n_batches, graph.weight_versions, graph.grad_sync)
    checksum.update(repr(words).encode())
    processes.agree("the task graph", f"{graph!r}, checksum {checksum.hexdigest()[:16]}")
    if not graph.rendezvous:
        blocking = replace(graph, options=replace(graph.options, rendezvous=True))
        verify(blocking.in_topological_order())
    processes.n_graphs += 1
    return processes.n_graphs


def agree_on_weights(
    modules: Sequence[nn.Module], n_stages: int, sharded: Sequence[int], processes: Processes
) -> None:
    """Check that copies of a stage in different processes begin with the same weights.

    Processes have different rows of ``sharded`` stages, which are not compared.
    """
    rows = processes.share([_checksums(module) for module in modules])
    for stage in sorted({*range(n_stages)}.difference(sharded)):
        sums: dict[str, set[str]] = defaultdict(set)
        for part, checksum in (x for row in rows for own in row[stage::n_stages] for x in own):
            sums[part].add(checksum)
        if any(len(different) > 1 for different in sums.values()):
            raise ArgumentError(
                f"stage {stage} begins with different weights in different processes; build "
                "the model from one seed, or load one checkpoint"
            )


def _checksums(module: nn.Module) -> list[tuple[str, str]]:
    """Return checksums of a module's parameters; none for a stage of another process.

    Experts of which it has a share have a checksum of their own, with their numbers.
    """
    if isinstance(module, RemoteStage):
        return []
    experts = list(shared_out(module).values())
    of_experts = {id(parameter) for parameter in experts}
    others = [p for p in module.parameters() if id(p) not in of_experts]
    own = [(part_of_experts(module), _checksum(experts))] if experts else []
    return [("", _checksum(others)), *own]


def _checksum(parameters: Iterable[nn.Parameter]) -> str:
    checksum = hashlib.sha256()
    for parameter in parameters:
        checksum.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def agree_on_shapes(
    modules: Sequence[nn.Module],
    devices: Sequence[Device],
    inputs: Sequence[Values],
    processes: Processes,
    arguments: Sequence[Arguments] | None = None,
) -> list[list[Signature]]:
    """Return the signatures of each stage's outputs, one a micro-batch, without the last stage.

    The process of each stage finds its signature, stage after stage. Every process must call this.

    Parameters
    ----------
    modules, devices
        Stages and their devices.
    inputs
        Micro-batches; empty for those of another process.
    arguments
        Those of the first stage, one a micro-batch; see `StepInputs`.
    """
    outputs: list[list[Signature]] = []
    local = [signature([x for x in values if x is not None]) for values in inputs]
    inputs_of_stage = _merge_signatures(local, processes)
    for stage, device in enumerate(devices[:-1]):
        local = [()] * len(inputs_of_stage)
        if not isinstance(device, RemoteDevice):
            calls = arguments if arguments and not stage else [None] * len(inputs_of_stage)
            outputs_by_call: dict[tuple[Signature, int], Signature] = {}
            for s, call in zip(inputs_of_stage, calls, strict=True):
                if (s, id(call)) not in outputs_by_call:
                    outputs_by_call[s, id(call)] = output_signature(
                        modules[stage], s, device.torch_device, stage, call
                    )
            local = [outputs_by_call[s, id(x)] for s, x in zip(inputs_of_stage, calls, strict=True)]
        inputs_of_stage = _merge_signatures(local, processes)
        outputs.append(inputs_of_stage)
    return outputs


def _merge_signatures(local: Sequence[Signature], processes: Processes) -> list[Signature]:
    """Return the signature of each micro-batch, from the process that has found it."""
    rows_by_process = processes.share([to_json(s) for s in local])
    return [from_json(max(rows, key=len)) for rows in zip(*rows_by_process, strict=True)]


def agree_on_messages(
    graph: TaskGraph,
    tasks: Sequence[PlannedTask],
    modules: Sequence[nn.Module],
    devices: Sequence[Device],
    inputs: StepInputs,
    processes: Processes,
) -> dict[int, ExpectedMessage]:
    """Return the expected message of each task; all processes agree on their shapes.

    Parameters
    ----------
    graph, tasks, modules, devices
        Those of the pipeline; ``tasks`` are those of this process.
    inputs
        Inputs of the first step.
    """
    n, m = graph.n_stages, graph.n_microbatches
    signatures = [
        agree_on_shapes(
            modules[replica * n : (replica + 1) * n],
            [devices[d] for d in graph.homes[replica]],
            inputs.microbatches[share * m : (share + 1) * m],
            processes,
            inputs.arguments and inputs.arguments[share * m : (share + 1) * m],
        )
        for share, replica in enumerate(range(0, graph.n_replicas, inputs.shares.n_paths))
    ]
    return expected_messages(graph, tasks, signatures)
