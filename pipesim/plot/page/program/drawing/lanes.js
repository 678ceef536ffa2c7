// Lanes of tasks: which tasks are in view, and the share of each operation where they merge.

import { firstAbove, firstAtLeast, nextAtLeast } from "../data/sorted.js";

/** Tasks of a block whose seconds are summed beforehand. */
const BLOCK = 32;

/** Tasks of one stream in order of their starts. */
export class Lane {
  /**
   * @param {object} timeline A `Timeline`.
   * @param {number} device
   * @param {string} stream Name of the stream.
   * @param {ArrayLike<number>} tasks
   */
  constructor(timeline, device, stream, tasks) {
    this.timeline = timeline;
    this.device = device;
    this.stream = stream;
    const { start, end, graph } = timeline;
    const started = new Int32Array(tasks.length);
    let nStarted = 0, isSorted = true, before = -Infinity;
    for (let k = 0; k < tasks.length; k++) {
      const time = start[tasks[k]];
      if (Number.isNaN(time)) continue;
      isSorted &&= time >= before;
      before = time;
      started[nStarted++] = tasks[k];
    }
    this.tasks = started.subarray(0, nStarted);
    if (!isSorted) this.tasks.sort((a, b) => start[a] - start[b] || a - b);
    const n = this.tasks.length;
    this.start = new Float64Array(n);
    this.end = new Float64Array(n);
    this.slot = new Uint8Array(n);
    const slots = new Map();
    let latest = -Infinity;
    /** Latest end of a task and all before it: rising, also where tasks overlap. */
    this.reach = new Float64Array(n);
    this.tasks.forEach((task, k) => {
      const look = graph.look.ofKind[graph.kind[task]];
      if (!slots.has(look)) slots.set(look, slots.size);
      this.start[k] = start[task];
      this.end[k] = Number.isNaN(end[task]) ? Infinity : end[task];
      this.slot[k] = Math.min(255, slots.get(look));
      this.reach[k] = latest = Math.max(latest, this.end[k]);
    });
    /** Numbers of the colours of this lane, by slot. */
    this.looks = [...slots.keys()];
    /** A task of each slot. */
    this.slotTasks = this.looks.map((_, slot) => this.tasks[this.slot.indexOf(slot)]);
  }

  /** Index of the first task that ends after a time. */
  firstEndingAfter(time) {
    return firstAbove(this.reach, time);
  }

  /** Index of the first task that starts at a time or later. */
  firstStartingAt(time) {
    return firstAtLeast(this.start, time);
  }

  /** The task at a time, or within `margin` of it; -1 if there is none. */
  taskAt(time, margin = 0) {
    let best = -1, distance = margin;
    for (let k = this.firstStartingAt(time + margin + Number.MIN_VALUE); k-- > 0;) {
      if (this.start[k] <= time && time < this.end[k]) return this.tasks[k];
      const away = time < this.start[k] ? this.start[k] - time : time - this.end[k];
      if (away <= distance) [best, distance] = [this.tasks[k], away];
      if (this.reach[k] < time - margin) break;
    }
    return best;
  }

  /** Seconds of each slot in the tasks before each block of tasks. */
  get sums() {
    if (!this._sums) {
      const width = this.looks.length, n = Math.ceil(this.tasks.length / BLOCK);
      this._sums = new Float64Array((n + 1) * width);
      for (let block = 0; block < n; block++) {
        const row = (block + 1) * width;
        for (let slot = 0; slot < width; slot++) {
          this._sums[row + slot] = this._sums[row - width + slot];
        }
        const last = Math.min(this.tasks.length, (block + 1) * BLOCK);
        for (let k = block * BLOCK; k < last; k++) {
          if (this.end[k] < Infinity) this._sums[row + this.slot[k]] += this.end[k] - this.start[k];
        }
      }
    }
    return this._sums;
  }

  /**
   * Fill the share of time of each slot in equal columns of time.
   * @param {number} first Start of the first column (s).
   * @param {number} width Seconds of a column.
   * @param {number} n Number of columns.
   * @param {Float64Array} shares Shape (n, slots): each value is 0 to 1.
   */
  occupancy(first, width, n, shares) {
    const nSlots = this.looks.length, sums = this.sums;
    shares.fill(0, 0, n * nSlots);
    let low = this.firstEndingAfter(first);
    for (let column = 0; column < n && low < this.tasks.length; column++) {
      const from = first + column * width, to = from + width, row = column * nSlots;
      if (this.start[low] >= to) {
        // Skip columns in which nothing runs.
        column += Math.max(0, Math.floor((this.start[low] - from) / width) - 1);
        continue;
      }
      const high = nextAtLeast(this.start, to, low);
      let k = low;
      while (k < high) {
        if (k % BLOCK === 0 && k + BLOCK < high && this.start[k] >= from) {
          const last = Math.floor((high - 1) / BLOCK);
          const a = (k / BLOCK) * nSlots, b = last * nSlots;
          for (let slot = 0; slot < nSlots; slot++) {
            shares[row + slot] += sums[b + slot] - sums[a + slot];
          }
          k = last * BLOCK;
          continue;
        }
        const seconds = Math.min(this.end[k], to) - Math.max(this.start[k], from);
        if (seconds > 0) shares[row + this.slot[k]] += seconds;
        k++;
      }
      low = high - 1;
      while (low > 0 && this.reach[low - 1] > to) low--;
      if (this.end[low] <= to) low = high;
    }
    let total = 0;
    for (let k = 0; k < n * nSlots; k++) {
      shares[k] = Math.min(1, shares[k] / width);
      total = k % nSlots ? total + shares[k] : shares[k];
      if (total > 1) shares[k] = Math.max(0, shares[k] - (total - 1));
    }
  }
}
