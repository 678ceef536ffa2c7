"""Skip connections by name: one layer stashes a tensor, a later one pops it.

The layers of a sequential module hand on their output alone. What a layer far ahead needs besides
would have to pass through every layer between; here it goes around them, and in a pipeline
straight from the stage that makes it to the one that takes it (a portal, torchgpipe, arXiv
2004.09910, section 3.3).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from pipesim.errors import SkipError

__all__ = [
    "Key",
    "Namespace",
    "Shelf",
    "Skippable",
    "pop",
    "skippable",
    "stash",
    "use_shelf",
    "verify_skippables",
]


class Namespace:
    """Keeps the names of some layers' skips apart from others'; see `Skippable.isolate`."""

    def __init__(self) -> None:
        self.id = uuid.uuid4()  # a copy of a module is in the same namespaces

    def __repr__(self) -> str:
        return f"<Namespace {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


#: A skip: its namespace, if it has one, and its name.
Key = tuple[Namespace | None, str]


class Shelf:
    """Where skips lie between the layer that stashes them and the one that pops them."""

    def __init__(self, skips: Mapping[Key, Tensor | None] | None = None) -> None:
        self.skips: dict[Key, Tensor | None] = dict(skips or {})

    def put(self, key: Key, tensor: Tensor | None) -> None:
        """Keep a skip."""
        self.skips[key] = tensor

    def take(self, key: Key) -> Tensor | None:
        """Return a skip, and let go of it."""
        return self.skips.pop(key)


class _Local(threading.local):
    def __init__(self) -> None:
        self.shelf = Shelf()


_LOCAL = _Local()


class use_shelf:  # a context manager, entered at every forward: without a generator
    """Let layers that this thread runs stash on a shelf, and pop from it."""

    __slots__ = ("_before", "_shelf")

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def __enter__(self) -> None:
        self._before, _LOCAL.shelf = _LOCAL.shelf, self._shelf

    def __exit__(self, *_: object) -> None:
        _LOCAL.shelf = self._before


class stash:  # a command, which reads as a verb
    """``yield stash(name, tensor)``: put a tensor, or None, on the way to who pops it."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name, self.tensor = name, tensor


class pop:
    """``tensor = yield pop(name)``: take what an earlier layer stashed."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """A layer with skips; `skippable` makes subclasses of this.

    Attributes
    ----------
    module
        The layer as it was written.
    namespaces
        Of those names that were isolated.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: of the layer its state, since its class has lost its name."""
        others = {name: x for name, x in self._modules.items() if name != "module"}
        return {**self.__dict__, "_modules": others, "module": self.module.__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `__getstate__` returned."""
        inner = self.module_cls.__new__(self.module_cls)
        inner.__setstate__(state["module"])
        rest = {name: x for name, x in state.items() if name != "module"}
        super().__setstate__(rest)  # type: ignore[no-untyped-call]
        self._modules["module"] = inner

    def stashable(self) -> list[Key]:
        """Return the skips that it stashes, by name."""
        return [self._key(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[Key]:
        """Return the skips that it pops, by name."""
        return [self._key(name) for name in sorted(self.poppable_names)]

    def _key(self, name: str) -> Key:
        return self.namespaces.get(name), name

    def isolate(self, namespace: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put names into a namespace, so that others may use them too; return this layer.

        Parameters
        ----------
        namespace
            That of the layer at the other end, too.
        only
            Some of the names; by default all that it stashes and pops.
        """
        known = self.stashable_names | self.poppable_names
        names = known if only is None else frozenset(only)
        if not names <= known:
            raise SkipError(
                f"{self} has no skip {', '.join(map(repr, sorted(names - known)))} to isolate; it "
                f"declares {', '.join(map(repr, sorted(known))) or 'none'}"
            )
        self.namespaces.update(dict.fromkeys(names, namespace))
        return self

    def forward(self, input: Tensor | tuple[Tensor, ...]) -> Any:
        """Run the layer, and carry out its commands.

        Raises
        ------
        SkipError
            For a name that was not declared, or was and is not used, and for a skip that nobody
            has stashed.
        """
        shelf = _LOCAL.shelf
        waiting: dict[str, Tensor | None] = {}
        for key in self.poppable():
            if key not in shelf.skips:
                raise SkipError(f"'{key[1]}' has not been stashed, and {self} pops it")
            waiting[key[1]] = shelf.take(key)
        stashed: dict[str, Tensor | None] = {}
        output = self._run(input, stashed, waiting)
        for verb, names in (
            ("stashed", self.stashable_names - stashed.keys()),
            ("popped", frozenset(waiting)),
        ):
            if names:
                listed = ", ".join(f"'{name}'" for name in sorted(names))
                raise SkipError(f"{listed} must be {verb} by {self}, as declared, but have not")
        for key in self.stashable():
            shelf.put(key, stashed[key[1]])
        return output

    def _run(
        self,
        given: Tensor | tuple[Tensor, ...],
        stashed: dict[str, Tensor | None],
        waiting: dict[str, Tensor | None],
    ) -> Any:
        """Run the layer; fill ``stashed``, empty ``waiting``."""
        running = self.module(given)
        if not isinstance(running, Generator):
            return running
        answer: Tensor | None = None
        while True:
            try:
                command = running.send(answer)
            except StopIteration as end:
                return end.value
            answer = None
            if isinstance(command, stash):
                if command.name not in self.stashable_names:
                    raise SkipError(f"'{command.name}' has not been declared as stashable: {self}")
                stashed[command.name] = command.tensor
            elif isinstance(command, pop):
                if command.name not in waiting:
                    again = command.name in self.poppable_names
                    problem = "popped already" if again else "not been declared as poppable"
                    raise SkipError(f"'{command.name}' has {problem}: {self}")
                answer = waiting.pop(command.name)
            else:
                raise SkipError(
                    f"{self} yielded {command!r}; it may yield stash(name, tensor) and pop(name)"
                )


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Return a decorator for modules whose ``forward`` yields `stash` and `pop`.

    The module works with and without a pipeline around it. Every skip has one layer that stashes
    it and one later layer that pops it; `verify_skippables` checks that.

    Parameters
    ----------
    stash, pop
        Names of all skips that it stashes, and pops.

    Examples
    --------
    >>> import torch
    >>> from pipeexec import skip
    >>> @skip.skippable(stash=["early"])
    ... class First(torch.nn.Module):
    ...     def forward(self, x):
    ...         yield skip.stash("early", x)
    ...         return 2 * x
    >>> @skip.skippable(pop=["early"])
    ... class Last(torch.nn.Module):
    ...     def forward(self, x):
    ...         early = yield skip.pop("early")
    ...         return x + early
    >>> torch.nn.Sequential(First(), torch.nn.Tanh(), Last())(torch.zeros(2))
    tensor([0., 0.])
    """
    for name, value in (("stash", stash), ("pop", pop)):
        if isinstance(value, str):
            raise SkipError(f"{name} takes names in a list, got {value!r}; write [{value!r}]")
    names = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def decorate(module: type[nn.Module]) -> type[Skippable]:
        attributes = {
            "module_cls": module, "__doc__": module.__doc__, "__module__": module.__module__,
            "__qualname__": module.__qualname__, **names,
        }  # fmt: skip
        return type(module.__name__, (Skippable,), attributes)

    return decorate


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip is stashed once, and popped once, later.

    Raises
    ------
    SkipError
        Naming every layer and every skip of which that is not so.
    """
    wrongs: list[str] = []
    open_, done = set[Key](), set[Key]()
    for name, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        both = layer.stashable_names & layer.poppable_names
        wrongs += [f"'{name}' declared '{x}' both as stashable and as poppable" for x in both]
        for key in layer.poppable():
            if key[1] in both:
                continue
            if key in done:
                wrongs.append(_again(name, key, "poppable"))
            elif key not in open_:
                wrongs.append(f"'{name}' declared '{key[1]}' as poppable but it was not stashed")
            else:
                open_.remove(key)
                done.add(key)
        for key in layer.stashable():
            if key[1] in both:
                continue
            if key in open_ | done:
                wrongs.append(_again(name, key, "stashable"))
            else:
                open_.add(key)
    wrongs += [f"no module declared '{name}' as poppable but stashed" for _, name in open_]
    if wrongs:
        listed = "\n".join(f"* {wrong}" for wrong in sorted(wrongs))
        raise SkipError(f"one or more pairs of stash and pop do not match:\n\n{listed}")


def _again(layer: str, key: Key, what: str) -> str:
    return (
        f"'{layer}' redeclared '{key[1]}' as {what} but not isolated by namespace; give each pair "
        "a Namespace of its own"
    )
