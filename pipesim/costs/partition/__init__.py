"""Divide layers into stages such that the slowest stage is as fast as possible."""
