"""Modules that a forward calls, and the data flow between them."""
