"""Devices: CPU workers, GPUs and slices of a GPU, with their streams, events and transfers.

Code for CUDA is tested on a stand-in; it is not yet measured on hardware.
"""

from pipeexec.devices.emulated_links.linked_workers import Worker, workers
from pipeexec.devices.gpu_slices.slices import Slice, slices

__all__ = ["Slice", "Worker", "slices", "workers"]
