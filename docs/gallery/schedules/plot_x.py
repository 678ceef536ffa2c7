"""
One
===

Text.
"""

import pipesim as ps

timeline = ps.simulate(ps.lower(ps.schedule("1f1b", n_devices=4, n_microbatches=8)), ps.Costs(1, 2))
timeline.plot()
