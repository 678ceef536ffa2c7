"""Run a sequence in slices: cut a batch along the sequence, keep keys and values in stages."""
