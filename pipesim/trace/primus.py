"""Times of forwards and backwards that Primus writes, as a table.

With ``dump_pp_data``, Primus writes ``config.json`` and a file ``pp_rank_0.json`` a pipeline rank:
AMD-AGI/Primus, primus/backends/megatron/core/pipeline_parallel/pp_visualizer.py. Examples are in
tools/visualization/pp_vis/pp_data_example. The order of chunks where a file does not name them is
that of Megatron-LM, ``get_schedule_table`` in megatron/core/pipeline_parallel/schedules.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesim.errors import TimelineError, check_type, number
from pipesim.scheduling.placement import Placement, looped
from pipesim.trace.listed_files import files_of
from pipesim.utils.files import read_json

if TYPE_CHECKING:
    import pandas as pd


#: Name of the file of a rank.
PP_RANK = re.compile(r"pp_rank_([0-9]+)\.json")
#: Most files that a message names.
_SHOWN = 8
_COLUMNS = ("step", "op", "microbatch", "stage", "device", "chunk", "start", "end")


def read_primus(
    paths: Path | str | Iterable[Path | str], *, placement: Placement | None = None
) -> pd.DataFrame:
    """Read the times of all forwards and backwards of a run of Primus with ``dump_pp_data``.

    Parameters
    ----------
    paths
        Folder of ``pp_rank_0.json``, ``pp_rank_1.json``, ..., or these files. ``config.json`` is
        read where it stands beside them.
    placement
        Device of each stage; the files have only the chunk. By default `pipesim.looped`, as in
        Megatron-LM; give `pipesim.v_shaped` for ZB-V.

    Returns
    -------
    pandas.DataFrame
        One row a task, with the columns of `pipesim.Timeline.from_table`: ``step`` (as in the
        file), ``op``, ``microbatch``, ``stage``, ``device``, ``chunk``, ``start`` and ``end`` (s).

        - Times of a device count from its own begin of the step.
        - A B with a W of its own is an I.
        - Files of Megatron's own schedules number neither micro-batches nor chunks. Then the order
          is that of Megatron's 1F1B, interleaved with groups of as many micro-batches as devices.
        - A call that ran a forward and a backward together has two rows with the same times.

    Raises
    ------
    TimelineError
        For files that Primus does not write, and for ranks that are missing.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> import pipesim as ps
    >>> times = {"fwd_start": [0], "fwd_end": [10], "bwd_start": [10], "bwd_end": [30]}  # ms
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "pp_rank_0.json").write_text(json.dumps({"1": times}))
    ...     table = ps.trace.read_primus(folder)
    >>> ps.Timeline.from_table(table)
    <Timeline naive: 2 tasks, makespan 0.03 s, bubble 0.0%>
    """
    from pipesim.utils.packages import pandas as pd

    files = _rank_files(paths)
    n_chunks = _n_chunks(files[0].with_name("config.json"))
    if placement is None:
        placement = looped(len(files), n_chunks)
    check_type("placement", placement, Placement)
    rows: list[tuple[object, ...]] = []
    for device, path in enumerate(files):
        steps = read_json(path, "times of Primus from", TimelineError)
        try:
            stages = dict(enumerate(placement.stages_of(device)))
            for step, times in steps.items():
                for op, microbatch, chunk, start, end in _tasks(times, len(files), n_chunks):
                    span = start * 1e-3, end * 1e-3
                    rows.append((int(step), op, microbatch, stages[chunk], device, chunk, *span))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise TimelineError(
                f"{path} is no file of Primus with dump_pp_data, or not of {len(files)} ranks with "
                f"{n_chunks} chunks each: {type(error).__name__}: {error}"
            ) from error
    if not rows:
        raise TimelineError(f"{files[0]} and those of other ranks have no tasks")
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def _rank_files(paths: Path | str | Iterable[Path | str]) -> list[Path]:
    """Return the file of each rank, in order."""
    files = files_of(paths, "pp_rank_*.json")
    ranks = {int(name[1]): path for path in files if (name := PP_RANK.fullmatch(path.name))}
    if not ranks or sorted(ranks) != list(range(len(files))):
        raise TimelineError(
            "the files of Primus are pp_rank_0.json, pp_rank_1.json, ..., one a pipeline rank; got "
            f"{', '.join(str(path) for path in files[:_SHOWN])}"
        )
    return [ranks[rank] for rank in range(len(ranks))]


def _n_chunks(path: Path) -> int:
    """Return the number of chunks a rank, 1 if the file of the run's sizes is not there."""
    config = read_json(path, "sizes from", TimelineError) if path.exists() else {}
    sizes = (
        [config.get(key, 1) for key in ("vp_size", "vpp_size")] if isinstance(config, dict) else []
    )
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise TimelineError(f"{path}: vp_size must be the number of chunks a rank")
    return int(config.get("vp_size", sizes[1]))


def _tasks(
    times: Mapping[str, list[Any]], n_devices: int, n_chunks: int
) -> Iterable[tuple[str, int, int, float, float]]:
    """Yield operation, micro-batch, chunk, start and end (ms) of each task of a rank."""
    splits = bool(times.get("wgrad_start"))
    for prefix, op in (("fwd", "F"), ("bwd", "I" if splits else "B"), ("wgrad", "W")):
        starts, ends = (times.get(f"{prefix}_{key}", []) for key in ("start", "end"))
        # Without numbers, weight gradients of one chunk are in the order of the backwards.
        numbered = "bwd" if prefix == "wgrad" and not times.get("wgrad_minibatch") else prefix
        microbatches: Sequence[int] = times.get(f"{numbered}_minibatch") or ()
        chunks: Sequence[int] = times.get(f"{numbered}_chunk") or ()
        if numbered != prefix and n_chunks > 1 and starts:
            raise ValueError("weight gradients of several chunks without their numbers")
        if not microbatches:
            n_microbatches = len(starts) // n_chunks
            order = [
                (microbatch, chunk)
                for first in range(0, n_microbatches, n_devices)
                for chunk in range(n_chunks)[:: 1 if prefix == "fwd" else -1]
                for microbatch in range(first, min(first + n_devices, n_microbatches))
            ]
            microbatches, chunks = zip(*order, strict=True) if order else ((), ())
        chunks = chunks or [0] * len(starts)
        for row in zip(microbatches, chunks, starts, ends, strict=True):
            if any(number(value) is None for value in row):
                raise ValueError(f"{row!r:.80} are no numbers")
            yield op, *row
