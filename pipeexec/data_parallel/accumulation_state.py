"""Checkpoints of `GradientAccumulation`: gradients by name of their parameter, and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.accumulation_replicas import Replicas
from pipesim.errors import ArgumentError, ArgumentTypeError, check_count, check_list

_KEYS = ("n_steps", "n_accumulated", "n_samples", "rank", "n_replicas", "shapes", "gradients",
         "broadcasts_buffers")  # fmt: skip
#: Most names that a message lists; it counts the others.
_MAX_NAMES = 5


def named_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the parameters of an optimizer by their names in a model.

    A parameter that is not in the model, such as a weight of the loss, is named by its position in
    the optimizer: ``param_groups.1.0``.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names.get(id(parameter), f"param_groups.{group}.{index}"): parameter
        for group, options in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(options["params"])
    }


def make_state(
    parameters: Mapping[str, Tensor],
    replicas: Replicas,
    n_steps: int,
    n_done: int,
    n_samples: Sequence[int],
) -> dict[str, Any]:
    """Return a checkpoint of a batch after the backwards of ``n_done`` micro-batches."""
    gradients = {
        name: parameter.grad.detach().clone()
        for name, parameter in parameters.items()
        if n_done and parameter.grad is not None
    }
    return {
        "n_steps": n_steps,
        "n_accumulated": n_done,
        "n_samples": list(n_samples),
        "rank": replicas.rank,
        "n_replicas": replicas.n,
        "shapes": {name: list(x.shape) for name, x in parameters.items()},
        "gradients": gradients,
        "broadcasts_buffers": replicas.broadcasts_buffers,
    }


@torch.no_grad()
def restore_gradients(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Copy gradients to the parameters of their names; the others have None."""
    for name, parameter in parameters.items():
        saved = gradients.get(name)
        parameter.grad = None if saved is None else saved.to(parameter.device, copy=True)


def check_state(
    state: object, parameters: Mapping[str, Tensor], replicas: Replicas, n_steps: int
) -> dict[str, Any]:
    """Return a checkpoint if it fits this training."""
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            f"state_dict must be a dict of GradientAccumulation.state_dict(), got {state!r:.60}"
        )
    if missing := [key for key in _KEYS if key not in state]:
        raise ArgumentError(
            f"state_dict lacks {', '.join(map(repr, missing))}; give what "
            "GradientAccumulation.state_dict() returned"
        )
    if check_count("n_steps of state_dict", state["n_steps"]) != n_steps:
        raise ArgumentError(
            f"state_dict is of n_steps={state['n_steps']}, this GradientAccumulation has "
            f"n_steps={n_steps}: micro-batches are weighted by it; make one with the same n_steps"
        )
    _check_counts(state, n_steps)
    _check_shapes(state["shapes"], parameters)
    _check_gradients(state["gradients"], parameters, bool(state["n_accumulated"]))
    if state["n_accumulated"]:
        for name, saved, own in (
            ("n_replicas", state["n_replicas"], replicas.n),
            ("rank", state["rank"], replicas.rank),
        ):
            if saved != own:
                raise ArgumentError(
                    f"state_dict is of {name}={saved}, this process has {name}={own}: gradients in "
                    "the middle of a batch are each replica's own; load each rank's own state, or "
                    "save where n_accumulated is 0"
                )
    return dict(state)


def _check_counts(state: Mapping[str, Any], n_steps: int) -> None:
    n_done = check_count("n_accumulated of state_dict", state["n_accumulated"], 0)
    n_samples = check_list("n_samples of state_dict", state["n_samples"], "a count a micro-batch")
    for count in n_samples:
        check_count("n_samples of state_dict", count)
    if n_done >= n_steps or len(n_samples) not in (0, n_done):
        raise ArgumentError(
            f"state_dict has n_accumulated={n_done} of n_steps={n_steps}, and {len(n_samples)} "
            "n_samples; give what GradientAccumulation.state_dict() returned"
        )


def _check_shapes(shapes: object, parameters: Mapping[str, Tensor]) -> None:
    if not isinstance(shapes, Mapping):
        raise ArgumentTypeError(f"shapes of state_dict must be a dict, got {shapes!r:.60}")
    for what, names in (
        ("lacks", [name for name in parameters if name not in shapes]),
        ("has, and the optimizer lacks,", [name for name in shapes if name not in parameters]),
    ):
        if names:
            listed = ", ".join(map(repr, names[:_MAX_NAMES]))
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            raise ArgumentError(
                f"state_dict {what} parameters {listed}{more}; it is of another model or optimizer"
            )
    for name, parameter in parameters.items():
        if (shape := shapes[name]) != list(parameter.shape):
            raise ArgumentError(
                f"state_dict has parameter {name!r} of shape {shape!r:.60}, the model of shape "
                f"{list(parameter.shape)}; it is of another model"
            )


def _check_gradients(
    gradients: object, parameters: Mapping[str, Tensor], is_within_batch: bool
) -> None:
    if not isinstance(gradients, Mapping):
        raise ArgumentTypeError(f"gradients of state_dict must be a dict, got {gradients!r:.60}")
    if bool(gradients) != is_within_batch:
        raise ArgumentError(
            f"state_dict has {len(gradients)} gradients, which does not fit its n_accumulated; "
            "give what GradientAccumulation.state_dict() returned"
        )
    for name, gradient in gradients.items():
        parameter = parameters.get(name)
        if (
            parameter is None
            or not isinstance(gradient, Tensor)
            or gradient.shape != parameter.shape
        ):
            raise ArgumentError(
                f"state_dict has a gradient of {name!r} that is no tensor of the parameter's shape"
            )
