"""Random numbers that do not depend on the schedule: a generator for each stage and micro-batch.

torch's generator of a device is shared by all threads of the process, so that two stages that draw
at the same time race for its numbers, and a recompute cannot go back to where its forward began.
Here every forward draws from a generator of its own, seeded by the step, the stage and the
micro-batch, and its recompute from the same seed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "OwnGenerator",
    "default_state",
    "next_seed",
    "set_default_state",
    "task_seed",
    "use_seed",
]

_DEFAULT_GENERATOR = threading.Lock()


def task_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Return the seed of one forward; independent streams for different arguments."""
    sequence = np.random.SeedSequence((seed, step, stage, microbatch))
    return int(sequence.generate_state(1, np.uint64)[0])


class OwnGenerator(TorchDispatchMode):
    """While active in a thread, random operations of that thread draw from one seed, or state.

    Operations that take a generator are given this one; others run with the process's generator
    set to this one's state, one thread at a time.

    Attributes
    ----------
    drew
        Whether any random number was drawn.
    """

    def __init__(self, seed: int | torch.Tensor, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator(device)
        if isinstance(seed, torch.Tensor):
            self.generator.set_state(seed)
        else:
            self.generator.manual_seed(seed)
        self.drew = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to be kept from the compiler, for which torch would load it: 3 s in a first step."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, with our generator if it is random."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if any(a.name == "generator" for a in func._schema.arguments):
            self.drew = True
            if kwargs.get("generator") is None:
                kwargs["generator"] = self.generator
            return func(*args, **kwargs)
        default = _default_generator(self.generator.device)
        with _DEFAULT_GENERATOR:
            theirs, ours = default.get_state(), self.generator.get_state()
            default.set_state(ours)
            try:
                return func(*args, **kwargs)
            finally:
                after = default.get_state()
                default.set_state(theirs)
                # Attention, for one, counts as random, but draws nothing without dropout.
                if not torch.equal(after, ours):
                    self.drew = True
                    self.generator.set_state(after)


def default_state(device: torch.device) -> torch.Tensor:
    """Return where the random numbers of a device go on."""
    return _default_generator(device).get_state()


def set_default_state(device: torch.device, state: torch.Tensor) -> None:
    """Let the random numbers of a device go on where they did when that was their state."""
    _default_generator(device).set_state(state)


def next_seed() -> int:
    """Return a seed that the process's generator gives, which stays as it is; see `use_seed`."""
    generator = torch.Generator().set_state(torch.get_rng_state())
    return int(torch.randint(2**62, (), generator=generator))


def use_seed() -> None:
    """Let the process's generator give another seed next time."""
    torch.randint(2**62, ())


def _default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operations on ``device`` draw from by default."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
