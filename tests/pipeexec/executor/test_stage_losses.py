"""Losses of stages before the last one, such as of multi-token prediction, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError, ExecutionError, StageError

WORDS, WIDTH, LENGTH, SHARE = 11, 8, 6, 0.3
Pair = tuple[Tensor, Tensor]


class Embedding(nn.Module):
    """Tokens to hidden states; passes the tokens on."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Pair:
        return self.words(tokens), tokens


class Layer(nn.Module):
    """A residual layer; passes the tokens on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Pair:
        return hidden + torch.tanh(self.map(self.norm(hidden))), tokens


class Prediction(nn.Module):
    """A layer, and a module that predicts the token after the next (DeepSeek-V3, section 2.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.further = Layer(), Layer()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.map = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, tokens: Tensor) -> tuple[Pair, Tensor]:
        hidden, tokens = self.layer(hidden, tokens)
        both = torch.cat([hidden, self.words(tokens.roll(-1, 1))], dim=-1)
        return (hidden, tokens), self.head(self.further(self.map(both), tokens)[0])


class Head(nn.Module):
    """Hidden states to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.head(hidden)


def make_stages() -> list[nn.Module]:
    """Return four stages, of which stage 2 has copies of the embedding and of the head."""
    torch.manual_seed(3)
    stages: list[Any] = [x().double() for x in (Embedding, Layer, Prediction, Head)]
    stages[2].words.load_state_dict(stages[0].words.state_dict())
    stages[3].head.load_state_dict(stages[2].head.state_dict())
    return stages


TIED = [[(0, "words.weight"), (2, "words.weight")], [(2, "head.weight"), (3, "head.weight")]]
GROUPS = [(0, 2), (2, 3)]


def main_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def mtp_loss(logits: Tensor, tokens: Tensor) -> Any:
    hits = (logits.argmax(-1) == tokens.roll(-2, 1)).double().mean()
    loss = cross_entropy(logits.flatten(0, 1), tokens.roll(-2, 1).flatten())
    return SHARE * loss, {"further_hits": hits}


def batch() -> Tensor:
    """Return sequences for micro-batches of two, two, one and one."""
    return torch.randint(WORDS, (6, LENGTH), generator=torch.Generator().manual_seed(1))


def unsplit(tokens: Tensor) -> tuple[float, float, dict[tuple[int, str], Tensor]]:
    """Return both losses, and gradients by stage and name; copies have the sum of theirs."""
    stages = make_stages()
    hidden = stages[1](*stages[0](tokens))
    hidden, further = stages[2](*hidden)
    main, mtp = main_loss(stages[3](*hidden), tokens), mtp_loss(further, tokens)[0]
    (main + mtp).backward()
    grads = {(k, n): p.grad for k, s in enumerate(stages) for n, p in s.named_parameters()}
    for group in TIED:
        total = sum(grads[key] for key in group)
        grads |= dict.fromkeys(group, total)
    return main.item(), mtp.item(), grads


def check(pipeline: px.Pipeline, result: px.StepResult, stages: list[Any]) -> None:
    """Compare a step with the unsplit model: both losses, and gradients of all stages here."""
    main, mtp, grads = unsplit(batch())
    assert result.stage_losses == pytest.approx({2: mtp}, rel=1e-12)
    assert float(result.loss) == pytest.approx(main + mtp, rel=1e-12)
    assert float(sum(result.losses)) == pytest.approx(main, rel=1e-12)
    assert {"stage_2_loss", "further_hits"} == set(result.metrics)
    for k, stage in enumerate(stages):
        for name, parameter in () if stage is None else stage.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[k, name], rtol=1e-9, atol=1e-12)


#: Schedules of four stages, with whole and split backwards, on one and on several paths.
SCHEDULES = {
    "1f1b": (4, {}),
    "interleaved_1f1b": (2, {"n_chunks": 2}),
    "zb_h1": (4, {}),
    "zbv": (2, {}),
    "dualpipev": (2, {}),
    "chimera": (4, {}),
}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_parity_with_the_unsplit_model(name: str, recompute: Any) -> None:
    n_devices, options = SCHEDULES[name]
    schedule = ps.schedule(name, n_devices, 4, **options)
    graph = ps.lower(schedule, recompute=recompute, tied=GROUPS)
    stages, tokens = make_stages(), batch()
    with px.Pipeline(
        stages, graph, ["cpu"] * n_devices, main_loss, tied=TIED, stage_losses={2: mtp_loss},
        pin_threads=False,
    ) as pipeline:  # fmt: skip
        result = pipeline.step(tokens, tokens)
        check(pipeline, result, stages)
        main, mtp, _ = unsplit(tokens)
        evaluated = pipeline.evaluate(tokens, tokens)
        assert float(evaluated.loss) == pytest.approx(main + mtp, rel=1e-12)
        assert pipeline.predict(tokens).shape == (6, LENGTH, WORDS)


def test_two_losses_with_one_metric() -> None:
    """Neither is lost without a word."""

    def also_main(logits: Tensor, tokens: Tensor) -> Any:
        return main_loss(logits, tokens), {"further_hits": torch.tensor(1.0)}

    graph, tokens = ps.lower(ps.schedule("gpipe", 4, 2)), batch()
    with (
        px.Pipeline(
            make_stages(), graph, ["cpu"] * 4, also_main, stage_losses={2: mtp_loss},
            pin_threads=False,
        ) as pipeline,
        pytest.raises(ExecutionError, match="of two stages return the metric 'further_hits'"),
    ):  # fmt: skip
        pipeline.step(tokens, tokens)


def test_sums_accumulate_and_scale() -> None:
    """Sums weigh micro-batches alike; a later step adds to an earlier one; a scaler scales both."""
    tokens, stages, others = batch(), make_stages(), make_stages()
    graph = ps.lower(ps.schedule("1f1b", 4, 2), tied=GROUPS, grad_norm=True)
    options: Any = {"tied": TIED, "stage_losses": {2: mtp_loss}, "pin_threads": False}
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    devices = ["cpu"] * 4
    with px.Pipeline(stages, graph, devices, main_loss, sgd, grad_scaler=scaler, **options) as one:
        one.step(tokens, tokens)
    plain = ps.lower(ps.schedule("1f1b", 4, 2), tied=GROUPS)
    with px.Pipeline(others, plain, devices, main_loss, sgd, **options) as other:
        other.step(tokens[:2], tokens[:2], accumulate=True)
        other.step(tokens[2:], tokens[2:])
    for stage, same in zip(stages, others, strict=True):
        torch.testing.assert_close(list(stage.parameters()), list(same.parameters()))
    with px.Pipeline(
        make_stages(), plain, devices, lambda x, _: x.sum(), loss_reduction="sum",
        tied=TIED, stage_losses={2: lambda x, _: x.square().sum()}, pin_threads=False,
    ) as pipeline:  # fmt: skip
        whole = make_stages()
        _, further = whole[2](*whole[1](*whole[0](tokens)))
        squares = pipeline.step(tokens, tokens).stage_losses[2]
        assert squares == pytest.approx(float(further.square().sum()), rel=1e-12)


def _rank_case(processes: Processes) -> tuple[bool, str]:
    """Run a step in two processes, of which the first has the stage with a loss of its own."""
    stages: list[Any] = make_stages()
    graph = ps.lower(ps.schedule("interleaved_1f1b", 2, 4, n_chunks=2), tied=GROUPS)
    own = [stage if k % 2 == processes.rank else None for k, stage in enumerate(stages)]
    tokens, error = batch(), ""
    with px.Pipeline(
        own, graph, ["cpu"], main_loss, tied=TIED, processes=processes,
        stage_losses={2: mtp_loss}, pin_threads=False,
    ) as pipeline:  # fmt: skip
        if processes.rank == 0:
            with pytest.raises(ArgumentError) as caught:
                pipeline.check_batch(tokens, None)
            error = str(caught.value)
        result = pipeline.step(tokens if processes.rank == 0 else None, tokens)
        is_complete = result._is_complete
        check(pipeline, pipeline.gather(result), own)
    return is_complete, error


def test_two_processes(two_ranks: Ranks) -> None:
    (first, error), (last, _) = two_ranks.run(_rank_case)
    assert (first, last) == (False, False)  # neither has both losses
    assert error == (
        "targets are None, but this process has stage 2, which has a loss; give them here"
    )


def _pipeline(losses: Any, loss: Any = main_loss, stages: Any = None, **options: Any) -> None:
    graph = ps.lower(ps.schedule("1f1b", 4, 4), tied=GROUPS)
    with px.Pipeline(
        stages or make_stages(), graph, ["cpu"] * 4, loss, tied=TIED, stage_losses=losses,
        pin_threads=False, **options,
    ) as pipeline:  # fmt: skip
        pipeline.step(batch(), batch())


def test_mistakes() -> None:
    with pytest.raises(ArgumentError, match="names stage 3; the loss of the last of 4 stages is"):
        _pipeline({3: mtp_loss})
    with pytest.raises(ArgumentError, match=r"stage_losses\[2\] must be a function"):
        _pipeline({2: 1.0})
    stages = make_stages()
    with pytest.raises(StageError, match=r"stage 1 has a loss of its own .* must return a pair"):
        _pipeline({1: mtp_loss}, stages=[stages[0], Head().double(), *stages[2:]])
    with pytest.raises(StageError, match=r"of stage 2 \(stage_losses\) returned \(sum, count\)"):
        _pipeline({2: lambda x, y: (x.sum(), 3)})
    with pytest.raises(StageError, match=r"but stage 2 has a loss by stage_losses, .* weights"):
        _pipeline({2: mtp_loss}, lambda x, y: (36 * main_loss(x, y), y.numel()))
    with pytest.raises(StageError, match=r"of stage 2 .* does not depend on any parameter"):
        _pipeline({2: lambda x, y: x.detach().sum()})
