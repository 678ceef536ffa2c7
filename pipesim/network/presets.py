"""Common machines: devices, memory, ports and NICs of a node, with the source of each number.

========  ========  ======  ===================  ================  ============
name      devices   memory  NVLink, each way     NICs, each way    source
========  ========  ======  ===================  ================  ============
dgx_a100  8 A100    80 GB   3rd gen., 300 GB/s   8 x HDR 200 Gb/s  [1]_, [2]_
dgx_h100  8 H100    80 GB   4th gen., 450 GB/s   8 x NDR 400 Gb/s  [3]_, [4]_
dgx_h200  8 H200    141 GB  4th gen., 450 GB/s   8 x NDR 400 Gb/s  [3]_, [5]_
dgx_b200  8 B200    180 GB  5th gen., 900 GB/s   8 x NDR 400 Gb/s  [6]_
========  ========  ======  ===================  ================  ============

========  ==========================  =======================  ======
name      PCIe of a GPU, each way     GPUs of a link           source
========  ==========================  =======================  ======
dgx_a100  Gen4 x16, 32 GB/s           2, on one PCIe switch    [1]_, [8]_
dgx_h100  Gen5 x16, 64 GB/s           1                        [9]_
dgx_h200  Gen5 x16, 64 GB/s           1                        [5]_
dgx_b200  Gen5 x16, 64 GB/s           1                        [10]_
========  ==========================  =======================  ======

NVIDIA states PCIe's bandwidth as the sum of both directions, too. Latency of a copy to or from the
host is assumed to be 10 us. Whether GPUs of the three later machines share a link to their host was
not found in a source; each is given its own.

NVIDIA states NVLink's bandwidth as the sum of both directions (600, 900 and 1800 GB/s a device); a
port has half of it in each direction. Memory is in units of 10^9 bytes. These are nominal rates.
Messages reach less: `EFFICIENCY` of them unless ``Network.preset(name, efficiency=...)`` says so.

Latencies of the other machines than ``dgx_b200`` are assumed to be the same: 3.4 us inside a node
and 14 us between nodes. These are the latencies of a ring step over NVLink, and over the network,
with the Simple protocol in NCCL's table ``hwLat`` [7]_, by which NCCL chooses its algorithm. They
were not measured on these machines: if latency matters, measure yours.

Inside a ``dgx_b200`` it is 13 us, which suits NCCL's all-gathers and reduce-scatters best. By
SimuMax's fit to its measurements they take 32 to 34, 50 to 51, and 82 to 87 us beside their bytes
between 2, 4 and 8 devices, for 1, 3 and 7 ring steps, and a message takes 16 us. Their bandwidth is
0.72 of the nominal one [11]_.

References
----------
.. [1] NVIDIA, "DGX A100 System User Guide", Introduction (the system of 640 GB; that of 320 GB has
   40 GB a device), https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html
.. [2] NVIDIA, "Introducing NVIDIA HGX A100" (NVLink: 600 GB/s),
   https://developer.nvidia.com/blog/introducing-hgx-a100-most-powerful-accelerated-server-platform-for-ai-hpc/
.. [3] NVIDIA, "DGX H100/H200 User Guide", Introduction (a ConnectX-7 for each device),
   https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html
.. [4] NVIDIA, "Introducing NVIDIA HGX H100" (NVLink: 900 GB/s),
   https://developer.nvidia.com/blog/introducing-nvidia-hgx-h100-an-accelerated-server-platform-for-ai-and-high-performance-computing/
.. [5] NVIDIA, "H200 Tensor Core GPU", https://www.nvidia.com/en-us/data-center/h200/
.. [6] NVIDIA, "DGX B200 User Guide", Introduction (1,440 GB and 14.4 TB/s for 8 devices),
   https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html
.. [7] NCCL, https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc
.. [8] NVIDIA, "A100 Tensor Core GPU", data sheet (PCIe Gen4: 64 GB/s),
   https://www.nvidia.com/en-us/data-center/a100/
.. [9] NVIDIA, "H100 Tensor Core GPU", data sheet (PCIe Gen5: 128 GB/s),
   https://www.nvidia.com/en-us/data-center/h100/
.. [10] NVIDIA, "DGX B200", data sheet, https://www.nvidia.com/en-us/data-center/dgx-b200/
.. [11] MooreThreads, SimuMax, configs/system/b200_bf16_ceperm.json (``networks``),
   https://github.com/MooreThreads/SimuMax
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipesim.errors import check_name
from pipesim.network.host_link import HostLink
from pipesim.network.links import Nodes

if TYPE_CHECKING:
    import pandas as pd


#: Share of a machine's nominal bandwidths that messages reach, unless another one is given.
#: Published steps are predicted with it (``benchmarks/published_steps.py``).
EFFICIENCY = 0.7

#: Seconds of a message inside a node, and between nodes; see above.
_PORT_LATENCY, _NIC_LATENCY = 3.4e-6, 14e-6
_B200_LATENCY = 13e-6
#: Bytes a second of 200 and of 400 Gb/s.
_HDR, _NDR = 25e9, 50e9
#: Host links: PCIe Gen4 shared by two GPUs, and PCIe Gen5.
_GEN4, _GEN5 = HostLink(10e-6, 32e9, 2), HostLink(10e-6, 64e9)


@dataclass(frozen=True)
class Machine:
    """One kind of node.

    Attributes
    ----------
    summary
        Name and network, in words.
    nodes
        Devices, ports and NICs of a node, at nominal rates.
    memory
        Bytes of each device.
    gpu
        Name of its GPU, as in `pipesim.gpus`.
    host
        Link of its devices to the memory of the host, at nominal rates.
    """

    summary: str
    nodes: Nodes
    memory: float
    gpu: str
    host: HostLink


def _dgx(
    device: str,
    gpu: str,
    memory: float,
    nvlink: float,
    nic: float,
    host: HostLink,
    port_latency: float = _PORT_LATENCY,
) -> Machine:
    """Return a node of eight devices, each with its own NIC."""
    nodes = Nodes(8, port_latency, nvlink, _NIC_LATENCY, nic, n_nics=8)
    return Machine(f"NVIDIA DGX {device}, InfiniBand between nodes", nodes, memory, gpu, host)


MACHINES = {
    "dgx_a100": _dgx("A100", "a100_80gb", 80e9, 300e9, _HDR, _GEN4),
    "dgx_h100": _dgx("H100", "h100_sxm", 80e9, 450e9, _NDR, _GEN5),
    "dgx_h200": _dgx("H200", "h200", 141e9, 450e9, _NDR, _GEN5),
    "dgx_b200": _dgx("B200", "b200", 180e9, 900e9, _NDR, _GEN5, _B200_LATENCY),
}


def machine(name: str) -> Machine:
    """Return the machine with this name."""
    return MACHINES[check_name("machine", name, MACHINES)]


def machines() -> pd.DataFrame:
    """List the machines that `Network.preset` accepts, one row a name; seconds and bytes.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``summary``, ``gpu`` (a name for `GPU.preset`), ``memory`` of a GPU, fields
        of `Nodes`, and with the prefix ``host_`` those of `HostLink`; seconds, bytes and bytes/s.

    See Also
    --------
    pipesim.Network.preset : Network of a machine of this list.
    pipesim.Cluster : GPUs, nodes, network and memory of a machine.
    pipesim.gpus : List the GPUs.

    Examples
    --------
    >>> import pipesim as ps
    >>> float(ps.machines().loc["dgx_h100", "port_bandwidth"])
    450000000000.0
    """
    from pipesim.utils.packages import pandas as pd

    rows = {
        name: {
            "summary": m.summary,
            "gpu": m.gpu,
            "memory": m.memory,
            **m.nodes.to_dict(),
            **{f"host_{key}": value for key, value in m.host.to_dict().items()},
        }
        for name, m in MACHINES.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("name")
