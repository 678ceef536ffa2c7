"""The command ``pipesim``: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command_output import BASE, SHAPE, SLOW, SLOW_COSTS, fail, rows, same_times, succeed
from matplotlib.figure import Figure

import pipesim as ps
import pipesim.plot.paper_figure
import pipesim.sweeps.settings
from pipesim.cli import COMMANDS, main
from pipesim.cli.arguments import make_parser
from pipesim.cli.help_texts import PAGES
from pipesim.costs.rows import STAGE_ROWS
from pipesim.graph.options import GRAD_SYNC
from pipesim.sweeps.settings import SECONDS
from pipesim.utils.command_line import MOST_LINES

# What is printed.


def test_simulate_prints_the_closed_forms(capsys: pytest.CaptureFixture[str]) -> None:
    """Makespan (m+p-1)(f+b), bubble (p-1)/(m+p-1), min(p-i, m) activations on device i."""
    out = succeed(capsys, "simulate", "1f1b", *BASE, "--activation-bytes", 2**30)
    assert rows(out) == [
        ["1f1b:", "4", "devices,", "4", "stages,", "8", "micro-batches,", "recompute", "never"],
        ["makespan", "33.000", "ms"],
        ["bubble", "27.3%"],
        ["throughput", "242.42", "micro-batches/s"],
        ["peak", "memory", "4.0000", "GiB", "(device", "0)"],
        ["device", "busy", "(ms)", "idle", "(ms)", "utilization", "peak", "memory", "(GiB)"],
        ["0", "24.000", "9.0000", "72.7%", "4.0000"],
        ["1", "24.000", "9.0000", "72.7%", "3.0000"],
        ["2", "24.000", "9.0000", "72.7%", "2.0000"],
        ["3", "24.000", "9.0000", "72.7%", "1.0000"],
    ]


def test_simulate_prints_what_the_timeline_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Uneven stages, so that no device's row could stand for another's."""
    costs = ps.Costs(forward=(1e-3, 2e-3), backward=(5e-3, 3e-3), activation_bytes=(3e9, 7e9))
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 3)), costs)
    counts = ["--devices", 2, "--microbatches", 3]
    out = succeed(
        capsys, "simulate", "gpipe", *counts, "--forward", "1e-3,2e-3",
        "--backward", "5e-3,3e-3", "--activation-bytes", "3e9,7e9",
    )  # fmt: skip
    printed = rows(out)
    assert float(printed[1][1]) == pytest.approx(timeline.makespan * 1e3, rel=1e-4)
    assert printed[4] == ["peak", "memory", f"{21e9 / 2**30:.3f}", "GiB", "(device", "1)"]
    for device, row in enumerate(printed[-2:]):
        expected = [
            timeline.busy[device] * 1e3,
            timeline.idle[device] * 1e3,
            timeline.utilization[device] * 100,
            timeline.memory.peak[device] / 2**30,
        ]
        got = [float(cell.rstrip("%")) for cell in row[1:]]
        assert got == pytest.approx(expected, rel=1e-3)


def test_skips_and_when_to_recompute(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Flags for what all schedules share; a file has the bytes of each skip."""
    config = tmp_path / "unet.toml"
    config.write_text("[costs]\nskip_bytes = { 0-3 = 2e6, 1-2 = 5e6 }\n")
    costs = ps.Costs(
        forward=1e-3,
        backward=2e-3,
        skip_bytes={(0, 3): 2e6, (1, 2): 5e6},
        network=ps.Network(bandwidth=1e9),
    )
    options = {"skips": [(0, 3), (1, 2)], "recompute": "always", "recompute_first": True}
    for portals, flag in ((True, "--portals"), (False, "--no-portals")):
        graph = ps.lower(ps.schedule("gpipe", 4, 8), portals=portals, **options)
        out = succeed(
            capsys, "simulate", "gpipe", *BASE, "--config", config, "--skips", "0-3,1-2", flag,
            "--recompute", "always", "--recompute-first", "--bandwidth", "1e9",
        )  # fmt: skip
        makespan = ps.simulate(graph, costs).makespan
        assert float(rows(out)[1][1]) == pytest.approx(makespan * 1e3, rel=1e-4)
    out = succeed(capsys, "simulate", "gpipe", *BASE, "--skips", "0-3", "--skip-bytes", 8e9,
                  "--bandwidth", "1e9")  # fmt: skip
    assert rows(out)[1] == ["makespan", "128006", "ms"]


def test_how_replicas_work_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As flags, in a file, and as columns of a sweep."""
    config = tmp_path / "replicas.toml"
    config.write_text(
        'replicas = 2\ngrad_sync = "bucketed"\nn_buckets = 2\nsharded = [0]\n'
        'shard_optimizer = true\nlayout = "stage_major"\n'
        "[costs]\nbuckets = [[], [[0.5, 0.1], [0.5, 1]], [[0.5, 0.1], [0.5, 1]], "
        "[[0.5, 0.1], [0.5, 1]]]\n"
    )
    half = [(0.5, 0.1), (0.5, 1.0)]
    costs = ps.Costs(
        forward=1e-3, backward=2e-3, parameter_bytes=4e6, key_bytes=1e6, optimizer_step=1e-3,
        buckets=[[], half, half, half], network=ps.Network(bandwidth=1e9),
    )  # fmt: skip
    options = {"n_replicas": 2, "grad_sync": "bucketed", "n_buckets": 2, "sharded": [0]}
    graph = ps.lower(
        ps.schedule("gpipe", 4, 8), shard_optimizer=True, layout="stage_major", **options
    )
    makespan = ps.simulate(graph, costs).makespan
    sizes = ["--parameter-bytes", "4e6", "--key-bytes", "1e6", "--optimizer-step", "1e-3"]
    flags = [
        *("--replicas", 2, "--grad-sync", "bucketed", "--n-buckets", 2, "--sharded", 0),
        *("--shard-optimizer", "--layout", "stage_major"),
    ]
    both = [*BASE, *sizes, "--bandwidth", "1e9"]
    out = succeed(capsys, "simulate", "gpipe", *both, "--config", config)
    assert float(rows(out)[1][1]) == pytest.approx(makespan * 1e3, rel=1e-4)
    makespan = ps.simulate(graph, replace(costs, buckets=None)).makespan
    out = succeed(capsys, "compare", "gpipe", *both, *flags)
    assert f"{makespan * 1e3:.4g}" in out
    out = succeed(
        capsys, "sweep", "gpipe", *both, "--replicas", 2, "--jobs", 1, "--grid",
        "grad_sync=last,every,bucketed",
    )  # fmt: skip
    assert [word for row in rows(out) for word in row if word in GRAD_SYNC] == list(GRAD_SYNC)
    stages = ("every", 2, "last", "bucketed")
    graph = ps.lower(ps.schedule("gpipe", 4, 8), n_replicas=2, grad_sync=stages)
    makespan = ps.simulate(graph, replace(costs, buckets=None)).makespan
    flag = ("--grad-sync", "every/2/last/bucketed")
    assert f"{makespan * 1e3:.4g}" in succeed(capsys, "compare", "gpipe", *both, *flag,
                                              "--replicas", 2)  # fmt: skip
    assert "unknown grad_sync 'lst'; did you mean 'last'" in fail(
        capsys, "simulate", "gpipe", *BASE, "--grad-sync", "lst"
    )
    assert "sharded names stage 3, the last one" in fail(
        capsys, "simulate", "gpipe", *BASE, "--replicas", 2, "--sharded", "1,3"
    )


def test_algorithm_of_reductions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As a flag, or in a file: 33 ms, and of 8 replicas 2 * 1 GB / 1 GB/s by trees."""
    config = tmp_path / "tree.toml"
    config.write_text('[costs]\nall_reduce = "tree"\n')
    replicas = [*BASE, "--replicas", 8, "--parameter-bytes", "1e9", "--bandwidth", "1e9"]
    for chosen in (["--all-reduce", "tree"], ["--config", config]):
        out = succeed(capsys, "simulate", "gpipe", *replicas, *chosen)
        assert rows(out)[1] == ["makespan", "2033.0", "ms"]


def test_compare_prints_a_row_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    out = succeed(capsys, "compare", "1f1b", "gpipe", *BASE, "--activation-bytes", 2**30)
    assert rows(out)[1:] == [
        ["1f1b", "33.000", "1.000", "27.3%", "242.42", "4.0000", "0.0%"],
        ["gpipe", "33.000", "1.000", "27.3%", "242.42", "8.0000", "0.0%"],
    ]


def test_columns_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    """The first column is flush left, the others end under their heads."""
    out = succeed(capsys, "compare", "1f1b", "gpipe", *BASE)
    head, *lines = out.splitlines()
    for word in ("relative", "bubble"):
        end = head.index(word) + len(word)
        assert all(line[end - 1] != " " and line[end] == " " for line in lines)


def test_schedules_lists_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    """Closed forms are printed as text, and as numbers for the given counts."""
    out = succeed(capsys, "schedules", "--devices", 3, "--microbatches", 6)
    table = ps.schedules(3, 6)
    listed = {row[0]: row for row in rows(out)}
    assert set(table.index) <= set(listed)
    for name, row in zip(map(str, table.index), table.to_dict("records"), strict=True):
        bubble = "-" if math.isnan(row["bubble"]) else f"{row['bubble']:.1%}"
        assert listed[name][1] == bubble
        forms = ("bubble", "activations", "parameters")
        formulas = "; ".join(f"{form} {row[f'{form}_formula']}" for form in forms)
        assert f"{name}: {formulas}; " in out
        assert row["source"] in out
        assert row["summary"] in out
    assert listed["gpipe"][:6] == ["gpipe", "25.0%", "6", "1", "backward_order,", "seed"]
    assert "gpipe: bubble (p-1)/(m+p-1); activations m; parameters 1; GPipe" in out


def test_costs_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    """Schedules of one and of two stages a device are compared for one model."""
    names = ("1f1b", "interleaved_1f1b", "zb_1p", "v_half")
    split = [*SHAPE, "--forward", 2e-3, "--input-grad", 2e-3, "--weight-grad", 2e-3]
    out = succeed(capsys, "compare", *names, *split)
    assert "note: schedules of 4 and 8 stages, each stage at the same costs" in out
    out = succeed(capsys, "compare", *names, *split, "--per", "device")
    assert "note" not in out
    listed = {row[0]: row for row in rows(out)}
    assert [float(listed[name][1]) for name in names] == [66, 57, 54, 53]
    options = ["--forward", "1,2,3,4", "--input-grad", 1, "--weight-grad", 1]  # one a device
    call = ["simulate", "v_half", *SHAPE, *options, "--per", "device"]
    assert main([str(arg) for arg in call]) == 0
    out, err = capsys.readouterr()
    assert "v_half" in out
    assert "layers" in err  # slow devices, or slow layers?
    line = fail(capsys, "simulate", "1f1b", *BASE, "--per", "stages")
    assert "unknown per 'stages'; did you mean 'stage'?" in line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert succeed(capsys, "--version") == f"pipesim {ps.__version__}\n"


@pytest.mark.parametrize("command", [[], ["simulate"], ["compare"], ["schedules"]])
def test_help(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    out = succeed(capsys, *command, "--help")
    assert out.startswith(" ".join(["usage: pipesim", *command]))
    if not command:
        assert succeed(capsys) == out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_complete(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It has a line or a word for each option; with the name of a group it has their texts."""
    lines = succeed(capsys, command, "--help").splitlines()
    assert len(lines) <= MOST_LINES
    assert all(len(line) <= 80 for line in lines)
    *_, commands = make_parser(COMMANDS, COMMANDS)._get_positional_actions()
    parser = commands.choices[command]  # type: ignore[index, call-overload]
    groups = [group for group in parser._action_groups if group._group_actions]
    everything = succeed(capsys, command, "--help", "all")
    for group in groups:
        text = succeed(capsys, command, "--help", group.title)
        assert text.startswith(f"{group.title}:")
        assert text in everything
        for action in group._group_actions:
            for flag in action.option_strings[:1]:
                assert flag in text.replace("[no-]", "")
                assert flag in "".join(lines).replace("[no-]", "")
            assert action.help is not None
            assert action.help.split()[-1].replace("%%", "%") in text
    assert "did you mean 'options'?" in fail(capsys, command, "--help", "option")


@pytest.mark.slow
def test_bash_completes_the_command() -> None:
    """Options, values that an annotation lists, and groups of the help."""
    script = """
        source <(python -m pipesim --completion bash)
        complete_words() {
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
            _shtab_pipesim
            echo "${COMPREPLY[@]}"
        }
        complete_words pipesim simu
        complete_words pipesim simulate --grad-s
        complete_words pipesim simulate --streams per_
        complete_words pipesim plan --help cho
        complete_words pipesim compare zb_
        complete_words pipesim plan mixtral
        complete_words pipesim plan llama3_8b --cluster dgx_h1
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "simulate",
        "--grad-sync",
        "per_peer per_microbatch",
        "choices",
        "zb_h1 zb_h2 zb_1p zb_2p",
        "mixtral_8x7b mixtral_8x22b",
        "dgx_h100",
    ]


def test_help_shows_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert PAGES["compare"]["file"] == succeed(capsys, "compare", "--help", "file")


# What the arguments mean: the same as those of the library.


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--recompute", "always"], {"recompute": "always"}),
        (["--recompute", "except_last"], {"recompute": "except_last"}),
        (["--no-overlap"], {"overlap": False}),
        (["--streams", "single"], {"streams": "single"}),
        (["--rendezvous"], {"rendezvous": True}),
        (["--step", "none"], {"step": "none"}),
    ],
    ids=lambda value: " ".join(value),
)
def test_flags_of_lower(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], options: dict[str, Any]
) -> None:
    """Each changes the timeline, and changes it as `lower` does."""
    path = tmp_path / "timeline.csv"
    succeed(capsys, "simulate", "1f1b", *SLOW, *flags, "--csv", path)
    schedule = ps.schedule("1f1b", 4, 8)
    assert same_times(
        ps.Timeline.load(path), ps.simulate(ps.lower(schedule, **options), SLOW_COSTS)
    )
    assert not same_times(ps.Timeline.load(path), ps.simulate(ps.lower(schedule), SLOW_COSTS))


def test_flags_of_hosts_and_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "timeline.csv"
    costs = ps.Costs(forward=1e-3, backward=2e-3, launch=1e-3)
    graph = ps.lower(ps.schedule("1f1b", 4, 8), hosts="per_device")
    succeed(capsys, "simulate", "1f1b", *BASE, "--launch", "1e-3", "--hosts", "per_device",
            "--engine", "simpy", "--csv", path)  # fmt: skip
    assert same_times(ps.Timeline.load(path), ps.simulate(graph, costs, engine="simpy"))
    succeed(capsys, "simulate", "1f1b", *BASE, "--launch", "1e-3", "--csv", path)
    assert not same_times(ps.Timeline.load(path), ps.simulate(graph, costs))


@pytest.mark.parametrize("left_out", ["backward", "input_grad"])
def test_every_cost_has_a_flag(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, left_out: str
) -> None:
    """Distinct values in every field, so that none could land in another's place."""
    names = [name for name, row in STAGE_ROWS.items() if not row.is_rare and name != left_out]
    values = {name: (k + 2) * 1e-3 for k, name in enumerate(names)}
    flags: list[object] = ["--latency", "1e-4", "--bandwidth", "10", "--recompute", "always"]
    for name, value in values.items():
        flag = SECONDS.get(name, name).replace("_", "-")
        flags += [f"--{flag}", f"{value},{value * 2}"]
    path = tmp_path / "timeline.csv"
    counts = ["--devices", 2, "--microbatches", 3]
    out = succeed(capsys, "simulate", "1f1b", *counts, *flags, "--csv", path)
    costs = ps.Costs(
        **{name: (value, value * 2) for name, value in values.items()},
        network=ps.Network(latency=1e-4, bandwidth=10),
    )
    expected = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 3), recompute="always"), costs)
    assert same_times(ps.Timeline.load(path), expected)
    peaks = [float(row[-1]) for row in rows(out)[-2:]]
    assert peaks == pytest.approx(expected.memory.peak / 2**30, abs=1e-9)


def test_option_goes_to_the_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "timeline.csv"
    option = ["--option", "backward_order=forward"]
    succeed(capsys, "simulate", "gpipe", *SLOW, *option, "--csv", path)
    schedule = ps.schedule("gpipe", 4, 8, backward_order="forward")
    assert same_times(ps.Timeline.load(path), ps.simulate(ps.lower(schedule), SLOW_COSTS))


def test_compare_gives_an_option_to_those_that_take_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1F1B takes no backward_order; GPipe does, and sees it."""
    names = ["compare", "gpipe", "1f1b"]
    assert "1f1b" in succeed(capsys, *names, *BASE, "--option", "backward_order=forward")
    err = fail(capsys, *names, *BASE, "--option", "backward_order=forwards")
    assert "gpipe: unknown backward_order 'forwards'; did you mean 'forward'?" in err


# What is written.


def test_csv_of_a_timeline_loads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "timeline.csv"
    succeed(capsys, "simulate", "1f1b", *BASE, "--csv", path)
    loaded = ps.Timeline.load(path)
    assert loaded.makespan == pytest.approx(33e-3)
    assert loaded.complete
    assert [file.name for file in tmp_path.iterdir()] == ["timeline.csv"]


def test_csv_of_a_comparison_is_in_seconds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    succeed(capsys, "compare", "gpipe", "1f1b", *BASE, "--activation-bytes", 10, "--csv", path)
    table = pd.read_csv(path, index_col="schedule")
    assert table.index.tolist() == ["gpipe", "1f1b"]
    np.testing.assert_allclose(table["makespan"], 33e-3)
    assert table["peak_memory"].tolist() == [80, 40]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "suffix", "magic"),
    [
        (["simulate", "1f1b"], "png", b"\x89PNG"),
        (["compare", "gpipe", "1f1b"], "pdf", b"%PDF"),
    ],
)
def test_plot_is_written(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: list[str],
    suffix: str,
    magic: bytes,
) -> None:
    path = tmp_path / f"figure.{suffix}"
    succeed(capsys, *command, *BASE, "--plot", path)
    assert path.read_bytes().startswith(magic)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_plot_of_a_comparison_has_one_scale_of_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bars on top, then a timeline a schedule; lengths can be compared between them."""
    figures: list[Figure] = []
    monkeypatch.setattr(pipesim.plot.paper_figure, "save", lambda figure, _: figures.append(figure))
    args = [*BASE, "--recompute", "except_last", "--latency", "1e-3"]
    succeed(capsys, "compare", "gpipe", "1f1b", *args, "--plot", tmp_path / "figure.png")
    *bars, first, second = figures[0].axes
    assert len(bars) == 2
    assert [ax.get_title(loc="left") for ax in (first, second)] == ["GPipe", "1F1B"]
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xlim()[1] >= 51.0


# What goes wrong.


BAD = {
    "unknown command": (["simulat"], "invalid choice: 'simulat'"),
    "no schedule": (["simulate", *BASE], "no schedule is named"),
    "unknown schedule": (["simulate", "1f1c", *BASE], "did you mean '1f1b'?"),
    "two schedules": (["simulate", "gpipe", "1f1b", *BASE], "use compare"),
    "the same twice": (["compare", "gpipe", "gpipe", *BASE], "give each a label"),
    "one of several": (["compare", "gpipe", "1f1c", *BASE], "1f1c: unknown schedule '1f1c'"),
    "unknown flag": (["simulate", "1f1b", *BASE, "--recompte", "x"], "did you mean '--recompute'?"),
    "abbreviated": (["schedules", "--device", "4"], "did you mean '--devices'?"),
    "no value": (["simulate", "1f1b", *BASE, "--csv"], "--csv: expected one argument"),
    "no devices": (["simulate", "1f1b", "--microbatches", "8"], "devices is missing"),
    "no microbatches": (["simulate", "1f1b", "--devices", "4"], "microbatches is missing"),
    "zero": (["simulate", "1f1b", *BASE, "--devices", "0"], "at least 1, got 0"),
    "negative": (["simulate", "1f1b", *BASE, "--microbatches", "-1"], "at least 1, got -1"),
    "fraction": (["simulate", "1f1b", *BASE, "--devices", "2.5"], "whole number, got 2.5"),
    "boolean": (["simulate", "1f1b", *BASE, "--devices", "true"], "whole number, got True"),
    "word": (["simulate", "1f1b", *BASE, "--devices", "four"], "whole number, got 'four'"),
    "too large": (
        ["simulate", "1f1b", *BASE, "--microbatches", "1" * 30],
        "use fewer micro-batches",
    ),
    "no forward": (["simulate", "1f1b", *SHAPE], "forward is missing"),
    "no backward": (["simulate", "1f1b", *SHAPE, "--forward", "1"], "backward is missing"),
    "nan": (["simulate", "1f1b", *BASE, "--forward", "nan"], "forward must be finite"),
    "inf": (["simulate", "1f1b", *BASE, "--backward", "inf"], "backward must be finite"),
    "below zero": (["simulate", "1f1b", *BASE, "--launch", "-1"], "launch must be finite"),
    "lengths": (["simulate", "1f1b", *BASE, "--forward", "1,2"], "2 values for 4 stages"),
    "hole": (["simulate", "1f1b", *BASE, "--forward", "1,,1,1"], "forward of stage 1"),
    "latency": (["simulate", "1f1b", *BASE, "--latency", "-1"], "latency must be"),
    "bandwidth": (["simulate", "1f1b", *BASE, "--bandwidth", "0"], "bandwidth must be > 0"),
    "recompute": (["simulate", "1f1b", *BASE, "--recompute", "alway"], "did you mean 'always'?"),
    "streams": (["simulate", "1f1b", *BASE, "--streams", "two"], "unknown streams 'two'"),
    "hosts": (["simulate", "1f1b", *BASE, "--hosts", "none"], "unknown hosts 'none'"),
    "engine": (["simulate", "1f1b", *BASE, "--engine", "simpi"], "did you mean 'simpy'?"),
    "option": (["simulate", "gpipe", *BASE, "--option", "order=x"], "takes no option 'order'"),
    "option form": (["simulate", "gpipe", *BASE, "--option", "order"], "form KEY=VALUE"),
    "count as option": (["simulate", "gpipe", *BASE, "--option", "n_devices=2"], "is no option"),
    "no costs file": (["simulate", "1f1b", *BASE, "--costs", "gone.json"], "costs from gone.json"),
    "no config": (["simulate", "--config", "gone.toml"], "cannot read settings from gone.toml"),
    "figure": (["simulate", "1f1b", *BASE, "--plot", "figure.doc"], "must end in .pdf, .png, .svg"),
    "schedules": (["schedules", "--devices", "0"], "at least 1, got 0"),
    "schedules of": (["schedules", "gpipe"], "unrecognized argument gpipe"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], case: str) -> None:
    args, message = BAD[case]
    assert message in fail(capsys, *args)


@pytest.mark.parametrize("command", [["simulate", "1f1b"], ["compare", "gpipe", "1f1b"]])
@pytest.mark.parametrize("flag", ["--csv", "--plot"])
@pytest.mark.parametrize("name", ["missing/out.png", "file/out.png", "folder.png"])
def test_unwritable_is_found_before_the_work(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    flag: str,
    name: str,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(
        pipesim.sweeps.settings, "predict_timeline", lambda *_, **__: pytest.fail("simulated first")
    )
    err = fail(capsys, *command, *BASE, flag, tmp_path / name)
    assert f"argument {flag}: cannot write" in err
    assert str(tmp_path / name) in err


def test_a_failure_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    outputs = ["--csv", tmp_path / "out.csv", "--plot", tmp_path / "out.png"]
    fail(capsys, "simulate", "1f1b", *BASE, "--forward", "nan", *outputs)
    assert list(tmp_path.iterdir()) == []


def test_long_errors_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """A deadlock's blocked heads stand on further lines, for which one asks."""
    args = ["simulate", "1f1b", *SLOW, "--no-overlap", "--rendezvous"]
    assert "deadlocks: 4 streams" in (err := fail(capsys, *args))
    assert "(--verbose shows all)" in err
    assert main([*args, "--verbose"]) == 2
    err = capsys.readouterr().err
    assert "  device 3, compute: 3SEND_B0 (position 3) waits for" in err
    assert "--verbose" not in err


PLAN = ["plan", "llama3_8b", "--cluster", "dgx_h100", "--gpus", "8", "--global-batch", "8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["simulate", "1f1b", *BASE], "sweeps.settings.predict_timeline"),
        (["compare", "1f1b", "gpipe", *BASE], "sweeps.settings.predict_timeline"),
        (["sweep", "1f1b", "gpipe", *BASE], "cli.commands.run_rows"),
        (["calibrate", "steps.csv", "--gpu", "h100"], "calibration.fit_gpu.measured_steps"),
        (PLAN, "planning.plan_evaluator.Evaluator.evaluate"),
        (PLAN, "planning.plan_search.refined"),
        (["demo-page"], "cli.page_commands.run"),
    ],
)
def test_ctrl_c_ends_every_command_with_130(
    arguments: list[str],
    place: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line says so, after the results that there are."""

    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"pipesim.{place}", interrupt)
    assert main(arguments) == 130
    assert re.fullmatch(r"pipesim: interrupted.*\n", capsys.readouterr().err)


# As a process.


def process(code: str) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that runs ``code``."""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow
def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """As with ``| head``: no traceback, and the file is written all the same."""
    path = tmp_path / "timeline.csv"
    args = ["simulate", "1f1b", *BASE, "--csv", str(path)]
    child = process(f"import sys; from pipesim.cli import main; sys.exit(main({args!r}))")
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=60) == 141
    assert err == b""
    assert path.exists()


@pytest.mark.slow
def test_a_mistake_ends_the_process_with_2() -> None:
    command = [sys.executable, "-m", "pipesim", "simulate", "1f1c", *BASE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
