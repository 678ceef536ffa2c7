"""
A measured step of eight GPUs under its prediction
==================================================

A step of 16 micro-batches on eight MI300X, one stage each, as Primus (AMD-AGI, MIT licence)
published it, and its prediction from costs that were measured ten steps before. Of each device, the
prediction is the upper lane and the measurement the lower one. Look at device 0: the last backward
of a step takes longer than the others, in each step.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

TABLE = "../../../tests/published/timelines/primus_8_mi300x_pp8.csv.gz"
plt.rcParams.update(plot.paper_style(columns=2, height=4.0))
earlier = ps.Timeline.from_table(TABLE, step=10, gaps="charge")
measured = ps.Timeline.from_table(TABLE, step=20)
costs = ps.Costs.from_timeline(earlier, per_microbatch=True)
predicted = ps.simulate(measured.graph, costs)
ps.Comparison(predicted, measured).plot(title="1F1B on 8 MI300X, PP 8")
