// The page: its document, tool bar, view and panel, and what links them.

import { bytesOfText, inflate } from "../data/columns.js";
import { gapCard, idleTable, overview, taskCard, taskTable } from "./cards.js";
import { describe, selectionOf } from "./description.js";
import { panelsOf, readBlock } from "../data/document.js";
import { download, element } from "./elements.js";
import { exportTab } from "./exports.js";
import { handleKey, helpTab } from "./keyboard.js";
import { Scene } from "../drawing/scene.js";
import { Search } from "../data/search.js";
import { SidePanel } from "./side_panel.js";
import { STYLES } from "./styles.js";
import { formatShare, formatTime, formatTimeTo } from "../drawing/text.js";
import { rulerText, tipText } from "./tips.js";
import { Toolbar } from "./toolbar.js";
import { newState, View } from "./view.js";
import { WhatIf } from "./what_if.js";

/** Most tasks of a chain that are framed. */
const MAX_FRAMES = 4000;

export class Page {
  /**
   * @param {HTMLElement} root Empty element that the page fills.
   * @param {Uint8Array} bytes Decompressed block of the document.
   * @param {{embedded?: boolean, onselect?: (item: object | null) => void}} options
   */
  constructor(root, bytes, { embedded = false, onselect = () => {} } = {}) {
    this.onselect = onselect;
    this.isEmbedded = embedded;
    const dark = globalThis.matchMedia("(prefers-color-scheme: dark)");
    this.state = newState(dark.matches ? "dark" : "light");
    // Until the user chooses a theme, that of the system counts, also when it changes.
    this.isThemeChosen = false;
    dark.addEventListener("change", () => {
      if (!this.isThemeChosen) this.#setTheme(dark.matches ? "dark" : "light");
    });
    this.state.marks = (track) => this.search.ofTrack.get(track) ?? null;
    this.isDarkExport = false;
    /** The selected task or gap, and the chains that lead to it and follow it; or null. */
    this.selection = null;
    this.chain = null;
    this.search = new Search();
    this.read(bytes);
    this.#build(root);
    this.#showPanels(false);
  }

  /** Take another document. */
  read(bytes) {
    const { document, tracks } = readBlock(bytes);
    this.title = document.title;
    this.isStepwise = document.layout === "steps";
    this.ops = document.ops;
    this.causes = document.causes;
    this.reasons = document.reasons;
    this.panels = panelsOf(document, tracks);
    this.step = 0;
  }

  /** Show another document in place of this one; the view keeps its settings. */
  update(bytes) {
    const { step, panels, selection } = this, wasLast = step === panels.length - 1;
    this.read(bytes);
    if (this.isStepwise) this.step = wasLast ? this.panels.length - 1 : step;
    this.step = Math.min(this.step, this.panels.length - 1);
    this.bar.heading.textContent = this.title;
    this.#keep(selection);
  }

  /** Show the panels anew, and keep the selected task if they have it. */
  #keep(selection) {
    const place = this.scene.panels.findIndex(({ tracks }) => tracks.includes(selection?.track));
    this.#choose(null);
    this.#showPanels(true);
    const tracks = this.scene.panels[place]?.tracks ?? [];
    const track = tracks.find(({ role }) => role === selection.track.role);
    if (selection?.type !== "task" || !track || selection.task >= track.graph.n) return;
    this.#choose({ ...selection, track });
    this.panel.refresh("card");
  }

  #showPanels(keep) {
    const panels = this.isStepwise ? [this.panels[this.step]] : this.panels;
    const isKept = keep && !this.view.showsWhole;
    this.scene = new Scene(panels, this.ops, this.causes);
    this.#hover(this.view.hovered = null);
    this.state.unit = panels[0].tracks[0].track.unit;
    this.bar.showStep(this.step, this.panels, this.isStepwise);
    this.search.set(this.bar.searchBox.value, this.scene);
    this.view.setScene(this.scene, isKept);
    if (this.whatIf.isActive) this.whatIf.apply();
    this.#refreshFacts();
    for (const key of this.panel.tabs.keys()) this.panel.refresh(key);
  }

  #build(root) {
    const { state } = this;
    this.bar = new Toolbar(this);
    const stage = element("div", { className: "stage" });
    this.tip = element("div", { className: "tip", hidden: true });
    stage.append(this.tip);
    const aside = element("aside", { "aria-label": "details" });
    aside.hidden = this.isEmbedded || globalThis.innerWidth < 720;
    this.status = element("div", { className: "status", "aria-live": "polite" });
    this.body = element(
      "div",
      { className: "ps" },
      this.bar.header,
      this.bar.stepper,
      this.bar.banner,
      element("div", { className: "main" }, stage, aside),
      this.status,
    );
    this.body.classList.toggle("dark", state.theme === "dark");
    this.body.classList.toggle("embedded", this.isEmbedded);
    root.append(this.body);
    this.view = new View(stage, state, {
      hover: (hit, place) => this.#hover(hit, place),
      select: (hit) => this.select(hit),
      changed: () => this.#viewChanged(),
      chains: () => this.chains(),
      twinOf: (item) => this.twinOf(item),
      measured: () => this.#showLines(),
    }, this.isEmbedded);
    this.scene = new Scene(this.panels, this.ops, this.causes);
    this.whatIf = new WhatIf(this, () => this.#timesChanged());
    this.panel = new SidePanel(aside, [
      ["card", "Selection", () => this.#card()],
      ["idle", "Idle", () => idleTable(this)],
      ["whatif", "What if", () => this.whatIf.content()],
      ["tasks", "Tasks", () => taskTable(this)],
      ["export", "Export", () => exportTab(this, download)],
      ["help", "Keys", () => helpTab()],
    ]);
    this.body.addEventListener("keydown", (event) => handleKey(this, event));
  }

  #card() {
    const { selection } = this;
    if (selection?.type === "task") return taskCard(this, selection);
    if (selection?.type === "gap") return gapCard(this, selection);
    return overview(this);
  }

  /** A time with as many digits as the view can show. */
  formatInView(time, unit) {
    return formatTimeTo(time, (this.state.to - this.state.from) / 1000, unit);
  }

  /** A time to five digits of the makespan. */
  formatExact(time, unit) {
    return formatTimeTo(time, 1e-5 * this.state.makespan, unit);
  }

  /** Why the causes of gaps are unknown. */
  noCauses(track) {
    if (!track.isOwn) return "Causes of idle time are not attributed to simulations of this page.";
    if (!track.timeline.isComplete) return "Causes of idle time need a step whose tasks all ran.";
    return "Causes of idle time are known after a simulation or a run.";
  }

  /** The same task in the other timeline of a comparison; null if there is none. */
  twinOf(item) {
    if (item?.type !== "task") return null;
    const panel = this.scene.panels.find(({ tracks }) => tracks.includes(item.track));
    const other = panel?.tracks.find((track) => track !== item.track);
    if (!other || other.graph !== item.track.graph) return null;
    return { type: "task", track: other, task: item.task };
  }

  /** Chains of tasks that are framed: the critical path, and those of the selection. */
  chains() {
    const chains = [];
    if (this.state.show.critical) {
      for (const track of this.scene.panels.flatMap(({ tracks }) => tracks)) {
        chains.push({ track, tasks: track.timeline.criticalPath, colour: "mark" });
      }
    }
    if (this.chain) {
      const { track, before, after } = this.chain;
      chains.push({ track, tasks: before, colour: "select" });
      chains.push({ track, tasks: after, colour: "ink" });
    }
    return chains.map((chain) => ({ ...chain, tasks: this.#inView(chain.track, chain.tasks) }));
  }

  /** The tasks of a chain in view, and those before and after them. */
  #inView({ timeline }, tasks) {
    const { from, to } = this.state, { start, end } = timeline;
    const shown = tasks.filter((task, k) => {
      const next = tasks[k + 1];
      const isInView = end[task] >= from && start[task] <= to;
      return isInView || (next !== undefined && start[next] >= from && start[task] <= to);
    });
    const every = Math.ceil(shown.length / MAX_FRAMES);
    return every > 1 ? shown.filter((_, k) => k % every === 0) : shown;
  }

  #hover(hit, place = null) {
    const { tip } = this;
    tip.hidden = !hit;
    if (!hit) return;
    tip.textContent = tipText(this, hit);
    const { width, height } = this.view.size;
    tip.style.left = `${Math.max(0, Math.min(place.x + 14, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(0, Math.min(place.y + 16, height - tip.offsetHeight - 4))}px`;
  }

  /** Select a task or a gap, or nothing; `reveal` brings a task into view. */
  select(item, reveal = false) {
    this.#choose(item);
    if (item && reveal && item.type === "task") this.view.reveal(item.track, item.task);
    if (item) {
      if (this.panel.aside.hidden && !this.isEmbedded) this.toggleDetails();
      this.panel.open("card");
    } else this.panel.refresh("card");
    this.view.drawOverlay();
  }

  #choose(item) {
    const selection = item && item.type !== "memory" ? item : null;
    this.selection = this.view.selected = selection;
    this.chain = null;
    if (selection) {
      const { track, type } = selection, { timeline } = track;
      const task = type === "task" ? selection.task : selection.gap.task;
      const after = type === "task" ? [task, ...timeline.chainFrom(task)] : [];
      this.chain = { track, before: timeline.chainTo(task), after };
      this.status.textContent = tipText(this, selection);
    }
    this.onselect(selection);
  }

  /** Find the tasks that match the text in the search box. */
  find() {
    const { search, bar } = this;
    search.set(bar.searchBox.value, this.scene);
    const count = search.found.length.toLocaleString("en");
    bar.count.textContent = search.isActive ? `${count} found` : "";
    this.view.request();
  }

  /** Select the match after the present selection, or before it. */
  nextMatch(step = 1) {
    const next = this.search.next(this.selection, step);
    if (next) this.select(next, true);
  }

  /** Select the next or previous task of the selection's lane. */
  nextOnLane(step) {
    const { selection, scene } = this, { track, task } = selection ?? {};
    if (selection?.type !== "task") {
      const first = scene.panels[0].tracks[0];
      const lane = first.lanes.flat().find(({ tasks }) => tasks.length);
      if (lane) this.select({ type: "task", track: first, task: lane.tasks[0] }, true);
      return;
    }
    const { tasks } = track.laneOf(task), next = tasks[tasks.indexOf(task) + step];
    if (next !== undefined) this.select({ type: "task", track, task: next }, true);
  }

  /** Select the next or previous task of the critical path. */
  nextOnPath(step) {
    if (!this.state.show.critical) this.toggle("critical");
    const track = this.selection?.track ?? this.scene.panels[0].tracks.at(-1);
    const path = track.timeline.criticalPath, at = path.indexOf(this.selection?.task);
    const next = at < 0 ? path.at(step > 0 ? 0 : -1) : path[at + step];
    if (next !== undefined) this.select({ type: "task", track, task: next }, true);
  }

  /** Show or hide messages, arrows, causes of idle time, memory or the critical path. */
  toggle(key) {
    const { show } = this.state;
    show[key] = !show[key];
    this.bar.press(key, show[key]);
    if (key === "messages" || key === "memory") this.view.resize();
    if (key === "idle" && show.idle && !this.selection) this.panel.open("idle"); // it has the key
    this.view.request();
  }

  toggleRuler() {
    this.state.isRuling = !this.state.isRuling;
    this.bar.press("ruler", this.state.isRuling);
    if (!this.state.isRuling) this.view.ruler = [];
    this.#showLines();
    this.view.request();
  }

  #showLines() {
    const { whatIf } = this;
    this.bar.showLines([
      rulerText(this),
      whatIf.isActive ? `What if: ${whatIf.lines().join("; ")}` : "",
    ]);
  }

  toggleTheme() {
    this.isThemeChosen = true;
    this.#setTheme(this.state.theme === "dark" ? "light" : "dark");
  }

  #setTheme(theme) {
    this.state.theme = theme;
    this.body.classList.toggle("dark", this.state.theme === "dark");
    this.view.request();
  }

  toggleDetails() {
    const { aside } = this.panel;
    aside.hidden = !aside.hidden;
    this.panel.refresh(this.panel.shown);
    this.view.resize();
  }

  /** Show the whole step; lanes fill the view. */
  fit() {
    this.view.isAutomatic = true;
    this.view.lay();
    this.view.fit();
  }

  /** Clear search and selection. */
  clear() {
    this.bar.searchBox.value = "";
    this.find();
    this.select(null);
    this.view.base.focus();
  }

  /** Show one of several steps. */
  showStep(step) {
    this.step = step;
    this.#keep(this.selection);
  }

  #timesChanged() {
    this.#choose(null);
    const isKept = !this.view.showsWhole;
    this.scene = new Scene(this.scene.panels, this.ops, this.causes);
    this.search.set(this.bar.searchBox.value, this.scene);
    this.view.setScene(this.scene, isKept);
    this.#refreshFacts();
    this.#showLines();
    this.body.querySelector("#whatif-summary")?.replaceWith(this.whatIf.summary());
    for (const key of ["card", "idle", "tasks"]) this.panel.refresh(key);
  }

  #refreshFacts() {
    const { scene, bar } = this, [{ tracks }] = scene.panels;
    const texts = tracks.map(({ role, timeline, track }) => {
      const time = formatTime(timeline.makespan, track.unit);
      return `${role} ${time}, bubble ${formatShare(timeline.bubble)}`.trim();
    });
    const isOne = scene.panels.length === 1;
    bar.facts.textContent = isOne ? texts.join("; ") : `${scene.panels.length} timelines`;
    bar.facts.title = bar.facts.textContent;
    const headings = scene.panels.map((panel) => scene.headingOf(panel)).join(". ");
    const label = `${this.title}: ${headings}. The tab Tasks lists the tasks in view.`;
    this.view.base.setAttribute("aria-label", label);
  }

  #viewChanged() {
    if (this.panel?.shown !== "tasks" || this.panel.aside.hidden) return;
    clearTimeout(this.tableTimer);
    this.tableTimer = setTimeout(() => this.panel.refresh("tasks"), 250);
  }

  /** Zoom to the selection. */
  focusSelection() {
    const { selection } = this;
    if (!selection) return this.fit();
    const { timeline } = selection.track;
    const [start, end] = selection.type === "gap"
      ? [selection.gap.since, selection.gap.until]
      : [timeline.start[selection.task], timeline.end[selection.task]];
    const room = 0.3 * (end - start) || 0.01 * this.state.makespan;
    this.view.setTimes(start - room, (Number.isNaN(end) ? start : end) + room);
  }

  /** A task or gap as plain values; null for neither. */
  selectionOf(item) {
    return selectionOf(this, item);
  }

  /** What the page shows, as plain values. */
  describe() {
    return describe(this);
  }
}

/** Fill an element of the document, or a shadow root, with the page. */
export function mount(root, bytes, options) {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(STYLES);
  const scope = root.getRootNode();
  scope.adoptedStyleSheets = [...scope.adoptedStyleSheets, sheet];
  return new Page(root, bytes, options);
}

/** Start the page that is in this document, if one is. */
export async function start() {
  const data = document.getElementById("pipesim-data");
  if (!data) return;
  const root = document.getElementById("pipesim-page");
  try {
    const bytes = await inflate(bytesOfText(data.textContent.trim()));
    root.replaceChildren();
    globalThis.pipesimPage = mount(root, bytes, { embedded: root.hasAttribute("data-embedded") });
  } catch (/** @type {any} */ error) {
    root.textContent = `This page cannot be shown: ${error.message}`;
    throw error;
  }
}
