"""Context parallelism: GPUs that share a sequence, and their exchange of keys and values."""
