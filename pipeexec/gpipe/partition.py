"""A run of layers as one stage: flat tensors in and out, skips that cross its border included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from pipeexec.gpipe.skip import Key, Shelf, Skippable, use_shelf
from pipesim.errors import ArgumentTypeError


class Form(NamedTuple):
    """Structure of flat tensors: one tensor or a tuple of ``n`` tensors, then skips.

    Attributes
    ----------
    is_atomic
        Whether the first ``n`` are one tensor, not a tuple.
    n
        Number of tensors that are no skips.
    skips
        The skips that are not None, in the order of their tensors.
    """

    is_atomic: bool
    n: int
    skips: tuple[Key, ...] = ()

    @property
    def slots(self) -> tuple[int | Key, ...]:
        """The name of each flat tensor: its number, or its skip."""
        return *range(self.n), *self.skips


class Forms:
    """Forms of a partition's inputs, set before each run, and of its last outputs."""

    __slots__ = ("inputs", "outputs")

    def __init__(self) -> None:
        self.inputs = self.outputs = Form(True, 1)


class Partition(nn.Module):
    """Layers of a sequential module; not registered in the module that they belong to.

    Parameters
    ----------
    layers
        Layers to run; each takes one tensor or one tuple of tensors.
    popped_skips
        Skips that layers pop here and other partitions stash.
    stashed_skips
        Skips that layers stash here and other partitions pop.

    Attributes
    ----------
    forms
        Forms of the flat tensors that `forward` takes and returns.
    """

    def __init__(
        self, layers: nn.Sequential, popped_skips: Sequence[Key], stashed_skips: Sequence[Key]
    ) -> None:
        super().__init__()
        self.layers = layers
        self.popped_skips, self.stashed_skips = tuple(popped_skips), tuple(stashed_skips)
        self._has_skips = any(isinstance(layer, Skippable) for layer in layers.modules())
        self.forms = Forms()  # a separate object: attributes of a module are slow to set

    @property
    def training(self) -> bool:
        """Whether the layers train: the module that they belong to sets only their mode."""
        return "layers" not in self._modules or bool(self._modules["layers"].training)  # type: ignore[union-attr]

    @training.setter
    def training(self, mode: bool) -> None:
        """Do nothing."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the layers; return outputs, then the stashed skips that are not None."""
        form = self.forms.inputs
        layer_input = tensors[0] if form.is_atomic else tensors[: form.n]
        stashed: dict[Key, Tensor] = {}
        if self._has_skips:
            shelf = Shelf(dict.fromkeys(self.popped_skips))
            for key, skip in zip(form.skips, tensors[form.n :], strict=True):
                shelf.put(key, skip)
            with use_shelf(shelf):
                output = self.layers(layer_input)
            skips = {key: shelf.take(key) for key in self.stashed_skips}
            stashed = {key: skip for key, skip in skips.items() if skip is not None}
        else:
            output = self.layers(layer_input)
        outputs = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(x, Tensor) for x in outputs):
            kinds = ", ".join(type(x).__name__ for x in outputs)
            raise ArgumentTypeError(
                f"a partition must return a tensor or a tuple of tensors: expected Tensor, but got "
                f"{kinds}; its layers are {', '.join(type(x).__name__ for x in self.layers)}"
            )
        self.forms.outputs = Form(not isinstance(output, tuple), len(outputs), tuple(stashed))
        return (*outputs, *stashed.values())


def split_layers(module: nn.Sequential, balance: Sequence[int]) -> Iterator[nn.Sequential]:
    """Yield one sequential module a partition; layers keep their names.

    ``balance`` has the number of layers of each partition.
    """
    layers = iter(module.named_children())
    for n in balance:
        partition = nn.Sequential()
        for _ in range(n):
            partition.add_module(*next(layers))
        yield partition


def skips_across(partitions: Sequence[nn.Sequential]) -> dict[Key, tuple[int, int]]:
    """Return the source and target partition of each skip that crosses a border."""
    source: dict[Key, int] = {}
    crossings: dict[Key, tuple[int, int]] = {}
    for j, partition in enumerate(partitions):
        for layer in partition:
            if isinstance(layer, Skippable):
                popped = [key for key in layer.poppable() if source[key] != j]
                crossings |= {key: (source[key], j) for key in popped}
                source |= dict.fromkeys(layer.stashable(), j)
    return crossings
