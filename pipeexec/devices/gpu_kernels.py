"""The kernels of pipeexec as PTX, which the GPU's driver compiles.

Neither nvcc nor nvrtc nor ``CUDA_HOME`` is needed. The kernels use PTX 6.3 for compute capability
7.0 (``nanosleep``), which drivers compile for every later GPU. The PTX is nvcc's for this source,
with registers and labels renamed. Not yet measured on hardware.

.. code-block:: cuda

    __device__ unsigned long long now() {
        unsigned long long t;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory");
        return t;
    }

    extern "C" __global__ void pipeexec_note(unsigned long long* at) { *at = now(); }

    extern "C" __global__ void pipeexec_wait(
        const unsigned long long* at, int microseconds, int nanoseconds
    ) {
        const unsigned long long until = *at + 1000ll * microseconds + nanoseconds;
        while (now() < until) __nanosleep(64);
    }

    extern "C" __global__ void pipeexec_where(int* found, int cycles) {
        unsigned int sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        found[blockIdx.x] = sm;
        const long long until = clock64() + cycles;
        while (clock64() < until) {}
    }
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

PTX = """\
.version 6.3
.target sm_70
.address_size 64

.visible .entry pipeexec_note(
    .param .u64 at
)
{
    .reg .b64 %at, %now;

    ld.param.u64 %at, [at];
    cvta.to.global.u64 %at, %at;
    mov.u64 %now, %globaltimer;
    st.global.u64 [%at], %now;
    ret;
}

.visible .entry pipeexec_wait(
    .param .u64 at,
    .param .s32 microseconds,
    .param .s32 nanoseconds
)
{
    .reg .pred %over;
    .reg .b32 %us, %pause;
    .reg .b64 %at, %ns, %us_in_ns, %until, %now;

    ld.param.u64 %at, [at];
    ld.param.s32 %us, [microseconds];
    ld.param.s32 %ns, [nanoseconds];
    cvta.to.global.u64 %at, %at;
    mul.wide.s32 %us_in_ns, %us, 1000;
    add.s64 %ns, %us_in_ns, %ns;
    ld.global.u64 %until, [%at];
    add.s64 %until, %ns, %until;
    mov.u64 %now, %globaltimer;
    setp.ge.u64 %over, %now, %until;
    @%over bra $done;

$again:
    mov.u32 %pause, 64;
    nanosleep.u32 %pause;
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %over, %now, %until;
    @%over bra $again;

$done:
    ret;
}

.visible .entry pipeexec_where(
    .param .u64 found,
    .param .s32 cycles
)
{
    .reg .pred %early;
    .reg .b32 %sm, %block;
    .reg .b64 %found, %cycles, %offset, %until, %now;

    ld.param.u64 %found, [found];
    ld.param.s32 %cycles, [cycles];
    cvta.to.global.u64 %found, %found;
    mov.u32 %sm, %smid;
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %offset, %block, 4;
    add.s64 %found, %found, %offset;
    st.global.u32 [%found], %sm;
    mov.u64 %until, %clock64;
    add.s64 %until, %until, %cycles;

$busy:
    mov.u64 %now, %clock64;
    setp.lt.s64 %early, %now, %until;
    @%early bra $busy;
    ret;
}
"""
#: The largest int of C, a type that every release of torch passes to kernels alike.
_LARGEST = 2**31 - 1


class GpuKernels(NamedTuple):
    """The kernels, loaded on a GPU; each runs on the current stream.

    Attributes
    ----------
    write_time
        ``write_time(timestamp)`` writes the GPU's time (ns) into a tensor of one int64.
    wait
        ``wait(timestamp, nanoseconds)`` spins until ``nanoseconds`` after the timestamp, at most
        half an hour.
    locate
        ``locate(sms, cycles)`` writes the number of the multiprocessor that runs each block into
        a tensor of int32, one element for each block; a block then spins for ``cycles``.
    """

    write_time: Callable[[Tensor], None]
    wait: Callable[[Tensor, int], None]
    locate: Callable[[Tensor, int], None]


@cache
def load_kernels(device: torch.device) -> GpuKernels:
    """Return the kernels on a GPU; they are loaded once.

    Raises
    ------
    RuntimeError, OSError
        If there is no GPU, or its driver does not take the PTX.
    AttributeError, ImportError
        If this release of torch cannot load PTX.
    """
    from torch.cuda._utils import _cuda_load_module

    with torch.cuda.device(device):
        torch.empty(1, device=device)  # makes the primary context
        loaded: Any = _cuda_load_module(PTX, ["pipeexec_note", "pipeexec_wait", "pipeexec_where"])
    note_kernel, wait_kernel, where_kernel = loaded.values()

    def write_time(timestamp: Tensor) -> None:
        note_kernel(args=[timestamp])

    def wait(timestamp: Tensor, nanoseconds: int) -> None:
        microseconds, rest = divmod(nanoseconds, 1000)
        wait_kernel(args=[timestamp, min(microseconds, _LARGEST), rest])

    def locate(sms: Tensor, cycles: int) -> None:
        where_kernel(grid=(sms.numel(), 1, 1), args=[sms, min(cycles, _LARGEST)])

    return GpuKernels(write_time, wait, locate)
