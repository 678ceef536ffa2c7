"""One stage: forward, backward, split backward, recompute, loss and optimizer."""
