"""Layers with experts, whose tokens replicas of a pipeline exchange."""

from pipeexec.experts.layer import Experts

__all__ = ["Experts"]
