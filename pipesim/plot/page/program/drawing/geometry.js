// Sizes, colours of themes, and places of times in a view.

import { tickStep, timeUnit } from "./text.js";

/** Sizes around the lanes (CSS pixels). */
export const GUTTER = 76, NARROW_GUTTER = 56, AXIS = 24, MINIMAP = 34, BOTTOM = 8, RIGHT = 10;

export const THEMES = {
  light: {
    surface: "#ffffff",
    ink: "#1c1c1c",
    soft: "#5a5a5a",
    grid: "#e4e4e4",
    bubble: "#eeeeee",
    mark: "#b22222",
    select: "#0b57d0",
    memory: "#8fa8c8",
    band: "#f7f7f7",
  },
  dark: {
    surface: "#17191c",
    ink: "#e8e8e8",
    soft: "#a8adb3",
    grid: "#2f3338",
    bubble: "#26292d",
    mark: "#ff8a80",
    select: "#8ab4f8",
    memory: "#4a6384",
    band: "#1d2024",
  },
};

/** Font sizes (CSS pixels). */
export function fontsOf(size) {
  return { size: size.font ?? 11 };
}

/** Times and places of a view. */
export function makeView(state, size) {
  const left = size.gutter, right = size.width - size.right;
  const { from, to } = state, scale = (right - left) / (to - from);
  return {
    left,
    right,
    from,
    to,
    size,
    unit: state.unit,
    extent: state.makespan,
    fonts: fontsOf(size),
    theme: THEMES[state.theme],
    x: (time) => left + (time - from) * scale,
    time: (x) => from + (x - left) / scale,
  };
}

/**
 * The sign of the axis's unit, and its number in a second.
 * @returns {[string, number]}
 */
export function axisUnit(view) {
  return view.unit === "s" ? timeUnit(view.extent) : [`${view.unit}s`, 1];
}

/** Ticks of the time axis. */
export function ticks(view) {
  const [, scale] = axisUnit(view);
  let step = tickStep(80 * (view.to - view.from) * scale / (view.right - view.left));
  if (view.unit !== "s") step = Math.max(1, step);
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step) - 1e-9)));
  const places = [];
  for (
    let k = Math.ceil(view.from * scale / step - 1e-9);
    k * step <= view.to * scale * (1 + 1e-12);
    k++
  ) {
    places.push({ x: view.x(k * step / scale), text: (k * step).toFixed(digits) });
    if (places.length > 400) break;
  }
  return places;
}

/** A text, cut with an ellipsis if it is too wide. */
export function fitted(painter, text, width, size) {
  if (painter.textWidth(text, size) <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (painter.textWidth(text.slice(0, middle) + "…", size) <= width) low = middle;
    else high = middle - 1;
  }
  return text.slice(0, low) + "…";
}
