"""`Experts`: a layer whose tokens go to a few of many experts, which replicas may share out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.devices.host_memory import check_tensors
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_type,
)
from pipesim.utils.checks import Count, checked

#: Bytes that Python and torch need for one expert, at least.
_BYTES_PER_EXPERT = 1000


class Routed(NamedTuple):
    """Tokens of a layer's input, sorted by expert, and everything that `Experts.combine` needs.

    Attributes
    ----------
    rows
        One row a token and chosen expert, sorted by expert; shape
        ``(n_tokens * experts_per_token, width)``.
    counts
        Number of rows of each expert; shape ``(n_experts,)``.
    order
        Number of the token and choice of each row, ``token * experts_per_token + choice``.
    weights
        Weight of each choice; shape ``(n_tokens, experts_per_token)``.
    kept
        Sum of the residual and of the shared expert, in the shape of the input; None without both.
    shape
        Shape of the input.
    """

    rows: Tensor
    counts: Tensor
    order: Tensor
    weights: Tensor
    kept: Tensor | None
    shape: torch.Size


class Experts(nn.Module):
    """A layer with experts: each token goes to those that its router scores highest.

    For a token ``x``, with ``h = norm(x)`` and ``p = softmax(router(h))``, the output is::

        residual * x + shared(h) + sum of p[e] * expert[e](h), over the largest p[e]

    No token is dropped, whatever the load of its experts (no capacity). As a child of an
    ``nn.Sequential``, possibly nested, the layer is cut out of a stage by a graph that was lowered
    with ``expert_layers``: its experts are then spread over the replicas of the pipeline.

    Parameters
    ----------
    expert
        Makes one expert, a module from ``(n, width)`` to ``(n, width)``, n from 0 on. It is called
        ``n_experts`` times in every process, so that the same seed gives the same experts however
        they are shared out.
    width
        Last dimension of the input.
    n_experts, experts_per_token
        Number of experts, and of those that a token goes to.
    share
        ``(k, n)``: hold the k-th of n equal parts of the experts, as a process does that has the
        k-th of n replicas. By default all.
    norm, shared
        Modules before the router and the experts, and for all tokens beside them; None for none.
    residual
        Whether to add the input.
    normalize
        Whether the weights of a token's experts are divided by their sum.

    Attributes
    ----------
    held
        Numbers of the experts that this module has, which name them in ``state_dict()``.

    See Also
    --------
    pipesim.lower : Its ``expert_layers`` spreads the experts of a stage.
    pipeexec.ShardedEmbedding : Rows spread over processes.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> layer = px.Experts(lambda: torch.nn.Linear(4, 4), 4, n_experts=8, share=(1, 2))
    >>> list(layer.held), next(iter(layer.experts.state_dict()))
    ([4, 5, 6, 7], '4.weight')
    """

    @checked
    def __init__(
        self,
        expert: Annotated[Callable[[], nn.Module], "expert(), which makes one expert"],
        width: Count,
        n_experts: Count,
        experts_per_token: Count = 2,
        *,
        share: tuple[int, int] = (0, 1),
        norm: nn.Module | None = None,
        shared: nn.Module | None = None,
        residual: bool = False,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(expert, nn.Module):
            raise ArgumentTypeError(
                f"expert must be a function that makes one expert, got {expert!r:.60}; give such "
                "as lambda: nn.Linear(64, 64)"
            )
        self.width, self.n_experts, self.experts_per_token = width, n_experts, experts_per_token
        if experts_per_token > n_experts:
            raise ArgumentError(
                f"experts_per_token={experts_per_token} must be at most n_experts={n_experts}"
            )
        self.held = _held(share, n_experts)
        self.residual, self.normalize = residual, normalize
        self.norm, self.shared = norm, shared
        check_tensors(
            f"{n_experts} experts of width {width}",
            n_experts * (width * torch.get_default_dtype().itemsize + _BYTES_PER_EXPERT),
            "take fewer",
        )
        self.router = nn.Linear(width, n_experts, bias=False)
        self.experts = nn.ModuleDict()
        for number in range(n_experts):
            module = check_type("expert()", expert(), nn.Module, "return a module")
            if number in self.held:
                self.experts[str(number)] = module
        _check_separate(self.experts)

    @property
    def has_all(self) -> bool:
        """Whether this module has all experts."""
        return len(self.held) == self.n_experts

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with all experts in this module.

        Parameters
        ----------
        x
            Tokens, shape ``(..., width)``.

        Returns
        -------
        torch.Tensor
            Shape of the input.

        """
        if not self.has_all:
            raise ExecutionError(
                f"this layer has experts {self.held.start} to {self.held.stop - 1} of "
                f"{self.n_experts}, so that it runs in a pipeline alone, whose replicas have the "
                "others; make it without share to call it"
            )
        routed = self.route(x)
        return self.combine(self.compute(routed.rows, routed.counts[None], self.held), routed)

    def route(self, x: Tensor) -> Routed:
        """Return the tokens of an input, sorted by the experts that its router chooses.

        Parameters
        ----------
        x
            Tokens, shape ``(..., width)``.

        Returns
        -------
        Routed
            Tokens sorted by expert, number of rows of each expert, and the values that `combine`
            needs.

        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[-1:] != (self.width,):
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentTypeError(
                f"a layer with experts takes floating-point tensors of shape (..., {self.width}), "
                f"got {got}; let the module before it return one"
            )
        hidden = (x if self.norm is None else self.norm(x)).reshape(-1, self.width)
        weights, chosen = self.router(hidden).softmax(-1).topk(self.experts_per_token)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)
        rows = hidden.index_select(0, order // self.experts_per_token)
        # Not bincount, for which a GPU's host waits.
        counts = chosen.new_zeros(self.n_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        return Routed(rows, counts, order, weights, self._kept(x, hidden), x.shape)

    def _kept(self, x: Tensor, hidden: Tensor) -> Tensor | None:
        """Return the sum of the residual and of the shared expert."""
        if self.shared is None:
            return x if self.residual else None
        shared: Tensor = self.shared(hidden).view(x.shape)
        return x + shared if self.residual else shared

    def compute(self, rows: Tensor, counts: Tensor, own: range) -> Tensor:
        """Return the results of some experts of this module, in the order of the rows.

        Every expert runs, also one without rows, so that its parameters have gradients. The host
        waits for the counts.

        Parameters
        ----------
        rows
            Tokens, sorted by sender, then by expert.
        counts
            Number of rows, shape ``(n_senders, len(own))``.
        own
            Numbers of the experts.

        Returns
        -------
        torch.Tensor
            One row of results for each row.
        """
        experts = [self.experts[str(k)] for k in own]
        return run_experts(experts, rows, counts, counts.sum(0).tolist())

    def combine(self, results: Tensor, routed: Routed) -> Tensor:
        """Return the output, from the results of the experts.

        Parameters
        ----------
        results
            Result of each row of ``routed.rows``, in their order; shape ``(n_rows, width)``.
        routed
            Result of `route`.

        Returns
        -------
        torch.Tensor
            Shape of the input, with the residual and the shared expert.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> layer = px.Experts(lambda: torch.nn.Linear(4, 4), 4, n_experts=8)
        >>> x = torch.ones(3, 4)
        >>> routed = layer.route(x)
        >>> results = layer.compute(routed.rows, routed.counts[None], layer.held)
        >>> torch.equal(layer.combine(results, routed), layer(x))
        True
        """
        by_token = results.index_select(0, routed.order.argsort())
        by_token = by_token.view(*routed.weights.shape, results.shape[-1])
        output = (by_token * routed.weights.unsqueeze(-1)).sum(-2)
        output = output.view(*routed.shape[:-1], output.shape[-1])
        return output if routed.kept is None else routed.kept + output

    def like_output(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape and type of the output: one expert runs on all tokens.

        Parameters
        ----------
        x
            Tokens, shape ``(..., width)``.

        Returns
        -------
        torch.Tensor
            Shape of the input. Its values are of no use.
        """
        hidden = (x if self.norm is None else self.norm(x)).reshape(-1, self.width)
        weights = self.router(hidden).softmax(-1)
        result: Tensor = self.experts[str(self.held.start)](hidden) * weights[:, :1]
        output, kept = result.view(x.shape), self._kept(x, hidden)
        return output if kept is None else kept + output

    def extra_repr(self) -> str:
        """Return the counts as text.

        Returns
        -------
        str
            The text between the parentheses of `repr`.
        """
        words = f"width={self.width}, n_experts={self.n_experts}"
        words += f", experts_per_token={self.experts_per_token}"
        return words if self.has_all else f"{words}, held={self.held.start}..{self.held.stop - 1}"


def run_experts(
    experts: Sequence[nn.Module], rows: Tensor, counts: Tensor, n_rows: Sequence[int]
) -> Tensor:
    """Return the results of `Experts.compute`; ``n_rows`` has the number of rows of each expert."""
    order = _order_by_expert(counts, len(rows))
    grouped = rows if order is None else rows.index_select(0, order)
    parts = grouped.split(list(n_rows))
    joined = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    return joined if order is None else joined.index_select(0, order.argsort())


def _held(share: object, n_experts: int) -> range:
    """Return the numbers of the experts of a share."""
    match share:
        case (int(k), int(n)) if not isinstance(k, bool) and not isinstance(n, bool):
            pass
        case _:
            raise ArgumentTypeError(
                "share must be (k, n), the k-th of n equal parts of the experts, such as (0, 2), "
                f"got {share!r:.60}"
            )
    if n < 1 or not 0 <= k < n:
        raise ArgumentError(f"share must be (k, n) with 0 <= k < n, got {share!r}")
    if n_experts % n:
        raise ArgumentError(
            f"n_experts={n_experts} is not divisible by the {n} replicas of share={share!r}, each "
            "of which has as many experts; give a multiple"
        )
    size = n_experts // n
    return range(k * size, (k + 1) * size)


def _check_separate(experts: nn.ModuleDict) -> None:
    """Raise `ArgumentError` if two experts are one module, or share parameters."""
    owners: dict[int, str] = {}
    for number, expert in experts.items():
        for parameter in expert.parameters():
            if owners.setdefault(id(parameter), number) != number:
                raise ArgumentError(
                    f"experts {owners[id(parameter)]} and {number} share a parameter; expert must "
                    "make a new module at each call"
                )


def _order_by_expert(counts: Tensor, n_rows: int) -> Tensor | None:
    """Return the order of rows by expert; None if they have one sender, and are in it already."""
    n_senders, n_experts = counts.shape
    if n_senders == 1:
        return None
    numbers = torch.arange(n_experts, device=counts.device).repeat(n_senders)
    of_row: Tensor = numbers.repeat_interleave(counts.flatten(), output_size=n_rows)
    return of_row.argsort(stable=True)
