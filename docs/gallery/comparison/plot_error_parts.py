"""
Parts of a prediction's error
=============================

Errors of predicted steps in their parts (Shapley values, which sum to the error), for four
measured-like steps: simulations with one disturbance each. All backwards take 10 % longer, tasks
vary by 10 %, links have half the bandwidth, or a host takes 0.9 ms to issue a task. Look at the
colours: each disturbance is in its own part, and tasks that vary have other means, too.
"""

from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd

import pipesim as ps
from pipesim import plot
from pipesim.simulation import Normal

plt.rcParams.update(plot.paper_style(columns=1, height=2.1))
fig, ax = plt.subplots()
graph = ps.lower(ps.schedule("1f1b", n_devices=4, n_microbatches=8))
network = ps.Network(latency=1e-4, bandwidth=1e9)
costs = ps.Costs(forward=5e-3, backward=10e-3, output_bytes=1e6, network=network)
steps = {
    "longer backwards": ps.simulate(graph, costs.scaled(1.1, op="B")),
    "varying tasks": ps.simulate(graph, costs, noise=ps.Noise(task=Normal(0.1), seed=10)),
    "slower links": ps.simulate(graph, replace(costs, network=network.scaled(bandwidth=0.5))),
    "slow host": ps.simulate(graph, replace(costs, launch=9e-4)),
}
predicted = ps.simulate(graph, costs)
looks = {"durations": "", "spread": "///", "host": "xxx", "transfers": "..."}
parts = {name: ps.Comparison(predicted, step).error_parts() for name, step in steps.items()}
table = -1e3 * pd.DataFrame(parts)
left = 0 * table.loc["durations"]
for part, hatch in looks.items():
    ax.barh(table.columns, table.loc[part], 0.6, left, ec="0.2", hatch=hatch, label=part)
    left += table.loc[part]
ax.set(xlabel="Measured minus predicted (ms)")
ax.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.32, 1.0), handlelength=1.4)
