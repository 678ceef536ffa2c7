"""Constants of a GPU from measured steps of training."""
