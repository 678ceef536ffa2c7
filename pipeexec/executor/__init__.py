"""`Pipeline`: run a task graph on devices, step by step."""

from pipeexec.executor.pipeline import Pipeline, StepResult

__all__ = ["Pipeline", "StepResult"]
