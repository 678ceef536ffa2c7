"""
Dependencies of GPipe with recompute
====================================

The task graph of GPipe on three devices with recompute, as torchgpipe draws it (Kim et al.,
`arXiv 2004.09910 <https://arxiv.org/abs/2004.09910>`_, section 2). Solid arrows are data that a
task needs; dashed ones are the order of a device's compute stream. Look at R: it depends on no
gradient, and so may run early. The last micro-batch has none.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=2.6))
fig, ax = plt.subplots()
schedule = ps.schedule("gpipe", n_devices=3, n_microbatches=3)
graph = ps.lower(schedule, recompute="except_last", step="none")
plot.dependencies(graph, ax=ax, messages="labels")
