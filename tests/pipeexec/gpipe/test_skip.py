"""Skips: layers that stash and pop, with no pipeline around them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from pipeexec.gpipe.skip import (
    Namespace,
    Shelf,
    pop,
    skippable,
    stash,
    use_shelf,
    verify_skippables,
)
from pipesim.errors import SkipError


@skippable(stash=["early"])
class First(nn.Module):
    """Stashes three times its input."""

    def forward(self, x: Any) -> Any:
        yield stash("early", x * 3)
        return x + 1


class Middle(nn.Module):
    """Doubles."""

    def forward(self, x: Any) -> Any:
        return x * 2


@skippable(pop=["early"])
class Last(nn.Module):
    """Adds what was stashed."""

    def forward(self, x: Any) -> Any:
        early = yield pop("early")
        return x if early is None else x + early


@skippable(stash=["a", "b"], pop=["c"])
class Two(nn.Module):
    """Stashes two, and pops a third."""

    def forward(self, x: Any) -> Any:
        yield stash("a", x)
        yield stash("b", x)
        c = yield pop("c")
        return x + c


def test_a_skip_goes_around_the_layers_between() -> None:
    model = nn.Sequential(First(), Middle(), Last())
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert model(x).tolist() == [2 * 2 + 3, 2 * 3 + 6]
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5]


def test_a_skip_that_was_popped_is_gone() -> None:
    """Its memory is free, and it is not popped a second time."""
    shelf = Shelf()
    with use_shelf(shelf):
        First()(torch.ones(1))
        assert [name for _, name in shelf.skips] == ["early"]
        Last()(torch.ones(1))
        assert not shelf.skips
        with pytest.raises(SkipError, match="'early' has not been stashed"):
            Last()(torch.ones(1))


def test_nothing_can_be_stashed() -> None:
    @skippable(stash=["early"])
    class Nothing(nn.Module):
        def forward(self, x: Any) -> Any:
            yield stash("early", None)
            return x

    assert nn.Sequential(Nothing(), Last())(torch.ones(1)).tolist() == [1]


def test_a_declared_skip_may_be_there_without_commands() -> None:
    """A module that does not yield declares none."""

    @skippable()
    class Plain(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1

    assert Plain()(torch.zeros(1)).tolist() == [1]


def test_one_name_twice_in_namespaces() -> None:
    inner, outer = Namespace(), Namespace()
    model = nn.Sequential(
        First().isolate(outer), First().isolate(inner), Last().isolate(inner), Last().isolate(outer)
    )
    verify_skippables(model)
    assert model(torch.zeros(1)).tolist() == [2 + 3 + 0]
    verify_skippables(copy.deepcopy(model))


@skippable(stash=["scaled"])
class Scaled(nn.Module):
    """Stashes its input times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, x: Any) -> Any:
        yield stash("scaled", x * self.scale)
        return x


def test_a_layer_can_be_pickled() -> None:
    """Parameters are its own, namespaces those that others of the model have."""
    namespace = Namespace()
    layer = Scaled().isolate(namespace).eval()
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):  # noqa: S301
        assert type(other) is type(layer)
        assert other.stashable() == layer.stashable()
        assert not other.training
        with torch.no_grad():
            other.module.scale.add_(1)
        assert (other.module.scale.tolist(), layer.module.scale.tolist()) == ([4], [3])
        shelf = Shelf()
        with use_shelf(shelf):
            other(torch.ones(1))
        assert shelf.take((namespace, "scaled")) == 4


def test_some_names_of_a_layer_are_isolated() -> None:
    namespace = Namespace()
    layer = Two().isolate(namespace, only=["a"])
    assert layer.stashable() == [(namespace, "a"), (None, "b")]
    assert layer.poppable() == [(None, "c")]
    assert layer.isolate(namespace).poppable() == [(namespace, "c")]


def test_a_layer_is_named_and_kept_as_it_was_written() -> None:
    @skippable(stash=["x"])
    class Layer(nn.Linear):
        """A layer with this docstring."""

    layer = Layer(2, 3, bias=False)
    assert type(layer).__name__ == "Layer"
    assert type(layer).__doc__ == "A layer with this docstring."
    assert list(layer.state_dict()) == ["module.weight"]
    assert repr(layer).startswith("@skippable(Layer(in_features=2")


# Mistakes


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([First(), Middle()], "no module declared 'early' as poppable but stashed"),
        ([Middle(), Last()], "'1' declared 'early' as poppable but it was not stashed"),
        ([Last(), First()], "'0' declared 'early' as poppable but it was not stashed"),
        ([First(), Last(), Last()], "'2' redeclared 'early' as poppable but not isolated"),
        ([First(), First(), Last()], "'1' redeclared 'early' as stashable but not isolated"),
        ([First(), Last(), First(), Last()], "'2' redeclared 'early' as stashable"),
        ([First(), Last().isolate(Namespace())], "declared 'early' as poppable but it was not"),
        ([skippable(stash=["x"], pop=["x"])(nn.Identity)()], "'0' declared 'x' both as stashable"),
    ],
)
def test_pairs_that_do_not_match(layers: list[nn.Module], message: str) -> None:
    with pytest.raises(SkipError, match=message) as caught:
        verify_skippables(nn.Sequential(*layers))
    assert isinstance(caught.value, TypeError)


def test_every_pair_that_does_not_match_is_named() -> None:
    with pytest.raises(SkipError) as caught:
        verify_skippables(nn.Sequential(Two(), Last()))
    assert str(caught.value).splitlines() == [
        "one or more pairs of stash and pop do not match:",
        "",
        "* '0' declared 'c' as poppable but it was not stashed",
        "* '1' declared 'early' as poppable but it was not stashed",
        "* no module declared 'a' as poppable but stashed",
        "* no module declared 'b' as poppable but stashed",
    ]


def commands(*yielded: Any) -> type[nn.Module]:
    class Yields(nn.Module):
        def forward(self, x: Any) -> Any:
            yield from yielded
            return x

    return Yields


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (skippable(stash=["x"])(commands())(), r"'x' must be stashed by @skippable\(Yields"),
        (skippable(pop=["x"])(commands())(), "'x' must be popped by"),
        (skippable()(commands(stash("x", None)))(), "'x' has not been declared as stashable"),
        (skippable()(commands(pop("x")))(), "'x' has not been declared as poppable"),
        (skippable(pop=["x"])(commands(pop("x"), pop("x")))(), "'x' has popped already"),
        (skippable()(commands("stash"))(), r"yielded 'stash'; it may yield stash\(name, tensor\)"),
    ],
)
def test_layers_that_do_not_as_they_declare(layer: nn.Module, message: str) -> None:
    with use_shelf(Shelf({(None, "x"): None})), pytest.raises(SkipError, match=message):
        layer(torch.zeros(1))


def test_a_pop_of_what_nobody_stashed() -> None:
    with use_shelf(Shelf()), pytest.raises(RuntimeError, match="'early' has not been stashed"):
        Last()(torch.zeros(1))


def test_names_must_be_listed() -> None:
    with pytest.raises(SkipError, match=r"stash takes names in a list, got 'x'; write \['x'\]"):
        skippable(stash="x")


def test_only_what_is_declared_can_be_isolated() -> None:
    with pytest.raises(SkipError, match="has no skip 'late' to isolate; it declares 'early'"):
        First().isolate(Namespace(), only=["late"])
