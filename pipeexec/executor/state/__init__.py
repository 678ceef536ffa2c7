"""State of a pipeline's model and optimizers, by the names of the original model."""
