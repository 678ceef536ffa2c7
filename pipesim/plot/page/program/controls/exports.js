// Files of the view: SVG and PNG pictures, and the tasks as CSV.

import { drawChains } from "../drawing/arrows.js";
import { element, fileName } from "./elements.js";
import { CanvasPainter, mix, SvgPainter } from "../drawing/painters.js";
import { AXIS, THEMES } from "../drawing/geometry.js";

/** CSS pixels of an inch. */
const INCH = 96;

/** The size of a picture for a paper: `width` by `height` inches, text of `points`. */
export function pictureSize(width, height, points) {
  const font = points * INCH / 72, legend = 1.6 * font;
  return {
    width: width * INCH,
    height: height * INCH,
    gutter: 6.4 * font,
    right: 0.6 * font,
    bottom: 3,
    top: legend + AXIS * font / 11,
    minimap: false,
    font,
    legend,
  };
}

/** Draw the times in view at another size; lanes fill its height. */
function drawPicture(page, painter, size) {
  const { scene, state } = page;
  const picture = {
    ...state,
    scroll: 0,
    theme: page.isDarkExport ? "dark" : "light",
    laneHeight: 20,
  };
  const room = size.height - size.top - size.bottom;
  for (let round = 0; round < 4; round++) {
    scene.lay(picture, size.top);
    picture.laneHeight *= room / scene.height;
  }
  try {
    scene.lay(picture, size.top);
    scene.draw(painter, picture, size);
    drawChains(painter, scene, picture, size, page.chains());
    drawLegend(painter, scene, size, THEMES[picture.theme]);
  } finally {
    page.view.lay();
  }
}

/** Name the operations in the picture, in one line; those for which there is no room are left out. */
function drawLegend(painter, scene, size, theme) {
  const { font, gutter, width } = size, side = 0.8 * font, y = 0.5 * size.legend;
  let x = gutter;
  for (const { label, colour, hatched } of scene.presentOps()) {
    const needed = side + 0.4 * font + painter.textWidth(label, font);
    if (x + needed > width - size.right) return;
    painter.rect(x, y - side / 2, side, side, colour);
    if (hatched) painter.hatch(x, y - side / 2, side, side, mix(colour, "#000000", 0.45));
    painter.text(label, x + side + 0.4 * font, y, theme.ink, { size: font });
    x += needed + font;
  }
}

/** The view as an SVG. */
export function svgText(page, width, height, points) {
  const size = pictureSize(width, height, points);
  const pen = new OffscreenCanvas(1, 1).getContext("2d");
  const painter = new SvgPainter((text, fontSize, weight) => {
    pen.font = `${weight} ${fontSize}px Helvetica, Arial, 'DejaVu Sans', sans-serif`;
    return pen.measureText(text).width;
  });
  drawPicture(page, painter, size);
  return painter.toString(size.width, size.height, page.title);
}

/** The view as a PNG. */
export function pngBlob(page, width, height, points, dpi) {
  const size = pictureSize(width, height, points), ratio = dpi / INCH;
  const canvas = new OffscreenCanvas(
    Math.round(size.width * ratio),
    Math.round(size.height * ratio),
  );
  drawPicture(page, new CanvasPainter(canvas.getContext("2d", { alpha: false }), ratio), size);
  return canvas.convertToBlob({ type: "image/png" });
}

/** The tasks in view as CSV; times in seconds, with all digits. */
export function csvText(page) {
  const { rows } = page.scene.tasksInView(page.state, Infinity);
  const lines = rows.map(({ track, task, panel }) => {
    const { graph, timeline } = track, number = (value) => Number.isNaN(value) ? "" : String(value);
    return [
      quoted(panel.name),
      quoted(track.role),
      graph.taskName(task),
      graph.device(task),
      graph.streamName[graph.stream(task)],
      graph.ops[graph.op(task)].name,
      graph.stage(task),
      graph.microbatch[task],
      number(timeline.start[task]),
      number(timeline.end[task]),
      track.isOwn && track.track.nbytes ? track.track.nbytes[task] : 0,
    ].join(",");
  });
  const head = "timeline,role,task,device,stream,op,stage,microbatch,start,end,nbytes";
  return [head, ...lines].join("\n") + "\n";
}

/** A text as a cell of a CSV: quoted, and never a formula. */
function quoted(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** Content of the tab. */
export function exportTab(page, save) {
  const field = (id, label, value, least, most) => {
    const input = element("input", {
      type: "number",
      id,
      value: String(value),
      min: String(least),
      max: String(most),
      step: "any",
    });
    return [
      element("div", { className: "row" }, element("label", { for: id }, label), input),
      input,
    ];
  };
  const rows = page.scene.rows.length, suggested = Math.min(8, Math.max(1.2, 0.5 + 0.2 * rows));
  const [widthRow, width] = field("inches-wide", "width (inches)", 7.16, 1, 40);
  const [heightRow, height] = field(
    "inches-high",
    "height (inches)",
    Number(suggested.toFixed(2)),
    0.5,
    40,
  );
  const [fontRow, points] = field("points", "text (points)", 7, 4, 20);
  const [dpiRow, dpi] = field("dpi", "PNG dots an inch", 300, 50, 1200);
  const read = (input) => {
    const value = Number(input.value);
    const clamped = Math.min(
      Number(input.max),
      Math.max(Number(input.min), value || Number(input.min)),
    );
    if (clamped !== value) input.value = String(clamped);
    return clamped;
  };
  const dark = element("input", {
    type: "checkbox",
    id: "dark-export",
    checked: page.isDarkExport,
  });
  dark.addEventListener("change", () => page.isDarkExport = dark.checked);
  const name = fileName(page.title);
  const button = (id, label, make) => {
    const node = element("button", { type: "button", id }, label);
    node.addEventListener("click", async () => save(...await make()));
    return node;
  };
  return [
    element("h2", {}, "Export the view"),
    widthRow,
    heightRow,
    fontRow,
    dpiRow,
    element("div", { className: "row" }, element("label", { for: "dark-export" }, "dark"), dark),
    element(
      "p",
      {},
      button("save-svg", "SVG", () => [
        `${name}.svg`,
        new Blob([svgText(page, read(width), read(height), read(points))], {
          type: "image/svg+xml",
        }),
      ]),
      " ",
      button("save-png", "PNG", async () => [
        `${name}.png`,
        await pngBlob(page, read(width), read(height), read(points), read(dpi)),
      ]),
      " ",
      button("save-csv", "CSV of tasks in view", () => [
        `${name}.csv`,
        new Blob([csvText(page)], { type: "text/csv" }),
      ]),
    ),
    element(
      "p",
      { className: "note" },
      "All lanes are in the picture, for the times in view. Text in SVG stays text.",
    ),
  ];
}
