"""
PipeDream: 1F1B without a flush
===============================

Ten mini-batches of one micro-batch each on four devices. This is figure 8 of PipeDream (Harlap et
al., `arXiv 1806.03377 <https://arxiv.org/abs/1806.03377>`_): start-up, then the steady state.
Here the optimizer steps are drawn (brown), and the step ends after ten mini-batches. Look at the
middle: every device alternates one forward and one backward, and none waits.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
schedule = ps.schedule("pipedream", n_devices=4, n_microbatches=10)
costs = ps.Costs(forward=1, backward=2, optimizer_step=0.3)
ax = ps.simulate(ps.lower(schedule), costs).plot()
