// Elements of the document: text never becomes markup.

/**
 * Make an element.
 * @param {string} tag
 * @param {Record<string, any>} properties Properties; those with a dash are attributes.
 * @param {...(Node | string | null)} children Nodes, and texts that stay texts.
 * @returns {any}
 */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** A table with a head; cells are texts or nodes. */
export function table(head, rows, caption = "") {
  const cells = (row, tag) =>
    element(
      "tr",
      {},
      ...row.map((cell, k) => element(tag === "td" && k === 0 ? "th" : tag, {}, cell)),
    );
  return element(
    "table",
    {},
    caption ? element("caption", {}, caption) : null,
    element("thead", {}, cells(head, "th")),
    element("tbody", {}, ...rows.map((row) => cells(row, "td"))),
  );
}

/** Let the user keep some data as a file. */
export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A name for a file: letters, digits, dots and dashes. */
export function fileName(text) {
  return text.replace(/[^A-Za-z0-9._-]+/g, "_").slice(0, 60) || "timeline";
}
