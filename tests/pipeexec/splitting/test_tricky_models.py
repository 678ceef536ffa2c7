"""A split model is equal to the model, or it is refused: for models that are hard to split.

By default, every fourth model runs in one configuration, and most of the reads are left out. With
``FAULTS=all`` in the environment, each runs in all configurations: some 17,000 runs.
``FUZZ_EXAMPLES=2000``, as in `make fuzz`, runs so many random models.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import split_verdicts
import torch
from random_programs import random_case
from split_verdicts import CONFIGURATIONS, Configuration, configurations, is_right, verdict
from torch import nn
from tricky_models import CASES, Blocks, Case, floats

import pipeexec as px
from pipesim.errors import ArgumentError

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
PLAIN = Case("plain: Blocks", Blocks, floats)


def _some() -> list[tuple[Case, Configuration]]:
    """Return every fourth model in one configuration; of reads, every eighth."""
    groups: dict[str, list[Case]] = {}
    for case in CASES.values():
        groups.setdefault(case.group, []).append(case)
    cases = [x for name, rows in groups.items() for x in rows[:: 8 if name == "reads" else 4]]
    return [(case, CONFIGURATIONS[k % len(CONFIGURATIONS)]) for k, case in enumerate(cases)]


def _everything() -> list[tuple[Case, Configuration]]:
    """Return all models in all configurations."""
    return [(case, x) for case in CASES.values() for x in configurations()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "configuration"), _everything() if "FAULTS" in os.environ else _some(), ids=str
)
def test_a_split_is_equal_or_refused(case: Case, configuration: Configuration) -> None:
    """Never silently different, and no error of torch."""
    text = verdict(case, configuration)
    assert is_right(text), text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("construction: ExpandedBuffers", "equal"),
        ("construction: BlockThatKnowsModel", "refused: ArgumentError: stage 1 cannot be copied"),
        ("modes: GradientsSwitchedOff", "equal"),
    ],
)
def test_replicas_of_split_models(name: str, expected: str) -> None:
    """Copies of stages need memory, parameters and requires_grad of their own."""
    text = verdict(CASES[name], Configuration(2, n_replicas=2))
    assert text.startswith(expected), text


@pytest.mark.slow
def test_results_that_stages_keep_are_no_state_of_a_recompute() -> None:
    """Stages know results of other stages' calls by their numbers, which batches change."""
    configuration = Configuration(3, "gpipe", recompute="always")
    assert verdict(CASES["construction: NumberToBlock"], configuration) == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES.values()][:: 1 if "FAULTS" in os.environ else 24], ids=str)
def test_a_graph_is_equal_or_refused(case: Case) -> None:
    """The same holds for the graph of torch.export."""
    text = verdict(case, Configuration(2, way="graph"))
    assert is_right(text), text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_a_random_split_is_equal_or_refused(seed: int) -> None:
    """``python tests/helpers/random_programs.py SEED`` prints the shortest program that fails."""
    text = verdict(random_case(seed), CONFIGURATIONS[seed % len(CONFIGURATIONS)])
    assert is_right(text), text


@pytest.mark.slow
@pytest.mark.parametrize(
    "configuration", configurations() if "FAULTS" in os.environ else CONFIGURATIONS, ids=str
)
def test_plain_models_are_equal(configuration: Configuration) -> None:
    """Four linear layers can be split in every configuration: refusals are not for free."""
    assert verdict(PLAIN, configuration) == "equal"


def _wrong_weight(model: nn.Module) -> None:
    model.blocks[2].weight.data[0, 0] += 1e-6


def _wrong_mode(model: nn.Module) -> None:
    model.blocks[2].eval()


def _wrong_attribute(model: nn.Module) -> None:
    model.name = "split"


def _random_numbers(_: nn.Module) -> None:
    torch.rand(1)


def _own_error(_: nn.Module) -> None:
    raise ArgumentError("no such split")


def _error_of_torch(_: nn.Module) -> None:
    torch.ones(2) @ torch.ones(3)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (_wrong_weight, "SILENT: split is 'parameter blocks.2.weight differs by 1e-06'"),
        (_wrong_mode, "SILENT: split is 'mode of blocks.2 is False, not True'"),
        (_wrong_attribute, "SILENT: split is 'attribute name of the model is added'"),
        (_random_numbers, "SILENT: split is 'random numbers of torch is another one'"),
        (_own_error, "refused: ArgumentError: no such split"),
        (_error_of_torch, "BARE: RuntimeError: "),
    ],
)
def test_a_verdict_tells_what_a_split_does_wrong(
    monkeypatch: pytest.MonkeyPatch, fault: Any, expected: str
) -> None:
    """A fault in `pipeexec.split` is seen, and told from a refusal."""
    split = px.split

    def faulty_split(model: nn.Module, *args: Any, **options: Any) -> px.Stages:
        stages = split(model, *args, **options)
        fault(model)
        return stages

    monkeypatch.setattr(split_verdicts.px, "split", faulty_split)
    assert verdict(PLAIN, Configuration(2)).startswith(expected)
