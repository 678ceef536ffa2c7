"""`Costs.concatenate`: the costs of modules with stages of their own as those of one pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import n_stages_of
from pipesim.costs.rows import ROWS, Row
from pipesim.errors import CostsError, check_count
from pipesim.network.network import Network

#: Fields of stages that are not joined.
_OF_STAGES = ("buckets", "segments", "exchange_bytes")
#: Groups of tied stages, and the bytes of each.
_TIED = ("tied", "tied_bytes")


class _Part(NamedTuple):
    """Costs of one module, and its stages."""

    name: str
    costs: Costs
    n_stages: int


def concatenate(parts: Mapping[str, tuple[Costs, int]], network: Network | None) -> Costs:
    """Return the costs of the stages of all parts; see `Costs.concatenate`."""
    checked = _checked_parts(parts)
    values: dict[str, Any] = {"workload": None}
    if network is not None:
        values["network"] = network
    for name, row in ROWS.items():
        if name in values or name in _TIED:
            continue
        own = [getattr(part.costs, name) for part in checked]
        if row.item == "stage" and any(value != row.default for value in own):
            values[name] = [x for part in checked for x in _of_stages(part, name, row)]
        elif name in _OF_STAGES and any(value is not None for value in own):
            raise CostsError(
                f"{name} of a module has numbers of its own stages; leave it out with "
                f"dataclasses.replace(costs, {name}=None), and give it to the joined costs"
            )
        elif row.item == "skip" and any(isinstance(value, tuple) for value in own):
            values[name] = _shifted(checked)
        elif row.item != "stage":
            values[name] = _common(checked, name, Network() if name == "network" else row.default)
    return Costs(**values, **_tied(checked))


def _checked_parts(parts: object) -> list[_Part]:
    example = (
        'give the costs and the number of stages of each module, such as {"vision": (costs, 2)}'
    )
    if not isinstance(parts, Mapping) or not parts:
        raise CostsError(f"parts must be a mapping, got {parts!r:.60}; {example}")
    checked = []
    for name, part in parts.items():
        if not isinstance(part, (tuple, list)) or len(part) != 2 or not isinstance(part[0], Costs):
            raise CostsError(
                f"parts: {name!r} must be costs and stages, got {part!r:.60}; {example}"
            )
        checked.append(_Part(str(name), part[0], check_count(f"stages of {name!r}", part[1])))
    return checked


def _of_stages(part: _Part, name: str, row: Row) -> Sequence[Any]:
    """Return one entry a stage: a number, or a row of micro-batches."""
    value = getattr(part.costs, name)
    if value is None:
        if not row.substitutes:
            raise CostsError(
                f"{name} is missing in the costs of {part.name!r}, and those of another module "
                "have it; give it to all modules, or to none"
            )
        if part.costs.n_microbatches is not None:
            raise CostsError(
                f"{name} is missing in the costs of {part.name!r}, whose micro-batches differ, and "
                f"those of another module have it; give {name} there too"
            )
        return list(part.costs.per_stage(name, part.n_stages).tolist())
    if n_stages_of(value) is None:
        return [value[0] if isinstance(value, tuple) else value] * part.n_stages
    if len(value) != part.n_stages:
        raise CostsError(
            f"{name} has {len(value)} values in the costs of {part.name!r}, which has "
            f"{part.n_stages} stages; give one, or one a stage"
        )
    return list(value)


def _shifted(parts: Sequence[_Part]) -> dict[tuple[int, int], Any]:
    """Return the bytes of skips, with numbers of stages of the pipeline."""
    sizes: dict[tuple[int, int], Any] = {}
    first = 0
    for part in parts:
        own = part.costs.skip_sizes
        if own is not None and not isinstance(own, tuple):
            raise CostsError(
                f"skip_bytes of {part.name!r} is one number, and those of another module are of "
                "pairs of stages; give pairs in both"
            )
        sizes |= {(a + first, b + first): size for (a, b), size in own or ()}
        first += part.n_stages
    return sizes


def _tied(parts: Sequence[_Part]) -> dict[str, Any]:
    """Return the groups of tied stages, with numbers of the pipeline, and the bytes of each."""
    groups: list[tuple[int, ...]] = []
    sizes: list[float] = []
    first = 0
    for part in parts:
        costs, last = part.costs, part.n_stages - 1
        own = costs.tied_stages or (((0, last),) if last else ())
        nbytes: Any = costs.tied_bytes
        if isinstance(nbytes, tuple) and (not costs.tied_stages or len(nbytes) != len(own)):
            raise CostsError(
                f"tied_bytes of {part.name!r} are of {len(nbytes)} groups of tied stages, but its "
                f"costs name {len(costs.tied_stages)}; name each with "
                "dataclasses.replace(costs, tied=[(0, 2), (1, 2)])"
            )
        if costs.tied_bytes or costs.tied:
            groups += [tuple(first + stage for stage in group) for group in own]
            sizes += nbytes if isinstance(nbytes, tuple) else [nbytes] * len(own)
        first += part.n_stages
    return {"tied": groups, "tied_bytes": sizes} if groups else {}


def _common(parts: Sequence[_Part], name: str, default: Any) -> Any:
    """Return the value that all parts have that do not have the default."""
    own = [(part.name, getattr(part.costs, name)) for part in parts]
    chosen = [(module, value) for module, value in own if value != default]
    for module, value in chosen[1:]:
        if value != chosen[0][1]:
            remedy = (
                "give network= to concatenate"
                if name == "network"
                else f"make them equal with dataclasses.replace(costs, {name}=...)"
            )
            raise CostsError(
                f"{name} is of the whole pipeline; the costs of {chosen[0][0]!r} and {module!r} "
                f"have different ones; {remedy}"
            )
    return chosen[0][1] if chosen else default
