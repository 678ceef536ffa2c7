"""The command ``pipesim``: simulate a schedule, compare several, sweep, calibrate, plan, view.

Settings come from arguments, from a TOML file, or from both; see `pipesim.sweeps.settings`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pipesim.cli.arguments import Command, parse_arguments
from pipesim.cli.commands import calibrate, compare, list_schedules, plan, simulate, sweep
from pipesim.cli.page_commands import demo_page, view
from pipesim.errors import PipeError, PipeWarning

__all__ = ["main"]

#: Function and summary of each command, by name.
COMMANDS: Mapping[str, tuple[Command, str]] = {
    "simulate": (simulate, "simulate a schedule; print its times and memory"),
    "compare": (compare, "simulate several schedules; print a row for each"),
    "sweep": (sweep, "simulate every combination of values; print a row for each"),
    "calibrate": (calibrate, "fit constants of a GPU to measured steps; print them and errors"),
    "plan": (plan, "find the best configurations of a model on a cluster; print a row for each"),
    "schedules": (list_schedules, "list the named schedules with their closed forms"),
    "view": (view, "show timelines, schedules, traces and runs as a page in a browser"),
    "demo-page": (demo_page, "write a page of all named schedules on one time axis"),
}
#: What to write in a TOML file or on the command line, for advice of Python in a message.
_ADVICE = {
    "network=pipesim.Network.preset(": 'network = { preset = "dgx_h100" } in [costs]',
    'partition="balanced"': 'partition = "balanced" in [costs.transformer]',
    "such as constants=(": "such as --constants flops",
    "such as fields={": "--fields JSON",
    "such as only={": "--only JSON",
    "give input_grad and weight_grad": "--input-grad and --weight-grad",
    "leaves it out": "--ops JSON, with null for None",
    "or n_ranks=": "the folder of these files, or --ranks N",
}


def _with_advice(text: str) -> str:
    """Return a message, with the option or key in place of Python that it advises."""
    return text + "".join(f" (here: {key})" for python, key in _ADVICE.items() if python in text)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print each of our warnings once, as a line on stderr without a place in the code."""
    with warnings.catch_warnings():
        others, printed = warnings.showwarning, set[str]()

        def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
            """Print a warning of ours; leave others to Python."""
            if not issubclass(category, PipeWarning):
                others(message, category, *place)
            elif str(message) not in printed:
                printed.add(str(message))
                print(f"pipesim: warning: {_with_advice(str(message))}", file=sys.stderr)

        warnings.showwarning = show  # type: ignore[assignment]  # its place is passed on
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv``, by default the arguments of the process.

    Returns
    -------
    int
        Exit status: 0; 2 after a mistake, with one line on stderr; 130 after Ctrl-C, with one
        line on stderr; 141 if the reader of the output has closed it.
    """
    verbose = False
    try:
        try:
            args = parse_arguments((sys.argv[1:] if argv is None else argv) or ["--help"], COMMANDS)
            verbose = args.verbose
            with _plain_warnings():
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
    except KeyboardInterrupt as end:
        print(f"pipesim: interrupted{end}", file=sys.stderr)
        return 130
    except (PipeError, OSError, MemoryError, OverflowError) as error:
        first, *more = str(error).splitlines() or [type(error).__name__]
        if more and not verbose:
            first, more = f"{first} (--verbose shows all)", []
        print(f"pipesim: error: {_with_advice(first)}", *more, sep="\n", file=sys.stderr)
        return 2
    return 0
