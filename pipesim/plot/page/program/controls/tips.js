// Texts of what is under the pointer, and of the ruler.

import { bytesText } from "./cards.js";
import { formatError, formatShare } from "../drawing/text.js";

/** What is under the pointer, as a few lines. */
export function tipText(page, hit) {
  const { track } = hit, { timeline, graph } = track, { unit } = track.track;
  if (hit.type === "memory") return bytesText(hit);
  if (hit.type === "gap") {
    const { gap } = hit, causes = track.causesOf(gap);
    const lines = [
      `device ${gap.device} idle for ${page.formatExact(gap.until - gap.since, unit)}`,
    ];
    if (causes) {
      causes.map((share, k) => [share, page.causes[k].label]).filter(([share]) => share > 0.01)
        .sort((a, b) => b[0] - a[0]).forEach(([share, label]) =>
          lines.push(`${formatShare(share)} ${label}`)
        );
    }
    return lines.join("\n");
  }
  const { task } = hit, end = timeline.end[task];
  const lines = [
    `${track.role ? `${track.role} ` : ""}${graph.taskName(task)}, ${
      page.ops[graph.op(task)].label
    }, device ${graph.device(task)}`,
    Number.isNaN(end)
      ? `from ${page.formatExact(timeline.start[task], unit)}, did not end`
      : `${page.formatExact(timeline.start[task], unit)} to ${page.formatExact(end, unit)}: ${
        page.formatExact(timeline.duration(task), unit)
      }`,
  ];
  const twin = page.twinOf(hit);
  if (twin) {
    const other = twin.track.timeline.duration(task), own = timeline.duration(task);
    const [predicted, measured] = track.role === "predicted" ? [own, other] : [other, own];
    lines.push(
      `${twin.track.role} ${page.formatExact(other, unit)}, error ${
        formatError(predicted / measured - 1)
      }`,
    );
  }
  return lines.join("\n");
}

/** What the ruler measures, as text; "" while it is off. */
export function rulerText(page) {
  const { ruler } = page.view;
  const names = ruler.map(({ task, time }) =>
    task
      ? `${task.track.graph.taskName(task.task)} at ${page.formatExact(time, page.state.unit)}`
      : page.formatExact(time, page.state.unit)
  );
  let text = "";
  if (page.state.isRuling) {
    text = ruler.length
      ? `Ruler: from ${names[0]}`
      : "Ruler: click two tasks or times; edges of tasks attract it.";
  }
  if (ruler.length > 1) {
    text += ` to ${names[1]}: ${
      page.formatExact(Math.abs(ruler[1].time - ruler[0].time), page.state.unit)
    }`;
  }
  return text;
}
