"""Layers of each stage of a model: even, balanced by stage, by device, or by simulation."""
