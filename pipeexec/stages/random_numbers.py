"""Random numbers that do not depend on the schedule: a generator for each stage and micro-batch.

All threads of the process share torch's generator of a device. So two stages that draw at the same
time race for its numbers, and a recompute cannot return to the state at which its forward began.
Here every forward draws from its own generator, seeded by the step, the stage and the micro-batch.
Its recompute draws from the same seed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pipeexec.thread_modes import ThreadMode

_DEFAULT_GENERATOR = threading.Lock()


def task_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Return the seed of one forward; independent streams for different arguments."""
    sequence = np.random.SeedSequence((seed, step, stage, microbatch))
    return int(sequence.generate_state(1, np.uint64)[0])


class OwnGenerator(ThreadMode):
    """While active in a thread, random operations of that thread draw from one seed, or state.

    Operations with a generator argument get this generator. Others run with the process's
    generator set to this one's state, one thread at a time.

    Attributes
    ----------
    drew
        Whether any random number was drawn.
    """

    def __init__(self, seed: int | torch.Tensor, device: torch.device) -> None:
        super().__init__()
        self.generator = torch.Generator(device)
        if isinstance(seed, torch.Tensor):
            self.generator.set_state(seed)
        else:
            self.generator.manual_seed(seed)
        self.drew = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would load the compiler to skip this mode, 3 s in a first step."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code runs under this mode, and is not replaced by eager code."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; a random operation draws from this generator."""
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
            process_state, own_state = default.get_state(), self.generator.get_state()
            default.set_state(own_state)
            try:
                return func(*args, **kwargs)
            finally:
                new_state = default.get_state()
                default.set_state(process_state)
                # Attention, for example, counts as random but draws nothing without dropout.
                if not torch.equal(new_state, own_state):
                    self.drew = True
                    self.generator.set_state(new_state)


def default_state(device: torch.device) -> torch.Tensor:
    """Return the state of the process's generator of a device."""
    return _default_generator(device).get_state()


def set_default_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the process's generator of a device."""
    _default_generator(device).set_state(state)


def next_seed() -> int:
    """Return the next seed of the process's generator without advancing it; see `use_seed`."""
    generator = torch.Generator().set_state(torch.get_rng_state())
    return int(torch.randint(2**62, (), generator=generator))


def use_seed() -> None:
    """Advance the process's generator, so that its next seed is another."""
    torch.randint(2**62, ())


def _default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operations on ``device`` draw from by default."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
