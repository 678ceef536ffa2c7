"""Evaluations and predictions: forward-only graphs on the stages of a pipeline."""
