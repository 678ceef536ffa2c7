"""
What autograd built
===================

The autograd graph of torchgpipe's mechanism (Kim et al., `arXiv 2004.09910
<https://arxiv.org/abs/2004.09910>`_, section 3.2) without dependencies between micro-batches, read
from a real forward of `pipeexec.GPipe` on the CPU that made this figure: this script runs it, and
the order does not depend on the hardware. torch's engine goes from right to left; the numbers are
the order in which it ran the nodes. Look at the last partition: both recomputes come before any
layers, as the engine runs the newest node that is ready. The last micro-batch is not recomputed.
"""

import matplotlib.pyplot as plt
import torch

import pipeexec as px
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=2.6))
fig, ax = plt.subplots()
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model = px.GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=3, dependencies=False, threads=False)
for _ in range(2):  # the first step of a process may have another order
    output = model(torch.ones(6, 4))
    graph = px.autograd_graph(output)
    output.sum().backward()
plot.autograd_graph(graph, ax=ax)
