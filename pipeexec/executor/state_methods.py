"""`StateMethods`: the methods of `pipeexec.Pipeline` that return and load its state."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pipeexec.distributed.processes import Processes
from pipeexec.executor.named_state import (
    StateNames,
    apply_optimizer_states,
    check_model_state,
    load_model_state,
    optimizer_state,
    prepared_states,
)
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.sharding import Sharding, whole_optimizers
from pipeexec.executor.tied_parameters import TiedParameters
from pipesim.errors import ArgumentError, ArgumentTypeError, PeerError, check_flag


class StateMethods:
    """Methods of a pipeline that return its state by the names of the original model."""

    names: StateNames
    optimizers: list[torch.optim.Optimizer | None]
    processes: Processes | None
    _model: PlacedModel

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and persistent buffers by the keys of the original model.

        The tensors share memory with the stages, as in torch. The keys are

        - for stages of `pipeexec.split`: those of the model. A tied parameter has all its keys.
        - for slices of an `nn.Sequential`, such as ``model[:2], model[2:]``: those of the whole.
          Stages are taken for slices if each is an `nn.Sequential`, and no two have a child of the
          same name.
        - for other stages: those of ``nn.Sequential(*stages)``, such as ``"0.weight"``.

        In several processes, the entries are those of the local stages. Of an embedding whose rows
        are spread over processes, they are the rows of this process. Sharded parameters are
        gathered into copies; all processes must then call this.

        Returns
        -------
        dict
            A tensor for each key; persistent buffers and extra states of modules too.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     list(pipeline.state_dict())
        ['0.weight', '0.bias', '1.weight', '1.bias']
        """
        sharding = self._model.part(Sharding)
        with self._model.locked("state_dict"), sharding.whole_parameters():
            state = self.names.local_state()
            return copy.deepcopy(state) if "parameters" in sharding.kinds else state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load parameters and buffers into all stages and their copies; all processes must call it.

        Parameters
        ----------
        state
            As `state_dict` returns it, or the original model's ``state_dict()``. It may have the
            entries of other processes, too. A tied parameter needs one of its keys.
        strict
            Whether missing and unexpected keys are refused.
        """
        tied = self._model.part(TiedParameters)
        with self._model.locked("load_state_dict"):
            with raise_together(self.processes):
                if not isinstance(state, Mapping) or not all(isinstance(x, str) for x in state):
                    raise ArgumentTypeError(
                        f"state must be a dict of keys to tensors, got {state!r:.60}; give what "
                        "state_dict returns"
                    )
                check_model_state(self.names, state, strict=check_flag("strict", strict))
                values = tied.loaded_values(self.names, state)
            tied.check_loaded_values(values, self.processes)
            with self._model.part(Sharding).whole_parameters(changes=True):
                load_model_state(self.names, state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizers by the names of parameters of the original model.

        The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, and
        does not depend on the number of stages. `torch.distributed.checkpoint.state_dict`'s
        ``set_optimizer_state_dict`` loads it into the optimizer of the unsplit model. Groups of
        stages with equal options are one group. The state of sharded optimizers is gathered; all
        processes must then call this.

        Returns
        -------
        dict
            ``"state"`` and ``"param_groups"``; both empty without optimizers. In several processes,
            the entries of the local stages.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
        ...     [group["params"] for group in pipeline.optimizer_state_dict()["param_groups"]]
        [['0.weight', '0.bias', '1.weight', '1.bias']]
        """
        with self._model.locked("optimizer_state_dict"):
            return optimizer_state(self.names, whole_optimizers(self._model))

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the optimizers of all stages; all processes must call this.

        Options such as ``fused``, which do not change results, stay as they are.

        Parameters
        ----------
        state
            As `optimizer_state_dict` returns it, of any number of stages.
        """
        with self._model.locked("load_optimizer_state_dict"):
            optimizers = whole_optimizers(self._model)
            with raise_together(self.processes):
                if not self._model.zero_grad:
                    raise ArgumentError(
                        "the pipeline has no optimizer to load a state; give Pipeline an optimizer"
                    )
                prepared = prepared_states(self.names, optimizers, state)
            apply_optimizer_states(prepared)


@contextmanager
def raise_together(processes: Processes | None) -> Iterator[None]:
    """Raise an error of a block in every process; all of them must run it.

    The process that has the error raises it. Others raise a `PeerError` with its message.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as own:
        error = own
    texts = [] if processes is None else processes.share(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise PeerError(f"rank {rank} stopped the call, and nothing was changed: {text}")
