// The bars above the picture: title, search, toggles, the step, and what if.

import { element } from "./elements.js";

const TOGGLES = [
  ["critical", "Critical path", "chain that sets the makespan (C)"],
  ["messages", "Messages", "lanes of messages and collectives (M)"],
  ["arrows", "Arrows", "an arrow for each message in view (X)"],
  ["idle", "Idle causes", "why devices are idle (I)"],
  ["memory", "Memory", "bytes that devices hold (B)"],
];

function button(id, label, title, act) {
  const node = element("button", { type: "button", id, title }, label);
  node.addEventListener("click", act);
  return node;
}

export class Toolbar {
  /** @param {any} page The page, whose methods the buttons call. */
  constructor(page) {
    this.heading = element("h1", { dir: "auto" }, page.title);
    this.facts = element("span", { className: "facts" });
    this.searchBox = element("input", {
      type: "search",
      id: "search",
      placeholder: "search: 1F4",
      "aria-label": "search tasks",
      spellcheck: false,
    });
    this.searchBox.addEventListener("input", () => page.find());
    this.count = element("span", { className: "count", "aria-live": "polite" });
    this.toggles = new Map(
      TOGGLES.map(([key, label, title]) => [
        key,
        button(`show-${key}`, label, title, () => page.toggle(key)),
      ]),
    );
    this.toggles.set(
      "ruler",
      button("ruler", "Ruler", "measure between two tasks (R)", () => page.toggleRuler()),
    );
    for (const key of this.toggles.keys()) this.press(key, false);
    const theme = button("theme", "◐", "light or dark (T)", () => page.toggleTheme());
    theme.setAttribute("aria-label", "light or dark");
    this.header = element(
      "header",
      {},
      this.heading,
      this.facts,
      this.searchBox,
      this.count,
      element("div", { className: "tools" }, ...this.toggles.values()),
      button("fit", "Fit", "the whole step (0)", () => page.fit()),
      theme,
      button("details", "Details", "panel of details", () => page.toggleDetails()),
    );
    this.stepRange = element("input", {
      type: "range",
      min: "0",
      step: "1",
      id: "step",
      "aria-label": "step",
    });
    this.stepRange.addEventListener("input", () => page.showStep(Number(this.stepRange.value)));
    this.stepName = element("span", {});
    this.stepper = element(
      "div",
      { className: "banner" },
      element("label", { for: "step" }, "step"),
      this.stepRange,
      this.stepName,
    );
    this.banner = element("div", { className: "banner", hidden: true, role: "status" });
  }

  /** Show whether a toggle is on. */
  press(key, isOn) {
    this.toggles.get(key).setAttribute("aria-pressed", String(isOn));
  }

  /** Show which of several steps is in view; nothing if there is one. */
  showStep(step, panels, isStepwise) {
    this.stepper.hidden = !isStepwise || panels.length < 2;
    this.stepRange.max = String(panels.length - 1);
    this.stepRange.value = String(step);
    this.stepName.textContent = panels[step].name;
  }

  /** Show some lines in the banner, which is hidden without any. */
  showLines(lines) {
    const shown = lines.filter(Boolean);
    this.banner.textContent = shown.join(" — ");
    this.banner.hidden = !shown.length;
  }
}
