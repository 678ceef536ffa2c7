"""`SearchBar`: progress of a search for an order."""

from __future__ import annotations

from pipesim.planning.orders.effort import Effort
from pipesim.planning.orders.order_search_run import Search


class SearchBar:
    """Progress bar of a search, with the best value and its gap."""

    def __init__(self, effort: Effort, progress: bool | None) -> None:
        from pipesim.utils.packages import tqdm

        self._effort = effort
        counted = effort.evaluations is not None
        self._bar = tqdm(
            total=effort.evaluations if counted else round(effort.seconds, 1),
            disable=None if progress is None else not progress,
            unit="move" if counted else "s",
            bar_format=None if counted else "{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}",
        )

    def __enter__(self) -> SearchBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, search: Search) -> None:
        """Show how far the search is, and the gap."""
        if self._bar.disable or search.best is None:
            return
        counted = self._effort.evaluations is not None
        seconds = min(self._effort.share, 1.0) * self._effort.seconds
        bound, value = search.lower_bound, search.best.value
        gap = f"{value / bound - 1:.2%}" if bound > 0 else "unknown"
        text = f"{search.objective} {value:.6g} s, gap {gap}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update((search.evaluations if counted else seconds) - self._bar.n)
