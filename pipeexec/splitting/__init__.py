"""Split a model into stages."""
