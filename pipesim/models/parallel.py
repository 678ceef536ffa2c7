"""`Parallel`: how a transformer is spread over GPUs, and how they compute it.

Letters are those of `pipesim.models.transformer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from inspect import Parameter, signature
from typing import Any, Literal, TypedDict, TypeVar, get_args

from pipesim.errors import ArgumentError, check_name
from pipesim.framework.framework import BEST_CASE, Framework, as_framework
from pipesim.models.model_sizes import OptionalSize, Size
from pipesim.models.precision import Precision
from pipesim.models.routing import UNIFORM, Routing, as_routing
from pipesim.utils.checks import Amount, checked

LayerRecompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[str, ...] = get_args(LayerRecompute)
ContextExchange = Literal["ring", "all_gather", "all_to_all"]
ExpertExchange = Literal["direct", "hierarchical"]


@checked
@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How a transformer is spread over GPUs and computed; settings of `Transformer.costs`.

    A device of the pipeline is the t * c GPUs of a tensor- and context-parallel group. Experts are
    spread over GPUs of several devices, which are replicas of each other. Whether a model can be
    spread so is checked with the model.

    Attributes
    ----------
    microbatch_size
        b: sequences of a micro-batch.
    tensor_parallel
        t: GPUs that share each layer. It divides the heads of queries, keys and values, and f.
    sequence_parallel
        Whether tensors that tensor parallelism leaves whole are split along the sequence; t then
        divides s.
    recompute
        Recompute of layers inside B and I. ``"selective"``: of the attention core, whose softmax
        and dropout are dropped (FlashAttention does not store them either), or of what
        ``recompute_modules`` of the framework says. ``"full"``: of whole layers, of which only the
        input is kept.
    flash_attention
        Whether the attention core is one fused kernel, which keeps neither scores nor softmax, but
        32 bits for each head and token.
    scatter_gather
        Whether each GPU of the group sends its part of a stage's output, and the receiving group
        gathers the parts (arXiv 2104.04473, section 4.1). Otherwise each sends the whole output to
        its counterpart. Sequence parallelism has parts already, and needs none gathered.
    fused_loss
        Whether the loss is fused into kernels that turn the logits into their gradient in place, in
        16 bits, such as Transformer Engine's ``parallel_cross_entropy``. Otherwise it keeps a copy
        of the logits in 32 bits, Megatron-LM's own fusion included.
    context_parallel
        c: groups of t GPUs that share each sequence, s/c tokens each. It divides s.
    context_exchange
        How a GPU gets keys and values of the other tokens (sources:
        `pipesim.models.shard_collectives`):

        - ``"ring"`` (the default): they go around a ring, while attention to those that arrived
          last is computed.
        - ``"all_gather"``: they are gathered before attention.
        - ``"all_to_all"``: GPUs exchange tokens for heads before attention, and back after it. tc
          divides all heads.
    context_balance
        Whether GPU i has the parts i and 2c - 1 - i of 2c parts of a sequence, so that the causal
        mask leaves each as many scores; 2c then divides s. Otherwise it has the i-th of c parts,
        and the last GPU computes 2 - 1/c times as many scores as the mean. It does not matter for
        ``"all_to_all"``, which splits heads.
    context_shards_optimizer
        Whether the c groups share the optimizer's state, of parameters that each of them has, as
        replicas do with ``lower(shard_optimizer=True)``; True (the default) as in Megatron-LM's
        distributed optimizer.
    expert_parallel
        x: GPUs among which the experts of a layer are divided, E/x each. They are those of several
        replicas, with consecutive numbers in Megatron-LM's order (tp-cp-ep-dp-pp).
    expert_tensor_parallel
        GPUs that share each expert; a divisor of t. 0 (the default) for t.
    routing
        How tokens spread over experts: a `pipesim.Routing` or a mapping of its fields. By default
        each expert gets as many.
    expert_exchange
        How a token gets to its experts on other GPUs:

        - ``"direct"`` (the default): once for each of its experts, as with an all-to-all of NCCL.
        - ``"hierarchical"``: once to each other node that has any of them, and from there to each
          GPU of the node that has any. Both overlap (DeepEP).
    dispatch_element_bytes
        Bytes of an element of tokens on the way to their experts, scales included; 0 (the default)
        for ``bytes_per_activation``. In the backward pass, gradients on the way to experts have as
        many; as tasks, the two exchanges of a layer then have each other's seconds, and the same
        sum. Results and gradients on the way back have the bytes of activations, and memory is
        that of activations.
    gradient_passes
        Whether the framework scales, checks and clips gradients, and copies stepped parameters, in
        passes of their own, as Megatron-LM's distributed optimizer:

        - Of all gradients of a GPU, before they are reduced: a read for the check for NaN, a read
          and a write to divide them by the number of replicas, and a write that sets them to zero.
        - Of those that it steps: a read and a write by which they are clipped.
        - Of parameters in 16 bits that it steps: a read of those in 32 bits, which are copied
          (``_copy_main_params_to_model_params``).

        Megatron-LM does so (``param_and_grad_buffer.py``, ``clip_grads.py``), while norms are above
        the limit. False (the default): STEP reads and writes gradients three times in all.
    framework
        What the training framework does, as a `pipesim.Framework`, the name of a preset, or a
        mapping of its attributes; None (the default) for the best case.
    precision
        Number format of linear products of layers and of experts: ``"bf16"`` (the default),
        ``"fp16"``, ``"fp8"`` (a scale for each tensor), ``"mxfp8"`` or ``"nvfp4"``. Both formats of
        16 bits cost the same. `pipesim.models.precision` says what stays in 16 bits, and
        `pipesim.gpus` which GPU has which. It changes no seconds that follow from
        ``flops_per_second``. The model FLOPs utilization is over the peak of 16 bits in any case.

    Examples
    --------
    >>> import pipesim as ps
    >>> parallel = ps.Parallel(microbatch_size=1, tensor_parallel=8, flash_attention=True)
    >>> parallel.n_gpus
    8
    >>> model = ps.Transformer.preset("gpt3_175b")
    >>> shard = model.shard(parallel, recompute="full")
    >>> shard.tensor_parallel, shard.recompute
    (8, 'full')
    """

    microbatch_size: Size = 1
    tensor_parallel: Size = 1
    sequence_parallel: bool = False
    recompute: LayerRecompute = "none"
    flash_attention: bool = False
    scatter_gather: bool = False
    fused_loss: bool = False
    context_parallel: Size = 1
    context_exchange: ContextExchange = "ring"
    context_balance: bool = True
    context_shards_optimizer: bool = True
    expert_parallel: Size = 1
    expert_tensor_parallel: OptionalSize = 0
    routing: Routing = UNIFORM
    expert_exchange: ExpertExchange = "direct"
    dispatch_element_bytes: Amount = 0.0
    gradient_passes: bool = False
    framework: Framework = BEST_CASE
    precision: Precision = "bf16"

    @property
    def settings(self) -> dict[str, Any]:
        """Fields by name, which `Transformer.costs` and others take as arguments."""
        return {name: getattr(self, name) for name in PARALLEL}

    @property
    def n_gpus(self) -> int:
        """GPUs of a device of the pipeline: tc."""
        return self.tensor_parallel * self.context_parallel

    @property
    def context_steps(self) -> int:
        """Kernels of a fused attention core: one for each step of a ring, else 1."""
        return self.context_parallel if self.context_exchange == "ring" else 1

    @property
    def causal_share(self) -> float:
        """Scores of the busiest GPU of a context-parallel group over their mean.

        1 if they are balanced; else 2 - 1/c, those of the last of c parts of a sequence.
        """
        c = self.context_parallel
        is_even = c == 1 or self.context_balance or self.context_exchange == "all_to_all"
        return 1.0 if is_even else 2 - 1 / c

    @property
    def expert_tensor_size(self) -> int:
        """GPUs that share each expert."""
        return self.expert_tensor_parallel or self.tensor_parallel

    @property
    def expert_copies(self) -> float:
        """GPUs of a device that have the same experts; below 1 if a device lacks some experts.

        1/g if g replicas have different experts.
        """
        return self.n_gpus / (self.expert_tensor_size * self.expert_parallel)

    @property
    def expert_replicas(self) -> int:
        """Replicas that together have all experts, g; 1 if each has all of them."""
        return max(1, round(1 / self.expert_copies))

    @property
    def scattered_messages(self) -> bool:
        """Whether the receiving group gathers the parts of a message, each sent by one GPU."""
        return self.scatter_gather and self.tensor_parallel > 1 and not self.sequence_parallel


PARALLEL = tuple(field.name for field in fields(Parallel))


class FixedSettings(TypedDict, total=False):
    """Fields of `Parallel` that are the same in all configurations of a plan."""

    flash_attention: bool
    scatter_gather: bool
    fused_loss: bool
    context_exchange: ContextExchange
    context_balance: bool
    context_shards_optimizer: bool
    routing: Routing | Mapping[str, Any] | None
    expert_exchange: ExpertExchange
    dispatch_element_bytes: float
    gradient_passes: bool
    framework: Framework | Mapping[str, Any] | str | None
    precision: Precision


class _SearchedSettings(FixedSettings, total=False):
    """`FixedSettings`, and fields of which a plan searches values but for ``context_parallel``."""

    microbatch_size: int
    tensor_parallel: int
    sequence_parallel: bool
    recompute: LayerRecompute
    expert_parallel: int
    expert_tensor_parallel: int


class ParallelSettings(_SearchedSettings, total=False):
    """All fields of `Parallel`, as keyword arguments."""

    context_parallel: int


class CostsSettings(_SearchedSettings, total=False):
    """Fields of `Parallel` for costs, whose micro-batches may differ in ``context_parallel``."""

    context_parallel: int | Sequence[int | Sequence[int]]


#: Fields of `Parallel` of which a plan searches values.
SEARCHED = tuple(name for name in PARALLEL if name not in FixedSettings.__annotations__)


F = TypeVar("F", bound=Callable[..., Any])


def takes_settings(settings: type, **defaults: Any) -> Callable[[F], F]:
    """Show the keys of a ``TypedDict`` in the signature of a function, in place of ``**settings``.

    ``defaults`` are those that differ from the defaults of `Parallel`.
    """

    def decorate(function: F) -> F:
        own = signature(function)
        shown = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        for name in PARALLEL:
            if (kind := settings.__annotations__.get(name)) is not None:
                default, text = defaults.get(name, getattr(Parallel, name)), kind.__forward_arg__
                keyword = Parameter.KEYWORD_ONLY
                shown.append(Parameter(name, keyword, default=default, annotation=text))
        vars(function).update(__signature__=own.replace(parameters=shown), record=Parallel)
        return function

    return decorate


@cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, Parameter]:
    return signature(function).parameters


@checked
def as_parallel(
    function: Callable[..., Any],
    parallel: Parallel | Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> Parallel:
    """Return ``parallel`` with the ``settings`` that a function was given besides."""
    if isinstance(parallel, Parallel) and not settings:
        return parallel
    parameters = _parameters(function)
    for name in settings:
        check_name(f"argument of {function.__name__}", name, parameters)
    if isinstance(parallel, Parallel):
        parallel = parallel.settings
    for name in parallel or ():
        check_name("setting of parallel", name, PARALLEL)
    values = {**(parallel or {}), **settings}
    for name in PARALLEL if parallel is None else ():
        if name not in settings and parameters[name].default is Parameter.empty:
            raise ArgumentError(f"{name} is missing; give it, or parallel=pipesim.Parallel(...)")
    if "routing" in values:
        values["routing"] = as_routing(values["routing"])
    if "framework" in values:
        values["framework"] = as_framework(values["framework"])
    return Parallel(**values)
