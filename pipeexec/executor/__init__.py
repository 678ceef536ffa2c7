"""`Pipeline`: run a task graph on devices, step by step."""

from pipeexec.executor.decoding import Generation
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.step_result import EvaluationResult, StepResult

__all__ = ["EvaluationResult", "Generation", "Pipeline", "StepResult"]
