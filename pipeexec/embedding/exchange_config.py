"""`ExchangeConfig`: the settings that all exchanges of an embedding share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pipeexec.embedding.row_layout import RowLayout


class ExchangeConfig(NamedTuple):
    """Settings that all exchanges of an embedding share.

    Attributes
    ----------
    layout
        Rank and place of each row.
    combiner
        ``"sum"`` or ``"mean"`` of the vectors of a bag; None for one vector a key.
    padding_key
        The key that stands for no key; None if there is no such key.
    scale
        Factor of all gradients.
    sparse
        Whether gradients of rows are sparse.
    unique
        Whether each key is sent once, or as often as it occurs.
    """

    layout: RowLayout
    combiner: str | None
    padding_key: int | None
    scale: float
    sparse: bool
    unique: bool = True

    @property
    def bags(self) -> bool:
        """Whether the last dimension of keys is a bag."""
        return self.combiner is not None

    def check(self, keys: Tensor) -> None:
        """Raise `ArgumentError` unless keys, on any device, are rows of their tables."""
        layout, bags = self.layout, self.bags
        layout.check_form(keys, keys.device, bags=bags)
        bad = layout.outside(keys, bags=bags)
        if self.padding_key is not None:
            bad &= keys != self.padding_key
        if bad.any():
            raise layout.explain(keys, bad, bags=bags)
