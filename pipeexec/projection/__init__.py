"""Profile the layers of a model on one device, and predict steps on many."""

from pipeexec.projection.projection import Projection

__all__ = ["Projection"]
