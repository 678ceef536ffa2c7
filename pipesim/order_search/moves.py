"""Moves of a local search: a task moves along the order of its device, place by place."""

from __future__ import annotations

from pipesim.order_search.state import Lanes, State


def sum_seconds(lanes: Lanes, state: State, device: int, first: int, last: int) -> None:
    """Sum the seconds from each position ``first`` to ``last`` to the end of the device."""
    rest = 0.0
    if last + 1 < lanes.ptr[device + 1]:
        rest = state.rest[last + 1]
    for position in range(last, first - 1, -1):
        rest += lanes.seconds[lanes.row[state.task[position]]]
        state.rest[position] = rest


def sum_bytes(lanes: Lanes, state: State, device: int) -> None:
    """Sum the bytes that a device holds before each position."""
    held = 0.0
    for position in range(lanes.ptr[device], lanes.ptr[device + 1]):
        state.held[position] = held
        held += lanes.net[lanes.row[state.task[position]]]


def _fits(lanes: Lanes, device: int, held: float, first: int, second: int) -> bool:
    """Return whether tasks of two rows, one after the other, keep the limit of their device."""
    limit = lanes.limit[device]
    if held + lanes.allocated[first] + lanes.workspace[first] > limit:
        return False
    held += lanes.net[first]
    return bool(held + lanes.allocated[second] + lanes.workspace[second] <= limit)


def move_later(lanes: Lanes, state: State, position: int, distance: int, is_undo: bool) -> int:
    """Move a task over up to ``distance`` others of its device; return how many.

    It stops before a task that needs it, and before the memory limit would break. Neither stops a
    move that undoes another. Behind another task of its lane it is that one: numbers of
    micro-batches stay in order.
    """
    task = state.task[position]
    lane = lanes.lane[task]
    device = lanes.device[lane]
    last = min(position + distance, lanes.ptr[device + 1] - 1)
    place = position
    while place < last:
        other = state.task[place + 1]
        passed = lanes.lane[other]
        if passed != lane:
            own, source = lanes.own[passed], lanes.source[passed]
            if not is_undo and (
                (own != 0 and other + own == task)
                or (source != 0 and other + source == task)
                or not _fits(lanes, device, state.held[place], lanes.row[other], lanes.row[task])
            ):
                break
            state.task[place], state.position[other] = other, place
            state.held[place + 1] = state.held[place] + lanes.net[lanes.row[other]]
        else:
            state.task[place], state.position[task] = task, place
            task = other
        place += 1
    state.task[place], state.position[task] = task, place
    return place - position


def move_earlier(lanes: Lanes, state: State, position: int, distance: int, is_undo: bool) -> int:
    """Move a task before up to ``distance`` others of its device; return how many.

    It stops behind a task that it needs, and before the memory limit would break. Neither stops a
    move that undoes another.
    """
    task = state.task[position]
    lane = lanes.lane[task]
    device = lanes.device[lane]
    own, source = lanes.own[lane], lanes.source[lane]
    last = max(position - distance, lanes.ptr[device])
    place = position
    while place > last:
        other = state.task[place - 1]
        passed = lanes.lane[other]
        if passed != lane:
            if not is_undo and (
                (own != 0 and task + own == other)
                or (source != 0 and task + source == other)
                or not _fits(
                    lanes, device, state.held[place - 1], lanes.row[task], lanes.row[other]
                )
            ):
                break
            state.task[place], state.position[other] = other, place
            state.held[place] = state.held[place - 1] + lanes.net[lanes.row[task]]
        else:
            state.task[place], state.position[task] = task, place
            task = other
        place -= 1
    state.task[place], state.position[task] = task, place
    return position - place
