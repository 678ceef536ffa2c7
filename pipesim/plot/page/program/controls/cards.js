// Cards of tasks and gaps, and tables of the panel.

import { element, table } from "./elements.js";
import { firstAbove } from "../data/sorted.js";
import {
  formatBytes,
  formatError,
  formatShare,
  formatTime,
  formatTimeTo,
} from "../drawing/text.js";

/** Most rows of tables of tasks, and most names in a list of tasks. */
const MAX_ROWS = 200, MAX_NAMES = 12;

function facts(pairs) {
  return element(
    "dl",
    {},
    ...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
  );
}

function taskLinks(track, tasks, select) {
  const shown = tasks.slice(0, MAX_NAMES).map((task) => taskLink(track, task, select));
  if (tasks.length > MAX_NAMES) shown.push(`and ${tasks.length - MAX_NAMES} more`);
  return element("span", {}, ...(shown.length ? shown : ["none"]));
}

/** A button with the name of a task that selects it. */
export function taskLink(track, task, select) {
  const button = element(
    "button",
    { className: "link", type: "button" },
    track.graph.taskName(task),
  );
  button.addEventListener("click", () => select({ type: "task", track, task }));
  return button;
}

/** What a timeline says of a task, as pairs of a name and a text. */
export function taskFacts(page, track, task) {
  const { graph, timeline } = track, { unit, resolution, nbytes } = track.track;
  const op = graph.ops[graph.op(task)], time = (seconds) => page.formatExact(seconds, unit);
  const pairs = [
    ["operation", `${op.label} (${op.name})`],
    ["device", String(graph.device(task))],
    ["stream", graph.streamName[graph.stream(task)]],
    ["stage", String(graph.stage(task))],
  ];
  if (graph.microbatch[task] >= 0) pairs.push(["micro-batch", String(graph.microbatch[task])]);
  if (graph.nReplicas > 1) pairs.push(["replica", String(graph.replica(task))]);
  pairs.push(["start", time(timeline.start[task])]);
  pairs.push(["end", Number.isNaN(timeline.end[task]) ? "did not end" : time(timeline.end[task])]);
  pairs.push(["duration", time(timeline.duration(task))]);
  if (resolution && track.isOwn) {
    pairs.push(["resolution", `times rounded to ${formatTime(resolution)}`]);
  }
  if (nbytes && nbytes[task] > 0 && track.isOwn) pairs.push(["bytes", formatBytes(nbytes[task])]);
  const memory = track.memoryColumns;
  if (memory?.allocated[task] > 0) pairs.push(["allocates", formatBytes(memory.allocated[task])]);
  if (memory?.released[task] > 0) pairs.push(["releases", formatBytes(memory.released[task])]);
  return pairs;
}

/** The card of a task. */
export function taskCard(page, { track, task }) {
  const { graph, timeline } = track, select = (item) => page.select(item, true);
  const pairs = taskFacts(page, track, task);
  const twin = page.twinOf({ type: "task", track, task });
  if (twin) {
    const [own, other] = [timeline.duration(task), twin.track.timeline.duration(task)];
    pairs.push([`${twin.track.role} duration`, page.formatExact(other, track.track.unit)]);
    const [predicted, measured] = track.role === "predicted" ? [own, other] : [other, own];
    pairs.push(["error", `${formatError(predicted / measured - 1)} (predicted over measured)`]);
    const shift = timeline.start[task] - twin.track.timeline.start[task];
    pairs.push(["start differs by", page.formatExact(shift, track.track.unit)]);
  }
  const before = timeline.before[task], reason = page.reasons[timeline.reason[task]];
  const waited = before >= 0
    ? element("span", {}, taskLink(track, before, select), ` (${reason})`)
    : reason === "host"
    ? "its host"
    : "the start of the step";
  pairs.push(
    ["waited for", waited],
    ["needs", taskLinks(track, Array.from(graph.needsOf(task)), select)],
    ["frees", taskLinks(track, graph.neededBy(task), select)],
  );
  const chain = page.chain ?? { before: [], after: [] };
  return [
    element("h2", {}, `${graph.taskName(task)} on device ${graph.device(task)}`),
    facts(pairs),
    element(
      "p",
      { className: "note" },
      `Chain: ${chain.before.length} tasks led to it, ${chain.after.length} follow.`,
    ),
  ];
}

/** The card of an idle gap: its causes, and the chain that ended it. */
export function gapCard(page, { track, gap }) {
  const { graph, timeline } = track,
    { unit } = track.track,
    select = (item) => page.select(item, true);
  const isLast = timeline.start[gap.task] !== gap.until || graph.device(gap.task) !== gap.device;
  const pairs = [
    ["from", page.formatExact(gap.since, unit)],
    ["to", page.formatExact(gap.until, unit)],
    ["lasts", page.formatExact(gap.until - gap.since, unit)],
    [isLast ? "ends with" : "next task", taskLink(track, gap.task, select)],
  ];
  const before = timeline.before[gap.task], reason = page.reasons[timeline.reason[gap.task]];
  if (!isLast && before >= 0) {
    pairs.push([
      "which waited for",
      element("span", {}, taskLink(track, before, select), ` (${reason})`),
    ]);
  }
  const causes = track.causesOf(gap),
    content = [
      element("h2", {}, `Device ${gap.device} is idle`),
      facts(pairs),
    ];
  if (causes) {
    const seconds = gap.until - gap.since;
    const rows = causes.map((share, k) => [share, k]).filter(([share]) => share > 0.002)
      .sort((a, b) => b[0] - a[0])
      .map(([share, k]) => [
        element("span", {}, colourKey(page.causes[k].colour), page.causes[k].label),
        formatShare(share),
        formatTime(share * seconds, unit),
      ]);
    content.push(table(["cause", "share", "time"], rows));
  } else {
    content.push(element("p", { className: "note" }, page.noCauses(track)));
  }
  return content;
}

/** A small square of a colour. */
export function colourKey(colour) {
  const key = element("span", { className: "key", "aria-hidden": "true" });
  key.style.background = colour;
  return key;
}

/** The card without a selection: what the timelines are, and what colours mean. */
export function overview(page) {
  const content = [];
  for (const panel of page.scene.panels) {
    content.push(element("h2", {}, panel.name));
    for (const track of panel.tracks) {
      const { timeline, graph } = track, { unit, problem } = track.track;
      if (problem) {
        content.push(
          element("p", {}, "It cannot run. Actions are at their positions."),
          element("p", { className: "pre" }, problem),
        );
      }
      const pairs = [
        [
          track.role ? `${track.role} makespan` : unit === "s" ? "makespan" : `${unit}s`,
          page.formatExact(timeline.makespan, unit),
        ],
        ["bubble", formatShare(timeline.bubble)],
        ["tasks", graph.n.toLocaleString("en")],
      ];
      if (track.memory) {
        pairs.push([
          "peak memory",
          formatBytes(Math.max(...track.memory.map(({ peak }) => peak))),
        ]);
      }
      if (!timeline.isComplete) {
        const nRan = timeline.end.reduce((sum, end) => sum + !Number.isNaN(end), 0);
        pairs.push(["ran", `${nRan} of ${graph.n} tasks`]);
      }
      content.push(facts(pairs));
    }
    if (page.scene.isComparison(panel)) {
      const [predicted, measured] = panel.tracks.map((track) => track.timeline.makespan);
      content.push(
        element("p", {}, `Error of the makespan: ${formatError(predicted / measured - 1)}.`),
      );
    }
  }
  const present = new Set(
    page.scene.panels.flatMap(({ tracks }) =>
      tracks.flatMap(({ graph }) => Array.from(graph.kinds.op))
    ),
  );
  const keys = page.ops.filter((_, op) => present.has(op))
    .map(({ name, label, colour }) => element("div", {}, colourKey(colour), `${name} ${label}`));
  content.push(element("h2", {}, "Operations"), element("div", { className: "keys" }, ...keys));
  content.push(
    element(
      "p",
      { className: "note" },
      "Later stages of a device are lighter. Recompute is hatched.",
    ),
  );
  return content;
}

/** Idle seconds of each device by cause. */
export function idleTable(page) {
  const content = [];
  for (const panel of page.scene.panels) {
    for (const track of panel.tracks) {
      const { track: own, graph, timeline } = track;
      const title = `${panel.name}${track.role ? `, ${track.role}` : ""}`;
      if (!own.gaps || !track.isOwn) {
        content.push(
          element("h2", {}, title),
          element("p", { className: "note" }, page.noCauses(track)),
        );
        const rows = Array.from(
          timeline.busy,
          (busy, device) => [`device ${device}`, formatTime(timeline.makespan - busy, own.unit)],
        );
        content.push(table(["device", "idle"], rows.slice(0, MAX_ROWS)));
        continue;
      }
      const n = page.causes.length, seconds = own.gaps.seconds;
      const least = 1e-9 * timeline.makespan; // rounding
      const time = (value) => value > least ? formatTime(value) : "0";
      const used = page.causes.map((cause, k) => ({ ...cause, k })).filter(({ k }) => {
        for (let device = 0; device < graph.nDevices; device++) {
          if (seconds[device * n + k] > least) return true;
        }
        return false;
      });
      const rows = Array.from({ length: Math.min(graph.nDevices, MAX_ROWS) }, (_, device) => {
        let total = 0;
        for (let k = 0; k < n; k++) total += seconds[device * n + k];
        return [String(device), ...used.map(({ k }) => time(seconds[device * n + k])), time(total)];
      });
      const sums = used.map(({ k }) => {
        let total = 0;
        for (let device = 0; device < graph.nDevices; device++) total += seconds[device * n + k];
        return total;
      });
      rows.push(["all", ...sums.map(time), time(sums.reduce((a, b) => a + b, 0))]);
      content.push(table(["device", ...used.map(({ label }) => label), "idle"], rows, title));
    }
  }
  const keys = page.causes.map(({ label, colour }) => element("div", {}, colourKey(colour), label));
  content.push(element("p", {}), element("div", { className: "keys" }, ...keys));
  return content;
}

/** A table of the tasks in view, for readers of screens and for copying. */
export function taskTable(page) {
  const { rows, n } = page.scene.tasksInView(page.state, MAX_ROWS);
  const content = rows.map(({ track, task, panel }) => {
    const { graph, timeline } = track, { unit } = track.track;
    const name = taskLink(track, task, (item) => page.select(item, true));
    return [
      name,
      ...(page.scene.panels.length > 1 ? [panel.name] : []),
      ...(track.role ? [track.role] : []),
      String(graph.device(task)),
      graph.streamName[graph.stream(task)],
      page.formatInView(timeline.start[task], unit),
      Number.isNaN(timeline.end[task]) ? "did not end" : formatTime(timeline.duration(task), unit),
    ];
  });
  const first = rows[0]?.track.role ? ["of"] : [];
  const panels = page.scene.panels.length > 1 ? ["timeline"] : [];
  const caption = n > rows.length
    ? `The first ${rows.length} of ${n.toLocaleString("en")} tasks in view`
    : `${n} tasks in view`;
  return [
    table(["task", ...panels, ...first, "device", "stream", "start", "duration"], content, caption),
  ];
}

/** Bytes that a device holds at a time, as text. */
export function bytesText({ track, device, time }) {
  const held = track.memory[device], k = Math.max(0, firstAbove(held.times, time) - 1);
  return `device ${device}: ${formatBytes(held.nbytes[k])}\npeak ${formatBytes(held.peak)} at ${
    formatTimeTo(held.peakTime, 1e-3 * (track.timeline.makespan || 1))
  }`;
}
