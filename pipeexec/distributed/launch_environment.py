"""`LaunchEnvironment`: the environment variables by which torchrun describes each process."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from pipesim.errors import ArgumentError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ADVICE = "start the processes with torchrun --nproc-per-node 2 -m pipeexec run"
_MAX_PORT = 65535
#: More digits than any of these numbers has; Python refuses to convert very long ones.
_MAX_DIGITS = 18


class LaunchError(ArgumentError):
    """A missing or wrong environment variable of the launcher; ``variable`` is its name."""

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(f"{message}; {_ADVICE}")
        self.variable = variable


class LaunchEnvironment(NamedTuple):
    """Rank of this process and address of the store, as the launcher has set them.

    Attributes
    ----------
    rank, n_ranks
        Number of this process, and how many there are.
    local_rank, n_local
        Number of this process on its machine, and how many run there; None if not set.
    host, port
        Address of the store.
    is_agent_store
        Whether torchrun holds the store; otherwise rank 0 does.
    attempt
        How often torchrun has restarted the processes.
    """

    rank: int
    n_ranks: int
    local_rank: int | None
    n_local: int | None
    host: str
    port: int
    is_agent_store: bool
    attempt: int

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """Read the environment variables of torchrun."""
        missing = [name for name in _NEEDED if not os.environ.get(name)]
        if missing:
            raise LaunchError(missing[0], f"{', '.join(missing)} not set in the environment")
        n_ranks = _count("WORLD_SIZE", 1)
        rank = _count("RANK", 0, n_ranks, "WORLD_SIZE")
        n_local = _count("LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in os.environ else None
        if n_local is not None and n_local > n_ranks:
            raise LaunchError(
                "LOCAL_WORLD_SIZE",
                f"LOCAL_WORLD_SIZE is {n_local}, more than WORLD_SIZE, which is {n_ranks}",
            )
        local_rank = None
        if "LOCAL_RANK" in os.environ:
            limit = "WORLD_SIZE" if n_local is None else "LOCAL_WORLD_SIZE"
            local_rank = _count("LOCAL_RANK", 0, n_local or n_ranks, limit)
        attempt = "TORCHELASTIC_RESTART_COUNT"
        return cls(
            rank,
            n_ranks,
            local_rank,
            n_local,
            os.environ["MASTER_ADDR"],
            _port(),
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            _count(attempt, 0) if os.environ.get(attempt) else 0,
        )

    @property
    def address(self) -> str:
        """Address of the store, as text."""
        return f"{self.host}:{self.port}"

    @property
    def holder(self) -> int | None:
        """The rank that holds the store; None if it is the launcher."""
        return None if self.is_agent_store else 0

    @property
    def is_on_one_machine(self) -> bool:
        """Whether the launcher has started all processes on one machine."""
        return self.n_local == self.n_ranks

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.n_ranks}"


def _count(name: str, least: int, limit: int | None = None, limiter: str = "") -> int:
    """Return the whole number in an environment variable, below ``limit``."""
    text = os.environ[name]
    if not re.fullmatch(r"-?[0-9]+", text) or len(text) > _MAX_DIGITS:
        raise LaunchError(name, f"{name} is {text!r} in the environment, which is no whole number")
    value = int(text)
    if value < least:
        raise LaunchError(name, f"{name} is {value} in the environment; it is {least} at least")
    if limit is not None and value >= limit:
        raise LaunchError(
            name, f"{name} is {value} in the environment; it is below {limiter}, which is {limit}"
        )
    return value


def _port() -> int:
    port = _count("MASTER_PORT", 1)
    if port > _MAX_PORT:
        raise LaunchError(
            "MASTER_PORT",
            f"MASTER_PORT is {port} in the environment; a port is at most {_MAX_PORT}",
        )
    return port
