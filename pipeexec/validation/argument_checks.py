"""Checks of the arguments of `pipeexec.validate`."""

from __future__ import annotations

from collections.abc import Mapping

from pipeexec.stages.loss.loss_function import Loss
from pipeexec.validation.run_files import check_rows
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, CostsError, PipeError, check_function, check_type
from pipesim.graph.graph import TaskGraph


def check_loss(loss_fn: Loss | None) -> Loss:
    """Return the loss function; raise `ArgumentError` if there is none."""
    if loss_fn is None:
        raise ArgumentError("validate needs loss_fn, which takes outputs and targets")
    check_function("loss_fn", loss_fn, "loss_fn(output, targets)")
    return loss_fn


def check_gpipe_options(
    graphs: object, devices: object, processes: object, cuda_graph: bool
) -> None:
    """Raise `ArgumentError` for arguments that a GPipe sets itself, or does not support."""
    if graphs is not None or devices is not None:
        raise ArgumentError("a GPipe has its own graph and devices; leave out graphs and devices")
    if processes is not None or cuda_graph:
        raise ArgumentError(
            "a GPipe runs in one process, without a CUDA graph; leave out processes and cuda_graph"
        )


def check_no_pipeline_options(**options: object) -> None:
    """Raise `ArgumentError` for an option of `Pipeline` that a GPipe has not."""
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(f"a GPipe has no {name}, got {value!r:.60}; leave it out")


def widest_graph(graphs: Mapping[str, TaskGraph]) -> TaskGraph:
    """Return the graph with the most replicas."""
    if not isinstance(graphs, Mapping):
        raise ArgumentError(
            f"graphs must be a mapping of names to graphs, got {graphs!r:.60} "
            f"({type(graphs).__name__}); give for example {{'1f1b': ps.lower(schedule)}}"
        )
    for name, graph in graphs.items():
        check_type(f"graphs: {name!r}", graph, TaskGraph, "lower the schedule first")
    if not graphs:
        raise ArgumentError("validate needs at least one graph")
    check_rows(graphs)
    first = max(graphs.values(), key=lambda graph: graph.n_replicas)
    for name, graph in graphs.items():
        if graph.n_microbatches != first.n_microbatches:
            raise ArgumentError(
                f"graph {name!r} has {graph.n_microbatches} micro-batches, the first "
                f"{first.n_microbatches}: costs hold for one size of micro-batch; validate graphs "
                "with the same number of micro-batches"
            )
        if graph.n_slices != first.n_slices:
            raise ArgumentError(
                f"graph {name!r} has n_slices={graph.n_slices}, the first {first.n_slices}: costs "
                "hold for slices of one length; validate graphs of equal n_slices"
            )
    return first


def check_costs(costs: object, graphs: Mapping[str, TaskGraph]) -> None:
    """Raise unless given costs suit every graph.

    Raises
    ------
    CostsError
        If they do not suit a graph.
    """
    if not isinstance(costs, Costs):
        raise ArgumentError(f"costs must be a pipesim.Costs, got {type(costs).__name__}")
    for name, graph in graphs.items():
        try:
            costs.of(graph)
        except PipeError as error:
            raise CostsError(
                f"the costs do not suit graph {name!r} of {graph.n_stages} stages on "
                f"{graph.n_devices} devices: {error}; measure them for these stages and schedules "
                "(pipeexec profile)"
            ) from error
