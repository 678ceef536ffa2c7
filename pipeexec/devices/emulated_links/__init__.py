"""Emulated links: messages within one memory that take the time of a chosen link.

The GPU's timers and kernels are not yet measured on hardware.
"""
