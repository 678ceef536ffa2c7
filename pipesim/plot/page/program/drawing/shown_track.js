// A timeline as it is shown.

import { findGaps } from "../data/gaps.js";
import { Lane } from "./lanes.js";
import { memoryOverTime } from "../data/memory.js";

/** One timeline as it is shown: its own times, or those of a changed simulation. */
export class ShownTrack {
  /**
   * @param {object} track A `Track`.
   * @param {string} role "predicted", "measured" or "".
   */
  constructor(track, role) {
    this.track = track;
    this.role = role;
    this.graph = track.graph;
    this.show(track.timeline, true);
  }

  /** Show other times of the same tasks, or of other tasks. */
  show(timeline, isOwn, memory = isOwn ? this.track.memory : null) {
    this.timeline = timeline;
    this.graph = timeline.graph;
    this.isOwn = isOwn;
    this.memoryColumns = memory;
    this._lanes =
      this._gaps =
      this._memory =
      this._minimap =
        null;
  }

  /** Lanes of each device, compute first. */
  get lanes() {
    if (!this._lanes) {
      const { graph } = this, { ptr, values } = graph.queues;
      this._lanes = Array.from({ length: graph.nDevices }, () => []);
      graph.streamDevice.forEach((device, stream) => {
        const tasks = values.subarray(ptr[stream], ptr[stream + 1]);
        this._lanes[device].push(new Lane(this.timeline, device, graph.streamName[stream], tasks));
      });
      for (const lanes of this._lanes) {
        lanes.sort((a, b) => Number(b.stream === "compute") - Number(a.stream === "compute"));
      }
    }
    return this._lanes;
  }

  /** The lane of a task. */
  laneOf(task) {
    const { graph } = this, name = graph.streamName[graph.stream(task)];
    return this.lanes[graph.device(task)].find(({ stream }) => stream === name);
  }

  /** Idle gaps by device; each has its number, which is that of its causes. */
  get gaps() {
    if (!this._gaps) {
      this._gaps = Array.from({ length: this.graph.nDevices }, () => []);
      if (this.timeline.isComplete) {
        findGaps(this.timeline).forEach((gap, number) =>
          this._gaps[gap.device].push({ ...gap, number })
        );
      }
    }
    return this._gaps;
  }

  /** Share of each cause in a gap, 0 to 1; null if they are unknown. */
  causesOf(gap) {
    const known = this.isOwn ? this.track.gaps : null;
    return known && known.shares.map((shares) => shares[gap.number] / 255);
  }

  /** Bytes over time of each device; null if they are unknown. */
  get memory() {
    if (!this.memoryColumns) return null;
    this._memory ??= memoryOverTime(this.timeline, this.memoryColumns);
    return this._memory;
  }

  /** Most bytes of any device, or its limit. */
  get mostBytes() {
    return Math.max(1, ...this.memory.map(({ peak, limit }) => Math.max(peak, limit || 0)));
  }
}
