"""The sources that ran: where an archive is made there may be no git."""

from __future__ import annotations

import hashlib
import subprocess

from _machine import ROOT

_FOLDERS = ("pipesim", "pipeexec", "benchmarks", "tests")


def digest() -> str:
    """Return a checksum of all Python files of this checkout."""
    state = hashlib.sha256()
    for folder in _FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            state.update(file.relative_to(ROOT).as_posix().encode())
            state.update(file.read_bytes())
    return state.hexdigest()[:16]


def commit() -> str:
    """Return the commit of this checkout, and whether files were changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
