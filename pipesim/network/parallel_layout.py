"""`Layout`: which GPU has which part of a model, for all kinds of parallelism together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count, check_name, check_type
from pipesim.network.network import Network
from pipesim.network.sources import EFFICIENCY
from pipesim.utils.checks import Count, Range, Whole, checked

if TYPE_CHECKING:
    import pandas as pd


#: Kinds of parallelism in an order, and the argument with the size of each.
_SIZES = {
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "dp": "data_parallel",
    "pp": "pipeline_parallel",
}
#: Kinds of groups of GPUs that have experts, and the others.
_EXPERT_KINDS, _DENSE_KINDS = ("etp", "ep", "edp", "pp"), ("tp", "cp", "dp", "pp")
#: Most GPUs of a layout.
_MOST = 10**7
Size = Annotated[int, Range(1, _MOST)]


@checked
@dataclass(frozen=True, kw_only=True)
class Layout:
    """Coordinates of each GPU in tensor, context, expert, data and pipeline parallelism.

    GPUs are numbered as global ranks. In ``order``, neighbours in the first kind have consecutive
    numbers, and those in the last kind are farthest apart. Parameters that are no experts do not
    use expert parallelism: it has no coordinate of its own there. Experts divide the GPUs of a
    pipeline stage in another way, with the same order: into ``expert_tensor_parallel``,
    ``expert_parallel``, and expert-data-parallel GPUs (edp), which have copies of the same experts.

    A device of `pipesim` is the ``tensor_parallel * context_parallel`` GPUs of one stage and
    replica. Its number is that in ``lower(schedule, **layout.lowering)``.

    Source: Megatron-Core, ``RankGenerator`` and ``initialize_model_parallel`` in
    ``megatron/core/parallel_state.py``, https://github.com/NVIDIA/Megatron-LM.

    Attributes
    ----------
    tensor_parallel, context_parallel, expert_parallel, data_parallel, pipeline_parallel
        Number of GPUs, or of groups, of each kind; 1 by default.
    expert_tensor_parallel
        GPUs that share each expert, a divisor of ``tensor_parallel``; 0 (the default) for
        ``tensor_parallel``.
    order
        The five kinds, ``"tp-cp-ep-dp-pp"`` (the default, as in Megatron-Core) or another order of
        them.
    gpus_per_node
        GPUs of a node; 8 by default. GPUs fill nodes in order of their numbers.
    available_gpus
        GPUs of the cluster; None (the default) for as many as needed.

    Examples
    --------
    >>> import pipesim as ps
    >>> layout = ps.Layout(tensor_parallel=2, expert_parallel=2, data_parallel=4)
    >>> layout.groups("dp")
    ((0, 2, 4, 6), (1, 3, 5, 7))
    >>> layout.groups("ep")  # experts are shared by 2 GPUs, and divided among 2 replicas
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> layout.groups("edp")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """

    tensor_parallel: Size = 1
    context_parallel: Size = 1
    expert_parallel: Size = 1
    data_parallel: Size = 1
    pipeline_parallel: Size = 1
    expert_tensor_parallel: Whole = 0
    order: str = "tp-cp-ep-dp-pp"
    gpus_per_node: Size = 8
    available_gpus: Count | None = None

    def __post_init__(self) -> None:
        shared = self.expert_tensor_parallel or self.tensor_parallel
        object.__setattr__(self, "expert_tensor_parallel", shared)
        if sorted(self.order.split("-")) != sorted(_SIZES):
            raise ArgumentError(
                f"order must name {', '.join(_SIZES)} once each, such as 'tp-cp-ep-dp-pp', got "
                f"{self.order!r:.60}"
            )
        if self.n_gpus > _MOST:
            sizes = ", ".join(f"{_SIZES[kind]}={self._size(kind)}" for kind in _DENSE_KINDS)
            raise ArgumentError(f"a layout may have at most {_MOST:,} GPUs, got {sizes}")
        if self.available_gpus is not None and self.n_gpus > self.available_gpus:
            sizes = " x ".join(f"{_SIZES[kind]}={self._size(kind)}" for kind in _DENSE_KINDS)
            raise ArgumentError(
                f"the layout needs {self.n_gpus} GPUs ({sizes}), but the cluster has "
                f"{self.available_gpus}; give smaller sizes"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        shared, x = self.expert_tensor_parallel, self.expert_parallel
        if self.tensor_parallel % shared:
            raise ArgumentError(
                f"expert_tensor_parallel={shared} does not divide tensor_parallel="
                f"{self.tensor_parallel}; choose a divisor"
            )
        stage = self.n_gpus // self.pipeline_parallel
        if stage % (shared * x):
            raise ArgumentError(
                f"expert_parallel={x} does not divide the {stage // shared} groups of GPUs of a "
                "stage that may share experts (context_parallel x data_parallel"
                + ("" if shared == self.tensor_parallel else " x GPUs of tensor parallelism")
                + "); choose a divisor, or more replicas"
            )
        is_split = self._size("edp") != self.data_parallel
        if is_split and self.pipeline_parallel > 1 and not self.order.endswith("pp"):
            raise ArgumentError(
                f"order={self.order!r} with expert_parallel={x} and context_parallel="
                f"{self.context_parallel}: stages of experts and of other parameters would be on "
                "other GPUs; give an order that ends with pp"
            )

    @property
    def n_gpus(self) -> int:
        """Number of GPUs: the product of all sizes but that of experts."""
        return math.prod(self._size(kind) for kind in _DENSE_KINDS)

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.n_gpus // self.gpus_per_node)

    @property
    def expert_data_parallel(self) -> int:
        """GPUs of a stage that have copies of the same experts."""
        return self._size("edp")

    @property
    def gpus_per_device(self) -> int:
        """GPUs of a device of `pipesim`: ``tensor_parallel * context_parallel``."""
        return self.tensor_parallel * self.context_parallel

    @property
    def lowering(self) -> dict[str, Any]:
        """Arguments of `pipesim.lower` for this layout: ``n_replicas`` and ``layout``."""
        kinds = [kind for kind in self.order.split("-") if kind != "ep"]
        alone = [kind for kind in ("tp", "cp") if self._size(kind) > 1]
        used = [kind for kind in kinds if self._size(kind) > 1]
        if set(used[: len(alone)]) != set(alone):
            raise ArgumentError(
                f"order={self.order!r}: the GPUs of a tensor- and context-parallel group are no "
                "neighbours, so that they are no device; give an order that begins with tp-cp"
            )
        is_major = kinds.index("dp") < kinds.index("pp")
        name = "stage_major" if is_major else "replica_major"
        return {"n_replicas": self.data_parallel, "layout": name}

    @property
    def sharding(self) -> dict[str, int]:
        """Arguments of `pipesim.Transformer.costs` for this layout; those of experts if needed."""
        sizes = {name: getattr(self, name) for name in ("tensor_parallel", "context_parallel")}
        if self.expert_parallel > 1:
            sizes["expert_parallel"] = self.expert_parallel
        if self.expert_tensor_parallel != self.tensor_parallel:
            sizes["expert_tensor_parallel"] = self.expert_tensor_parallel
        return sizes

    def groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of GPUs that differ in some coordinates only.

        Parameters
        ----------
        kind
            ``"tp"``, ``"cp"``, ``"dp"`` or ``"pp"``, or several, such as ``"dp-cp"``, whose GPUs
            reduce gradients together. For experts: ``"ep"``, GPUs that together have all experts;
            ``"edp"``, GPUs with copies of the same experts; ``"etp"``, GPUs that share experts; or
            several of these.

        Returns
        -------
        tuple
            Groups of numbers of GPUs, in Megatron-Core's order.

        Examples
        --------
        >>> import pipesim as ps
        >>> layout = ps.Layout(tensor_parallel=2, pipeline_parallel=2)
        >>> layout.groups("tp"), layout.groups("pp")
        (((0, 1), (2, 3)), ((0, 2), (1, 3)))
        """
        kinds = kind.split("-") if isinstance(kind, str) else []
        dense = bool(kinds) and all(x in _DENSE_KINDS for x in kinds)
        if not (dense or (kinds and all(x in _EXPERT_KINDS for x in kinds))):
            if isinstance(kind, str) and "-" not in kind:
                check_name("kind of group", kind, dict.fromkeys(_DENSE_KINDS + _EXPERT_KINDS))
            raise ArgumentError(
                f"kind of group must be of {', '.join(_DENSE_KINDS)}, or of "
                f"{', '.join(_EXPERT_KINDS)}, such as 'dp' or 'dp-cp', got {kind!r:.60}"
            )
        axes = self._axes(experts=not dense)
        numbers = np.arange(self.n_gpus).reshape([self._size(x) for x in axes])
        inside = [i for i, x in enumerate(axes) if x in kinds]
        outside = [i for i in range(len(axes)) if i not in inside]
        size = math.prod(self._size(axes[i]) for i in inside)
        table = numbers.transpose(*outside, *inside).reshape(-1, size)
        return tuple(map(tuple, table.tolist()))

    @checked
    def device(self, stage: Whole, replica: Whole) -> int:
        """Return the number of the device of a stage of a replica.

        Stages are those of ``pipeline_parallel``: with several chunks, devices of a pipeline.

        Parameters
        ----------
        stage
            Number of the stage, from 0 on.
        replica
            Number of the replica, from 0 on.

        Returns
        -------
        int
            The number, as in a graph of ``lower(schedule, **layout.lowering)``.
        """
        for name, value, n in (
            ("stage", stage, self.pipeline_parallel),
            ("replica", replica, self.data_parallel),
        ):
            if value >= n:
                raise ArgumentError(f"{name} must be 0 to {n - 1}, got {value}")
        if self.lowering["layout"] == "stage_major":
            return stage * self.data_parallel + replica
        return replica * self.pipeline_parallel + stage

    def gpus_of_node(self, node: int) -> tuple[int, ...]:
        """Return the numbers of the GPUs of a node; the last node may have fewer.

        Parameters
        ----------
        node
            Number of the node, from 0 on.

        Returns
        -------
        tuple
            Numbers of GPUs, ascending.
        """
        if check_count("node", node, 0) >= self.n_nodes:
            raise ArgumentError(f"node must be 0 to {self.n_nodes - 1}, got {node}")
        first = node * self.gpus_per_node
        return tuple(range(first, min(first + self.gpus_per_node, self.n_gpus)))

    @checked
    def experts(self, gpu: Whole, n_experts: Count) -> range:
        """Return the numbers of the experts of a layer that a GPU has.

        Parameters
        ----------
        gpu
            Number of the GPU, from 0 on.
        n_experts
            Experts of a layer.

        Returns
        -------
        range
            Consecutive numbers of experts.
        """
        if gpu >= self.n_gpus:
            raise ArgumentError(f"gpu must be 0 to {self.n_gpus - 1}, got {gpu}")
        if n_experts % self.expert_parallel:
            raise ArgumentError(
                f"expert_parallel={self.expert_parallel} does not divide n_experts={n_experts}; "
                "choose a divisor"
            )
        own, first = n_experts // self.expert_parallel, int(self._coordinates["ep"][gpu])
        return range(first * own, (first + 1) * own)

    @property
    def table(self) -> pd.DataFrame:
        """One row a GPU, with its node, its coordinates and its device.

        Columns: ``node``; coordinates ``tp``, ``cp``, ``dp``, ``pp``, and ``etp``, ``ep``, ``edp``
        of experts; ``device``, as in `device`.
        """
        from pipesim.utils.packages import pandas as pd

        _ = self.lowering
        columns = {
            "node": np.arange(self.n_gpus) // self.gpus_per_node,
            **self._coordinates,
            "device": np.arange(self.n_gpus) // self.gpus_per_device,
        }
        return pd.DataFrame(columns).rename_axis("gpu")

    def network(
        self,
        machine: str | Network,
        efficiency: float = EFFICIENCY,
        *,
        nic_efficiency: float | None = None,
    ) -> Network:
        """Return a network whose devices are those of the layout.

        Parameters
        ----------
        machine
            Name of a machine (`pipesim.machines`), or a network of single GPUs.
        efficiency
            Share of a machine's nominal bandwidths that messages reach.
        nic_efficiency
            The same of its NICs alone; by default ``efficiency``.

        Returns
        -------
        Network
            One device for each group of ``tensor_parallel * context_parallel`` GPUs.
        """
        _ = self.lowering
        if isinstance(machine, str):
            network = Network.preset(machine, efficiency, nic_efficiency=nic_efficiency)
            return network.grouped(self.gpus_per_device)
        own = check_type("machine", machine, Network, 'give such as "dgx_h100"')
        return own.grouped(self.gpus_per_device)

    @cached_property
    def _coordinates(self) -> dict[str, NDArray[np.int64]]:
        coordinates: dict[str, NDArray[np.int64]] = {}
        for experts in (False, True):
            axes = self._axes(experts=experts)
            shape = [self._size(x) for x in axes]
            values = np.unravel_index(np.arange(self.n_gpus), shape)
            coordinates |= dict(zip(axes, values, strict=True))
        names = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
        return {name: coordinates[name] for name in names}

    def _axes(self, *, experts: bool) -> list[str]:
        """Return the kinds that have coordinates, the last of the order first."""
        kinds = reversed(self.order.split("-"))
        if not experts:
            return [kind for kind in kinds if kind != "ep"]
        names = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
        return [names[kind] for kind in kinds if kind != "cp"]

    def _size(self, kind: str) -> int:
        if kind == "etp":
            return self.expert_tensor_parallel
        if kind == "edp":
            used = self.expert_tensor_parallel * self.expert_parallel * self.pipeline_parallel
            return self.n_gpus // used
        size: int = getattr(self, _SIZES[kind])
        return size
