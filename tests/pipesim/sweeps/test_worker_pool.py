"""`run_calls` alone, without a sweep: any function, on joblib's workers."""

from __future__ import annotations

import threading

import pytest

from pipesim.errors import ArgumentError
from pipesim.sweeps.worker_pool import LostCall, run_calls


def square(number: int) -> int:
    return number * number


def test_results_come_by_key_from_this_process() -> None:
    calls = {str(number): (number,) for number in range(5)}
    results = dict(run_calls(square, calls, n_jobs=1, backend=None))
    assert results == {"0": 0, "1": 1, "2": 4, "3": 9, "4": 16}


def test_nothing_to_call() -> None:
    assert dict(run_calls(square, {}, n_jobs=2, backend=None)) == {}


@pytest.mark.slow
def test_arguments_that_cannot_be_sent() -> None:
    calls = {"lock": (threading.Lock(),), "number": (3,)}
    results = dict(run_calls(repr, calls, n_jobs=2, backend=None))
    assert results["number"] == "3"
    lost = results["lock"]
    assert isinstance(lost, LostCall)
    assert lost.reason.startswith("cannot be sent to a worker: TypeError: cannot pickle")


def test_threads_take_what_processes_cannot() -> None:
    lock = threading.Lock()
    results = dict(run_calls(repr, {"lock": (lock,)}, n_jobs=2, backend="threading"))
    assert results == {"lock": repr(lock)}


def test_an_unknown_backend() -> None:
    with pytest.raises(ArgumentError, match="joblib cannot use the backend 'fog'"):
        next(run_calls(square, {"a": (1,)}, n_jobs=2, backend="fog"))
