"""Modules of ``make gpu``, which lie in ``benchmarks/``, and sources of steps that end in some way.

For tests with the fixture ``gpu_script``.
"""

from __future__ import annotations

import importlib
from types import ModuleType

PASSES = "print('fine')"
MISSES = """
import sys
print("ok     a\\nMISSED error of 7 %", file=open(sys.argv[1] + "/host.txt", "w"))
raise SystemExit(3)
"""
FAILS = "raise ValueError('bad')"
IS_KILLED = "import os; print('half way', flush=True); os.kill(os.getpid(), 9)"
HANGS = """
import threading, time
def asleep():
    time.sleep(60)
threading.Thread(target=asleep).start()
print("slow")
time.sleep(60)
"""


def part(name: str) -> ModuleType:
    """Return a module of ``benchmarks/on_gpu``."""
    return importlib.import_module(f"on_gpu.{name}")
