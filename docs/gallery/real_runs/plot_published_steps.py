"""
Published steps by framework
============================

Steps of dense models that the authors of vTrain, NVIDIA (megatron, nemo), Aleph Alpha, BigScience
(deepspeed) and MosaicML (llm_foundry) measured, each on the GPU of its row, over predictions from
data sheets: without the framework (grey), and with it. Nothing is fitted to them. Look at the
band of 10 %: it has half of the steps with their framework, a fifth without. *How predictions
err* has the sources.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import pipesim as ps
from pipesim import plot

path = Path(ps.__file__).parent / "analysis" / "published_quotients.json"
published = json.loads(path.read_text())["dense"]
best = sorted(x for quotients in published.pop("").values() for x in quotients)
rows = {
    f"{name}, {family.upper()}": quotients
    for name, families in sorted(published.items(), reverse=True)
    for family, quotients in families.items()
}
rows["without framework"] = best
plt.rcParams.update(plot.paper_style(columns=2, height=2.6))
fig, ax = plt.subplots()
ax.axvspan(0.9, 1.1, color="0.92")
for place, (name, quotients) in enumerate(rows.items()):
    spread = place + np.linspace(-0.35, 0.35, len(quotients))
    color = "0.5" if name == "without framework" else "C0"
    ax.plot(quotients, spread, linestyle="", marker=".", markersize=3, color=color)
ax.set(xlabel="Measured over predicted seconds", xscale="log")
ax.set_yticks(range(len(rows)), list(rows))
ax.set_xticks((0.8, 0.9, 1, 1.1, 1.25, 1.5, 2), ("0.8", "0.9", "1", "1.1", "1.25", "1.5", "2"))
ax.set_xticks([], minor=True)
