"""Loss of a step: the user's function, its metrics, and the sum over micro-batches."""
