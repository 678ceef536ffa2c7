"""Options from signatures and docstrings, and help by groups."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Literal

import pytest

from pipesim.cli.arguments import parse_value
from pipesim.errors import UnknownNameError
from pipesim.utils.command_line import MOST_LINES, CommandParser, add_options, literals

Mode = Literal["fast", "exact"] | int


def run(
    count: int = 3,
    mode: Mode | None = None,
    step: Literal["flush", "none"] = "flush",
    names: Iterable[str] | str = (),
    check: bool = True,
) -> None:
    """Run.

    Parameters
    ----------
    count, names
        Number of ``"runs"``; 5 % more by `default_number`.
    mode
        How:

        - ``"fast"``: as fast as possible,
          on one device.
        - A number.
    step
        Last task. And a second sentence.
    check
        Whether to check.

    Returns
    -------
    None
        Nothing.
    """


def parser() -> CommandParser:
    command = CommandParser(prog="x", description="Run it.", pages={"file": "a = 1\n"})
    group = command.add_argument_group("run", "all of it")
    add_options(
        group, run, prefix="of.", flags={"count": "--n"}, parse=parse_value, with_defaults=True
    )
    return command


def test_options_are_those_of_the_function() -> None:
    args = parser().parse_args(["--n", "4", "--no-check"])
    assert vars(args) == {
        "of.count": 4,
        "of.mode": None,
        "of.step": "flush",
        "of.names": (),
        "of.check": False,
    }
    assert literals(run, "Mode | None") == ("fast", "exact")
    assert literals(run, "Literal['flush', 'none']") == ("flush", "none")


def test_short_help_has_a_line_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        parser().format_help()
        == """\
usage: x [OPTION ...]

Run it.

options:
  -h, --help [GROUP]      print this help, or the full texts of a GROUP

run: all of it
  --n N                   number of runs; 5 % more by default_number
  --mode fast|exact       how
  --step flush|none       last task
  --names VALUE           number of runs; 5 % more by default_number
  --[no-]check            whether to check

GROUP of --help: all, options, run, file
"""
    )


def test_full_help_fills_paragraphs_and_items(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = parser().topic("run")
    assert (
        text
        == """\
run: all of it
  --n N
      Number of runs; 5 % more by default_number.
  --mode fast|exact
      How:
      - fast: as fast as possible, on one device.
      - A number.
  --step flush|none
      Last task. And a second sentence. (default: flush)
  --names VALUE
      Number of runs; 5 % more by default_number.
  --[no-]check
      Whether to check. (default: True)
"""
    )
    with pytest.raises(SystemExit) as end:
        parser().parse_args(["--help", "all"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{parser().topic('options')}\n{text}\na = 1\n"
    with pytest.raises(UnknownNameError, match="did you mean 'file'"):
        parser().topic("fil")


def test_the_largest_group_is_packed() -> None:
    """Only so far that the help is short enough; other groups keep their texts."""
    command = parser()
    group = command.add_argument_group("many")
    for k in range(MOST_LINES):
        group.add_argument(f"--option-{k}", action=argparse.BooleanOptionalAction, help="x")
    text = command.format_help()
    assert text.count("\n") <= MOST_LINES
    assert "many: (--help many explains)\n  --[no-]option-0 --[no-]option-1 " in text
    assert "  --mode fast|exact       how\n" in text
