"""Steps of `benchmarks/gpu.py`, each a module."""
