"""Sums and norms of gradients over stages, replicas and processes."""
