"""Skip connections by name: one layer stashes a tensor, a later one pops it.

Layers of a sequential module pass on only their output. A tensor for a later layer would have to
pass through every layer between. A skip bypasses them: in a pipeline it goes straight from the
stage that stashes it to the stage that pops it (a portal, torchgpipe, arXiv 2004.09910, section
3.3).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from pipesim.errors import SkipError


class Namespace:
    """A namespace for the names of skips; see `Skippable.isolate`."""

    def __init__(self) -> None:
        self.id = uuid.uuid4()  # a copy of a module is in the same namespaces

    def __repr__(self) -> str:
        return f"<Namespace {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


#: A skip: its namespace, or None, and its name.
Key = tuple[Namespace | None, str]


class Shelf:
    """Skips that were stashed and not popped yet."""

    def __init__(self, skips: Mapping[Key, Tensor | None] | None = None) -> None:
        self.skips: dict[Key, Tensor | None] = dict(skips or {})

    def put(self, key: Key, tensor: Tensor | None) -> None:
        """Keep a skip."""
        self.skips[key] = tensor

    def take(self, key: Key) -> Tensor | None:
        """Return and remove a skip."""
        return self.skips.pop(key)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.shelf = Shelf()


_STATE = _ThreadState()


class use_shelf:  # a context manager, entered at every forward: without a generator
    """Let layers that this thread runs stash on a shelf, and pop from it."""

    __slots__ = ("_before", "_shelf")

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def __enter__(self) -> None:
        self._before, _STATE.shelf = _STATE.shelf, self._shelf

    def __exit__(self, *_: object) -> None:
        _STATE.shelf = self._before


class stash:  # a command, which reads as a verb
    """``yield stash(name, tensor)``: stash a tensor, or None, for a later layer to pop."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name, self.tensor = name, tensor


class pop:
    """``tensor = yield pop(name)``: take the tensor that an earlier layer stashed."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """A layer with skips; `skippable` makes its subclasses."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}  # of isolated names, by name

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: pickle cannot find the layer's class, only its state."""
        others = {name: x for name, x in self._modules.items() if name != "module"}
        return {**self.__dict__, "_modules": others, "module": self.module.__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state that `__getstate__` returned."""
        inner = self.module_cls.__new__(self.module_cls)
        inner.__setstate__(state["module"])
        rest = {name: x for name, x in state.items() if name != "module"}
        super().__setstate__(rest)  # type: ignore[no-untyped-call]
        self._modules["module"] = inner

    def stashable(self) -> list[Key]:
        """Return the skips that the layer stashes, sorted by name."""
        return [self._key(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[Key]:
        """Return the skips that the layer pops, sorted by name."""
        return [self._key(name) for name in sorted(self.poppable_names)]

    def _key(self, name: str) -> Key:
        return self.namespaces.get(name), name

    def isolate(self, namespace: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put names into a namespace, so that other layers may use them too; return this layer.

        Parameters
        ----------
        namespace
            The namespace, shared with the layer at the other end.
        only
            Names to isolate; by default all names that the layer stashes and pops.
        """
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else frozenset(only)
        if not names <= declared:
            raise SkipError(
                f"{self} has no skip {', '.join(map(repr, sorted(names - declared)))} to isolate; "
                f"it declares {', '.join(map(repr, sorted(declared))) or 'none'}"
            )
        self.namespaces.update(dict.fromkeys(names, namespace))
        return self

    def forward(self, input: Tensor | tuple[Tensor, ...]) -> Any:
        """Run the layer and its `stash` and `pop` commands."""
        shelf = _STATE.shelf
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
        values: Tensor | tuple[Tensor, ...],
        stashed: dict[str, Tensor | None],
        waiting: dict[str, Tensor | None],
    ) -> Any:
        """Run the layer; fill ``stashed``, empty ``waiting``."""
        running = self.module(values)
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

    The module works with and without a pipeline. Every skip has one layer that stashes it and one
    later layer that pops it; `verify_skippables` checks that.

    Parameters
    ----------
    stash, pop
        Names of all skips that the module stashes, and of all that it pops.

    Examples
    --------
    >>> import torch
    >>> from pipeexec.gpipe import skip
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
    """Raise `SkipError` unless every skip is stashed once, and popped once by a later layer."""
    problems: list[str] = []
    open_, done = set[Key](), set[Key]()
    for name, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        both = layer.stashable_names & layer.poppable_names
        problems += [f"'{name}' declared '{x}' both as stashable and as poppable" for x in both]
        for key in layer.poppable():
            if key[1] in both:
                continue
            if key in done:
                problems.append(_redeclared(name, key, "poppable"))
            elif key not in open_:
                problems.append(f"'{name}' declared '{key[1]}' as poppable but it was not stashed")
            else:
                open_.remove(key)
                done.add(key)
        for key in layer.stashable():
            if key[1] in both:
                continue
            if key in open_ | done:
                problems.append(_redeclared(name, key, "stashable"))
            else:
                open_.add(key)
    problems += [f"no module declared '{name}' as poppable but stashed" for _, name in open_]
    if problems:
        listed = "\n".join(f"* {problem}" for problem in sorted(problems))
        raise SkipError(f"one or more pairs of stash and pop do not match:\n\n{listed}")


def _redeclared(layer: str, key: Key, kind: str) -> str:
    return (
        f"'{layer}' redeclared '{key[1]}' as {kind} but not isolated by namespace; give each pair "
        "its own Namespace"
    )
