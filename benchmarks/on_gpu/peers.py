"""Step ``peers``: a step beside other runtimes on the same streams, in turns."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.metadata import version

from torch import nn

import pipeexec as px
import pipesim as ps
from on_gpu import by_hand
from on_gpu.about import PEERS
from on_gpu.attempts import attempt
from on_gpu.bench import Bench
from on_gpu.gradients import GRADIENTS, largest_error, unsplit_gradients
from on_gpu.report import Report
from on_gpu.streams import GpuStream, compute_streams, joined, on_stream
from on_gpu.torch_runtime import TorchRuntime, one_process
from on_gpu.turns import Step, Times, in_turn, ratio
from pipeexec.demo_models.registry import cross_entropy
from pipeexec.devices.thread_settings import one_thread

#: Ours over theirs, at most.
TARGET = 1.02
TORCH, HAND, TORCHGPIPE = "torch.distributed.pipelining", "by hand", "torchgpipe"


def peers(bench: Bench, report: Report) -> None:
    """Compare steps with those of other runtimes on the same streams, in turns."""
    for line in PEERS.splitlines():
        report.add(line)
    with one_thread() if bench.dry else nullcontext():  # as CPU workers
        contest = Contest(bench, report)
        rounds = f"medians of {contest.n_rounds} rounds"
        report.add(f"\n{rounds}; ratio: ours over theirs (95 % interval)")
        with one_process():
            for name in ("gpipe", "1f1b", "zb_h1"):
                contest.attempt(name, contest.pipeline, name)
        contest.attempt("one device", contest.whole_gpu)
        if importlib.util.find_spec("torchgpipe") is None:
            report.add("torchgpipe is not installed: left out; carry its wheel in WHEELS")
            return
        for checkpoint in ("never", "except_last"):
            contest.attempt(f"torchgpipe, {checkpoint}", contest.torchgpipe, checkpoint)


class Contest:
    """One model, whose steps several runtimes run."""

    def __init__(self, bench: Bench, report: Report) -> None:
        self.bench, self.report = bench, report
        self.n = bench.pick(4, 2)
        self.m = 2 * self.n
        self.n_rounds, self.warm_up = bench.pick(20, 3, brief=8), bench.pick(2, 0)
        self.stages = [stage.to(bench.gpu) for stage in bench.stages(self.n, 2 * self.n)]
        inputs, targets = bench.batch(self.m * bench.samples(self.n))
        self.batch = inputs.to(bench.gpu), targets.to(bench.gpu)
        self.wanted = unsplit_gradients(self.stages, self.batch, self.m, bench.gpu)

    def attempt(self, name: str, call: Callable[..., None], *arguments: str) -> None:
        """Call; if that raises, report it and let the others run."""
        attempt(self.report, name, call, *arguments)
        self.bench.release()

    def pipeline(self, schedule: str) -> None:
        """Compare a schedule of `pipeexec.Pipeline` with torch's runtime, and GPipe by hand."""
        bench, stages, batch = self.bench, self.stages, self.batch
        graph = ps.lower(ps.schedule(schedule, self.n, self.m), step="none")
        with bench.pipeline(graph, stages) as subject:
            streams = compute_streams(subject.devices)
            torchs = TorchRuntime(graph, stages, streams, bench.gpu, batch)
            peers: dict[str, Step] = {TORCH: torchs.step}
            if schedule == "gpipe":
                peers[HAND] = by_hand.gpipe(stages, streams, batch, self.m)
            self._compare(schedule, lambda: subject.step(*batch).host_seconds, peers,
                          then=torchs.check_order)  # fmt: skip

    def torchgpipe(self, checkpoint: str) -> None:
        """Compare `pipeexec.GPipe` with torchgpipe."""
        from torchgpipe import GPipe

        from on_gpu.torchgpipe_streams import on_streams

        bench = self.bench
        layers = nn.Sequential(*(layer for stage in self.stages for layer in stage))
        balance = [len(stage) for stage in self.stages]
        places = bench.devices(self.n)
        streams = compute_streams(places)
        options = {"chunks": self.m, "checkpoint": checkpoint}
        own = px.GPipe(layers, balance, devices=places, **options)
        peer = GPipe(layers, balance, devices=[bench.gpu] * self.n, **options)
        with on_streams(peer, streams, bench.gpu):
            self._compare(
                f"gpipe, checkpoint={checkpoint!r}", self._through(own, streams),
                {TORCHGPIPE: self._through(peer, streams)},
            )  # fmt: skip

    def whole_gpu(self) -> None:
        """Compare a pipeline of one device with plain accumulation on its stream."""
        whole = nn.Sequential(*self.stages)
        graph = ps.lower(ps.schedule("gpipe", 1, self.m), step="none")
        with px.Pipeline([whole], graph, [self.bench.gpu], cross_entropy) as subject:
            (stream,) = compute_streams(subject.devices)
            peer = by_hand.accumulation(self.stages, stream, self.batch, self.m)
            self._compare("one device, the whole GPU",
                          lambda: subject.step(*self.batch).host_seconds, {HAND: peer})  # fmt: skip

    def _through(self, model: nn.Module, streams: list[GpuStream]) -> Step:
        """Return a step of a module, whose outputs are on the last stream."""
        inputs, targets = self.batch

        def step() -> None:
            with joined(streams), on_stream(streams[-1]):
                cross_entropy(model(inputs), targets).backward()

        return step

    def _compare(
        self, schedule: str, own: Step, peers: Mapping[str, Step],
        then: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Check the gradients of each side, then time both; say a line for each peer."""
        steps = {name: self._afresh(step) for name, step in {"ours": own, **peers}.items()}
        for name, step in steps.items():
            error = self._gradient_error(step)
            self.report.check(
                error <= GRADIENTS,
                f"gradients, {schedule}, {name}: {error:.1e} (limit {GRADIENTS:g})",
            )
        then()
        self.report.begin()
        times = in_turn(self.bench, steps, self.n_rounds, self.warm_up)
        for name in peers:
            self._report_ratio(schedule, name, times["ours"], times[name])

    def _afresh(self, step: Step) -> Step:
        """Return a step that begins without gradients."""

        def run() -> float | None:
            for stage in self.stages:
                stage.zero_grad()
            return step()

        return run

    def _gradient_error(self, step: Step) -> float:
        step()
        self.bench.wait()
        return largest_error([p.grad for x in self.stages for p in x.parameters()], self.wanted)

    def _report_ratio(self, schedule: str, peer: str, own_times: Times, peer_times: Times) -> None:
        """Report one ratio."""
        stats = ratio(own_times.wall, peer_times.wall)
        seconds = [statistics.median(x) for x in (*own_times, *peer_times)]
        ms = [f"{x * 1e3:.2f}" for x in seconds]
        self.report.record(
            "peers", name=peer, schedule=schedule, version=_version(peer), ours=seconds[0],
            theirs=seconds[2], ratio=stats.median, low=stats.low, high=stats.high,
            host_ours=seconds[1], host_theirs=seconds[3], n_rounds=self.n_rounds, target=TARGET,
        )  # fmt: skip
        self.report.time(
            stats.median <= TARGET,
            f"{schedule}, {peer}: ours {ms[0]} ms (host {ms[1]}), theirs {ms[2]} ms (host {ms[3]}),"
            f" ratio {stats.median:.3f} ({stats.low:.3f} to {stats.high:.3f}; target {TARGET})",
        )


def _version(peer: str) -> str:
    names = {TORCH: "torch", TORCHGPIPE: "torchgpipe"}
    return version(names[peer]) if peer in names else ""
