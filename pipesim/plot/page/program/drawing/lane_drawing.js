// Draw lanes of tasks, idle gaps and memory.

import { mostBetween } from "../data/memory.js";
import { firstAbove, firstFor, nextAtLeast } from "../data/sorted.js";
import { mix } from "./painters.js";
import { formatBytes } from "./text.js";

/** Draw the tasks of a lane, and what its device waits for. */
export function drawLane(painter, scene, state, view, row, y) {
  const { lane, track } = row, { theme } = view;
  const { timeline } = track, pale = track.role === "predicted";
  const height = Math.max(1, row.height - (row.height > 8 ? 1 : 0));
  if (row.isCompute) {
    const from = Math.max(view.left, view.x(timeline.first)),
      to = Math.min(view.right, view.x(timeline.makespan));
    if (to > from) painter.rect(from, y, to - from, height, theme.bubble);
    if (state.show.idle) drawIdle(painter, scene, view, row, y, height);
  }
  const low = lane.firstEndingAfter(view.from);
  const high = lane.firstStartingAt(view.to);
  const nColumns = Math.ceil((view.right - view.left) / painter.columnWidth);
  if (high - low > 0.5 * (view.right - view.left)) {
    drawMerged(painter, view, row, y, height, nColumns, pale, state);
    return;
  }
  const marked = state.marks(track);
  for (let k = low; k < high; k++) drawTask(painter, scene, view, row, y, height, k, marked);
}

/** Draw task `k` of a lane; it is dim if others are `marked`. */
function drawTask(painter, scene, view, row, y, height, k, marked) {
  const { lane, track } = row, { graph } = track, { theme } = view, { size } = view.fonts;
  const task = lane.tasks[k], op = scene.ops[graph.op(task)];
  const isUnfinished = lane.end[k] === Infinity;
  const x = view.x(lane.start[k]), right = isUnfinished ? view.right + 9 : view.x(lane.end[k]);
  const width = Math.max(right - x, row.isCompute ? 0 : 1.2);
  const left = Math.max(x, view.left - 4), shown = Math.min(x + width, view.right + 4) - left;
  if (width <= 0 || shown <= 0) return;
  const gap = width > 3 && row.height > 5 ? Math.min(0.7, 0.12 * width) : 0;
  const isPale = track.role === "predicted" || isUnfinished;
  let fill = graph.fill(task), ink = graph.textColour(task);
  if (isPale) [fill, ink] = [mix(fill, theme.surface, 0.6), theme.ink];
  if (marked && !marked.has(task)) [fill, ink] = [mix(fill, theme.surface, 0.72), theme.soft];
  painter.rect(left, y, shown - gap, height, fill);
  if (op.hatched && width > 4) {
    painter.hatch(left, y, shown - gap, height, mix(fill, "#000000", 0.45));
  }
  if (isPale && width > 3 && height > 4) {
    const outline = isUnfinished ? theme.mark : op.outline, dash = isUnfinished ? [3, 2] : [];
    painter.frame(left + 0.5, y + 0.5, shown - gap - 1, height - 1, outline, { dash });
  }
  if (track.differs?.(task) && width > 4 && height > 6) {
    const corner = x + width - gap;
    painter.polygon([[corner, y], [corner - 5, y], [corner, y + 5]], theme.mark);
  }
  if (height >= size + 1 && shown > 7) {
    drawLabel(painter, graph, task, left, y + height / 2, shown - gap, ink, size);
  }
}

/** Write the full name of a task into its box, or its micro-batch, or nothing. */
function drawLabel(painter, graph, task, x, y, width, ink, size) {
  if (width > 5 * size) {
    const name = graph.taskName(task);
    if (painter.textWidth(name, size) + 6 < width) {
      painter.text(name, x + width / 2, y, ink, { size, align: "center" });
      return;
    }
  }
  const label = graph.boxLabel(task);
  if (label && painter.textWidth(label, size) + 2 < width) {
    painter.text(label, x + width / 2, y, ink, { size, align: "center" });
  }
}

/** Draw the shares of operations where tasks are narrower than pixels. */
function drawMerged(painter, view, row, y, height, nColumns, pale, state) {
  const { lane, track } = row, width = (view.to - view.from) / nColumns;
  const shares = new Float64Array(nColumns * Math.max(1, lane.looks.length));
  lane.occupancy(view.from, width, nColumns, shares);
  let colours = lane.looks.map((look) => track.graph.look.fill[look]);
  if (pale) colours = colours.map((colour) => mix(colour, view.theme.surface, 0.6));
  if (state.marks(track)) colours = colours.map((colour) => mix(colour, view.theme.surface, 0.5));
  const background = row.isCompute ? view.theme.bubble : view.theme.surface;
  painter.occupancy(view.left, y, height, nColumns, shares, colours, background);
}

/** Draw the causes of each idle gap, as shares of its height. */
function drawIdle(painter, scene, view, row, y, height) {
  const { track, device } = row;
  const gaps = track.gaps[device], least = 0.3 * (view.to - view.from) / (view.right - view.left);
  for (let k = firstFor((j) => gaps[j].until > view.from, 0, gaps.length); k < gaps.length; k++) {
    const gap = gaps[k];
    if (gap.since >= view.to) break;
    if (gap.until - gap.since < least) continue;
    const x = Math.max(view.left, view.x(gap.since)),
      right = Math.min(view.right, view.x(gap.until));
    const causes = track.causesOf(gap);
    if (!causes) continue;
    let top = y;
    const total = causes.reduce((sum, share) => sum + share, 0) || 1;
    causes.forEach((share, cause) => {
      if (!share) return;
      const part = height * share / total, { colour, hatch } = scene.causes[cause];
      painter.rect(x, top, right - x, part, mix(colour, view.theme.surface, 0.35));
      if (hatch && right - x > 4) {
        painter.hatch(x, top, right - x, part, mix(colour, "#000000", 0.4));
      }
      top += part;
    });
  }
}

/**
 * The outline of the bytes that a device holds: places and bytes.
 *
 * Of several steps within a pixel, the highest counts.
 */
function heldPoints(memory, view) {
  const { times, nbytes } = memory, points = [];
  let low = Math.max(0, firstAbove(times, view.from) - 1), x = view.left;
  const last = firstAbove(times, view.to) - 1;
  while (low <= last) {
    // All steps up to a pixel behind this one, or this one alone.
    const next = nextAtLeast(times, view.time(x + 0.5), low);
    const high = Math.min(last, Math.max(low, next - 1)), most = mostBetween(memory, low, high);
    points.push([x, points.at(-1)?.[1] ?? most], [x, most], [x, nbytes[high]]);
    low = high + 1;
    x = Math.max(x + 0.5, view.x(times[low]));
  }
  return points;
}

/** Draw the bytes that a device holds, its peak and its limit. */
export function drawMemory(painter, view, row, y) {
  const { track, device } = row, { theme } = view;
  const { peak, peakTime, limit } = track.memory[device];
  const height = row.height - 2, scale = height / track.mostBytes, bottom = y + height;
  painter.rect(view.left, y, view.right - view.left, height, theme.band);
  const points = heldPoints(track.memory[device], view).map((
    [x, held],
  ) => [x, bottom - held * scale]);
  if (points.length) {
    const end = Math.min(view.right, view.x(track.timeline.makespan));
    const closing = [[end, points.at(-1)[1]], [end, bottom], [points[0][0], bottom]];
    painter.polygon([...points, ...closing], theme.memory);
  }
  if (Number.isFinite(limit)) {
    const level = bottom - limit * scale;
    painter.line([[view.left, level], [view.right, level]], theme.mark, { dash: [4, 3] });
  }
  const x = view.x(peakTime), level = bottom - peak * scale;
  if (x >= view.left - 1 && x <= view.right) {
    painter.polygon([[x - 3, level - 4], [x + 3, level - 4], [x, level]], theme.ink);
    const size = Math.min(view.fonts.size, height - 2);
    const isRight = x > view.right - 70;
    painter.text(
      formatBytes(peak),
      x + (isRight ? -6 : 6),
      Math.max(y + size / 2 + 1, level),
      theme.ink,
      {
        size,
        align: isRight ? "right" : "left",
      },
    );
  }
}
