"""Run the task graphs of pipesim on real devices, and compare what they take with what was said."""

from pipeexec.executor import Pipeline, StepResult

__all__ = ["Pipeline", "StepResult"]
