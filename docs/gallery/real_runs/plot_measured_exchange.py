"""
An exchange between two processes
=================================

Keys of a sharded embedding, their vectors and gradients, between two processes with a core of an
AMD EPYC each, over gloo; this project ran them by ``benchmarks/two_processes.py``. Above is a small
exchange of four keys a process, as ``embedding.explain(keys)`` returned it: a key that a process
has twice is sent once, and the row of key 5 gets gradients of both. Below are seconds of all
exchanges in a step of four micro-batches, a dot each. Look at the counts: 8 bytes take no less time
than 176 kB, since all of them wait for the slower process.
"""

import matplotlib.pyplot as plt
import pandas as pd

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=5.0))
fig, (above, below) = plt.subplots(2, 1, height_ratios=[3, 1])
plot.exchange(pd.read_csv("../../../results/two_processes/exchange.csv"), ax=above)
step = ps.Timeline.load("../../../results/two_processes/timeline.csv").frame
step = step[step["op"] == "ALL_TO_ALL"].assign(ms=lambda x: 1e3 * (x["end"] - x["start"]))
for device, marker in enumerate("ox"):
    own = step[step["device"] == device]
    color = ("#77AADD", "#EE8866")[device]
    below.plot(own["ms"], own["part"], marker, label=f"rank {device}", color=color)
sizes = step.groupby("part")["nbytes"].median()
names = zip(["counts", "keys", "vectors", "gradients"], sizes, strict=True)
below.set_yticks(range(4), [f"{name}, {size:,.0f} bytes" for name, size in names])
below.set(xlabel="Exchange (ms)", xlim=(0, None), ylim=(3.5, -0.5))
below.legend()
