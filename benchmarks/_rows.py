"""One row of ``benchmarks/simulator.py``: what is to be measured, and what was."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

ENGINES = {
    "compiled": "pipesim.simulation.engines.compiled",
    "simpy": "pipesim.simulation.engines.simpy_engine",
}
PHASES = ("generate", "lower", "simulate", "metrics")
PARTS = ("costs", "engine")


@dataclass(frozen=True)
class SimulatorCase:
    """One row: what a process of its own measures."""

    engine: str
    network: str
    n_devices: int
    n_microbatches: int
    n_scenarios: int = 0
    n_cores: int = 1

    @property
    def n_tasks(self) -> int:
        """F and B; SEND and RECV of both between neighbours; one STEP a stage."""
        p, m = self.n_devices, self.n_microbatches
        return 2 * p * m + 4 * (p - 1) * m + p


@dataclass
class Result:
    """Seconds of each phase, round by round, and bytes that were resident at its peak."""

    n_tasks: int
    first_call: float
    seconds: dict[str, list[float]]
    nbytes: dict[str, int] = field(default_factory=dict)
    makespan: float = 0.0
    queued: float | None = None
    pace: float = 0.0

    def median(self, name: str) -> float | None:
        """Return median seconds of all rounds but the first."""
        rounds = self.seconds.get(name, [])[1:]
        return statistics.median(rounds) if rounds else None

    def first(self, name: str) -> float | None:
        """Return seconds of the first round, whose memory is new."""
        rounds = self.seconds.get(name)
        return rounds[0] if rounds else None

    @property
    def n_rounds(self) -> int:
        """How many rounds the medians are of."""
        return max(len(rounds) for rounds in self.seconds.values()) - 1

    def rate(self, name: str) -> float | None:
        """Return median tasks a second."""
        seconds = self.median(name)
        return None if seconds is None else self.n_tasks / seconds
