"""Calibrations that time few messages, for tests that look at nothing but what follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from pipeexec.profiling import calibration
from pipeexec.profiling.link_speed import measure_transfers


@contextmanager
def few_messages() -> Iterator[None]:
    """Time messages of two sizes once; a calibration times seven sizes nine times, for seconds.

    Tests that measure time, `test_profile` and `test_validate` time all of them.
    """
    timed = partial(measure_transfers, sizes=(1 << 12, 1 << 16), repeat=1)
    with mock.patch.object(calibration, "measure_transfers", timed):
        yield
