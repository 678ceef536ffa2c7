"""
Versions of the weights
=======================

Sets of weights that each of six devices keeps, for 24 micro-batches. PipeDream (`arXiv 1806.03377
<https://arxiv.org/abs/1806.03377>`_, section 3.3) stashes the weights of every mini-batch in
flight; PipeDream-2BW (`arXiv 2006.09503 <https://arxiv.org/abs/2006.09503>`_) keeps two versions;
with flushes one is enough, and two directions need two copies. Look at device 0: PipeDream's cost
grows with the depth of the pipeline.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.0))
fig, ax = plt.subplots()
costs = ps.Costs(forward=1, backward=2, parameter_bytes=1, gradient_bytes=0)
names = {
    "PipeDream": "pipedream",
    "PipeDream-2BW": "pipedream_2bw",
    "Chimera": "chimera",
    "1F1B": "1f1b",
}
for label, name in names.items():
    graph = ps.lower(ps.schedule(name, n_devices=6, n_microbatches=24))
    ax.plot(ps.simulate(graph, costs).memory.peak, label=label)
ax.set(xlabel="Device", ylabel="Sets of weights", ylim=(0, 6.5), xticks=range(6))
ax.legend()
