"""Schedules and runtime of torch.distributed.pipelining: conversion in both directions."""

from pipeexec.torch_pipelining.interop import from_torch, to_torch, torch_schedule_order

__all__ = ["from_torch", "to_torch", "torch_schedule_order"]
