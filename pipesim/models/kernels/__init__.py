"""Kernels and collectives that a transformer's layer, embedding and head are made of."""
