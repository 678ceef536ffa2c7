"""Named schedules: valid, as their closed forms say, as published, and as drawn by hand."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import longest_span, published

import pipesim as ps
from pipesim.errors import ArgumentError, CapacityError, UnknownNameError
from pipesim.ops import Op, Overlapped
from pipesim.scheduling.registry import _REGISTRY, schedule_info

NAMES = sorted(_REGISTRY)
#: A second a forward and a gradient; B is both gradients. A byte an activation of a stage, which is
#: held until W.
UNIT = {
    "forward": 1,
    "backward": 2,
    "input_grad": 1,
    "weight_grad": 1,
    "activation_bytes": 1,
    "weight_grad_bytes": 1,
}
#: Values that are tried for an option besides its default.
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "n_chunks": st.integers(1, 3),
    "n_waves": st.integers(1, 2),
    "merged": st.sampled_from([True, "delayed_w"]),
}

whole_seconds = st.integers(1, 9)


def simulated(schedule: ps.Schedule, **costs: Any) -> ps.Timeline:
    """Return the run of a schedule without optimizer steps, at unit costs where none are given."""
    return ps.simulate(ps.lower(schedule, step="none"), ps.Costs(**{**UNIT, **costs}))


@st.composite
def sizes(draw: st.DrawFn, name: str, most: int = 7) -> tuple[int, int, dict[str, Any]]:
    """Numbers of devices and micro-batches that a schedule takes, and options."""
    info = schedule_info(name)
    options = {
        option: draw(values)
        for option, values in OPTIONS.items()
        if option in info.options and draw(st.booleans())
    }
    allowed = [
        (p, m) for p in range(1, most) for m in range(1, 2 * most) if info.allows(p, m, **options)
    ]
    return *draw(st.sampled_from(allowed)), options


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_closed_forms_hold(name: str, data: st.DataObject) -> None:
    """Every registered schedule is valid, and does what the table of schedules says."""
    p, m, options = data.draw(sizes(name))
    info, schedule = schedule_info(name), ps.schedule(name, p, m, **options)
    ps.verify(schedule)
    timeline, chunks = simulated(schedule), schedule.n_stages / p
    bubble = info.bubble.of(p, m, **options)
    activations = info.activations.of(p, m, **options)
    held = timeline.memory.peak.max() / chunks
    assert 0 <= timeline.bubble_fraction < 1
    assert 1 / chunks <= held <= m
    if info.bubble.exact:
        assert timeline.bubble_fraction == bubble
    if info.activations.exact:
        assert held == activations
    stages = [len(schedule.placement.stages_of(device)) for device in range(p)]
    if info.parameters.exact and schedule.weight_versions == "one":
        assert max(stages) / chunks == info.parameters.of(p, m, **options)


@pytest.mark.parametrize("name", NAMES)
def test_closed_forms_are_numbers(name: str) -> None:
    """For every count that the schedule takes, and they say what they are."""
    info = schedule_info(name)
    sizes = [(p, m) for p in range(1, 9) for m in range(1, 25) if info.allows(p, m)]
    for form in (info.bubble, info.activations, info.parameters):
        assert form.text
        assert not any(math.isnan(form.of(p, m)) for p, m in sizes)


DRAWN = {
    "naive(2, 2)": """
        0 | F0 .. .. .. B0 B0 F1 .. .. .. B1 B1
        1 | .. F0 B0 B0 .. .. .. F1 B1 B1 .. ..
    """,
    "naive(2, 1, n_chunks=2)": """
        0 | 0F0 ..  2F0 ..  ..  ..  2B0 2B0 ..  ..  0B0 0B0
        1 | ..  1F0 ..  3F0 3B0 3B0 ..  ..  1B0 1B0 ..  ..
    """,
    "naive(1, 2, n_chunks=2)": """
        0 | 0F0 1F0 1B0 1B0 0B0 0B0 0F1 1F1 1B1 1B1 0B1 0B1
    """,
    "1f1b(2, 3, merged=True)": """
        0 | F0 F1 F2 .. .. B0 B0 .. B1 B1 B2 B2
        1 | .. F0 F1 B0 B0 F2 B1 B1 B2 B2 .. ..
    """,
    "1f1b(2, 4, merged='delayed_w')": """
        0 | F0 F1 F2 .. F3 I0 W0 I1 W1 .. I2 W2 I3 W3
        1 | .. F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3 ..
    """,
    "eager_1f1b(3, 2)": """
        0 | F0 F1 .. .. .. .. .. B0 B0 .. B1 B1
        1 | .. F0 F1 .. .. B0 B0 .. B1 B1 .. ..
        2 | .. .. F0 B0 B0 F1 B1 B1 .. .. .. ..
    """,
    "interleaved_1f1b(2, 2)": """
        0 | 0F0 0F1 2F0 2F1 ..  ..  2B0 2B0 ..  2B1 2B1 0B0 0B0 0B1 0B1
        1 | ..  1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1B0 1B0 1B1 1B1 ..  ..
    """,
    "interleaved_1f1b(2, 2, merged=True)": """
        0 | 0F0 0F1 2F0 2F1 ..  ..  ..  2B0 2B0 2B1 2B1 0B0 0B0 0B1 0B1
        1 | ..  1F0 1F1 3F0 3F1 3B0 3B0 3B1 3B1 1B0 1B0 1B1 1B1 ..  ..
    """,
    "looped_bfs(2, 1, n_chunks=3)": """
        0 | 0F0 ..  2F0 ..  4F0 ..  ..  ..  4B0 4B0 ..  ..  2B0 2B0 ..  ..  0B0 0B0
        1 | ..  1F0 ..  3F0 ..  5F0 5B0 5B0 ..  ..  3B0 3B0 ..  ..  1B0 1B0 ..  ..
    """,
    "interleaved_zb(2, 1)": """
        0 | 0F0 ..  2F0 ..  ..  2I0 2W0 0I0 0W0
        1 | ..  1F0 ..  3F0 3I0 ..  1I0 3W0 1W0
    """,
    "gis(2, 2, group_size=1)": """
        0 | 0F0 ..  2F0 0F1 ..  2I0 2W0 2F1 0I0 0W0 ..  2I1 2W1 0I1 0W1
        1 | ..  1F0 ..  3F0 3I0 3W0 1F1 1I0 1W0 3F1 3I1 3W1 1I1 1W1 ..
    """,
    "encoder_first(2, 2)": """
        0 | 0F0 0F1 2F0 2F1 ..  ..  2B0 2B0 ..  2B1 2B1 0B0 0B0 0B1 0B1
        1 | ..  1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1B0 1B0 1B1 1B1 ..  ..
    """,
    "encoder_nested(2, 3)": """
        0 | 0F0 0F1 2F0 0F2 2F1 ..  2B0 2B0 2F2 ..  2B1 2B1 0B0 0B0 ..  2B2 2B2 0B1 0B1 0B2 0B2
        1 | ..  1F0 1F1 3F0 3B0 3B0 1F2 3F1 3B1 3B1 1B0 1B0 3F2 3B2 3B2 1B1 1B1 1B2 1B2 ..  ..
    """,
    "zb_h1(2, 2)": """
        0 | F0 F1 .. I0 W0 I1 W1
        1 | .. F0 I0 F1 I1 W0 W1
    """,
    "zb_h1(3, 1)": """
        0 | F0 .. .. .. .. I0 W0
        1 | .. F0 .. .. I0 W0 ..
        2 | .. .. F0 I0 W0 .. ..
    """,
    "zb_h2(2, 4)": """
        0 | F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 ..
        1 | .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """,
    "zbv(2, 1)": """
        0 | 0F0 ..  ..  3F0 3I0 3W0 ..  ..  0I0 0W0
        1 | ..  1F0 2F0 ..  ..  2I0 2W0 1I0 1W0 ..
    """,
    "dualpipev(1, 2)": """
        0 | 0F0 1F0 0F1 1B0 1B0 1F1 0B0 0B0 1B1 1B1 0I1 0W1
    """,
    "hanayo(2, 1)": """
        0 | 0F0 ..  ..  3F0 3B0 3B0 ..  ..  ..  ..  0B0 0B0
        1 | ..  1F0 2F0 ..  ..  ..  2B0 2B0 1B0 1B0 ..  ..
    """,
    "hanayo(1, 2, n_waves=2)": """
        0 | 0F0 1F0 2F0 3F0 3B0 3B0 0F1 2B0 2B0 1F1 1B0 1B0 2F1 0B0 0B0 3F1 3B1 3B1 2B1 2B1 1B1 1B1 0B1 0B1
    """,  # noqa: E501 - a drawing
}


@pytest.mark.parametrize("call", DRAWN)
def test_small_cases_are_as_drawn(call: str) -> None:
    """By hand, B twice as long as F; docstrings draw larger cases."""
    name, arguments = call.rstrip(")").split("(")
    parts = [part.split("=") for part in arguments.split(", ")]
    counts = [int(part[0]) for part in parts if len(part) == 1]
    options = {part[0]: ast.literal_eval(part[1]) for part in parts if len(part) == 2}
    timeline = simulated(ps.schedule(name, *counts, **options))
    assert draw(timeline, transfers=False) == grid(DRAWN[call])


@pytest.mark.parametrize(
    ("name", "options", "same"),
    [
        ("interleaved_1f1b", {"n_chunks": 1}, "eager_1f1b"),
        ("interleaved_zb", {"n_chunks": 1}, "zb_h1"),
        ("looped_bfs", {"n_chunks": 1}, "gpipe"),
    ],
)
@given(data=st.data())
def test_one_chunk_is_a_simpler_schedule(
    name: str, options: dict[str, int], same: str, data: st.DataObject
) -> None:
    """Interleaving one stage a device is no interleaving."""
    p, m, _ = data.draw(sizes(name))
    assert ps.schedule(name, p, m, **options) == ps.schedule(same, p, m)


@given(p=st.integers(1, 5), m=st.integers(1, 12), f=whole_seconds, b=whole_seconds)
def test_eager_1f1b_hides_latency(p: int, m: int, f: int, b: int) -> None:
    """A message as long as the shorter task costs the pipeline's depth, whatever m is."""
    network = ps.Network(latency=min(f, b))
    eager = simulated(ps.schedule("eager_1f1b", p, m), forward=f, backward=b, network=network)
    assert eager.makespan == (m + p - 1) * (f + b) + 2 * (p - 1) * min(f, b)


@pytest.mark.parametrize("name", ["encoder_first", "encoder_nested"])
@given(p=st.integers(1, 5), more=st.integers(0, 12), seconds=st.tuples(*[whole_seconds] * 4))
def test_encoders_cost_the_bubble_of_the_slower_module(
    name: str, p: int, more: int, seconds: tuple[int, ...]
) -> None:
    """F and B of an encoder and of a language model, of any length."""
    m, (own_f, own_b, f, b) = p + more, seconds
    costs = {"forward": [own_f] * p + [f] * p, "backward": [own_b] * p + [b] * p}
    costs |= {"input_grad": None, "weight_grad": None}
    step = simulated(ps.schedule(name, p, m), **costs).makespan
    assert step == m * sum(seconds) + (p - 1) * (max(own_f, f) + max(own_b, b))


TABLE_5 = published("zb_table5_bubble_rates")
STRICT = published("zb_1f1bi_strict")
ROWS = list(zip(TABLE_5["inputs"]["rows"], TABLE_5["expected"], strict=True))


def bubble_rate(schedule: ps.Schedule, row: dict[str, Any]) -> float:
    """Return the idle share of the longest span, as arXiv 2401.10241 counts it, to 4 decimals."""
    chunks = schedule.n_stages // schedule.n_devices
    micro = 1e-6
    span = longest_span(
        simulated(
            schedule,
            forward=row["TF_us"] * micro / chunks,
            backward=None,
            input_grad=row["TB_us"] * micro / chunks,
            weight_grad=row["TW_us"] * micro / chunks,
            network=ps.Network(latency=row["Tcomm_us"] * micro),
        )
    )
    work = row["m"] * (row["TF_us"] + row["TB_us"] + row["TW_us"]) * micro
    return round((span - work) / span, 4)


@pytest.mark.parametrize(("name", "column"), [("zb_h1", "ZB-H1"), ("zb_h2", "ZB-H2")])
@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_published_zero_bubble_rates(
    name: str, column: str, row: dict[str, Any], expected: dict[str, float]
) -> None:
    """Zero Bubble (2401.10241), Table 5: messages are pure latency."""
    assert bubble_rate(ps.schedule(name, row["p"], row["m"]), row) == expected[column]


@pytest.mark.parametrize(
    ("row", "expected"), list(zip(STRICT["inputs"]["rows"], STRICT["expected"], strict=True))
)
def test_interleaved_1f1b_with_every_dependency(
    row: dict[str, Any], expected: dict[str, float]
) -> None:
    """Its rates on the same profiles, with the latency of every edge between devices."""
    schedule = ps.schedule("interleaved_1f1b", row["p"], row["m"], n_chunks=row["v_interleaved"])
    assert bubble_rate(schedule, row) == expected["strict_1F1B_I"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weights"), [("zb_h1", 1), ("zb_h2", 2)])
@given(data=st.data(), p=st.integers(1, 5), w=whole_seconds)
def test_published_zero_bubble_formulas(
    name: str, weights: int, data: st.DataObject, p: int, w: int
) -> None:
    """Zero Bubble, section 2: idle time where W is the shortest; what each device holds."""
    f, i = (data.draw(st.integers(w, 9)) for _ in range(2))
    m = data.draw(st.integers(2 * p, 3 * p + 2))
    timeline = simulated(
        ps.schedule(name, p, m),
        forward=f,
        backward=None,
        input_grad=i,
        weight_grad=w,
        activation_bytes=7,
        weight_grad_bytes=3,
    )
    idle = longest_span(timeline) - m * (f + i + w)
    assert idle == (p - 1) * (f + i - weights * w)
    assert timeline.memory.peak.tolist() == [
        (weights * (p - 1 - d) + 1) * 7 + weights * d * 3 for d in range(p)
    ]


@given(p=st.integers(1, 4), v=st.integers(1, 3), f=whole_seconds, i=whole_seconds, w=whole_seconds)
def test_published_table_of_pipeoffload(p: int, v: int, f: int, i: int, w: int) -> None:
    """Table 1 of arXiv 2503.01328 for GIS and GIS-H, whose formula holds for W as long as I."""
    p *= 2
    seconds = {"forward": f, "backward": None, "input_grad": i, "weight_grad": w}
    timeline = simulated(ps.schedule("gis", p, p, n_chunks=v), **seconds)
    assert timeline.memory.peak.max() == v * p  # chunks of M = p stages
    assert timeline.makespan - v * p * (f + i + w) == (p - 1) * (f + i)
    f, w = min(f, 2 * i), i
    seconds = {"forward": f, "backward": None, "input_grad": i, "weight_grad": w}
    timeline = simulated(ps.schedule("gis_h", p, p, n_chunks=v), **seconds)
    assert timeline.memory.peak.max() == (v + 1) * p / 2
    idle = (p - 1) * (f + i) + (v - 1) * p / 2 * (f + i - w)
    assert timeline.makespan - v * p * (f + i + w) == idle


@given(p=st.integers(1, 4), v=st.integers(1, 3), data=st.data())
def test_groups_of_pipeoffload(p: int, v: int, data: st.DataObject) -> None:
    """Any size of groups: ``g(v-1) + d`` activations, ``(d-g)(v-1)`` more bubbles (ibid.)."""
    g = data.draw(st.integers((p + 1) // 2, p))
    timeline = simulated(ps.schedule("gis", p, 3 * g, n_chunks=v, group_size=g))
    assert timeline.memory.peak.max() == min(g * (v - 1) + p, 3 * g * v)
    assert timeline.makespan - 9 * g * v == 2 * (p - 1) + (p - g) * (v - 1)


@pytest.mark.parametrize("size", [1, 5])
def test_groups_that_are_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match=r"group_size must be 2\.\.4 for 4 devices, got "):
        ps.schedule("gis", 4, 20, group_size=size)


def published_order(p: int, m: int, v: int, g: int, warm_up: int, merged: bool) -> list[str]:
    """Return an order of Megatron-LM, or of Victarry's page, from their rules, on one device.

    Forwards go group by group, and in a group chunk by chunk; backwards too, last chunk first.
    After the warm-up, forwards and backwards alternate, or run as pairs.
    """
    forwards: list[tuple[int, int]] = []
    for first in range(0, m, g):
        group = range(first, min(first + g, m))
        forwards += [(chunk, microbatch) for chunk in range(v) for microbatch in group]
    backwards = [(v - 1 - chunk, microbatch) for chunk, microbatch in forwards]
    texts = [f"{chunk}F{j}" for chunk, j in forwards[:warm_up]]
    for (f, j), (b, k) in zip(forwards[warm_up:], backwards, strict=False):
        texts += [f"({f}F{j};{b}B{k})OVERLAP_F_B"] if merged else [f"{f}F{j}", f"{b}B{k}"]
    return texts + [f"{chunk}B{j}" for chunk, j in backwards[len(forwards[warm_up:]) :]]


@given(p=st.integers(1, 4), v=st.integers(1, 3), merged=st.booleans(), data=st.data())
def test_orders_of_megatron_and_victarry(p: int, v: int, merged: bool, data: st.DataObject) -> None:
    """``get_pp_rank_microbatches`` and ``get_schedule_table`` of Megatron-LM, groups of any size.

    Merged orders with groups of ``p`` are also those of "interleaved with overlap" and, for one
    chunk, "1F1B with overlap" of github.com/Victarry/PP-Schedule-Visualization.
    """
    g = data.draw(st.integers(p, 2 * p + 1))
    m = g * data.draw(st.integers(1, 3)) + data.draw(st.sampled_from([0, *range(p, g)]))
    schedule = ps.schedule("interleaved_1f1b", p, m, n_chunks=v, group_size=g, merged=merged)
    for device, order in enumerate(schedule.orders):
        warm_up = min(2 * (p - device - 1) + (v - 1) * g + merged, m * v)
        expected = published_order(p, m, v, g, warm_up, merged)
        assert [re.sub(r"\d+(?=[FB]\d)", lambda x: str(int(x[0]) // p), str(a)) for a in order] == (
            expected
        )
    if v == 1 and merged:
        assert schedule == ps.schedule("1f1b", p, m, merged=True)
    timeline, form = simulated(schedule), schedule_info("interleaved_1f1b")
    options = {"n_chunks": v, "group_size": g, "merged": merged}
    assert timeline.bubble_fraction == form.bubble.of(p, m, **options)
    assert timeline.memory.peak.max() / v == form.activations.of(p, m, **options)


@given(p=st.integers(1, 4), v=st.integers(1, 3), rounds=st.integers(1, 3), both=st.integers(2, 9))
def test_seconds_of_merged_pairs(p: int, v: int, rounds: int, both: int) -> None:
    """Pairs fill the steady state of the last device; F and B of 3 s are alone elsewhere."""
    m, alone = rounds * p, ((v - 1) * p + 1) * (3 - both) + 3 * (p - 1)
    timeline = simulated(
        ps.schedule("interleaved_1f1b", p, m, n_chunks=v, merged=True), overlapped=both
    )
    assert timeline.makespan == pytest.approx(v * m * both + alone)


def test_delayed_w_follow_their_pairs() -> None:
    """W of a micro-batch comes right after its I, which is half of a pair but in the cool-down."""
    schedule = ps.schedule("interleaved_1f1b", 2, 4, merged="delayed_w")
    whole = ps.schedule("interleaved_1f1b", 2, 4, merged=True)
    without = schedule.op != Op.W
    assert (schedule.op[without] == np.where(whole.op == Op.B, Op.I, whole.op)).all()
    assert whole.overlapped is not None
    assert schedule.overlapped is not None
    assert (schedule.overlapped[without] == whole.overlapped).all()
    (w,) = np.nonzero(~without)
    assert (schedule.op[w - 1] == Op.I).all()
    assert (schedule.microbatch[w - 1] == schedule.microbatch[w]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 3}, "from p to m, any whose remainder .* group_size=3"),
        ({"group_size": 13}, "group_size, from p to m"),
        ({"group_size": 5}, "remainder m % group_size is 0 or at least p"),  # 12 % 5 == 2
        ({"group_size": "5"}, "group_size must be a whole number"),
        ({"merged": "delay"}, 'merged must be False, True, or "delayed_w"'),
    ],
)
def test_groups_and_pairs_that_are_refused(options: dict[str, Any], message: str) -> None:
    """Groups as Megatron-LM refuses them."""
    with pytest.raises(ArgumentError, match=message):
        ps.schedule("interleaved_1f1b", 4, 12, **options)


@given(p=st.integers(1, 5), more=st.integers(0, 6))
def test_zbv_idles_only_before_and_after(p: int, more: int) -> None:
    """With F, I and W of one length, and 2p - 1 micro-batches or more."""
    m = 2 * p - 1 + more
    assert longest_span(simulated(ps.schedule("zbv", p, m))) == 6 * m


DUALPIPE = published("dualpipe")["expected"]["unit_time_makespan_F1_I1_W1_FB3"]["DualPipeV"]


@pytest.mark.parametrize("row", DUALPIPE, ids=lambda row: f"p{row['ranks']}-m{row['M']}")
def test_published_dualpipev_makespans(row: dict[str, int]) -> None:
    """An overlapped pair lasts as long as F, I and W."""
    timeline = simulated(ps.schedule("dualpipev", row["ranks"], row["M"]), overlapped=3)
    assert timeline.makespan == row["makespan"]
    assert timeline.busy.tolist() == [row["busy"]] * row["ranks"]


@given(data=st.data(), p=st.integers(1, 4), w=whole_seconds)
def test_published_dualpipev_bubble(data: st.DataObject, p: int, w: int) -> None:
    """(PP/2-1)(F&B + B - 3W) for PP = 2p stages (DualPipe's README), where F = I >= W."""
    f = data.draw(st.integers(w, 9))
    both = data.draw(st.integers(f + w, 2 * f + w))
    m = data.draw(st.integers(2 * p, 3 * p + 1))
    times = {"forward": f, "backward": f + w, "input_grad": f, "weight_grad": w}
    timeline = simulated(ps.schedule("dualpipev", p, m), **times, overlapped=both)
    b = f + w
    # The halves of a pair share its time, not in whole seconds.
    assert timeline.idle.max() == pytest.approx((p - 1) * (both + b - 3 * w), abs=1e-9)


def test_dualpipev_overlaps() -> None:
    """Each device overlaps the F of a chunk with the B of its other one."""
    schedule = ps.schedule("dualpipev", 3, 8)
    overlaps = [[a for a in order if isinstance(a, Overlapped)] for order in schedule.orders]
    for device, pairs in enumerate(overlaps):
        assert {pair.forward.stage + pair.backward.stage for pair in pairs} == {5}
        # Two in each round of the steady state, one in each round after it; the last device's
        # first B has no message to hide.
        assert len(pairs) == 2 * (8 - 6 + device + 1) + (2 - device) - (device == 2)


@given(p=st.integers(1, 6), m=st.integers(1, 12))
def test_hanayo_with_one_wave(p: int, m: int) -> None:
    """Its formulas are exact; with m = p the bubble is Chimera's (2107.06925) for 2p stages."""
    info, timeline = schedule_info("hanayo"), simulated(ps.schedule("hanayo", p, m))
    assert timeline.bubble_fraction == info.bubble.of(p, m)
    assert timeline.memory.peak.max() / 2 == info.activations.of(p, m)
    depth = 2 * p
    forwards, backwards = depth, 2 * depth - 2  # on the longest path of Chimera, section 3.3
    square = simulated(ps.schedule("hanayo", p, p))
    assert square.makespan == forwards + 2 * backwards


@given(p=st.integers(1, 5), m=st.integers(1, 10), waves=st.integers(2, 4))
def test_hanayo_with_more_waves(p: int, m: int, waves: int) -> None:
    """Not below its bound, nor above the bubble of 1F1B; a little more memory than one wave's."""
    info = schedule_info("hanayo")
    timeline = simulated(ps.schedule("hanayo", p, m, n_waves=waves))
    assert info.bubble.of(p, m, n_waves=waves) <= timeline.bubble_fraction + 1e-12
    assert timeline.bubble_fraction <= schedule_info("1f1b").bubble.of(p, m) + 1e-12
    assert timeline.memory.peak.max() / (2 * waves) <= 1.1 * info.activations.of(p, m)


@pytest.mark.parametrize(
    ("name", "p", "m", "message"),
    [
        ("interleaved_1f1b", 2, 5, r"takes numbers of micro-batches that max\(1, m // p\) rounds"),
        ("interleaved_zb", 2, 5, r"multiples of p.*; got n_devices=2, n_microbatches=5"),
        ("dualpipev", 2, 3, "takes at least 2p micro-batches; got n_devices=2, n_microbatches=3"),
    ],
)
def test_counts_that_have_no_order(name: str, p: int, m: int, message: str) -> None:
    """Refused by name, with what is allowed."""
    with pytest.raises(ArgumentError, match=message):
        ps.schedule(name, p, m)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("interleaved_1f1b", "n_chunks"),
        ("interleaved_zb", "n_chunks"),
        ("looped_bfs", "n_chunks"),
        ("naive", "n_chunks"),
        ("hanayo", "n_waves"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "2", np.nan])
def test_bad_options(name: str, option: str, value: Any) -> None:
    """Numbers of chunks and waves are counts; huge ones are refused before they are built."""
    with pytest.raises(ArgumentError, match=f"{option} must be"):
        ps.schedule(name, 2, 2, **{option: value})
    with pytest.raises(CapacityError, match=f"schedule '{name}' of .* actions needs"):
        ps.schedule(name, 2, 2, **{option: 10**15})
    with pytest.raises(UnknownNameError, match=f"did you mean '{option}'"):
        ps.schedule(name, 2, 2, **{f"{option}s": 2})
