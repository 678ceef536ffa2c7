"""Write tasks as a page of Plotly, as a user would: horizontal bars, one trace an operation.

``benchmarks/page.py`` runs this file with the Python that has Plotly; it imports nothing of ours.
``python _plotly_page.py TASKS.csv PAGE.html`` prints the seconds that it took, and those of the
CPU.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from time import perf_counter, process_time

import plotly.graph_objects as go


def main(tasks: str, page: str) -> None:
    traces: dict[str, list[list[str]]] = defaultdict(list)
    with open(tasks, newline="") as file:
        for lane, op, name, start, seconds in csv.reader(file):
            traces[op].append([lane, name, start, seconds])
    wall, cpu = perf_counter(), process_time()
    figure = go.Figure(layout={"barmode": "overlay", "dragmode": "pan"})
    for op, rows in traces.items():
        lanes, names, starts, lengths = zip(*rows, strict=True)
        figure.add_trace(
            go.Bar(
                name=op,
                orientation="h",
                y=lanes,
                base=[float(value) for value in starts],
                x=[float(value) for value in lengths],
                hovertext=names,
            )
        )
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(title="s")
    figure.write_html(page, include_plotlyjs=True)
    print(perf_counter() - wall, process_time() - cpu)


if __name__ == "__main__":
    main(*sys.argv[1:])
