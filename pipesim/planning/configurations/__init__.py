"""Which configuration of a training run: parallel sizes, schedule, recompute, split, optimizer."""
