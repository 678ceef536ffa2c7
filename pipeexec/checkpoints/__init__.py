"""Save and load the state of a training run: model, optimizer, random state, and more."""
