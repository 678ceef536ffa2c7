"""Values that pass from stage to stage, from the data flow of a forward."""

from __future__ import annotations

from collections.abc import Sequence

from pipeexec.splitting.skeleton import Border
from pipeexec.splitting.tracing.data_flow import DataFlow, Source
from pipesim.errors import ArgumentError

__all__ = ["borders", "check_flow", "outer_parameters"]


def _needs(flow: DataFlow, own: range, is_last: bool) -> frozenset[Source]:
    """Return the origins of the values that a stage needs.

    They are those of its calls, of numbers that the forward reads before the last of them, and of
    the output of the last stage.
    """
    needs = flow.output if is_last else frozenset()
    read = (x for x in flow.read if x.kind != "output" or is_last or x.number < own[-1])
    return needs.union(read, *(flow.calls[k].needs for k in own))


def outer_parameters(flow: DataFlow, own: range, is_last: bool) -> frozenset[str]:
    """Return the parameters that a stage needs outside of calls."""
    return frozenset(x.name for x in _needs(flow, own, is_last) if x.kind == "parameter")


def check_flow(flow: DataFlow, calls: Sequence[range]) -> None:
    """Raise if stages need values that do not pass from module to module."""
    drawn: dict[Source, int] = {}
    for stage, own in enumerate(calls):
        for source in sorted(_needs(flow, own, own is calls[-1])):
            if source.kind == "inside" and source.number not in own:
                raise ArgumentError(
                    f"stage {stage} reads a tensor that {flow.calls[source.number].name!r} of "
                    "another stage computes and does not return, such as a cache; switch that off "
                    "in the model, or return the tensor"
                )
            if source.kind == "parameter":
                _check_parameter(source.name, stage, {flow.calls[k].name for k in own}, flow)
            if source.kind == "random" and drawn.setdefault(source, stage) != stage:
                raise ArgumentError(
                    f"stages {drawn[source]} and {stage} both need the result of "
                    f"{source.name}, which the model's forward calls outside of its blocks; they "
                    "would draw different numbers. Call it inside a module, such as nn.Dropout in "
                    "place of F.dropout"
                )


def _check_parameter(name: str, stage: int, own: set[str], flow: DataFlow) -> None:
    """Raise if a stage reads a parameter of a module inside a block of another stage."""
    owner = next((x.name for x in flow.calls if name.startswith(f"{x.name}.")), None)
    if owner is not None and owner not in own and "." in name.removeprefix(f"{owner}."):
        raise ArgumentError(
            f"stage {stage} reads {name!r}, a parameter inside of {owner!r} of another stage; pass "
            f"it as an argument, read it in {owner!r} and return the result, or cut so that one "
            "stage has both"
        )


def borders(flow: DataFlow, calls: Sequence[range], n_inputs: int) -> list[Border]:
    """Return the values that each stage receives; the first one all inputs."""
    result = [Border(tuple(Source("input", k) for k in range(n_inputs)))]
    for own in calls[1:]:
        needs = sorted(_needs(flow, range(own.start, len(flow.calls)), is_last=True))
        outputs = (x for x in needs if x.kind == "output" and x.number < own.start)
        inputs = [x for x in needs if x.kind == "input"]
        shapes = (k for k in range(n_inputs) if Source("input", k) not in inputs)
        result.append(Border((*outputs, *inputs), tuple(shapes)))
    return result
