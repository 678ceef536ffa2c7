"""
A plan: time against memory
===========================

Configurations of Llama 3 70B on 64 H100 that ``ps.plan`` simulated: memory of the fullest
GPU over the seconds of a step. A line joins the front, of which no configuration is better in both;
the best has a ring. It is a search over tensor and pipeline parallelism, schedules, chunks and
recompute, in which bounds rule out most. Look at the front: a little more time saves much memory.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=3.0))
fig, ax = plt.subplots()
model = ps.Transformer.preset("llama3_70b", bytes_per_gradient=4)
cluster = ps.Cluster("dgx_h100", n_gpus=64)
plans = ps.plan(
    model, cluster, global_batch=128, tensor_parallel=[4, 8], pipeline_parallel=[2, 4, 8],
    microbatch_size=1, schedules=["1f1b", "interleaved_1f1b", "zbv", "v_half"],
    n_chunks=[1, 2, 5], recompute=["none", "full"], sequence_parallel=True,
    shard_optimizer=True, progress=False,
)  # fmt: skip
plans.plot(ax=ax)
