"""`Effort`: how long `optimize` may search."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Effort:
    """Limit of a search: seconds, or evaluations in their place."""

    seconds: float
    evaluations: int | None
    seed: int
    began: float = field(default_factory=time.perf_counter)

    @property
    def share(self) -> float:
        """Share of the seconds that have passed."""
        return (time.perf_counter() - self.began) / self.seconds

    def is_spent(self, share: float = 1.0) -> bool:
        """Return whether a share of the seconds has passed; never if evaluations are counted."""
        return self.evaluations is None and self.share >= share

    def after(self, share: float) -> float:
        """Return the share of the effort at which a share of what is left now has passed."""
        passed = 0.0 if self.evaluations is not None else min(self.share, 1.0)
        return passed + share * (1.0 - passed)
