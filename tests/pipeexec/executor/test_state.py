"""State of pipelines by the names of the original model: keys, loading, optimizers, and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from small_pipelines import cut, data, dense, mse, pipeline, sgd
from split_models import WIDTH, WORDS, Language, Tied
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.executor.named_state import (
    StateNames,
    apply_optimizer_states,
    load_model_state,
    optimizer_state,
    prepared_states,
)
from pipesim.errors import ArgumentError, BatchNormWarning

X, Y = data(8)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with two groups: of matrices, and of biases."""
    matrices, biases = [], []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else biases).append(parameter)
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                              {"params": biases, "weight_decay": 0.0}], lr=1e-2)  # fmt: skip


def on_workers(
    stages: Any, optimizer: Any = None, loss_fn: Any = mse, schedule: str = "1f1b"
) -> px.Pipeline:
    """Return a pipeline of any number of stages."""
    graph = ps.lower(ps.schedule(schedule, len(stages), 4))
    return pipeline(stages, graph, loss_fn, optimizer)


def equal(a: Any, b: Any) -> bool:
    """Return whether nested dictionaries of tensors and numbers are equal to the last bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return bool(a == b)


# Keys.


def test_keys_of_slices() -> None:
    """Slices of a Sequential have its keys, and share memory with it."""
    model = dense(4)
    with on_workers(cut(model, [1, 3])) as p:
        assert equal(p.state_dict(), dict(model.state_dict()))
        assert list(p.state_dict()) == list(model.state_dict())
        assert p.state_dict()["0.0.weight"].data_ptr() == model[0][0].weight.data_ptr()


@pytest.mark.parametrize("names", [("0", "0"), ("a", "a")])
def test_keys_of_other_stages(names: tuple[str, str]) -> None:
    """Stages whose children have equal names are no slices."""
    stages = [nn.Sequential() for _ in names]
    for stage, name in zip(stages, names, strict=True):
        stage.add_module(name, nn.Linear(16, 16))
    with on_workers(stages) as p:
        assert list(p.state_dict()) == list(nn.Sequential(*stages).state_dict())


@pytest.mark.slow
def test_keys_of_a_compiled_stage() -> None:
    """Nothing is compiled before the first forward."""
    stages = [nn.Linear(16, 16), torch.compile(nn.Linear(16, 16))]
    with on_workers(stages) as p:
        assert list(p.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


class WithPooler(Language):
    """A model with a module that its forward does not call, and buffers outside of blocks."""

    def __init__(self) -> None:
        super().__init__(2)
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("temporary", torch.ones(3), persistent=False)


def test_keys_of_a_split_model() -> None:
    """Those of the model, unused parameters included; each can be loaded."""
    model = WithPooler()
    words = torch.zeros(4, 5, dtype=torch.long)
    stages = px.split(model, 2, sample=words)
    with on_workers(stages, loss_fn=lambda out, _: out["logits"].sum()) as p:
        assert p.state_dict().keys() == model.state_dict().keys()
        assert equal(p.state_dict(), dict(model.state_dict()))
        other = {key: value + 1 for key, value in model.state_dict().items()}
        p.load_state_dict(other)
        assert equal(dict(model.state_dict()), other)


def test_a_split_model_without_data() -> None:
    """Its stages have the parameters of the model; the first has those that no stage needs."""
    words = torch.zeros(4, 5, dtype=torch.long)
    stages = px.split(WithPooler, 2, sample=words)
    with on_workers(stages, loss_fn=lambda out, _: out["logits"].sum()) as p:
        state = WithPooler().state_dict()
        assert p.state_dict().keys() == state.keys()
        p.load_state_dict(state)
        assert equal(p.state_dict(), state)


def test_tied_parameters() -> None:
    """The state has all their keys; one is enough. Optimizers have the first."""
    model, words = Tied(), torch.arange(20).reshape(4, 5) % WORDS
    stages = [stage for stage in px.split(model, 2, sample=words) if stage is not None]
    names, optimizers = StateNames(stages, 2, None), [adam(x.parameters()) for x in stages]
    first, *others = next(keys for keys in names.same.values() if len(keys) > 1)
    for stage, optimizer in zip(stages, optimizers, strict=True):
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = copy.deepcopy(names.local_state())
    saved = copy.deepcopy(optimizer_state(names, optimizers))
    assert state.keys() == model.state_dict().keys()
    assert sorted(saved["state"]) == sorted(name for name, _ in model.named_parameters())
    whole = adam(model.parameters())
    set_optimizer_state_dict(model, whole, optim_state_dict=copy.deepcopy(saved))
    assert equal(get_optimizer_state_dict(model, whole)["state"], saved["state"])
    for optimizer in optimizers:
        optimizer.step()
    load_model_state(names, {key: x for key, x in state.items() if key not in others})
    apply_optimizer_states(prepared_states(names, optimizers, saved))
    assert equal(names.local_state(), state)
    assert equal(optimizer_state(names, optimizers), saved)
    for stage, optimizer in zip(stages, optimizers, strict=True):
        keys = names.parameter_keys(names.modules.index(stage))
        copies = [x for x, key in keys.items() if key == first]
        assert [equal(dict(optimizer.state[x]), saved["state"][first]) for x in copies] == [True]


# Loading.


def test_batch_norms_and_frozen_parameters() -> None:
    """Buffers travel too; frozen parameters have no optimizer state."""

    def model() -> nn.Sequential:
        layers = dense(3)
        layers.append(nn.BatchNorm1d(16))
        layers[1].requires_grad_(False)
        return layers

    with on_workers(cut(model(), [2, 2]), adam) as p:
        with pytest.warns(BatchNormWarning):
            p.step(X, Y)
        state, optimizer = p.state_dict(), p.optimizer_state_dict()
        assert state["3.num_batches_tracked"] == 4
        assert "1.0.weight" in optimizer["param_groups"][0]["params"]
        assert "1.0.weight" not in optimizer["state"]
        with on_workers(cut(model(), [1, 1, 2]), adam) as q:
            q.load_state_dict(state)
            q.load_optimizer_state_dict(optimizer)
            assert equal(q.state_dict(), state)
            assert equal(q.optimizer_state_dict(), optimizer)


def test_copies_of_replicas() -> None:
    """All copies of a stage are loaded, and so are their optimizers."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=2)
    with pipeline(cut(dense(2), [1, 1]), graph, mse, sgd) as p:
        p.step(*data(16))
        state = {key: value + 1 for key, value in p.state_dict().items()}
        optimizer = copy.deepcopy(p.optimizer_state_dict())
        p.step(*data(16))
        p.load_state_dict(state)
        p.load_optimizer_state_dict(optimizer)
        for slot, module in enumerate(p.modules):
            values = list(module.parameters())
            assert torch.equal(values[0], state[f"{slot % 2}.0.weight"])
            saved = optimizer["state"][f"{slot % 2}.0.weight"]["momentum_buffer"]
            own = p.optimizers[slot]
            assert own is not None
            assert torch.equal(own.state[values[0]]["momentum_buffer"], saved)


@pytest.mark.parametrize("optimizer", [adam, decayed, sgd])
def test_the_optimizer_of_the_unsplit_model(optimizer: Callable[..., Any]) -> None:
    """Torch's functions load the state into it, and their state loads into other stages."""
    model = dense(4)
    with on_workers(cut(model, [2, 2]), optimizer) as p:
        p.step(X, Y)
        state = p.optimizer_state_dict()
    whole = optimizer(model.parameters())
    assert len(state["param_groups"]) == len(whole.param_groups)
    set_optimizer_state_dict(model, whole, optim_state_dict=copy.deepcopy(state))
    back = get_optimizer_state_dict(model, whole)
    assert equal(back["state"], state["state"])
    other = copy.deepcopy(model)
    with on_workers(cut(other, [1, 2, 1]), optimizer) as q:
        q.load_optimizer_state_dict(back)
        assert equal(q.optimizer_state_dict()["state"], state["state"])
        n = q.n_steps
        q.step(X, Y)
        assert q.n_steps == n + 1
    with on_workers(cut(model, [2, 2]), optimizer) as p:
        p.load_optimizer_state_dict(state)
        p.step(X, Y)
    assert equal(dict(model.state_dict()), dict(other.state_dict()))


def test_options_of_groups() -> None:
    """Learning rates are loaded; options of the implementation stay."""
    with on_workers(cut(dense(2), [1, 1]), decayed) as p:
        state = p.optimizer_state_dict()
        for group, rate in zip(state["param_groups"], (0.5, 0.25), strict=True):
            group.update(lr=rate, foreach=False)
        p.load_optimizer_state_dict(state)
        for optimizer in p.optimizers:
            assert optimizer is not None
            assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
            assert [group["foreach"] for group in optimizer.param_groups] == [None, None]


# Errors.


def test_the_first_mismatch_of_a_model() -> None:
    """Nothing has been changed."""
    with on_workers(cut(dense(3), [2, 1])) as p:
        state = copy.deepcopy(p.state_dict())
        other = {key: value + 1 for key, value in state.items()}
        lacking = {k: v for k, v in other.items() if k != "2.0.bias"}
        with pytest.raises(ArgumentError, match=r"lacks '2\.0\.bias' of the model"):
            p.load_state_dict(lacking)
        with pytest.raises(ArgumentError, match="has 'more', which the model lacks"):
            p.load_state_dict({**other, "more": torch.ones(1)})
        with pytest.raises(ArgumentError, match=r"'1\.0\.bias' has shape \(3,\) .* shape \(16,\)"):
            p.load_state_dict({**other, "1.0.bias": torch.ones(3)})
        with pytest.raises(ArgumentError, match=r"lacks '0\.0\.weight'.* 5 other keys.* 'module"):
            p.load_state_dict({f"module.{key}": value for key, value in other.items()})
        assert equal(p.state_dict(), state)
        p.load_state_dict({**lacking, "more": torch.ones(1)}, strict=False)
        assert equal(p.state_dict(), {**other, "2.0.bias": state["2.0.bias"]})


def test_the_first_mismatch_of_optimizers() -> None:
    """Nothing has been changed."""
    with on_workers(cut(dense(2), [1, 1]), decayed) as p:
        p.step(X, Y)
        state = copy.deepcopy(p.optimizer_state_dict())
        other: Any = copy.deepcopy(state)
        other["param_groups"][1]["params"].remove("1.0.bias")
        with pytest.raises(ArgumentError, match=r"lacks '1\.0\.bias' of the model"):
            p.load_optimizer_state_dict(other)
        other["param_groups"][1]["params"].append("nothing")
        with pytest.raises(ArgumentError, match="has 'nothing', which the model lacks"):
            p.load_optimizer_state_dict(other)
        other = copy.deepcopy(state)
        other["state"]["1.0.weight"]["exp_avg"] = torch.ones(2, 16)
        with pytest.raises(ArgumentError, match=r"'exp_avg' of '1\.0\.weight' has shape \(2, 16\)"):
            p.load_optimizer_state_dict(other)
        other = copy.deepcopy(state)
        for name in other["param_groups"][1].pop("params"):
            other["param_groups"].append({**other["param_groups"][1], "params": [name]})
        del other["param_groups"][1]
        other["param_groups"][1]["lr"] = 3.0
        with on_workers(cut(dense(2), [2]), decayed) as q, pytest.raises(
            ArgumentError, match=r"'1\.0\.bias' is in a group of an optimizer with lr=0\.01"
        ):  # fmt: skip
            q.load_optimizer_state_dict(other)
        other = copy.deepcopy(state)
        one = [{**other["param_groups"][0], "params": list(p.state_dict())}]
        other["param_groups"] = one
        before = copy.deepcopy(state)
        with pytest.raises(
            ArgumentError,
            match=r"is in a group of an optimizer with weight_decay=0.*, another parameter with "
            r"0\.1, and both are in one group of the state",
        ):
            p.load_optimizer_state_dict(other)
        assert equal(p.optimizer_state_dict(), before)
        with on_workers(cut(dense(2), [1, 1]), sgd) as q, pytest.raises(
            ArgumentError, match="state is that of another optimizer: its groups have 'amsgrad'"
        ):  # fmt: skip
            q.load_optimizer_state_dict(
                {
                    **state,
                    "param_groups": [{**state["param_groups"][0], "params": list(p.state_dict())}],
                }
            )
        with on_workers(cut(dense(2), [1, 1])) as q, pytest.raises(
            ArgumentError, match="has no optimizer to load a state"
        ):  # fmt: skip
            q.load_optimizer_state_dict(state)
        with pytest.raises(ArgumentError, match="an optimizer state is a dict of 'state' and"):
            p.load_optimizer_state_dict(p.optimizers[0].state_dict())  # type: ignore[union-attr]
        assert equal(p.optimizer_state_dict(), state)


# Processes.


def state_of_ranks(processes: Processes) -> dict[str, Any]:
    """Train a step in two processes, and load the state of the unsplit model; rank 1 lacks one."""
    model = dense(4)
    stages: list[nn.Module | None] = list(cut(model, [2, 2]))
    stages[1 - processes.rank] = None
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    with px.Pipeline(stages, graph, ["cpu"], mse, adam, processes=processes) as p:
        p.step(X, Y)
        answer = {"own": copy.deepcopy(p.state_dict()),
                  "optimizer": copy.deepcopy(p.optimizer_state_dict())}  # fmt: skip
        state = {key: value + 1 for key, value in model.state_dict().items()}
        p.load_state_dict(state)
        answer["loaded"] = all(equal(v, state[k]) for k, v in p.state_dict().items())
        try:
            p.load_state_dict({k: v for k, v in state.items() if k != "2.0.bias"})
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        p.step(X, Y)
    return answer


@pytest.mark.slow
def test_states_of_two_processes(two_ranks: Ranks) -> None:
    """Each has its stages; together they have the model. An error of one stops both."""
    parts = two_ranks.run(state_of_ranks)
    model = dense(4)
    with on_workers(cut(model, [2, 2]), adam) as p:
        p.step(X, Y)
        assert equal(parts[0]["own"] | parts[1]["own"], dict(model.state_dict()))
        states = [part["optimizer"]["state"] for part in parts]
        assert equal(states[0] | states[1], p.optimizer_state_dict()["state"])
    assert [part["loaded"] for part in parts] == [True, True]
    assert "PeerError: rank 1 stopped the call" in parts[0]["error"]
    assert parts[1]["error"].startswith("ArgumentError: the state lacks '2.0.bias'")
