// "What if": sliders of durations and of the network, and a simulation in the page.

import { element } from "./elements.js";
import { isUnchanged, scaledInputs, simulate, unchanged } from "../data/simulator.js";
import { Timeline } from "../data/timeline.js";
import { formatBytes, formatError, formatShare } from "../drawing/text.js";

/** Largest factor of a slider; the smallest is its inverse. */
const MOST = 4;

export class WhatIf {
  /**
   * @param {object} page
   * @param {() => void} changed Called after other times are shown.
   */
  constructor(page, changed) {
    this.page = page;
    this.changed = changed;
    this.factors = unchanged();
    this.stage = "all";
    this.variant = null;
  }

  /** The track whose changes are simulated: the first that can be; null if none can. */
  get target() {
    for (const { tracks } of this.page.scene.panels) {
      for (const track of tracks) if (track.track.inputs && !track.track.refusal) return track;
    }
    return null;
  }

  get isActive() {
    return this.variant !== null || !isUnchanged(this.factors);
  }

  reset() {
    this.factors = unchanged();
    this.variant = null;
    this.apply();
  }

  /** Simulate with the present factors, and show the result. */
  apply() {
    for (const { tracks, variants } of this.page.scene.panels) {
      for (const track of tracks) {
        const own = track.track;
        if (!own.inputs || own.refusal) continue;
        const source = this.variant === null ? own : variants?.get(this.variant) ?? own;
        if (source === own && isUnchanged(this.factors)) {
          if (!track.isOwn) track.show(own.timeline, true);
          continue;
        }
        const inputs = scaledInputs(source.graph, source.inputs, this.factors);
        const timeline = new Timeline(source.graph, simulate(source.graph, inputs));
        track.show(timeline, false, source.memory);
      }
    }
    this.changed();
  }

  #later() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.apply();
    });
  }

  /** Content of the tab. */
  content() {
    const { target, page } = this;
    if (!target) {
      const reasons = page.scene.panels.flatMap(({ tracks }) =>
        tracks.map(({ track }) => track.refusal)
      );
      const reason = reasons.find(Boolean) ?? "this page has no costs";
      return [
        element("h2", {}, "What if"),
        element("p", {}, `Not available: ${reason}.`),
        element(
          "p",
          { className: "note" },
          "pipesim.simulate(graph, costs) gives a timeline for which it is.",
        ),
      ];
    }
    const own = target.track, { graph } = own;
    const content = [element("h2", {}, "What if"), this.summary()];
    if (own.isReplay) {
      content.push(element(
        "p",
        { className: "note" },
        "Durations are those of these tasks (a replay, as pipesim.replay). Time that the graph does not explain, such as gaps by the host, is not in it.",
      ));
    }
    const present = page.ops.map((op, number) => ({ ...op, number }))
      .filter(({ number, role }) => role === "compute" && graph.kinds.op.includes(number));
    for (const op of present) {
      content.push(
        this.#slider(
          `${op.name} ${op.label}`,
          `op-${op.name}`,
          () => this.factors.ops[op.number] ?? 1,
          (factor) => this.factors.ops[op.number] = factor,
        ),
      );
    }
    content.push(this.#stageSlider(graph));
    if (own.unit === "s" && graph.roleOfKind.some((role) => role !== "compute")) {
      content.push(
        this.#slider(
          "bandwidth",
          "bandwidth",
          () => this.factors.bandwidth,
          (factor) => this.factors.bandwidth = factor,
        ),
        this.#slider(
          "latency",
          "latency",
          () => this.factors.latency,
          (factor) => this.factors.latency = factor,
        ),
      );
    }
    if (own.inputs.launch) {
      content.push(
        this.#slider(
          "launch",
          "launch",
          () => this.factors.launch,
          (factor) => this.factors.launch = factor,
        ),
      );
    }
    const { variants } = page.scene.panels.find(({ tracks }) => tracks.includes(target));
    if (variants?.size) content.push(this.#microbatches(graph, variants));
    const button = element("button", { type: "button", id: "reset" }, "Reset");
    button.addEventListener("click", () => {
      this.reset();
      page.panel.refresh("whatif");
    });
    content.push(element("p", {}, button));
    content.push(element(
      "p",
      { className: "note" },
      "Simulated in this page by the rules of docs/time.md. Bandwidth changes the seconds of bytes alone; an all-reduce keeps its algorithm.",
    ));
    return content;
  }

  /** Makespans of all changed timelines, against their own. */
  summary() {
    const list = element("div", { id: "whatif-summary" });
    if (!this.isActive) {
      list.append(
        element("p", { className: "note" }, "Move a slider: the picture shows the new times."),
      );
      return list;
    }
    for (const line of this.lines()) list.append(element("p", {}, line));
    return list;
  }

  /** What changed, as texts. */
  lines() {
    const { page } = this, lines = [];
    for (const { name, tracks } of page.scene.panels) {
      for (const track of tracks) {
        if (track.isOwn) continue;
        const { timeline } = track, own = track.track.timeline, { unit } = track.track;
        const change = formatError(timeline.makespan / own.makespan - 1);
        let text = `${name}: ${page.formatExact(timeline.makespan, unit)} (${change}), bubble ${
          formatShare(timeline.bubble)
        }`;
        if (track.memory) {
          text += `, peak ${formatBytes(Math.max(...track.memory.map(({ peak }) => peak)))}`;
        }
        lines.push(text);
      }
    }
    return lines;
  }

  #slider(label, id, get, set) {
    const range = element("input", {
      type: "range",
      min: "-2",
      max: "2",
      step: "0.05",
      id,
      value: String(Math.log2(get())),
      "aria-label": `factor of ${label}`,
    });
    const number = element("input", {
      type: "number",
      min: String(1 / 1024),
      max: "1024",
      step: "any",
      value: String(rounded(get())),
      "aria-label": `factor of ${label}, as a number`,
    });
    range.addEventListener("input", () => {
      const power = Number(range.value);
      set(Math.abs(power) < 1e-9 ? 1 : 2 ** power);
      number.value = String(rounded(get()));
      this.#later();
    });
    number.addEventListener("input", () => {
      const factor = Number(number.value);
      if (!(factor > 0 && factor <= 1024)) return;
      set(factor);
      range.value = String(Math.log2(Math.min(MOST, Math.max(1 / MOST, factor))));
      this.#later();
    });
    return element(
      "div",
      { className: "row" },
      element("label", { for: id }, `${label} ×`),
      range,
      number,
    );
  }

  #stageSlider(graph) {
    const choice = element(
      "select",
      { id: "stage", "aria-label": "stage" },
      element("option", { value: "all" }, "all stages"),
      ...Array.from(
        { length: graph.nStages },
        (_, stage) => element("option", { value: String(stage) }, `stage ${stage}`),
      ),
    );
    choice.value = this.stage;
    const stages = () =>
      this.stage === "all"
        ? Array.from({ length: graph.nStages }, (_, k) => k)
        : [Number(this.stage)];
    const row = this.#slider(
      "stage",
      "stage-factor",
      () => this.factors.stages[stages()[0]] ?? 1,
      (factor) => stages().forEach((stage) => this.factors.stages[stage] = factor),
    );
    row.firstChild.replaceWith(choice);
    choice.addEventListener("change", () => {
      this.stage = choice.value;
      this.page.panel.refresh("whatif");
    });
    return row;
  }

  #microbatches(graph, variants) {
    const counts = [graph.nMicrobatches, ...variants.keys()].sort((a, b) => a - b);
    const shown = this.variant ?? graph.nMicrobatches;
    const range = element("input", {
      type: "range",
      min: "0",
      max: String(counts.length - 1),
      step: "1",
      id: "microbatches",
      value: String(counts.indexOf(shown)),
      "aria-label": "number of micro-batches",
    });
    const output = element("span", {}, String(shown));
    range.addEventListener("input", () => {
      const count = counts[Number(range.value)];
      output.textContent = String(count);
      this.variant = count === graph.nMicrobatches ? null : count;
      this.#later();
    });
    return element(
      "div",
      { className: "row" },
      element("label", { for: "microbatches" }, "micro-batches"),
      range,
      output,
    );
  }
}

function rounded(factor) {
  return Number(factor.toPrecision(4));
}
