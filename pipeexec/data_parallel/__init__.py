"""Reduce gradients over replicas, accumulate them, and lint their synchronization."""

from pipeexec.data_parallel.accumulation import GradientAccumulation
from pipeexec.data_parallel.learning_rate import scaled_learning_rate
from pipeexec.data_parallel.sync_recordings import sync_report
from pipeexec.data_parallel.sync_watch import watch_sync

__all__ = ["GradientAccumulation", "scaled_learning_rate", "sync_report", "watch_sync"]
