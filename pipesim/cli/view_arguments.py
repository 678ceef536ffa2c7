"""Arguments of the commands that write pages: ``pipesim view`` and ``pipesim demo-page``."""

from __future__ import annotations

import argparse

from pipesim.cli.argument_values import json_object, page_path, parse_value
from pipesim.cli.help_texts import DEMO_PAGE_EPILOG, VIEW_EPILOG
from pipesim.plot.page.document import LAYOUTS


def add_view_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of view."""
    command.epilog = VIEW_EPILOG
    add = command.add_argument
    add("files", nargs="+", metavar="FILE",
        help="timeline, schedule, trace, run directory or folder of traces; see below")  # fmt: skip
    add("--out", type=page_path, metavar="PAGE.html", default=None,
        help="page to write; by default of the name of the first FILE, in this folder")  # fmt: skip
    add("--costs", metavar="FILE.json", default=None,
        help="costs of the timelines, for memory; schedules are simulated with them")  # fmt: skip
    add("--title", metavar="TEXT", default=None, help="title of the page")
    add("--layout", choices=LAYOUTS, default=LAYOUTS[0],
        help="several timelines: below each other, or one at a time")  # fmt: skip
    add("--pattern", metavar="REGEX", default=None,
        help="names of ranges in traces, with groups op, microbatch and stage")  # fmt: skip
    add("--fields", type=json_object, metavar="JSON", default=None,
        help="places of op, microbatch, stage and rank in events of traces")  # fmt: skip
    add("--ops", type=json_object, metavar="JSON", default=None,
        help="operations by the words of traces; null leaves events out")  # fmt: skip
    add("--only", type=json_object, metavar="JSON", default=None,
        help="values that events of traces must have at places")  # fmt: skip
    add("--step", type=parse_value, metavar="N", default=None,
        help="step of traces, from 0; by default -1, the last one")  # fmt: skip
    add("--ranks", type=parse_value, metavar="N", default=None,
        help="traces of the pipeline, where the run had more ranks")  # fmt: skip
    add("--no-open", action="store_true", default=False, help="do not open the page in a browser")


def add_demo_page_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of demo-page."""
    command.epilog = DEMO_PAGE_EPILOG
    add = command.add_argument
    add("--out", type=page_path, metavar="PAGE.html", default=None,
        help="page to write; by default gallery.html in this folder")  # fmt: skip
    add("-p", "--devices", type=parse_value, metavar="N", default=4, help="number of devices")
    add("-m", "--microbatches", type=parse_value, metavar="N", default=8,
        help="number of micro-batches of a step")  # fmt: skip
