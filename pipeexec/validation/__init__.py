"""Predict a step, run it, and compare."""

from pipeexec.validation.result import Validation, load_run
from pipeexec.validation.validate import validate

__all__ = ["Validation", "load_run", "validate"]
