"""Schedules run by torch.distributed.pipelining's own runtime, and what it cannot run."""

from __future__ import annotations

import ast
import copy
import inspect
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_pipelines import mse, orders
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch_ranks import batch, layers, run_ranks

import pipeexec as px
import pipesim as ps
from pipeexec.torch_pipelining import torch_schedule_order
from pipeexec.torch_pipelining.interop import RESERVED
from pipeexec.torch_pipelining.private import make_runtime, options_of_runtime
from pipesim.errors import ArgumentError, ScheduleError, UnknownNameError
from pipesim.scheduling.placement import Placement

#: Drawn by hand; V: device 0 holds the first stage and the last.
SCHEDULES = {
    "1f1b": ps.schedule("1f1b", 2, 3),
    "split": orders("0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"),
    "v": orders(
        "0F0 0F1 3F0 3I0 0F2 3F1 3B1 0I0 3W0 3F2 0B1 3I2 0I2 3W2 0W0 0W2",
        "1F0 2F0 1F1 2F1 2B0 1F2 1B0 2F2 2B1 1B1 2I2 1I2 2W2 1W2",
    ),
    "overlapped": orders(
        "0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", "1F0 (1F1;1B0)OVERLAP_F_B 1F2 1B1 1B2"
    ),
    # Stages that follow each other on one device, and a message in the middle.
    "blocks": orders("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1"),
}

#: torch 2.11 and earlier begin with a message to each neighbour, so that a rank that holds two
#: neighbours sends to itself. gloo refuses that, torch's own ZB-V schedule included.
SENDS_TO_NO_SELF = hasattr(PipelineStage, "_warmup_forward_vote")


def whole_model(n_stages: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the gradients and the loss of the model that is not split."""
    modules = layers(n_stages)
    inputs, targets = batch()
    loss = nn.functional.mse_loss(nn.Sequential(*modules)(inputs), targets)
    loss.backward()
    return named_gradients(modules), loss.detach()


def named_gradients(modules: list[nn.Sequential]) -> dict[str, torch.Tensor]:
    return {
        f"{stage}.{name}": parameter.grad
        for stage, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def own_gradients(schedule: ps.Schedule) -> dict[str, torch.Tensor]:
    """Return those of our own pipeline."""
    modules = copy.deepcopy(layers(schedule.n_stages))
    px.Pipeline(modules, ps.lower(schedule), ["cpu"] * 2, mse).step(*batch())
    return named_gradients(modules)


@pytest.mark.slow
def test_gradients_under_torch(tmp_path: Path) -> None:
    """Two processes, torch's runtime: the gradients of the unsplit model, and of our own pipeline.

    Each order with the messages that torch adds, and with those that pipesim adds.
    """
    files = []
    for name, schedule in SCHEDULES.items():
        homes = list(schedule.placement.device_of)
        if not SENDS_TO_NO_SELF and any(a == b for a, b in pairwise(homes)):
            continue
        for kind in ("torch", "lowered"):
            files.append(str(tmp_path / f"{name}.{kind}.csv"))
            schedule.save(files[-1])
    results = run_ranks(tmp_path, files, [file for file in files if "lowered" in file])
    for file, gradients in zip(files, results, strict=True):
        schedule = SCHEDULES[Path(file).name.split(".")[0]]
        expected, loss = whole_model(schedule.n_stages)
        torch.testing.assert_close(gradients.pop("loss"), loss)
        assert gradients.keys() == expected.keys(), file
        own = own_gradients(schedule)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], msg=f"{name} of {file}")
            torch.testing.assert_close(gradient, own[name], msg=f"{name} of {file}")


def stubs(rank: int, homes: list[int], n_devices: int) -> list[Any]:
    return [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(homes),
            group_rank=rank,
            group_size=n_devices,
            is_last=False,
            submod=nn.Identity(),
        )
        for stage, home in enumerate(homes)
        if home == rank
    ]


def linear_stubs() -> list[Any]:
    return stubs(0, [0, 1], 2)


def test_runtime_lists_the_order() -> None:
    """The runtime holds our order, and torch's own view of it comes back as our schedule."""
    for name, schedule in SCHEDULES.items():
        homes = list(schedule.placement.device_of)
        runtime = px.to_torch(schedule, stubs(0, homes, 2), mse)
        assert px.from_torch(runtime) == schedule, name
        lowered = px.to_torch(ps.lower(schedule), stubs(0, homes, 2), mse)
        assert px.from_torch(lowered) == schedule, name
        assert runtime.stage_index_to_group_rank == dict(enumerate(homes))


def test_loss_reduction() -> None:
    """Only means are scaled; further options reach torch."""
    schedule = ps.schedule("gpipe", 2, 2)
    assert px.to_torch(schedule, linear_stubs(), mse).scale_grads
    options = {"loss_reduction": "sum", "backward_requires_autograd": False}
    runtime = px.to_torch(schedule, linear_stubs(), mse, **options)
    assert not runtime.scale_grads
    assert not runtime._backward_requires_autograd
    with pytest.raises(UnknownNameError, match=r"loss_reduction 'means'; did you mean 'mean'"):
        px.to_torch(schedule, linear_stubs(), mse, loss_reduction="means")  # type: ignore[arg-type]


def test_options_are_those_of_the_installed_torch() -> None:
    """The runtime takes each one, and each one that its subclasses pass to it is known.

    torch 2.13 has ``defer_pp_recv``, torch 2.11 does not.
    """
    for subclass in _PipelineScheduleRuntime.__subclasses__():
        assert set(inspect.signature(subclass).parameters) <= set(options_of_runtime())
    for option in set(options_of_runtime()) - {"stages", "loss_fn", *RESERVED}:
        px.to_torch(ps.schedule("gpipe", 2, 2), linear_stubs(), mse, **{option: None})


def refusal(what: Any, stages: list[Any] | None = None) -> str:
    with pytest.raises(ArgumentError) as caught:
        px.to_torch(what, linear_stubs() if stages is None else stages, mse)
    return str(caught.value)


def test_what_torch_cannot_run() -> None:
    """Copies, edges, weight versions, recompute, replicas: each says why and what to do."""
    orders = [["0F0", "1F1", "0B0", "1B1"], ["1F0", "0F1", "1B0", "0B1"]]
    both_ways = ps.Schedule.from_orders(orders, placement=ps.Placement.bidirectional(2))
    assert "has 2 paths, with copies of stages" in refusal(both_ways)
    modules = ps.order_by(ps.Placement([0, 1, 1], edges=[(0, 2), (1, 2)]), 2)
    for what in (modules, ps.lower(modules)):
        assert "the edges [(0, 2), (1, 2)]" in refusal(what)
    plain = ps.schedule("1f1b", 2, 4)
    assert "weight_versions='stashed'" in refusal(plain.with_updates(2, "stashed"))
    assert "recomputes (always)" in refusal(ps.lower(plain, recompute="always"))
    assert "2 copies of each stage" in refusal(ps.lower(plain, n_replicas=2))
    assert "2 copies of each stage" in refusal(ps.lower(both_ways))
    assert "2 mini-batches" in refusal(ps.lower(plain.with_updates(2, "stashed")))
    assert "takes a Schedule or a TaskGraph, got '1f1b'" in refusal("1f1b")
    with pytest.raises(ScheduleError, match="lacks 0B0"):
        px.to_torch(ps.Schedule.from_orders([["0F0"]]), stubs(0, [0], 1), mse)


def test_stages_that_are_not_this_ranks() -> None:
    """None, too few, of another size, or on a group of another size."""
    schedule = SCHEDULES["v"]
    homes = [0, 1, 1, 0]
    assert "got no stages" in refusal(schedule, [])
    assert "rank 0 holds the stages [0, 3], got [0]" in refusal(schedule, stubs(0, homes, 2)[:1])
    assert "num_stages=5, but the schedule has 4" in refusal(schedule, stubs(0, [*homes, 1], 2))
    assert "2 devices, but the stages' process group has 3" in refusal(schedule, stubs(0, homes, 3))


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (None, "takes a sequence of stages, got None"),
        (linear_stubs()[0], r"takes a sequence of stages, got namespace.* give \[stage\]"),
        ([nn.Linear(2, 2)], r"(?s)Linear.* is no stage: it lacks stage_index.*PipelineStage"),
        ([SimpleNamespace(stage_index=0)], "is no stage: it lacks num_stages, group_rank"),
        ("01", "'0' is no stage"),
        ([SimpleNamespace(**{**vars(linear_stubs()[0]), "stage_index": "0"})], "whole number"),
    ],
)
def test_what_is_no_stage(stages: Any, words: str) -> None:
    """One stage, none, and modules that nothing has wrapped."""
    with pytest.raises(ArgumentError, match=words):
        px.to_torch(SCHEDULES["1f1b"], stages, mse)


@pytest.mark.parametrize("loss_fn", [None, "mse", torch.zeros(())])
def test_what_is_no_loss(loss_fn: Any) -> None:
    """Torch takes None, and then runs backwards without a loss."""
    with pytest.raises(ArgumentError, match=r"loss_fn must be callable as loss_fn\(output, target"):
        px.to_torch(SCHEDULES["1f1b"], linear_stubs(), loss_fn)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("nosuch", "unknown option of torch's runtime: 'nosuch'.*known: args_chunk_spec, "),
        ("use_full_backwards", "did you mean 'use_full_backward'"),
        ("self", "unknown option of torch's runtime: 'self'"),
        ("n_microbatches", "no option 'n_microbatches': the schedule has it"),
        ("scale_grads", "no option 'scale_grads': give loss_reduction='sum'"),
    ],
)
def test_options_that_torch_does_not_take(option: str, words: str) -> None:
    """Unknown ones, and those that the schedule or loss_reduction decides."""
    with pytest.raises(ArgumentError, match=words):
        px.to_torch(SCHEDULES["1f1b"], linear_stubs(), mse, **{option: 1})


def test_from_torch_of_orders() -> None:
    """Idle steps and messages are left out; a text is as good as an action."""
    order = {1: [None, "1RECV_F0", "1F0", "1B0", "1SEND_B0"],
             0: ["0F0", "0SEND_F0", None, "0RECV_B0", "0B0", "0REDUCE_GRAD"]}  # fmt: skip
    schedule = px.from_torch(order, name="mine")
    assert schedule == ps.schedule("1f1b", 2, 1)
    assert schedule.name == "mine"


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({}, "takes a schedule of torch.distributed.pipelining"),
        (3, "takes a schedule of torch.distributed.pipelining"),
        ({1: ["0F0", "0B0"]}, "ranks of an order are 0 to 0, got 1"),
        ({0: ["0F0", "0B0"], "a": ["1F0"]}, "ranks of an order are 0 to 1, got 0, 'a'"),
        ({0: None}, "rank 0 of an order must list its actions, got None"),
        ({0: ["0F0", "0B0"], 1: "1F0 1B0"}, "rank 1 of an order must list its actions, got '1F0 "),
    ],
)
def test_from_torch_refuses(order: Any, words: str) -> None:
    """Values that are no order."""
    with pytest.raises(ArgumentError, match=words):
        px.from_torch(order)


def test_from_torch_names_the_action() -> None:
    """The rank and the position of what is no action."""
    with pytest.raises(ScheduleError, match=r"order of torch: row 1 \(device 0\), column 2: '0X0'"):
        px.from_torch({0: ["0F0", "0X0"]})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 2, 4), "unknown schedule of torch '1f1b'; did you mean '1F1B'"),
        (("1F1B", 4, 2), "1F1B does not take n_devices=4, n_microbatches=2"),
        (("ZBVZeroBubble", 2, 4, 3), "takes n_chunks=2, got 3"),
        (("GPipe", 2.5, 4), "n_devices must be a whole number"),
    ],
)
def test_torch_schedule_order_refuses(arguments: tuple[Any, ...], words: str) -> None:
    """Names and counts that torch does not know, and torch's reason."""
    with pytest.raises(ArgumentError, match=words):
        torch_schedule_order(*arguments)


def test_placements_of_any_shape() -> None:
    """Torch's runtime takes its map of stages from our placement, whatever it is."""
    order = [["0F0", "2F0", "2B0", "0B0"], ["1F0", "1B0"]]
    schedule = ps.Schedule.from_orders(order, placement=Placement([0, 1, 0]))
    runtime = px.to_torch(schedule, stubs(1, [0, 1, 0], 2), mse)
    assert runtime.stage_index_to_group_rank == {0: 0, 1: 1, 2: 0}


@pytest.mark.parametrize(
    ("rows", "n_microbatches", "form", "words"),
    [
        (["0F0 0F0 0B0"], 1, "compute_only", "0F0 is a duplicate"),
        (["0F1 0B1"], 1, "compute_only", "0F1 names a micro-batch outside 0..0"),
        (["0F0 0F1 0B0 0I0 0W0"], 2, "compute_only", "0I0 is listed with 0B0"),
        (
            [
                "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
                "1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F0 1F0 1B0 1SEND_B0",
            ],
            2,
            "compute_comms",
            "deadlocks",
        ),
    ],
)
def test_what_torch_does_not_find(
    rows: list[str], n_microbatches: int, form: Any, words: str
) -> None:
    """Orders that torch's runtime accepts and no step can run; ours names what is wrong."""
    actions = [row.split() for row in rows]
    make_runtime(actions, form, stubs(0, list(range(len(rows))), len(rows)), n_microbatches)
    schedule = px.from_torch(dict(enumerate(actions)), n_microbatches=n_microbatches)
    with pytest.raises(ScheduleError, match=words):
        ps.verify(schedule)


def test_private_names_in_one_file() -> None:
    """Names that torch may move without notice are imported in private.py alone."""
    for file in sorted(Path(px.__file__).parent.rglob("*.py")):
        names = [
            name.name
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and "torch.distributed" in (node.module or "")
            for name in node.names
            if name.name.startswith("_")
        ]
        assert bool(names) == (file.name == "private.py"), file.name
