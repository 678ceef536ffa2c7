"""Data that exchanges read and write: those of sharded embeddings, and of tokens for experts."""

from __future__ import annotations

import itertools

import numpy as np

from pipesim.analysis.audit.data_table import DataUses, gradient_parts, local_inputs
from pipesim.ops import EXCHANGES, EXPERT_EXCHANGES, Op
from pipesim.utils.csr import Ints


def embedding_exchanges(uses: DataUses) -> None:
    """Add uses of exchanges: a member reads the data of every replica (rule 9)."""
    graph = uses.graph
    replicas = range(graph.n_replicas)
    exchange, dispatch = uses.tasks(Op.ALL_TO_ALL), uses.tasks(Op.DISPATCH)
    counts, keys, vectors, gradients, accumulated = (
        exchange[graph.part[exchange] == number] for number in range(len(EXCHANGES))
    )
    reorder = uses.tasks(Op.REORDER)
    puts, sums = (
        reorder[graph.part[reorder] == EXCHANGES.index(name)] for name in ("vectors", "gradients")
    )
    # Keys are grouped, and vectors put in order, by tasks of their own or by the exchange.
    _read(uses, dispatch, -1, "input", "output")
    uses.note(dispatch, "w", "groups")
    for tasks, replica in itertools.product((counts, keys), replicas):
        uses.note(tasks, "r", "groups", replica=replica)
        if not len(dispatch):
            _read(uses, tasks, -1, "input", "output", replica)
    uses.note(counts, "w", "counts")
    uses.note(keys, "r", "counts")
    uses.note(keys, "w", "keys")
    for replica in replicas:
        uses.note(vectors, "r", "rows", replica=replica)
    uses.note(vectors, "w", "vectors" if len(puts) else "output")
    uses.note(puts, "r", "vectors")
    uses.note(puts, "w", "output")
    _read(uses, sums, +1, "gradient", "input_gradient")
    uses.note(sums, "w", "sums")
    for replica in replicas:
        uses.note(gradients, "r", "sums", replica=replica)
        if not len(sums):
            _read(uses, gradients, +1, "gradient", "input_gradient", replica)
    uses.note(gradients, "w", "row_gradients")
    backward = uses.tasks(Op.B, Op.I)
    uses.note(backward, "r", "sums")
    for part in gradient_parts(graph):
        uses.note(accumulated, "rw", "gradients", microbatch=0, part=part)
        for replica in replicas:
            uses.note(accumulated, "r", "gradients", microbatch=0, part=part, replica=replica)


def expert_exchanges(uses: DataUses) -> None:
    """Add uses of tokens: a segment writes them, and the next one reads what was exchanged.

    A member of an exchange reads the tokens of every replica of its group (rule 9).
    """
    graph = uses.graph
    exchange = uses.tasks(Op.ALL_TO_ALL)
    exchange = exchange[graph.part[exchange] >= len(EXCHANGES)]
    layer, place = np.divmod(graph.part[exchange] - len(EXCHANGES), len(EXPERT_EXCHANGES))
    is_backward, segment = place >= 2, 2 * layer + place % 2
    for ops, selected, sent, received in (
        ((Op.F,), ~is_backward, "tokens", "routed"),
        ((Op.B, Op.I), is_backward, "token_gradients", "routed_gradients"),
    ):
        part = graph.part[own := uses.tasks(*ops)]
        uses.note(own, "w", sent, part=part)
        uses.note(own[part > 0], "r", received, part=part[part > 0] - 1)
        tasks, number = exchange[selected], segment[selected]
        uses.note(tasks, "w", received, part=number)
        of_task = np.zeros(len(graph), dtype=np.int64)
        of_task[tasks] = number
        for collective in np.unique(graph.group[tasks]).tolist():
            members = graph.collectives[collective].astype(np.int64)
            reads, other = (x.ravel() for x in np.meshgrid(members, members, indexing="ij"))
            uses.note(reads, "r", sent, part=of_task[reads], replica=graph.replica[other])


def _read(
    uses: DataUses, tasks: Ints, step: int, arrived: str, output: str, replica: int | None = None
) -> None:
    """Add reads of data from the stage at offset ``step``, by message or on the same device."""
    replicas = uses.graph.replica if replica is None else np.full(len(uses.graph), replica)
    uses.note(tasks, "r", arrived, replica=replicas[tasks])
    local, stage = local_inputs(uses, tasks, step, replica)
    uses.note(local, "r", output, stage=stage, replica=replicas[local])
