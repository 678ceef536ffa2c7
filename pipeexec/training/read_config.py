"""`read_config`: read the TOML file of a training; a record for each section checks its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pipeexec.splitting import Balance
from pipesim.errors import ArgumentError, PipeError, UnknownNameError, suggestion
from pipesim.lowering.recomputes import Recompute
from pipesim.utils.checks import Count, Fraction, Positive, Whole, checked
from pipesim.utils.files import check_path, read_toml

FunctionName = Annotated[str, "the name of a function, such as 'package.module:function'"]
Name = Annotated[str, "a name"]


# Sections: their keys, with types and defaults.


@checked
@dataclass(frozen=True)
class ModelSection:
    """Model and loss."""

    name: Annotated[str, "the name of a demo model"] | None = None
    factory: FunctionName | None = None
    loss: FunctionName | None = None

    def __post_init__(self) -> None:
        _check_one_of(name=self.name, factory=self.factory)


@checked
@dataclass(frozen=True)
class DataSection:
    """Batches to train on, and to evaluate on."""

    text: Annotated[list[Name], "files or patterns, such as ['texts/*.txt']"] | None = None
    factory: FunctionName | None = None
    batch_size: Count | None = None
    context: Count | None = None
    held_out: Fraction = 0.1
    evaluation_batches: Count | None = None

    def __post_init__(self) -> None:
        _check_one_of(text=self.text, factory=self.factory)
        if self.held_out == 1:
            raise ArgumentError("held_out must be below 1, got 1; no text is left to train on")


@checked
@dataclass(frozen=True)
class PipelineSection:
    """Stages, schedule and devices."""

    stages: Count | None = None
    schedule: Annotated[str, "the name of a schedule, or a CSV file"] = "1f1b"
    microbatches: Count = 8
    recompute: Recompute = "never"
    devices: Annotated[list[Name], "names, such as ['cuda:0', 'cuda:1']"] | None = None
    replicas: Count = 1
    balance: Balance = "blocks"
    split: (
        Annotated[list[Count], "blocks of each stage"]
        | Annotated[list[Name], "names of modules"]
        | Annotated[str, "a layout"]
        | None
    ) = None


@checked
@dataclass(frozen=True)
class OptimizerSection:
    """Optimizer of each stage."""

    name: Annotated[str, "the name of an optimizer of torch.optim"] = "AdamW"
    decay_dimensions: Count | None = None
    max_grad_norm: Positive | None = None


@checked
@dataclass(frozen=True)
class SchedulerSection:
    """Learning-rate scheduler."""

    name: Annotated[str, "the name of a scheduler of torch.optim.lr_scheduler"] | None = None
    warm_up: Count | None = None


@checked
@dataclass(frozen=True)
class TrainingSection:
    """Steps and files."""

    directory: Annotated[str, "a folder"]
    steps: Count | None = None
    epochs: Count | None = None
    evaluate_every: Count | None = None
    checkpoint_every: Count | None = None
    keep: Count = 3
    autocast: Literal["bfloat16", "float16"] | None = None
    seed: Whole = 0
    predict: Annotated[bool, "true or false"] = True
    timelines: list[Count] | None = None


def _check_one_of(**values: Any) -> None:
    """Raise unless one value is not None."""
    names = [name for name, value in values.items() if value is not None]
    if len(names) != 1:
        raise ArgumentError(
            f"needs either {' or '.join(values)}, got {' and '.join(names) or 'neither'}"
        )


# The file.


@dataclass(frozen=True)
class Config:
    """The content of a TOML file; all sections are there, with the defaults of missing keys."""

    path: Path
    model: ModelSection
    data: DataSection
    pipeline: PipelineSection
    optimizer: OptimizerSection
    scheduler: SchedulerSection
    training: TrainingSection
    #: Values of other keys of a section: arguments of the function that it names.
    arguments: Mapping[str, dict[str, Any]]

    def record(self) -> dict[str, Any]:
        """Return what identifies the training: all that changes its losses, but for rounding.

        The pipeline may change, and the training may become longer.
        """
        values = {
            name: {k: v for k, v in vars(getattr(self, name)).items() if v is not None} | arguments
            for name, arguments in self.arguments.items()
        }
        training = {"seed": self.training.seed, "autocast": self.training.autocast}
        return {**values, "training": {k: v for k, v in training.items() if v}}

    def argument_error(self, section: str, name: str, names: list[str], what: str) -> PipeError:
        """Return the error of an argument that a function does not take."""
        return UnknownNameError(
            f"{self.path}: [{section}] {name!r} is no argument of {what}"
            f"{suggestion(name, names)} (known: {', '.join(names) or 'none'})"
        )

    def errors(self, section: str) -> AbstractContextManager[None]:
        """Name the file and the section in errors of a block."""
        return _errors(self.path, section)


#: The record of each section.
SECTIONS: dict[str, Any] = {
    name: kind for name, kind in get_type_hints(Config).items() if is_dataclass(kind)
}
#: Sections whose other keys are arguments of a function; in ``data``, of the factory.
_WITH_ARGUMENTS = ("model", "data", "optimizer", "scheduler")


@contextmanager
def _errors(path: Path, section: str) -> Iterator[None]:
    try:
        yield
    except ArgumentError as error:
        start = f"{path}: [{section}] "
        text = str(error)
        raise ArgumentError(text if text.startswith(start) else start + text) from error


def read_config(path: Path | str) -> Config:
    """Read and check the TOML file of a training."""
    path = check_path("config", path)
    content = read_toml(path, "the configuration (docs/how_to/train.md)")
    for name, section in content.items():
        if name not in SECTIONS:
            raise UnknownNameError(
                f"{path}: unknown section [{name}]{suggestion(name, SECTIONS)} (known: "
                f"{', '.join(SECTIONS)})"
            )
        if not isinstance(section, dict):
            raise ArgumentError(f"{path}: {name} must be a section; write [{name}]")
    sections: dict[str, Any] = {}
    arguments: dict[str, dict[str, Any]] = {}
    for name, kind in SECTIONS.items():
        values = content.get(name, {})
        keys = {key.name: key.default for key in fields(kind)}
        others = {key: value for key, value in values.items() if key not in keys}
        takes_others = name in _WITH_ARGUMENTS and (name != "data" or "factory" in values)
        if others and not takes_others:
            key = next(iter(others))
            raise UnknownNameError(
                f"{path}: [{name}] has unknown key {key!r}{suggestion(key, keys)} "
                f"(known: {', '.join(keys)})"
            )
        if name in _WITH_ARGUMENTS:
            arguments[name] = others
        for key, default in keys.items():
            if default is MISSING and key not in values:
                raise ArgumentError(f"{path}: [{name}] lacks {key}; add it")
        with _errors(path, name):
            sections[name] = kind(**{key: values[key] for key in keys if key in values})
    return Config(path, **sections, arguments=arguments)
