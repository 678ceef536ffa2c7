"""Predict a step, run it, and compare; or compare two configurations of one model."""

from pipeexec.validation.equivalence import Equivalence, check_equivalent
from pipeexec.validation.result import Validation, load_run
from pipeexec.validation.validate import validate

__all__ = ["Equivalence", "Validation", "check_equivalent", "load_run", "validate"]
