// Bytes that devices hold over time (rule 10 of docs/time.md).

/** Events of a block whose most bytes are found beforehand. */
const EVENTS = 32;

/** The largest value of each block. */
function blockMaxima(values) {
  const highest = new Float64Array(Math.ceil(values.length / EVENTS)).fill(-Infinity);
  for (let k = 0; k < values.length; k++) {
    const block = Math.floor(k / EVENTS);
    if (values[k] > highest[block]) highest[block] = values[k];
  }
  return highest;
}

/** Most bytes that a device holds from one index of its `memoryOverTime` to another, inclusive. */
export function mostBetween({ nbytes, highest }, low, high) {
  let most = nbytes[high];
  for (let k = low; k < high;) {
    if (k % EVENTS === 0 && k + EVENTS <= high) {
      most = Math.max(most, highest[k / EVENTS]);
      k += EVENTS;
    } else most = Math.max(most, nbytes[k++]);
  }
  return most;
}

/**
 * Bytes of each device over time: `times` and `nbytes` of each start and end of a task, and the
 * first peak. Ends come before starts at equal times, but for tasks that take no time.
 * @param {object} timeline A `Timeline`.
 * @param {object} memory Columns: bytes that tasks allocate and release, and that devices hold.
 */
export function memoryOverTime(timeline, memory) {
  const { graph, start, end } = timeline;
  // An event is twice the id of its task, plus 1 for an end.
  const events = Array.from({ length: graph.nDevices }, () => []);
  for (let task = 0; task < graph.n; task++) {
    const kind = graph.kind[task], computes = memory.computes[kind];
    const ofDevice = events[graph.kinds.device[kind]];
    if ((computes || memory.allocated[task] > 0) && !Number.isNaN(start[task])) {
      ofDevice.push(2 * task);
    }
    if ((computes || memory.released[task] > 0) && !Number.isNaN(end[task])) {
      ofDevice.push(2 * task + 1);
    }
    // A peer holds activations from the start of OFFLOAD to the end of RELOAD.
    const to = memory.offloads_to?.[kind] ?? -1, from = memory.reloads_from?.[kind] ?? -1;
    if (to >= 0 && !Number.isNaN(start[task])) events[to].push(2 * task);
    if (from >= 0 && !Number.isNaN(end[task])) events[from].push(2 * task + 1);
  }
  const timeOf = (event) => event % 2 ? end[event >> 1] : start[event >> 1];
  const isLate = (event) => event % 2 === 0 || end[event >> 1] <= start[event >> 1];
  const order = (a, b) => timeOf(a) - timeOf(b) || Number(isLate(a)) - Number(isLate(b)) || a - b;
  return events.map((ofDevice, device) => {
    if (ofDevice.some((event, k) => k && order(ofDevice[k - 1], event) > 0)) ofDevice.sort(order);
    const times = new Float64Array(ofDevice.length + 1);
    const nbytes = new Float64Array(ofDevice.length + 1);
    let held = memory.static[device], peak = held, peakTime = 0;
    nbytes[0] = held;
    ofDevice.forEach((event, k) => {
      const task = event >> 1, workspace = memory.workspace[task];
      if (graph.kinds.device[graph.kind[task]] !== device) {
        held += event % 2 ? -memory.allocated[task] : memory.released[task];
      } else {
        held += event % 2 ? -memory.released[task] - workspace : memory.allocated[task] + workspace;
      }
      times[k + 1] = timeOf(event);
      nbytes[k + 1] = held;
      if (held > peak) [peak, peakTime] = [held, times[k + 1]];
    });
    const limit = memory.limit ? memory.limit[device] : NaN;
    return { times, nbytes, highest: blockMaxima(nbytes), peak, peakTime, limit };
  });
}
