"""`Workload`: tokens and FLOPs of a micro-batch, and the GPUs that compute them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from pipesim.errors import CostsError, check_count, check_name, number
from pipesim.network.links import Nodes

#: Units of the fields that must be finite and above 0.
_UNITS = {"tokens": "tokens", "flops": "FLOPs", "peak_flops": "FLOP/s", "memory": "bytes"}
#: Fields that may be None.
_OPTIONAL = ("peak_flops", "memory")


@dataclass(frozen=True)
class Workload:
    """Tokens and FLOPs of a micro-batch, and the GPUs that compute them.

    `Timeline.tokens_per_second`, `Timeline.mfu` and `Timeline.memory_limit` follow from it.

    Attributes
    ----------
    tokens
        Tokens of one micro-batch of one replica.
    flops
        Model FLOPs of one micro-batch: forward and backward of all stages and of all GPUs, without
        recompute.
    gpus_per_device
        Number of GPUs that act as one device, such as a tensor-parallel group.
    peak_flops
        FLOP/s of one GPU as its data sheet gives them; None if unknown.
    memory
        Bytes of memory of one GPU; None if unknown. ``Costs`` have the bytes of one GPU too.
    settings
        Arguments with which `pipesim.Costs.transformer` returns these costs again, except for
        their network, as values of JSON; None if there are none. Not compared by ``==``.
    n_slices
        Number of slices of a sequence, if a micro-batch is one of them; None (the default) if not
        known. Costs with this workload price graphs of as many slices only. Not compared by ``==``.
    n_microbatches
        Number of micro-batches that the tokens and FLOPs are averages of; None (the default) for
        any. Costs with this workload price graphs of as many only. Not compared by ``==``.
    nodes
        Nodes of the network that the seconds of collectives between the GPUs of a device follow
        from, as a `Nodes` or a mapping of its fields; None if there are no such collectives. Not
        compared by ``==``.

    Raises
    ------
    CostsError
        For numbers that are not finite and above 0, and for settings that JSON cannot hold.
    NetworkError
        For ``nodes`` that are none.

    See Also
    --------
    pipesim.Costs : Costs of a micro-batch, which may have a workload.
    pipesim.Timeline.mfu : Model FLOPs utilization of a step.
    pipesim.Timeline.tokens_per_second : Throughput of a step.

    Examples
    --------
    A step has two micro-batches of 3000 tokens, and takes 3 s.

    >>> import pipesim as ps
    >>> workload = ps.Workload(tokens=3000, flops=6 * 7e9 * 3000)
    >>> graph = ps.lower(ps.schedule("1f1b", n_devices=1, n_microbatches=2))
    >>> timeline = ps.simulate(graph, ps.Costs(forward=0.5, backward=1, workload=workload))
    >>> timeline.tokens_per_second
    2000.0
    """

    tokens: float
    flops: float
    gpus_per_device: int = 1
    peak_flops: float | None = None
    memory: float | None = None
    settings: Mapping[str, Any] | None = field(default=None, compare=False)
    nodes: Nodes | Mapping[str, Any] | None = field(default=None, compare=False)
    n_slices: int | None = field(default=None, compare=False)
    n_microbatches: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, unit in _UNITS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, _checked_number(name, value, unit))
        n_gpus = check_count("workload: gpus_per_device", self.gpus_per_device)
        object.__setattr__(self, "gpus_per_device", n_gpus)
        for name in ("n_slices", "n_microbatches"):
            if getattr(self, name) is not None:
                count = check_count(f"workload: {name}", getattr(self, name))
                object.__setattr__(self, name, count)
        object.__setattr__(self, "settings", _checked_settings(self.settings))
        object.__setattr__(self, "nodes", self.built_nodes)

    @property
    def built_nodes(self) -> Nodes | None:
        """``nodes`` as stored: a `Nodes`, or None."""
        if self.nodes is None or isinstance(self.nodes, Nodes):
            return self.nodes
        return Nodes.from_dict(self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or TOML; unset fields are left out.

        Returns
        -------
        dict
            Fields by name, in tokens, FLOPs, FLOP/s and bytes.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Workload(tokens=2048, flops=8e13).to_dict()
        {'tokens': 2048.0, 'flops': 80000000000000.0, 'gpus_per_device': 1}
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["settings"] = _checked_settings(self.settings)  # a copy of its own
        values["nodes"] = None if self.built_nodes is None else self.built_nodes.to_dict()
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Workload:
        """Return the workload in a mapping that `to_dict` returned.

        Parameters
        ----------
        values
            Fields by name; ``tokens`` and ``flops`` are needed, others have their defaults.

        Returns
        -------
        Workload
            Equal to the workload that `to_dict` was called on.

        Raises
        ------
        CostsError
            If ``values`` is no mapping, or lacks a field; and for numbers out of range.
        NetworkError
            For ``nodes`` that are none.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Workload.from_dict({"tokens": 2048, "flops": 8e13}).tokens
        2048.0
        """
        if not isinstance(values, Mapping):
            raise CostsError(
                f"workload must be a pipesim.Workload or a mapping, got {values!r:.60}; "
                'give such as {"tokens": 2048, "flops": 8.6e13}'
            )
        for key in values:
            check_name("field of a workload", key, [f.name for f in fields(cls)])
        for name in ("tokens", "flops"):
            if name not in values:
                raise CostsError(f"workload: {name} is missing; give those of one micro-batch")
        return cls(**values)


def checked_workload(value: object) -> Workload | None:
    """Return a workload as `Costs` keeps it, from a `Workload`, a mapping, or None."""
    if value is None or isinstance(value, Workload):
        return value
    return Workload.from_dict(value)  # type: ignore[arg-type]  # it checks the type


def _checked_number(name: str, value: object, unit: str) -> float:
    """Return a number as a float; raise `CostsError` unless it is finite and above 0."""
    result = number(value)
    if result is None or not 0 < result < math.inf:
        raise CostsError(f"workload: {name} must be finite {unit} above 0, got {value!r:.60}")
    return result


def _checked_settings(value: object) -> dict[str, Any] | None:
    """Return a copy of settings as values of JSON; raise `CostsError` if JSON has no such form."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CostsError(
            "workload: settings must map names to values, as keyword arguments of "
            f"Costs.transformer, got {value!r:.60}"
        )
    try:
        text = json.dumps(dict(value), default=_plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CostsError(
            f"workload: settings must be values of JSON: {error}; give numbers, texts, lists and "
            "mappings"
        ) from error
    copied: dict[str, Any] = json.loads(text)
    return copied


def _plain(value: object) -> Any:
    """Return an array or a number of NumPy as values of JSON; raise `TypeError` for others."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{value!r:.60} has no form in JSON")
