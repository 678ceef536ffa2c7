// Idle gaps between the compute tasks of devices.

/**
 * Gaps of all devices, by device and in order of time, as pipesim.analysis.idle_gaps finds them.
 *
 * `task` is the task after a gap; at the end of the step it is that which ends last. `previous` is
 * the task before it, or -1.
 * @param {object} timeline A `Timeline`.
 */
export function findGaps(timeline) {
  const { graph, start, end, makespan } = timeline;
  const ofDevice = Array.from({ length: graph.nDevices }, () => []);
  let last = 0;
  for (let task = 0; task < graph.n; task++) {
    if (end[task] > end[last]) last = task;
    if (graph.role(task) === "compute" && !Number.isNaN(end[task])) {
      ofDevice[graph.device(task)].push(task);
    }
  }
  const gaps = [];
  ofDevice.forEach((tasks, device) => {
    tasks.sort((a, b) => start[a] - start[b] || end[a] - end[b] || a - b);
    let since = 0, free = -Infinity, previous = -1;
    for (const task of tasks) {
      if (start[task] > since) gaps.push({ device, since, until: start[task], task, previous });
      free = Math.max(free, end[task]);
      since = Math.max(free, 0);
      previous = task;
    }
    if (makespan > since) gaps.push({ device, since, until: makespan, task: last, previous });
  });
  return gaps;
}
