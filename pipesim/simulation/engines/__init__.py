"""Engines: from a task graph and its costs to start and end times. See docs/time.md."""

#: What a kind of task is to the compiled loops, besides 0 for all others.
SEND, RECV = 1, 2
