"""The version of `pipesim` and `pipeexec`, which pyproject.toml reads without importing them."""

__version__ = "0.1.0"
