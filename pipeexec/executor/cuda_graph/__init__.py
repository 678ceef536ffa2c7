"""Capture a step as one CUDA graph, and replay it."""
