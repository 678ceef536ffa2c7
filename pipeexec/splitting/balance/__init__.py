"""Cuts between stages, by weights of the calls of modules."""
