"""The ready-made models, their data, and how a model is split into stages."""

from __future__ import annotations

import dataclasses
import sysconfig
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeexec.demo_models import data
from pipeexec.demo_models.data import batches, image_batch, text_batch
from pipeexec.demo_models.gpt import gpt
from pipeexec.demo_models.image_models import convnet
from pipeexec.demo_models.registry import MODELS, DemoModel, Option, build_model, cross_entropy
from pipeexec.demo_models.registry import split as split_layers
from pipesim.errors import ArgumentError

# Sums in one order.
pytestmark = pytest.mark.usefixtures("one_torch_thread")

SMALL = {
    "gpt": {"layers": 3, "width": 32, "heads": 2, "sequence": 16},
    "convnet": {"layers": 3, "width": 8, "image_size": 12, "classes": 4},
}
CUTS = [[5], [3, 2], [1, 4], [1, 1, 2, 1], [1, 1, 1, 1, 1]]


def small(name: str, seed: int = 0, **options: Option) -> DemoModel:
    return build_model(name, seed=seed, **{**SMALL[name], **options})


def counted(n_layers: int, costs: list[float] | None = None) -> nn.Sequential:
    """Return a model without parameters, whose layers cost 1 or the given values."""
    layers = [nn.Identity() for _ in range(n_layers)]
    for layer, cost in zip(layers, costs or [], strict=False):
        layer.relative_cost = cost
    return nn.Sequential(*layers)


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# Models


def test_shapes_of_the_gpt() -> None:
    model = gpt(n_layers=2, d_model=16, n_heads=4, sequence=8, vocabulary=50)
    tokens = torch.randint(50, (3, 8))
    assert len(model) == 4
    assert model[:1](tokens).shape == (3, 8, 16)
    assert model[:3](tokens).shape == (3, 8, 16)
    assert model(tokens).shape == (3, 8, 50)
    assert model(tokens[:, :5]).shape == (3, 5, 50)


def test_shapes_of_the_convnet() -> None:
    model = convnet(n_blocks=2, channels=6, image_size=10, n_classes=7)
    images = torch.randn(3, 3, 10, 10)
    assert len(model) == 4
    assert model[:1](images).shape == (3, 6, 10, 10)
    assert model[:3](images).shape == (3, 6, 10, 10)
    assert model(images).shape == (3, 7)


def test_a_block_of_the_convnet_adds_to_its_input() -> None:
    block = convnet(n_blocks=1, channels=4)[1]
    for norm in (m for m in block.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.zeros_(norm.weight)
    images = torch.randn(2, 4, 5, 5)
    assert torch.equal(block(images.clone()), images.relu())


@pytest.mark.parametrize("name", MODELS)
def test_seed_determines_the_weights_and_nothing_else(name: str) -> None:
    before = torch.get_rng_state()
    one, same, other = (small(name, seed=seed).layers for seed in (1, 1, 2))
    assert torch.equal(parameters(one), parameters(same))
    assert not torch.equal(parameters(one), parameters(other))
    assert torch.equal(torch.get_rng_state(), before)


def test_later_bytes_do_not_alter_earlier_logits() -> None:
    model = small("gpt").layers
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    # The changed byte reaches every later position, through attention.
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_order_of_earlier_bytes_matters() -> None:
    model = small("gpt").layers
    first, second = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(first[:, 2], second[:, 2], atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_no_parameter_is_shared_and_every_one_gets_a_gradient(name: str) -> None:
    work = small(name)
    inputs, targets = work.make_batch(4, 0)
    work.loss(work.layers(inputs), targets).backward()
    owners = [{id(p) for p in layer.parameters()} for layer in work.layers]
    assert sum(map(len, owners)) == len(set().union(*owners))
    assert all(p.grad is not None and p.grad.any() for p in work.layers.parameters())


def test_dropout_draws_in_training_only_and_leaves_no_module_when_off() -> None:
    model = small("gpt", dropout=0.5).layers
    tokens = torch.randint(256, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert not any(isinstance(m, nn.Dropout) for m in small("gpt").layers.modules())


@pytest.mark.parametrize("name", MODELS)
def test_loss_falls_on_new_batches(name: str) -> None:
    work = small(name)
    optimizer = torch.optim.AdamW(work.layers.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in islice(batches(work.make_batch, 16), 20):
        loss = work.loss(work.layers(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.75 * sum(losses[:3])


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (gpt, {"n_layers": 0}, "n_layers must be at least 1, got 0"),
        (gpt, {"d_model": 2.5}, "d_model must be a whole number, got 2.5"),
        (gpt, {"n_heads": True}, "n_heads must be a whole number, got True"),
        (gpt, {"sequence": -1}, "sequence must be at least 1, got -1"),
        (gpt, {"vocabulary": 0}, "vocabulary must be at least 1"),
        (gpt, {"d_model": 10, "n_heads": 4}, "take d_model=12"),
        (gpt, {"dropout": 1.0}, "dropout must be a probability .* got 1.0"),
        (gpt, {"dropout": float("nan")}, "dropout must be a probability"),
        (gpt, {"dropout": -0.1}, "dropout must be a probability"),
        (gpt, {"seed": -1}, "seed must be at least 0, got -1"),
        (convnet, {"n_blocks": 0}, "n_blocks must be at least 1"),
        (convnet, {"channels": 1.5}, "channels must be a whole number"),
        (convnet, {"image_size": 0}, "image_size must be at least 1"),
        (convnet, {"n_classes": False}, "n_classes must be a whole number"),
        (convnet, {"seed": 0.5}, "seed must be a whole number"),
    ],
)
def test_bad_sizes_are_named(build, arguments, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        build(**arguments)


def test_too_long_an_input_is_named() -> None:
    model = gpt(n_layers=1, d_model=8, n_heads=1, sequence=4)
    with pytest.raises(ArgumentError, match=r"samples of 5 tokens, and .* at most 4; .*sequence=5"):
        model(torch.zeros(1, 5, dtype=torch.int64))


def test_cross_entropy_is_the_mean_over_all_positions() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    losses = [
        -torch.log_softmax(logits[i, j], -1)[targets[i, j]] for i in range(2) for j in range(3)
    ]
    torch.testing.assert_close(cross_entropy(logits, targets), torch.stack(losses).mean())
    flat = cross_entropy(logits[:, 0], targets[:, 0])
    torch.testing.assert_close(flat, (losses[0] + losses[3]) / 2)


# Split


@pytest.mark.parametrize("balance", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_stages_in_a_row_are_the_unsplit_model(name: str, balance: list[int]) -> None:
    work, again = small(name), small(name)
    inputs, targets = work.make_batch(4, 0)
    stages = split_layers(work.layers, balance=balance)
    assert [len(stage) for stage in stages] == balance
    outputs, expected = inputs, again.layers(inputs)
    for stage in stages:
        outputs = stage(outputs)
    assert torch.equal(outputs, expected)
    work.loss(outputs, targets).backward()
    again.loss(expected, targets).backward()
    unsplit = dict(again.layers.named_parameters())
    split = {name: p for stage in stages for name, p in stage.named_parameters()}
    assert list(split) == list(unsplit)
    assert all(torch.equal(p.grad, unsplit[name].grad) for name, p in split.items())
    # Batch norm's running statistics are the same, too.
    for actual, wanted in zip(work.layers.buffers(), again.layers.buffers(), strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "counts"),
    [(8, 1, [8]), (8, 2, [4, 4]), (8, 3, [2, 3, 3]), (10, 4, [2, 2, 3, 3]), (4, 4, [1, 1, 1, 1])],
)
def test_foreign_layers_are_split_by_number(n_layers, n_stages, counts) -> None:
    assert [len(stage) for stage in split_layers(counted(n_layers), n_stages)] == counts


@pytest.mark.parametrize(
    ("costs", "n_stages", "counts"),
    [
        ([3.0, 1.0, 1.0, 1.0], 2, [1, 3]),
        ([1.0, 1.0, 1.0, 3.0], 2, [3, 1]),
        ([5.0, 1.0, 1.0, 1.0], 3, [1, 1, 2]),
        ([0.0, 0.0, 1.0, 0.0], 4, [1, 1, 1, 1]),
    ],
)
def test_split_is_even_in_cost(costs, n_stages, counts) -> None:
    assert [len(stage) for stage in split_layers(counted(len(costs), costs), n_stages)] == counts


def test_own_models_are_split_by_blocks() -> None:
    """The cheap ends of a model go with their neighbours, and a wide head counts."""
    assert [len(s) for s in split_layers(small("convnet", layers=4).layers, 2)] == [3, 3]
    narrow = gpt(n_layers=4, d_model=16, sequence=8)
    wide = gpt(n_layers=4, d_model=16, sequence=8, vocabulary=640)
    assert [len(s) for s in split_layers(narrow, 2)] == [4, 2]
    assert [len(s) for s in split_layers(wide, 2)] == [5, 1]


def test_a_layer_used_twice_stays_where_it_was() -> None:
    relu = nn.ReLU()
    stages = split_layers(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu), 2)
    assert [[type(layer) for layer in stage] for stage in stages] == [[nn.Linear, nn.ReLU]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_stages": 6}, "more stages than layers: got n_stages=6 for a model of 5 layers"),
        ({"n_stages": 0}, "n_stages must be at least 1, got 0"),
        ({"n_stages": -2}, "n_stages must be at least 1, got -2"),
        ({"n_stages": 2.0}, "n_stages must be a whole number, got 2.0"),
        ({"n_stages": True}, "n_stages must be a whole number, got True"),
        ({}, "neither n_stages nor balance"),
        ({"balance": [2, 2]}, r"\[2, 2\] sums to 4 layers, but the model has 5"),
        ({"balance": [3, 3]}, r"\[3, 3\] sums to 6 layers, but the model has 5"),
        ({"balance": []}, "sums to 0 layers"),
        ({"balance": [5, 0]}, r"balance\[1\] must be at least 1, got 0"),
        ({"balance": [6, -1]}, r"balance\[1\] must be at least 1, got -1"),
        ({"balance": [2.5, 2.5]}, r"balance\[0\] must be a whole number, got 2.5"),
        ({"balance": [4, True]}, r"balance\[1\] must be a whole number, got True"),
        ({"balance": 5}, "balance must list the layer count of each stage, got 5"),
        ({"balance": [2, 3], "n_stages": 3}, "is for 2 stages, and n_stages is 3"),
    ],
)
def test_bad_splits_are_named(arguments, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        split_layers(counted(5), **arguments)


def test_only_a_sequential_can_be_split() -> None:
    with pytest.raises(ArgumentError, match=r"got Linear; wrap its layers in nn.Sequential"):
        split_layers(nn.Linear(2, 2), 2)


def test_tied_parameters_cannot_be_cut_apart() -> None:
    embedding, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Identity(), head)
    with pytest.raises(ArgumentError, match=r"stages 0 and 2 would share the parameter '2.weight'"):
        split_layers(model, 3)
    assert len(split_layers(model, 1)) == 1


# Data


def test_text_batch_is_text_and_its_targets_come_one_later() -> None:
    inputs, targets = text_batch(5, 24, seed=3)
    assert inputs.shape == targets.shape == (5, 24)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in library)
    assert all(bytes(row) in text for row in inputs.tolist())


def test_every_byte_of_a_file_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes([0, 1, 254, 255]))
    inputs, targets = text_batch(50, 2, text=path)
    drawn = {(*i, *t) for i, t in zip(inputs.tolist(), targets.tolist(), strict=True)}
    assert drawn == {(0, 1, 1, 254), (1, 254, 254, 255)}
    path.write_bytes(b"abc")
    assert text_batch(1, 2, text=path)[0].tolist() == [[97, 98]]


@pytest.mark.parametrize("draw", [lambda seed: text_batch(4, 8, seed=seed),
                                  lambda seed: image_batch(4, 8, 5, seed)])  # fmt: skip
def test_seed_determines_the_batch(draw) -> None:
    torch.manual_seed(0)
    first = draw(7)
    torch.manual_seed(1)
    assert all(map(torch.equal, first, draw(7)))
    assert not any(map(torch.equal, first, draw(8)))
    assert all(map(torch.equal, draw(1 << 90), draw(1 << 90)))


def test_image_batch() -> None:
    images, classes = image_batch(64, 9, 3, seed=1)
    assert images.shape == (64, 3, 9, 9)
    assert images.dtype == torch.float32
    assert classes.dtype == torch.int64
    assert set(classes.tolist()) == {0, 1, 2}
    # The mean over a class is its pattern: the same for another seed, and not another class's.
    again, labels = image_batch(64, 9, 3, seed=2)
    means = [[x[y == k].mean(0) for k in range(3)] for x, y in ((images, classes), (again, labels))]
    distance = torch.tensor([[(a - b).abs().mean() for b in means[1]] for a in means[0]])
    assert distance.argmin(dim=1).tolist() == [0, 1, 2]


def test_batches_are_new_at_each_step_and_the_same_for_a_seed() -> None:
    make = small("gpt").make_batch
    first = [inputs for inputs, _ in islice(batches(make, 2, seed=1), 4)]
    again = [inputs for inputs, _ in islice(batches(make, 2, seed=1), 4)]
    other = [inputs for inputs, _ in islice(batches(make, 2, seed=2), 4)]
    assert all(map(torch.equal, first, again))
    for i, inputs in enumerate(first):
        assert not any(torch.equal(inputs, later) for later in [*first[i + 1 :], *other])


def test_texts_that_cannot_be_drawn_from_are_named(tmp_path: Path) -> None:
    missing, empty, short = (tmp_path / name for name in ("missing", "empty", "short"))
    empty.write_bytes(b"")
    short.write_bytes(b"12345678")
    with pytest.raises(ArgumentError, match=r"/missing: No such file .* at least 9 bytes"):
        text_batch(1, 8, text=missing)
    with pytest.raises(ArgumentError, match=r"/empty has 0 bytes, and .* need 9"):
        text_batch(1, 8, text=empty)
    with pytest.raises(ArgumentError, match=r"/short has 8 bytes, and .* need 9"):
        text_batch(1, 8, text=short)
    with pytest.raises(ArgumentError, match=r"Is a directory; give a readable file"):
        text_batch(1, 8, text=tmp_path)
    assert text_batch(1, 7, text=short)[1].tolist() == [list(b"2345678")]


def test_a_python_without_sources_asks_for_a_text(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    data._corpus.cache_clear()
    try:
        with pytest.raises(ArgumentError, match=r"has 0 bytes.*give a longer file"):
            text_batch(1, 8)
    finally:
        data._corpus.cache_clear()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: text_batch(0, 8), "batch must be at least 1, got 0"),
        (lambda: text_batch(1, 1.5), "sequence must be a whole number"),
        (lambda: text_batch(1, 8, seed=-1), "seed must be at least 0"),
        (lambda: image_batch(True, 8, 2), "batch must be a whole number, got True"),
        (lambda: image_batch(1, 0, 2), "image_size must be at least 1"),
        (lambda: image_batch(1, 8, -2), "n_classes must be at least 1"),
        (lambda: next(batches(image_batch, 1, seed=1.5)), "seed must be a whole"),
    ],
)
def test_bad_batches_are_named(make, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


# The table of models


@pytest.mark.parametrize("name", MODELS)
def test_every_model_builds_with_its_defaults(name: str) -> None:
    spec = MODELS[name]
    work = build_model(name, **dict.fromkeys(spec.options))
    assert work.options == spec.options
    assert len(work.layers) == spec.options["layers"] + 2
    inputs, targets = work.make_batch(2, 0)
    assert work.loss(work.layers(inputs), targets).shape == ()


def test_options_reach_the_model(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"x" * 100)
    work = small("gpt", layers=1, heads=4, dropout=0.25, text=str(text))
    assert work.options == {
        **SMALL["gpt"], "layers": 1, "heads": 4, "dropout": 0.25, "text": str(text)
    }  # fmt: skip
    assert set(work.make_batch(2, 0)[0].flatten().tolist()) == {ord("x")}
    assert [m.p for m in work.layers.modules() if isinstance(m, nn.Dropout)] == [0.25] * 2
    assert [m.n_heads for m in work.layers.modules() if hasattr(m, "n_heads")] == [4]


def test_records_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        small("gpt").loss = None
    with pytest.raises(TypeError):
        MODELS["gpt"] = None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gtp", {}, "unknown model 'gtp'; did you mean 'gpt'"),
        ("convnet", {"heads": 2}, "option of model 'convnet'.* 'heads'"),
        ("gpt", {"layers": 0}, "n_layers must be at least 1"),
        ("gpt", {"text": "/no/such/file"}, "cannot read the text /no/such/file"),
        ("convnet", {"classes": 0}, "n_classes must be at least 1"),
    ],
)
def test_bad_models_are_named(name, options, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        build_model(name, **options)
