"""Audit a graph: cost and benefit of each dependency, wait and stream."""
