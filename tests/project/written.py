"""Files that these tests write and read: each public function that takes a path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

import pipeexec as px
import pipesim as ps
from pipeexec.profiling import Profile
from pipeexec.projection import Projection
from pipesim.plot.paper_figure import save as save_figure
from pipesim.timeline import arrow_tables

SCHEDULE = ps.schedule("1f1b", 2, 2)
GRAPH = ps.lower(SCHEDULE)
COSTS = ps.Costs(1e-3, 2e-3, output_bytes=8, network=ps.Network(1e-3))
TIMELINE = ps.simulate(GRAPH, COSTS)
ROW = {"schedule": "1f1b", "n_devices": 2, "n_microbatches": 2, "forward": 1, "backward": 2}
BASE = ["1f1b", "--devices", "2", "--microbatches", "2", "--forward", "1", "--backward", "2"]


def sweep(path: Any) -> pd.DataFrame:
    return ps.sweep([ROW], path=path, n_jobs=1, progress=False)


WRITERS: dict[str, Callable[[Any], Any]] = {
    "Schedule.save": SCHEDULE.save,
    "TaskGraph.save_torch_csv": GRAPH.save_torch_csv,
    "Costs.save": COSTS.save,
    "Timeline.save": TIMELINE.save,
    "Timeline.save as Parquet": TIMELINE.save,
    "Timeline.to_chrome": TIMELINE.to_chrome,
    "Timeline.to_html": TIMELINE.to_html,
    "trace.save": lambda path: ps.trace.save(path, TIMELINE),
    "plot.save": lambda path: save_figure(TIMELINE.plot(), path),
    "sweep": sweep,
}
#: Endings that some writers insist on.
ENDINGS = {
    "Timeline.save as Parquet": ".parquet",
    "Timeline.to_chrome": ".json",
    "Timeline.to_html": ".html",
    "trace.save": ".json",
    "plot.save": ".svg",
}
READERS: dict[str, Callable[[Any], Any]] = {
    "Schedule.load": ps.Schedule.load,
    "Costs.load": ps.Costs.load,
    "Timeline.load": ps.Timeline.load,
    "Timeline.load of Parquet": lambda path: arrow_tables.load(path, costs=None, name=""),
    "Timeline.from_chrome": ps.Timeline.from_chrome,
    "trace.load": ps.trace.load,
    "Network.from_csv": ps.Network.from_csv,
    "Layers.read": ps.Layers.read,
}
DIRECTORIES: dict[str, Callable[[Any], Any]] = {
    "hta.save": lambda path: ps.trace.hta.save(path, TIMELINE),
    "load_run": px.load_run,
    "read_checkpoint": px.read_checkpoint,
    "latest_checkpoint": px.latest_checkpoint,
    "Profile.load": Profile.load,
    "Projection.load": Projection.load,
}
