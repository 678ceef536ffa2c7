"""Simulate task graphs: engines, noise and scenarios."""

from pipesim.simulation.distributions import Empirical, Failures, LogNormal, Normal
from pipesim.simulation.noise import Noise
from pipesim.simulation.scenarios import Scenarios, simulate_many
from pipesim.simulation.simulate import simulate

__all__ = [
    "Empirical",
    "Failures",
    "LogNormal",
    "Noise",
    "Normal",
    "Scenarios",
    "simulate",
    "simulate_many",
]
