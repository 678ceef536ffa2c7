"""Compare split models with the model itself: equal, refused, silently different, or a bare error.

``python tests/helpers/split_verdicts.py`` prints a row for each model of `tricky_models`, with
counts over `CONFIGURATIONS`. ``--first 2`` runs the first two of them, ``--all`` every
configuration, ``--group state`` one group, ``--seeds 100`` random models of `random_programs`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tricky_models import CASES, Case

import pipeexec as px
import pipesim as ps
from pipeexec.devices.thread_settings import one_thread
from pipeexec.nesting import call_arguments, leaves, mapped
from pipesim.errors import PipeError, StageError
from pipesim.ops import Op

_SEED, _STEPS, _MICROBATCHES, _SAMPLES = 3, 2, 4, 2
#: Attributes that every module has.
_OF_MODULES = frozenset(vars(nn.Module())) | {"training"}
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs")))


class Configuration(NamedTuple):
    """Stages, and how a step runs them."""

    n_stages: int
    schedule: str = "1f1b"
    recompute: str = "never"
    n_replicas: int = 1
    way: Literal["modules", "graph"] = "modules"
    chain: bool = True

    def __str__(self) -> str:
        texts = [f"{self.n_stages} stages", self.schedule]
        texts += ["recompute"] * (self.recompute == "always")
        texts += [f"{self.n_replicas} replicas"] * (self.n_replicas > 1)
        texts += ["graph"] * (self.way == "graph") + ["edges"] * (not self.chain)
        return ", ".join(texts)


def _schedule(configuration: Configuration) -> ps.Schedule:
    """Return a schedule of so many stages.

    Raises
    ------
    PipeError
        If there is none.
    """
    n, name = configuration.n_stages, configuration.schedule
    if name == "interleaved_1f1b":
        n_chunks = 2 if n % 2 == 0 else n
        return ps.schedule(name, n // n_chunks, _MICROBATCHES, n_chunks=n_chunks)
    return ps.schedule(name, n // 2 if name == "dualpipev" else n, _MICROBATCHES)


@cache
def _lowered(
    configuration: Configuration,
    tied: tuple[tuple[int, ...], ...] = (),
    edges: tuple[tuple[int, int], ...] = (),
) -> ps.TaskGraph:
    placement = ps.Placement(range(configuration.n_stages), edges=edges)
    return ps.lower(
        ps.order_by(placement, _MICROBATCHES) if edges else _schedule(configuration),
        recompute=configuration.recompute, n_replicas=configuration.n_replicas, tied=tied,
    )  # fmt: skip


def configurations() -> list[Configuration]:
    """Return all configurations that there are."""
    result = []
    for n in (2, 3, 4):
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "dualpipev", "chimera"):
            for recompute in ("never", "always"):
                for n_replicas in (1, 2):
                    configuration = Configuration(n, schedule, recompute, n_replicas)
                    try:
                        graph = _lowered(configuration)
                    except PipeError:
                        continue
                    if graph.n_stages == n:
                        result.append(configuration)
    return result


#: Configurations of which every run of the tests takes some for each model.
CONFIGURATIONS = (
    Configuration(2),
    Configuration(4),
    Configuration(4, chain=False),
    Configuration(3, "gpipe", "always"),
    Configuration(4, "zb_h1"),
    Configuration(2, "1f1b", "never", 2),
    Configuration(4, "interleaved_1f1b"),
    Configuration(4, "1f1b", "always"),
    Configuration(2, "chimera"),
)


def output_loss(output: Any, target: Tensor) -> Tensor:
    """Return a loss of all tensors and numbers of a nested output."""
    total = target.mean()
    for index, (_, value) in enumerate(leaves(output)):
        if isinstance(value, Tensor) and value.numel():
            weights = torch.cos(torch.arange(value.numel())).view(value.shape)
            total = total + ((value - 0.1 * (index + 1)) ** 2 * (1 + 0.5 * weights)).mean()
        elif isinstance(value, (int, float)):
            total = total + (index + 1) * value
    return total


def verdict(case: Case, configuration: Configuration) -> str:
    """Train a model in two steps with and without a split, and compare.

    The model runs the micro-batches one by one. Each replica has a model of its own, which takes
    the parameters and buffers of the first one at the beginning of a step.

    Compared are:

    - the model before and after `pipeexec.split`: parameters, buffers, attributes, modes, hooks and
      the states of random numbers;
    - losses of both steps;
    - parameters, gradients, buffers and attributes of the model after the steps;
    - the model in a checkpoint, if it has more than parameters of blocks;
    - the loss in evaluation mode.

    Returns
    -------
    str
        - ``"equal"``;
        - ``"refused: ..."`` with the error of `pipesim.errors`, or that of a random model itself;
        - ``"SILENT: ..."`` with the first difference of each of these;
        - ``"BARE: ..."`` with an error of another kind, also if a `StageError` has it as its cause.
    """
    with _settings():
        try:
            expected = _train_whole(case, _orders(configuration))
        except RuntimeError as error:
            if case.group != "random":
                raise
            return f"refused: by the model itself: {str(error).splitlines()[0]:.300}"
        try:
            observed = _train_split(case, configuration)
        except Exception as error:
            return _describe_error(error)
    differences = [
        _difference(observed[key], expected[key], case.tolerance, key) for key in expected
    ]
    text = "; ".join(filter(None, differences))
    return f"SILENT: {text}" if text else "equal"


def is_right(text: str) -> bool:
    """Return whether a verdict is one that a split may have."""
    return text == "equal" or text.startswith("refused: ")


@contextmanager
def _settings() -> Iterator[None]:
    """Compute in 64 bits, without warnings; restore the states of random numbers at the end."""
    dtype, states = torch.get_default_dtype(), (random.getstate(), np.random.get_state())  # noqa: NPY002
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng([]):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(dtype)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _seed() -> None:
    torch.default_generator.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)  # noqa: NPY002


def _make(case: Case) -> nn.Module:
    _seed()
    return case.make()


def _batch(case: Case, n: int, seed: int) -> Any:
    return case.batch(n, torch.Generator().manual_seed(seed))


def _targets(n: int) -> Tensor:
    return torch.linspace(0, 1, n)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that changes a parameter only if it has a gradient, even of zeros."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


@cache
def _orders(configuration: Configuration) -> list[list[int]]:
    """Return the micro-batches of each replica, in the order of their forwards.

    Data-parallel replicas have equal numbers of micro-batches, but each its share of the batch.
    """
    graph = _lowered(configuration)
    orders: list[list[int]] = [[] for _ in range(graph.n_replicas)]
    for task in map(graph.task, range(len(graph))):
        if task.op == Op.F and task.stage == 0:
            orders[task.replica].append(task.microbatch or 0)
    shares: Counter[int] = Counter()
    for order in orders:
        own = list(order)
        order[:] = [shares[number] * graph.n_microbatches + number for number in own]
        shares.update(own)
    return orders


def _train_whole(case: Case, orders: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the results of the unsplit model."""
    models = [_make(case) for _ in orders]
    model, m = models[0], sum(map(len, orders))
    optimizer = _optimizer(model.parameters())
    _seed()
    results: dict[str, Any] = {"split": "no change"}
    with one_thread():
        for step in range(_STEPS):
            optimizer.zero_grad()
            for other in models[1:]:
                other.zero_grad()
                _copy_state(model, other)
            losses = _run(case, models, orders, step, backward=True)
            for other in models[1:]:
                _add_gradients(model, other)
            optimizer.step()
            results[f"loss of step {step}"] = float(sum(losses)) / m
        results["model"] = _state(model)
        if _has_checkpoint(case, model):
            results["checkpoint"] = _cloned(model.state_dict())
        for other in models:
            if other is not model:
                _copy_state(model, other)
            other.eval()
        with torch.no_grad():
            losses = _run(case, models, orders, _STEPS, backward=False)
        results["loss in evaluation"] = float(sum(losses)) / m
    return results


def _has_checkpoint(case: Case, model: nn.Module) -> bool:
    """Return whether to compare a checkpoint: others have parameters of blocks alone."""
    return case.group in ("state", "construction", "hooks") or any(True for _ in model.buffers())


def _run(
    case: Case,
    models: Sequence[nn.Module],
    orders: Sequence[Sequence[int]],
    step: int,
    *,
    backward: bool,
) -> list[Tensor]:
    """Return the losses of the micro-batches."""
    m = sum(map(len, orders))
    inputs, targets = _batch(case, m * _SAMPLES, step), _targets(m * _SAMPLES)
    losses = []
    for model, own in zip(models, orders, strict=True):
        for index in own:
            part = slice(index * _SAMPLES, (index + 1) * _SAMPLES)
            args, kwargs = call_arguments(_part(inputs, part))
            loss = output_loss(model(*args, **kwargs), targets[part])
            if backward and loss.requires_grad:
                (loss / m).backward()
            losses.append(loss.detach())
    return losses


def _part(batch: Any, part: slice) -> Any:
    return mapped(lambda x: x[part].clone() if isinstance(x, Tensor) else x, batch)


def _copy_state(model: nn.Module, other: nn.Module) -> None:
    """Give a replica the parameters and buffers of the first one."""
    with torch.no_grad():
        for rows in (nn.Module.named_parameters, nn.Module.named_buffers):
            values = dict(rows(model))
            for name, tensor in rows(other):
                if name in values and not torch.equal(tensor, values[name]):  # it may be expanded
                    tensor.copy_(values[name].detach().clone())


def _add_gradients(model: nn.Module, other: nn.Module) -> None:
    gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _train_split(case: Case, configuration: Configuration) -> dict[str, Any]:
    """Return the results of the split model."""
    model = _make(case)
    _seed()
    before, objects = _state(model), _objects(model)
    sample = _batch(case, _SAMPLES, 99)
    stages = px.split(
        model,
        configuration.n_stages,
        sample=sample,
        way=configuration.way,
        chain=configuration.chain,
    )
    change = _difference(_state(model), before, 0.0) or _replaced(model, objects)
    results: dict[str, Any] = {"split": change or "no change"}
    graph = _lowered(configuration, stages.tied_stages, stages.edges)
    n = sum(map(len, _orders(configuration))) * _SAMPLES
    _seed()
    with px.Pipeline(
        stages, graph, ["cpu"] * graph.n_devices, output_loss, _optimizer,
        pin_threads=False, timeout=20.0,
    ) as pipeline:  # fmt: skip
        for step in range(_STEPS):
            result = pipeline.step(_batch(case, n, step), _targets(n))
            results[f"loss of step {step}"] = float(result.loss)
        results["model"] = _state(model)
        if _has_checkpoint(case, model):
            with tempfile.TemporaryDirectory() as folder:
                path = px.save_checkpoint(pipeline, Path(folder) / "checkpoint")
                results["checkpoint"] = _cloned(px.read_checkpoint(path)["model"])
        evaluation = pipeline.evaluate(_batch(case, n, _STEPS), _targets(n))
        results["loss in evaluation"] = float(evaluation.loss)
    return results


def _state(model: nn.Module) -> dict[str, Any]:
    """Return parameters, gradients, buffers, attributes, modes and numbers of hooks by name.

    The states of global random numbers are equal before and after a split, but not after steps;
    `_train_whole` draws other numbers than a pipeline.
    """
    result: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        result[f"parameter {name}"] = parameter.detach().clone()
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        result[f"gradient of {name}"] = gradient.detach().clone()
    for name, buffer in model.named_buffers():
        result[f"buffer {name}"] = buffer.detach().clone()
    for name, module in model.named_modules():
        where = f"of {name}" if name else "of the model"
        result[f"mode {where}"] = module.training
        result[f"hooks {where}"] = {key: len(getattr(module, key) or ()) for key in _HOOKS}
        for key, value in vars(module).items():
            if key not in _OF_MODULES:
                result[f"attribute {key} {where}"] = _plain(value)
    return result


def _objects(model: nn.Module) -> dict[str, int]:
    """Return the identities of parameters, modules and random states by name."""
    result = {f"parameter {name}": id(p) for name, p in model.named_parameters()}
    result |= {f"module {name}": id(module) for name, module in model.named_modules()}
    result["random numbers of torch"] = hash(torch.get_rng_state().numpy().tobytes())
    result["random numbers of Python"] = hash(random.getstate())
    result["random numbers of numpy"] = hash(np.random.get_state()[1].tobytes())  # noqa: NPY002
    return result


def _replaced(model: nn.Module, objects: dict[str, int]) -> str | None:
    """Return the first object that is another one than before."""
    after = _objects(model)
    names = [name for name in objects | after if objects.get(name) != after.get(name)]
    return f"{names[0]} is another one" if names else None


def _plain(value: Any) -> Any:
    """Return a value of an attribute as numbers, texts, copies of tensors, and lists of these."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return type(value).__name__


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in state.items()}


def _difference(observed: Any, expected: Any, tolerance: float, where: str = "") -> str | None:
    """Return the first difference of nested values, or None."""
    if isinstance(expected, dict) and isinstance(observed, dict):
        for key in [*expected, *(key for key in observed if key not in expected)]:
            path = f"{where}: {key}" if where else str(key)
            if key not in observed or key not in expected:
                return f"{path} is {'missing' if key in expected else 'added'}"
            difference = _difference(observed[key], expected[key], tolerance, path)
            if difference:
                return difference
        return None
    if isinstance(expected, list) and isinstance(observed, list):
        if len(expected) != len(observed):
            return f"{where} has {len(observed)} elements, not {len(expected)}"
        rows = enumerate(zip(observed, expected, strict=True))
        differences = (_difference(a, b, tolerance, f"{where}[{k}]") for k, (a, b) in rows)
        return next(filter(None, differences), None)
    if isinstance(expected, Tensor) and isinstance(observed, Tensor):
        return _tensor_difference(observed, expected, tolerance, where)
    if isinstance(expected, float) and isinstance(observed, float):
        equal = abs(observed - expected) <= tolerance * max(1.0, abs(expected))
    else:
        equal = bool(observed == expected)
    return None if equal else f"{where} is {observed!r:.80}, not {expected!r:.80}"


def _tensor_difference(a: Tensor, b: Tensor, tolerance: float, where: str) -> str | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{where} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
    if a.numel() == 0:
        return None
    largest = float((a.double() - b.double()).abs().max())
    scale = max(1.0, float(b.double().abs().max()))
    return None if largest <= tolerance * scale else f"{where} differs by {largest:.3g}"


def _describe_error(error: Exception) -> str:
    """Return the verdict on an error; that of a stage is judged by its cause."""
    cause: BaseException = error
    while isinstance(cause, StageError) and cause.__cause__ is not None:
        cause = cause.__cause__
    lines = str(cause).strip().splitlines() or [""]
    if isinstance(cause, PipeError):
        return f"refused: {type(cause).__name__}: {lines[0]:.300}"
    wrapped = "" if cause is error else f"{type(error).__name__} by "
    return f"BARE: {wrapped}{type(cause).__name__}: {lines[0]:.300}"


def _print_table(cases: Sequence[Case], chosen: Callable[[int], Sequence[Configuration]]) -> None:
    """Print a row a model, and the sums."""
    kinds = ("equal", "refused", "SILENT", "BARE")
    totals: Counter[str] = Counter()
    width = max(len(case.name) for case in cases)
    print(f"{'model':{width}}  {'  '.join(f'{kind:>7}' for kind in kinds)}  messages")
    for index, case in enumerate(cases):
        texts = {x: verdict(case, x) for x in chosen(index)}
        counts = Counter(text.partition(":")[0] for text in texts.values())
        totals += counts
        row = "  ".join(f"{counts[kind]:7}" for kind in kinds)
        messages = {text: x for x, text in reversed(texts.items()) if text != "equal"}
        notes = "; ".join(f"[{x}] {text:.150}" for text, x in list(messages.items())[:2])
        print(f"{case.name:{width}}  {row}  {notes}", flush=True)
    print(f"{'all':{width}}  {'  '.join(f'{totals[kind]:7}' for kind in kinds)}")


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every configuration")
    parser.add_argument("--first", type=int, default=len(CONFIGURATIONS), metavar="N")
    parser.add_argument("--group", default="", help="beginning of the names of models")
    parser.add_argument("--way", default="modules", help="way to cut")
    parser.add_argument("--seeds", type=int, default=0, help="number of random models instead")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES.values() if case.name.startswith(options.group)]
    if options.seeds:
        from random_programs import random_case

        cases = [random_case(seed) for seed in range(options.seeds)]
    everything = configurations() if options.all else list(CONFIGURATIONS[: options.first])
    everything = [x._replace(way=options.way) for x in everything]
    if options.seeds and not options.all:
        _print_table(cases, lambda index: [everything[index % len(everything)]])
    else:
        _print_table(cases, lambda _: everything)


if __name__ == "__main__":
    main(sys.argv[1:])
