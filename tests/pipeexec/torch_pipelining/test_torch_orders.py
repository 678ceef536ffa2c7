"""Our orders against those of torch.distributed.pipelining's classes, without processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from small_pipelines import orders
from strategies import custom_schedules
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import pipeexec as px
import pipesim as ps
from pipeexec.torch_pipelining import torch_schedule_order
from pipeexec.torch_pipelining.interop import TORCH_SCHEDULES
from pipeexec.torch_pipelining.private import make_runtime
from pipesim.errors import ArgumentError, ScheduleError
from pipesim.planning.torchtitan import TORCH_NAMES
from pipesim.scheduling.files import unsigned
from pipesim.scheduling.registry import schedule_info

#: Name of ours, options beside n_chunks, of each class of torch's. Names that are not registered
#: are left out until they are.
OURS = {
    "GPipe": ("gpipe", {"backward_order": "forward"}),
    "1F1B": ("1f1b", {}),
    "Interleaved1F1B": ("interleaved_1f1b", {}),
    "LoopedBFS": ("looped_bfs", {}),
    "InterleavedZeroBubble": ("interleaved_zb", {}),
    "ZBVZeroBubble": ("zbv", {}),
    "DualPipeV": ("dualpipev", {}),
}
DEVICES, MICROBATCHES, CHUNKS = range(1, 5), range(1, 13), (1, 2, 3)
#: Classes whose listing no runtime could run, for every count that they take. In torch 2.13 the
#: last rank of 1F1B lists micro-batches 1 to m in place of 0 to m - 1; what its loop runs is right.
WRONG_LISTINGS = {"1F1B"}


def counts(name: str) -> list[tuple[int, int, int]]:
    takes = TORCH_SCHEDULES[name]
    chunks = CHUNKS if takes is None else (takes,)
    return [(p, m, v) for p in DEVICES for m in MICROBATCHES for v in chunks]


def torch_order(name: str, p: int, m: int, v: int, executed: bool = True) -> ps.Schedule | None:
    """Return torch's order, or None for counts that it refuses."""
    try:
        order = torch_schedule_order(name, p, m, v, executed=executed)
    except ArgumentError:
        return None
    return px.from_torch(order, n_microbatches=m, name=name)


def test_every_class_of_torch_is_here() -> None:
    """A release of torch with one more class fails here, and asks for a row above."""
    public = {name for name in pipelining.__all__ if name.startswith("Schedule")}
    assert public == {f"Schedule{name}" for name in TORCH_SCHEDULES}
    assert OURS.keys() == TORCH_SCHEDULES.keys()


def test_exported_plans_have_the_same_names() -> None:
    """The settings of torchtitan name the class whose order is ours."""
    assert {schedule: name for name, (schedule, _) in OURS.items()} == TORCH_NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_which_listings_are_valid(name: str) -> None:
    """Torch's listings are complete and can run, for the counts that it takes; all but 1F1B's."""
    orders = [torch_order(name, *count, executed=False) for count in counts(name)]
    valid = [order for order in orders if order is not None]
    assert len(valid) > 30
    if name not in WRONG_LISTINGS:
        for order in valid:
            ps.verify(order)
        return
    for order in valid:
        with pytest.raises(ScheduleError, match=r"names a micro-batch outside"):
            ps.verify(order)


def test_1f1b_listing() -> None:
    """The wrong listing, as FINDINGS has it: the last of 4 ranks lists F1 to F8 of 8."""
    order = px.from_torch(torch_schedule_order("1F1B", 4, 8), n_microbatches=8)
    assert [str(a) for a in order.orders[3]][:4] == ["3F1", "3B0", "3F2", "3B1"]
    message = r"(?s)position 14: 3F8 names a micro-batch outside 0..7\n.*>3F8<"
    with pytest.raises(ScheduleError, match=message):
        ps.verify(order)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OURS))
def test_our_order_is_torchs(name: str) -> None:
    """Action by action, for all counts that both take; of 1F1B and GPipe, what torch runs."""
    own_name, options = OURS[name]
    if own_name not in ps.schedules().index:
        pytest.skip(f"{own_name} is not registered")
    info = schedule_info(own_name)
    compared = 0
    for p, m, v in counts(name):
        wanted = torch_order(name, p, m, v)
        more = {"n_chunks": v} if "n_chunks" in info.options else {}
        if wanted is None or not info.allows(p, m, **options, **more):
            continue
        actual = ps.schedule(own_name, p, m, **options, **more)
        assert actual.orders == wanted.orders, f"n_devices={p}, n_microbatches={m}, n_chunks={v}"
        assert actual == wanted
        compared += 1
    assert compared > 10


def test_from_torch_of_a_schedule_object() -> None:
    """An object gives what it runs, under the name of its class; subclasses what they list."""
    for name in TORCH_SCHEDULES:
        schedule_class = get_schedule_class(name)
        single = issubclass(schedule_class, PipelineScheduleSingle)
        n_chunks = 1 if single else 2
        stages = [
            SimpleNamespace(
                num_stages=2 * n_chunks, group_size=2, group_rank=0, submod=nn.Identity()
            )
            for _ in range(n_chunks)
        ]
        order = px.from_torch(schedule_class(stages[0] if single else stages, 4))
        assert order.name == f"Schedule{name}"
        assert order == torch_order(name, 2, 4, n_chunks)


def torch_reads(schedule: ps.Schedule, path: Path, form: str) -> ps.Schedule:
    """Let torch's runtime read a file and step through it; return the order that it then holds."""
    stage = SimpleNamespace(
        num_stages=schedule.n_stages,
        group_size=schedule.n_devices,
        group_rank=0,
        submod=nn.Identity(),
    )
    texts = [[str(action) for action in order] for order in schedule.orders]
    runtime: Any = make_runtime(texts, "compute_only", [stage], schedule.n_microbatches)
    runtime.pipeline_order = {}
    runtime._load_csv(str(path), format=form)
    held = runtime.pipeline_order_with_comms
    back = px.from_torch(held, n_microbatches=schedule.n_microbatches)
    if schedule.overlapped is None:
        # Its simulation has no reductions and no sharding, and no overlapped actions.
        runtime.pipeline_order_with_comms = {
            rank: [a for a in row if a.microbatch_index is not None] for rank, row in held.items()
        }
        runtime._simulate()
    return back


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "dualpipev", "interleaved_1f1b"])
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_torch_passes_over_checksums(name: str, form: str, tmp_path: Path) -> None:
    """Torch holds the same actions, rank by rank, as without."""
    schedule = ps.schedule(name, 2, 4)
    if form == "compute_only":
        schedule.save(tmp_path / "signed.csv")
    else:
        ps.lower(schedule).save_torch_csv(tmp_path / "signed.csv")
    text, signature = unsigned((tmp_path / "signed.csv").read_text())
    assert signature
    (tmp_path / "plain.csv").write_text(text)
    held = []
    for file in ("signed.csv", "plain.csv"):
        stage = SimpleNamespace(
            num_stages=schedule.n_stages, group_size=2, group_rank=0, submod=nn.Identity()
        )
        texts = [[str(action) for action in order] for order in schedule.orders]
        runtime: Any = make_runtime(texts, "compute_only", [stage], 4)
        runtime.pipeline_order = {}
        runtime._load_csv(str(tmp_path / file), format=form)
        held.append((runtime.pipeline_order, runtime.pipeline_order_with_comms))
    assert held[0] == held[1]


@pytest.mark.slow
@given(schedule=custom_schedules(only_chains=True))
def test_torch_reads_our_files(schedule: ps.Schedule, tmp_path_factory: Any) -> None:
    """Compute only, to which torch adds the messages, and with ours: both can run in torch.

    Devices that hold stages which follow each other need no message in either.
    """
    assume(schedule.placement.n_paths == 1)
    schedule = schedule.with_updates(1, "one").with_slices(1)
    folder = tmp_path_factory.mktemp("csv")
    schedule.save(folder / "compute.csv")
    assert torch_reads(schedule, folder / "compute.csv", "compute_only") == schedule
    for overlap in (True, False):
        ps.lower(schedule, overlap=overlap).save_torch_csv(folder / "comms.csv")
        assert torch_reads(schedule, folder / "comms.csv", "compute_comms") == schedule
        assert ps.Schedule.load(folder / "comms.csv") == schedule


def test_a_step_of_each_stage_reduces_once(tmp_path: Path) -> None:
    """``REDUCE_GRAD`` stands after the last gradient of its stage; drawn by hand."""
    graph = ps.lower(orders("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1I1 1W1 1W0"))
    graph.save_torch_csv(tmp_path / "x.csv")
    text, _ = unsigned((tmp_path / "x.csv").read_text())
    assert text.replace(",", " ").splitlines() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W1 1W0 1REDUCE_GRAD",
    ]


def test_orders_that_torch_has_no_rows_for(tmp_path: Path) -> None:
    """Recompute and replicas, with what to do."""
    schedule = ps.schedule("1f1b", 2, 2)
    with pytest.raises(ArgumentError, match="recompute='never', and checkpoint inside the modules"):
        ps.lower(schedule, recompute="except_last").save_torch_csv(tmp_path / "x.csv")
    with pytest.raises(ArgumentError, match="lower a schedule of one path with n_replicas=1"):
        ps.lower(schedule, n_replicas=2).save_torch_csv(tmp_path / "x.csv")
    assert not list(tmp_path.iterdir())
