"""The memory of a step: bytes of activations and gradients, and bytes that torch allocates."""
