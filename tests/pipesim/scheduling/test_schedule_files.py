"""Files of schedules: written and read back, read from torch, and refused."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_pipelines import orders
from strategies import schedules

import pipesim as ps
from pipesim.cli import main
from pipesim.errors import ArgumentError, ScheduleError
from pipesim.scheduling.files import unsigned
from pipesim.scheduling.placement import Placement

ONE_F_ONE_B = """\
0F0,0F1,0B0,0F2,0B1,0B2
1F0,1B0,1F1,1B1,1F2,1B2
"""
#: What torch's runtime dumps, its unsharding and its idle steps included.
FROM_TORCH = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\r
,1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1REDUCE_GRAD,1SEND_B1,1RESHARD\r
"""


def load(folder: Path, content: str | bytes, name: str = "mine.csv") -> ps.Schedule:
    content = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(content)
    return ps.Schedule.load(folder / name)


@pytest.mark.parametrize("suffix", ["csv", "txt"])
@given(schedule=schedules(only_chains=True))
def test_any_schedule_comes_back(
    suffix: str, schedule: ps.Schedule, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Named and custom, with split backward and any placement, in either form."""
    schedule = schedule.with_updates(1, "one").with_slices(1)
    assume(not schedule.placement.shares_stages and schedule.placement.n_paths < 3)
    path = tmp_path_factory.mktemp("files") / f"mine.{suffix}"
    schedule.save(path)
    back = ps.Schedule.load(path)
    assert back == schedule
    assert back.name == "mine"


def test_form_of_the_csv(tmp_path: Path) -> None:
    """A row a rank, a cell an action, as torch has it."""
    ps.schedule("1f1b", 2, 3).save(tmp_path / "a.csv")
    assert unsigned((tmp_path / "a.csv").read_text())[0] == ONE_F_ONE_B


def test_form_of_the_text(tmp_path: Path) -> None:
    """What `grid` prints; the suffix of what is read does not matter, nor do labels and blanks."""
    schedule = ps.schedule("1f1b", 2, 3)
    schedule.save(tmp_path / "a.TXT")
    text, _ = unsigned((tmp_path / "a.TXT").read_text())
    assert text == schedule.grid() + "\n"
    assert load(tmp_path, text) == schedule
    assert load(tmp_path, re.sub("device . [|]", "", text)) == schedule
    assert load(tmp_path, re.sub("device .", "", text)) == schedule
    assert load(tmp_path, text.replace("device", "\n  rank")) == schedule
    assert load(tmp_path, ONE_F_ONE_B, "a.txt") == schedule


def test_names(tmp_path: Path) -> None:
    """A schedule is called after its file, or as asked."""
    assert load(tmp_path, ONE_F_ONE_B, "my orders.csv").name == "my orders"
    assert ps.Schedule.load(str(tmp_path / "my orders.csv"), "mine").name == "mine"


def test_what_torch_writes(tmp_path: Path) -> None:
    """Messages, reductions, unsharding and idle steps are left out; so is a byte-order mark."""
    expected = orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert load(tmp_path, FROM_TORCH) == expected
    assert load(tmp_path, "\ufeff" + FROM_TORCH) == expected


def test_overlapped_actions(tmp_path: Path) -> None:
    """Two actions as one, in both forms."""
    rows = ["0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", "1F0 (1F1;1B0)OVERLAP_F_B 1F2 1B1 1B2"]
    expected = orders(*rows)
    assert expected.overlapped is not None
    assert load(tmp_path, "\n".join(rows)) == expected
    assert load(tmp_path, "\n".join(rows).replace(" ", ",")) == expected


def test_placement_is_read_off(tmp_path: Path) -> None:
    """Looped, V, and blocks of stages: a stage lies where its actions are."""
    rows = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
    assert load(tmp_path, rows).placement == ps.Placement.v_shaped(2)
    rows = "0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n"
    assert load(tmp_path, rows).placement == Placement([0, 0, 1, 1])


@pytest.mark.parametrize("n_devices", [2, 4])
def test_two_paths_are_read_off(tmp_path: Path, n_devices: int) -> None:
    """Of copies of the stages, one half of the micro-batches takes each; 5 of them split 3 to 2."""
    placement, m = ps.Placement.bidirectional(n_devices), 5
    path_of = placement.path_of(m)
    rows = [
        [
            f"{stage}{op}{k}"
            for op in "FB"
            for k in range(m)
            for stage in range(n_devices)
            if placement.paths[path_of[k]][stage] == device
        ]
        for device in range(n_devices)
    ]
    schedule = ps.Schedule.from_orders(rows, placement=placement)
    schedule.save(tmp_path / "both.csv")
    assert ps.Schedule.load(tmp_path / "both.csv") == schedule


SIGNED = {
    "csv": lambda folder: ps.schedule("1f1b", 2, 3).save(folder / "a.csv"),
    "txt": lambda folder: ps.schedule("1f1b", 2, 3).save(folder / "a.txt"),
    "overlapped": lambda folder: ps.schedule("dualpipev", 2, 4).save(folder / "a.csv"),
    "messages": lambda folder: ps.lower(ps.schedule("1f1b", 2, 3)).save_torch_csv(folder / "a.csv"),
}


@pytest.mark.parametrize("form", SIGNED)
def test_a_file_that_was_changed(tmp_path: Path, form: str) -> None:
    """An order that could run is refused too; without its checksum it is read as it is."""
    SIGNED[form](tmp_path)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    signature = re.search("sha256:[0-9a-f]{16}", text)[0]  # type: ignore[index]
    other = re.sub("(?<=[A-Z])[01](?![0-9])", lambda match: "10"[int(match[0])], text)
    path.write_text(other)
    with pytest.raises(ScheduleError, match="its checksum does not match") as caught:
        ps.Schedule.load(path)
    assert f"if the change is meant, delete '{signature}' from it" in str(caught.value)
    path.write_text(other.replace(f" {signature}", ""))
    ps.verify(ps.Schedule.load(path))
    path.write_bytes(text.replace("\n", "\r\n").encode())
    ps.verify(ps.Schedule.load(path))


REFUSED = {
    "empty": ("", "it is empty"),
    "blank": (" \n\t\n", "it is empty"),
    "NUL": (b"0F0,\0", "it has a NUL character"),
    "binary": (b"\x89PNG\xff\xfe", "it is no UTF-8 text (byte 0)"),
    "no action": (",,,\n", "it lists no F, B, I or W"),
    "only messages": (
        "0SEND_F0,0B0\n1RECV_F0,\n",
        "row 2 (device 1), column 1: '1RECV_F0' is misplaced",
    ),
    "other table": ("latency,1\n", "row 1 (device 0), column 1: 'latency' is not an action"),
    "unknown operation": (
        "0F0,0B0\n1F0,1SENDF0\n",
        "row 2 (device 1), column 2: '1SENDF0' names no operation: 'SENDF'; did you mean 'SEND_F'?",
    ),
    "no micro-batch": ("0F0,0B\n", "'0B' names no micro-batch"),
    "step": ("0F0,0B0,0STEP0\n", "'0STEP0' is no action that a schedule lists (F, B, I, W, R)"),
    "long cell": ("0F0," + "0" * 200, "column 2: 200 characters are no action"),
    "other overlap": (
        "0F0,(0F1;1W0)OVERLAP_F_B",
        "overlaps F with W; write the F first and the B or I second, such as "
        "'(0F4;7B1)OVERLAP_F_B'; "
        "torch may run any actions as one",
    ),
    "three at once": (
        "0F0,(0F1;1B0;2B0)OVERLAP_F_B",
        "is not an action; write stage, operation, micro-batch, such as '2F0'; torch may run",
    ),
    "cut grid": ("device 0 | 0F0 0F1 ...", "column 3: '...' is not an action"),
    "marked grid": ("device 0 | 0F0 >0F0< 0B0", "remove the mark of an error message"),
    "wrong label": ("device 1 | 0F0 0B0", "row 1 is of device 0, but its label says 1"),
    "no label": ("stage 0 | 0F0 0B0", "'stage 0' is no label of device 0"),
    "quote": ('0F0,"0B0\n', "row 1: unexpected end of data"),
    "row without actions": ("0F0,0B0\n\n1F0,1B0\n", "device 1 lists no F, B, I or W"),
    "missing stage": ("0F0,0B0\n2F0,2B0\n", "no action names stage 1; number stages from 0"),
    "no stage of its own": ("0F0,0B0,1F0,1B0\n0F1,0B1\n", "device 1 has no stage of its own"),
    "too large": ("0F0,0B99999999999\n", "0B99999999999 is out of range"),
    "SEND without RECV": (
        "0F0,0SEND_F0,0B0\n1F0,1B0\n",
        "row 1 (device 0), column 2: '0SEND_F0' has no receiver: the file has no 1RECV_F0",
    ),
    "RECV without SEND": (
        "0F0,0RECV_B0,0B0\n1F0,1B0\n",
        "'0RECV_B0' has no sender: the file has no 1SEND_B0",
    ),
    "message twice": (
        "0F0,0SEND_F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0\n",
        "column 3: '0SEND_F0' is listed twice",
    ),
    "halves mixed": (
        "0F0,0B0,1F1,1B1,1F2,1B2,0F3,0B3\n1F0,1B0,0F1,0B1,0F2,0B2,1F3,1B3\n",
        "the first half of the micro-batches takes one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_files(tmp_path: Path, case: str) -> None:
    """Each says what is wrong, and where."""
    content, words = REFUSED[case]
    with pytest.raises(ScheduleError) as caught:
        load(tmp_path, content)
    assert words in str(caught.value)
    assert str(tmp_path / "mine.csv") in str(caught.value)
    assert len(str(caught.value)) < 600


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing one, with the nearest there is; a folder."""
    ps.schedule("gpipe", 2, 2).save(tmp_path / "gpipe.csv")
    with pytest.raises(ScheduleError, match=r"No such file.*did you mean 'gpipe.csv'"):
        ps.Schedule.load(tmp_path / "gpip.csv")
    with pytest.raises(ScheduleError, match="Is a directory"):
        ps.Schedule.load(tmp_path)


@given(content=st.one_of(st.binary(), st.text(alphabet='0123FBIW_,;|()" \r\nOVERLAPSENDRECdevice')))
def test_any_content(content: str | bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a file holds, it is a schedule or refused as such."""
    with suppress(ScheduleError):
        ps.verify(load(tmp_path_factory.mktemp("any"), content))


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    """No folder; several mini-batches, which the forms have no place for."""
    schedule = ps.schedule("1f1b", 2, 4)
    with pytest.raises(ArgumentError, match="cannot write"):
        schedule.save(tmp_path / "nowhere" / "a.csv")
    with pytest.raises(ScheduleError, match=r"2 mini-batches.*call with_updates again"):
        schedule.with_updates(2, "stashed").save(tmp_path / "a.csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["0F0 (0F1;0B0)OVERLAP_F_B 0F1 0B1"], "device 0, position 2: 0F1 is a dup.*>0F1<"),
        (["0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B"], "lacks 0B2.*OVERLAP_F_B +><"),
        (["0F0 0B0", "1F0 1B0 0B1 0F1"], "device 1, position 2: 0B1 is misplaced.*>0B1<"),
        (["0F0 (0F1;0F0)OVERLAP_F_B"], "overlaps F with F"),
    ],
)
def test_verify_marks_the_cell(tmp_path: Path, rows: list[str], words: str) -> None:
    """Overlapped actions are one cell; what follows them is marked where it stands."""
    with pytest.raises(ScheduleError, match=f"(?s){words}"):
        ps.verify(load(tmp_path, "\n".join(rows)))


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


COSTS = ("--forward", "1", "--backward", "2")


def test_command_line(tmp_path: Path, capsys: Any) -> None:
    """A file stands where a name does, and says how many devices and micro-batches there are."""
    path = tmp_path / "mine.csv"
    path.write_text(ONE_F_ONE_B)
    status, out, _ = run(capsys, "simulate", path, *COSTS)
    assert status == 0
    assert f"{path}: 2 devices, 2 stages, 3 micro-batches" in out
    named = run(capsys, "simulate", "1f1b", "--devices", 2, "--microbatches", 3, *COSTS)[1]
    assert out.splitlines()[1:] == named.splitlines()[1:]
    status, out, _ = run(
        capsys, "compare", path, "gpipe", "--devices", 2, "--microbatches", 3, *COSTS,
        "--option", "backward_order=forward",
    )  # fmt: skip
    assert status == 0
    assert len(out.splitlines()) == 3


def test_command_line_refuses(tmp_path: Path, capsys: Any) -> None:
    """Other counts than the file's, options, what is wrong in it, or no file."""
    path = tmp_path / "mine.csv"
    path.write_text(ONE_F_ONE_B)
    for arguments, words in (
        ((path, "--devices", 4), "takes just the 2 devices and 3 micro-batches of its file"),
        ((path, "--option", "n_chunks=2"), "takes no option 'n_chunks'"),
        ((tmp_path / "min.csv",), "No such file or directory; did you mean 'mine.csv'?"),
    ):
        status, _, error = run(capsys, "simulate", *arguments, *COSTS)
        assert status == 2
        assert words in error
        assert len(error.splitlines()) == 1
    path.write_text(ONE_F_ONE_B.replace("1B1", "1B0"))
    _, _, error = run(capsys, "simulate", path, *COSTS, "--verbose")
    assert "schedule 'mine': device 1, position 3: 1B0 is a duplicate" in error
    assert ">1B0<" in error


def test_settings_file(tmp_path: Path, capsys: Any) -> None:
    """A TOML file names schedule files beside it."""
    (tmp_path / "mine.csv").write_text(ONE_F_ONE_B)
    (tmp_path / "a.toml").write_text(
        'schedule = ["mine.csv", "gpipe"]\ndevices = 2\nmicrobatches = 3\n'
        "[costs]\nforward = 1\nbackward = 2\n"
    )
    status, out, _ = run(capsys, "compare", "--config", tmp_path / "a.toml")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["mine.csv", "gpipe"]
    status, out, _ = run(capsys, "simulate", "--config", tmp_path / "a.toml", "mine.csv")
    assert status == 0
    assert "mine.csv: 2 devices" in out


@pytest.mark.slow
def test_sweep(tmp_path: Path) -> None:
    """Rows of files take their counts from them; a row of other counts says so."""
    path = tmp_path / "mine.csv"
    path.write_text(ONE_F_ONE_B)
    base = {"forward": 1.0, "backward": 2.0}
    table = ps.sweep([{"schedule": str(path)}], base=base, progress=False, n_jobs=1)
    assert table["makespan"][0] == 12.0
    grid = {"schedule": ["1f1b", str(path)], "n_microbatches": [3, 4]}
    table = ps.sweep(grid, base={**base, "n_devices": 2}, progress=False, n_jobs=2)
    assert table["makespan"].tolist()[:3] == [12.0, 15.0, 12.0]
    assert "takes just the 2 devices and 3 micro-batches" in table["error"][3]


def test_sweep_again_after_the_file_changed(tmp_path: Path) -> None:
    """A row that was kept is run anew where the orders in its file are others."""
    path, out = tmp_path / "mine.csv", tmp_path / "rows.jsonl"
    rows = [{"schedule": str(path), "forward": 1.0, "backward": 2.0}]
    path.write_text(ONE_F_ONE_B)
    first = ps.sweep(rows, path=out, progress=False, n_jobs=1)
    again = ps.sweep(rows, path=out, progress=False, n_jobs=1)
    assert first["seconds"][0] == again["seconds"][0]
    assert first["makespan"][0] == 12.0
    path.write_text("0F0,0B0,0F1,0B1,0F2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    assert ps.sweep(rows, path=out, progress=False, n_jobs=1)["makespan"][0] == 18.0
