"""
Causal attention: slices of unequal cost
========================================

Seconds of the forward of one stage for each of 16 slices of a sequence, Llama 3 70B on eight
stages of 8 H100. A later slice attends to more keys, so that it takes longer. Seq1F1B (Sun et
al., NAACL 2025, `arXiv 2406.03488 <https://arxiv.org/abs/2406.03488>`_) evens this out by slices
of unequal length; here all have one length. Look at the slopes: attention grows with the length
of the sequence, and the rest of a layer does not.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.0))
fig, ax = plt.subplots()
network = ps.Network.preset("dgx_h100", gpus_per_device=8)
for thousands in (128, 64, 32):
    model = ps.Transformer.preset("llama3_70b", sequence_length=1024 * thousands)
    costs = model.costs(8, slices=16, gpu="h100_sxm", microbatch_size=1, tensor_parallel=8,
                        sequence_parallel=True, flash_attention=True, network=network,
                        partition="balanced")  # fmt: skip
    milliseconds = [1e3 * seconds for seconds in costs.forward[1]]
    ax.plot(milliseconds, label=f"{thousands}k tokens")
ax.set(xlabel="Slice of the sequence", ylabel="Forward of a stage (ms)", ylim=0)
ax.legend()
