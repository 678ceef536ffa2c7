"""Engines: from a task graph and its costs to start and end times. See DESIGN's rules of time."""
