"""Every use of torch and of the CUDA driver in the sources is one that the installed ones have.

Under torch built for CUDA that covers what no test on CPU workers can call: streams, events,
captures, kernels, green contexts. ``make gpu-rehearsal`` runs it so.
"""

from __future__ import annotations

import importlib
import importlib.util

import pytest
from places import ROOT
from torch_calls import driver_uses, problem, sources, torch_uses

from pipeexec.devices.green_contexts import LibCuda

GREEN = ROOT / "pipeexec/devices/green_contexts.py"


@pytest.mark.slow
def test_torch_has_every_name_and_takes_every_call() -> None:
    """Names exist, and arguments fit signatures."""
    uses = [use for path in sources() for use in torch_uses(path)]
    called = {use.name for use in uses if use.n_arguments is not None}
    # Found by an import, an annotation, an assignment to self, and the result of a call.
    assert called >= {
        "torch.autograd.Variable._execution_engine.run_backward",
        "torch.cuda.Stream.wait_event",
        "torch.cuda.Event.elapsed_time",
        "torch.cuda.Stream.synchronize",
    }
    alike = {use._replace(where=""): use for use in uses}
    assert [message for use in alike.values() if (message := problem(use)) is not None] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\ntorch.cuda.graf", "file.py:2: there is no torch.cuda.graf"),
        ("from torch.cuda import graf", "file.py:1: there is no torch.cuda.graf"),
        ("import torch.cuda.graf", "there is no torch.cuda.graf"),
        ("import torch\ntorch.cuda.Event(timing=True)", "unexpected keyword argument 'timing'"),
        ("import torch.cuda as c\nc.Event(1, 2, 3, 4, 5)", "too many positional arguments"),
        (
            "from functools import partial\nimport torch\npartial(torch.cuda._sleep, 1, 2)",
            "too many positional arguments",
        ),
        (
            "from torch.cuda import Stream\ndef f(s: Stream): s.wait_event()",
            "missing a required argument: 'event'",
        ),
        (
            "import torch\nclass A:\n def f(self): self.e.wait(1, 2)\n"
            " def __init__(self): self.e = torch.cuda.Event()",
            "file.py:3: torch.cuda.Event.wait.* too many positional arguments",
        ),
        ("import torch\ntorch.cuda.current_stream().wait()", "no torch.cuda.Stream.wait "),
        ("def f(base, e): base.time.elapsed_time()", "missing a required argument"),
    ],
)
def test_what_torch_has_not_is_found(text: str, message: str) -> None:
    (reason,) = {problem(use) for use in torch_uses(ROOT / "file.py", text)} - {None}
    with pytest.raises(AttributeError, match=message):
        raise AttributeError(reason)


def test_the_driver_takes_every_call() -> None:
    """Through its bindings, where they are installed, and through ours."""
    calls = list(driver_uses(GREEN))
    roots: list[object] = [LibCuda(None)]
    if importlib.util.find_spec("cuda") is not None:
        driver = importlib.import_module("cuda.bindings.driver")
        assert isinstance(driver.CUdevResource().sm.smCount, int)
        assert driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM == 1
        roots.append(driver)
    assert {use.name for use in calls} >= {"cuDevSmResourceSplitByCount", "cuGreenCtxCreate"}
    assert [message for root in roots for use in calls if (message := problem(use, root))] == []
    planted = calls[0]._replace(n_arguments=7)
    assert all("too many positional arguments" in str(problem(planted, root)) for root in roots)
