"""Check that arrays fit in this machine's memory, before they are allocated."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from pipesim.errors import CapacityError

#: Largest number that messages show; it still is a float. Larger ones are shown as this one.
_MOST = 10**300
#: Seconds for which the bytes that processes share are not read again. No process fills much more
#: than a gigabyte of memory in this time.
_FRESH = 0.1
#: Time of the last reading, and the bytes that processes share.
_shared = (-_FRESH, 0)


def available_memory() -> int:
    """Return the bytes that this process can still allocate: machine, cgroup and ulimit.

    Those of machine and cgroup may be `_FRESH` seconds old: to read them takes 0.2 ms.
    """
    global _shared
    now = time.monotonic()
    if not 0 <= now - _shared[0] < _FRESH:
        _shared = (now, min([_machine_bytes(), *_cgroup_bytes()]))
    return min([_shared[1], *_process_bytes()])


def _process_bytes() -> list[int]:
    """Return the bytes left under the limit of this process's address space, if it has one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        pages = 0
    return [max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))]


def _cgroup_bytes() -> list[int]:
    """Return the bytes left under the limit of a container or job, if any (cgroup v2)."""
    try:
        name = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].split("\n", 1)[0]
        folder = Path("/sys/fs/cgroup") / name.lstrip("/")
        limit, used = ((folder / f"memory.{x}").read_text() for x in ("max", "current"))
        return [max(0, int(limit) - int(used))]
    except (OSError, ValueError, IndexError):  # another version, no limit, or no cgroup
        return []


def _machine_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(subject: str, nbytes: int, advice: str) -> None:
    """Raise `CapacityError` if ``nbytes`` are more than this process can still allocate."""
    available = available_memory()
    if nbytes > available:
        raise CapacityError(
            f"{subject} needs {bytes_text(nbytes)}, and {bytes_text(available)} are available; "
            f"{advice}"
        )


def count_text(n: int) -> str:
    """Return ``6,000`` or ``6e+12``."""
    return f"{n:,}" if n < 10**6 else f"{min(n, _MOST):.3g}"


def bytes_text(nbytes: int) -> str:
    """Return ``24 GB``."""
    return f"{min(nbytes, _MOST) / 1e9:.3g} GB"
