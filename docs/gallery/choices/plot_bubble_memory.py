"""
Bubble against memory, of all schedules
=======================================

Named schedules on eight devices with 24 micro-batches: the idle share over the activations of the
fullest device, in micro-batches through an eighth of the model. Values are closed forms, for
equal F, I and W and messages of no time. A line joins the front: schedules of which none is
better in both. Papers draw such figures for their own schedules (Qi et al., NeurIPS 2024, `arXiv
2405.15362 <https://arxiv.org/abs/2405.15362>`_).
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=2.8))
fig, ax = plt.subplots()
table = ps.schedules(n_devices=8, n_microbatches=24).sort_values(["activations", "bubble"])
table = table[(table["activations"] < 18) & (table["bubble"] < 0.5) & (table["parameters"] < 3)]
# Schedules of one model; not those of slices, and of several mini-batches.
table = table[table["n_modules"] == 1].drop(["seq1f1b", "slimpipe", "pipedream_2bw"])
x, y = table["activations"], 100 * table["bubble"]
front = y < y.cummin().shift(fill_value=100)
ax.plot(x[front], y[front], drawstyle="steps-post", marker="", color="0.6", linestyle="-",
        label="front")  # fmt: skip
for copies, marker, text in ((1, "o", "one copy"), (2, "s", "two copies")):
    kept = table["parameters"] == copies
    ax.plot(x[kept], y[kept], linestyle="", marker=marker, label=f"{text} of the weights")
for (held, bubble), names in table.groupby(["activations", "bubble"]).groups.items():
    options = {"ha": "right", "xytext": (-4, -8)} if len(names) == 3 else {"xytext": (4, 3)}
    place = held, 100 * bubble
    ax.annotate(
        ", ".join(table["label"][names]), place, textcoords="offset points", fontsize=7, **options
    )
ax.set(xlabel="Activations of the fullest device (micro-batches)", ylabel="Bubble (%)", ylim=0)
ax.legend()
