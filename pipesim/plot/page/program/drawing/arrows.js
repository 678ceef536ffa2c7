// Draw arrows: of messages, and along chains of tasks.

import { makeView } from "./geometry.js";

/** Most arrows that are drawn at once, and most tasks in view of which arrows are drawn. */
const MAX_ARROWS = 4000, MAX_TASKS = 20_000;

/** Draw an arrow for each result that another device needs; fewer if there are too many. */
export function drawArrows(painter, scene, state, view, top, bottom) {
  if (scene.countInView(state) > MAX_TASKS) {
    const text = "zoom in to see arrows", { size } = view.fonts;
    painter.text(text, view.right - 4, bottom - size, view.theme.mark, { size, align: "right" });
    return;
  }
  let n = 0;
  for (const { track, from, to } of arrowsInView(scene, state, view)) {
    const a = scene.boxOf(track, from, state, view.size),
      b = scene.boxOf(track, to, state, view.size);
    if (!a || !b || Math.max(a.y, b.y) < top || Math.min(a.y, b.y) > bottom) continue;
    if (++n > MAX_ARROWS) return;
    drawArrow(painter, a, b, view, view.theme.soft, track.graph.role(from) === "send");
  }
}

/** Messages whose arrows are in view: from the SEND to the RECV, or from task to task. */
function* arrowsInView(scene, state, view) {
  for (const { tracks } of scene.panels) {
    for (const track of tracks) {
      const { graph, timeline } = track;
      for (const lanes of track.lanes) {
        for (const lane of lanes) {
          const low = lane.firstEndingAfter(view.from), high = lane.firstStartingAt(view.to);
          for (let k = low; k < high; k++) {
            const task = lane.tasks[k], role = graph.role(task);
            if (role === "send" && graph.pair[task] >= 0) yield* endsOf(track, task, state);
            else if (role === "compute") {
              for (const other of crossing(graph, task)) {
                if (!Number.isNaN(timeline.start[other])) yield { track, from: task, to: other };
              }
            }
          }
        }
      }
    }
  }
}

/** The ends of the arrow of a message: its own boxes if they are shown, or those of its tasks. */
function endsOf(track, send, state) {
  const { graph } = track, recv = graph.pair[send];
  if (state.show.messages || graph.isOnCompute(send)) return [{ track, from: send, to: recv }];
  const sources = Array.from(graph.needsOf(send)), targets = graph.neededBy(recv);
  if (!sources.length || !targets.length) return [];
  return [{ track, from: sources.at(-1), to: targets[0] }];
}

/** Tasks of other devices that need a task without a message. */
function crossing(graph, task) {
  return graph.neededBy(task).filter((other) =>
    graph.device(other) !== graph.device(task) && graph.role(other) === "compute"
  );
}

/** Draw chains of tasks: a frame around each, and an arrow to the next one. */
export function drawChains(painter, scene, state, size, chains) {
  const view = makeView(state, size), { theme } = view;
  painter.clip(view.left, size.top, view.right - view.left, size.height - size.top - size.bottom);
  for (const { track, tasks, colour } of chains) {
    let before = null;
    for (const task of tasks) {
      const box = scene.boxOf(track, task, state, size);
      if (!box) continue;
      const { x, y, width, height } = box;
      if (x + width >= view.left && x <= view.right) {
        painter.frame(x, y, Math.max(1.5, width), height, theme[colour], { line: 1.6 });
      }
      if (before && before.y !== y) {
        drawArrow(painter, before, box, view, theme[colour], false, 1.2);
      }
      before = box;
    }
  }
  painter.unclip();
}

/** An arrow from the end of a box, or from its start for a message, to another box. */
export function drawArrow(painter, a, b, view, colour, isMessage, line = 0.8) {
  const from = [isMessage ? a.x : a.x + a.width, a.y + a.height / 2];
  const to = [isMessage ? b.x + b.width : b.x, b.y + b.height / 2];
  if (Math.max(from[0], to[0]) < view.left || Math.min(from[0], to[0]) > view.right) return;
  painter.line([from, to], colour, { line });
  const angle = Math.atan2(to[1] - from[1], to[0] - from[0]), length = 5;
  const side = (turn) => [
    to[0] - length * Math.cos(angle + turn),
    to[1] - length * Math.sin(angle + turn),
  ];
  painter.polygon([to, side(0.45), side(-0.45)], colour);
}
