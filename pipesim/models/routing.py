"""`Routing`: how a router spreads tokens over experts, and the GPUs and nodes that tokens reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count, check_list, check_name, number
from pipesim.utils.checks import checked_names

if TYPE_CHECKING:
    from pipesim.models.transformer import Transformer


Distribution = Literal["uniform", "zipf", "dirichlet", "counts"]
#: Most experts of a layer.
_MOST_EXPERTS = 10**6


@checked_names
@dataclass(frozen=True)
class Routing:
    """Share of a router's assignments that each expert gets, as a distribution with a seed.

    An assignment is one token for one of its experts. All GPUs wait for the one whose experts get
    the most, so that it gives seconds and memory.

    Attributes
    ----------
    distribution
        - ``"uniform"`` (the default): each expert gets as many, as with a capacity that all
          experts fill (GShard, arXiv 2006.16668, section 2.2).
        - ``"zipf"``: shares proportional to ``rank ** -parameter``, in random order of experts.
        - ``"dirichlet"``: one draw from a symmetric Dirichlet distribution of concentration
          ``parameter``; large values are even.
        - ``"counts"``: shares proportional to ``counts``, as measured in a training.
    parameter
        Exponent, at least 0 and at most 100; or concentration, above 0 and at most 10^6.
    seed
        Seed of the order or of the draw.
    counts
        Assignments of each expert.

    Examples
    --------
    >>> import pipesim as ps
    >>> ps.Routing().shares(4).tolist()
    [0.25, 0.25, 0.25, 0.25]
    >>> ps.Routing.from_counts([3, 1, 2, 2]).imbalance(4, n_ranks=2)  # 4 and 4 of 8
    1.0
    >>> ps.Routing.zipf(1.0, seed=1).imbalance(64, n_ranks=8) > 1
    True
    """

    distribution: Distribution = "uniform"
    parameter: float = 0.0
    seed: int = 0
    counts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_name("distribution", self.distribution, get_args(Distribution))
        object.__setattr__(self, "parameter", self._checked_parameter())
        object.__setattr__(self, "seed", check_count("seed", self.seed, 0))
        counts = [number(x) for x in check_list("counts", self.counts, "numbers")]
        is_valid = all(x is not None and 0 <= x < math.inf for x in counts)
        if not is_valid or (counts and not any(counts)):
            raise ArgumentError(
                "counts must be finite and >= 0, and one above 0: the assignments of each expert; "
                f"got {self.counts!r:.60}"
            )
        object.__setattr__(self, "counts", tuple(counts))
        if (self.distribution == "counts") != bool(self.counts):
            raise ArgumentError(
                f"counts={list(self.counts)} with distribution={self.distribution!r}; give the "
                'assignments of each expert with "counts", and only then'
            )

    @classmethod
    def zipf(cls, exponent: float, seed: int = 0) -> Routing:
        """Return shares proportional to ``rank ** -exponent``, in random order of experts.

        Parameters
        ----------
        exponent
            Exponent, 0 to 100; 0 for even shares.
        seed
            Seed of the order of experts; 0 by default.

        Returns
        -------
        Routing
            For any number of experts.
        """
        return cls("zipf", exponent, seed)

    @classmethod
    def dirichlet(cls, concentration: float, seed: int = 0) -> Routing:
        """Return a draw from a symmetric Dirichlet distribution.

        Parameters
        ----------
        concentration
            Above 0 and at most 10^6; large values are even.
        seed
            Seed of the draw; 0 by default.

        Returns
        -------
        Routing
            For any number of experts.
        """
        return cls("dirichlet", concentration, seed)

    @classmethod
    def from_counts(cls, counts: Iterable[float]) -> Routing:
        """Return shares proportional to measured assignments of each expert.

        Parameters
        ----------
        counts
            Tokens that each expert got, at least 0, in the order of experts.

        Returns
        -------
        Routing
            For as many experts as there are counts.
        """
        return cls("counts", counts=counts)  # type: ignore[arg-type]  # checked in __post_init__

    def shares(self, n_experts: int, experts_per_token: int = 1) -> NDArray[np.float64]:
        """Return the share of assignments of each expert.

        Parameters
        ----------
        n_experts
            Number of experts.
        experts_per_token
            Different experts of a token, k. No expert gets more than one of k assignments of a
            token: shares of more than 1/k are cut, and the others grow in proportion.

        Returns
        -------
        numpy.ndarray
            Shares, 0 to 1, that sum to 1; shape ``(n_experts,)``.

        Examples
        --------
        A token has two different experts, so that no expert gets more than half of the assignments.

        >>> import pipesim as ps
        >>> ps.Routing.from_counts([7, 1, 1, 1]).shares(4, experts_per_token=2).round(3)
        array([0.5  , 0.167, 0.167, 0.167])
        """
        n = check_count("n_experts", n_experts)
        if n > _MOST_EXPERTS:
            raise ArgumentError(f"n_experts must be at most {_MOST_EXPERTS:,}, got {n}")
        k = check_count("experts_per_token", experts_per_token)
        if k > n:
            raise ArgumentError(
                f"experts_per_token={k} must be at most n_experts={n}: a token has different ones"
            )
        return np.array(_shares(self, n, k))

    def imbalance(self, n_experts: int, n_ranks: int, experts_per_token: int = 1) -> float:
        """Return the assignments of the busiest of ``n_ranks`` ranks over their mean; at least 1.

        Each rank has ``n_experts / n_ranks`` experts with consecutive numbers.

        Parameters
        ----------
        n_experts
            Number of experts.
        n_ranks
            Ranks among which the experts are divided, a divisor of ``n_experts``.
        experts_per_token
            Different experts of a token; 1 by default.

        Returns
        -------
        float
            1 if all ranks get as many.
        """
        n_ranks = check_count("n_ranks", n_ranks)
        shares = self.shares(n_experts, experts_per_token)
        if len(shares) % n_ranks:
            raise ArgumentError(f"n_ranks={n_ranks} does not divide n_experts={len(shares)}")
        if self.distribution == "uniform":
            return 1.0
        return max(1.0, float(shares.reshape(n_ranks, -1).sum(axis=1).max()) * n_ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; unset fields are left out.

        Returns
        -------
        dict
            Fields by name; `pipesim.Transformer.costs` takes such a mapping as ``routing``.
        """
        values: dict[str, Any] = {"distribution": self.distribution}
        if self.distribution in ("zipf", "dirichlet"):
            values |= {"parameter": self.parameter, "seed": self.seed}
        if self.counts:
            values["counts"] = list(self.counts)
        return values

    def _checked_parameter(self) -> float:
        value = number(self.parameter)
        least, most = {"zipf": (0.0, 100.0), "dirichlet": (0.0, 1e6)}.get(
            self.distribution, (0.0, 0.0)
        )
        is_positive = self.distribution == "dirichlet"
        if value is None or not least <= value <= most or (is_positive and value == 0):
            allowed = f"above 0 and at most {most:g}" if is_positive else f"{least:g} to {most:g}"
            name = {"zipf": ", the exponent,", "dirichlet": ", the concentration,"}.get(
                self.distribution, ""
            )
            raise ArgumentError(
                f"parameter{name} of {self.distribution!r} must be {allowed}, got "
                f"{self.parameter!r:.60}"
            )
        return value


def as_routing(value: Routing | Mapping[str, Any] | str | None) -> Routing:
    """Return a routing from a `Routing`, ``"uniform"``, None, or a mapping of its fields."""
    if isinstance(value, Routing):
        return value
    if value is None or (isinstance(value, str) and value == "uniform"):
        return UNIFORM
    if not isinstance(value, Mapping) or not value:
        raise ArgumentError(
            f"routing must be a pipesim.Routing, got {value!r:.60}; give such as "
            "pipesim.Routing.zipf(0.5, seed=0), or leave it out for an even one"
        )
    for name in value:
        check_name("field of a routing", name, [field.name for field in fields(Routing)])
    return Routing(**value)


@lru_cache(maxsize=256)
def _shares(routing: Routing, n: int, k: int) -> tuple[float, ...]:
    random = np.random.default_rng(routing.seed)
    if routing.distribution == "counts":
        if len(routing.counts) != n:
            raise ArgumentError(
                f"counts are of {len(routing.counts)} experts, but n_experts={n}; give one each"
            )
        weight = np.array(routing.counts) / max(routing.counts)
    elif routing.distribution == "zipf":
        powers = np.arange(1, n + 1, dtype=np.float64) ** -routing.parameter
        weight = powers[random.permutation(n)]
    elif routing.distribution == "dirichlet":
        weight = random.dirichlet(np.full(n, routing.parameter))
    else:
        weight = np.ones(n)
    return tuple(_cut(weight / weight.sum(), 1 / k).tolist())


def _cut(shares: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """Return shares of at most ``most``, of which the others grow in proportion."""
    if len(shares) * most <= 1 + 1e-12:
        return np.full(len(shares), 1 / len(shares))
    full = np.zeros(len(shares), dtype=bool)
    while (shares[~full] > most * (1 + 1e-12)).any():
        full |= shares > most
        rest = shares[~full].sum()
        left = 1 - most * int(full.sum())
        even = left / max(1, int((~full).sum()))
        shares = np.where(full, most, shares * (left / rest) if rest > 0 else even)
    return shares


#: Each expert gets as many assignments.
UNIFORM = Routing()


# A router spreads k of E experts over the tokens. With G groups of consecutive experts it first
# picks M groups for each token, and the k experts among those (DeepSeek-AI, "DeepSeek-V3 Technical
# Report", arXiv 2412.19437, section 2.1.2, "node-limited routing": a group is a node's experts,
# and M is 4). All groups, and all experts of the picked groups, are here equally likely.


def reached(model: Transformer, n: int) -> float:
    """Return the share of tokens that have one or more of n consecutive experts, 0 to 1.

    The first of them is the first of a group. Without groups it is ``1 - C(E - n, k) / C(E, k)``.

    Examples
    --------
    >>> from pipesim.models.transformer import Transformer
    >>> v3 = Transformer.preset("deepseek_v3")  # 8 groups of 32 experts
    >>> round(8 * reached(v3, 32), 2)  # nodes of a token, of at most 4
    3.63
    >>> round(reached(v3, 256), 2)
    1.0
    """
    groups, picked = model.expert_groups or 1, model.groups_per_token or 1
    size, k = model.n_experts // groups, model.experts_per_token
    whole, rest = divmod(n, size)
    touched = whole + (rest > 0)
    missed = 0.0
    for own in range(min(picked, whole) + 1):
        for part in range(1 + (rest > 0)):
            others = picked - own - part
            if not 0 <= others <= groups - touched:
                continue
            ways = math.comb(whole, own) * math.comb(groups - touched, others)
            left = picked * size - own * size - part * rest
            missed += ways * math.comb(left, k) / math.comb(picked * size, k)
    return 1 - missed / math.comb(groups, picked)
