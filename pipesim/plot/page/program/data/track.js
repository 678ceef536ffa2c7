// What a page has of one timeline, from its columns.

import { lastWaits, simulatedTimes } from "./simulator.js";
import { Timeline } from "./timeline.js";

/** Start and end of each task, from their columns in the order of streams. */
function readTimes(times, columns, graph) {
  const start = new Float64Array(graph.n), end = new Float64Array(graph.n);
  const order = graph.queues.values;
  if (times.type === "exact") {
    const starts = columns.read(times.start), ends = columns.read(times.end);
    order.forEach((task, k) => {
      start[task] = starts[k];
      end[task] = ends[k];
    });
  } else {
    const gap = columns.read(times.gap), duration = columns.read(times.duration);
    const scale = 10 ** times.digits;
    let ticks = 0;
    order.forEach((task, k) => {
      ticks += gap[k];
      start[task] = ticks / scale;
      ticks += duration[k];
      end[task] = ticks / scale;
    });
  }
  if (times.not_started) { for (const k of columns.read(times.not_started)) start[order[k]] = NaN; }
  if (times.not_ended) { for (const k of columns.read(times.not_ended)) end[order[k]] = NaN; }
  return { start, end };
}

/** The task before each, from its distance; -1 where that is 0. */
function before(distance) {
  const tasks = new Int32Array(distance.length);
  for (let task = 0; task < tasks.length; task++) {
    tasks[task] = distance[task] ? task - distance[task] : -1;
  }
  return tasks;
}

/** Seconds of each task, as inputs of the simulator: 0 for a RECV, whose times follow from others. */
function durations(timeline) {
  const { graph, start, end } = timeline, seconds = new Float64Array(graph.n);
  for (let task = 0; task < graph.n; task++) {
    if (graph.role(task) !== "recv") seconds[task] = end[task] - start[task];
  }
  return seconds;
}

/** What a page has of one timeline: its tasks, times, inputs of the simulator, bytes, causes. */
export class Track {
  constructor(spec, graphs, columns) {
    const read = (column) => columns.read(column);
    this.name = spec.name;
    this.unit = spec.unit;
    this.problem = spec.problem ?? "";
    this.graph = graphs[spec.graph];
    this.resolution = spec.times.resolution ?? 0;
    const given = spec.inputs;
    this.inputs = given.latency
      ? {
        isPerTask: given.per_task,
        duration: given.duration ? read(given.duration) : null,
        latency: read(given.latency),
        held: read(given.held),
        share: given.share ? read(given.share) : null,
        launch: given.launch ? read(given.launch) : null,
        issued: given.issued ? read(given.issued) : null,
      }
      : null;
    this.refusal = given.refusal;
    this.isReplay = given.replay;
    const times = spec.times.type === "simulated"
      ? simulatedTimes(this.graph, this.inputs)
      : readTimes(spec.times, columns, this.graph);
    const waits = spec.waits
      ? { before: before(read(spec.waits.back)), reason: read(spec.waits.reason) }
      : lastWaits(this.graph, this.inputs, times);
    this.timeline = new Timeline(this.graph, { ...times, ...waits });
    if (given.replay) this.inputs.duration = durations(this.timeline);
    this.nbytes = spec.nbytes ? read(spec.nbytes) : null;
    this.memory = spec.memory?.allocated
      ? Object.fromEntries(Object.entries(spec.memory).map(([name, c]) => [name, read(c)]))
      : null;
    this.gaps = spec.gaps
      ? { n: spec.gaps.n, seconds: read(spec.gaps.seconds), shares: spec.gaps.shares.map(read) }
      : null;
  }
}
