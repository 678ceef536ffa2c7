"""Check the options and the stages that `to_torch` hands to torch's runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipesim.errors import ArgumentError, check_count, check_name

#: Attributes that each stage must have.
_STAGE_ATTRIBUTES = ("stage_index", "num_stages", "group_rank", "group_size")
#: Arguments of torch's runtime that options must not set, and what to do instead.
RESERVED = {
    "n_microbatches": "the schedule has it; leave it out",
    "scale_grads": "give loss_reduction='sum' for gradients that are not scaled",
}


def check_options(options: Mapping[str, object]) -> None:
    """Raise `ArgumentError` for options that torch's runtime lacks or that this package sets."""
    from pipeexec.torch_pipelining.private import options_of_runtime

    allowed = set(options_of_runtime()) - {"stages", "loss_fn", *RESERVED}
    for option in options:
        if option in RESERVED:
            raise ArgumentError(f"to_torch takes no option {option!r}: {RESERVED[option]}")
        check_name("option of torch's runtime:", option, allowed)


def stages_in_order(stages: Sequence[Any], homes: list[int], n_devices: int) -> list[Any]:
    """Return the stages of this rank in order; raise if they differ from the placement's."""
    if not isinstance(stages, Sequence):
        raise ArgumentError(
            f"to_torch takes a sequence of stages, got {stages!r:.60}; give [stage], even of one"
        )
    for stage in stages:
        lacking = [name for name in _STAGE_ATTRIBUTES if not hasattr(stage, name)]
        if lacking:
            raise ArgumentError(
                f"{stage!r:.60} is no stage: it lacks {', '.join(lacking)}; wrap the module in "
                "torch.distributed.pipelining.PipelineStage"
            )
        check_count("stage_index of a stage", stage.stage_index, 0)
    ordered = sorted(stages, key=lambda stage: stage.stage_index)
    if not ordered:
        raise ArgumentError("to_torch got no stages; give those that this rank holds")
    rank, size = ordered[0].group_rank, ordered[0].group_size
    if size != n_devices:
        raise ArgumentError(
            f"the schedule is for {n_devices} devices, but the stages' process group has {size} "
            "ranks; give one rank a device"
        )
    for stage in ordered:
        if stage.num_stages != len(homes):
            raise ArgumentError(
                f"stage {stage.stage_index} says num_stages={stage.num_stages}, but the schedule "
                f"has {len(homes)} stages; make each PipelineStage with that number"
            )
    expected = [stage for stage, home in enumerate(homes) if home == rank]
    indices = [stage.stage_index for stage in ordered]
    if indices != expected:
        raise ArgumentError(
            f"rank {rank} holds the stages {expected}, got {indices}; give just these"
        )
    return ordered
