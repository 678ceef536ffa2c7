"""`px.train`: the loop, its log, hooks, prediction, and resumption to the last bit."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_pipelines import mse
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pipeexec as px
import pipesim as ps
from pipeexec.executor import StepResult
from pipeexec.training import TrainingRun
from pipeexec.training import train as interrupts
from pipesim.errors import (
    ArgumentError,
    ExecutionError,
    PipeError,
    ResumeWarning,
    RunDirectoryError,
    StageError,
)

COSTS = ps.Costs(forward=1e-3, backward=2e-3)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """Begin with the same random numbers; restore those of other tests."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def pipeline(n_stages: int = 2) -> px.Pipeline:
    """Return a pipeline that draws random numbers, with an optimizer that has a state."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)]
    stages = px.split(nn.Sequential(*layers), n_stages, sample=torch.ones(2, 4))
    graph = ps.lower(ps.schedule("1f1b", n_stages, 2))
    adam = torch.optim.Adam
    return px.Pipeline(
        stages, graph, ["cpu"] * n_stages, mse, lambda p: adam(p, 1e-2), pin_threads=False
    )


def loader(n: int = 20, **options: Any) -> DataLoader[tuple[Tensor, ...]]:
    """Return five shuffled batches of four samples an epoch."""
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(n, 4, generator=draw), torch.randn(n, 1, generator=draw))
    return DataLoader(data, batch_size=4, shuffle=True, **options)


def half(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


def run(directory: Path | None, n_steps: int, **options: Any) -> TrainingRun:
    """Train from the beginning of the script, as a user would start it again."""
    with pipeline() as subject:
        options = {"scheduler": px.LRSchedulers(subject, half), "batches": loader(), **options}
        return px.train(subject, n_steps=n_steps, directory=directory, progress=False, **options)


class TestLog:
    """A row a step, in memory and on the disk."""

    def test_rows(self, tmp_path: Path) -> None:
        got = run(tmp_path / "run", 7, costs=COSTS)
        table = got.table
        assert table["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert table["epoch"].tolist() == [0] * 5 + [1] * 2
        assert table["lr"].tolist() == pytest.approx([1e-2] * 2 + [1e-3] * 3 + [1e-4] * 2)
        assert (table["predicted_makespan"] == got.predicted.makespan).all()
        assert (table["seconds"] >= table["makespan"]).all()
        assert (table["samples_per_s"] == 4 / table["seconds"]).all()
        assert "tokens_per_s" not in table
        assert TrainingRun.load(tmp_path / "run").table.equals(table)

    def test_losses_are_those_of_the_users_own_loop(self) -> None:
        """The loop adds nothing: the same steps by hand have the same losses."""
        with pipeline() as subject:
            scheduler, losses, batches = px.LRSchedulers(subject, half), [], loader()
            for _ in range(2):
                for inputs, targets in batches:
                    losses.append(float(subject.step(inputs, targets).loss))
                    scheduler.step()
        assert run(None, 10).losses == losses

    def test_tokens(self) -> None:
        """Whole numbers in two dimensions are tokens."""
        stages = [nn.Embedding(8, 4), nn.Linear(4, 1)]
        graph = ps.lower(ps.schedule("1f1b", 2, 2))
        with px.Pipeline(stages, graph, ["cpu"] * 2, mse, pin_threads=False) as subject:
            batch = torch.ones(4, 3, dtype=torch.int64), torch.ones(4, 3, 1)
            table = px.train(subject, [batch], n_steps=2).table
        assert (table["tokens_per_s"] == 12 / table["seconds"]).all()

    def test_metrics(self) -> None:
        """Metrics of the loss function are columns of both tables."""

        def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return mse(output, target), {"largest": output.detach().max()}

        stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        graph = ps.lower(ps.schedule("1f1b", 2, 2))
        with px.Pipeline(stages, graph, ["cpu"] * 2, loss_fn, pin_threads=False) as subject:
            results: list[StepResult] = []
            got = px.train(
                subject, loader(), evaluation=loader(), on_step=lambda _, x: results.append(x)
            )
        assert got.table["largest"].tolist() == [x.metrics["largest"] for x in results]
        assert got.evaluations["largest"].notna().all()

    def test_mapping_with_labels(self) -> None:
        """Batches as models of transformers take them."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

            def forward(self, x: Tensor, labels: Tensor) -> Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x

        batch = {"x": torch.ones(8, 4), "labels": torch.zeros(8, 4)}
        stages = px.split(Model(), 2, sample=batch)
        graph = ps.lower(ps.schedule("1f1b", 2, 2))
        with px.Pipeline(stages, graph, ["cpu"] * 2, mse, pin_threads=False) as subject:
            table = px.train(subject, [batch], n_steps=1).table
        assert table["samples_per_s"].tolist() == [8 / table["seconds"][0]]

    def test_torn_line_is_left_out(self, tmp_path: Path) -> None:
        run(tmp_path, 2)
        with (tmp_path / "log.csv").open("a") as file:
            file.write("3,0,0.1")
        assert len(TrainingRun.load(tmp_path).table) == 2

    def test_edited_line_is_named(self, tmp_path: Path) -> None:
        run(tmp_path, 2)
        with (tmp_path / "log.csv").open("a") as file:
            file.write("3,0,x\n")
        with pytest.raises(RunDirectoryError, match=r"log\.csv: line 4 is no row"):
            TrainingRun.load(tmp_path)

    def test_plot_has_a_point_a_step(self) -> None:
        from matplotlib.figure import Figure

        got = run(None, 6, evaluation=loader())
        ax = got.plot(ax=Figure().add_subplot())
        lines = {line.get_gid(): line for line in ax.lines}
        assert lines["training:loss"].get_ydata().tolist() == got.losses
        assert list(lines["training:evaluation"].get_xdata()) == [6]
        assert ax.get_ylabel() == "Loss"


class TestResume:
    """A run that ends and continues has the losses of one that does not."""

    @pytest.mark.parametrize("n_before", [2, 5, 6])  # inside and at the end of an epoch
    def test_losses_are_equal_to_the_last_bit(self, tmp_path: Path, n_before: int) -> None:
        whole = run(None, 9)
        run(tmp_path, n_before)
        torch.rand(3)  # another process begins with other random numbers
        got = run(tmp_path, 9)
        assert got.first_step == n_before
        assert got.losses == whole.losses
        assert got.table["lr"].tolist() == whole.table["lr"].tolist()

    def test_after_a_crash_between_checkpoints(self, tmp_path: Path) -> None:
        """Steps after the last checkpoint run again, and their rows are replaced."""

        def crash(run: TrainingRun, _: object) -> None:
            if run.n_steps == 6:
                raise RuntimeError("lost")

        with pytest.raises(RuntimeError, match="lost"):
            run(tmp_path, 9, checkpoint_every=4, on_step=crash)
        assert len(TrainingRun.load(tmp_path).table) == 6
        got = run(tmp_path, 9)
        assert got.first_step == 4
        assert got.losses == run(None, 9).losses

    def test_own_generator_of_a_loader(self, tmp_path: Path) -> None:
        """A DataLoader's own generator continues, too."""
        options = [{"batches": loader(generator=torch.Generator().manual_seed(3))} for _ in "abc"]
        whole = run(None, 12, **options[0])
        run(tmp_path, 7, **options[1])
        assert run(tmp_path, 12, **options[2]).losses == whole.losses

    def test_function_of_the_epoch(self, tmp_path: Path) -> None:
        def batches(epoch: int) -> Any:
            return loader(generator=torch.Generator().manual_seed(epoch))

        whole = run(None, 8, batches=batches)
        run(tmp_path, 6, batches=batches)
        assert run(tmp_path, 8, batches=batches).losses == whole.losses

    def test_loader_with_a_state(self, tmp_path: Path) -> None:
        """A loader that can save its place is asked for it, and nothing is skipped."""

        class Stateful:
            def __init__(self) -> None:
                self.place, self.drawn = torch.zeros(1, dtype=torch.int64), 0

            def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
                while self.place < 100:
                    self.place = self.place + 1
                    self.drawn += 1
                    yield torch.full((4, 4), float(self.place)), torch.ones(4, 1)

            def state_dict(self) -> dict[str, Any]:
                return {"place": self.place}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.place = state["place"]

        whole = run(None, 6, batches=Stateful())
        run(tmp_path, 4, batches=Stateful())
        batches = Stateful()
        assert run(tmp_path, 6, batches=batches).losses == whole.losses
        assert batches.drawn == 2

    def test_other_batches_are_noticed(self, tmp_path: Path) -> None:
        run(tmp_path, 2)
        with pytest.warns(ResumeWarning, match="batch 2 of epoch 0 is not the one"):
            run(tmp_path, 3, batches=loader(24))

    def test_fewer_batches_are_refused(self, tmp_path: Path) -> None:
        run(tmp_path, 4)
        with pytest.raises(ArgumentError, match="epoch 0 has 2 batches, but 4 were taken"):
            run(tmp_path, 6, batches=loader(8))

    @pytest.mark.slow
    def test_another_number_of_stages(self, tmp_path: Path) -> None:
        run(tmp_path, 2, costs="measure")
        with pipeline(1) as subject:
            got = px.train(
                subject, loader(), n_steps=3, directory=tmp_path, costs="measure",
                scheduler=px.LRSchedulers(subject, half),
            )  # fmt: skip
        assert (got.first_step, len(got.table)) == (2, 3)

    def test_complete_run_runs_no_step(self, tmp_path: Path) -> None:
        table = run(tmp_path, 3, costs=COSTS).table
        again = run(tmp_path, 3, costs="measure")
        assert again.table.equals(table)
        assert (again.first_step, again.end, again.costs) == (3, "steps", None)

    def test_fewer_steps_than_before(self, tmp_path: Path) -> None:
        run(tmp_path, 3)
        assert run(tmp_path, 2).n_steps == 3

    def test_checkpoint_of_another_name(self, tmp_path: Path) -> None:
        """A newer checkpoint that this training did not save is not continued."""
        run(tmp_path / "other", 5)
        run(tmp_path / "run", 2)
        folder = tmp_path / "run" / "checkpoints"
        run(tmp_path / "other", 6)
        latest = tmp_path / "other" / "checkpoints" / "step-00000006"
        shutil.copytree(latest, folder / "step-00000006 (copy)")
        assert run(tmp_path / "run", 3).first_step == 2

    def test_anew(self, tmp_path: Path) -> None:
        run(tmp_path, 3)
        assert run(tmp_path, 2, resume=False).first_step == 0
        assert len(TrainingRun.load(tmp_path).table) == 2

    def test_objects_are_saved(self, tmp_path: Path) -> None:
        """Anything with a state continues."""

        class Counter:
            def __init__(self) -> None:
                self.n = 0

            def state_dict(self) -> dict[str, int]:
                return {"n": self.n}

            def load_state_dict(self, state: dict[str, int]) -> None:
                self.n = state["n"]

        for n_steps in (2, 5):
            counter = Counter()

            def count(*_: object, counter: Counter = counter) -> None:
                counter.n += 1

            run(tmp_path, n_steps, objects={"counter": counter}, on_step=count)
            assert counter.n == n_steps
        with pytest.raises(PipeError, match="this training has no 'counter'"):
            run(tmp_path, 6)

    def test_scheduler_must_be_the_same(self, tmp_path: Path) -> None:
        run(tmp_path, 2)
        with pytest.raises(PipeError, match="this training has no 'scheduler'"):
            run(tmp_path, 3, scheduler=None)


class TestDirectory:
    """One directory, one training."""

    def test_of_another_training(self, tmp_path: Path) -> None:
        run(tmp_path, 1, record={"model": {"layers": 2}, "seed": 0})
        with pytest.raises(RunDirectoryError, match=r"model.layers is 2 there, and 3 now"):
            run(tmp_path, 2, record={"model": {"layers": 3}, "seed": 1})

    def test_in_use(self, tmp_path: Path) -> None:
        def start_another(run: TrainingRun, _: object) -> None:
            import threading

            errors: list[BaseException] = []

            def other() -> None:
                try:
                    with pipeline() as subject:
                        px.train(subject, loader(), n_steps=1, directory=tmp_path / "run")
                except RunDirectoryError as error:
                    errors.append(error)

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert "another thread is writing" in str(errors[0])

        run(tmp_path / "run", 1, on_step=start_another)

    def test_the_current_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        run(Path("."), 1)
        assert run(Path("."), 2).first_step == 1

    def test_foreign_files(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").touch()
        for resume in (True, False):
            with pytest.raises(RunDirectoryError, match="no directory of a training"):
                run(tmp_path, 1, resume=resume)
        (tmp_path / "training.json").write_text("{}")
        with pytest.raises(RunDirectoryError, match="is no record of a training"):
            run(tmp_path, 1, resume=False)
        run(tmp_path / "run", 1)
        (tmp_path / "run" / "thesis.txt").touch()
        with pytest.raises(RunDirectoryError, match=r"run has 'thesis\.txt', which no training"):
            run(tmp_path / "run", 1, resume=False)
        assert (tmp_path / "thesis.txt").exists()
        assert (tmp_path / "run" / "thesis.txt").exists()

    def test_last_checkpoints_are_kept(self, tmp_path: Path) -> None:
        paths: list[str] = []
        run(
            tmp_path, 7, checkpoint_every=2, keep=2,
            on_checkpoint=lambda _, path: paths.append(path.name),
        )  # fmt: skip
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == ["step-00000006", "step-00000007"]
        assert paths == [f"step-0000000{k}" for k in (2, 4, 6, 7)]

    def test_timelines_of_chosen_steps(self, tmp_path: Path) -> None:
        got = run(tmp_path, 3, costs=COSTS, timelines=[2])
        folder = tmp_path / "steps" / "step-00000002"
        assert {path.name for path in folder.iterdir()} == {"overlay.png", "timeline.csv"}
        loaded = ps.Timeline.load(folder / "timeline.csv")
        assert loaded.makespan == pytest.approx(got.timelines[2].makespan)
        assert ps.Costs.load(tmp_path / "costs.json") == COSTS

    def test_log_that_lacks_steps(self, tmp_path: Path) -> None:
        run(tmp_path, 2)
        log = tmp_path / "log.csv"
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
        with pytest.raises(
            RunDirectoryError, match=r"1 rows in log\.csv, and its checkpoint is of"
        ):
            run(tmp_path, 3)


class TestEnd:
    """Why a training ends."""

    def test_of_batches(self) -> None:
        got = run(None, 9, batches=iter([*loader()][:3]))
        assert (got.n_steps, got.end) == (3, "batches")
        with pipeline() as subject:
            assert px.train(subject, loader()).n_steps == 5  # one epoch by default
            assert px.train(subject, loader(), epochs=2).n_steps == 10

    def test_by_a_hook(self, tmp_path: Path) -> None:
        def stop(run: TrainingRun, result: StepResult) -> None:
            assert float(result.loss) == run.losses[-1]
            if run.n_steps == 3:
                run.stop()

        got = run(tmp_path, 9, on_step=stop)
        assert (got.n_steps, got.end) == (3, "stopped")
        assert got.checkpoint == tmp_path / "checkpoints" / "step-00000003"

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_by_a_signal(self, tmp_path: Path, number: signal.Signals) -> None:
        """The step ends, a checkpoint is written, and the training can go on."""
        before = signal.getsignal(number)

        def interrupt(run: TrainingRun, _: object) -> None:
            if run.n_steps == 2:
                signal.raise_signal(number)

        got = run(tmp_path, 6, on_step=interrupt, evaluation=loader())
        assert (got.n_steps, got.interrupted) == (2, True)
        assert not len(got.evaluations)
        assert signal.getsignal(number) is before
        assert run(tmp_path, 6).losses == run(None, 6).losses

    def test_second_signal_ends_it_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(interrupts, "_COPY_SECONDS", 0.0)

        def interrupt(*_: object) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, 6, on_step=interrupt)
        assert not (tmp_path / "checkpoints").exists()

    def test_by_a_failure(self, tmp_path: Path) -> None:
        """The rows of the steps before stay."""
        batches = [*[*loader()][:2], (torch.ones(4, 4), torch.ones(3, 2))]
        with pytest.raises((StageError, ArgumentError)):
            run(tmp_path, 6, batches=batches)
        assert len(TrainingRun.load(tmp_path).table) == 2


class TestEvaluation:
    """Means over batches, now and then and at the end."""

    def test_mean_is_weighted_by_samples(self) -> None:
        batches = [(torch.ones(n, 4) * n, torch.ones(n, 1)) for n in (4, 4, 2)]
        with pipeline() as subject:
            got = px.train(
                subject, loader(), n_steps=5, evaluation=batches, evaluate_every=2,
            )  # fmt: skip
            losses = [float(subject.evaluate(*batch).loss) for batch in batches]
        assert got.evaluations["step"].tolist() == [2, 4, 5]
        assert got.evaluations["samples"].tolist() == [10, 10, 10]
        expected = (4 * losses[0] + 4 * losses[1] + 2 * losses[2]) / 10
        assert got.evaluations["loss"].tolist()[-1] == pytest.approx(expected, rel=1e-6)

    def test_changes_nothing(self) -> None:
        """Losses do not depend on evaluations, whose loader draws random numbers too."""
        assert run(None, 6, evaluation=loader(), evaluate_every=1).losses == run(None, 6).losses

    def test_hook(self) -> None:
        rows: list[dict[str, float]] = []
        run(None, 2, evaluation=loader(), on_evaluation=lambda _, row: rows.append(dict(row)))
        assert [row["step"] for row in rows] == [2]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"batches": 3}, "batches must be a DataLoader"),
    ({"batches": []}, "batches: epoch 0 has no batches"),
    (
        {"batches": [torch.ones(4, 4)]},
        r"batches: a batch is a Tensor of shape \(4, 4\), and neither a pair",
    ),
    ({"batches": iter([]), "epochs": 2}, "batches is an iterator"),
    ({"evaluate_every": 2}, "evaluate_every needs evaluation="),
    ({"checkpoint_every": 2}, "checkpoint_every needs directory="),
    ({"evaluation": iter([])}, "evaluation is an iterator"),
    ({"scheduler": 3}, r"scheduler has no step\(\)"),
    ({"scheduler": torch.optim.lr_scheduler.StepLR}, "scheduler is the class StepLR; give an obj"),
    ({"evaluation": [None]}, "evaluation: a batch is a NoneType"),
    ({"objects": {"scaler": 3}}, r"objects: 'scaler' has no state_dict\(\)"),
    ({"objects": {"path": 3}}, "objects: 'path' is no name"),
    ({"costs": "measured"}, "unknown costs 'measured'; did you mean 'measure'"),
    ({"timelines": [0]}, "a step of timelines must be at least 1"),
    ({"keep": 0}, "keep must be at least 1"),
    ({"on_step": 3}, "on_step must be a function"),
]


@pytest.mark.parametrize(("options", "text"), BAD)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        run(None, 2, **options)


@pytest.mark.slow
def test_measured_costs(tmp_path: Path) -> None:
    """Costs are measured once, and change neither weights nor random numbers."""
    with pytest.warns(UserWarning, match="below 1 ms|the machine is busy"):
        got = run(tmp_path, 3, costs="measure")
    assert got.losses == run(None, 3).losses
    assert got.predicted.makespan > 0
    assert TrainingRun.load(tmp_path).table["predicted_bubble"].notna().all()


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with pipeline() as subject:
        px.train(subject, loader(), n_steps=2, costs=COSTS, progress=True)
        shown = capsys.readouterr().err
        px.train(subject, loader(), n_steps=2)
    assert "2/2" in shown
    assert "loss" in shown
    assert "(predicted" in shown
    assert capsys.readouterr().err == ""  # no terminal


class Tied(nn.Module):
    """Blocks between an embedding and a head with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@pytest.mark.parametrize("form", ["batch", "microbatches", "replicas"])
def test_the_first_batch_is_compared_with_the_model(form):
    """Stages that are no longer the model's train only without the check; the rest stays."""
    words = torch.arange(8).reshape(4, 2) % 7
    stages = px.split(Tied(), 2, sample=words)
    graph = ps.lower(
        ps.schedule("1f1b", 2, 2), tied=stages.tied_stages, n_replicas=1 + (form == "replicas")
    )
    parts = px.Microbatches([words[:1], words[1:]])
    batch = (parts, parts) if form == "microbatches" else (words, words)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    with px.Pipeline(stages, graph, ["cpu"] * graph.n_devices, loss, pin_threads=False) as subject:
        state = torch.get_rng_state()
        assert px.train(subject, [batch], progress=False).n_steps == 1
        assert torch.equal(torch.get_rng_state(), state)
        with torch.no_grad():
            stages[1].get_parameter(stages.tied[0][1][1]).add_(0.5)
        with pytest.raises(ExecutionError, match="differ from Tied in training mode: outputs by"):
            px.train(subject, [batch], progress=False)
        assert px.train(subject, [batch], progress=False, check=False).n_steps == 1
