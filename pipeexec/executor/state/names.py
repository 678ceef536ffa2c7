"""`StateNames`: the keys that the entries of stages have in the state of the original model.

- The stages of `pipeexec.split` have the keys of the model that was split.
- Stages that are `nn.Sequential`, and no two of which have a child of the same name, are slices of
  one `nn.Sequential`, and have its keys: ``model[:2]`` and ``model[2:]``.
- Other stages have the keys of ``nn.Sequential(*stages)``: ``"0.weight"``.

`DistributedDataParallel` and `torch.compile` around a stage add nothing to its keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from pipeexec.data_parallel.compiled_modules import unwrapped
from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.distributed.processes import Processes
from pipeexec.embedding.sharded_embedding import ShardedEmbedding
from pipeexec.splitting.parameter_names import first_names
from pipeexec.splitting.split_stage import SplitStage


class StateNames:
    """Keys of the parameters and buffers of all stages.

    Parameters
    ----------
    modules
        Those of the pipeline, replica after replica; stages of other processes are a `RemoteStage`.
    n_stages
        Stages of one replica.
    processes
        All of them make this object at the same time; None for one process.

    Attributes
    ----------
    modules
        The stages, without DistributedDataParallel and compiled wrappers.
    first_slots
        Number of the first copy of each local stage, in order of stages.
    """

    def __init__(
        self, modules: Sequence[nn.Module], n_stages: int, processes: Processes | None
    ) -> None:
        self.modules, self.n_stages = [unwrapped(module) for module in modules], n_stages
        local = [k for k, m in enumerate(self.modules) if not isinstance(m, RemoteStage)]
        first = {slot % n_stages: slot for slot in reversed(local)}
        self.first_slots = [first[stage] for stage in sorted(first)]
        self._local_slots = local
        children = {str(slot % n_stages): _children(self.modules[slot]) for slot in local}
        everyone = [children] if processes is None else processes.share(children)
        by_stage = {stage: names for part in everyone for stage, names in part.items()}
        self._are_slices = _are_slices(list(by_stage.values()))
        own = [key for slot in self.first_slots for key in self.state(slot)]
        #: Keys of the stages of all processes.
        self.stage_keys = frozenset(
            key for keys in ([own] if processes is None else processes.share(own)) for key in keys
        )

    def key(self, slot: int, name: str) -> str:
        """Return the key of an entry of a stage."""
        module = self.modules[slot]
        if isinstance(module, SplitStage):
            return module.model_name(name)
        return name if self._are_slices else f"{slot % self.n_stages}.{name}"

    @cached_property
    def whole(self) -> nn.Module | None:
        """The model that was split; None for stages that were cut by hand."""
        split = (m for m in self.modules if isinstance(m, SplitStage))
        return next((stage.whole for stage in split), None)

    def state(self, slot: int) -> dict[str, Any]:
        """Return the entries of one stage by their keys; tensors share memory with the stage."""
        entries = self.modules[slot].state_dict()
        return {self.key(slot, name): value for name, value in entries.items()}

    def unused(self) -> dict[str, Any]:
        """Return the entries of the split model that no stage needs, but those without data."""
        if self.whole is None:
            return {}
        return {
            key: value
            for key, value in self.whole.state_dict().items()
            if key not in self.stage_keys and not (isinstance(value, Tensor) and value.is_meta)
        }

    def local_state(self) -> dict[str, Any]:
        """Return the entries of the local stages in their order, and unused ones of the model."""
        entries: dict[str, Any] = {}
        for slot in self.first_slots:
            for key, value in self.state(slot).items():
                entries.setdefault(key, value)
        return entries | self.unused()

    @cached_property
    def first_names(self) -> dict[str, str]:
        """First key of each parameter of the split model that has several, such as a tied one."""
        return {} if self.whole is None else first_names(self.whole)

    @cached_property
    def same(self) -> dict[str, list[str]]:
        """All keys of each parameter of the split model, by its first key."""
        groups: dict[str, list[str]] = defaultdict(list)
        for name, first in self.first_names.items():
            groups[first].append(name)
        return groups

    def allowed_keys(self) -> frozenset[str]:
        """Return the keys that a state may have."""
        return self.stage_keys if self.whole is None else self.stage_keys | {
            *self.whole.state_dict()}  # fmt: skip

    def find(self, state: Mapping[str, Any], key: str) -> str | None:
        """Return the key under which a state has an entry: its own, or that of a tied parameter."""
        if key in state:
            return key
        first = self.first_names.get(key, key)
        return next((name for name in self.same.get(first, ()) if name in state), None)

    def parameter_keys(self, slot: int) -> dict[nn.Parameter, str]:
        """Return the key of each parameter of a stage: of a tied one the first in the model."""
        keys: dict[nn.Parameter, str] = {}
        for name, parameter in self.modules[slot].named_parameters():
            key = self.key(slot, name)
            keys[parameter] = self.first_names.get(key, key)
        return keys

    def local_slots(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield all local copies of stages, with their numbers."""
        for slot in self._local_slots:
            yield slot, self.modules[slot]

    def embeddings(self) -> dict[str, ShardedEmbedding]:
        """Return the local embeddings whose rows are spread over processes, by prefix of keys."""
        return {
            self.key(slot, f"{name}." if name else ""): module
            for slot in self.first_slots
            for name, module in self.modules[slot].named_modules()
            if isinstance(module, ShardedEmbedding)
        }


def _children(module: nn.Module) -> list[str] | None:
    """Return the names of the children of an `nn.Sequential`; None for another module."""
    return list(module._modules) if isinstance(module, nn.Sequential) else None


def _are_slices(children: Sequence[list[str] | None]) -> bool:
    """Return whether stages are slices of one `nn.Sequential`, by the names of their children."""
    names = [name for group in children for name in group or ()]
    return None not in children and len(set(names)) == len(names)
