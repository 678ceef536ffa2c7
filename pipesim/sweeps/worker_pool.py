"""Run calls on joblib's workers; a call that kills its worker costs no other call its result."""

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
from pipesim.utils.packages import install_command

if TYPE_CHECKING:
    import joblib


T = TypeVar("T")
#: Backends of joblib that run calls in this process.
_IN_PROCESS = ("SequentialBackend", "ThreadingBackend")

Calls = list[tuple[str, tuple[Any, ...]]]


@dataclass(frozen=True)
class LostCall:
    """The result of a call that killed its worker, or that was never sent to one."""

    reason: str


def run_calls(
    function: Callable[..., T],
    calls: Mapping[str, tuple[Any, ...]],
    *,
    n_jobs: int,
    backend: str | None,
) -> Generator[tuple[str, T | LostCall]]:
    """Yield ``key, function(*arguments)`` of each call, in the order in which they end.

    If a worker dies, joblib gives up all calls that it has started. Those are then run one at a
    time, which shows the call that kills its worker. The others run in parallel again.

    ``function`` must not raise, and may run in any process. ``calls`` has arguments by key. The
    default backend is that of the enclosing ``joblib.parallel_config``, or else processes.
    """
    left = dict(calls)
    while left:
        started: list[str] = []
        results = _run_round(function, list(left.items()), started, n_jobs, backend)
        with closing(results):
            try:
                for key, result in results:
                    del left[key]
                    yield key, result
            except Exception:
                if not set(started) & set(left):
                    raise  # no call caused it: there are no workers
        for key in [key for key in started if key in left]:
            yield key, _run_alone(function, key, left.pop(key), n_jobs, backend)


def _run_round(
    function: Callable[..., T], calls: Calls, started: list[str], n_jobs: int, backend: str | None
) -> Generator[tuple[str, T | LostCall]]:
    """Run calls in parallel; add to ``started`` the keys of calls that joblib has started."""
    from pipesim.utils.packages import joblib

    parallel, sends = _parallel(n_jobs, backend)
    unsent: list[tuple[str, LostCall]] = []

    def start() -> Iterator[Any]:
        for key, arguments in calls:
            # joblib's Dask backend would wait forever for a call that cannot be sent.
            reason = _why_unsendable(function, arguments) if sends else ""
            if reason:
                unsent.append((key, LostCall(reason)))
            else:
                started.append(key)
                yield joblib.delayed(_call_with_key)(function, key, arguments)

    with closing(cast("Generator[tuple[str, T]]", parallel(start()))) as unordered:
        yield from unordered
    yield from unsent


def _why_unsendable(function: Callable[..., T], arguments: tuple[Any, ...]) -> str:
    import cloudpickle  # type: ignore[import-untyped]  # it has no types

    try:
        cloudpickle.dumps((function, arguments))
    except Exception as error:
        return f"cannot be sent to a worker: {type(error).__name__}: {error}"
    return ""


def _call_with_key(
    function: Callable[..., T], key: str, arguments: tuple[Any, ...]
) -> tuple[str, T]:
    return key, function(*arguments)


def _end_with(parent: int) -> None:
    """End this worker when its parent ends; loky's workers outlive a killed parent by minutes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _run_alone(
    function: Callable[..., T],
    key: str,
    arguments: tuple[Any, ...],
    n_jobs: int,
    backend: str | None,
) -> T | LostCall:
    """Return the result of a call that runs without others, or why it has none."""
    started: list[str] = []
    try:
        return next(_run_round(function, [(key, arguments)], started, n_jobs, backend))[1]
    except Exception as error:
        if not started:
            raise
        return LostCall(_reason(error))


def _reason(error: Exception) -> str:
    """Return in one line why a call has no result; each backend has its own error for a death."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"TerminatedWorkerError", "KilledWorker", "WorkerCrashedError"}:
        signals = re.search(r"\{(.+?)\}", str(error))  # loky's "exit codes ... are {SIGKILL(-9)}"
        return f"worker was killed ({signals[1] if signals else 'signal unknown'}; out of memory?)"
    if type(error.__cause__).__name__ == "_RemoteTraceback":  # loky's: the text of a traceback
        text = str(error.__cause__).strip('"\n ')
    else:
        text = f"{type(error).__name__}: {error}"
    return f"could not be run in a worker: {text.splitlines()[-1]}"


def _parallel(n_jobs: int, backend: str | None) -> tuple[joblib.Parallel[Any], bool]:
    """Return joblib's Parallel for one round, and whether it sends calls to other processes."""
    from joblib.parallel import get_active_backend

    from pipesim.utils.packages import joblib

    with ExitStack() as stack:
        try:
            if backend is not None:
                stack.enter_context(joblib.parallel_config(backend=backend))
            active = get_active_backend()[0]
        except (ValueError, ImportError) as error:
            text = " ".join(str(error).split())
            raise ArgumentError(
                f"joblib cannot use the backend {backend!r}: {text} (for Dask: "
                f"{install_command('cluster')})"
            ) from error
        kind = type(active).__name__
        if kind == "LokyBackend":
            # With one process joblib would run calls in this process, which must be safe.
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
            stack.enter_context(joblib.parallel_config(backend=_dask_backend(active)))
        sends = kind not in _IN_PROCESS and (kind != "LokyBackend" or n_jobs > 1)
        return joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered"), sends


def _dask_backend(backend: Any) -> Any:
    """Return a Dask backend of joblib for the same client that also reports killed workers.

    - joblib 1.6 calls back for results only: it would wait forever for a batch that Dask gives up.
    - joblib runs calls for one worker in this process: this backend reports at least two.
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
