// The picture: rows of lanes, and what is drawn of them.

import { drawArrows } from "./arrows.js";
import { drawAxis, drawGrid, drawGutter, drawMakespans, drawMinimap } from "./frame_drawing.js";
import { makeView } from "./geometry.js";
import { drawLane, drawMemory } from "./lane_drawing.js";
import { formatShare, formatTime } from "./text.js";

/** Rows and their places, for a state of the view. */
export class Scene {
  /**
   * @param {object[]} panels `{name, tracks: ShownTrack[]}`, those that are shown.
   * @param {object[]} ops Operations.
   * @param {object[]} causes Causes of idle time.
   */
  constructor(panels, ops, causes) {
    this.panels = panels;
    this.ops = ops;
    this.causes = causes;
    this.rows = [];
    this.mapKey = "";
  }

  /** First and last time of all timelines. */
  get extent() {
    const timelines = this.panels.flatMap(({ tracks }) => tracks.map((track) => track.timeline));
    const last = Math.max(...timelines.map(({ makespan }) => makespan));
    return [Math.min(0, ...timelines.map(({ first }) => first)), last > 0 ? last : 1];
  }

  /** Whether a panel has a predicted and a measured timeline. */
  isComparison(panel) {
    return panel.tracks.length > 1;
  }

  /** Place the rows of a state, from a height on. */
  lay(state, top = 0) {
    const lane = state.laneHeight, thin = Math.max(3, 0.28 * lane);
    this.rows = [];
    let y = top;
    const add = (height, row) => {
      this.rows.push({ y, height, ...row });
      y += height;
    };
    this.panels.forEach((panel, number) => {
      if (this.panels.length > 1) add(20, { type: "heading", panel });
      const compared = this.isComparison(panel);
      for (let device = 0; device < panel.tracks[0].graph.nDevices; device++) {
        const first = this.rows.length;
        panel.tracks.forEach((track) => {
          for (const laneOf of track.lanes[device] ?? []) {
            const isCompute = laneOf.stream === "compute";
            if (!isCompute && !state.show.messages) continue;
            const height = isCompute ? (compared ? 0.62 * lane : lane) : thin;
            add(height, { type: "lane", panel, track, device, lane: laneOf, isCompute });
          }
          if (state.show.memory && track.memory) {
            add(Math.max(14, 0.6 * lane), { type: "memory", panel, track, device });
          }
        });
        if (first < this.rows.length) {
          this.rows[first].label = device;
          this.rows[first].block = y - this.rows[first].y;
        }
        y += Math.min(5, Math.max(0.5, 0.16 * lane));
      }
      if (number + 1 < this.panels.length) y += 6;
    });
    this.height = y - top;
    this.rowOfLane = new Map(
      this.rows.filter((row) => row.type === "lane").map((row) => [row.lane, row]),
    );
  }

  /** Draw the whole picture of a state. */
  draw(painter, state, size) {
    const { width, height } = size, view = makeView(state, size), { theme } = view;
    painter.clear(width, height, theme.surface);
    const top = size.top, bottom = height - size.bottom;
    drawGrid(painter, view, top, bottom);
    for (const row of this.rows) {
      const y = row.y - state.scroll;
      if (y + row.height < top || y > bottom) continue;
      if (row.type === "lane") drawLane(painter, this, state, view, row, y);
      else if (row.type === "memory") drawMemory(painter, view, row, y);
    }
    drawMakespans(painter, this, view, state, top, bottom);
    if (state.show.arrows) drawArrows(painter, this, state, view, top, bottom);
    drawGutter(painter, this, state, view, top, bottom);
    painter.rect(0, 0, width, top, theme.surface);
    if (bottom < height) painter.rect(0, bottom, width, height - bottom, theme.surface);
    drawAxis(painter, view, top);
    if (size.minimap) drawMinimap(painter, this, state, view);
  }

  /** The rectangle of a task, or null if its lane is not shown. */
  boxOf(track, task, state, size) {
    const row = this.rowOfLane.get(track.laneOf(task));
    if (!row) return null;
    const view = makeView(state, size), x = view.x(track.timeline.start[task]);
    const end = track.timeline.end[task];
    const right = Number.isNaN(end) ? view.right : view.x(end);
    return { x, y: row.y - state.scroll, width: right - x, height: row.height, row };
  }

  /** Operations whose tasks are drawn. */
  presentOps() {
    const present = new Set();
    for (const { type, lane, track } of this.rows) {
      if (type !== "lane") continue;
      const { graph } = track;
      for (const task of lane.slotTasks) present.add(graph.op(task));
    }
    return this.ops.filter((_, op) => present.has(op));
  }

  /** The title of a panel with its makespans. */
  headingOf(panel) {
    const parts = panel.tracks.map(({ role, timeline, track }) => {
      const time = formatTime(timeline.makespan, track.unit);
      return `${role ? `${role} ` : ""}${time}, bubble ${formatShare(timeline.bubble)}`;
    });
    return `${panel.name}: ${parts.join("; ")}`;
  }

  /** Number of tasks in view, those of messages included. */
  countInView({ from, to }) {
    let n = 0;
    for (const { lane } of this.rows) {
      if (lane) n += Math.max(0, lane.firstStartingAt(to) - lane.firstEndingAfter(from));
    }
    return n;
  }

  /** Tasks in view in order of time, the first `most` of them, and their number. */
  tasksInView({ from, to, show }, most) {
    const rows = [];
    let n = 0;
    for (const panel of this.panels) {
      for (const track of panel.tracks) {
        for (const lane of track.lanes.flat()) {
          if (lane.stream !== "compute" && !show.messages) continue;
          const low = lane.firstEndingAfter(from), high = lane.firstStartingAt(to);
          n += high - low;
          // Of each lane, the first suffice: rows are sorted by their starts.
          for (let k = low; k < Math.min(high, low + most); k++) {
            rows.push({ panel, track, task: lane.tasks[k] });
          }
        }
      }
    }
    const startOf = ({ track, task }) => track.timeline.start[task];
    rows.sort((a, b) => startOf(a) - startOf(b) || a.task - b.task);
    return { rows: rows.slice(0, most), n };
  }

  /** The row at a height, or null. */
  rowAt(y, state) {
    const position = y + state.scroll;
    return this.rows.find((row) => row.y <= position && position < row.y + row.height) ?? null;
  }

  /** What is at a point: a task, a gap, or null. */
  hit(x, y, state, size) {
    const view = makeView(state, size);
    if (x < view.left || x > view.right || y < size.top) return null;
    const row = this.rowAt(y, state);
    if (!row || row.type === "heading") return null;
    const time = view.time(x), { track } = row;
    if (row.type === "memory") return { type: "memory", track, device: row.device, time };
    const task = row.lane.taskAt(time, 2 * (view.to - view.from) / (view.right - view.left));
    if (task >= 0) return { type: "task", track, task, time };
    if (!row.isCompute) return null;
    const gap = track.gaps[row.device].find(({ since, until }) => since <= time && time < until);
    return gap ? { type: "gap", track, gap, time } : null;
  }
}
