"""Engines: from a task graph and its costs to start and end times. See docs/time.md."""
