"""A page for each command of the two programs, from the parser that reads its options."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pipeexec.cli.arguments
import pipesim.cli
import pipesim.cli.arguments


def pipesim_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipesim``, with the arguments of every command."""
    commands = pipesim.cli.COMMANDS
    return for_pages(pipesim.cli.arguments.make_parser(commands, commands))


def pipeexec_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeexec``."""
    return for_pages(pipeexec.cli.arguments.make_parser())


def for_pages(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Leave out texts for a terminal, whose columns are no reStructuredText, and empty defaults."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                command.epilog = None
                command._optionals.title = "general"  # the builder would say "Named Arguments"
                for option in command._actions:
                    option.default = None if option.default == [] else option.default
    return parser


#: Title of a page, and the parser of its command.
PAGE = """{title}
{line}

.. argparse::
   :module: command_line
   :func: {program}_parser
   :prog: {program}
   :path: {command}
   :nodefaultconst:
"""


def write_pages(app: Any) -> None:
    """Write a page for each command, among the sources."""
    folder = Path(app.srcdir) / "reference" / "command_line"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for program, parser in {"pipesim": pipesim_parser(), "pipeexec": pipeexec_parser()}.items():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices:
                    title = f"{program} {command}"
                    text = PAGE.format(
                        title=title, line="=" * len(title), program=program, command=command
                    )
                    (folder / f"{program}_{command.replace('-', '_')}.rst").write_text(text)


def setup(app: Any) -> dict[str, Any]:
    """Write the pages before any is read."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}  # reads notebooks in parallel
