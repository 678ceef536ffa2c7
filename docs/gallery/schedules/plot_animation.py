"""
A step that fills in task by task
=================================

An animation for a slide: 1F1B on four devices, with a backward of twice a forward's time. A white
box covers what is later than a frame's time; each frame is the end of a task. The first frame is
the whole step, for a handout. ``animation.save("step.gif", writer="pillow")`` writes the file.
Look at device 3: it begins a backward while device 0 still waits for its first.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.animation import FuncAnimation
from matplotlib.patches import Rectangle

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=1.8))
fig, ax = plt.subplots()
schedule = ps.schedule("1f1b", n_devices=4, n_microbatches=4)
step = ps.simulate(ps.lower(schedule, step="none"), ps.Costs(forward=1, backward=2))
step.plot(ax=ax, unit="s")
cover = ax.add_patch(Rectangle((0, -0.5), 2 * step.makespan, 4, color="white", zorder=5))
fig.draw_without_rendering()
fig.set_layout_engine("none")  # or each frame would be laid out again
times = [step.makespan, *np.unique(step.end)]
animation = FuncAnimation(fig, lambda time: [cover.set_x(time)], times, interval=300)
