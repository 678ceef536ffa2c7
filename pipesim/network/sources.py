"""Sources of a `Network`: common machines by name, tables of settings, CSV files and arrays.

========  ========  ======  ===================  ================  ============
name      devices   memory  NVLink, each way     NICs, each way    source
========  ========  ======  ===================  ================  ============
dgx_a100  8 A100    80 GB   3rd gen., 300 GB/s   8 x HDR 200 Gb/s  [1]_, [2]_
dgx_h100  8 H100    80 GB   4th gen., 450 GB/s   8 x NDR 400 Gb/s  [3]_, [4]_
dgx_h200  8 H200    141 GB  4th gen., 450 GB/s   8 x NDR 400 Gb/s  [3]_, [5]_
dgx_b200  8 B200    180 GB  5th gen., 900 GB/s   8 x NDR 400 Gb/s  [6]_
========  ========  ======  ===================  ================  ============

===========  ========  ======  ===================  ==================  =======
name         devices   memory  NVLink, each way     NICs, each way      source
===========  ========  ======  ===================  ==================  =======
gb200_nvl72  72 GB200  186 GB  5th gen., 900 GB/s   72 x NDR 400 Gb/s   [16]_
gb300_nvl72  72 GB300  279 GB  5th gen., 900 GB/s   72 x XDR 800 Gb/s   [17]_
===========  ========  ======  ===================  ==================  =======

The 72 devices of a rack are one node: NVLink connects all of them. Jobs that use 64 GPUs of each of
several racks take ``Network(nodes=replace(nodes, devices_per_node=64, n_nics=64))``.

========  ==========================  =======================  ======
name      PCIe of a GPU, each way     GPUs of a link           source
========  ==========================  =======================  ======
dgx_a100  Gen4 x16, 32 GB/s           2, on one PCIe switch    [1]_, [8]_
dgx_h100  Gen5 x16, 64 GB/s           1                        [9]_
dgx_h200  Gen5 x16, 64 GB/s           1                        [5]_
dgx_b200  Gen5 x16, 64 GB/s           1                        [10]_
========  ==========================  =======================  ======

Devices of racks of 72 reach host memory over NVLink-C2C, 450 GB/s each way of each Grace, which two
of them share [16]_.

NVIDIA states PCIe's bandwidth as the sum of both directions, too. Latency of a copy to or from the
host is assumed to be 10 us. Whether GPUs of the three later machines share a link to their host was
not found in a source; each is given its own.

NVIDIA states NVLink's bandwidth as the sum of both directions (600, 900 and 1800 GB/s a device); a
port has half of it in each direction. Memory is in units of 10^9 bytes. These are nominal rates.
Messages reach less: `EFFICIENCY` of them unless ``Network.preset(name, efficiency=...)`` says so.
Between nodes that is a good fabric. ``nic_efficiency`` states another share for NICs alone:
BigScience measured a bus bandwidth of 40.5 Gb/s in an all-reduce over four nodes with NICs of
100 Gb/s, 0.405 of one of them [12]_.

Latencies of messages are 3.4 us inside a node and 14 us between nodes, those of a ring step over
NVLink, and over the network, with the Simple protocol in NCCL's table ``hwLat`` [7]_, by which NCCL
chooses its algorithm. They were not measured on these machines: if latency matters, measure yours.
Inside a ``dgx_b200`` a message takes 16 us, by SimuMax's fit to its measurements [11]_.

All-reduces, all-gathers and reduce-scatters inside a node have the seconds of
`pipesim.NodeCollectives`, by the number n of its GPUs:

========  =====================  ====================  ===================  ======
GPU       latency, all-reduce    share of nominal      of halves            source
========  =====================  ====================  ===================  ======
A100      36 + 5.5 (n-1) us      0.80 - 0.32 / n       0.7 of the latency   [13]_
H100      36 + 1.7 (n-1) us      0.82                  0.7 of the latency   [14]_
B200      22 + 11 (n-1) us       0.80                  0.9 of both          [11]_
========  =====================  ====================  ===================  ======

Those of A100 are fitted to NCCL's all-reduces of 1 MiB to 1 GiB between 2 to 8 GPUs, and differ by
2 % from them in the mean. The share of H100 is that of 370 GB/s, which NCCL's maintainer names for
8 GPUs. Its latency is the intercept of a table of 8 GPUs that are not named there [15]_; how it
depends on n is assumed, and so is 0.7 of the latency for halves on A100 and H100. H200 is taken as
H100. The shares are those at an efficiency of 0.7. Another efficiency changes them in proportion,
up to the nominal rate. Less than 1 MiB was not measured. Racks of 72 GPUs have the values of
B200, which were measured between up to 8: those of larger groups are extrapolated.

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
.. [12] BigScience, experiments/bandwidth/all_reduce_bench-a100-n4.txt,
   https://github.com/bigscience-workshop/bigscience
.. [13] VIA Research, vTrain, trace/a100/AR_GPU2_1M_1024M_LUT and likewise,
   https://github.com/VIA-Research/vTrain
.. [14] NCCL tests, issue 212, https://github.com/NVIDIA/nccl-tests/issues/212
.. [15] Mooncake, pull request 3484, https://github.com/kvcache-ai/Mooncake/pull/3484
.. [16] NVIDIA, "GB200 NVL72", https://www.nvidia.com/en-us/data-center/gb200-nvl72/, and "DGX GB
   Rack Scale Systems User Guide" (four ConnectX-7 a tray of four GPUs),
   https://docs.nvidia.com/dgx/dgxgb200-user-guide/
.. [17] NVIDIA, "GB300 NVL72", https://www.nvidia.com/en-us/data-center/gb300-nvl72/ (a ConnectX-8
   of 800 Gb/s for each GPU)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import NetworkError, find_name, number
from pipesim.network.links import (
    MAX_DEVICE,
    HostLink,
    Link,
    NodeCollectives,
    Nodes,
    bandwidth_from_json,
    check_keys,
    scaled_link,
)
from pipesim.utils.files import read_text
from pipesim.utils.texts import csv_rows, parse_float, parse_floats, parse_rate

if TYPE_CHECKING:
    import pandas as pd


#: Share of a machine's nominal bandwidths that messages reach, unless another one is given.
#: Published steps are predicted with it (``benchmarks/published_steps.py``).
EFFICIENCY = 0.7

#: Seconds of a message inside a node, and between nodes; see above.
_PORT_LATENCY, _NIC_LATENCY = 3.4e-6, 14e-6
_B200_LATENCY = 16e-6
#: Collectives inside a node; see above.
_ON_A100 = NodeCollectives(36e-6, 5.5e-6, bandwidth=0.80 * 300e9, loss=0.4)
_ON_H100 = NodeCollectives(36e-6, 1.7e-6, bandwidth=0.82 * 450e9)
_ON_B200 = NodeCollectives(
    22e-6, 11e-6, bandwidth=0.80 * 900e9, half_latency=0.9, half_bandwidth=0.9
)
#: Bytes a second of 200 and of 400 Gb/s.
_HDR, _NDR = 25e9, 50e9
#: Host links: PCIe Gen4 shared by two GPUs, and PCIe Gen5.
_GEN4, _GEN5 = HostLink(10e-6, 32e9, 2), HostLink(10e-6, 64e9)


@dataclass(frozen=True)
class Machine:
    """One kind of node, at nominal rates."""

    summary: str  # name and network
    nodes: Nodes
    memory: float  # bytes of each device
    gpu: str  # as in `pipesim.gpus`
    host: HostLink


def _dgx(
    device: str,
    gpu: str,
    memory: float,
    nvlink: float,
    nic: float,
    host: HostLink,
    collectives: NodeCollectives,
    port_latency: float = _PORT_LATENCY,
) -> Machine:
    """Return a node of eight devices, each with its own NIC."""
    measured = replace(collectives, peak_bandwidth=nvlink)
    nodes = Nodes(8, port_latency, nvlink, _NIC_LATENCY, nic, n_nics=8, collectives=measured)
    return Machine(f"NVIDIA DGX {device}, InfiniBand between nodes", nodes, memory, gpu, host)


def _nvl72(name: str, gpu: str, memory: float, nic: float) -> Machine:
    """Return a rack of 72 devices in one NVLink domain, each with its own NIC."""
    nodes = Nodes(
        72, _B200_LATENCY, 900e9, _NIC_LATENCY, nic, n_nics=72,
        collectives=replace(_ON_B200, peak_bandwidth=900e9),
    )  # fmt: skip
    summary = f"NVIDIA {name} NVL72, InfiniBand between racks"
    return Machine(summary, nodes, memory, gpu, HostLink(10e-6, 450e9, 2))


MACHINES = {
    "dgx_a100": _dgx("A100", "a100_80gb", 80e9, 300e9, _HDR, _GEN4, _ON_A100),
    "dgx_h100": _dgx("H100", "h100_sxm", 80e9, 450e9, _NDR, _GEN5, _ON_H100),
    "dgx_h200": _dgx("H200", "h200", 141e9, 450e9, _NDR, _GEN5, _ON_H100),
    "dgx_b200": _dgx("B200", "b200", 180e9, 900e9, _NDR, _GEN5, _ON_B200, _B200_LATENCY),
    "gb200_nvl72": _nvl72("GB200", "gb200", 186e9, _NDR),
    "gb300_nvl72": _nvl72("GB300", "gb300", 279e9, 2 * _NDR),
}


def machine(name: str) -> Machine:
    """Return the machine with this name."""
    return MACHINES[find_name("machine", name, MACHINES)]


def machines() -> pd.DataFrame:
    """List the machines that `Network.preset` accepts, one row a name; seconds and bytes.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``summary``, ``gpu`` (a name for `GPU.preset`), ``memory`` of a GPU, fields
        of `Nodes`, and with the prefixes ``collectives_`` and ``host_`` those of `NodeCollectives`
        and `HostLink`; seconds, bytes and bytes/s. Rates are nominal, but for measured ones
        of `NodeCollectives`.

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
            **(nodes := m.nodes.to_dict()),
            **{f"collectives_{key}": value for key, value in nodes.pop("collectives").items()},
            **{f"host_{key}": value for key, value in m.host.to_dict().items()},
        }
        for name, m in MACHINES.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("name")


# Networks in tables of settings

#: Arguments of `Network.preset` that a table may have besides its name.
PRESET_OPTIONS = ("efficiency", "gpus_per_device", "nic_efficiency")
_SHARES = ("nominal_share", "nominal_nic_share")
#: Keys that a table of settings may have for a network.
KEYS = ("latency", "bandwidth", "links", "nodes", "host", *_SHARES, "interleaves", "preset",
        *PRESET_OPTIONS)  # fmt: skip


def preset_fields(
    name: str,
    efficiency: float = EFFICIENCY,
    gpus_per_device: int = 1,
    nic_efficiency: float | None = None,
) -> dict[str, Any]:
    """Return the fields of the network of a common machine; see `Network.preset`."""
    nodes, host = machine(name).nodes, machine(name).host
    part = _share("efficiency", efficiency)
    of_nics = part if nic_efficiency is None else _share("nic_efficiency", nic_efficiency)
    measured = nodes.collectives  # where messages reach `EFFICIENCY`
    nodes = replace(
        nodes,
        port_bandwidth=nodes.port_bandwidth * part,
        nic_bandwidth=nodes.nic_bandwidth * of_nics,
        collectives=measured and measured.scaled(bandwidth=part / EFFICIENCY),
    )
    return {
        "nodes": nodes.grouped(gpus_per_device),
        "host": scaled_link(host, 1.0, part).grouped(gpus_per_device),
        **dict(zip(_SHARES, (part, of_nics), strict=True)),
    }


def _share(name: str, value: object) -> float:
    part = number(value)
    if part is None or not 0 < part <= 1:
        raise NetworkError(f"{name} must be above 0 and at most 1, got {value!r}")
    return part


def network_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a network in a table of settings; see `Network.from_dict`."""
    check_keys("network", values, KEYS)
    links = values.get("links", ())
    if not isinstance(links, (tuple, list)) or not all(isinstance(x, Mapping) for x in links):
        raise NetworkError(f"links must be a list of tables, got {links!r}")
    fields = {"nodes": None, "host": None, **{name: values.get(name) for name in _SHARES}}
    if "preset" in values and values.get("nodes") is not None:
        raise NetworkError("network has both preset and nodes; leave out one of them")
    options = {key: values[key] for key in PRESET_OPTIONS if key in values}
    if options and "preset" not in values:
        raise NetworkError(
            f"network has {' and '.join(options)} without a preset to apply to; add "
            'preset = "dgx_h100", or say in latency, bandwidth or nodes what messages reach'
        )
    if "preset" in values:
        fields = preset_fields(values["preset"], **options)
    elif values.get("nodes") is not None:
        fields["nodes"] = Nodes.from_dict(values["nodes"])
    if values.get("host") is not None:
        fields["host"] = HostLink.from_dict(values["host"])
    return {
        "latency": values.get("latency", 0.0),
        "bandwidth": bandwidth_from_json(values.get("bandwidth")),
        "links": tuple(Link.from_dict(link) for link in links),
        "interleaves": values.get("interleaves", False),
        **fields,
    }


# Links of many pairs, read from a CSV file or from square arrays

COLUMNS = ("source", "target", "latency", "bandwidth", "link")
Pair = tuple[int, int]


def read_links(path: Path) -> tuple[Link, ...]:
    """Return the links of a CSV file; see `pipesim.Network.from_csv`."""
    table = _Table(path)
    a, b = table.devices("source"), table.devices("target")
    latency, bandwidth = table.latencies(), table.bandwidths()
    table.refuse("target", a == b, "another device than source")
    table.refuse_repeated(a, b)
    rows = zip(a.tolist(), b.tolist(), latency.tolist(), bandwidth.tolist(), strict=True)
    if "link" not in table.columns:
        return tuple([Link.unchecked(lag, speed, ((i, j),)) for i, j, lag, speed in rows])
    shared: dict[str, tuple[int, float, float, list[Pair]]] = {}
    for row, (i, j, lag, speed) in enumerate(rows):
        name = table.columns["link"][row].strip() or f"\0{row}"
        first = shared.setdefault(name, (row, lag, speed, []))
        if first[1:3] != (lag, speed):
            raise NetworkError(
                f"{table.where(row, 'link')}: {name!r} has latency {first[1]} and bandwidth "
                f"{first[2]} in line {table.lines[first[0]]}, but {lag} and {speed} here; "
                f"a link has one of each"
            )
        first[3].append((i, j))
    return tuple(Link(lag, speed, tuple(pairs)) for _, lag, speed, pairs in shared.values())


class _Table:
    """The cells of a CSV file by column, and the line of each row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[int] = []
        rows = csv_rows(read_text(path, "links from", NetworkError))
        try:
            header = [name.strip() for name in next(rows, (0, []))[1]]
            cells = self._cells(header, rows)
        except NetworkError:
            raise
        except ValueError as error:
            raise NetworkError(f"cannot read links from {path}: {error}") from error
        if not cells:
            raise NetworkError(f"{path} names no links; add a row such as 0,1,2e-6,25e9")
        self.columns = {name: cells[k :: len(header)] for k, name in enumerate(header)}

    def _cells(self, header: list[str], rows: Iterator[tuple[int, list[str]]]) -> list[str]:
        """Return all cells below the header in one list.

        One list of texts, instead of a list a row, costs Python's garbage collector no time.
        """
        if header not in (list(COLUMNS), list(COLUMNS[:4])):
            raise NetworkError(
                f"{self.path}, line 1: the columns must be {','.join(COLUMNS[:4])} and maybe "
                f"{COLUMNS[4]}, got {','.join(header)!r}"
            )
        cells: list[str] = []
        for line, row in rows:
            if len(row) == len(header):
                cells += row
                self.lines.append(line)
            elif row:
                raise NetworkError(
                    f"{self.path}, line {line}: {len(row)} values for the "
                    f"{len(header)} columns {','.join(header)}"
                )
        return cells

    def where(self, row: int, column: str) -> str:
        return f"{self.path}, line {self.lines[row]}, column {column}"

    def refuse(self, column: str, wrong: NDArray[np.bool_], allowed: str) -> None:
        for row in np.flatnonzero(wrong)[:1].tolist():
            text = self.columns[column][row]
            raise NetworkError(f"{self.where(row, column)}: must be {allowed}, got {text!r}")

    def devices(self, column: str) -> NDArray[np.int64]:
        values = _numbers(self.columns[column])
        good = (values >= 0) & (values <= MAX_DEVICE) & (values == np.floor(values))
        self.refuse(column, ~good, f"a device number, 0 to {MAX_DEVICE}")
        return values.astype(np.int64)

    def latencies(self) -> NDArray[np.float64]:
        values = _numbers(self.columns["latency"])
        self.refuse("latency", ~((values >= 0) & (values < math.inf)), "finite and >= 0 s")
        return values

    def bandwidths(self) -> NDArray[np.float64]:
        values = _numbers([text if text.strip() else "inf" for text in self.columns["bandwidth"]])
        self.refuse("bandwidth", ~(values > 0), "> 0 bytes/s (inf, or nothing, for pure latency)")
        return values

    def refuse_repeated(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> None:
        """Raise `NetworkError` for the first pair that an earlier line names too."""
        order = np.lexsort((b, a))  # stable: of equal pairs, the earlier line is first
        first, repeat = order[:-1], order[1:]
        same = (a[first] == a[repeat]) & (b[first] == b[repeat])
        if same.any():
            row = int(repeat[same].min())
            earlier = int(first[same][repeat[same].argmin()])
            raise NetworkError(
                f"{self.path}, line {self.lines[row]}: pair {(int(a[row]), int(b[row]))} is in "
                f"line {self.lines[earlier]} already; name it once"
            )


def _numbers(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return the number in each text; NaN for a text without one."""
    numbers: Sequence[float | None] | None = parse_floats(texts)
    return np.array([*map(parse_float, texts)] if numbers is None else numbers, dtype=np.float64)


def matrix_links(latency: ArrayLike, bandwidth: ArrayLike) -> tuple[Link, ...]:
    """Return one link a pair from square arrays; see `pipesim.Network.from_matrix`."""
    lag, speed = _array("latency", latency), _array("bandwidth", bandwidth)
    n = max(len(lag) if lag.ndim else 0, len(speed) if speed.ndim else 0)
    if {lag.shape, speed.shape} not in ({(n, n)}, {(n, n), ()}):
        raise NetworkError(
            f"latency and bandwidth must be square, one row a sender and one column a receiver, "
            f"got shapes {lag.shape} and {speed.shape}"
        )
    lag, speed = np.broadcast_to(lag, (n, n)), np.broadcast_to(speed, (n, n))
    a, b = np.nonzero(~np.eye(len(lag), dtype=bool))
    _check_pairs("latency", "finite and >= 0 s", lag, (lag >= 0) & (lag < math.inf), a, b)
    _check_pairs("bandwidth", "> 0 bytes/s", speed, speed > 0, a, b)
    rows = zip(a.tolist(), b.tolist(), lag[a, b].tolist(), speed[a, b].tolist(), strict=True)
    return tuple(Link.unchecked(lag_, speed_, ((i, j),)) for i, j, lag_, speed_ in rows)


def _array(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return an array of floats; NaN stands for an object that is no number."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise NetworkError(
            f"latency and bandwidth must be arrays of numbers, {name} is not: {error}"
        ) from error
    if name == "bandwidth" and array.dtype.kind == "U":
        array = array.astype(object)  # such as "25GB/s"
    if array.dtype.kind == "O" and (array.ndim or isinstance(array.item(), str)):
        numbers = [math.nan if (x := _rate(name, item)) is None else x for item in array.ravel()]
        return np.array(numbers, dtype=np.float64).reshape(array.shape)
    if array.dtype.kind not in "fiu":
        raise NetworkError(
            f"latency and bandwidth must be arrays of numbers, {name} is not: got {values!r:.60}"
        )
    return array.astype(np.float64)


def _rate(name: str, value: object) -> float | None:
    """Return a number, or that of a text of a bandwidth; None for another object."""
    if name != "bandwidth" or not isinstance(value, str):
        return number(value)
    if (rate := parse_rate(value)) is None:
        raise NetworkError(f"bandwidth must be > 0 bytes/s, such as '25GB/s', got {value!r:.60}")
    return rate


def _check_pairs(
    name: str,
    allowed: str,
    values: NDArray[np.float64],
    good: NDArray[np.bool_],
    a: NDArray[np.int64],
    b: NDArray[np.int64],
) -> None:
    wrong = np.flatnonzero(~good[a, b])
    if len(wrong):
        i, j = int(a[wrong[0]]), int(b[wrong[0]])
        raise NetworkError(f"{name} from {i} to {j} must be {allowed}, got {values[i, j]}")
