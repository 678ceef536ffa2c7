"""
Micro-batches in flight
=======================

Number of micro-batches between the start of their forward and the end of their backward on device
0, over the time of a step. There are eight devices and 32 micro-batches. GPipe starts all of
them, and 1F1B as many as there are devices. Eager 1F1B (Zhuang et al., MLSys 2023, `arXiv
2211.05322 <https://arxiv.org/abs/2211.05322>`_) starts nearly twice as many. Look at the
plateaus: their height is the memory of activations, and their length the steady state.
"""

import matplotlib.pyplot as plt
import numpy as np

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.0))
fig, ax = plt.subplots()
costs = ps.Costs(forward=1, backward=2)
for label, name in {"GPipe": "gpipe", "Eager 1F1B": "eager_1f1b", "1F1B": "1f1b"}.items():
    schedule = ps.schedule(name, n_devices=8, n_microbatches=32)
    tasks = ps.simulate(ps.lower(schedule, step="none"), costs).frame.query("device == 0")
    begins = tasks.loc[tasks["op"] == "F", "start"].to_numpy()
    ends = tasks.loc[tasks["op"] == "B", "end"].to_numpy()
    times = np.sort(np.concatenate([begins, ends]))
    count = [(begins <= time).sum() - (ends <= time).sum() for time in times]
    ax.step(times, count, where="post", marker="", label=label)
ax.set(xlabel="Time (s)", ylabel="Micro-batches in flight", xlim=0, ylim=0)
ax.legend()
