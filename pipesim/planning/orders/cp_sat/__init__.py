"""CP-SAT on orders of tasks: proofs, and better orders. It needs ortools, an optional package."""

from pipesim.planning.cp_sat_proof import Proof, prove

__all__ = ["Proof", "prove"]
