"""The command ``pipesim``: simulate one schedule, compare several, sweep over settings, calibrate.

Settings come from arguments, from a TOML file, or from both; see `pipesim.sweeps.settings`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from pipesim.cli.arguments import Command, parse_arguments
from pipesim.cli.calibrate import calibrate
from pipesim.cli.commands import compare, list_schedules, simulate, sweep
from pipesim.errors import PipeError

__all__ = ["main"]

#: Function and summary of each command, by name.
COMMANDS: Mapping[str, tuple[Command, str]] = {
    "simulate": (simulate, "simulate a schedule; print its times and memory"),
    "compare": (compare, "simulate several schedules; print a row for each"),
    "sweep": (sweep, "simulate every combination of values; print a row for each"),
    "calibrate": (calibrate, "fit constants of a GPU to measured steps; print them and errors"),
    "schedules": (list_schedules, "list the named schedules with their closed forms"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv``, by default the arguments of the process.

    Returns
    -------
    int
        Exit status: 0; 2 after a mistake, with one line on stderr; 130 if interrupted; 141 if
        the reader of the output has closed it.
    """
    verbose = False
    try:
        try:
            args = parse_arguments(argv, COMMANDS)
            verbose = args.verbose
            args.run(args)
        finally:
            sys.stdout.flush()
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    except BrokenPipeError:
        # Otherwise the interpreter may flush once more at its end, and print an error; see "Note on
        # SIGPIPE" in the documentation of Python's signal module.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (PipeError, OSError, MemoryError, OverflowError) as error:
        first, *more = str(error).splitlines() or [type(error).__name__]
        if more and not verbose:
            first, more = f"{first} (--verbose shows all)", []
        print(f"pipesim: error: {first}", *more, sep="\n", file=sys.stderr)
        return 2
    return 0
