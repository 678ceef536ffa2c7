"""`project`: profile the layers of a model on one device, to predict steps on many."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.devices.make_devices import available_cores, parse_device
from pipeexec.profiling.calibration import UNSTEADY
from pipeexec.projection.layer_bytes import LayerBytes
from pipeexec.projection.layer_seconds import (
    FirstLayer,
    LastLayer,
    LayerLoss,
    LayerSeconds,
    SquareSum,
    Values,
    layer_loss,
    measure_layers,
)
from pipeexec.projection.projection import Projection
from pipeexec.run_options import OF_PROFILE, RunOptions, run_options
from pipeexec.splitting.split import split
from pipeexec.splitting.stages import Stages
from pipeexec.stages.optimizers import OptimizerFactory
from pipesim.errors import (
    AccuracyWarning,
    ArgumentError,
    check_count,
    check_flag,
    check_function,
    check_text,
    check_type,
    find_name,
)
from pipesim.models.layers import Layers
from pipesim.network.sources import MACHINES
from pipesim.planning.cluster import Cluster
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked_names


@checked_names
def project(
    model: nn.Module | Callable[[], nn.Module],
    sample: Any,
    cluster: Cluster | str,
    *,
    targets: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: OptimizerFactory | None = None,
    device: str = "cpu",
    microbatch_size: int | None = None,
    layers_at_once: int | None = None,
    split_backward: bool = True,
    n_busy: int = 0,
    options: RunOptions = OF_PROFILE,
    n_steps: int | None = None,
    warm_up: int | None = None,
) -> Projection:
    """Profile the layers of a model one after the other on one device, to predict steps on many.

    `pipeexec.split` finds the blocks of the model. Each is a layer, and so are the modules before
    the first one and after the last one. Steps of a pipeline that has these layers on one device
    give the seconds of F, B, I, W, R and STEP of each, as in `pipeexec.profile`: means over all
    tasks of the steps. Bytes are counted in one forward and backward of each layer.

    Parameters
    ----------
    model
        The model, which stays as it is. Or a function without arguments that makes it, as in
        `pipeexec.split`: then only ``layers_at_once`` layers have data at the same time.
    sample
        One micro-batch, as the model takes it: a tensor, a tuple of positional arguments, or a dict
        of keyword arguments. All results are for micro-batches of this size; those of another size
        need another projection.
    cluster
        Devices to predict steps on: their network and memory. Or the name of a machine
        (`pipesim.machines`), for one node of it. The seconds are those of the profiled device.
    targets, loss_fn
        ``loss_fn(output, targets)`` of the micro-batch, as in `pipeexec.Pipeline`; it is part of
        the last layer. Without it, the loss is the sum of the squares of the output.
    optimizer
        As in `pipeexec.Pipeline`; None for steps without optimizer.
    device
        ``"cpu"`` for one worker, or a GPU such as ``"cuda:0"``.
    microbatch_size
        Samples of the micro-batch; by default the first dimension of the first tensor of the
        sample.
    layers_at_once
        Layers on the device at the same time, with their gradients and optimizer state. By default
        all layers of a model, and one of a model that a function makes: the values of its
        parameters are drawn again for each. Inputs of later layers are the outputs of the layers
        before.
    split_backward
        Whether I and W are measured, for schedules with split backwards.
    n_busy
        CPU workers that run copies of the layers meanwhile, so that contention between workers of
        one machine counts: 1 for two workers in all. By default nothing else runs.
    options, n_steps, warm_up
        Number of measured steps of 4 micro-batches, and of steps before them that are not measured,
        as for `pipeexec.profile`.

    Returns
    -------
    Projection
        Seconds and bytes of each layer, and methods that predict steps.

    Warns
    -----
    AccuracyWarning
        If the mean duration of an operation varies by more than 20 % between steps.

    See Also
    --------
    pipeexec.profile : Measure stages on their own devices.

    Notes
    -----
    A projection is a prediction from one device, which runs nothing else. It does not see:

    - contention: workers of one machine share memory bandwidth, caches and the interpreter. With
      ``n_busy`` it sees that of so many threads;
    - clocks: a machine of which all devices work may run at lower clock speeds;
    - interference: messages and reductions slow down computation at the same time;
    - the host: launches of several devices by one host thread wait for each other. Its time for a
      task on one device counts as ``launch`` of `pipesim.Costs`;
    - tensors that layers share: a parameter of several layers counts in each, and so do bytes
      between I and W of an input of several layers. Activations count once;
    - the sum of layers: a stage may take less time than its layers one by one, if the host's time
      to launch short kernels hides behind long ones.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px, pipesim as ps
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    >>> gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=1e9)
    >>> cluster = ps.Cluster(n_gpus=2, gpu=gpu, network=ps.Network())
    >>> projection = px.project(model, torch.ones(8, 64), cluster, n_steps=1)
    >>> projection.predict("1f1b", n_devices=2, n_microbatches=4, split=[2, 2]).n_devices
    2
    """
    chosen = _checked_cluster(cluster)
    if loss_fn is not None:
        check_function("loss_fn", loss_fn, "loss_fn(output, targets)")
    elif targets is not None:
        raise ArgumentError("targets are given, but no loss_fn that takes them; give loss_fn=")
    layer_loss_fn = layer_loss(loss_fn, targets)
    if optimizer is not None:
        check_function("optimizer", optimizer, "optimizer(parameters)")
    torch_device = parse_device(check_text("device", device))
    is_function = not isinstance(model, nn.Module)
    at_once = None if layers_at_once is None else check_count("layers_at_once", layers_at_once)
    steps = run_options(options, n_steps=n_steps, warm_up=warm_up)
    settings = {
        "split": check_flag("split_backward", split_backward),
        "n_steps": steps.n_steps,
        "warm_up": steps.warm_up,
        "n_busy": _checked_busy(n_busy, torch_device),
    }
    gpus = [torch_device] if torch_device.type == "cuda" else []
    with torch.random.fork_rng(gpus), torch.enable_grad():
        layers = layer_stages(model, sample)
        size = _microbatch_size(layers.arguments, microbatch_size)
        n = at_once or (1 if is_function else len(layers))
        seconds, columns, joint = _profile(
            layers, layer_loss_fn, torch_device, optimizer, min(n, len(layers)), settings
        )
    spread = [x for part in seconds for x in part.spread]
    _warn_of_spread(layers, spread)
    return Projection(
        layers=Layers(columns, "projection", joint),
        modules=layers.modules,
        n_blocks=layers.n_blocks,
        cluster=chosen,
        microbatch_size=size,
        device=device,
        launch=sum(part.launch for part in seconds) / len(seconds),
        spread=tuple(spread),
        tied=layers.tied,
    )


def _profile(
    layers: LayerStages,
    loss: LayerLoss,
    device: torch.device,
    optimizer: OptimizerFactory | None,
    at_once: int,
    options: dict[str, Any],
) -> tuple[list[LayerSeconds], dict[str, list[float]], list[list[float]]]:
    """Return the seconds of all layers, part by part, the columns of `Layers`, and joint bytes."""
    nbytes = LayerBytes([x.to(device) for x in layers.arguments])
    seconds: list[LayerSeconds] = []
    sizes: dict[str, list[float]] = {"parameter_bytes": [], "gradient_bytes": []}
    for first in range(0, len(layers), at_once):
        part = range(first, min(first + at_once, len(layers)))
        modules = [module.to(device) for module in layers.make(part)]
        for module in modules:
            for name, trained in (("parameter_bytes", False), ("gradient_bytes", True)):
                counted = (p for p in module.parameters() if p.requires_grad or not trained)
                sizes[name].append(float(sum(p.nbytes for p in counted)))
        is_last = part.stop == len(layers)
        if is_last:
            modules[-1] = LastLayer(modules[-1], loss)
        received = nbytes.values
        for k, module in enumerate(modules):
            nbytes.run(module, split=options["split"], is_last=is_last and k + 1 == len(modules))
        seconds.append(
            _part_seconds(modules, received, first == 0, is_last, device, optimizer, options)
        )
    columns = {
        name: [x for part in seconds for x in part.columns[name]] for name in seconds[0].columns
    }
    if not any(sizes["gradient_bytes"]):
        raise ArgumentError(
            "no parameter of the model is trained, so that a step has no backward; set "
            "requires_grad of at least one"
        )
    columns |= sizes | {
        "output_bytes": nbytes.output_bytes,
        "activation_bytes": nbytes.activation_bytes,
        "weight_grad_bytes": nbytes.left_bytes,
        "backward_workspace_bytes": nbytes.workspace_bytes,
        "optimizer_bytes": [x for part in seconds for x in part.optimizer_bytes],
    }
    return seconds, columns, nbytes.joint().tolist()


def _part_seconds(
    modules: list[nn.Module],
    received: tuple[Tensor, ...],
    is_first: bool,
    is_last: bool,
    device: torch.device,
    optimizer: OptimizerFactory | None,
    options: dict[str, Any],
) -> LayerSeconds:
    """Return the seconds of some layers, which receive values of the layers before."""
    before = [] if is_first else [Values(received)]
    chain = [FirstLayer(modules[0], received), *modules[1:]] if is_first else modules
    after = [] if is_last else [SquareSum()]
    result = measure_layers([*before, *chain, *after], str(device), optimizer, **options)
    own = slice(len(before), len(before) + len(modules))
    return LayerSeconds(
        {name: column[own] for name, column in result.columns.items()},
        result.spread[own], result.optimizer_bytes[own], result.launch,
    )  # fmt: skip


def _checked_cluster(cluster: object) -> Cluster:
    """Return the cluster; of a name, one node of that machine."""
    if isinstance(cluster, str):
        nodes = MACHINES[find_name("machine of cluster", cluster, MACHINES)].nodes
        return Cluster(cluster, n_gpus=nodes.gpus_per_node)
    return check_type(
        "cluster", cluster, Cluster, 'give such as pipesim.Cluster("dgx_h100", n_gpus=8)'
    )


def _checked_busy(n_busy: int, device: torch.device) -> int:
    n, n_cores = check_count("n_busy", n_busy, 0), len(available_cores())
    if n and device.type != "cpu":
        raise ArgumentError(
            f"n_busy={n} is for CPU workers, but device is {str(device)!r}; leave it out"
        )
    if n and n >= n_cores:
        raise ArgumentError(
            f"n_busy={n} workers beside the profiled one need {n + 1} cores, and this process has "
            f"{n_cores}; give at most {n_cores - 1}"
        )
    return n


def _microbatch_size(arguments: tuple[Tensor, ...], size: int | None) -> int:
    if size is not None:
        return check_count("microbatch_size", size)
    if not arguments[0].dim() or not len(arguments[0]):
        raise ArgumentError(
            f"the first tensor of the sample has shape {tuple(arguments[0].shape)}, and tells no "
            "number of samples; give microbatch_size="
        )
    return len(arguments[0])


def _warn_of_spread(layers: LayerStages, spread: list[float]) -> None:
    most = max(range(len(spread)), key=spread.__getitem__)
    if spread[most] > UNSTEADY:
        warn_caller(
            f"the mean of an operation of layer {most} ({layers.modules[most][0]}) moves by "
            f"{spread[most]:.0%} from step to step: the machine is busy, and predictions are no "
            "better than that",
            AccuracyWarning,
        )


#: Layers that have copies of a parameter, and its bytes.
Tied = tuple[tuple[int, ...], float]


class LayerStages(NamedTuple):
    """The layers of a model; names, blocks and tied parameters are as in `Projection`.

    ``arguments`` are the tensors of the sample, as the first layer takes them. ``make`` returns
    copies of layers; those of a model that a function makes have no other copy.
    """

    modules: tuple[tuple[str, ...], ...]
    n_blocks: tuple[int, ...]
    arguments: tuple[Tensor, ...]
    tied: tuple[Tied, ...]
    make: Callable[[range], list[nn.Module]]

    def __len__(self) -> int:
        return len(self.modules)


def layer_stages(model: nn.Module | Callable[[], nn.Module], sample: Any) -> LayerStages:
    """Return the layers of a model: its blocks, and the modules before and after them.

    Modules before the first block are a layer of their own, and so are those after the last one, if
    the values that they pass on allow it. Others belong to the block before.
    """
    cut = partial(split, model, sample=sample)
    no_values: dict[str, Any] = {} if isinstance(model, nn.Module) else {"only": ()}
    try:
        whole = cut(2, check=False, **no_values)  # a model of functions alone is cut, too
    except ArgumentError:
        whole = cut(1, check=False, **no_values)
    names = [name for part in whole.modules for name in part]
    before, after = names[0] != whole.blocks[0], names[-1] != whole.blocks[-1]
    counts = [0] * before + [1] * len(whole.blocks) + [0] * after
    try:
        stages = cut(counts, **no_values)
    except ArgumentError:
        counts = [1] * len(whole.blocks)
        stages = cut(counts, **no_values)

    def copied_layers(layers: range) -> list[nn.Module]:
        return [copy.deepcopy(stage) for stage in stages[layers.start : layers.stop] if stage]

    def new_layers(layers: range) -> list[nn.Module]:
        return [stage for stage in cut(counts, only=layers) if stage is not None]

    make = copied_layers if isinstance(model, nn.Module) else new_layers
    tied = tuple(
        (tuple(stage for stage, _ in group), float(_parameter(stages, *group[0]).nbytes))
        for group in stages.tied
    )
    return LayerStages(stages.modules, tuple(counts), stages.arguments(sample), tied, make)


def _parameter(stages: Stages, number: int, name: str) -> nn.Parameter:
    """Return a parameter of a stage; of a stage without data, that of the model."""
    stage = stages[number]
    if stage is None:
        return stages.model.get_parameter(name.removeprefix("model."))
    return stage.get_parameter(name)
