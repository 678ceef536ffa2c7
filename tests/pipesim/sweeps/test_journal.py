"""`Journal` alone, without a sweep: rows in a file, whatever they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipesim.errors import ArgumentError
from pipesim.sweeps.journal import Journal


def test_rows_come_back_and_later_ones_replace_earlier(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.append("a", {"value": 1})
        journal.append("b", {"value": "µ"})
        journal.append("a", {"value": 2})
        assert journal.rows == {"a": {"value": 2}, "b": {"value": "µ"}}
    with Journal(path) as journal:
        assert journal.rows == {"a": {"value": 2}, "b": {"value": "µ"}}
    assert len(path.read_text().splitlines()) == 3


def test_a_line_that_was_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.append("a", {"value": 1})
        journal.append("b", {"value": 2})
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for size in range(first, len(content)):
        path.write_bytes(content[:size])
        with Journal(path) as journal:
            assert journal.rows == {"a": {"value": 1}}
        assert path.read_bytes() == content[:first]


def test_a_changed_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.append("a", {"value": 1})
        journal.append("b", {"value": 2})
    path.write_text(path.read_text().replace('"value": 2', '"value": 3'))
    with (
        pytest.raises(ArgumentError, match="line 2 was changed after it was written"),
        Journal(path),
    ):
        pass


def test_lines_without_a_checksum_are_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"digest": "a", "value": 1}\n')
    with Journal(path) as journal:
        assert journal.rows == {"a": {"value": 1}}


def test_the_caller_checks_rows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.append("a", {"value": -1})
    negative = Journal(path, lambda row: "value is negative" if row["value"] < 0 else "")
    with pytest.raises(ArgumentError, match="line 1: value is negative; remove the line"), negative:
        pass


def test_one_writer_at_a_time_and_the_lock_ends_with_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        with pytest.raises(ArgumentError, match="another process is writing"), Journal(path):
            pass
        journal.append("a", {})
    with Journal(path) as journal:
        assert journal.rows == {"a": {}}


@pytest.mark.parametrize("content", ["text\n", "[]\n", json.dumps({"value": 1}) + "\n", "text"])
def test_another_file_is_left_unchanged(content: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text(content)
    with pytest.raises(ArgumentError, match="line 1 is no row of results"), Journal(path):
        pass
    assert path.read_text() == content
