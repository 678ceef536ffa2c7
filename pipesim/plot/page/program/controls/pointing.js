// What the pointer and the wheel do with a view.

import { makeView, MINIMAP } from "../drawing/geometry.js";

/** Pixels within which an edge of a task attracts the ruler, and beyond which a click is a drag. */
const ATTRACTION = 8, DRAG = 3;

export class Pointing {
  /** @param {any} view A `View`. */
  constructor(view) {
    this.view = view;
    this.drag = null;
    /** Whether the wheel is the page's: since a click into it, until the pointer leaves. */
    this.isActive = !view.isEmbedded;
    const { base } = view;
    base.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    base.addEventListener("pointerdown", (event) => this.#down(event));
    base.addEventListener("pointermove", (event) => this.#move(event));
    base.addEventListener("pointerup", (event) => this.#up(event));
    base.addEventListener("pointercancel", () => this.drag = null);
    base.addEventListener("pointerleave", () => {
      [view.pointer, view.hovered] = [null, null];
      this.isActive = !view.isEmbedded;
      view.actions.hover(null, null);
      view.drawOverlay();
    });
    base.addEventListener("dblclick", () => view.fit());
  }

  #place(event) {
    const { left, top } = this.view.base.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  }

  /** Zoom, scroll or move; in a part of another page, only after a click into it or with a key. */
  #wheel(event) {
    const { view } = this, { x } = this.#place(event);
    const wantsZoom = event.ctrlKey || event.metaKey;
    if (!this.isActive && !wantsZoom && !event.shiftKey) return;
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    const dx = event.deltaX * unit, dy = event.deltaY * unit;
    const isTall = view.scene.height > view.room + 1;
    if (event.altKey) view.setLaneHeight(view.state.laneHeight * Math.exp(-dy / 300));
    else if (wantsZoom || (!event.shiftKey && !isTall && Math.abs(dy) >= Math.abs(dx))) {
      view.zoom(Math.exp(-Math.max(-300, Math.min(300, dy)) / 250), x);
    } else if (event.shiftKey) view.pan(dx || dy);
    else view.pan(dx, dy);
  }

  #down(event) {
    if (event.button) return;
    this.isActive = true;
    const { base } = this.view, place = this.#place(event);
    base.focus({ preventScroll: true });
    // JupyterLab gives the focus to the cell after a click in a frame; its commands are letters.
    const keep = () =>
      setTimeout(() => base.matches(":hover") && base.focus({ preventScroll: true }));
    globalThis.addEventListener("blur", keep, { once: true });
    setTimeout(() => globalThis.removeEventListener("blur", keep), 3000);
    base.setPointerCapture(event.pointerId);
    this.drag = { ...place, last: place, isMap: place.y < MINIMAP, hasMoved: false };
    if (this.drag.isMap) this.#moveByMap(place.x);
  }

  #moveByMap(x) {
    const { view } = this, { left, right, from, to } = makeView(view.state, view.size);
    const [first, last] = view.scene.extent;
    const time = first + (x - left) / (right - left) * (last - first);
    view.setTimes(time - (to - from) / 2, time + (to - from) / 2);
  }

  #move(event) {
    const { view, drag } = this, place = this.#place(event);
    view.pointer = place;
    if (drag) {
      if (drag.isMap) this.#moveByMap(place.x);
      else if (drag.hasMoved || Math.hypot(place.x - drag.x, place.y - drag.y) > DRAG) {
        drag.hasMoved = true;
        view.pan(drag.last.x - place.x, drag.last.y - place.y);
      }
      drag.last = place;
      return;
    }
    view.hovered = view.hitAt(place.x, place.y);
    view.actions.hover(view.hovered, place);
    view.drawOverlay();
  }

  #up(event) {
    const { view, drag } = this, place = this.#place(event);
    this.drag = null;
    if (!drag || drag.hasMoved || drag.isMap) return;
    const hit = view.hitAt(place.x, place.y);
    if (view.state.isRuling) this.#measure(place, hit);
    else view.actions.select(hit);
  }

  /** Put an end of the ruler at the nearest edge of a task, or at the pointer. */
  #measure({ x }, hit) {
    const { view } = this, places = makeView(view.state, view.size);
    const task = hit?.type === "task" ? hit : null;
    let time = places.time(x);
    if (task) {
      const { timeline } = hit.track, edges = [timeline.start[hit.task], timeline.end[hit.task]];
      const near = edges.filter((edge) => Math.abs(places.x(edge) - x) < ATTRACTION);
      const closer = (a, b) => Math.abs(a - time) <= Math.abs(b - time) ? a : b;
      if (near.length) time = near.reduce(closer);
    }
    if (view.ruler.length > 1) view.ruler = [];
    view.ruler.push({ time, task });
    view.actions.measured();
    view.drawOverlay();
  }
}
