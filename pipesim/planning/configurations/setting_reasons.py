"""Why a problem has no configuration with certain settings."""

from __future__ import annotations

from pipesim.models.layers import Layers
from pipesim.network.network import Network
from pipesim.planning.configurations.choice import PlanChoice
from pipesim.planning.configurations.problem import PlanProblem, order_facts

__all__ = ["setting_reason", "tensor_reason"]

#: Most F and B of a replica; beyond it a single schedule takes many seconds and gigabytes.
_MOST_TASKS = 500_000


def setting_reason(problem: PlanProblem, choice: PlanChoice) -> str:
    """Return why a problem has no configuration with these settings; empty if it may have one."""
    tp, model = choice.tensor_parallel, problem.model
    if isinstance(model, Layers):
        if choice.recompute != "none":
            return (
                f"recompute={choice.recompute!r}: measured layers do not say what it takes and "
                "frees"
            )
        if choice.microbatch_size != (problem.measured_size or 1):
            return (
                f"microbatch_size={choice.microbatch_size}: layers were measured with "
                f"{problem.measured_size or 1}"
            )
        facts = order_facts(choice.schedule, choice.pipeline_parallel, choice.n_chunks)
        if facts.splits_backward and "input_grad" not in model.columns:
            return (
                f"{choice.schedule} has I and W: measured layers lack their columns 'input_grad' "
                "and 'weight_grad'"
            )
    elif choice.sequence_parallel and model.sequence_length % tp:
        return (
            f"sequence_parallel=True: tensor_parallel={tp} does not divide "
            f"sequence_length={model.sequence_length}"
        )
    n_tasks = 2 * choice.n_stages * choice.n_microbatches
    if n_tasks > _MOST_TASKS:
        return (
            f"{choice.n_microbatches} micro-batches on {choice.n_stages} stages are {n_tasks} "
            f"tasks of F and B; a plan builds at most {_MOST_TASKS}; give larger micro-batches"
        )
    return tensor_reason(problem, tp)


def tensor_reason(problem: PlanProblem, tp: int) -> str:
    """Return why a size of tensor parallelism is invalid; empty if it is not."""
    model, cluster = problem.model, problem.cluster
    if tp == 1:
        return ""
    if isinstance(model, Layers):
        return f"tensor_parallel={tp}: layers were measured on one GPU"
    network: Network = cluster.network()
    if network.nodes is None:
        return f"tensor_parallel={tp}: the network has no nodes, and so no rate inside a device"
    if cluster.gpus_per_node % tp:
        return f"tensor_parallel={tp} does not divide the {cluster.gpus_per_node} GPUs of a node"
    for name in ("n_heads", "n_kv_heads", "ffn_size"):
        if getattr(model, name) % tp:
            return f"tensor_parallel={tp} does not divide {name}={getattr(model, name)}"
    return ""
