"""
A sweep as a heat map
=====================

MFU of Llama 3 70B on 64 H100 (percent) for sizes of tensor and pipeline parallelism; the other
factor is data parallel, with a shared optimizer. All cells are 1F1B with a global batch of 128
sequences, a row of a sweep each. Hatched cells do not fit in 80 GB. Look at the border: MFU falls
with both sizes, so that the best cell that fits is right beside cells that do not.
"""

import matplotlib.pyplot as plt
import numpy as np

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.1))
fig, ax = plt.subplots()
tensor, pipeline = [1, 2, 4, 8], [1, 2, 4, 8]
rows = [
    {"tensor_parallel": t, "sequence_parallel": t > 1, "n_devices": p, "n_replicas": 64 // (t * p),
     "n_microbatches": 2 * t * p, "shard_optimizer": t * p < 64,
     "network": ps.Network.preset("dgx_h100", gpus_per_device=t)}
    for t in tensor for p in pipeline
]  # fmt: skip
base = {"schedule": "1f1b", "model": "llama3_70b", "gpu": "h100_sxm", "microbatch_size": 1,
        "flash_attention": True, "layout": "stage_major"}  # fmt: skip
table = ps.sweep(rows, base=base, n_jobs=1, progress=False)
mfu = 100 * table["mfu"].to_numpy(float).reshape(4, 4)
fits = table["fits"].to_numpy(bool).reshape(4, 4)
ax.patch.set(facecolor="white", edgecolor="0.75", hatch="////")
image = ax.imshow(np.where(fits, mfu, np.nan), cmap="cividis", vmin=36, vmax=46, aspect="auto")
for (i, j), value in np.ndenumerate(mfu):
    ink = "white" if fits[i, j] and value < 41.5 else "black"
    ax.text(j, i, f"{value:.0f}", ha="center", va="center", color=ink)
ax.set_xticks(range(4), pipeline)
ax.set_yticks(range(4), tensor)
ax.set(xlabel="Pipeline stages", ylabel="Tensor parallel GPUs")
fig.colorbar(image, label="MFU (%)")
