"""Run two configurations of one model, small, and compare losses, gradients and weights."""

from pipeexec.validation.equivalence.check_equivalent import check_equivalent
from pipeexec.validation.equivalence.layer_isolation import BrokenLayer
from pipeexec.validation.equivalence.report import Equivalence

__all__ = ["BrokenLayer", "Equivalence", "check_equivalent"]
