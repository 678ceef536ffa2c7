"""Parsers of the two commands, for the pages that list their options."""

from __future__ import annotations

import argparse

import pipeexec.cli.arguments
import pipesim.cli
import pipesim.cli.arguments


def pipesim_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipesim``, with the arguments of every command."""
    commands = pipesim.cli.COMMANDS
    return without_epilogs(pipesim.cli.arguments.make_parser(commands, commands))


def pipeexec_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeexec``."""
    return without_epilogs(pipeexec.cli.arguments.make_parser())


def without_epilogs(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Leave out texts for a terminal, whose columns are no reStructuredText."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                command.epilog = None
    return parser
