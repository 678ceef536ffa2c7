// The panel beside the picture: its tabs.

import { element } from "./elements.js";

/** Tabs: each has a name, and its content is made when it is shown. */
export class SidePanel {
  /**
   * @param {HTMLElement} aside
   * @param {[string, string, () => Node[]][]} tabs Key, title and content of each tab.
   */
  constructor(aside, tabs) {
    this.aside = aside;
    this.tabs = new Map();
    const list = element("div", { role: "tablist", "aria-label": "Details" });
    aside.append(list);
    for (const [key, title, content] of tabs) {
      const tab = element("button", { role: "tab", type: "button", id: `tab-${key}` }, title);
      const panel = element("div", {
        role: "tabpanel",
        "aria-labelledby": `tab-${key}`,
        tabIndex: 0,
      });
      tab.addEventListener("click", () => this.open(key));
      tab.addEventListener("keydown", (event) => this.#arrow(event, key));
      list.append(tab);
      aside.append(panel);
      this.tabs.set(key, { tab, panel, content });
    }
    this.open(tabs[0][0]);
  }

  #arrow(event, key) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.stopPropagation();
    const keys = [...this.tabs.keys()];
    this.open(keys[(keys.indexOf(key) + step + keys.length) % keys.length]);
    this.tabs.get(this.shown).tab.focus();
  }

  /** Show a tab. */
  open(key) {
    this.shown = key;
    for (const [other, { tab, panel }] of this.tabs) {
      const isShown = other === key;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1;
      panel.hidden = !isShown;
    }
    this.refresh(key);
  }

  /** Make the content of a tab anew, if it is shown. */
  refresh(key) {
    if (key !== this.shown || this.aside.hidden) return;
    const { panel, content } = this.tabs.get(key);
    panel.replaceChildren(...content());
  }
}
