r"""The few kernels that pipeexec brings itself, as PTX: the GPU's driver compiles it.

Neither nvcc nor nvrtc nor ``CUDA_HOME`` is needed. PTX 6.3 for compute capability 7.0 has all that
is used (``nanosleep``), and drivers compile it for every later GPU. The PTX is nvcc's for this
source, with registers and labels renamed:

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

__all__ = ["PTX", "Kernels", "load_kernels"]

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
#: The largest of C's ints, which every release of torch passes alike.
_LARGEST = 2**31 - 1


class Kernels(NamedTuple):
    """The kernels, loaded on a GPU; each runs on the current stream.

    Attributes
    ----------
    note
        ``note(at)`` writes the GPU's time (ns) into a tensor of one int64.
    wait
        ``wait(at, nanoseconds)`` spins until so long after the time in ``at``, at most half an
        hour.
    where
        ``where(found, cycles)`` writes the number of the multiprocessor that runs each block into
        a tensor of int32, one block an element; a block then spins for so many cycles.
    """

    note: Callable[[Tensor], None]
    wait: Callable[[Tensor, int], None]
    where: Callable[[Tensor, int], None]


@cache
def load_kernels(device: torch.device) -> Kernels:
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
        torch.empty(1, device=device)  # the primary context must be there
        loaded: Any = _cuda_load_module(PTX, ["pipeexec_note", "pipeexec_wait", "pipeexec_where"])
    note, wait, where = loaded.values()

    def noted(at: Tensor) -> None:
        note(args=[at])

    def waited(at: Tensor, nanoseconds: int) -> None:
        microseconds, rest = divmod(nanoseconds, 1000)
        wait(args=[at, min(microseconds, _LARGEST), rest])

    def run_where(found: Tensor, cycles: int) -> None:
        where(grid=(found.numel(), 1, 1), args=[found, min(cycles, _LARGEST)])

    return Kernels(noted, waited, run_where)
