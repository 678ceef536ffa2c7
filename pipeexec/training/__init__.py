"""Train a pipeline for many steps: the loop, its log, evaluations and checkpoints."""

from pipeexec.training.training_run import TrainingRun

__all__ = ["TrainingRun"]
