"""DLRM, a recommender: tables sharded over all processes, and MLPs that every process has.

It has two stages. The first is lowered as sharded::

    numbers (n, 13) ---------------> bottom MLP --+
                                                  +--> products of all pairs --> top MLP --> logits
    keys (n, 26) --> 26 tables -------------------+
                    | stage 0 |     | stage 1                                              |

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv 1906.00091.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeexec.demo_models.layer_costs import layer_costs
from pipeexec.devices.host_memory import check_tensors
from pipeexec.distributed.processes import Processes
from pipeexec.embedding.sharded_embedding import ShardedEmbedding
from pipeexec.embedding.stage import EmbeddingStage
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, check_count, number
from pipesim.models.gpu import GPU, Kernel, as_gpu
from pipesim.network.network import Network

# Criteo's click logs: rows of their tables, and random keys of similar distribution.
#
# A sample has 13 numbers and 26 categories. The number of values of each category is public. Their
# frequencies are not: here they follow Zipf's law with an assumed skew.

#: Numbers of a sample, besides its categories.
N_DENSE = 13
#: Rows of the display advertising challenge (Kaggle, 2014) as facebookresearch/dlrm counts them.
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
#: Rows of the terabyte click logs, numbers taken modulo 40 million: MLPerf's DLRM.
TERABYTE_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10,
    2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
#: Exponent of Zipf's law: key k occurs about (k + 1) ** -SKEW as often as key 0. Assumed.
SKEW = 1.05
#: Number of blocks of keys; keys of a block count as equally frequent.
_BLOCKS = 4096


def scaled_rows(rows: Sequence[int], factor: float, least: int = 4) -> tuple[int, ...]:
    """Return the rows of smaller tables: times ``factor``, but at least ``least`` or all rows."""
    got = number(factor)
    if got is None or not 0 < got <= 1:
        raise ArgumentError(f"factor must be above 0 and at most 1, got {factor!r}")
    least = check_count("least", least)
    return tuple(max(round(n * got), min(n, least)) for n in rows)


def draw_keys(
    rows: Sequence[int], n: int, generator: torch.Generator, skew: float = SKEW
) -> Tensor:
    """Return keys of ``n`` samples, int64 of shape ``(n, tables)``; small ones are frequent."""
    share = torch.rand(n, len(rows), generator=generator, dtype=torch.float64).numpy()
    columns = [_quantile(share[:, i], size, skew) for i, size in enumerate(rows)]
    return torch.from_numpy(np.stack(columns, axis=1))


def distinct(rows: Sequence[int], n: int, skew: float = SKEW) -> float:
    """Return the mean number of different keys in ``n`` samples, over all tables.

    A process requests each key once (`pipeexec.ShardedEmbedding`): it sends this many keys.
    """
    total = 0.0
    for size in rows:
        first = np.unique(np.geomspace(1, size + 1, _BLOCKS).astype(np.int64))
        count = np.diff(first)
        share = np.diff(_cumulated(first, size, skew)) / count
        total += float((count * -np.expm1(n * np.log1p(-np.minimum(share, 1 - 1e-16)))).sum())
    return total


def _cumulated(x: NDArray[np.int64], size: int, skew: float) -> NDArray[np.float64]:
    """Return the share of keys below ``x - 1``, by the integral of ``x ** -skew`` from 1."""
    power, logs, whole = 1 - _check_skew(skew), np.log(x), np.log(size + 1)
    # expm1 and log1p are exact even as power approaches 0.
    shares: NDArray[np.float64] = (
        np.expm1(power * logs) / np.expm1(power * whole) if power else logs / whole
    )
    return shares


def _quantile(share: NDArray[np.float64], size: int, skew: float) -> NDArray[np.int64]:
    """Return the key at each share of a table: the inverse of `_cumulated`."""
    power, whole = 1 - _check_skew(skew), np.log(size + 1)
    logs = np.log1p(share * np.expm1(power * whole)) / power if power else share * whole
    keys: NDArray[np.int64] = np.clip(np.exp(logs).astype(np.int64) - 1, 0, size - 1)
    return keys


def _check_skew(skew: float) -> float:
    got = number(skew)
    if got is None or not 0 <= got < inf:
        raise ArgumentError(f"skew must be finite and >= 0, got {skew!r}")
    return got


#: Bytes of a parameter; of a key in a message; and that a radix sort reads and writes for a key and
#: its position (32 bits, 8 bits per pass).
_PARAMETER, _KEY, _SORTED = 4, 4, 4 * 2 * 8


@dataclass(frozen=True)
class DLRM:
    """Sizes of a DLRM, with its stages, batches and costs.

    Attributes
    ----------
    rows
        Number of rows of each table.
    dim
        Length of a row, and of the output of the bottom MLP.
    bottom, top
        Widths of the hidden layers of both MLPs.
    n_dense
        Number of numbers of a sample.

    Examples
    --------
    >>> TERABYTE.n_interactions, TERABYTE.n_rows  # 26 * 27 / 2 pairs, and the bottom MLP's output
    (479, 187767399)
    """

    rows: tuple[int, ...]
    dim: int
    bottom: tuple[int, ...] = ()
    top: tuple[int, ...] = ()
    n_dense: int = N_DENSE

    def __post_init__(self) -> None:
        for name in ("rows", "bottom", "top"):
            value = getattr(self, name)
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise ArgumentError(f"{name} must be a sequence of sizes, got {value!r}")
            sizes = tuple(check_count(f"{name}[{i}]", size) for i, size in enumerate(value))
            object.__setattr__(self, name, sizes)
        if not self.rows:
            raise ArgumentError("rows is empty; give the rows of at least one table")
        check_count("dim", self.dim)
        check_count("n_dense", self.n_dense)

    @property
    def n_rows(self) -> int:
        """Rows of all tables."""
        return sum(self.rows)

    @property
    def n_interactions(self) -> int:
        """Numbers that the top MLP reads: ``dim``, and a product for each pair of vectors."""
        return self.dim + len(self.rows) * (len(self.rows) + 1) // 2

    def scaled(self, factor: float, least: int = 4) -> DLRM:
        """Return a DLRM with smaller tables; see `pipeexec.demo_models.dlrm.scaled_rows`."""
        return replace(self, rows=scaled_rows(self.rows, factor, least))

    def stages(
        self, process_group: dist.ProcessGroup | Processes | None = None, *, sparse: bool = False
    ) -> list[nn.Module]:
        """Return both stages, for a graph lowered with ``sharded=[0]``.

        Parameters
        ----------
        process_group, sparse
            As for `pipeexec.ShardedEmbedding`; every process must construct the module.
        """
        embedding = ShardedEmbedding(list(self.rows), self.dim, process_group, sparse=sparse)
        return [EmbeddingStage(embedding), DenseStage(self)]

    def batch(
        self, n: int, generator: torch.Generator, skew: float = SKEW
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return random samples: ``((numbers, keys), clicks)``, the same for the same generator.

        Keys are those of `pipeexec.demo_models.dlrm.draw_keys`. A quarter of the samples are
        clicks, as in Criteo's logs.
        """
        n = check_count("n", n)
        check_tensors(
            f"a batch of n={n} samples", n * (4 * self.n_dense + 8 * len(self.rows) + 4),
            "give fewer samples",
        )  # fmt: skip
        numbers = torch.randn(n, self.n_dense, generator=generator)
        keys = draw_keys(self.rows, n, generator, skew)
        return (numbers, keys), (torch.rand(n, 1, generator=generator) < 0.25).float()

    def costs(
        self,
        gpu: GPU | Mapping[str, Any] | str,
        batch: int,
        *,
        n_replicas: int = 1,
        network: Network | None = None,
        dtype: torch.dtype = torch.float32,
        skew: float = SKEW,
        all_reduce: str = "ring",
    ) -> Costs:
        """Return the costs of both stages on a GPU, from its data sheet.

        The kernels of the MLPs are counted without running them. In the embedding, these read and
        write vectors once each: lookup, reordering, sums over repeated keys, sums in the rows'
        gradients. Keys are sorted once. All of this is part of F and B; an ALL_TO_ALL only sends
        bytes over the network. SGD steps on the rows that occur (``sparse=True``).

        Parameters
        ----------
        gpu
            The GPU of each replica, the name of a preset, or a mapping of a GPU's fields. Its
            ``flops`` are those for numbers of ``dtype``.
        batch
            Number of samples of a GPU's micro-batch.
        n_replicas
            Number of GPUs; each holds an equal part of the tables.
        network, all_reduce
            As in `pipesim.Costs`.
        dtype
            Type of activations, and of sent vectors and gradients; parameters have 32 bits.
        skew
            Skew of the keys; a larger skew means fewer different keys.
        """
        device = as_gpu(gpu)
        batch, n_replicas = check_count("batch", batch), check_count("n_replicas", n_replicas)
        n_keys, n_distinct = batch * len(self.rows), distinct(self.rows, batch, skew)
        vector = self.dim * dtype.itemsize
        # Bytes of the vectors of all keys, and of those of different keys.
        all_bytes, distinct_bytes = n_keys * vector, n_distinct * vector
        numbers = torch.empty(batch, self.n_dense, dtype=dtype, device="meta")
        vectors = torch.empty(batch, len(self.rows), self.dim, dtype=dtype, device="meta")
        with torch.device("meta"):
            dense = nn.Sequential(_TupleInput(DenseStage(self).to(dtype)))
        [layer] = layer_costs(dense, (numbers, vectors)).layers
        n_dense = layer.parameter_bytes / dtype.itemsize
        lookup, sums = 2 * distinct_bytes, 3 * distinct_bytes  # a sum reads two and writes one
        reordered = distinct_bytes + all_bytes
        forward = [
            Kernel("sort", nbytes=_SORTED * n_keys), Kernel("lookup", nbytes=lookup),
            Kernel("reorder", nbytes=reordered),
        ]  # fmt: skip
        backward = [Kernel("sum repeated", nbytes=reordered), Kernel("sum", nbytes=sums)]
        shard = sum(-(-rows // n_replicas) for rows in self.rows) * self.dim
        step_bytes = 3 * _PARAMETER * n_distinct * self.dim
        return Costs(
            forward=(device.seconds(forward), device.seconds(layer.forward)),
            backward=(device.seconds(backward), device.seconds(layer.backward)),
            optimizer_step=(
                device.seconds([Kernel("sparse SGD", nbytes=step_bytes)]),
                device.seconds([Kernel("SGD", nbytes=3 * _PARAMETER * n_dense)]),
            ),
            output_bytes=(float(numbers.nbytes + vectors.nbytes), layer.output_bytes),
            # Source and destination of each key's vector.
            activation_bytes=(3.0 * _KEY * n_keys, layer.activation_bytes),
            parameter_bytes=(float(_PARAMETER * shard), _PARAMETER * n_dense),
            key_bytes=(_KEY * n_distinct, 0.0),
            vector_bytes=(distinct_bytes, 0.0),
            network=Network() if network is None else network,
            all_reduce=all_reduce,
        )


#: The sizes of facebookresearch/dlrm, bench/dlrm_s_criteo_kaggle.sh.
KAGGLE = DLRM(KAGGLE_ROWS, 16, (512, 256, 64), (512, 256))
#: The sizes of MLPerf training: facebookresearch/dlrm, bench/run_and_time.sh.
TERABYTE = DLRM(TERABYTE_ROWS, 128, (512, 256), (1024, 1024, 512, 256))


class DenseStage(nn.Module):
    """Both MLPs and the products between them: numbers and vectors to one logit per sample."""

    pairs: Tensor

    def __init__(self, sizes: DLRM) -> None:
        super().__init__()
        self.bottom = nn.Sequential(*_layers([sizes.n_dense, *sizes.bottom, sizes.dim]), nn.ReLU())
        self.top = nn.Sequential(*_layers([sizes.n_interactions, *sizes.top, 1]))
        n = len(sizes.rows) + 1
        row, column = torch.tril_indices(n, n, offset=-1)
        self.register_buffer("pairs", row * n + column, persistent=False)

    def forward(self, numbers: Tensor, vectors: Tensor) -> Tensor:
        """Return logits, of shape (n, 1), for numbers and vectors (n, tables, dim)."""
        x = self.bottom(numbers)
        features = torch.cat([x[:, None], vectors], 1)
        products = torch.bmm(features, features.mT).flatten(1)
        logits: Tensor = self.top(torch.cat([x, products.index_select(1, self.pairs)], 1))
        return logits


class UnsplitDLRM(nn.Module):
    """The whole model in one module: one process has an `nn.Embedding` for each table."""

    def __init__(self, sizes: DLRM) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, sizes.dim) for rows in sizes.rows)
        self.dense = DenseStage(sizes)

    def forward(self, numbers: Tensor, keys: Tensor) -> Tensor:
        """Return logits, of shape (n, 1), for numbers and keys (n, tables)."""
        columns = zip(self.tables, keys.unbind(1), strict=True)
        logits: Tensor = self.dense(numbers, torch.stack([t(k) for t, k in columns], 1))
        return logits


class _TupleInput(nn.Module):
    """Module that calls another with the elements of a tuple as arguments."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = self.module(*values)
        return output


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return layers[:-1]
