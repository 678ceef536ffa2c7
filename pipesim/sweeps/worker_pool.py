"""Calls spread over joblib's workers; one that kills its worker costs no other its result."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pipesim.errors import ArgumentError

if TYPE_CHECKING:
    import joblib

__all__ = ["Lost", "spread"]

T = TypeVar("T")
#: Backends of joblib that run calls in this process.
_HERE = ("SequentialBackend", "ThreadingBackend")

Calls = list[tuple[str, tuple[Any, ...]]]


@dataclass(frozen=True)
class Lost:
    """Stands for the result of a call that killed its worker, or that never reached one."""

    reason: str


def spread(
    function: Callable[..., T],
    calls: Mapping[str, tuple[Any, ...]],
    *,
    n_jobs: int,
    backend: str | None,
) -> Generator[tuple[str, T | Lost]]:
    """Yield ``key, function(*arguments)`` of each call, as they come.

    Where a worker dies, joblib gives up all that it has under way. Those calls are then run one at
    a time, so that the one that does it again is known; the rest goes on in parallel.

    Parameters
    ----------
    function
        Must not raise; a result may come from any process.
    calls
        Arguments by key.
    n_jobs, backend
        As joblib takes them; without a backend that of the enclosing ``joblib.parallel_config``,
        or else processes.

    Raises
    ------
    ArgumentError
        If joblib cannot use the backend.
    """
    left = dict(calls)
    while left:
        started: list[str] = []
        results = _round(function, list(left.items()), started, n_jobs, backend)
        with closing(results):
            try:
                for key, result in results:
                    del left[key]
                    yield key, result
            except Exception:
                if not set(started) & set(left):
                    raise  # not the fault of a call: there are no workers
        for key in [key for key in started if key in left]:
            yield key, _alone(function, key, left.pop(key), n_jobs, backend)


def _round(
    function: Callable[..., T], calls: Calls, started: list[str], n_jobs: int, backend: str | None
) -> Generator[tuple[str, T | Lost]]:
    """Run calls in parallel; note in ``started`` which joblib has taken."""
    import joblib

    parallel, sends = _parallel(n_jobs, backend)
    unsent: list[tuple[str, Lost]] = []

    def taken() -> Iterator[Any]:
        for key, arguments in calls:
            # Checked here because joblib's Dask backend would wait for such a call for ever.
            reason = _why_unsendable(function, arguments) if sends else ""
            if reason:
                unsent.append((key, Lost(reason)))
            else:
                started.append(key)
                yield joblib.delayed(_keyed)(function, key, arguments)

    with closing(cast("Generator[tuple[str, T]]", parallel(taken()))) as unordered:
        yield from unordered
    yield from unsent


def _why_unsendable(function: Callable[..., T], arguments: tuple[Any, ...]) -> str:
    """Return why a call cannot be sent to another process, or an empty string."""
    import cloudpickle  # type: ignore[import-untyped]  # it has no types

    try:
        cloudpickle.dumps((function, arguments))
    except Exception as error:
        return f"cannot be sent to a worker: {type(error).__name__}: {error}"
    return ""


def _keyed(function: Callable[..., T], key: str, arguments: tuple[Any, ...]) -> tuple[str, T]:
    return key, function(*arguments)


def _end_with(parent: int) -> None:
    """End this worker when its parent ends; loky's would outlive its being killed by minutes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _alone(
    function: Callable[..., T],
    key: str,
    arguments: tuple[Any, ...],
    n_jobs: int,
    backend: str | None,
) -> T | Lost:
    """Return the result of a call with no other beside it, or why there is none."""
    started: list[str] = []
    try:
        return next(_round(function, [(key, arguments)], started, n_jobs, backend))[1]
    except Exception as error:
        if not started:
            raise
        return Lost(_reason(error))


def _reason(error: Exception) -> str:
    """Say in a line why a call has no result; backends have errors of their own for a death."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"TerminatedWorkerError", "KilledWorker", "WorkerCrashedError"}:
        found = re.search(r"\{(.+?)\}", str(error))  # loky's "exit codes ... are {SIGKILL(-9)}"
        return f"worker was killed ({found[1] if found else 'signal unknown'}; out of memory?)"
    if type(error.__cause__).__name__ == "_RemoteTraceback":  # loky's: the text of a traceback
        text = str(error.__cause__).strip('"\n ')
    else:
        text = f"{type(error).__name__}: {error}"
    return f"could not be run in a worker: {text.splitlines()[-1]}"


def _parallel(n_jobs: int, backend: str | None) -> tuple[joblib.Parallel[Any], bool]:
    """Return joblib's Parallel for one round, and whether it sends calls to other processes."""
    import joblib
    from joblib.parallel import get_active_backend

    with ExitStack() as stack:
        try:
            if backend is not None:
                stack.enter_context(joblib.parallel_config(backend=backend))
            active = get_active_backend()[0]
        except (ValueError, ImportError) as error:
            text = " ".join(str(error).split())
            raise ArgumentError(
                f"joblib cannot use the backend {backend!r}: {text} (for Dask: "
                "pip install 'pipesim[cluster]')"
            ) from error
        kind = type(active).__name__
        if kind == "LokyBackend":
            # Joblib runs what is for one process in this one, which has to be safe.
            n_jobs = n_jobs if n_jobs > 0 else max(2, active.effective_n_jobs(n_jobs))
            options = {"initializer": _end_with, "initargs": (os.getpid(),)}
            stack.enter_context(
                joblib.parallel_config(
                    backend="loky",
                    inner_max_num_threads=active.inner_max_num_threads or 1,
                    **{**options, **active.backend_kwargs},
                )
            )
        elif kind == "DaskDistributedBackend":
            stack.enter_context(joblib.parallel_config(backend=_reporting(active)))
        sends = kind not in _HERE and (kind != "LokyBackend" or n_jobs > 1)
        return joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered"), sends


def _reporting(backend: Any) -> Any:
    """Return joblib's Dask backend for the same client, which also tells of killed workers.

    Joblib 1.6 calls back for results only: a batch that Dask gives up would be awaited for ever.
    And what is for one worker, it runs in this process: it is told of two at least.
    """
    from joblib._dask import DaskDistributedBackend

    class Reporting(DaskDistributedBackend):
        def effective_n_jobs(self, n_jobs: Any) -> int:
            return max(2, super().effective_n_jobs(n_jobs))

        def submit(self, func: Any, callback: Any = None) -> Any:
            future: Any = super().submit(func, callback)

            def report(done: Any) -> None:
                if done.exception() is not None:
                    callback(done.exception())

            future.add_done_callback(report)
            return future

    return Reporting(
        client=backend.client,
        wait_for_workers_timeout=backend.wait_for_workers_timeout,
        **backend.submit_kwargs,
    )
