"""The command that writes a page of all named schedules."""

from __future__ import annotations

import argparse

from pipesim.cli.view import page_target, size_text
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, check_count
from pipesim.network.network import Network
from pipesim.plot.page.save import to_html
from pipesim.scheduling.registry import options_of_schedules
from pipesim.sweeps.settings import cases, run

_PAGE = "gallery.html"
#: Costs of a device, whose stages share them; those of the README, with split backwards.
_COSTS = Costs(
    forward=1e-3,
    input_grad=1e-3,
    weight_grad=1e-3,
    output_bytes=4 << 20,
    activation_bytes=1 << 30,
    weight_grad_bytes=1 << 28,
    network=Network(latency=20e-6, bandwidth=25e9),
)


def demo_page(args: argparse.Namespace) -> None:
    """Write a page of all named schedules on one time axis; print its path and size."""
    counts = {
        "devices": check_count("devices", args.devices),
        "microbatches": check_count("microbatches", args.microbatches),
    }
    path = page_target(args.out, _PAGE)
    settings = {**counts, "per": "device", "costs": _COSTS.to_dict()}
    timelines, refusals = {}, []
    for case in cases([*options_of_schedules()], None, settings):
        try:
            timelines[case["label"]] = run(case)
        except ArgumentError as error:  # of a schedule that does not take these counts
            refusals.append(error)
    if not timelines:
        raise refusals[0]
    shape = f"{counts['devices']} devices, {counts['microbatches']} micro-batches"
    to_html(path, timelines, title=f"Schedules on {shape}")
    n_tasks = sum(map(len, timelines.values()))
    print(f"{path}\n{len(timelines)} schedules, {shape}, {n_tasks} tasks, {size_text(path)}")
    print("".join(f"without: {error}\n" for error in refusals), end="")
