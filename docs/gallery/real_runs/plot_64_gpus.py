"""
A slow worker among 64 GPUs
===========================

A step of Megatron-LM on 64 GPUs, with four stages, four replicas and 32 micro-batches, published by
ByteDance (StragglerAnalysis, Apache-2.0; the GPU is not named). Both panels are measured, each one
a replica, with forwards and backwards alone. The first stage of the first replica has a slow
worker. Look at the other stages of that replica: they wait for it in every cycle. The replicas
reduce their gradients together, so the whole step is as long as the upper panel.
"""

import matplotlib.pyplot as plt
import pandas as pd

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=3.2))
rows = pd.read_csv("../../../tests/published/timelines/megatron_64gpu_pp4_dp4.csv.gz")
rows = rows[(rows["step"] == rows["step"].min()) & rows["op"].isin(["F", "B"])]
steps = {}
for number, title in {0: "with the slow worker", 1: "another replica"}.items():
    replica = rows[rows["replica"] == number].assign(replica=0)
    steps[title] = ps.Timeline.from_table(replica, gaps="charge")
plot.panels({f"{title}: {step.makespan:.1f} s": step for title, step in steps.items()})
