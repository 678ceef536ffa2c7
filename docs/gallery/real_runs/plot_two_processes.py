"""
A step of two processes with a sharded embedding
================================================

Two processes with a core of an AMD EPYC each train a recommender; this project measured it by
``benchmarks/two_processes.py``, and ``results/two_processes/run.txt`` has the machine and its load.
Each process has both stages: an embedding of four tables, whose rows are spread over both processes
(chunk 0), and layers (chunk 1). A step has four micro-batches of 512 rows. The upper panel is the
step of median makespan, the lower one its replay, in which each task takes its measured seconds and
nothing else delays it. Look at the exchanges below the devices: some are beside the layers of the
micro-batch before, the others keep both devices waiting.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=4.0))
measured = ps.Timeline.load("../../../results/two_processes/timeline.csv")
replayed = ps.replay(measured)
plot.panels({
    f"measured: {1e3 * measured.makespan:.0f} ms": measured,
    f"replayed: {1e3 * replayed.makespan:.0f} ms": replayed,
}, transfers=True)  # fmt: skip
