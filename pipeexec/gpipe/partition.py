"""A run of layers as one stage: flat tensors in and out, skips that cross its border included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from pipeexec.gpipe.skip import Key, Shelf, Skippable, use_shelf
from pipesim.errors import ArgumentTypeError

__all__ = ["Form", "Partition", "skips_across"]


class Form(NamedTuple):
    """What flat tensors stand for: one tensor or a tuple of ``n``, then skips that are there."""

    is_atomic: bool
    n: int
    skips: tuple[Key, ...] = ()

    @property
    def slots(self) -> tuple[int | Key, ...]:
        """What each flat tensor is known by: its number, or the skip that it is."""
        return *range(self.n), *self.skips


class Forms:
    """What the next inputs of a partition stand for, set before each run, and its last outputs."""

    __slots__ = ("given", "made")

    def __init__(self) -> None:
        self.given = self.made = Form(True, 1)


class Partition(nn.Module):
    """Runs layers of a sequential module; not registered in the module that it belongs to.

    Parameters
    ----------
    layers
        What it runs: they take one tensor, or one tuple of them.
    entering, leaving
        Skips that layers pop here and stash elsewhere, and the other way round.

    Attributes
    ----------
    forms
        What flat tensors stand for.
    """

    def __init__(
        self, layers: nn.Sequential, entering: Sequence[Key], leaving: Sequence[Key]
    ) -> None:
        super().__init__()
        self.layers = layers
        self.entering, self.leaving = tuple(entering), tuple(leaving)
        self._has_skips = any(isinstance(layer, Skippable) for layer in layers.modules())
        self.forms = Forms()  # an object of its own: attributes of a module are slow to set

    @property
    def training(self) -> bool:
        """Whether the layers train: the module that they belong to says so to them alone."""
        return "layers" not in self._modules or bool(self._modules["layers"].training)  # type: ignore[union-attr]

    @training.setter
    def training(self, mode: bool) -> None:
        """Do nothing."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the layers; return outputs, then the skips that leave and are there."""
        form = self.forms.given
        given = tensors[0] if form.is_atomic else tensors[: form.n]
        there: dict[Key, Tensor] = {}
        if self._has_skips:
            shelf = Shelf(dict.fromkeys(self.entering))
            for key, skip in zip(form.skips, tensors[form.n :], strict=True):
                shelf.put(key, skip)
            with use_shelf(shelf):
                output = self.layers(given)
            left = {key: shelf.take(key) for key in self.leaving}
            there = {key: skip for key, skip in left.items() if skip is not None}
        else:
            output = self.layers(given)
        outputs = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(x, Tensor) for x in outputs):
            kinds = ", ".join(type(x).__name__ for x in outputs)
            raise ArgumentTypeError(
                f"a partition must return a tensor or a tuple of tensors: expected Tensor, but got "
                f"{kinds}; its layers are {', '.join(type(x).__name__ for x in self.layers)}"
            )
        self.forms.made = Form(not isinstance(output, tuple), len(outputs), tuple(there))
        return (*outputs, *there.values())


def skips_across(partitions: Sequence[nn.Sequential]) -> dict[Key, tuple[int, int]]:
    """Return the skips that leave their partition, and from which to which each goes."""
    source: dict[Key, int] = {}
    found: dict[Key, tuple[int, int]] = {}
    for j, partition in enumerate(partitions):
        for layer in partition:
            if isinstance(layer, Skippable):
                found |= {key: (source[key], j) for key in layer.poppable() if source[key] != j}
                source |= dict.fromkeys(layer.stashable(), j)
    return found
