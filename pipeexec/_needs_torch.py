"""Say how to install torch, without which nothing of pipeexec works; imported before all else."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        "pipeexec needs torch, which is not installed; pip install 'pipesim[exec]'. "
        "pipesim works without it",
        name="torch",
    )
