"""Profile the layers of a model on one device, and predict steps on many."""
