"""
Memory over time, with and without recompute
============================================

Bytes of activations on device 1 of GPipe, four devices and eight micro-batches. With recompute a
stage keeps only its input (here a tenth of its activations) and runs its forward again before the
backward (GPipe, Huang et al., NeurIPS 2019, `arXiv 1811.06965
<https://arxiv.org/abs/1811.06965>`_, section 2.3). Look at the peaks and at the ends: one forward
is saved if the last micro-batch keeps its activations.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.1))
fig, ax = plt.subplots()
schedule = ps.schedule("gpipe", n_devices=4, n_microbatches=8)
costs = ps.Costs(forward=1e-3, backward=2e-3, activation_bytes=1e9, output_bytes=1e8)
for recompute in ("never", "except_last", "always"):
    graph = ps.lower(schedule, recompute=recompute, step="none")
    held = ps.simulate(graph, costs).memory().query("device == 1")
    label = recompute.replace("_", " ")
    ax.step(1e3 * held["time"], held["nbytes"] / 1e9, where="post", marker="", label=label)
ax.set(xlabel="Time (ms)", ylabel="Activations (GB)", xlim=0, ylim=0)
ax.legend(title="recompute")
