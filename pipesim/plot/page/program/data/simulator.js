// Simulate a task graph by the rules of docs/time.md, but for links that several streams share.
// Times are computed with max and + in the order of pipesim's compiled engine, so that they are
// equal to its times.

const REASONS = {
  dependency: 0,
  stream: 1,
  message: 2,
  rendezvous: 3,
  link: 4,
  group: 5,
  host: 6,
  start: 7,
}; // prettier-ignore

/** Factors of durations and of the network, all 1. */
export function unchanged() {
  return { ops: {}, stages: {}, latency: 1, bandwidth: 1, launch: 1 };
}

/** Whether factors change nothing. */
export function isUnchanged(factors) {
  const { ops, stages, latency, bandwidth, launch } = factors;
  return [...Object.values(ops), ...Object.values(stages), latency, bandwidth, launch]
    .every((factor) => factor === 1);
}

/**
 * Return inputs with changed seconds. Rows are kinds or tasks, as in the inputs.
 *
 * Seconds of compute tasks are multiplied by the factors of their operation and stage. Seconds of
 * messages, collectives and copies to and from hosts are divided by the bandwidth's, without those
 * that they hold regardless; of a collective and of a copy these are its latency.
 */
export function scaledInputs(graph, inputs, factors) {
  const { bandwidth, latency } = factors;
  const kindOf = (row) => inputs.isPerTask ? graph.kind[row] : row;
  const duration = inputs.duration.map((seconds, row) => {
    const kind = kindOf(row), role = graph.roleOfKind[kind], held = inputs.held[row];
    if (role === "send" || role === "recv") {
      return bandwidth === 1 ? seconds : held + (seconds - held) / bandwidth;
    }
    if (role === "collective" || role === "copy") {
      if (bandwidth === 1 && latency === 1) return seconds;
      const isWork = graph.ops[graph.kinds.op[kind]].name === "GRAD_NORM";
      return isWork ? seconds : held * latency + (seconds - held) / bandwidth;
    }
    const ofOp = factors.ops[graph.kinds.op[kind]] ?? 1;
    return seconds * ofOp * (factors.stages[graph.kinds.stage[kind]] ?? 1);
  });
  return {
    ...inputs,
    duration,
    latency: latency === 1 ? inputs.latency : inputs.latency.map((seconds) => seconds * latency),
    launch: inputs.launch && inputs.launch.map((seconds) => seconds * factors.launch),
  };
}

/** The row of each task's costs: of its kind, or its own. */
function rowsOf(graph, inputs) {
  if (inputs && !inputs.isPerTask) return graph.kind;
  const rows = new Int32Array(graph.n);
  for (let task = 0; task < graph.n; task++) rows[task] = task;
  return rows;
}

/** The time at which the host has issued each task (rule 7); null if launches take no time. */
function issueTimes(graph, inputs, rowOf) {
  if (!inputs || inputs.issued) return inputs?.issued ?? null;
  if (!inputs.launch) return null;
  const clock = new Float64Array(1 + Math.max(...graph.host)), issued = new Float64Array(graph.n);
  for (let task = 0; task < graph.n; task++) {
    const host = graph.host[graph.kinds.device[graph.kind[task]]];
    issued[task] = clock[host] += inputs.launch[rowOf[task]];
  }
  return issued;
}

/**
 * Simulate a graph whose ids are in topological order.
 * @param {object} graph A `Graph`.
 * @param {object} inputs Seconds of each kind, or of each task.
 * @returns Start and end of each task; the task that each waited for last, or -1; the reason.
 */
export function simulate(graph, inputs) {
  const times = simulatedTimes(graph, inputs);
  return { ...times, ...lastWaits(graph, inputs, times) };
}

/** Start and end of each task of a simulation. */
export function simulatedTimes(graph, inputs) {
  const rowOf = rowsOf(graph, inputs), issued = issueTimes(graph, inputs, rowOf);
  const n = graph.n, { duration, latency } = inputs;
  const start = new Float64Array(n), end = new Float64Array(n);
  const streamFree = new Float64Array(graph.streamDevice.length);
  const groupStart = new Float64Array(graph.membersPtr.length).fill(-1);
  const { kind, streamOfKind, roleOfKind, needsPtr, needs, pair, partial, group } = graph;

  function streamReady(task) {
    const free = streamFree[streamOfKind[kind[task]]];
    return issued ? Math.max(free, issued[task]) : free;
  }
  function ready(task) {
    let time = streamReady(task);
    const part = partial ? partial[task] : -1;
    for (let k = needsPtr[task]; k < needsPtr[task + 1]; k++) {
      if (needs[k] !== part) time = Math.max(time, end[needs[k]]);
    }
    if (part >= 0) {
      const share = inputs.share ? inputs.share[rowOf[task]] : 1;
      time = Math.max(time, start[part] + share * duration[rowOf[part]]);
    }
    return time;
  }

  for (let task = 0; task < n; task++) {
    const role = roleOfKind[kind[task]], stream = streamOfKind[kind[task]];
    let time = ready(task);
    if (role === "recv") {
      const delay = latency[rowOf[task]], sender = pair[task];
      start[task] = Math.max(time, start[sender] + delay);
      end[task] = streamFree[stream] = Math.max(start[task], end[sender] + delay);
      continue;
    }
    if (role === "send" && graph.rendezvous) time = Math.max(time, streamReady(pair[task]));
    if (group.length && group[task] >= 0) {
      const number = group[task];
      if (groupStart[number] < 0) {
        time = 0;
        for (let k = graph.membersPtr[number]; k < graph.membersPtr[number + 1]; k++) {
          time = Math.max(time, ready(graph.members[k]));
        }
        groupStart[number] = time;
      }
      time = groupStart[number];
    }
    start[task] = time;
    end[task] = streamFree[stream] = time + duration[rowOf[task]];
  }
  return { start, end };
}

/**
 * The task that each task waited for last, and the reason: those of pipesim.analysis.critical_path
 * for timelines of costs whose links are not shared.
 */
export function lastWaits(graph, inputs, { start, end }) {
  const rowOf = rowsOf(graph, inputs), issued = issueTimes(graph, inputs, rowOf);
  const before = new Int32Array(graph.n).fill(-1);
  const reason = new Uint8Array(graph.n).fill(REASONS.start);
  const previous = graph.queuePredecessor;
  let last = -1, free = -Infinity, hosted = 0;

  function offer(other, time) {
    if (Number.isNaN(end[other])) return;
    if (last < 0 || time > free || (time === free && other > last)) [last, free] = [other, time];
  }
  function release(task, other) {
    if (!graph.partial || graph.partial[task] !== other) return end[other];
    if (graph.stream(task) === graph.stream(other)) return end[other];
    const share = inputs?.share ? inputs.share[rowOf[task]] : 1;
    const lasted = inputs ? inputs.duration[rowOf[other]] : end[other] - start[other];
    return Math.min(start[other] + share * lasted, end[other]);
  }
  function offerAll(task) {
    for (let k = graph.needsPtr[task]; k < graph.needsPtr[task + 1]; k++) {
      offer(graph.needs[k], release(task, graph.needs[k]));
    }
    if (previous[task] >= 0) offer(previous[task], end[previous[task]]);
    const role = graph.role(task);
    if (role === "send" && graph.rendezvous && graph.pair[task] >= 0) {
      const other = previous[graph.pair[task]];
      if (other >= 0) offer(other, end[other]);
    }
    if (issued) {
      hosted = Math.max(hosted, issued[task]);
      if (role === "send" && graph.rendezvous) hosted = Math.max(hosted, issued[graph.pair[task]]);
    }
  }
  function relation(task, other) {
    if (graph.pair[task] === other) return REASONS.message;
    for (let k = graph.needsPtr[task]; k < graph.needsPtr[task + 1]; k++) {
      if (graph.needs[k] === other) return REASONS.dependency;
    }
    if (previous[task] === other) return REASONS.stream;
    return graph.role(task) === "send" ? REASONS.rendezvous : REASONS.group;
  }

  const ofGroup = new Map();
  for (let task = 0; task < graph.n; task++) {
    if (Number.isNaN(start[task])) continue;
    const role = graph.role(task), sender = role === "recv" ? graph.pair[task] : -1;
    if (sender >= 0 && end[task] > start[task]) {
      [before[task], reason[task]] = [sender, REASONS.message];
      continue;
    }
    [last, free, hosted] = [-1, -Infinity, 0];
    const number = graph.group.length ? graph.group[task] : -1;
    if (number < 0) {
      offerAll(task);
    } else {
      if (!ofGroup.has(number)) {
        for (let k = graph.membersPtr[number]; k < graph.membersPtr[number + 1]; k++) {
          offerAll(graph.members[k]);
        }
        ofGroup.set(number, [last, free, hosted]);
      }
      [last, free, hosted] = ofGroup.get(number);
    }
    if (last >= 0 && free >= start[task]) {
      [before[task], reason[task]] = [last, relation(task, last)];
    } else if (issued && hosted >= start[task] && start[task] > 0) {
      reason[task] = REASONS.host;
    } else if (sender >= 0) {
      [before[task], reason[task]] = [sender, REASONS.message];
    } else if (last >= 0) {
      [before[task], reason[task]] = [last, relation(task, last)];
    }
  }
  return { before, reason };
}
