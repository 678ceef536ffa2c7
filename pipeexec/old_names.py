"""Names that moved to rooms, which go on in this release and warn."""

#: Names that the package exported, by the room that has them.
EXPORTS = {
    "pipeexec.data_parallel": "scaled_learning_rate sync_report",
    "pipeexec.devices": "Slice Worker",
    "pipeexec.distributed": "Processes",
    "pipeexec.executor": "EvaluationResult StepResult",
    "pipeexec.profiling": "Profile",
    "pipeexec.projection": "Projection",
    "pipeexec.torch_pipelining": "torch_schedule_order",
    "pipeexec.training": "TrainingRun",
    "pipeexec.validation": "Equivalence Validation",
}
