"""Without torch, pipesim works whole, and pipeexec says how to install it."""

from __future__ import annotations

import subprocess
import sys

from places import ROOT

#: Simulates, draws and plans where torch cannot be imported, then tries pipeexec and its command.
PROGRAM = """
import sys
sys.modules["torch"] = None
import matplotlib
matplotlib.use("agg")
import pipesim as ps
from pipesim.cli import main
timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8)), ps.Costs(1, 2))
timeline.plot()
assert timeline.makespan == 33
assert timeline.why.idle_by_cause().shape == (4, 9)
assert main(["schedules"]) == 0
try:
    import pipeexec
except ModuleNotFoundError as error:
    print(error, error.name)
import pipeexec_command
sys.exit(pipeexec_command.main())
"""


def test_without_torch() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    message = (
        "pipeexec needs torch, which is not installed; pip install 'pipesim[exec]'. "
        "pipesim works without it"
    )
    assert ran.stdout.splitlines()[-1] == f"{message} torch"
    assert ran.stderr == f"pipeexec: error: {message}\n"
    assert ran.returncode == 2
