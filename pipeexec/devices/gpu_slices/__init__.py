"""Slices of a GPU: several devices on disjoint multiprocessors of one card.

Not yet measured on hardware.
"""
