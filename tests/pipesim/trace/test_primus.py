"""Files of Primus, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pipesim as ps
from pipesim.errors import TimelineError


def save(folder: Path, *ranks: dict[str, Any], **config: int) -> Path:
    """Write the files of a run with one step, the second."""
    for rank, times in enumerate(ranks):
        step = {"total": 9.0, "memory": 1.0, **times}
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps({"2": step}))
    (folder / "config.json").write_text(json.dumps({"pp_size": len(ranks), **config}))
    return folder


def numbered(table: Any, device: int) -> str:
    """Return the actions of a device in order of start, as ``stage op microbatch``."""
    rows = table[table["device"] == device].sort_values("start")
    return " ".join(f"{row.stage}{row.op}{row.microbatch}" for row in rows.itertuples())


#: 1F1B of two micro-batches (ms); the clock of rank 1 begins 1 ms late.
ONE_F_ONE_B = (
    {"fwd_start": [0, 1], "fwd_end": [1, 2], "bwd_start": [4, 7], "bwd_end": [6, 9]},
    {"fwd_start": [0, 3], "fwd_end": [1, 4], "bwd_start": [1, 4], "bwd_end": [3, 6]},
)


def test_one_stage_a_rank(tmp_path: Path) -> None:
    """Without numbers, micro-batches are in order; times are in seconds."""
    table = ps.trace.read_primus(save(tmp_path, *ONE_F_ONE_B, vp_size=1))
    assert list(table.columns) == [
        "step", "op", "microbatch", "stage", "device", "chunk", "start", "end"
    ]  # fmt: skip
    assert numbered(table, 0) == "0F0 0F1 0B0 0B1"
    assert numbered(table, 1) == "1F0 1B0 1F1 1B1"
    last = table[(table["stage"] == 1) & (table["op"] == "B") & (table["microbatch"] == 1)]
    assert last[["step", "start", "end"]].to_numpy().tolist() == [[2, 0.004, 0.006]]


def test_interleaved_order(tmp_path: Path) -> None:
    """Without numbers, two micro-batches take turns on two chunks, backwards from the last."""
    starts = list(range(8))
    rank = {
        "fwd_start": starts, "fwd_end": starts,
        "bwd_start": [8 + t for t in starts], "bwd_end": [9 + t for t in starts],
    }  # fmt: skip
    table = ps.trace.read_primus(save(tmp_path, rank, rank, vpp_size=2))
    assert numbered(table, 1) == ("1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3 3B0 3B1 1B0 1B1 3B2 3B3 1B2 1B3")


def test_split_backward_on_a_v(tmp_path: Path) -> None:
    """Numbers in the file count, and the placement gives the stages."""
    rank = {
        "fwd_start": [0, 1], "fwd_end": [1, 2], "fwd_minibatch": [0, 0], "fwd_chunk": [0, 1],
        "bwd_start": [2, 3], "bwd_end": [3, 4], "bwd_minibatch": [0, 0], "bwd_chunk": [1, 0],
        "wgrad_start": [4, 5], "wgrad_end": [5, 6], "wgrad_minibatch": [0, 0],
        "wgrad_chunk": [0, 1],
    }  # fmt: skip
    folder = save(tmp_path, rank, rank, vp_size=2)
    table = ps.trace.read_primus(folder, placement=ps.Placement.v_shaped(2))
    assert numbered(table, 0) == "0F0 3F0 3I0 0I0 0W0 3W0"
    del rank["wgrad_minibatch"]
    with pytest.raises(TimelineError, match="weight gradients of several chunks"):
        ps.trace.read_primus(save(tmp_path, rank, rank, vp_size=2))


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"fwd_start": [0], "fwd_end": []}, "ValueError"),
        ({"fwd_start": [None], "fwd_end": [1]}, "are no numbers"),
        ({"fwd_start": [0], "fwd_end": [1], "fwd_minibatch": [0], "fwd_chunk": [3]}, "KeyError"),
    ],
)
def test_refused_content(tmp_path: Path, times: dict[str, Any], message: str) -> None:
    """Errors name the file."""
    with pytest.raises(TimelineError, match=message) as error:
        ps.trace.read_primus(save(tmp_path, times))
    assert "pp_rank_0.json" in str(error.value)


def test_missing_rank(tmp_path: Path) -> None:
    """All ranks of the pipeline are needed."""
    save(tmp_path, *ONE_F_ONE_B)
    (tmp_path / "pp_rank_0.json").unlink()
    with pytest.raises(TimelineError, match=r"got .*pp_rank_1\.json"):
        ps.trace.read_primus(tmp_path)
    (tmp_path / "pp_rank_1.json").unlink()
    with pytest.raises(TimelineError, match=r"has no pp_rank_\*\.json"):
        ps.trace.read_primus(tmp_path)


def test_timeline(tmp_path: Path) -> None:
    """The table is a timeline, from the first F to the last B of rank 0."""
    table = ps.trace.read_primus(save(tmp_path, *ONE_F_ONE_B))
    timeline = ps.Timeline.from_table(table)
    assert timeline.makespan == pytest.approx(9e-3)
