"""Places of the nodes and edges of an autograd graph in a figure, in columns and rows.

The forward goes from left to right, so that the engine goes from right to left.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipesim.graph.autograd_graph import AutogradGraph

#: Width and height of a box.
WIDTH, HEIGHT = 0.74, 0.64
#: Rows between two lanes, and between two lines of a folded figure.
LANE_GAP, LINE_GAP = 0.3, 1.2
#: Most columns of a line, for graphs with partitions and for others.
MOST_COLUMNS = {True: 26, False: 16}
#: Longest line of a name (letters), and most lines; letters of a line that is cut, dot included.
LONGEST, MOST_LINES = 11, 2
CUT = 6

Point = tuple[float, float]
#: A lane: a micro-batch, or None for nodes of no single one.
Lane = int | None


class Box(NamedTuple):
    """A box of node ``node``, with lines of text; ``y`` grows downwards."""

    node: int
    x: float
    y: float
    lines: Sequence[str]
    partition: int | None
    is_recompute: bool = False
    height: float = HEIGHT

    @property
    def is_tall(self) -> bool:
        """Whether the box spans several rows."""
        return self.height > HEIGHT


class Arrow(NamedTuple):
    """An arrow through points, from a node to one that the engine runs later.

    Between two lines of a folded figure it has two parts, of which only the second has a head. A
    ``label`` at their ends tells which belong together, where their rows do not.
    """

    points: Sequence[Point]
    is_phony: bool
    has_head: bool = True
    label: str = ""


@dataclass(frozen=True)
class AutogradLayout:
    """Boxes and arrows of a figure.

    ``lanes`` has the label of each lane by its row, ``blocks`` that of each partition by its
    column. ``frames`` are left, top, right and bottom around the tasks of one node.
    """

    boxes: Sequence[Box]
    arrows: Sequence[Arrow]
    lanes: Mapping[float, str]
    blocks: Mapping[float, str]
    frames: Sequence[tuple[float, float, float, float]]
    n_columns: int
    n_rows: float

    @property
    def n_lines(self) -> int:
        """The most lines of text in a box of usual height."""
        return max((len(box.lines) for box in self.boxes if not box.is_tall), default=2)

    @property
    def is_folded(self) -> bool:
        """Whether the columns are divided into several lines."""
        return any(not arrow.has_head for arrow in self.arrows)


def name_lines(name: str) -> list[str]:
    """Return a name in at most two lines, divided before capitals; ``…`` for letters left out."""
    lines: list[str] = []
    for word in re.findall(r"[A-Z]*[^A-Z]+|[A-Z]+$", name) or [name]:
        if lines and len(lines[-1]) + len(word) <= LONGEST:
            lines[-1] += word
        else:
            lines.append(word)
    cut = [
        line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…" for line in lines[:MOST_LINES]
    ]
    if len(lines) > MOST_LINES:
        cut[-1] = f"{cut[-1][: LONGEST - 1].rstrip('…')}…"
    return cut


def lay_out(graph: AutogradGraph) -> AutogradLayout:
    """Return the boxes and arrows of a graph.

    A row is a micro-batch, a column the distance from the output. Partitions have a block of
    columns each. Nodes of several micro-batches span the rows of their neighbours. A node that
    issues tasks of several micro-batches is above them, and its tasks have boxes of their own.
    Without micro-batches, chains of nodes are rows. Wide figures are folded into lines.
    """
    return _Layout(graph).layout()


class _Layout:
    """The passes of `lay_out`: lane and partition, columns, rows, boxes of each node."""

    def __init__(self, graph: AutogradGraph) -> None:
        self.nodes, self.edges = graph.nodes, graph.edges
        self.sources: list[list[int]] = [[] for _ in self.nodes]
        self.targets: list[list[int]] = [[] for _ in self.nodes]
        for source, target, _ in self.edges:
            self.sources[target].append(source)
            self.targets[source].append(target)
        self.phony = {(source, target) for source, target, is_phony in self.edges if is_phony}
        #: Nodes that issue tasks of several micro-batches.
        self.cycles = [
            k for k, node in enumerate(self.nodes) if node.tasks and node.microbatch is None
        ]
        self.lane: list[Lane] = [node.microbatch for node in self.nodes]
        self.partition = [node.partition for node in self.nodes]
        self._place_others()
        self.has_lanes = bool(self.cycles) or any(lane is not None for lane in self.lane)
        self.blocks: dict[float, str] = {}
        self.block_starts = [0]
        is_chain = all(len(ends) <= 1 for ends in (*self.sources, *self.targets))
        if self.has_lanes and not is_chain:
            self.x = self._block_columns()
        else:
            distance = self._distances(range(len(self.nodes)))
            self.x = [max(distance.values()) - d for d in distance.values()]
        self.y: dict[int, float] = {}
        self.height: dict[int, float] = {}
        self.lane_y: dict[Lane, float] = {}
        self.n_rows = self._set_rows()

    def _place_others(self) -> None:
        """Place nodes without micro-batch or partition as their neighbours of one micro-batch.

        They are layers of a micro-batch that is not recomputed, and their parameters.
        """
        for k in range(len(self.nodes))[::-1]:
            lanes = {self.lane[t] for t in self.targets[k]} - {None}
            if self.lane[k] is None and len(lanes) == 1 and k not in self.cycles:
                self.lane[k] = lanes.pop()
                partitions = [self.partition[t] for t in self.targets[k]]
                self.partition[k] = max((p for p in partitions if p is not None), default=None)
        for k, sources in enumerate(self.sources):
            lanes = {self.lane[s] for s in sources}
            if self.lane[k] is None and len(lanes) == 1 and k not in self.cycles:
                self.lane[k] = lanes.pop()
            if self.partition[k] is None:
                partitions = [self.partition[s] for s in sources]
                self.partition[k] = min((p for p in partitions if p is not None), default=None)

    # Columns

    def _distances(self, members: Iterable[int], phony: float = 1.0) -> dict[int, float]:
        """Return the longest way to each member; edges through phony tensors have this length."""
        distance: dict[int, float] = {}
        for k in members:
            ways = [
                distance[s] + (phony if (s, k) in self.phony else 1.0)
                for s in self.sources[k]
                if s in distance
            ]
            distance[k] = max(ways, default=0.0)
        return distance

    def _block_columns(self) -> list[float]:
        """Return columns: a block a partition, after all a block of nodes without a partition."""
        blocks: dict[float, list[int]] = defaultdict(list)
        for k, partition in enumerate(self.partition):
            blocks[math.inf if partition is None else partition].append(k)
        columns: dict[int, float] = {}  # counted from the right
        middles: dict[float, str] = {}
        ends = [0]
        for block in sorted(blocks, reverse=True):
            own = self._aligned_columns(blocks[block])
            columns |= {k: ends[-1] + column for k, column in own.items()}
            width = math.floor(max(own.values())) + 1
            if math.isfinite(block):
                middles[ends[-1] + (width - 1) / 2] = f"partition {block}"
            ends.append(ends[-1] + width)
        n_columns = ends[-1]
        self.block_starts = [n_columns - end for end in ends[:0:-1]]
        self.blocks = {n_columns - 1 - middle: name for middle, name in middles.items()}
        return [n_columns - 1 - columns[k] for k in range(len(self.nodes))]

    def _aligned_columns(self, members: Sequence[int]) -> dict[int, float]:
        """Return the columns of a block's nodes, counted from its right end.

        Equal nodes of several lanes are aligned. Nodes of several lanes are at the left end.
        """
        lanes: dict[Lane, list[int]] = defaultdict(list)
        for k in members:
            lanes[self.lane[k]].append(k)
        several = lanes.pop(None, [])
        groups = [self._distances(own, phony=0.5) for own in lanes.values()]
        counts = [Counter(self.nodes[k].name for k in group) for group in groups]
        n_lanes = Counter(name for count in counts for name in count)
        # The name of most lanes, among those that no lane has twice.
        single = [name for name in n_lanes if all(count[name] <= 1 for count in counts)]
        anchor = max(single, key=lambda name: n_lanes[name], default=None)
        places = [
            next((d for k, d in group.items() if self.nodes[k].name == anchor), None)
            for group in groups
        ]
        last = max((d for d in places if d is not None), default=0.0)
        columns = {
            k: d + (0.0 if place is None else last - place)
            for group, place in zip(groups, places, strict=True)
            for k, d in group.items()
        }
        start = math.floor(max(columns.values(), default=-1.0)) + 1
        return columns | {k: float(start + d) for d, k in enumerate(several)}

    # Rows

    def _set_rows(self) -> float:
        """Set the rows of all nodes and lanes; return how many there are."""
        members: dict[Lane, list[int]] = defaultdict(list)
        for k, lane in enumerate(self.lane):
            members[lane].append(k)
        for k in self.cycles:
            for action in self.nodes[k].tasks:
                members.setdefault(action.microbatch, [])
        spread = members.pop(None, []) if self.has_lanes and not self.cycles else []
        end = 0.0
        for lane in sorted(members, key=lambda lane: -1 if lane is None else lane):
            row = self._chain_rows(members[lane])
            self.y |= {k: end + r for k, r in row.items()}
            self.lane_y[lane] = end
            end += max(row.values(), default=0) + 1 + LANE_GAP
        for k in spread:  # from the first to the last lane of its neighbours
            near = [self.y[n] for n in (*self.sources[k], *self.targets[k]) if n in self.y]
            low, high = min(near, default=0.0), max(near, default=end - LANE_GAP - 1)
            self.y[k], self.height[k] = (low + high) / 2, high - low + HEIGHT
        return end - LANE_GAP

    def _chain_rows(self, members: Sequence[int]) -> dict[int, int]:
        """Return the row of each node of a lane: chains of nodes, each in the first free row."""

        def following(k: int) -> list[int]:
            return [t for t in self.targets[k] if t in length and (k, t) not in self.phony]

        length: dict[int, int] = {}  # of the longest chain from a node
        for k in reversed(members):
            length[k] = 1 + max((length[t] for t in following(k)), default=0)
        row: dict[int, int] = {}
        spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for first in members:
            if first in row:
                continue
            chain = [first]
            while ends := [t for t in following(chain[-1]) if t not in row]:
                ranks = [(self.nodes[t].microbatch is not None, length[t], -t) for t in ends]
                chain.append(-max(ranks)[-1])
            low, high = self.x[chain[-1]], self.x[first]
            place = 0
            while any(low < b + 0.9 and a < high + 0.9 for a, b in spans[place]):
                place += 1
            spans[place].append((low, high))
            row |= dict.fromkeys(chain, place)
        return row

    # Boxes and arrows, folded into lines

    def _line_starts(self, end: int) -> list[int]:
        """Return the first column of each line; a block of columns stays whole if it can."""
        starts, most = [0], MOST_COLUMNS[bool(self.blocks)]
        for start, stop in pairwise([*self.block_starts, end]):
            if stop - starts[-1] > most and start > starts[-1]:
                starts.append(start)
            width, first = stop - starts[-1], starts[-1]
            n_lines = math.ceil(width / most)
            starts += [first + k * math.ceil(width / n_lines) for k in range(1, n_lines)]
        return starts

    def layout(self) -> AutogradLayout:
        """Return the layout."""
        end = math.floor(max(self.x)) + 1
        starts = self._line_starts(end)
        n_columns = max(b - a for a, b in pairwise([*starts, end]))
        line = [bisect_right(starts, x) - 1 for x in self.x]
        pitch = self.n_rows + LINE_GAP
        boxes = []
        for k, node in enumerate(self.nodes):
            x, y = self.x[k] - starts[line[k]], self.y[k] + line[k] * pitch
            number = "" if node.position is None else str(node.position)
            height, lines = self.height.get(k, HEIGHT), [*name_lines(node.name), number]
            partition = node.partition if self.lane[k] is None else self.partition[k]
            boxes.append(Box(k, x, y, lines, partition, node.name == "Recompute", height))
        frames = []
        for k in self.cycles:
            x, y = boxes[k].x, boxes[k].y
            ops: dict[tuple[Lane, int], list[str]] = defaultdict(list)
            for action in self.nodes[k].tasks:
                ops[action.microbatch, action.stage].append(action.op.name)
            rows = {i: self.lane_y[i] + line[k] * pitch for i, _ in ops}
            boxes += [
                Box(k, x, rows[i], [" ".join(own)], j, own == ["R"]) for (i, j), own in ops.items()
            ]
            half = HEIGHT / 2 + 0.1
            frames.append((x - 0.45, y - half, x + 0.45, max(rows.values()) + half))
        router = _Router(boxes)
        arrows = []
        labels: dict[int, str] = {}  # of nodes whose arrows go to another line and row
        for source, target, is_phony in self.edges:
            a, b = boxes[source], boxes[target]
            if line[source] == line[target]:
                arrows.append(Arrow(router.path(a, b), is_phony))
                continue
            down = (line[target] - line[source]) * pitch
            out = router.path(a, Box(-1, -0.7 - WIDTH / 2, _height(a, b, -down), (), None))
            start = Box(-1, n_columns - 0.3 + WIDTH / 2, _height(b, a, down), (), None)
            into = router.path(start, b)
            if len(out) > 2:  # they stay in the gap between two rows
                out = [*out[:2], (out[3][0], out[1][1])]
            if len(into) > 2:
                into = [(into[0][0], into[2][1]), *into[2:]]
            label = ""
            if abs(out[-1][1] + down - into[0][1]) > 0.01:
                label = labels.setdefault(source, str(len(labels) + 1))
            arrows += [Arrow(out, is_phony, False, label), Arrow(into, is_phony, True, label)]
        return AutogradLayout(
            boxes=boxes,
            arrows=arrows,
            lanes={
                y + k * pitch: f"micro-batch {lane}"
                for k in range(len(starts))
                for lane, y in self.lane_y.items()
                if lane is not None
            },
            blocks=self.blocks if len(starts) == 1 else {},
            frames=frames,
            n_columns=n_columns,
            n_rows=len(starts) * pitch - LINE_GAP,
        )


class _Router:
    """Finds ways between boxes: straight, or through the gap between two rows."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.x = np.array([box.x for box in boxes])
        self.y = np.array([box.y for box in boxes])
        self.half = np.array([box.height / 2 for box in boxes])
        #: By the row of a gap, the arrows in it: first and last column, and place in the gap.
        self.gaps: dict[float, list[tuple[float, float, int]]] = defaultdict(list)

    def path(self, a: Box, b: Box) -> list[Point]:
        """Return the points of an arrow from the border of one box to that of another."""
        dx, down = a.x - b.x, float(np.sign(b.y - a.y))
        if 0 < dx < 1:  # a node beside the way of others
            if down > 0:
                return [(a.x, a.y + HEIGHT / 2), (b.x + WIDTH / 2, b.y)]
            return [(a.x - WIDTH / 2, a.y), (b.x, b.y + HEIGHT / 2)]
        if dx > 0:
            start, end = (a.x - WIDTH / 2, _height(a, b)), (b.x + WIDTH / 2, _height(b, a))
            bends, gap = (a.x - 0.5, b.x + 0.5), b.y - 0.5 * (down or 1.0)
        else:
            start, end = (a.x, a.y + down * HEIGHT / 2), (b.x, b.y - down * HEIGHT / 2)
            bends, gap = (a.x + 0.5, b.x - 0.5), a.y + (0.5 + LANE_GAP / 2) * down
        if self._is_free(start, end):
            return [start, end]
        low, high = sorted(bends)
        used = {place for first, last, place in self.gaps[gap] if low < last and first < high}
        place = next(k for k in range(len(used) + 1) if k not in used)
        self.gaps[gap].append((low, high, place))
        gap += 0.06 * (place % 5 - 2)
        return [start, (bends[0], gap), (bends[1], gap), end]

    def _is_free(self, start: Point, end: Point) -> bool:
        """Return whether no box is on the straight way."""
        share = np.linspace(0.01, 0.99, 99)[:, None]
        x, y = (a + share * (b - a) for a, b in zip(start, end, strict=True))
        inside = (abs(x - self.x) < WIDTH / 2) & (abs(y - self.y) < self.half)
        return not bool(inside.any())


def _height(box: Box, other: Box, down: float = 0.0) -> float:
    """Return the row in which an arrow meets a box; the other box is moved ``down``."""
    half = max(0.0, box.height - HEIGHT) / 2
    return min(max(other.y + down, box.y - half), box.y + half)
