"""CP-SAT on orders of tasks: proofs, and better orders. It needs ortools, an optional package."""

from pipesim.planning.orders.cp_sat.proof import Proof, prove

__all__ = ["Proof", "prove"]
