// Keys of the page: those of Perfetto, and others.

import { element } from "./elements.js";

const KEYS = [
  ["W S", "zoom in and out"],
  ["A D, arrows", "move"],
  ["F", "zoom to the selection"],
  ["0", "whole step"],
  [". ,", "next and previous task of the lane"],
  ["] [", "along the critical path"],
  ["/", "search"],
  ["N", "next match"],
  ["C", "critical path"],
  ["M", "messages"],
  ["X", "arrows"],
  ["I", "causes of idle time"],
  ["B", "bytes held"],
  ["R", "ruler"],
  ["+ −", "height of lanes"],
  ["T", "light, dark"],
  ["Esc", "clear"],
];

/** Content of the tab. */
export function helpTab() {
  return [
    element("h2", {}, "Keys"),
    element(
      "dl",
      {},
      ...KEYS.flatMap((
        [key, text],
      ) => [element("dt", {}, element("kbd", {}, key)), element("dd", {}, text)]),
    ),
    element(
      "p",
      { className: "note" },
      "Wheel: zoom at the pointer, or scroll where there are more lanes; with Ctrl it always zooms, with Shift it moves, with Alt it changes the height of lanes. Drag to move. Click a task to see the chain that led to it and the one that follows.",
    ),
  ];
}

/** Do what a key stands for. */
export function handleKey(page, event) {
  const isField = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (event.key === "Enter" && event.target === page.bar.searchBox) {
    return page.nextMatch(event.shiftKey ? -1 : 1);
  }
  if (event.key === "Escape") {
    return page.clear();
  }
  if (isField || event.ctrlKey || event.metaKey || event.altKey) return;
  const isButton = event.target.tagName === "BUTTON" ||
    event.target.getAttribute("role") === "tabpanel";
  const { view } = page, far = 0.15 * (view.size.width - view.size.gutter);
  const x = view.pointer?.x;
  const acts = {
    w: () => view.zoom(1.4, x),
    s: () => view.zoom(1 / 1.4, x),
    a: () => view.pan(-far),
    d: () => view.pan(far),
    f: () => page.focusSelection(),
    0: () => page.fit(),
    ".": () => page.nextOnLane(1),
    ",": () => page.nextOnLane(-1),
    "]": () => page.nextOnPath(1),
    "[": () => page.nextOnPath(-1),
    "/": () => page.bar.searchBox.focus(),
    n: () => page.nextMatch(event.shiftKey ? -1 : 1),
    c: () => page.toggle("critical"),
    m: () => page.toggle("messages"),
    x: () => page.toggle("arrows"),
    i: () => page.toggle("idle"),
    b: () => page.toggle("memory"),
    r: () => page.toggleRuler(),
    t: () => page.toggleTheme(),
    "?": () => page.panel.open("help"),
    "+": () => view.setLaneHeight(page.state.laneHeight * 1.25),
    "-": () => view.setLaneHeight(page.state.laneHeight / 1.25),
  };
  const moves = {
    arrowleft: () => view.pan(-far),
    arrowright: () => view.pan(far),
    arrowup: () => view.pan(0, -40),
    arrowdown: () => view.pan(0, 40),
  };
  const key = event.key.toLowerCase(), act = acts[key] ?? (isButton ? undefined : moves[key]);
  if (!act) return;
  event.preventDefault();
  act();
}
