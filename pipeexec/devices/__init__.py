"""Devices: CPU workers, GPUs and slices of a GPU, with their streams, events and transfers.

Code for CUDA is tested on a stand-in; it is not yet measured on hardware.
"""

from pipeexec.devices.gpu_slices import Slice, slices
from pipeexec.devices.make_devices import Worker, workers

__all__ = ["Slice", "Worker", "slices", "workers"]
