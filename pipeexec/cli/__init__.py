"""The command ``pipeexec``: ``train``, ``validate``, ``run``, ``profile`` and ``show``.

Under torchrun every process runs the same command; rank 0 prints and writes.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial

from pipeexec.cli.arguments import make_parser
from pipeexec.cli.commands import (
    COMMANDS,
    Command,
    print_error,
    print_error_here,
    save_partial_timeline,
    show,
    show_warning,
)
from pipesim.errors import PipeError, PipeWarning

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PipeWarning)
        warnings.showwarning = show_warning
        try:
            words = sys.argv[1:] if argv is None else argv
            arguments = make_parser().parse_args(words or ["--help"])
            command = COMMANDS.get(arguments.command)
            if command is None:
                return show(arguments)
            # Whether torchrun started this process, and others.
            has_peers = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
            return _run_with_peers(arguments, command) if has_peers else command(arguments)
        except PipeError as error:
            print_error(str(error).splitlines()[0])
            return 2
        except KeyboardInterrupt:
            print_error("interrupted", kind="")
            return 130


def _run_with_peers(arguments: argparse.Namespace, command: Command) -> int:
    """Run a command in one of several processes; one of them prints its error."""
    # The error names a lost connection; torch would print it too.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from pipeexec.cli.launch import run_together

    return run_together(
        partial(command, arguments),
        print_error_here,
        partial(save_partial_timeline, arguments),
        arguments.timeout,
    )
