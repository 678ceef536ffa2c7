"""Lint gradient synchronization: watch a training loop, or read a trace of one."""
