"""Train a pipeline for many steps: the loop, its log, evaluations and checkpoints."""
