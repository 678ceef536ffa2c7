// The page as a widget of notebooks: anywidget calls `render`.

import { inflate } from "../data/columns.js";
import { element } from "./elements.js";
import { mount } from "./page.js";

/**
 * Show the document of a widget, and each that follows it.
 * @param {{model: any, el: HTMLElement}} context
 */
export async function render({ model, el }) {
  const host = element("div");
  const root = element("div");
  host.attachShadow({ mode: "open" }).append(root);
  root.style.height = "100%";
  const resize = () => host.style.height = `${model.get("height")}px`;
  resize();
  el.append(host);
  if (!("DecompressionStream" in globalThis)) {
    root.textContent = "This timeline cannot be shown: the browser has no DecompressionStream.";
    return;
  }
  const mark = keepKeys(host);
  /** @type {any} */
  let page = null;
  let version = -1, nLeftOut = 0, isBusy = false;
  const select = (item) => {
    const values = selectedValues(page, item, version);
    if (!item && !Object.keys(model.get("selection")).length) return;
    model.set("selection", values);
    model.save_changes();
  };
  const update = async () => {
    if (isBusy) return; // the loop goes on to the last version
    isBusy = true;
    try {
      while (version !== model.get("version")) {
        const wanted = model.get("version"), before = nLeftOut;
        nLeftOut = model.get("n_left_out");
        const { buffer, byteOffset, byteLength } = model.get("document");
        const bytes = await inflate(new Uint8Array(buffer, byteOffset, byteLength));
        version = wanted;
        if (page) updatePage(page, bytes, nLeftOut - before);
        else {
          root.replaceChildren();
          page = mountPage(root, bytes, select);
          Object.assign(host, { pipesimPage: page });
        }
      }
    } catch (/** @type {any} */ error) {
      page = null;
      root.textContent = `This timeline cannot be shown: ${error.message}`;
      throw error;
    } finally {
      isBusy = false;
    }
  };
  model.on("change:version", update);
  model.on("change:height", resize);
  await update();
  return () => {
    removeEventListener("keydown", mark, true);
    model.off("change:version", update);
    model.off("change:height", resize);
  };
}

/**
 * Keep keys from the notebook, whose commands they would be, but for those with Ctrl.
 *
 * Before JupyterLab 4.1 its listener is the first to be called: the attribute stops it.
 */
function keepKeys(host) {
  const isOwn = (event) => !event.ctrlKey && !event.metaKey;
  const mark = (event) => host.toggleAttribute("data-lm-suppress-shortcuts", isOwn(event));
  addEventListener("keydown", mark, true);
  host.addEventListener("keydown", (event) => {
    if (isOwn(event)) event.stopPropagation();
  });
  return mark;
}

/** Fill an element with the page, in the theme of the notebook. */
function mountPage(root, bytes, onselect) {
  const page = mount(root, bytes, { embedded: true, onselect });
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  const isDark = jpThemeLight
    ? jpThemeLight === "false"
    : vscodeThemeKind && ["vscode-dark", "vscode-high-contrast"].includes(vscodeThemeKind);
  if (typeof isDark === "boolean" && isDark !== (page.state.theme === "dark")) page.toggleTheme();
  return page;
}

/** Show another document; an earlier step stays in view, although `shift` of the first are gone. */
function updatePage(page, bytes, shift) {
  const isLast = page.step === page.panels.length - 1;
  page.update(bytes);
  if (shift && !isLast && page.isStepwise) page.showStep(Math.max(0, page.step - shift));
}

/** A task or gap as plain values; the tasks are those of a version of the document. */
function selectedValues(page, item, version) {
  if (!item) return {};
  const { track } = item;
  const panel = page.panels.findIndex(({ tracks }) => tracks.includes(track));
  const place = {
    version,
    type: item.type,
    panel,
    name: page.panels[panel].name,
    role: track.role,
    simulated: !track.isOwn,
  };
  if (item.type === "task") {
    return { ...place, task: item.task, action: track.graph.taskName(item.task) };
  }
  const { device, since, until, previous, task } = item.gap;
  return { ...place, device, since, until, previous, next: task };
}
