"""Simulate task graphs: engines, noise and scenarios."""

from pipesim.simulation.noise import Empirical, Failures, LogNormal, Noise, Normal
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
