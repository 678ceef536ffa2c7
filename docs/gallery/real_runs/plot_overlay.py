"""
Measured steps under their predictions
======================================

Steps of a small GPT on two CPU workers, a core of an Intel Xeon each, as this project measured them
by ``pipeexec validate``, and predictions from costs that were measured in another schedule. The run
is that of ``results/quickstart``; its ``run.json`` has machine and versions. Of each device, the
prediction is the upper lane and the measurement the lower one. Look at the ends: the dashed line is
the predicted makespan, the solid one the measured makespan. The error is small although single
tasks differ, since they differ in both directions.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=3.4))
fig, axes = plt.subplots(2, 1, sharex=True)
for ax, (name, title) in zip(axes, {"gpipe": "GPipe", "1f1b": "1F1B"}.items(), strict=True):
    run = f"../../../results/quickstart/{name}-never"
    predicted = ps.Timeline.load(f"{run}/predicted.csv")
    measured = ps.Timeline.load(f"{run}/timeline.csv")
    comparison = ps.Comparison(predicted, measured)
    comparison.plot(ax=ax, title=title, legend=ax is axes[0])
axes[0].set_xlabel("")
