"""Data sheets of common GPUs, and the shares of their rates that kernels reach.

Nominal FLOP/s are those of dense matrix products in 16 bits with sums in 32 bits, without
sparsity. Memory is in units of 10^9 bytes. Sources are the vendors' data sheets, `SOURCES`.

Tensors may take 1.02 of the nominal memory. A GB of it is 2^30 bytes: where data sheets have 80,
40, 141 and 180 GB, nvidia-smi shows 79.6 to 80, 40, 140.4 and 179.1 GiB [10]_. Of these, CUDA, NCCL
and unused parts of the allocator's blocks are given 0.05. Published runs support it: of the 543 of
``benchmarks/published_memory.py``, which all ran, 539 are predicted to fit, and some need all of
it. Runs that did not fit were not at hand. ECC takes a 16th of the GDDR6 of L40S and L4.

Shares of FLOP/s rest on three things, which ``basis`` names:

- *training steps*: the share with which `pipesim.Transformer.costs` predicts published steps best.
  A100: GPT of 22 to 1,000 billion parameters [2]_. H100: Llama 3 405B on 8,192 GPUs, 430 TFLOP/s a
  GPU [3]_. B200: Llama 3 on 8 GPUs [4]_. Sustained products are slower than short ones on GPUs
  that reach their power limit: H100 reaches 0.80 in large products and 0.60 in training.
- *large products*: the best of many shapes of bfloat16 products in torch [1]_. B300 (0.786) and
  GB200 (0.729) are assumed to keep as much of it in training as H100, 0.60 / 0.803.
- Otherwise the share of a GPU of the same architecture, or 0.7, is assumed. H20 is far from its
  power limit, and has the share of H100 in large products. A GPU with another power limit is
  assumed to run products at the third root of its ratio, such as (500/700)^(1/3) for an H100 of
  500 W in place of 700 W: power grows with the third power of a clock whose voltage follows. GB300
  has 1,400 W in place of the 1,200 W of GB200 [8]_.

The two sources of B200 differ. SimuMax's table of products [5]_, from the machine of its steps,
has a median of 0.48 and a most of 0.63 of the nominal FLOP/s for products of 0.5 ms and longer.
Those of Transformer Engine's table of B300 [7]_ are as long and reach 0.66 to 0.68. NVIDIA's own
steps on DGX B200 [9]_ suit 0.58, the share of large products (0.776) that H100 keeps: with 0.45
those of Llama 3 in 8 bits are predicted up to 26 % too long.
``dataclasses.replace(GPU.preset("b200"), flops=0.58 * 2250e12)`` is such a GPU.

Fused attention has a share of its own where its kernels were measured: 0.54 on B200 (cuDNN) and
0.69 on A100, for deep heads and many tiles, forward and backward together [5]_. By these and the
formula of `pipesim.GPU`, kernels of at least 8 heads are within 13 % of the measured ones, from
4,096 to 131,072 tokens, but for one that is 25 % too slow. Those of A100 are of the PCIe card, and
other A100 are assumed to have their share. Other GPUs have the share of products: published kernels
of H100 reach 0.35 to 0.59 of the nominal FLOP/s, which depends on the kernel more than on the GPU.

Linear products in 8 or 4 bits reach fewer times the FLOP/s of 16 bits than data sheets say. H100:
1.65 with FP8, with which whole steps of Llama, GPT-3 and Nemotron are predicted best [6]_; data
sheets have 2. Kernels alone reach 1.90 on H200, and 1.92 (FP8), 1.83 (MXFP8) and 3.48 (NVFP4) on
B300 [7]_, which training is assumed to lower as on H100: by 13 %. Other Blackwell GPUs are assumed
to have the ratios of B300, and other GPUs whose data sheets have FP8 that of H100.

Shares of bandwidth, 0.85, are assumed for all: large copies reach 0.9 and more, the element-wise
kernels of a training step less.

Multiprocessors (compute units of AMD) are those of the vendors' architecture papers, as listed by
TechPowerUp (source 13); a GPU of two dies has those of both. B300 and GB300 are assumed to have
those of B200; NVIDIA names 160 for their whole chip.

References
----------
.. [1] Bekman, "Machine Learning Engineering", maximum achievable matmul FLOPS,
   https://github.com/stas00/ml-engineering/tree/master/compute/accelerator
.. [2] Korthikanti et al., arXiv 2205.05198, table 5
.. [3] Llama Team, "The Llama 3 Herd of Models", arXiv 2407.21783, table 4
.. [4] MooreThreads, SimuMax, https://github.com/MooreThreads/SimuMax, docs/b200
.. [5] the same, configs/system: a100_pcie.json and b200_bf16_ceperm.json, which have speeds of
   kernels of Transformer Engine by their shapes
.. [6] NVIDIA, https://github.com/NVIDIA/dgxc-benchmarking, tables of H100
.. [7] NVIDIA, https://github.com/NVIDIA/TransformerEngine,
   docs/examples/gemm_profiling/gemm_profiling.rst
.. [8] Verda, "GB300 NVL72 architecture", https://verda.com/blog/gb300-nvl72-architecture
.. [9] NVIDIA, https://github.com/NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, 25.11
.. [10] https://github.com/modal-labs/modal-client/pull/2797 has the totals of A100, H100, L40S and
   L4; those of H200 and B200 are 143771 and 183359 MiB
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipesim.models.precision import FORMATS

if TYPE_CHECKING:
    import pandas as pd


#: Share of nominal memory that tensors may take, and with ECC of GDDR6.
_TENSORS = 0.95 * 2**30 / 1e9
_WITH_ECC = _TENSORS * 15 / 16


@dataclass(frozen=True)
class DataSheet:
    """Nominal rates and memory of a GPU, and the shares that kernels reach; see `gpus`."""

    summary: str
    flops: float
    bandwidth: float
    memory: float
    multiprocessors: int
    flops_efficiency: float
    basis: str
    source: int  # number in `SOURCES`
    bandwidth_efficiency: float = 0.85
    memory_efficiency: float = _TENSORS
    attention_efficiency: float | None = None  # None for flops_efficiency
    architecture: str = ""  # of measured attention kernels (`pipesim.models.attention_rates`)
    product_ratios: Mapping[str, float] = field(default_factory=dict)  # by precision

    @property
    def attention_ratio(self) -> float:
        """Share that fused attention reaches over that of products."""
        share = self.attention_efficiency
        return 1.0 if share is None else share / self.flops_efficiency


_A100, _H100, _B200 = (0.83, "training steps"), (0.60, "training steps"), (0.45, "training steps")
#: Large products, times the 0.60 / 0.803 of H100.
_B300, _GB200 = ((x, "large products, lowered as on H100") for x in (0.59, 0.54))
_GB300 = 0.57, "as GB200 of 1,200 W, times (1400/1200)^(1/3)"
_A100_PCIE, _MI250X = (0.81, "large products"), (0.77, "large products")
_MI300X, _MI325X = (0.51, "large products"), (0.60, "large products")
_LIKE_A100, _LIKE_H100 = (0.83, "as A100"), (0.60, "as H100")
_H100_500W = 0.60 * (500 / 700) ** (1 / 3), "as H100 of 700 W, times (500/700)^(1/3)"
_LIKE_MI325X = (0.60, "as MI325X")
_ON_A100, _ON_B200 = 0.69, 0.54  # of fused attention
_HOPPER = {"fp8": 1.65}
_BLACKWELL = {"fp8": 1.67, "mxfp8": 1.59, "nvfp4": 3.02}
_H20, _ASSUMED = (0.80, "large products of H100"), (0.7, "assumed")

_NVIDIA, _AMD = "https://www.nvidia.com/en-us/data-center/", "https://www.amd.com/en/products/"
#: Sources of nominal values by number.
SOURCES = {
    1: "https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf",
    2: f"{_NVIDIA}a100/",
    3: f"{_NVIDIA}h100/",
    4: f"{_NVIDIA}h200/",
    5: f"{_NVIDIA}dgx-b200/ (eighth of a node)",
    6: f"{_NVIDIA}gb200-nvl72/ (72nd of a rack)",
    7: f"{_NVIDIA}l40s/",
    8: f"{_NVIDIA}l4/",
    9: "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf "
    "(appendix A, RTX 4090)",
    10: f"{_AMD}accelerators/instinct/mi200/mi250x.html",
    11: f"{_AMD}accelerators/instinct/mi300/mi300x.html",
    12: f"{_AMD}accelerators/instinct/mi300/mi325x.html",
    13: "https://www.techpowerup.com/gpu-specs/ (sold in China, without a public data sheet)",
    14: "https://www.nvidia.com/en-us/data-center/hgx/ (eighth of HGX B300)",
    15: f"{_NVIDIA}gb300-nvl72/ (72nd of a rack)",
    16: f"{_AMD}accelerators/instinct/mi350/mi355x.html",
    17: "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "llama3_h100_202412_torchtitan.md (96 GB of HBM2e at 2.4 TB/s, 500 W)",
}

DATA_SHEETS = {
    "v100_sxm2": DataSheet("NVIDIA V100 SXM2 32 GB", 125e12, 900e9, 32e9, 80, *_ASSUMED, 1),
    "a100_40gb": DataSheet("NVIDIA A100 SXM 40 GB", 312e12, 1555e9, 40e9, 108, *_A100, 2,
                           attention_efficiency=_ON_A100),
    "a100_80gb": DataSheet("NVIDIA A100 SXM 80 GB", 312e12, 2039e9, 80e9, 108, *_A100, 2,
                           attention_efficiency=_ON_A100),
    "a100_pcie": DataSheet("NVIDIA A100 PCIe 80 GB", 312e12, 1935e9, 80e9, 108, *_A100_PCIE, 2,
                           attention_efficiency=_ON_A100),
    "a800_80gb": DataSheet("NVIDIA A800 SXM 80 GB", 312e12, 2039e9, 80e9, 108, *_LIKE_A100, 2,
                           attention_efficiency=_ON_A100),
    "h100_sxm": DataSheet("NVIDIA H100 SXM 80 GB", 989.4e12, 3350e9, 80e9, 132, *_H100, 3,
                          architecture="h100", product_ratios=_HOPPER),
    "h100_sxm_500w": DataSheet("NVIDIA H100 SXM 96 GB, 500 W", 989.4e12, 2400e9, 96e9, 132,
                               *_H100_500W, 17, architecture="h100", product_ratios=_HOPPER),
    "h100_pcie": DataSheet("NVIDIA H100 PCIe 80 GB", 756e12, 2000e9, 80e9, 114, *_LIKE_H100, 3,
                           product_ratios=_HOPPER),
    "h100_nvl": DataSheet("NVIDIA H100 NVL 94 GB", 835e12, 3900e9, 94e9, 132, *_LIKE_H100, 3,
                          product_ratios=_HOPPER),
    "h200": DataSheet("NVIDIA H200 SXM 141 GB", 989.4e12, 4800e9, 141e9, 132, *_LIKE_H100, 4,
                      architecture="h100", product_ratios=_HOPPER),
    "h800": DataSheet("NVIDIA H800 SXM 80 GB", 989.4e12, 3350e9, 80e9, 132, *_LIKE_H100, 13,
                      architecture="h100", product_ratios=_HOPPER),
    "h20": DataSheet("NVIDIA H20 96 GB", 148e12, 4000e9, 96e9, 78, *_H20, 13,
                     product_ratios=_HOPPER),
    "b200": DataSheet("NVIDIA B200 SXM 180 GB", 2250e12, 8000e9, 180e9, 148, *_B200, 5,
                      attention_efficiency=_ON_B200, product_ratios=_BLACKWELL),
    "gb200": DataSheet("NVIDIA GB200 186 GB, one GPU", 2500e12, 8000e9, 186e9, 148, *_GB200, 6,
                       attention_efficiency=_ON_B200, product_ratios=_BLACKWELL),
    "b300": DataSheet("NVIDIA B300 SXM 270 GB", 2250e12, 8000e9, 270e9, 148, *_B300, 14,
                      attention_efficiency=_ON_B200, product_ratios=_BLACKWELL),
    "gb300": DataSheet("NVIDIA GB300 279 GB, one GPU", 2500e12, 8000e9, 279e9, 148, *_GB300, 15,
                       attention_efficiency=_ON_B200, product_ratios=_BLACKWELL),
    "l40s": DataSheet("NVIDIA L40S 48 GB", 362e12, 864e9, 48e9, 142, *_ASSUMED, 7,
                      memory_efficiency=_WITH_ECC, product_ratios=_HOPPER),
    "l4": DataSheet("NVIDIA L4 24 GB", 121e12, 300e9, 24e9, 58, *_ASSUMED, 8,
                    memory_efficiency=_WITH_ECC, product_ratios=_HOPPER),
    "rtx_4090": DataSheet("NVIDIA RTX 4090 24 GB", 165.2e12, 1008e9, 24e9, 128, *_ASSUMED, 9,
                          product_ratios=_HOPPER),
    "mi250x": DataSheet("AMD MI250X 128 GB, both dies", 383e12, 3277e9, 128e9, 220, *_MI250X, 10),
    "mi300x": DataSheet("AMD MI300X 192 GB", 1307.4e12, 5300e9, 192e9, 304, *_MI300X, 11,
                        product_ratios=_HOPPER),
    "mi325x": DataSheet("AMD MI325X 256 GB", 1307.4e12, 6000e9, 256e9, 304, *_MI325X, 12,
                        product_ratios=_HOPPER),
    "mi355x": DataSheet("AMD MI355X 288 GB", 2516.6e12, 8000e9, 288e9, 256, *_LIKE_MI325X, 16,
                        product_ratios=_HOPPER),
}  # fmt: skip


def gpus() -> pd.DataFrame:
    """List the GPUs that `GPU.preset` accepts, one row a name.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``summary``; nominal ``flops`` (FLOP/s, dense, 16 bits), ``bandwidth``
        (bytes/s) and ``memory`` (bytes); ``multiprocessors``; ``flops_efficiency`` and
        ``bandwidth_efficiency``, the shares of these rates that kernels reach (0..1);
        ``memory_efficiency``, the share of this memory that tensors may take;
        ``attention_efficiency``, that of fused attention if it has its own; ``basis`` of the
        efficiencies; ``fp8_ratio``, ``mxfp8_ratio`` and ``nvfp4_ratio``, FLOP/s of linear products
        over those in 16 bits, 0 where the GPU lacks the format; ``source`` of the nominal values.

    Examples
    --------
    >>> import pipesim as ps
    >>> ps.gpus().loc["h100_sxm", ["flops", "flops_efficiency"]].tolist()
    [989400000000000.0, 0.6]
    """
    from pipesim.utils.packages import pandas as pd

    rows = {
        name: {
            **{k: v for k, v in vars(sheet).items() if k != "product_ratios"},
            **{f"{x}_ratio": sheet.product_ratios.get(x, 0.0) for x in FORMATS},
            "source": SOURCES[sheet.source],
        }
        for name, sheet in DATA_SHEETS.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("name")
