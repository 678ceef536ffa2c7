"""Messages of the simulator name a remedy, and the call goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pipesim as ps
from pipesim.cli import main
from pipesim.costs import Workload
from pipesim.errors import PipeError
from pipesim.simulation import Empirical, Normal


class Remedy(NamedTuple):
    """A call that is refused, the advice in its message, and the call that follows the advice."""

    wrong: Callable[[], object]
    advice: str
    right: Callable[[], object]


def _graph(**options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule("1f1b", 2, 4), **options)


COSTS = ps.Costs(forward=1, backward=2)
SIZED = ps.Costs(forward=1, backward=2, activation_bytes=1)
LLAMA = ps.Transformer.preset("llama3_8b")
NOISE = ps.Noise(seed=0, device=Normal(0.1))
WORK = Workload(tokens=1, flops=1e12)
LINE = ps.Placement.linear(2)


def _run() -> ps.Timeline:
    return ps.simulate(_graph(), COSTS)


def _compared(measured: ps.Timeline) -> Callable[[ps.TaskGraph], ps.Comparison]:
    return lambda graph: ps.Comparison(ps.simulate(graph, COSTS), measured)


REMEDIES: dict[str, Remedy] = {
    "a schedule in place of a graph": Remedy(
        lambda: ps.simulate(ps.schedule("1f1b", 2, 4), COSTS),  # type: ignore[arg-type]
        "lower the schedule first: ",
        lambda: ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), COSTS),
    ),
    "an audit of a schedule": Remedy(
        lambda: ps.audit(ps.schedule("1f1b", 2, 4), COSTS),  # type: ignore[arg-type]
        "lower the schedule first: ",
        lambda: ps.audit(ps.lower(ps.schedule("1f1b", 2, 4)), COSTS),
    ),
    "costs without seconds": Remedy(
        lambda: ps.Costs(backward=2),  # type: ignore[call-arg]
        "give the seconds of F",
        lambda: ps.Costs(1, backward=2),
    ),
    "costs of other stages": Remedy(
        lambda: ps.simulate(_graph(), ps.Costs([1, 1, 1], backward=2)),
        "give one, or one a stage",
        lambda: (ps.simulate(_graph(), ps.Costs(1, backward=2)),
                 ps.simulate(_graph(), ps.Costs([1, 1], backward=2))),
    ),
    "a memory limit in words": Remedy(
        lambda: ps.simulate(_graph(), SIZED, memory_limit="lots"),  # type: ignore[arg-type]
        "must be bytes such as 80e9 or 80GiB",
        lambda: ps.simulate(_graph(), SIZED, memory_limit=80e9),
    ),
    "utilization without work": Remedy(
        lambda: _run().mfu(),
        "give Costs(workload=ps.costs.Workload(tokens=..., flops=...)), or mfu(workload=...)",
        lambda: _run().mfu(WORK, peak_flops=1e15),
    ),
    "a comparison with another graph": Remedy(
        lambda: _compared(_run())(_graph(recompute="always")),
        "simulate the graph that was run: pipesim.simulate(measured.graph, costs)",
        lambda: _compared(_run())(_run().graph),
    ),
    "a plan without memory": Remedy(
        lambda: ps.Cluster("dgx_h100", n_gpus=8, gpu=ps.GPU(flops=1e14, bandwidth=1e12)),
        "give memory=... in bytes, or GPU(memory=...)",
        lambda: (ps.Cluster("dgx_h100", n_gpus=8,
                            gpu=ps.GPU(flops=1e14, bandwidth=1e12, memory=80e9)),
                 ps.Cluster("dgx_h100", n_gpus=8, memory=80e9,
                            gpu=ps.GPU(flops=1e14, bandwidth=1e12))),
    ),
    "split backwards without their seconds": Remedy(
        lambda: ps.simulate(ps.lower(ps.schedule("zb_h1", 2, 4)), COSTS),
        "give input_grad and weight_grad",
        lambda: (ps.simulate(ps.lower(ps.schedule("zb_h1", 2, 4)),
                             ps.Costs(1, input_grad=1, weight_grad=1)),
                 ps.simulate(ps.lower(ps.schedule("zb_h1", 2, 4)),
                             ps.Costs(1, backward=2, input_grad=1, weight_grad=1))),
    ),
    "more stages than layers": Remedy(
        lambda: LLAMA.costs(99, gpu="h100_sxm", microbatch_size=1),
        "give at most 32 stages",
        lambda: LLAMA.costs(32, gpu="h100_sxm", microbatch_size=1),
    ),
    "slices that do not divide": Remedy(
        lambda: ps.schedule("1f1b", 2, 6).with_slices(4),
        "give a divisor",
        lambda: ps.schedule("1f1b", 2, 6).with_slices(3),
    ),
    "layers of each stage as a partition": Remedy(
        lambda: LLAMA.costs(2, gpu="h100_sxm", microbatch_size=1,
                            partition=[10, 22]),  # type: ignore[arg-type]
        "give the layers of each stage as layers_per_stage, in place of the number of stages",
        lambda: LLAMA.costs([10, 22], gpu="h100_sxm", microbatch_size=1),
    ),
    "a partition of layers of each stage": Remedy(
        lambda: LLAMA.costs([10, 22], gpu="h100_sxm", microbatch_size=1, partition="even"),
        "leave it out, or give a number of stages",
        lambda: (LLAMA.costs([10, 22], gpu="h100_sxm", microbatch_size=1),
                 LLAMA.costs(2, gpu="h100_sxm", microbatch_size=1, partition="even")),
    ),
    "an unknown schedule": Remedy(
        lambda: ps.schedule("1f1", 2, 4),
        "did you mean '1f1b'",
        lambda: ps.schedule("1f1b", 2, 4),
    ),
    "an unknown model": Remedy(
        lambda: ps.Transformer.preset("llama3_8"),
        "did you mean 'llama3_8b'",
        lambda: ps.Transformer.preset("llama3_8b"),
    ),
    "an empty mapping of offload": Remedy(
        lambda: _graph(offload={}),
        "give such as {0: 'all'}",
        lambda: _graph(offload={0: "all"}),
    ),
    "pairs of skips twice": Remedy(
        lambda: ps.lower(ps.schedule("1f1b", 3, 4), skips=[(0, 2), (0, 2)]),
        "give each pair of stages once",
        lambda: ps.lower(ps.schedule("1f1b", 3, 4), skips=[(0, 2)]),
    ),
    "a GPU of another name": Remedy(
        lambda: ps.GPU.preset("h100"),
        "h100_sxm",
        lambda: ps.GPU.preset("h100_sxm"),
    ),
    "noise of an objective": Remedy(
        lambda: ps.optimize(LINE, 4, SIZED, objective="span", seconds=1, noise=NOISE,
                            progress=False, split_backward=False),
        "leave out one of both",
        lambda: (ps.optimize(LINE, 4, SIZED, objective="span", seconds=1,
                             progress=False, split_backward=False),
                 ps.optimize(LINE, 4, SIZED, seconds=1, noise=NOISE, progress=False,
                             split_backward=False)),
    ),
    "samples that are no numbers": Remedy(
        lambda: Empirical("1, 2"),  # type: ignore[arg-type]
        "give a list of them",
        lambda: Empirical([1.0, 2.0]),
    ),
    "replicas without steps": Remedy(
        lambda: ps.lower(ps.schedule("pipedream", 2, 8), n_replicas=2, step="none"),
        "leave step out, or take n_replicas=1",
        lambda: (ps.lower(ps.schedule("pipedream", 2, 8), n_replicas=2),
                 ps.lower(ps.schedule("pipedream", 2, 8), step="none")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REMEDIES)
def test_the_call_goes_on_with_the_remedy(name: str) -> None:
    wrong, advice, right = REMEDIES[name]
    with pytest.raises(PipeError) as caught:
        wrong()
    assert advice in str(caught.value)
    right()


#: Command lines that are refused, the advice, and the command lines that follow it.
_SIMULATE = "simulate 1f1b --devices 2 --microbatches 4"
COMMANDS = {
    f"{_SIMULATE} --backward 2": ("give the seconds of F", [
        f"{_SIMULATE} --forward 1 --backward 2",
    ]),
    "simulate 1f1 --devices 2 --microbatches 4 --forward 1 --backward 2": ("did you mean '1f1b'", [
        f"{_SIMULATE} --forward 1 --backward 2",
    ]),
    "simulate 1f1b --microbatches 4 --forward 1 --backward 2": ("give --devices", [
        f"{_SIMULATE} --forward 1 --backward 2",
    ]),
    f"{_SIMULATE} --forward 1,2,3 --backward 2": ("give one, or one a stage", [
        f"{_SIMULATE} --forward 1 --backward 2", f"{_SIMULATE} --forward 1,2 --backward 2",
    ]),
    f"{_SIMULATE} --forward 1 --backward 2 --memory-limit 3": ("give activation_bytes, ", [
        f"{_SIMULATE} --forward 1 --backward 2 --memory-limit 3 --activation-bytes 1",
        f"{_SIMULATE} --forward 1 --backward 2",
    ]),
    "compare zb_h1 1f1b --devices 2 --microbatches 4 --forward 1 --backward 2": (
        "give input_grad and weight_grad", [
        "compare zb_h1 1f1b --devices 2 --microbatches 4 --forward 1 --input-grad 1 "
        "--weight-grad 1",
    ]),
    "plan llama3_8b --cluster dgx_h100 --gpus 8 --schedules 1f1b": ("give --global-batch", [
        "plan llama3_8b --cluster dgx_h100 --gpus 8 --schedules 1f1b --global-batch 8",
    ]),
    f"{_SIMULATE} --forward 1 --backward 2 --activations-bytes 1": ("--activation-bytes'", [
        f"{_SIMULATE} --forward 1 --backward 2 --activation-bytes 1",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_goes_on_with_the_remedy(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    advice, right = COMMANDS[line]
    try:
        status = main(line.split())
    except SystemExit as error:  # of an unknown option
        status = int(str(error.code))
    assert status == 2
    assert advice in capsys.readouterr().err
    for followed in right:
        assert main(followed.split()) == 0, followed
