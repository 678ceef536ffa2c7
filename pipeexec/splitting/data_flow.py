"""Which calls of uncut modules need which values: follow tensors through one forward.

Every operation outside of uncut modules is seen by a dispatch mode. A tensor has the origins of all
tensors that it was computed from. Stages run these operations again on the values that they
receive, so that a value travels as it was when it was returned, whatever is written to it later.

Two kinds of values are needed by all stages whose code runs so far: those that the forward reads as
numbers, shapes or indices, and those of whose shape nothing is known without them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from pipeexec.nesting import tensors_in, with_tensors
from pipeexec.splitting.model_state import attributes, contents
from pipeexec.splitting.operations import (
    READERS,
    present_line,
    read_tensors,
    storage_of,
    written_tensors,
)
from pipeexec.splitting.stand_in import to_meta
from pipesim.errors import ArgumentError

#: Readers by which the forward may also write, unseen.
_WRITERS = frozenset({
    Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.storage,
    Tensor.untyped_storage,
})  # fmt: skip
_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})
_SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__
_VALUES = frozenset({"input", "output", "argument"})
#: Kinds of sources whose first use is named in messages.
_PLACED = frozenset({"inside", "parameter", "random"})


class Mode(NamedTuple):
    """Mode of a forward: whether it is for training, and whether autograd records it."""

    training: bool
    grad: bool

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluation"
        return f"{mode} mode {'with' if self.grad else 'without'} gradients"


class Source(NamedTuple):
    """Origin of a value.

    Its kind is one of these:

    - ``"input"``: a tensor of the model's arguments;
    - ``"output"``: a tensor that a call returns;
    - ``"argument"``: a tensor of a call's arguments that it changes, as it is afterwards;
    - ``"parameter"``, ``"buffer"``: one that the model has outside of calls;
    - ``"inside"``: a tensor that a call made and did not return;
    - ``"random"``: random numbers outside of uncut modules.

    The number is that of the input, call or random operation, the position that of the tensor in
    the call's output or arguments.
    """

    kind: str
    number: int = 0
    position: int = 0
    name: str = ""


Sources = frozenset[Source]
_NONE: Sources = frozenset()


class Call(NamedTuple):
    """One call of an uncut module; positions are those of tensors."""

    name: str
    needs: Sources  # origins of the tensors that it takes
    changed: frozenset[int] = frozenset()  # positions of arguments that it changes in place
    #: Positions in its output that are changed arguments, and of these.
    same: frozenset[tuple[int, int]] = frozenset()
    #: Positions in its output that are there before, and the first position of each.
    repeated: frozenset[tuple[int, int]] = frozenset()
    constant: frozenset[int] = frozenset()  # positions in its output that need no gradient


class Record(NamedTuple):
    """Arguments and result of a call, without data."""

    arguments: Any
    result: Any


class Read(NamedTuple):
    """Values that the forward reads outside of uncut modules."""

    before: int  # number of calls that have begun
    sources: Sources
    place: str  # line of the forward


class StateWrite(NamedTuple):
    """A buffer or a parameter that the forward changes outside of uncut modules; see `Read`."""

    source: Source
    before: int
    sources: Sources  # of the new value
    place: str

    @property
    def module(self) -> str:
        """Qualified name of the module that has it."""
        return self.source.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """Name in this module."""
        return self.source.name.rpartition(".")[2]


class Aliases(NamedTuple):
    """Values that share memory: one is written to, another read later; and the line that writes."""

    sources: Sources
    place: str


class DataFlow(NamedTuple):
    """Data flow of one forward."""

    calls: tuple[Call, ...]
    output: Sources  # of the output, and of tensors that the model keeps as attributes
    reads: tuple[Read, ...] = ()
    written: Sources = _NONE  # values to whose memory the forward writes after they were returned
    aliases: tuple[Aliases, ...] = ()
    state: tuple[StateWrite, ...] = ()
    #: Modules, and attributes that they have in the middle of the forward alone: of those around
    #: calls any, of others the mode.
    transient: frozenset[tuple[str, str]] = frozenset()
    ran: frozenset[str] = frozenset()  # modules around calls that the forward calls
    integers: Sources = _NONE  # and booleans, of which a missing one would not show as NaN
    drawing: frozenset[str] = frozenset()  # modules that are no calls, and draw random numbers
    records: tuple[Record, ...] = ()
    #: Lines of the forward that first use tensors inside calls, parameters and random numbers.
    places: Mapping[Source, str] = MappingProxyType({})


def merged(first: DataFlow, second: DataFlow) -> DataFlow:
    """Return the data flow of either of two forwards with the same calls; records of the first."""
    calls = tuple(
        Call(
            a.name, a.needs | b.needs, a.changed | b.changed, a.same & b.same,
            a.repeated & b.repeated,
            a.constant & b.constant,
        )
        for a, b in zip(first.calls, second.calls, strict=True)
    )  # fmt: skip
    return DataFlow(
        calls,
        first.output | second.output,
        tuple(dict.fromkeys((*first.reads, *second.reads))),
        first.written | second.written,
        tuple(dict.fromkeys((*first.aliases, *second.aliases))),
        tuple(dict.fromkeys((*first.state, *second.state))),
        first.transient | second.transient,
        first.ran | second.ran,
        first.integers | second.integers,
        first.drawing | second.drawing,
        first.records,
        {**second.places, **first.places},
    )


class _Follow(TorchDispatchMode):
    """Keeps the sources of each tensor while operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.records: list[Record] = []
        self._arguments_before: Any = None
        self.inside: Source | None = None
        self.sources = WeakIdKeyDictionary()
        self.draws = count()
        self.reads: list[Read] = []
        self.state: list[StateWrite] = []
        self.aliases: list[Aliases] = []
        self.values_written: set[Source] = set()
        self.is_noting = False
        #: Value that a tensor is, or is a view of; none for tensors that the model's code made.
        self._views = WeakIdKeyDictionary()
        #: Storages that were written to, with the values by which, and the lines.
        self._writers: dict[int, dict[Source | None, str]] = {}
        #: Storages that were written to, each with a tensor that keeps it, and what was written.
        self.written: dict[int, tuple[Tensor, Sources]] = {}
        #: Storages from outside of calls, each with a reference, and the values that are in it.
        self._values: dict[int, tuple[StorageWeakRef, set[Source]]] = {}
        #: Storages of the arguments of the call that runs, with the positions of these.
        self._arguments: dict[int, list[int]] = {}
        self._changed: set[int] = set()
        #: Buffers outside of calls: their module, key and tensor, by their names.
        self._buffers: dict[str, tuple[nn.Module, str, Tensor | None]] = {}
        #: Modules outside of calls, by their names, and their attributes before the forward.
        self._around: dict[str, tuple[nn.Module, dict[str, Any]]] = {}
        #: Tensors that these have as attributes, by their storages, and those that are used.
        self._kept_before: dict[int, Tensor] = {}
        self.used: set[int] = set()
        self._training: dict[str, tuple[nn.Module, bool]] = {}  # modes before the forward
        self.transient: set[tuple[str, str]] = set()
        self.ran: set[str] = set()
        self.integers: set[Source] = set()
        self.places: dict[Source, str] = {}
        #: Modules that run and are no calls though they are not cut, and those of them that draw.
        self.running: list[str] = []
        self.drawing: set[str] = set()
        self._random_states = _random_states()

    def sources_of(self, values: Iterable[Tensor]) -> Sources:
        """Return the sources of tensors."""
        return frozenset().union(*(self._sources_of_one(x) for x in values))

    def _sources_of_one(self, tensor: Tensor) -> Sources:
        own: Sources = self.sources.get(tensor, _NONE)
        if not self.written:
            return own
        key, value = storage_of(tensor), self._views.get(tensor)
        for writer, place in self._writers.get(key, {}).items():
            values = frozenset(x for x in (writer, value) if x is not None and x.kind in _VALUES)
            if writer != value and values:
                self.aliases.append(Aliases(values, place))
        return own | self.written.get(key, (tensor, _NONE))[1]

    def begin_value(self, tensor: Tensor, source: Source) -> None:
        """Note that a tensor is a value: an input, a parameter, or what a call returns."""
        self.sources[tensor] = frozenset({source})
        self._views[tensor] = source
        if source.kind in _VALUES and not (tensor.is_floating_point() or tensor.is_complex()):
            self.integers.add(source)
        self._values_in(tensor).add(source)

    def _values_in(self, tensor: Tensor) -> set[Source]:
        key = storage_of(tensor)
        if key not in self._values:  # the reference keeps the number from being given again
            self._values[key] = StorageWeakRef(tensor.untyped_storage()), set()
        return self._values[key][1]

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Note which of the attributes that modules had before share memory with these tensors."""
        if self._kept_before:
            self.used.update(self._kept_before.keys() & map(storage_of, tensors))

    def read(self, tensors: Iterable[Tensor]) -> None:
        """Note that the forward reads values of tensors."""
        self.use(tensors)
        if self.inside is not None or self.is_noting:
            return
        self.is_noting = True
        sources = self.sources_of(tensors)
        self.is_noting = False
        if sources:
            self._note_places(sources)
            self.reads.append(Read(len(self.calls), sources, present_line()))

    def _note_places(self, sources: Sources) -> None:
        """Note the line that uses sources for the first time."""
        for source in sources - self.places.keys():
            if source.kind in _PLACED:
                self.places[source] = present_line()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        written = written_tensors(func, args, kwargs)
        results, arguments = tensors_in(output), tensors_in((args, kwargs))
        self.use(arguments)
        if self.inside is None:
            sources = self.sources_of(arguments)
            if torch.Tag.nondeterministic_seeded in func.tags:
                name = func.name().removeprefix("aten::")
                sources |= {Source("random", next(self.draws), name=name)}
                self.drawing.update(self.running[-1:])
            self._note_places(sources)
            self.read(read_tensors(func, args, kwargs))
            views = {storage_of(x): self._views.get(x) for x in reversed(arguments)}
            for tensor in results:  # may be views of values
                self._values_in(tensor)
                self._views[tensor] = views.get(storage_of(tensor))
        else:
            sources = frozenset({self.inside})
        for tensor in written:  # may be a view of others
            self._write(tensor, sources)
        for tensor in results:
            self.sources[tensor] = sources
        return output

    def may_write(self, tensor: Tensor) -> None:
        """Note that the forward may write to a tensor, of which no operation tells."""
        if self.inside is None and not self.is_noting:
            self.is_noting = True
            self._note_written(storage_of(tensor), _NONE)
            self.is_noting = False

    def set_data(self, tensor: Tensor, data: Tensor) -> None:
        """Note that a tensor gets the memory of another one."""
        self.is_noting = True
        sources = self.sources_of([tensor, data])
        self._note_written(storage_of(tensor), self.sources_of([data]))
        self.is_noting = False
        self.sources[tensor] = sources

    def _write(self, tensor: Tensor, sources: Sources) -> None:
        """Note that a tensor's memory has new contents."""
        key = storage_of(tensor)
        if self.inside is not None and key in self._arguments:
            self._changed.update(self._arguments[key])
            return
        if self.inside is not None and key not in self._values:
            return  # made by the call
        before = self.written.get(key, (tensor, _NONE))[1]
        self.written[key] = tensor, before | sources
        if self.inside is None:
            self._writers.setdefault(key, {})[self._views.get(tensor)] = present_line()
            self._note_written(key, sources)

    def _note_written(self, key: int, sources: Sources) -> None:
        """Note which values share memory that is written to."""
        sharing = self._values[key][1] if key in self._values else set()
        values = frozenset(x for x in sharing if x.kind in _VALUES)
        self.values_written |= values
        for source in sharing - values:
            now = frozenset(x for x in sources if x != source)
            self.state.append(StateWrite(source, len(self.calls), now, present_line()))

    def watch_around(self, model: nn.Module, calls: Iterable[str]) -> list[RemovableHandle]:
        """Watch which modules around calls run, and which of their attributes are replaced."""
        handles = []
        self._training = {name: (x, x.training) for name, x in model.named_modules()}
        inner = {id(x) for name in calls for x in model.get_submodule(name).modules()}
        for prefix, module in model.named_modules():
            if id(module) in inner:
                continue
            self._around[prefix] = module, _signatures(module)
            kept = (x for x in vars(module).values() if isinstance(x, Tensor))
            self._kept_before |= {storage_of(x): x for x in kept}
            for key, buffer in module._buffers.items():
                self._buffers[f"{prefix}.{key}".lstrip(".")] = module, key, buffer

            def note(*_: Any, name: str = prefix) -> None:
                self.ran.add(name)

            handles.append(module.register_forward_pre_hook(note))
        return handles

    def _note_transient(self) -> None:
        """Note attributes of modules around calls, and modes, that the forward has changed."""
        for name, (module, before) in self._around.items():
            for key, signature in _signatures(module).items():
                if before.get(key) != signature:
                    self.transient.add((name, key))
        for name, (module, training) in self._training.items():
            if module.training != training:
                self.transient.add((name, "training"))

    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors that modules around calls keep as attributes since the forward."""
        for module, before in self._around.values():
            for key, signature in _signatures(module).items():
                if before.get(key) != signature:
                    yield from tensors_in(module.__dict__[key])

    def check_modes(self) -> None:
        """Raise if the forward leaves a module in another mode than it had."""
        for name, (module, training) in self._training.items():
            if module.training != training:
                raise ArgumentError(
                    f"the forward leaves {name or 'the model'!r} in another mode than it had "
                    f"(training={module.training}), and stages that run other code would not; set "
                    "modes outside of the forward, or let it set them back"
                )

    def note_replaced(self) -> None:
        """Note buffers that are other tensors than before."""
        self.is_noting = True
        for name, (module, key, before) in self._buffers.items():
            now = module._buffers.get(key)
            if now is before or now is None:
                continue
            self._buffers[name] = module, key, now
            own = Source("buffer", name=name)
            sources = self.sources_of([now])
            place = f"`self.{key} = ...`"
            self.state.append(StateWrite(own, len(self.calls), sources - {own}, place))
            self.begin_value(now, own)
            self.sources[now] = sources | {own}
        self.is_noting = False

    def check_random_states(self, place: str) -> None:
        """Raise if the code outside of calls has drawn random numbers of Python or numpy."""
        if self._random_states != _random_states():
            raise ArgumentError(
                "the forward draws random numbers of Python or numpy outside of its blocks, before "
                f"{place}, and each stage would draw others; draw them inside of a block"
            )

    def begin_module(self, name: str, *_: object) -> None:
        """Begin a module that is no call; a hook."""
        self.running.append(name)

    def end_module(self, *_: object) -> None:
        """End a module that is no call; a hook."""
        self.running.pop()

    def enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a call; a hook."""
        self.check_random_states(present_line())
        self.note_replaced()
        self.is_noting = True
        tensors = tensors_in((args, kwargs))
        self.calls.append(Call(name, self.sources_of(tensors)))
        self._note_places(self.calls[-1].needs)
        with _disable_current_modes():
            self._arguments_before = to_meta((args, kwargs))
        self._changed.clear()
        self._arguments.clear()
        for position, tensor in enumerate(tensors):
            self._arguments.setdefault(storage_of(tensor), []).append(position)
        self.inside, self.is_noting = Source("inside", len(self.calls) - 1), False

    def leave(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """End a call; return its output, with views of arguments that it returns as they are.

        Else the code's uses of an argument and of the output could not be told apart.
        """
        number = len(self.calls) - 1
        self.is_noting = True
        returned = set(map(id, tensors_in(output)))
        passed = {
            id(x): x.view_as(x)
            for k, x in enumerate(tensors_in((args, kwargs)))
            if id(x) in returned and k not in self._changed
        }
        if passed:
            output = with_tensors(output, [passed.get(id(x), x) for x in tensors_in(output)])
        with _disable_current_modes():
            self.records.append(Record(self._arguments_before, to_meta(output)))
        arguments, same = tensors_in((args, kwargs)), set()
        positions = {id(x): k for k, x in enumerate(arguments)}
        firsts: dict[int, int] = {}
        repeated = set()
        for position, tensor in enumerate(tensors_in(output)):
            key, source = storage_of(tensor), Source("output", number, position)
            if id(tensor) in positions:  # changed: other stages copy the output to the argument
                same.add((position, positions[id(tensor)]))
                self._note_written(key, frozenset({source}))
                self._values_in(tensor).add(source)
                self.sources[tensor] = frozenset({source})
                self.written[key] = tensor, frozenset({source})
                continue
            if (first := firsts.setdefault(id(tensor), position)) != position:
                repeated.add((position, first))
                continue
            if key not in self._values:
                self.written.pop(key, None)
            self.begin_value(tensor, source)
        for position in sorted(self._changed - {argument for _, argument in same}):
            tensor = arguments[position]
            source, key = Source("argument", number, position), storage_of(tensor)
            self._note_written(key, frozenset({source}))
            self._writers.setdefault(key, {})[self._views.get(tensor)] = repr(self.calls[-1].name)
            self.written[key] = tensor, frozenset({source})
            self.sources[tensor] = frozenset({source})
            self._values_in(tensor).add(source)
        changed = frozenset(self._changed - {argument for _, argument in same})
        rows = enumerate(tensors_in(output))
        constant = frozenset(position for position, tensor in rows if not tensor.requires_grad)
        self.calls[-1] = self.calls[-1]._replace(
            changed=changed,
            same=frozenset(same),
            repeated=frozenset(repeated),
            constant=constant,
        )
        self._arguments.clear()
        self._note_transient()
        self._random_states = _random_states()
        self.inside, self.is_noting = None, False
        return output


def _random_states() -> tuple[object, ...]:
    """Return the states of the generators of Python and numpy."""
    state = np.random.get_state(legacy=False)  # noqa: NPY002 - of the user's code
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


def _signatures(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return which objects the attributes of a module are, and those in containers."""
    return {
        key: (id(value), *(id(x) for x in contents(value)))
        for key, value in attributes(module)
        if key not in module._buffers
    }


class _Readers(TorchFunctionMode):
    """Notes reads of tensors that are no operations."""

    def __init__(self, mode: _Follow) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READERS:
            self.mode.read(tensors_in((args, kwargs or {})))
        if func in _WRITERS:
            self.mode.may_write(args[0])
        if func == _SET_DATA and not self.mode.inside:
            self.mode.set_data(*args)
        if func in _HOOKS and not self.mode.inside:
            raise ArgumentError(
                f"the forward gives a tensor a hook outside of its blocks, at {present_line()}, "
                "which several stages would run; register it inside a block"
            )
        return func(*args, **(kwargs or {}))


def follow(
    model: nn.Module,
    uncut: Sequence[str],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    stateful: frozenset[str] = frozenset(),
) -> tuple[DataFlow, tuple[Tensor, ...], set[int]]:
    """Return the data flow of one forward, and the tensors of its output.

    The third result has the storages of the tensors that modules around calls had as attributes
    before the forward, and that it uses.

    Modules of ``uncut`` that have no parameters, draw no random numbers, and are not ``stateful``,
    are not calls: each stage runs them itself.
    """
    mode = _Follow()
    for index, tensor in enumerate(tensors_in((args, kwargs))):
        mode.begin_value(tensor, Source("input", index))
    modules = dict(model.named_modules())
    for kind, tensors in ("parameter", model.named_parameters()), ("buffer", model.named_buffers()):
        for name, tensor in tensors:
            mode.begin_value(tensor, Source(kind, name=name))
    handles = []
    called = [
        name
        for name in uncut
        if any(True for _ in modules[name].parameters())
        or any(isinstance(x, nn.modules.dropout._DropoutNd) for x in modules[name].modules())
        or name in stateful
    ]
    for name in called:
        enter = partial(mode.enter, name)
        handles.append(modules[name].register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(modules[name].register_forward_hook(mode.leave, with_kwargs=True))
    for name in set(uncut) - set(called):
        begin = partial(mode.begin_module, name)
        handles.append(modules[name].register_forward_pre_hook(begin))
        handles.append(modules[name].register_forward_hook(mode.end_module))
    handles += mode.watch_around(model, called)
    try:
        with mode, _Readers(mode):
            output = model(*args, **kwargs)
            mode.note_replaced()
            mode.check_random_states("its end")
            mode.check_modes()
    finally:
        for handle in handles:
            handle.remove()
    mode.use(tensors_in(output))
    needs = mode.sources_of((*tensors_in(output), *mode.kept()))
    flow = DataFlow(
        tuple(mode.calls),
        needs,
        tuple(mode.reads),
        frozenset(mode.values_written),
        tuple(mode.aliases),
        tuple(mode.state),
        frozenset(mode.transient),
        frozenset(mode.ran),
        frozenset(mode.integers),
        frozenset(mode.drawing),
        tuple(mode.records),
        mode.places,
    )
    return flow, tuple(x.detach().clone() for x in tensors_in(output)), mode.used
