"""
The critical path of a step
===========================

The chain of tasks that sets the makespan of interleaved 1F1B: each waited for the one before. It
is framed. Stage 5 is slower than the others, and messages take time. Look at where the frames
follow each other without a gap on one device: only faster compute helps there, and elsewhere a
faster network does too.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=1.9))
fig, ax = plt.subplots()
schedule = ps.schedule("interleaved_1f1b", n_devices=4, n_microbatches=8)
seconds = [1.0] * 8
seconds[5] = 1.5
network = ps.Network(latency=0.2, bandwidth=5)
costs = ps.Costs(seconds, [2 * s for s in seconds], output_bytes=1, network=network)
step = ps.simulate(ps.lower(schedule, step="none"), costs)
path = step.why.critical_path()
compute = path[path["stream"] == "compute"]
share = compute.eval("end - start").sum() / step.makespan
step.plot(ax=ax, title=f"{step.makespan:.1f} s, of which {share:.0%} compute on the path")
ax.barh(
    compute["device"], compute["end"] - compute["start"], 0.8, compute["start"], fill=False,
    edgecolor="#1C1C1C", linewidth=1.6, zorder=3,
)  # fmt: skip
