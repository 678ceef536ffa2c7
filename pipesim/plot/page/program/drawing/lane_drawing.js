// Draw lanes of tasks, idle gaps and memory.

import { firstAbove } from "../data/sorted.js";
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
  const { graph } = track, marked = state.marks(track), fonts = view.fonts;
  for (let k = low; k < high; k++) {
    const task = lane.tasks[k];
    const isUnfinished = lane.end[k] === Infinity;
    const x = view.x(lane.start[k]), right = isUnfinished ? view.right + 9 : view.x(lane.end[k]);
    const width = Math.max(right - x, row.isCompute ? 0 : 1.2);
    if (width <= 0) continue;
    const left = Math.max(x, view.left - 4), shown = Math.min(x + width, view.right + 4) - left;
    if (shown <= 0) continue;
    const gap = width > 3 && row.height > 5 ? Math.min(0.7, 0.12 * width) : 0;
    let fill = graph.fill(task), ink = graph.textColour(task);
    if (pale || isUnfinished) [fill, ink] = [mix(fill, theme.surface, 0.6), theme.ink];
    const isDim = marked && !marked.has(task);
    if (isDim) [fill, ink] = [mix(fill, theme.surface, 0.72), theme.soft];
    painter.rect(left, y, shown - gap, height, fill);
    if (scene.ops[graph.op(task)].hatched && width > 4) {
      painter.hatch(left, y, shown - gap, height, mix(fill, "#000000", 0.45));
    }
    if ((pale || isUnfinished) && width > 3 && height > 4) {
      const outline = isUnfinished ? theme.mark : scene.ops[graph.op(task)].outline;
      painter.frame(left + 0.5, y + 0.5, shown - gap - 1, height - 1, outline, {
        dash: isUnfinished ? [3, 2] : [],
      });
    }
    if (track.differs?.(task) && width > 4 && height > 6) {
      painter.polygon(
        [[x + width - gap, y], [x + width - gap - 5, y], [x + width - gap, y + 5]],
        theme.mark,
      );
    }
    if (height >= fonts.size + 1 && shown > 7) {
      drawLabel(painter, graph, task, left, y + height / 2, shown - gap, ink, fonts.size);
    }
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
  for (const gap of track.gaps[device]) {
    if (gap.until <= view.from || gap.since >= view.to) continue;
    const x = Math.max(view.left, view.x(gap.since)),
      right = Math.min(view.right, view.x(gap.until));
    const causes = track.causesOf(gap);
    if (!causes || right - x < 0.3) continue;
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

/** Draw the bytes that a device holds, its peak and its limit. */
export function drawMemory(painter, view, row, y) {
  const { track, device } = row, { theme } = view;
  const { times, nbytes, peak, peakTime, limit } = track.memory[device];
  const height = row.height - 2, scale = height / track.mostBytes, bottom = y + height;
  painter.rect(view.left, y, view.right - view.left, height, theme.band);
  const points = [];
  let last = -Infinity, high = 0, held = 0;
  const first = Math.max(0, firstAbove(times, view.from) - 1);
  const end = Math.min(view.right, view.x(track.timeline.makespan));
  for (let k = first; k < times.length && times[k] <= view.to; k++) {
    const x = Math.max(view.left, view.x(times[k]));
    // Of the steps within a pixel, the highest is drawn.
    if (x - last < 0.5 && points.length) {
      high = Math.max(high, nbytes[k]);
      points[points.length - 2][1] = bottom - high * scale;
      points[points.length - 1][1] = bottom - nbytes[k] * scale;
      held = nbytes[k];
      continue;
    }
    points.push([x, bottom - held * scale], [x, bottom - nbytes[k] * scale], [
      x,
      bottom - nbytes[k] * scale,
    ]);
    [last, high, held] = [x, nbytes[k], nbytes[k]];
  }
  if (points.length) {
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
