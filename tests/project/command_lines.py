"""Attack an option of a command line with texts that suit no option, or few."""

from __future__ import annotations

import contextlib
import io
import re
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from attack import SECONDS, Outcome, Overdue
from case_choice import EVERY_CASE
from places import DATA

_TEXTS = ("", "x", "-1", "nan", "1e999", "1_0", "[", "a\nb", "x" * 5000)
#: Texts that an option takes: names of files and folders, no skip, no limit.
_FILE = ("x", "-1", "nan", "1e999", "1_0", "[", "a\nb")
FINE = {"--csv": _FILE, "--out": _FILE, "--name": _FILE, "--results": ("", *_FILE),
        "--skips": ("",), "--bandwidth": ("1e999",), "--jobs": ("-1",), "--seed": (),
        "--host-bandwidth": ("1e999",),
        "--json": _FILE, "--order": _FILE, "--title": _TEXTS}  # fmt: skip
#: Texts that a command which takes a moment is spared as names of files: to it they are names such
#: as "x", and the other commands are given all of them.
_REPETITIONS = ("-1", "nan", "1e999", "1_0", "[")
_SMALL = ["--devices", "2", "--microbatches", "2", "--forward", "1", "--backward", "2"]
_SHORT = ["--steps", "1", "--warm-up", "0", "--layers", "2", "--width", "16", "--heads", "1",
          "--sequence", "4", "--batch", "8"]  # fmt: skip
#: By command, arguments of a good call, which ends at once. Later arguments override them. The good
#: call of a sweep starts processes, which takes longer than a bad call may; later calls use them.
COMMANDS: dict[str, list[str]] = {
    "pipesim simulate": ["simulate", "1f1b", *_SMALL],
    "pipesim compare": ["compare", "1f1b", "gpipe", *_SMALL],
    "pipesim sweep": ["sweep", "--grid", "schedule=1f1b", *_SMALL],
    "pipesim schedules": ["schedules"],
    "pipesim calibrate": ["calibrate", str(DATA / "steps.csv"), "--gpu", "a100_80gb",
                          "--constants", "flops"],
    "pipesim plan": ["plan", "gpt2_xl", "--cluster", "dgx_h100", "--gpus", "2",
                     "--global-batch", "2", "--tensor-parallel", "1", "--pipeline-parallel", "2",
                     "--microbatch-size", "1", "--schedules", "1f1b", "--recompute", "none",
                     "--context-parallel", "1", "--expert-parallel", "1", "--n-slices", "1",
                     "--shard-parameters", "none", "--offload", "none"],
    "pipesim view": ["view", str(DATA / "torch_interleaved"), "--no-open"],
    "pipesim demo-page": ["demo-page", "-p", "2", "-m", "2"],
    "pipeexec run": ["run", *_SHORT],
    "pipeexec validate": ["validate", *_SHORT, "--schedules", "1f1b"],
    "pipeexec profile": ["profile", *_SHORT],
    "pipeexec show": ["show"],
}  # fmt: skip


def run(
    main: Callable[[Sequence[str]], int], argv: Sequence[str], seconds: float = SECONDS
) -> tuple[object, str, str]:
    """Return the exit status, and what was written to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status: object = main(argv)
    except SystemExit as end:
        status = end.code or 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return status, out.getvalue(), err.getvalue()


def options(main: Callable[[Sequence[str]], int], name: str) -> list[str]:
    """Return the options of a command that take a value, those of an earlier one left out."""
    program, command = name.split()
    names = _listed(main, command)
    for other in COMMANDS:
        if other == name:
            break
        if other.startswith(program):
            names = [option for option in names if option not in _listed(main, other.split()[1])]
    return names


def texts(name: str, option: str, index: int) -> list[str]:
    """Return the texts to attack an option with: by default one, by its index."""
    is_long = name == "pipesim calibrate" or name.startswith("pipeexec")
    spared = _REPETITIONS if is_long and FINE.get(option, ())[-7:] == _FILE else ()
    left = [text for text in _TEXTS if text not in spared]
    return left if EVERY_CASE else [left[index % len(left)]]


@cache
def _listed(main: Callable[[Sequence[str]], int], command: str) -> list[str]:
    """Return the options of a command that take a value, as its help lists them."""
    _, text, _ = run(main, [command, "--help", "all"])
    return re.findall(r"^  (--[\w-]+) [^\s-]", text, re.MULTILINE)


def attack_option(
    name: str, main: Callable[[Sequence[str]], int], option: str, text: str, folder: Path
) -> Outcome:
    """Run a command with a bad text for one option: exit status 2, and one line on stderr."""

    def verdict(kind: str, what: object) -> Outcome:
        return Outcome(name, option, repr(text)[:20], kind, f"{what}"[:300])

    before = set(folder.parent.iterdir())
    is_fine = text in FINE.get(option, ())
    try:
        status, _, err = run(main, [*COMMANDS[name], f"{option}={text}"])
    except Overdue:
        return verdict("slow", f"more than {SECONDS} s")
    except BaseException as error:
        return verdict("raised", f"{type(error).__name__}: {error}")
    if set(folder.parent.iterdir()) != before:
        return verdict("outside", "wrote a file outside its folder")
    if status == 0:
        return verdict("allowed" if is_fine else "accepted", "exit status 0")
    if status != 2 or err.count("\n") != 1 or "Traceback" in err:
        return verdict("raised", f"exit status {status}, stderr {err!r}")
    return verdict("refused", err)
