"""`CollectiveRoute`: members of a collective, and the network between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from pipesim.network.network import Network, all_reduce_seconds
from pipesim.ops import OF_DEVICES, Op
from pipesim.utils.csr import Ints


class StageMembers(NamedTuple):
    """Members of a collective that are of one stage.

    Attributes
    ----------
    stage, op, part
        Stage; operation and part of the first of them, as `pipesim.graph.tasks.Kinds` has them.
    kinds
        Their kinds.
    """

    stage: int
    op: Op
    part: int
    kinds: Ints

    @property
    def is_whole(self) -> bool:
        """Whether they reduce all gradients of the stage, or gather its parameters."""
        is_whole = self.part < 0 or self.op == Op.UNSHARD
        return self.op != Op.ALL_TO_ALL and self.op not in OF_DEVICES and is_whole


@dataclass(frozen=True, eq=False)
class GroupRoute:
    """Network between the members of a collective, which collectives of other stages may share.

    Attributes
    ----------
    devices
        Devices of all members, sorted; also those of equal replicas that the graph stands for.
    n_devices
        Number of devices of the network.
    network, algorithm
        Links, and the algorithm; ``"all_to_all"`` for exchanges.
    """

    devices: Ints
    n_devices: int
    network: Network
    algorithm: str

    @cached_property
    def seconds(self) -> Callable[[float], float]:
        """Seconds of an all-reduce between the members as a function of bytes.

        Costs that differ in few stages ask for the same bytes again.
        """
        return lru_cache(256)(all_reduce_seconds(self.network, self.devices, self.algorithm))

    @cached_property
    def links(self) -> Ints:
        """Links that each of ``devices`` holds; shape ``(len(devices), most)``."""
        return self.network.collective_links(self.algorithm, self.devices, self.n_devices)

    def part(self, step: int) -> GroupRoute:
        """Return the network between every ``step``-th of the devices, the first included."""
        return GroupRoute(self.devices[::step], self.n_devices, self.network, self.algorithm)

    def links_of(self, devices: Ints) -> Ints:
        """Return the links that some of ``devices`` hold, in any shape, with one more axis."""
        held: Ints = self.links[np.searchsorted(self.devices, devices)]
        return held


#: Networks between members, by their sorted devices as bytes, and the algorithm.
GroupRoutes: TypeAlias = dict[tuple[bytes, str], GroupRoute]


@dataclass(frozen=True, eq=False)
class CollectiveRoute:
    """Members of a collective, and the network between them.

    Attributes
    ----------
    members
        Kinds of the members that are in the graph.
    rows
        Members by stage.
    own_devices
        Device of each of ``members``.
    group
        Network between all members.
    """

    members: Ints
    rows: tuple[StageMembers, ...]
    own_devices: Ints
    group: GroupRoute

    @property
    def seconds(self) -> Callable[[float], float]:
        """Seconds of an all-reduce between the members as a function of bytes."""
        return self.group.seconds

    @cached_property
    def links(self) -> Ints:
        """Links that each of ``members`` holds; shape ``(len(members), most)``."""
        return self.group.links_of(self.own_devices)


class WholeReductions(NamedTuple):
    """Reductions of all gradients of a stage, or gathers of its parameters.

    Attributes
    ----------
    stages
        Stage of each.
    routes
        The collective of each.
    seconds
        Seconds of an all-reduce between the members of each, as a function of bytes.
    parts
        2 for half of an all-reduce, a reduce-scatter or an all-gather; else 1.
    kinds, row
        Kinds of all members, and the position of each one's collective in ``stages``.
    """

    stages: Ints
    routes: tuple[CollectiveRoute, ...]
    seconds: tuple[Callable[[float], float], ...]
    parts: Ints
    kinds: Ints
    row: Ints
