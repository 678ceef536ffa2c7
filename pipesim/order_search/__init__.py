"""Search for orders: a compiled evaluator of one placement's orders, and a local search."""
