"""Modules of the page without a browser: search in sorted values, bytes, ticks, and matches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from javascript import answering

SOURCE = """
import { memoryOverTime, mostBetween } from "./data/memory.js";
import { Search } from "./data/search.js";
import { firstAbove, firstAtLeast, nextAtLeast } from "./data/sorted.js";
import { fitted, makeView, ticks } from "./drawing/geometry.js";

const FUNCTIONS = {
  sorted(values, x, low) {
    return [firstAbove(values, x), firstAtLeast(values, x), nextAtLeast(values, x, low)];
  },
  ticks(from, to, width) {
    const size = { gutter: 0, right: 0, width };
    return ticks(makeView({ from, to, unit: "s", makespan: to, theme: "light" }, size));
  },
  fitted(text, width) {
    return fitted({ textWidth: (text) => text.length }, text, width, 11);
  },
  next(names, steps) {
    const track = {}, search = new Search();
    search.found = names.map((task) => ({ track, task }));
    let item = null;
    return steps.map((step) => (item = search.next(item, step)).task);
  },
  most(nbytes) {
    // One device, whose task k allocates or releases what makes the bytes those of `nbytes`.
    const n = nbytes.length, changes = nbytes.map((x, k) => x - (k ? nbytes[k - 1] : 0));
    const zeros = new Array(n).fill(0), time = zeros.map((_, k) => k);
    const graph = { nDevices: 1, n, kind: zeros, kinds: { device: [0] } };
    const held = memoryOverTime({ graph, start: time, end: time }, {
      computes: [false], workspace: zeros, static: [0],
      allocated: changes.map((x) => Math.max(x, 0)), released: changes.map((x) => Math.max(-x, 0)),
    })[0];
    const most = [];
    for (let low = 0; low <= n; low += 7) {
      for (let high = low; high <= n; high += 5) {
        most.push([low, high, mostBetween(held, low, high)]);
      }
    }
    return { nbytes: [...held.nbytes], most, peak: held.peak };
  },
};

function answer(bytes) {
  const [name, ...given] = JSON.parse(new TextDecoder().decode(bytes));
  return FUNCTIONS[name](...given);
}
"""


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    """Return a function that calls one of `SOURCE`."""
    with answering(SOURCE) as ask:
        yield lambda *arguments: ask(json.dumps(arguments).encode())


@pytest.mark.parametrize("x", [-1, 0, 1, 2, 3, 5, 9, 10])
def test_search_in_sorted_values(call: Callable[..., Any], x: int) -> None:
    """Indices are those of numpy, also where values are equal."""
    values = [0, 1, 1, 1, 2, 5, 5, 9]
    at_least = int(np.searchsorted(values, x, "left"))
    for low in range(len(values)):
        expected = [np.searchsorted(values, x, "right"), at_least, max(low, at_least)]
        assert call("sorted", values, x, low) == expected


def test_most_bytes_between_two_moments(call: Callable[..., Any]) -> None:
    """The largest value from one index to another, both included, over several blocks."""
    nbytes = np.random.default_rng(0).integers(0, 1000, 150).tolist()
    answer = call("most", nbytes)
    assert answer["nbytes"] == [0, *nbytes]
    assert answer["peak"] == max(nbytes)
    for low, high, most in answer["most"]:
        assert most == max(answer["nbytes"][low : high + 1]), (low, high)


@pytest.mark.parametrize(("first", "last"), [(0.0, 1.0), (0.3, 0.9), (2.5, 7.25), (1e-5, 3e-5)])
def test_ticks_are_inside_the_view(call: Callable[..., Any], first: float, last: float) -> None:
    """From the first multiple of the step in the view to the last, each at its time."""
    places = call("ticks", first, last, 800)
    assert len(places) >= 2
    assert all(-1e-6 <= place["x"] <= 800 + 1e-6 for place in places)
    steps = np.diff([place["x"] for place in places])
    np.testing.assert_allclose(steps, steps[0])
    assert places[0]["x"] <= steps[0]
    assert places[-1]["x"] >= 800 - steps[0]


def test_matches_follow_each_other_in_a_circle(call: Callable[..., Any]) -> None:
    """After the last match comes the first, and before the first the last."""
    assert call("next", [4, 7, 9], [1, 1, 1, 1]) == [4, 7, 9, 4]
    assert call("next", [4, 7, 9], [-1, -1, -1, -1]) == [9, 7, 4, 9]
    assert call("next", [4], [1, 1, -1]) == [4, 4, 4]


def test_texts_are_cut_to_their_width(call: Callable[..., Any]) -> None:
    """As many characters as fit, the ellipsis included."""
    assert call("fitted", "backward", 8) == "backward"
    assert call("fitted", "backward", 7) == "backwa…"
    assert call("fitted", "backward", 1) == "…"
