"""
Context parallelism: ring, all-gather, all-to-all
=================================================

How well H100s share sequences of 128k tokens in Llama 3 8B: ideal over simulated seconds of a
stage. Keys and values go round a ring (Liu et al., `arXiv 2310.01889
<https://arxiv.org/abs/2310.01889>`_), are gathered (Llama Team, `arXiv 2407.21783
<https://arxiv.org/abs/2407.21783>`_, section 3.3.2), or change places with heads (Jacobs et al.,
`arXiv 2309.14509 <https://arxiv.org/abs/2309.14509>`_), for which there are eight heads. Look at
the lowest curve: with contiguous parts of the causal mask the last GPU has up to twice the
attention.
"""

import matplotlib.pyplot as plt
import numpy as np

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.2))
fig, ax = plt.subplots()
model = ps.Transformer.preset("llama3_8b", sequence_length=131072)
kinds = {"ring": {}, "all-gather": {"context_exchange": "all_gather"},
         "all-to-all": {"context_exchange": "all_to_all"},
         "ring, no balance": {"context_balance": False}}  # fmt: skip
for label, options in kinds.items():
    sizes = [1, 2, 4, 8] if label == "all-to-all" else [1, 2, 4, 8, 16, 32, 64]
    seconds = []
    for c in sizes:
        network = ps.Network.preset("dgx_h100", gpus_per_device=c)
        costs = model.costs([8] * 4, gpu="h100_sxm", microbatch_size=1, context_parallel=c,
                            flash_attention=True, network=network, **options)  # fmt: skip
        seconds.append(costs.forward[1] + costs.backward[1])
    ax.plot(sizes, 100 * seconds[0] / np.array(sizes) / seconds, label=label)
ax.set(xscale="log", xlabel="GPUs of a sequence", ylabel="Efficiency (%)", ylim=(0, 105))
ax.set_xticks(sizes, sizes)
ax.set_xticks([], minor=True)
ax.legend()
