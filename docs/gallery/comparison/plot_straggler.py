"""
A slow device, and the step without it
======================================

A step of 1F1B in which device 1 takes 25 % longer than it should, and tasks vary by 2 %. It is
simulated again from the mean times of its stages, with the usual ones for device 1: a what-if of
a measured run. Look at device 3: it waits for the straggler in every cycle of the steady state.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot
from pipesim.simulation import Normal

plt.rcParams.update(plot.paper_style())
graph = ps.lower(ps.schedule("1f1b", n_devices=4, n_microbatches=8), step="none")
costs = ps.Costs(forward=1, backward=2)
noise = ps.Noise(task=Normal(0.02), slow_devices={1: 1.25}, seed=0)
step = ps.simulate(graph, costs, noise=noise)  # in place of a measured one
usual = ps.Costs.from_timeline(step).scaled(1 / 1.25, stage=1)
without = ps.simulate(graph, usual)
fig = plot.panels(
    {
        f"With the straggler: {step.makespan:.1f} s": step,
        f"Without: {without.makespan:.1f} s": without,
    }
)
