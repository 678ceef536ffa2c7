"""`pipesim.demo`: calls to try."""

from __future__ import annotations

#: A program; a part uses variables of those before.
MENU = """\
import pipesim as ps

# Each part takes about a second or less.

# A schedule: which device runs which forward (F) and backward (B), in which order.
ps.schedule("1f1b", n_devices=4, n_microbatches=8)

# All schedules, with their idle share and the activations that they hold.
ps.schedules(n_devices=4, n_microbatches=8)[["summary", "bubble", "activations"]]

# Which of three is fastest? Costs are seconds of a micro-batch on a stage.
costs = ps.Costs(forward=2e-3, input_grad=2e-3, weight_grad=2e-3)
orders = [ps.schedule(name, 4, 8) for name in ("gpipe", "1f1b", "zb_h1")]
ps.compare({order.name: ps.simulate(ps.lower(order), costs) for order in orders})

# Where would Llama 3 8B train fastest on 16 H100, and why?
llama, cluster = ps.Transformer.preset("llama3_8b"), ps.Cluster("dgx_h100", n_gpus=16)
plans = ps.plan(llama, cluster, global_batch=64, schedules="1f1b", recompute="none")
print(plans.explain(0, 1))

# A step, drawn. A notebook shows it without the file.
step = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8)), ps.Costs(forward=2e-3, backward=4e-3))
step.plot().figure.savefig("step.png")

# What its devices wait for, in seconds.
step.why.idle_by_cause()

# The same step to zoom, search and change, in a browser.
step.to_html("step.html")

# To train models, and compare steps with predictions: notebooks, by `make notebook` in a clone.
"""


def demo() -> None:
    """Print short calls to try, with a line each that says what they show.

    They are a program that runs as it is printed.

    >>> import pipesim as ps
    >>> ps.demo()
    import pipesim as ps
    ...
    """
    print(MENU, end="")  # noqa: T201  # its purpose
