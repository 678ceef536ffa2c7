"""Control the optimizer steps of all stages together: learning rates, scaled gradients."""
