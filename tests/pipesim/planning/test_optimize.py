"""`optimize`: never worse than a named schedule, within limits, the same each time, executable."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
from html_cells import tables_of

import pipesim as ps
from pipesim.errors import ArgumentError, CostsWarning, PipeError, UnknownNameError
from pipesim.order_search import LocalSearch, evaluate, keeps_limit, lane_order, order_problem
from pipesim.planning import OptimizedSchedule, optimize_search
from pipesim.planning.first_orders import first_orders, named_orders, sequential_order
from pipesim.planning.optimize_search import Effort, can_prove, fewer_microbatches, unrolled
from pipesim.simulation import LogNormal

PLACEMENTS = [
    ps.Placement.linear(3),
    ps.Placement.looped(2, 2),
    ps.Placement.v_shaped(2),
    ps.Placement.waves(2, 2),
    ps.Placement.bidirectional(2),
]


def uneven(placement, split, seed=0, **more):
    """Return costs with random whole seconds for each stage, and a unit of activations."""
    rng = np.random.default_rng(seed)
    names = ("input_grad", "weight_grad") if split else ("backward",)
    seconds = {k: tuple(map(float, rng.integers(5, 15, placement.n_stages))) for k in names}
    forward = tuple(map(float, rng.integers(5, 15, placement.n_stages)))
    held = {"activation_bytes": 1.0, "weight_grad_bytes": 1.0}
    return ps.Costs(forward=forward, **seconds, **(held | more))


def named(placement, m, costs, limit, split):
    """Yield the named schedules of a placement that keep the limit, with their makespans."""
    for name in ps.schedules().index:
        for options in ({}, {"costs": costs}, {"n_chunks": 2}, {"n_waves": 2}):
            try:
                schedule = ps.schedule(name, placement.n_devices, m, **options)
            except PipeError:
                continue
            is_split = ps.Op.W in schedule.op
            if schedule.n_slices > 1 or schedule.placement != placement or is_split != split:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                timeline = ps.simulate(ps.lower(schedule), costs, memory_limit=limit)
            if timeline.memory.fits and schedule.overlapped is None and schedule.n_batches == 1:
                yield timeline.makespan


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("split", [False, True])
def test_orders_beat_named_schedules_and_run(placement, split):
    """Both engines take the makespan that the result says, the limit is kept, the bound holds."""
    costs = uneven(placement, split, network=ps.Network(latency=1), optimizer_step=2)
    limit = 2.0 * placement.n_stages
    schedule = ps.optimize(placement, 6, costs, limit, evaluations=300, progress=False)
    ps.verify(schedule)
    for engine in ("compiled", "simpy"):
        timeline = ps.simulate(ps.lower(schedule), costs, engine=engine, memory_limit=limit)
        assert timeline.makespan == schedule.makespan == schedule.value
        assert timeline.memory.fits
    assert schedule.lower_bound <= schedule.makespan <= schedule.first_value
    assert all(schedule.makespan <= other for other in named(placement, 6, costs, limit, split))
    assert schedule.gap == pytest.approx(schedule.makespan / schedule.lower_bound - 1)


def test_start_that_meets_the_bound_is_returned_at_once():
    """With equal stages 1F1B is optimal: no move is tried."""
    schedule = ps.optimize(
        ps.Placement.linear(4), 8, ps.Costs(forward=1, backward=2), progress=False
    )
    assert (schedule.makespan, schedule.lower_bound, schedule.gap) == (33.0, 33.0, 0.0)
    assert schedule.proved
    assert schedule.evaluations == 0


def test_same_seed_and_evaluations_same_order():
    placement = ps.Placement.linear(4)
    costs = uneven(placement, True, seed=3)
    orders = [
        ps.optimize(placement, 8, costs, 4, evaluations=500, seed=seed, progress=False)
        for seed in (1, 1)
    ]
    assert orders[0] == orders[1]
    assert orders[0].lower_bound == orders[1].lower_bound


def test_span_is_what_a_timeline_says():
    """The span is at most that of the order with the least makespan."""
    placement = ps.Placement.linear(3)
    costs = uneven(placement, True, seed=1)
    options = {"evaluations": 500, "progress": False}
    schedule = ps.optimize(placement, 6, costs, 3, objective="span", **options)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    tasks = [timeline.graph.device == d for d in range(3)]
    spans = [timeline.end[x].max() - timeline.start[x].min() for x in tasks]
    assert schedule.span == max(spans)
    assert schedule.value == schedule.span
    assert (
        schedule.lower_bound <= schedule.span <= ps.optimize(placement, 6, costs, 3, **options).span
    )


def test_result_is_a_schedule(tmp_path):
    """Names, files and further steps work as for any schedule."""
    placement = ps.Placement.linear(3)
    costs = uneven(placement, False)
    schedule = ps.optimize(placement, 4, costs, evaluations=50, progress=False, name="mine")
    assert schedule.name == "mine"
    other = schedule.with_name("other")
    assert isinstance(other, OptimizedSchedule)
    assert other.makespan == schedule.makespan
    schedule.save(tmp_path / "order.csv")
    assert ps.Schedule.load(tmp_path / "order.csv") == schedule
    assert "makespan" in repr(schedule)


def test_result_shows_its_bound_above_the_order():
    """Objective, where the search started, and lower bound; then the table of a schedule."""
    placement = ps.Placement.linear(3)
    optimized = ps.optimize(placement, 4, uneven(placement, False), evaluations=50, progress=False)
    schedule = replace(optimized, makespan=22.0, lower_bound=20.0, proved=False, first_value=25.0,
                       first_schedule="<script>", evaluations=1234, seconds=0.5)  # fmt: skip
    html = schedule._repr_html_()
    bounds, order = tables_of(html)
    assert bounds == [
        ["makespan", "time", "above the lower bound"],
        ["this order", "22.0 s", "10.00%"],
        ["<script>, where the search started", "25.0 s", "25.00%"],
        ["lower bound of all orders", "20.0 s", "0.00%"],
    ]
    assert [row[0] for row in order] == ["device 0", "device 1", "device 2"]
    assert "at most 10.00% above the optimum; 1,234 moves in 500 ms" in html
    assert "<script>" not in html
    assert "optimal" in replace(schedule, lower_bound=22.0, proved=True)._repr_html_()
    assert "with noise 30.0 s" in replace(schedule, noisy_makespan=30.0)._repr_html_()
    unknown = replace(schedule, lower_bound=0.0)._repr_html_()
    assert "no lower bound" in unknown
    assert "inf" not in unknown


def test_many_microbatches_repeat_a_period():
    """With 400 micro-batches the gap is under a percent after few moves."""
    placement = ps.Placement.linear(4)
    costs = uneven(placement, True, seed=2)
    schedule = ps.optimize(placement, 400, costs, 4, evaluations=3000, progress=False)
    assert schedule.gap < 0.01
    assert ps.simulate(ps.lower(schedule), costs, memory_limit=4.0).memory.fits
    few = fewer_microbatches(400, 4, 1)
    assert 12 <= few < 24
    assert (400 - few) % 12 == 0


def test_shares_are_of_what_is_left():
    """A tenth of the effort after six of ten seconds ends at 64 %; of counted moves, at a tenth."""
    began = time.perf_counter() - 6.0
    assert Effort(10.0, None, 0, began).after(0.1) == pytest.approx(0.64, abs=0.01)
    assert Effort(10.0, 100, 0, began).after(0.1) == 0.1


@pytest.mark.slow
def test_a_period_is_searched_where_the_limit_makes_the_bound(monkeypatch):
    """Each micro-batch takes more than the busiest device's seconds; the period is no optimum."""
    placement, left = ps.Placement.v_shaped(4), []

    def noted(search, share):
        left.append((int(search.problem.count[0]), search.is_done))
        raise InterruptedError

    monkeypatch.setattr(optimize_search.OrderSearch, "_improve", noted)
    with pytest.raises(InterruptedError):  # the rest takes long
        ps.optimize(placement, 300, uneven(placement, True, 1), 3, evaluations=50, progress=False)
    part, is_done = left[0]
    assert part < 300
    assert not is_done


@pytest.mark.slow
def test_ctrl_c_while_a_period_is_searched_keeps_it(monkeypatch):
    """The period of the orders so far is repeated, before the search ends."""
    placement, values = ps.Placement.looped(4, 2), []

    def interrupt(search, share):
        raise KeyboardInterrupt

    def repeated(*arguments):
        order = unrolled(*arguments)
        values.append(evaluate(arguments[2], order).makespan)
        return order

    monkeypatch.setattr(optimize_search.OrderSearch, "_improve", interrupt)
    monkeypatch.setattr(optimize_search, "unrolled", repeated)
    order = ps.optimize(placement, 300, uneven(placement, True), 4, seconds=20, progress=False)
    assert order.makespan == min(values)


def test_period_of_1f1b_is_1f1b():
    """Repeating a period of 1F1B takes as long as 1F1B of so many micro-batches, in its memory."""
    placement, few = ps.Placement.linear(3), fewer_microbatches(100, 3, 1)
    costs = ps.Costs(forward=1, backward=2, activation_bytes=1)
    small, problem = (order_problem(placement, m, costs, memory_limit=3) for m in (few, 100))
    order = lane_order(small, ps.schedule("1f1b", 3, few))
    longer = unrolled(small, order, problem, "makespan")
    assert evaluate(problem, longer).makespan == 3 * (100 + 3 - 1)
    assert keeps_limit(problem, longer)


def test_named_schedules_are_first_orders():
    """All that keep the limit are tried: GPipe only if it holds all micro-batches."""
    costs = uneven(ps.Placement.linear(3), False)
    for limit, names in ((3, {"1f1b"}), (9, {"1f1b", "gpipe"})):
        problem = order_problem(ps.Placement.linear(3), 6, costs, memory_limit=limit)
        orders = named_orders(problem, ps.Placement.linear(3), costs)
        assert names == {x.name for x in orders} & {"1f1b", "gpipe", "zb_h1"}


def test_shared_links_and_launches_are_ranked_by_simulation():
    """Where the search neglects something, the makespan is still that of `simulate`."""
    placement = ps.Placement.linear(3)
    costs = uneven(placement, True, launch=0.5)
    schedule = ps.optimize(placement, 5, costs, 3, evaluations=300, progress=False)
    timeline = ps.simulate(ps.lower(schedule), costs)
    assert schedule.makespan == timeline.makespan >= schedule.lower_bound


def test_noise_ranks_by_a_percentile():
    placement = ps.Placement.linear(3)
    costs = uneven(placement, True)
    noise = ps.Noise(task=LogNormal(0.2), seed=0)
    options = {"evaluations": 400, "progress": False}
    schedule = ps.optimize(placement, 5, costs, 3, noise=noise, percentile=95, **options)
    many = ps.simulate_many(ps.lower(schedule), costs, noise, 64, n_jobs=1, progress=False)
    assert schedule.noisy_makespan == np.percentile(many.makespan, 95)
    assert ps.optimize(placement, 5, costs, 3, **options).noisy_makespan is None


def test_noise_ranks_all_first_orders():
    """GPipe meets the bound without noise, but other named schedules suffer less from it."""
    costs, noise = ps.Costs(forward=1, backward=2), ps.Noise(task=LogNormal(0.3), seed=0)
    schedule = ps.optimize(
        ps.Placement.linear(4), 16, costs, noise=noise, percentile=90, progress=False
    )
    assert schedule.proved
    for name in ("gpipe", "1f1b", "eager_1f1b"):
        graph = ps.lower(ps.schedule(name, 4, 16))
        many = ps.simulate_many(graph, costs, noise, 64, n_jobs=1, progress=False)
        assert schedule.noisy_makespan <= np.percentile(many.makespan, 90)


def test_bound_with_reductions_does_not_end_a_search_without():
    """The bound counts the reduction of gradients, 45 s here, and the local search does not."""
    costs = ps.Costs(
        forward=(3, 5, 4, 7), input_grad=(5, 3, 4, 2), weight_grad=(2, 4, 3, 6), output_bytes=3,
        network=ps.Network(latency=3, bandwidth=1), parameter_bytes=(5, 40, 5, 5),
    )  # fmt: skip
    schedule = ps.optimize(ps.Placement.bidirectional(4), 8, costs, evaluations=300, progress=False)
    assert schedule.evaluations == 300
    assert schedule.lower_bound < schedule.makespan
    timeline = ps.simulate(ps.lower(schedule), costs)
    assert timeline.makespan == schedule.makespan


@pytest.mark.parametrize("step", ["lower_bound", "first_orders"])
def test_interrupt_before_the_first_named_schedule(monkeypatch, step):
    """Ctrl-C then returns one micro-batch after the other, and no gap is infinite in its text."""

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(optimize_search, step, interrupt)
    schedule = ps.optimize(
        ps.Placement.linear(3), 4, ps.Costs(forward=1, backward=2), progress=False
    )
    assert schedule.makespan == 4 * 9
    assert "inf" not in repr(schedule)
    assert ("no lower bound" in repr(schedule)) == (step == "lower_bound")


def test_local_search_counts_the_moves_that_it_makes():
    """It stops at the target, long before the moves that it may make."""
    problem = order_problem(ps.Placement.linear(3), 4, uneven(ps.Placement.linear(3), False))
    search = LocalSearch(problem, sequential_order(problem), seed=0, objective="makespan")
    target = 0.9 * search.value
    assert search.advance_for(10.0, 5000, target) == search.moves < 2000
    assert search.value <= target


def test_first_orders_leave_warnings_to_the_caller():
    """A warning between two orders is not muted, and filters stay as they are."""
    problem = order_problem(ps.Placement.linear(2), 3, ps.Costs(forward=1, backward=2))
    costs = ps.Costs(forward=1, backward=2)
    filters = list(warnings.filters)
    orders = first_orders(problem, ps.Placement.linear(2), costs, "makespan")
    next(orders)
    assert warnings.filters == filters
    with pytest.warns(UserWarning, match="here"):
        warnings.warn("here", UserWarning, stacklevel=1)
    assert len({x.name for x in orders}) > 1


@pytest.mark.parametrize("n_microbatches", [6, 900])
def test_no_more_orders_are_tried_once_time_is_up(n_microbatches):
    """Even then a named schedule is returned, or a period of one."""
    costs = uneven(ps.Placement.linear(4), True, seed=2)
    schedule = ps.optimize(
        ps.Placement.linear(4), n_microbatches, costs, 4, seconds=1e-9, progress=False
    )
    assert schedule.gap < 0.5
    problem = order_problem(ps.Placement.linear(4), n_microbatches, costs, memory_limit=4)
    orders = first_orders(problem, ps.Placement.linear(4), costs, "makespan", lambda: True)
    assert len(list(orders)) == 2, "a named one and a list schedule"


def test_limit_below_one_microbatch_names_device_and_bytes():
    costs = ps.Costs(forward=1, backward=2, activation_bytes=3, parameter_bytes=5)
    with pytest.raises(ArgumentError, match=r"device 0 is 12.0 B.*needs 13.0 B"):
        ps.optimize(ps.Placement.linear(2), 4, costs, [12, 20])
    assert ps.optimize(ps.Placement.linear(2), 4, costs, 13, progress=False).makespan > 0


@pytest.mark.parametrize("call", [ps.optimize, ps.lower_bound])
def test_least_limit_of_a_message_is_enough(call):
    """Both functions name whole bytes, and take them."""
    costs = ps.Costs(forward=1, backward=2, activation_bytes=1234567, memory_reserve=0.1)
    with pytest.raises(ArgumentError, match=r"give at least 1358024 bytes"):
        call(ps.Placement.linear(2), 4, costs, 1e6)
    call(ps.Placement.linear(2), 4, costs, 1358024)
    call(ps.Placement.linear(2), 4, costs, "1.358024MB")
    with pytest.raises(ArgumentError, match=r"must be bytes such as 80e9 or 80GiB, got '3 G'"):
        call(ps.Placement.linear(2), 4, costs, "3 G")


def test_large_models_of_cp_sat_are_left_out():
    """With 256 tasks on each of eight devices it takes seconds to build: too much of five."""
    costs = uneven(ps.Placement.looped(8, 4), False)
    problem = order_problem(ps.Placement.looped(8, 4), 32, costs, memory_limit=24)
    assert not can_prove(problem, Effort(5.0, None, 0))
    assert can_prove(problem, Effort(60.0, None, 0))
    assert can_prove(problem, Effort(5.0, 1000, 0))
    assert can_prove(order_problem(ps.Placement.looped(8, 4), 32, costs), Effort(5.0, None, 0))
    assert can_prove(
        order_problem(ps.Placement.linear(8), 200, uneven(ps.Placement.linear(8), False)),
        Effort(1.0, None, 0),
    )


def test_limit_without_activation_bytes_warns():
    with pytest.warns(CostsWarning, match="activation_bytes"):
        ps.optimize(ps.Placement.linear(2), 4, ps.Costs(forward=1, backward=2), 1, progress=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seconds": 0}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"evaluations": 0}, "evaluations"),
        ({"seed": -1}, "seed"),
        ({"percentile": 101}, "percentile"),
        ({"noise": 3}, "noise"),
        ({"memory_limit": [1, 2, 3]}, "memory_limit"),
        ({"split_backward": 1}, "split_backward"),
        ({"progress": "yes"}, "progress"),
        ({"noise": ps.Noise(seed=0), "objective": "span"}, "objective"),
    ],
)
def test_bad_arguments(wrong, message):
    costs = ps.Costs(forward=1, backward=2)
    with pytest.raises(ArgumentError, match=message):
        ps.optimize(ps.Placement.linear(2), 4, costs, **wrong)
    with pytest.raises(UnknownNameError, match="objective"):
        ps.optimize(ps.Placement.linear(2), 4, costs, objective="length")


def test_interrupt_returns_the_best_order_so_far(monkeypatch):
    """Ctrl-C ends a search of ten minutes with an order."""
    placement, improve = ps.Placement.v_shaped(4), optimize_search.OrderSearch._improve
    costs = uneven(placement, True)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    def soon_interrupted(search, share):
        timer.start()
        improve(search, share)

    monkeypatch.setattr(optimize_search.OrderSearch, "_improve", soon_interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        order = ps.optimize(placement, 20, costs, 6, seconds=600, progress=False)
    except KeyboardInterrupt:
        pytest.fail("the search does not end with an order")
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, handler)
    assert order.makespan > order.lower_bound > 0
    assert 0.1 < order.seconds < 100


def test_a_changed_order_has_no_predicted_time() -> None:
    """It is a plain schedule; a new name alone changes no time."""
    costs = ps.Costs([[1.0, 9.0, 2.0, 2.0]], [[1.0, 1.0, 2.0, 5.0]])
    best = ps.optimize(ps.Placement.linear(2), 4, costs, progress=False)
    other = best.with_microbatch_order([1, 3, 2, 0])
    assert ps.simulate(ps.lower(other), costs).makespan > best.makespan
    for changed in (other, best.with_updates(2, "stashed"), best.with_slices(2)):
        assert type(changed) is ps.Schedule
        assert "optimal" not in repr(changed)
    named = best.with_name("best")
    assert isinstance(named, OptimizedSchedule)
    assert named.makespan == best.makespan
