"""Mixtures of experts: parameters, routing, kernels, memory, and the exchange of tokens."""
