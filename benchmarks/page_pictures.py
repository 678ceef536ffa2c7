"""Pictures of interactive pages, as a browser shows them: ``results/page/*.png``.

``python benchmarks/page_pictures.py`` writes them, 1,280 x 800 pixels each, and prints their sizes.

- 4x8: 1F1B on 4 devices with 8 micro-batches: messages, causes of idle time, memory.
- 16x64: 1F1B on 16 devices with 64 micro-batches.
- measured: a measured step under its prediction; ``results/demo`` of ``make demo``, or else
  ``results/quickstart``.
- zbv: ZB-V on 8 devices with 16 micro-batches, whose B is split.
- 1024: 1F1B on 1,024 devices with 64 micro-batches.
- torch: a step of torch.distributed.pipelining, from the traces of torch.profiler in
  ``tests/data``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import _chromium
from _machine import ROOT

import pipesim as ps

OUT = ROOT / "results" / "page"
RUNS = (ROOT / "results" / "demo", ROOT / "results" / "quickstart")
TRACES = ROOT / "tests" / "data" / "torch_interleaved"
#: Bytes beyond which a picture is too large for the repository.
MOST_BYTES = 150_000
COSTS = ps.Costs(
    forward=1e-3,
    backward=2e-3,
    optimizer_step=5e-4,
    output_bytes=4 << 20,
    activation_bytes=256 << 20,
    parameter_bytes=1 << 30,
    network=ps.Network(latency=20e-6, bandwidth=25e9),
)


class Picture(NamedTuple):
    """A page and the keys that are pressed in it; docs of the keys are in its tab Keys."""

    name: str
    item: ps.Timeline | ps.Comparison
    keys: str = ""


def pictures() -> Iterator[Picture]:
    """Yield all pictures."""
    yield Picture("4x8", simulated("1f1b", 4, 8), "mib")
    yield Picture("16x64", simulated("1f1b", 16, 64))
    yield Picture("measured", measured())
    split = replace(COSTS, input_grad=1e-3, weight_grad=1e-3)
    yield Picture("zbv", simulated("zbv", 8, 16, split), "i")
    yield Picture("1024", simulated("1f1b", 1024, 64))
    traces = sorted(TRACES.iterdir())
    imported = ps.Timeline.from_chrome(traces, name="torch.distributed.pipelining, 2 ranks")
    yield Picture("torch", imported, "mi")


def simulated(
    schedule: str, n_devices: int, n_microbatches: int, costs: ps.Costs = COSTS
) -> ps.Timeline:
    """Return a simulated timeline, named after its schedule and sizes."""
    graph = ps.lower(ps.schedule(schedule, n_devices, n_microbatches))
    name = f"{schedule}, {n_devices:,} devices, {n_microbatches} micro-batches"
    return ps.simulate(graph, costs).with_name(name)


def measured() -> ps.Comparison:
    """Return the 1F1B of a run without recomputation, measured and predicted."""
    run = next(run for run in RUNS if (run / "1f1b-never").is_dir())
    costs = ps.Costs.load(run / "costs.json")
    predicted, measured = (
        ps.Timeline.load(run / "1f1b-never" / f"{file}.csv", costs=costs, name="1f1b/never")
        for file in ("predicted", "timeline")
    )
    return ps.Comparison(predicted, measured)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    args = parser.parse_args()
    if reason := _chromium.missing():
        print(f"skipped: {reason}")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    ready = "globalThis.pipesimPage && pipesimPage.view.nFrames > 0"
    with tempfile.TemporaryDirectory() as folder, _chromium.start() as browser:
        for name, item, keys in pictures():
            page, picture = Path(folder) / f"{name}.html", args.out / f"{name}.png"
            ps.plot.to_html(page, item)
            with _chromium.tab(browser, page.as_uri(), ready=ready, limit=60) as (tab, _):
                tab.page.locator("canvas").first.focus()
                for key in keys:
                    tab.page.keyboard.press(key)
                tab.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
                tab.page.screenshot(path=picture)
            nbytes = picture.stat().st_size
            print(f"{picture}: {nbytes:,} bytes{' (too large)' * (nbytes > MOST_BYTES)}")


if __name__ == "__main__":
    main()
