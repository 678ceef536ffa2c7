"""Settings of ``pipesim compare`` from a file: tables, overrides, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from command_output import fail, rows, succeed

import pipesim as ps
import pipesim.plot.paper_figure
import pipesim.sweeps.settings
from pipesim.cli.help_texts import PAGES

# Settings from a file.

SHARED = """\
devices = 4
microbatches = 8
[costs]
forward = 1e-3
backward = 2e-3
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Where a test writes its TOML."""
    return tmp_path / "settings.toml"


def test_the_example_in_the_help_runs(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    """Each table's settings reach its schedule, and only that; the file of costs is read."""
    lines = PAGES["simulate"]["file"].splitlines()
    example = [line[2:] for line in lines if line.startswith("  ") or not line]
    config.write_text("\n".join(example))
    costs_in_file = ps.Costs(forward=9, backward=9, activation_bytes=2**30)
    costs_in_file.save(config.parent / "costs.json")
    costs = ps.Costs(
        forward=1e-3,
        backward=(2e-3, 2e-3, 2e-3, 3e-3),
        output_bytes=4 << 20,
        activation_bytes=2**30,
        network=ps.Network(latency=20e-6, bandwidth=25e9),
    )
    gpipe = ps.schedule("gpipe", 4, 8, backward_order="forward")
    expected = ps.compare(
        {
            "gpipe": ps.simulate(ps.lower(gpipe, recompute="always"), costs),
            "1f1b, all kept": ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8)), costs),
        },
        memory_limit=80 * 2**30,
    )
    path = config.parent / "table.csv"
    out = succeed(capsys, "compare", "--config", config, "--csv", path)
    table = pd.read_csv(path, index_col="schedule").astype(expected.dtypes)
    pd.testing.assert_frame_equal(table, expected, check_exact=True)
    assert "1f1b, all kept" in out


def test_arguments_override_the_file(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    """They override shared settings and tables' own, key by key, and the file's file of costs."""
    config.write_text(f'schedule = "1f1b"\nrecompute = "always"\noverlap = false\n{SHARED}')
    out = succeed(capsys, "simulate", "--config", config)
    assert ["makespan", "41.000", "ms"] in rows(out)  # 3 F, 8 (F + R + B), 3 B
    out = succeed(capsys, "simulate", "--config", config, "--recompute", "never", "--overlap",
                  "--devices", 2, "--forward", "2e-3")  # fmt: skip
    assert ["makespan", "36.000", "ms"] in rows(out)
    ps.Costs(forward=3e-3, backward=3e-3).save(config.parent / "costs.json")
    out = succeed(capsys, "simulate", "--config", config, "--costs", config.parent / "costs.json",
                  "--backward", "1e-3", "--recompute", "never")  # fmt: skip
    assert ["makespan", "44.000", "ms"] in rows(out)
    config.write_text(f'{SHARED}[[schedule]]\nname = "1f1b"\ndevices = 8\n')
    assert "2 devices" in succeed(capsys, "simulate", "--config", config, "--devices", 2)


def test_overlap_costs_compute_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Buckets of gradients slow the backwards that they hide behind, as with the API."""
    numbers = {"forward": 1.0, "backward": 2.0, "parameter_bytes": 1e11, "overlap_cost": 0.5}
    flags = [text for name in numbers for text in (f"--{name.replace('_', '-')}", numbers[name])]
    out = succeed(capsys, "simulate", "1f1b", "--devices", 2, "--microbatches", 4, "--replicas", 2,
                  "--grad-sync", "bucketed", "--bandwidth", 2e11, *flags)  # fmt: skip
    graph = ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=2, grad_sync="bucketed")
    step = ps.simulate(graph, ps.Costs(**numbers, network=ps.Network(bandwidth=2e11))).makespan
    free = ps.simulate(
        graph, ps.Costs(**{**numbers, "overlap_cost": 0.0}, network=ps.Network(bandwidth=2e11))
    ).makespan
    assert f"makespan     {1e3 * step:.0f} ms" in out
    assert step > free


def test_a_table_overrides_shared_settings(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    """Key by key: the second table keeps the shared backward."""
    config.write_text(
        SHARED + 'network = { latency = 0.0 }\n[[schedule]]\nname = "1f1b"\n[[schedule]]\n'
        'name = "1f1b"\nlabel = "slow"\ncosts = { forward = 2e-3, network = { bandwidth = 1e9 } }\n'
    )
    out = succeed(capsys, "compare", "--config", config)
    assert [row[:3] for row in rows(out)[1:]] == [
        ["1f1b", "33.000", "1.000"],
        ["slow", "44.000", "1.333"],
    ]


def test_names_pick_tables(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    """By label, by name, or else they name a schedule that the file does not."""
    config.write_text(
        SHARED + '[[schedule]]\nname = "1f1b"\nlabel = "one"\n[[schedule]]\nname = "1f1b"\n'
        'label = "two"\nmicrobatches = 16\n'
    )
    assert "two: 4" in succeed(capsys, "simulate", "two", "--config", config)
    out = succeed(capsys, "compare", "gpipe", "1f1b", "--config", config)
    assert [row[0] for row in rows(out)[1:]] == ["gpipe", "one", "two"]
    assert "got one, two" in fail(capsys, "simulate", "1f1b", "--config", config)


def test_links_of_pairs(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    """The file can say what arguments cannot: a link for some pairs."""
    config.write_text(SHARED + "[costs.network]\nlinks = [{ latency = 1.0, pairs = [[0, 1]] }]\n")
    out = succeed(capsys, "simulate", "gpipe", "--config", config)
    assert ["makespan", "1033.0", "ms"] in rows(out)


def test_nodes(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    """Ports and NICs, in numbers or as a machine's preset; an argument beside them is refused."""
    nodes = "devices_per_node = 1, nic_latency = 1.0"
    config.write_text(SHARED + f"[costs.network.nodes]\n{nodes.replace(', ', chr(10))}\n")
    out = succeed(capsys, "simulate", "gpipe", "--config", config, "--devices", 2)
    assert ["makespan", "2027.0", "ms"] in rows(out)  # 9 F and B of 1 and 2 ms, and both ways
    config.write_text(SHARED + 'network = { preset = "dgx_h100" }\n')
    assert "makespan" in succeed(capsys, "simulate", "gpipe", "--config", config)
    of_groups = 'network = { preset = "dgx_h100", gpus_per_device = 8, efficiency = 0.8 }'
    assert of_groups in PAGES["simulate"]["file"]
    sizes = (
        "devices = 2\nmicrobatches = 1\n[costs]\nforward = 1\nbackward = 2\noutput_bytes = 40e9\n"
    )
    config.write_text(sizes + of_groups)
    out = succeed(capsys, "simulate", "gpipe", "--config", config)
    assert ["makespan", "8000.0", "ms"] in rows(out)  # both messages at 0.8 of a NIC's 50 GB/s
    assert "leave out the one or the other" in fail(
        capsys, "simulate", "gpipe", "--config", config, "--latency", "1e-6"
    )


BAD_TOML = {
    "malformed": ("devices = 4\nmicrobatches = \n", "(at line 2, column"),
    "unknown key": ("device = 4", "unknown key 'device'; did you mean 'devices'?"),
    "unknown cost": ("[costs]\nfoward = 1", "costs: unknown key 'foward'; did you mean 'forward'?"),
    "unknown of network": ("costs.network.latncy = 1", "did you mean 'latency'?"),
    "efficiency of no machine": (
        'schedule = "gpipe"\n' + SHARED + "network.efficiency = 0.8",
        "efficiency without a preset",
    ),
    "GPUs that do not divide": (
        'schedule = "gpipe"\n' + SHARED + 'network = { preset = "dgx_h100", gpus_per_device = 3 }',
        "gpus_per_device must divide the 8 GPUs",
    ),
    "unknown of nodes": ("costs.network.nodes.n_nic = 1", "did you mean 'n_nics'?"),
    "nodes of wrong kind": ("costs.network.nodes = 8", "costs.network.nodes must be a table"),
    "unknown machine": (
        'schedule = "gpipe"\n' + SHARED + 'network.preset = "dgx_h10"',
        "did you mean 'dgx_h100'?",
    ),
    "unknown of schedule": ('[[schedule]]\nnam = "x"', "schedule 1: unknown key 'nam'; did you me"),
    "nameless": ("[[schedule]]\ndevices = 4", "schedule 1 has no name"),
    "name of wrong kind": ("[[schedule]]\nname = [4]", "schedule 1 has no name"),
    "schedule of wrong kind": ("schedule = 3", "schedule 1 must be a table"),
    "costs of wrong kind": ("costs = 3", "costs must be a table"),
    "network of wrong kind": ("costs.network = 3", "costs.network must be a table"),
    "options of wrong kind": ("options = 3", "options must be a table"),
    "no file of costs": ('costs.file = "gone.json"', "gone.json"),
    "no bool": ('overlap = "no"\nschedule = "gpipe"\n' + SHARED, "overlap must be True or False"),
    "bool as time": ('schedule = "gpipe"\n' + SHARED + "launch = true", "launch must be finite"),
    "unknown schedule": ('schedule = ["gpipe", "1f1c"]\n' + SHARED, "did you mean '1f1b'?"),
    "foreign option": (
        SHARED + '[[schedule]]\nname = "gpipe"\n'
        '[[schedule]]\nname = "1f1b"\noptions = { backward_order = "forward" }',
        "1f1b: schedule '1f1b' takes no option 'backward_order'",
    ),
}


@pytest.mark.parametrize("case", BAD_TOML)
def test_bad_files(capsys: pytest.CaptureFixture[str], config: Path, case: str) -> None:
    text, message = BAD_TOML[case]
    config.write_text(text)
    assert message in fail(capsys, "compare", "--config", config)


def test_not_utf8(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    config.write_bytes(b"\xff")
    err = fail(capsys, "compare", "--config", config)
    assert f"cannot read settings from {config}: 'utf-8'" in err
