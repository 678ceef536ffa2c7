// The view: a canvas that shows a scene, and what pointer and keyboard do with it.

import { CanvasPainter } from "../drawing/painters.js";
import { Pointing } from "./pointing.js";
import { drawChains } from "../drawing/arrows.js";
import {
  AXIS,
  BOTTOM,
  fitted,
  GUTTER,
  makeView,
  MINIMAP,
  NARROW_GUTTER,
  RIGHT,
  THEMES,
} from "../drawing/geometry.js";
import { formatTime, formatTimeTo } from "../drawing/text.js";

/** Heights of lanes (CSS pixels). */
const LEAST_LANE = 7, MOST_LANE = 44;

/** State of a view, before anything is shown. */
export function newState(theme) {
  return {
    from: 0,
    to: 1,
    scroll: 0,
    laneHeight: 20,
    theme,
    unit: "s",
    makespan: 1,
    show: { messages: false, arrows: false, idle: false, memory: false, critical: false },
    isRuling: false,
    marks: () => null,
  };
}

export class View {
  /**
   * @param {HTMLElement} stage Element that the canvases fill.
   * @param {object} state
   * @param {object} actions Functions of the page: `hover`, `select`, `changed`, `key`.
   * @param {boolean} isEmbedded Whether the wheel scrolls the document around the page.
   */
  constructor(stage, state, actions, isEmbedded) {
    this.stage = stage;
    this.state = state;
    this.actions = actions;
    this.isEmbedded = isEmbedded;
    this.base = document.createElement("canvas");
    this.overlay = document.createElement("canvas");
    this.overlay.className = "overlay";
    this.base.tabIndex = 0;
    this.base.setAttribute("role", "application");
    stage.append(this.base, this.overlay);
    this.isAutomatic = true;
    this.pointer = null;
    this.hovered = null;
    this.selected = null;
    this.ruler = [];
    this.nFrames = 0;
    new ResizeObserver(() => this.resize()).observe(stage);
    this.pointing = new Pointing(this);
  }

  /** Show another scene; keep the times in view if `keep`. */
  setScene(scene, keep = false) {
    this.scene = scene;
    const [first, last] = scene.extent;
    this.state.makespan = last - first;
    this.lay();
    if (!keep) this.fit();
    this.resize();
  }

  get size() {
    const width = this.stage.clientWidth, height = this.stage.clientHeight;
    return {
      width,
      height,
      gutter: width < 480 ? NARROW_GUTTER : GUTTER,
      right: RIGHT,
      bottom: BOTTOM,
      top: MINIMAP + AXIS,
      minimap: true,
      font: 11,
    };
  }

  /** Height in which lanes are shown (CSS pixels). */
  get room() {
    const { height, top, bottom } = this.size;
    return height - top - bottom;
  }

  resize() {
    const ratio = globalThis.devicePixelRatio || 1, { width, height } = this.size;
    if (!width || !height || !this.scene) return;
    for (const canvas of [this.base, this.overlay]) {
      const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
      if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
    }
    this.ratio = ratio;
    this.lay();
    this.request();
  }

  /** Place the rows; an automatic height of lanes fills the view. */
  lay() {
    const { state, scene, size } = this;
    if (this.isAutomatic) {
      state.laneHeight = 20;
      for (let round = 0; round < 3; round++) {
        scene.lay(state, size.top);
        const fitting = state.laneHeight * this.room / scene.height;
        state.laneHeight = Math.min(MOST_LANE, Math.max(LEAST_LANE, fitting));
      }
    }
    scene.lay(state, size.top);
    this.limit();
  }

  /** Draw soon, once. */
  request() {
    if (this.isRequested) return;
    this.isRequested = true;
    requestAnimationFrame(() => {
      this.isRequested = false;
      this.draw();
    });
  }

  /** Draw now. */
  draw() {
    if (!this.scene || !this.base.width) return;
    this.painter ??= new CanvasPainter(this.base.getContext("2d", { alpha: false }), this.ratio);
    if (this.painter.ratio !== this.ratio || this.painter.width !== this.base.width) {
      this.painter = new CanvasPainter(this.base.getContext("2d", { alpha: false }), this.ratio);
      this.painter.width = this.base.width;
    }
    this.painter.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.painter.context.textBaseline = "middle";
    this.scene.draw(this.painter, this.state, this.size);
    this.drawOverlay();
    this.nFrames++;
    this.actions.changed();
  }

  /** Draw what follows the pointer, the selection and the ruler. */
  drawOverlay() {
    const context = this.overlay.getContext("2d"), painter = new CanvasPainter(context, this.ratio);
    const { state, size, scene } = this, view = makeView(state, size), theme = THEMES[state.theme];
    context.clearRect(0, 0, size.width, size.height);
    drawChains(painter, scene, state, size, this.actions.chains());
    painter.clip(view.left, size.top, view.right - view.left, size.height - size.top - size.bottom);
    const twin = this.hovered && this.actions.twinOf(this.hovered);
    for (const [item, line] of [[this.hovered, 1.5], [twin, 1.5], [this.selected, 2.5]]) {
      if (item?.type !== "task") continue;
      const box = scene.boxOf(item.track, item.task, state, size);
      if (box) {
        painter.frame(box.x, box.y, Math.max(2, box.width), box.height, theme.select, { line });
      }
    }
    if (this.pointer && this.hovered) {
      const { x } = this.pointer;
      painter.line([[x, size.top], [x, size.height]], theme.soft, { line: 0.7, dash: [2, 3] });
    }
    painter.unclip();
    if (this.pointer) this.#cursorTime(painter, view, theme);
    this.#drawRuler(painter, view, theme);
  }

  #cursorTime(painter, view, theme) {
    const { x, y } = this.pointer;
    if (x < view.left || x > view.right || y < MINIMAP) return;
    const text = formatTimeTo(
      view.time(x),
      (view.to - view.from) / (view.right - view.left),
      view.unit,
    );
    const width = painter.textWidth(text, 11) + 8;
    const left = Math.min(Math.max(x - width / 2, view.left), view.right - width);
    painter.rect(left, MINIMAP + 2, width, 16, theme.ink);
    painter.text(text, left + width / 2, MINIMAP + 10, theme.surface, {
      size: 11,
      align: "center",
    });
  }

  #drawRuler(painter, view, theme) {
    const { size } = this;
    if (!this.ruler.length) return;
    const xs = this.ruler.map(({ time }) => view.x(time));
    for (const x of xs) {
      if (x >= view.left && x <= view.right) {
        painter.line([[x, size.top], [x, size.height - size.bottom]], theme.mark, { line: 1.2 });
      }
    }
    if (xs.length < 2) return;
    const y = size.top + 12, text = this.rulerText;
    painter.line([[xs[0], y], [xs[1], y]], theme.mark, { line: 1.2 });
    const width = painter.textWidth(text, 11) + 10, middle = (xs[0] + xs[1]) / 2;
    const left = Math.min(
      Math.max(middle - width / 2, view.left),
      Math.max(view.left, view.right - width),
    );
    painter.rect(left, y - 8, width, 16, theme.mark);
    painter.text(fitted(painter, text, width, 11), left + width / 2, y, theme.surface, {
      size: 11,
      align: "center",
    });
  }

  /** The time between the two ends of the ruler as text. */
  get rulerText() {
    const [a, b] = this.ruler;
    return b ? formatTime(Math.abs(b.time - a.time), this.state.unit) : "";
  }

  /** Whether the whole step is in view. */
  get showsWhole() {
    const [first, last] = this.scene.extent;
    return this.state.from <= first && this.state.to >= last;
  }

  /** Show the whole step. */
  fit() {
    const [first, last] = this.scene.extent, room = 0.01 * (last - first);
    [this.state.from, this.state.to] = [first, last + room];
    this.state.scroll = 0;
    this.limit();
    this.request();
  }

  /** Show times `from` to `to`. */
  setTimes(from, to) {
    [this.state.from, this.state.to] = [from, to];
    this.limit();
    this.request();
  }

  /** Zoom by a factor; the time at `x` keeps its place. */
  zoom(factor, x) {
    const view = makeView(this.state, this.size), place = x ?? (view.left + view.right) / 2;
    const time = view.time(place), span = (view.to - view.from) / factor;
    const share = (place - view.left) / (view.right - view.left);
    this.setTimes(time - share * span, time + (1 - share) * span);
  }

  /** Move the view by pixels. */
  pan(dx, dy = 0) {
    const view = makeView(this.state, this.size);
    const seconds = dx * (view.to - view.from) / (view.right - view.left);
    this.state.scroll += dy;
    this.setTimes(this.state.from + seconds, this.state.to + seconds);
  }

  /** Bring a task into view, and its lane. */
  reveal(track, task) {
    const { state, size } = this, view = makeView(state, size);
    const start = track.timeline.start[task];
    const end = Number.isNaN(track.timeline.end[task]) ? start : track.timeline.end[task];
    const span = view.to - view.from;
    if (start < view.from || end > view.to || end - start > span) {
      const width = Math.max(span, 1.5 * (end - start)), middle = (start + end) / 2;
      [state.from, state.to] = [middle - width / 2, middle + width / 2];
    } else if (end - start < 2 * span / (view.right - view.left)) {
      const width = Math.max(40 * (end - start), 1e-9 * span);
      [state.from, state.to] = [(start + end - width) / 2, (start + end + width) / 2];
    }
    const box = this.scene.boxOf(track, task, state, size);
    if (box) {
      const room = size.height - size.bottom;
      if (box.y < size.top || box.y + box.height > room) {
        state.scroll += box.y - (size.top + room) / 2;
      }
    }
    this.limit();
    this.request();
  }

  /** Keep times and scroll within what there is. */
  limit() {
    const { state, scene } = this;
    if (!scene) return;
    const [first, last] = scene.extent, whole = last - first, room = 0.2 * whole;
    let span = Math.min(Math.max(state.to - state.from, 1e-8 * whole), 1.4 * whole);
    if (!(span > 0)) span = whole;
    const middle = (state.from + state.to) / 2;
    let from = middle - span / 2;
    from = Math.min(Math.max(from, first - room), Math.max(first - room, last + room - span));
    [state.from, state.to] = [from, from + span];
    const most = Math.max(0, scene.height - this.room);
    state.scroll = Math.min(Math.max(0, state.scroll), most);
  }

  /** Set the height of lanes (CSS pixels). */
  setLaneHeight(height) {
    this.isAutomatic = false;
    this.state.laneHeight = Math.min(120, Math.max(3, height));
    this.lay();
    this.request();
  }

  /** What is at a point of the canvas: a task, an idle gap, memory, or null. */
  hitAt(x, y) {
    return this.scene ? this.scene.hit(x, y, this.state, this.size) : null;
  }
}
