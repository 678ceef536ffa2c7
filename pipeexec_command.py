"""The command ``pipeexec``; outside of the package, which cannot be imported without torch."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command, or say in one line how to install torch; return the exit status."""
    try:
        try:
            from pipeexec.cli import main as run
        except KeyboardInterrupt:
            print("pipeexec: interrupted", file=sys.stderr)
            return 130
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"pipeexec: error: {error}", file=sys.stderr)
        return 2
    return run()
