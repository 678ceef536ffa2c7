"""Parsers of the two commands, for the pages that list their options."""

from __future__ import annotations

import argparse

import pipeexec.cli.arguments
import pipesim.cli
import pipesim.cli.arguments


def pipesim_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipesim``, with the arguments of every command."""
    commands = pipesim.cli.COMMANDS
    return pipesim.cli.arguments.make_parser(commands, commands)


def pipeexec_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeexec``."""
    return pipeexec.cli.arguments.make_parser()
