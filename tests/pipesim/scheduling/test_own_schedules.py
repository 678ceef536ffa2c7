"""Mistakes in schedules that a user registers, lists or writes: named, without harm to others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.cli import main
from pipesim.errors import (
    ArgumentError,
    CapacityError,
    CostsError,
    DeadlockError,
    PipeError,
    ScheduleError,
    UnknownNameError,
)
from pipesim.ops import Action, Op, Overlapped
from pipesim.scheduling import Counts
from pipesim.scheduling.registry import _REGISTRY, schedule_info


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    """Forget after a test what it registered."""
    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)


def gpipe(n_devices: int, n_microbatches: int) -> ps.Schedule:
    return ps.schedule("gpipe", n_devices, n_microbatches)


@pytest.mark.parametrize("name", [None, 5, "", "  ", ["gpipe"]])
def test_a_name_is_a_text(name: Any) -> None:
    """Refused before anything is registered, so that look-ups go on."""
    with pytest.raises(ArgumentError, match=r"must be a text that is not empty, got .*@ps.regist"):
        ps.register(name)
    with pytest.raises(UnknownNameError, match="unknown schedule 'typo'"):
        ps.schedule("typo", 2, 2)


def test_register_without_parentheses() -> None:
    """The function is in the place of the name; the error tells the right form."""
    with pytest.raises(ArgumentError, match=r'write @ps.register\("gpipe"\) above the function'):
        ps.register(gpipe)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"bubble": 0.5}, r"bubble must be a pipesim.ClosedForm.* got 0.5 \(float\)"),
        ({"activations": None}, r"activations must be a pipesim.ClosedForm"),
        ({"parameters": ps.ClosedForm("1", 1)}, "got one with value=1, which is no function"),  # type: ignore[arg-type]
        ({"bubble": ps.ClosedForm(1, max)}, "got one with text=1"),  # type: ignore[arg-type]
        ({"counts": "any"}, r"counts must be a pipesim.scheduling.Counts\(.*got 'any' \(str\)"),
        ({"counts": Counts("any", True)}, "got one with allow=True, which is no function"),  # type: ignore[arg-type]
    ],
)
def test_kinds_of_what_is_known(kinds: dict[str, Any], words: str) -> None:
    """Formulas and counts of another kind are refused, with the name of the schedule."""
    with pytest.raises(ArgumentError, match=f"schedule 'mine': .*{words}"):
        ps.register("mine", **kinds)


@pytest.mark.parametrize("function", [None, max, lambda n_devices, *rest: None])
def test_functions_that_take_no_counts(function: Any) -> None:
    """No function, one without a signature, one that names too few parameters."""
    with pytest.raises(ArgumentError, match=r"'mine' must be a function of \(n_devices, n_micro"):
        ps.register("mine")(function)


def test_a_test_of_counts_that_fails() -> None:
    """The listing shows the schedule as allowed, and the others unchanged."""
    ps.register("mine", counts=Counts("x", lambda p, m: p == 1 // 0))(gpipe)
    assert schedule_info("mine").allows(2, 2)
    assert "mine" in ps.schedules().index
    assert ps.schedule("mine", 2, 2) == gpipe(2, 2)


@pytest.mark.parametrize(
    "value",
    [
        lambda p, m: "x",
        lambda p, m: 1j,
        lambda p, m: None,
        lambda p, m: p // 0,
        lambda p, m: 10**400,
        lambda p, m: np.ones(2),
        lambda p, m: [p],
        lambda p, m: True,
        lambda p, m: (_ for _ in ()).throw(KeyError),
        dict,
    ],
)
def test_a_formula_that_gives_no_number(value: Any) -> None:
    """It is NaN in the table, and a dash on the command line."""
    ps.register("mine", bubble=ps.ClosedForm("x", value))(gpipe)
    assert math.isnan(schedule_info("mine").bubble.of(4, 8))
    assert math.isnan(ps.schedules().loc["mine", "bubble"])
    assert main(["schedules"]) == 0


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (5, r"its function returned 5 \(int\); return a pipesim.Schedule of 2 devices and 2 micro"),
        (None, r"its function returned None \(NoneType\)"),
        (gpipe(3, 2), "asked for 2 devices and 2 .*, its function returned one of 3 devices"),
        (gpipe(2, 4), "returned one of 2 devices and 4 micro-batches"),
    ],
)
def test_what_a_function_returns(built: Any, words: str) -> None:
    """A schedule with the requested counts."""
    ps.register("mine")(lambda n_devices, n_microbatches: built)
    with pytest.raises(ScheduleError, match=f"schedule 'mine': .*{words}"):
        ps.schedule("mine", 2, 2)


LISTED = [
    (["0F0", 7], r"device 0, position 1: 7 \(int\) is not an action; give an Action"),
    ([None], r"device 0, position 0: None \(NoneType\) is not an action"),
    ([(0, Op.F, 0)], r"position 0: \(0, .*\(tuple\) is not an action"),
    ([Action(0, "F", 0)], "op must be one of pipesim.Op, got 'F'; write for example"),  # type: ignore[arg-type]
    ([Action(0, Op.F, 0.5)], r"0F0.5 has a microbatch that is no whole number, 0.5 \(float\)"),  # type: ignore[arg-type]
    ([Action("0", Op.F, 0)], r"has a stage that is no whole number, '0' \(str\)"),  # type: ignore[arg-type]
    ([Overlapped("a", "b")], r"position 0: 'a' \(str\) is not an action"),  # type: ignore[arg-type]
    (["0F0", "xx"], "device 0, position 1: 'xx' is not an action; write stage, operation"),
    (None, r"device 0: an order must be a sequence of actions, got None \(NoneType\)"),
    ("0F0 0B0", "device 0: an order must be a sequence of actions, got '0F0 0B0'"),
    (Action(0, Op.F, 0), "device 0: an order must be a sequence of actions, got 0F0"),
]


@pytest.mark.parametrize(("order", "words"), LISTED)
def test_what_is_listed(order: Any, words: str) -> None:
    """Device and position are named; the schedule too, where a registered function lists it."""
    with pytest.raises(ArgumentError, match=words):
        ps.Schedule.from_orders([order])
    ps.register("mine")(lambda device, n_devices, n_microbatches: order)
    with pytest.raises(ArgumentError, match=f"schedule 'mine': .*{words}"):
        ps.schedule("mine", 1, 1)


@pytest.mark.parametrize("orders", [None, 5, "0F0 0B0"])
def test_orders_are_a_sequence(orders: Any) -> None:
    """One order a device."""
    with pytest.raises(ArgumentError, match="orders must be a sequence of orders, one a device"):
        ps.Schedule.from_orders(orders)


def test_numbers_out_of_arrays_are_numbers() -> None:
    """Actions with NumPy's integers are those with Python's."""
    orders = [[Action(np.int64(0), Op.F, np.int32(0)), "0B0"]]  # type: ignore[arg-type]
    assert ps.Schedule.from_orders(orders).orders == ((Action(0, Op.F, 0), Action(0, Op.B, 0)),)


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ([["0F0", "0B0"], []], "device 1 lists nothing"),
        ([["0F0", "0B0"], [], ["1F0", "1B0"]], "device 1 lists nothing"),
        ([["0F0", "0B0"], ["0F1", "0B1"]], "device 1 has no stage of its own"),
    ],
)
def test_devices_without_a_stage(orders: list[list[str]], words: str) -> None:
    """The device is named."""
    with pytest.raises(ScheduleError, match=words):
        ps.Schedule.from_orders(orders)


def test_required_options() -> None:
    """One without a default must be given; ``**options`` is none."""

    @ps.register("mine")
    def order(
        device: int, n_devices: int, n_microbatches: int, last: str, **options: object
    ) -> Iterator[str]:
        yield from ("0F0", last)

    assert schedule_info("mine").options == ("last",)
    with pytest.raises(ArgumentError, match=r"'mine' needs its option 'last'.*give last=\.\.\."):
        ps.schedule("mine", 1, 1)
    with pytest.raises(UnknownNameError, match="'mine' takes no option 'options'"):
        ps.schedule("mine", 1, 1, last="0B0", options=1)
    assert len(ps.schedule("mine", 1, 1, last="0B0")) == 2


def test_options_of_the_listing(capsys: Any) -> None:
    """One that no schedule takes is refused; a value that formulas fail for is a dash."""
    with pytest.raises(UnknownNameError, match="unknown option 'n_chunk'; did you mean 'n_chunks'"):
        ps.schedules(n_chunk=2)
    assert main(["schedules", "--option", "foo=2"]) == 2
    assert "unknown option 'foo'" in capsys.readouterr().err
    for value in (0, -1, 1.5, "x"):
        table = ps.schedules(n_chunks=value)
        assert table.loc[["interleaved_1f1b", "interleaved_zb"], "bubble"].isna().all()
        assert table.loc["1f1b", "bubble"] == 3 / 11


def load(folder: Path, content: str) -> ps.Schedule:
    (folder / "lab.txt").write_text(content)
    return ps.Schedule.load(folder / "lab.txt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"device {'9' * 5000} | 0F0 0B0", "row 1: 'device 99.* is no label of device 0"),
        ("device \u0660 | 0F0 0B0", "is no label of device 0"),
        ("\u0660F0 0B0", "column 1: '\u0660F0' is not an action"),
        ("0F\u0661 0B0", "column 1: '0F\u0661' is not an action"),
    ],
)
def test_numbers_in_files(tmp_path: Path, content: str, words: str) -> None:
    """Digits are those of ASCII, and not thousands of them."""
    with pytest.raises(ScheduleError, match=words) as caught:
        load(tmp_path, content)
    assert len(str(caught.value)) < 500


def test_an_action_of_thousands_of_digits() -> None:
    """More than Python reads as a number; shown cut."""
    with pytest.raises(ArgumentError, match="of 5002 characters is not an action") as caught:
        Action.parse("9" * 5000 + "F0")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("0F0,1B0\n1F0,0B0\n", "device 0, position 1: 1B0 is misplaced: stage 1 lies on device 1"),
        ("0F0,0B0,0F1,1B1\n1F0,1B0,1F1,0B1\n", "position 3: 1B1 is misplaced"),
        ("0F0,1F0,0B0,0F1,0B1\n1B0,1F1,1B1,0W1\n", "position 1: 1F0 is misplaced"),
    ],
)
def test_a_misplaced_action_is_no_second_path(tmp_path: Path, content: str, words: str) -> None:
    """F and B of a stage and micro-batch lie on one device; the cell is marked."""
    schedule = load(tmp_path, content)
    assert schedule.placement == ps.Placement.linear(2)
    with pytest.raises(ScheduleError, match=f"(?s){words}.*>1[FB]"):
        ps.verify(schedule)


def test_a_file_of_two_paths_that_fit_no_placement(tmp_path: Path) -> None:
    """Copies of the middle stage on one device are refused with the name of the file."""
    rows = "0F0,0B0,2F1,2B1\n1F0,1B0,1F1,1B1\n2F0,2B0,0F1,0B1\n"
    with pytest.raises(ScheduleError, match=r"lab.txt: stage 1 lies on device 1 for all"):
        load(tmp_path, rows)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "0RECV_B0,0F0,0B0,0SEND_F0\n1F0,1B0,1SEND_B0,1RECV_F0\n",
            r"row 2 \(device 1\), column 4: '1RECV_F0' comes after 1F0 in column 1, which needs",
        ),
        (
            "0SEND_F0,0F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n",
            r"row 1 \(device 0\), column 1: '0SEND_F0' comes before 0F0 in column 2",
        ),
        (
            "0F0,0SEND_F0,0I0,0RECV_B0,0W0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n",
            "column 4: '0RECV_B0' comes after 0I0 in column 3",
        ),
        (
            "0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1SEND_B0,1I0,1W0\n",
            "column 3: '1SEND_B0' comes before 1I0 in column 4",
        ),
    ],
)
def test_messages_on_the_wrong_side(tmp_path: Path, content: str, words: str) -> None:
    """A SEND stands after what makes its content, a RECV before its use; errors name the cell."""
    with pytest.raises(ScheduleError, match=words):
        load(tmp_path, content)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_zb", "zbv", "dualpipev"])
def test_messages_that_lowering_adds_are_right(tmp_path: Path, name: str) -> None:
    """What `save_torch_csv` writes is read back, split and overlapped actions included."""
    schedule = ps.schedule(name, 4, 8)
    ps.lower(schedule).save_torch_csv(tmp_path / "comms.csv")
    assert ps.Schedule.load(tmp_path / "comms.csv") == schedule


def test_deadlocks_with_overlapped_actions() -> None:
    """They are one position, as in the grid."""
    orders = [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B2", "0F2", "0B1"]]
    with pytest.raises(DeadlockError, match=r"0B2 \(position 2\) waits for 0F2 on device 0\n"):
        ps.verify(ps.Schedule.from_orders(orders))


def test_an_action_is_not_named_as_waiting_for_itself() -> None:
    """An F that runs with a B needs what the B needs, even where that is the F."""
    with pytest.raises(DeadlockError, match=r"0F0 \(position 0\) waits for 0B0 on device 0\n"):
        ps.verify(ps.Schedule.from_orders([["(0F0;0B0)OVERLAP_F_B"]]))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ps.verify(replace(gpipe(2, 2), n_batches=0)), ScheduleError, "has n_batches=0"),
        (lambda: ps.Placement([10**9]), ArgumentError, "leaves device 0 without a stage"),
        (lambda: ps.Placement([0, 10**9]), ArgumentError, "leaves device 1 without a stage"),
        (
            lambda: ps.Costs(forward=1.0).in_chunks(None),  # type: ignore[arg-type]
            ArgumentError,
            "placement must be a pipesim.Placement, got None",
        ),
        (lambda: ps.Schedule.load(None), ArgumentError, "file must be a path, got None"),  # type: ignore[arg-type]
        (lambda: gpipe(2, 2).save(None), ArgumentError, "file must be a path, got None"),  # type: ignore[arg-type]
        (
            lambda: ps.order_by(ps.Placement.linear(2), 2, in_flight=np.array(3)),  # type: ignore[arg-type]
            ArgumentError,
            r"in_flight must be a whole number, got array\(3\)",
        ),
        (
            lambda: ps.order_by(ps.Placement.linear(2), 2, priority=lambda a: 1),  # type: ignore[misc,arg-type]
            ArgumentError,
            r"priority must be a function of \(action, ready\), got .*too many positional",
        ),
    ],
)
def test_other_wrong_arguments(
    call: Callable[[], object], error: type[PipeError], words: str
) -> None:
    """Each is named, with what is allowed."""
    with pytest.raises(error, match=words):
        call()


def test_arrays_of_limits_are_limits() -> None:
    """A value a device or stage may come in an array."""
    options: dict[str, Any] = {"memory_limit": np.array([3.0, 3.0]), "in_flight": np.array([2, 1])}
    ps.verify(ps.order_by(ps.Placement.linear(2), 4, **options))
    with pytest.raises(CostsError, match="costs must be"):
        ps.order_by(ps.Placement.linear(2), 4, 3)  # type: ignore[arg-type]


def _device(text: str) -> Callable[..., Any]:
    """Return a schedule's function of one device: what it yields, or raises."""

    def order(device: int, n_devices: int, n_microbatches: int) -> Any:
        if text == "call":
            raise KeyError("boom")
        if text == "none":
            return None
        return steps(device)

    def steps(device: int) -> Iterator[Any]:
        yield f"{device}F0"
        if text == "raise" and device == 1:
            raise KeyError("boom")
        if text == "ours":
            raise ArgumentError("of the user's check")
        if text == "yields none":
            yield None
        while text == "endless":
            yield f"{device}F0"

    return order


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("raise", ScheduleError, "schedule 'mine': device 1: its function raised KeyError: 'boom'"),
        ("call", ScheduleError, "schedule 'mine': device 0: its function raised KeyError: 'boom'"),
        ("ours", ArgumentError, "schedule 'mine': device 0: of the user's check"),
        ("none", ArgumentError, "schedule 'mine': device 0: an order must be a sequence"),
        ("yields none", ArgumentError, "schedule 'mine': device 0, position 1: None .NoneType. is"),
        ("endless", CapacityError, "schedule 'mine', device 0: its function has yielded 100,000 a"),
    ],
)
def test_errors_of_a_device(text: str, error: type[Exception], words: str) -> None:
    """Schedule and device are named; what the function raised is the cause."""
    ps.register("mine")(_device(text))
    with pytest.raises(error, match=words) as caught:
        ps.schedule("mine", 2, 2)
    if text in ("raise", "call"):
        assert isinstance(caught.value.__cause__, KeyError)


def test_errors_of_a_whole_schedule() -> None:
    """Likewise, and running out of memory is what it is."""

    def factory(n_devices: int, n_microbatches: int, error: Exception) -> ps.Schedule:
        raise error

    ps.register("mine")(factory)
    with pytest.raises(ScheduleError, match="schedule 'mine': its function raised KeyError: 1"):
        ps.schedule("mine", 2, 2, error=KeyError(1))
    with pytest.raises(CapacityError, match="schedule 'mine': its function ran out of memory"):
        ps.schedule("mine", 2, 2, error=MemoryError())
    with pytest.raises(CostsError, match=r"^as it is$"):
        ps.schedule("mine", 2, 2, error=CostsError("as it is"))


def test_errors_of_a_priority() -> None:
    """The action is named."""
    with pytest.raises(ArgumentError, match=r"priority of 0F0, .* raised ZeroDivisionError"):
        ps.order_by(ps.Placement.linear(2), 2, priority=lambda action, ready: 1 / 0)


@pytest.mark.parametrize("devices", [None, 5, "01", iter([0, 1])])
def test_a_placement_is_a_sequence(devices: Any) -> None:
    """Anything else is refused."""
    with pytest.raises(ArgumentError, match="a placement must be a sequence of device numbers"):
        ps.Placement(devices)


def one_by_one(device: int, n_devices: int, n_microbatches: int) -> Iterator[str]:
    """List each micro-batch alone, on two stages a device that form a V."""
    stages = (device, 2 * n_devices - 1 - device)
    for m in range(n_microbatches):
        yield from (f"{stage}F{m}" for stage in stages)
        yield from (f"{stage}B{m}" for stage in reversed(stages))


@pytest.mark.parametrize("placement", [ps.Placement.v_shaped, ps.Placement.v_shaped(2)])
def test_a_placement_of_a_registered_function(placement: Any) -> None:
    ps.register("one_by_one", placement=placement)(one_by_one)
    schedule = ps.schedule("one_by_one", 2, 4)
    assert schedule.placement == ps.Placement.v_shaped(2)
    ps.verify(schedule)


@pytest.mark.parametrize(
    ("placement", "function", "words"),
    [
        ("v", one_by_one, "placement must be a pipesim.Placement, or a function of n_devices"),
        (
            ps.Placement.v_shaped(3),
            one_by_one,
            "placement has 3 devices, but the schedule 2; give a",
        ),
        (lambda n: 5, one_by_one, "the result of placement must be a pipesim.Placement"),
        (ps.Placement.v_shaped, gpipe, "a function that returns a Schedule gives it its placement"),
    ],
)
def test_wrong_placements(placement: Any, function: Any, words: str) -> None:
    def build() -> ps.Schedule:
        ps.register("own", placement=placement)(function)
        return ps.schedule("own", 2, 4)

    with pytest.raises(ArgumentError, match=words):
        build()
