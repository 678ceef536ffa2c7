// Timelines: times of tasks, and the chains that led to them.

import { grouped } from "./graph.js";

/** Start and end of each task of a graph, and why each task started when it did. */
export class Timeline {
  /**
   * @param {any} graph A `Graph`.
   * @param {any} times Columns `start`, `end`, `before` and `reason`.
   */
  constructor(graph, times) {
    this.graph = graph;
    this.start = times.start;
    this.end = times.end;
    this.before = times.before;
    this.reason = times.reason;
    let makespan = 0, first = 0, isComplete = true;
    for (let task = 0; task < graph.n; task++) {
      if (this.end[task] > makespan) makespan = this.end[task];
      if (this.start[task] < first) first = this.start[task];
      if (Number.isNaN(this.end[task])) isComplete = false;
    }
    /** End of the last task; of a timeline that starts before 0, `first` is below 0. */
    this.makespan = makespan;
    this.first = first;
    this.isComplete = isComplete;
  }

  duration(task) {
    return this.end[task] - this.start[task];
  }

  /** Seconds that each device computes. */
  get busy() {
    if (!this._busy) {
      this._busy = new Float64Array(this.graph.nDevices);
      for (let task = 0; task < this.graph.n; task++) {
        if (this.graph.role(task) === "compute" && !Number.isNaN(this.end[task])) {
          this._busy[this.graph.device(task)] += this.duration(task);
        }
      }
    }
    return this._busy;
  }

  /** Share of the time of all devices in which they do not compute, 0 to 1. */
  get bubble() {
    if (!this.makespan) return 1;
    let idle = 0;
    for (const seconds of this.busy) idle += this.makespan - seconds;
    return Math.max(0, idle / (this.graph.nDevices * this.makespan));
  }

  /**
   * The chain of tasks that led to a task, first task first.
   *
   * Measured times may contradict the order of a stream, so that waits form a circle: a chain has
   * each task once at most.
   */
  chainTo(task) {
    const chain = new Set();
    for (let t = task; t >= 0 && !chain.has(t); t = this.before[t]) chain.add(t);
    return [...chain].reverse();
  }

  /** The longest chain of tasks that each waited for the one before, from a task on. */
  chainFrom(task) {
    if (!this._waiters) {
      this._waiters = grouped(
        Int32Array.from(this.before, (other) => other < 0 ? this.graph.n : other),
        this.graph.n + 1,
      );
    }
    const { ptr, values } = this._waiters, chain = new Set();
    // Of the tasks that waited for a task, follow the one whose chain ends last.
    const last = this.#lastEnds();
    for (let t = task;;) {
      let next = -1;
      for (let k = ptr[t]; k < ptr[t + 1]; k++) {
        if (next < 0 || last[values[k]] > last[next]) next = values[k];
      }
      if (next < 0 || chain.has(next)) return [...chain];
      chain.add(next);
      t = next;
    }
  }

  /** The end of the last task of all chains from each task on. */
  #lastEnds() {
    if (!this._lastEnds) {
      this._lastEnds = this.end.slice();
      for (let task = this.graph.n - 1; task >= 0; task--) {
        const other = this.before[task];
        if (other >= 0 && !(this._lastEnds[other] >= this._lastEnds[task])) {
          this._lastEnds[other] = this._lastEnds[task];
        }
      }
    }
    return this._lastEnds;
  }

  /** The chain of tasks that sets the makespan, first task first. */
  get criticalPath() {
    if (!this._criticalPath) {
      let last = -1;
      for (let task = 0; task < this.graph.n; task++) {
        if (!Number.isNaN(this.end[task]) && (last < 0 || this.end[task] > this.end[last])) {
          last = task;
        }
      }
      this._criticalPath = this.chainTo(last);
    }
    return this._criticalPath;
  }
}
