"""
An exchange of a sharded embedding
==================================

Two ranks share a table of eight rows: row k is row k // 2 of rank k % 2, in the colour of that
rank. The keys are those of the example of HugeCTR's `sparse operation kit
<https://github.com/NVIDIA-Merlin/HugeCTR/tree/main/sparse_operation_kit>`_. Three all-to-alls
carry keys, vectors and gradients. Look at key 5: both ranks ask for it, so its row gets two
gradients. ``embedding.explain(keys)`` of `pipeexec.ShardedEmbedding` returns such a table of a real
batch, of any placement.
"""

import matplotlib.pyplot as plt
import pandas as pd

from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2))
keys = pd.Series([0, 1, 3, 5, 4, 5, 6, 7])
table = pd.DataFrame({
    "rank": [0] * 4 + [1] * 4, "table": 0, "key": keys, "owner": keys % 2, "row": keys // 2,
    "sent": True,
})  # fmt: skip
plot.exchange(table)
