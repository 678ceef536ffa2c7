// Two ways to draw the same picture: on a canvas, and as SVG.

const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

/** Text in which characters that mean something in XML are escaped. */
export function escapeXml(text) {
  return String(text)
    // deno-lint-ignore no-control-regex
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd")
    .replace(/[&<>"']/g, (character) => ESCAPES[character]);
}

/** Red, green and blue of a colour such as `#74b9e7`. */
export function channels(colour) {
  return [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16));
}

/** A mix of two colours: `share` of the second. */
export function mix(colour, other, share) {
  const second = channels(other);
  const parts = channels(colour).map((part, k) =>
    Math.round(part * (1 - share) + second[k] * share)
  );
  return "#" + parts.map((part) => part.toString(16).padStart(2, "0")).join("");
}

/** Draws on a canvas. Lengths are CSS pixels. */
export class CanvasPainter {
  /**
   * @param {any} context Context of a canvas, in the document or not.
   * @param {number} ratio Pixels of the canvas in a CSS pixel.
   */
  constructor(context, ratio) {
    this.context = context;
    this.ratio = ratio;
    this.hatches = new Map();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = "middle";
    context.lineCap = "butt";
  }

  clear(width, height, colour) {
    this.context.fillStyle = colour;
    this.context.fillRect(0, 0, width, height);
  }

  rect(x, y, width, height, fill) {
    this.context.fillStyle = fill;
    this.context.fillRect(x, y, width, height);
  }

  frame(x, y, width, height, stroke, { line = 1, dash = [] } = {}) {
    const { context } = this;
    context.strokeStyle = stroke;
    context.lineWidth = line;
    context.setLineDash(dash);
    context.strokeRect(x, y, width, height);
    context.setLineDash([]);
  }

  hatch(x, y, width, height, colour) {
    this.context.fillStyle = this.#pattern(colour);
    this.context.fillRect(x, y, width, height);
  }

  #pattern(colour) {
    if (!this.hatches.has(colour)) {
      const tile = new OffscreenCanvas(8, 8), pen = tile.getContext("2d");
      pen.strokeStyle = colour;
      pen.lineWidth = 1.2;
      for (const shift of [-8, 0, 8]) {
        pen.moveTo(shift - 1, 9);
        pen.lineTo(shift + 9, -1);
      }
      pen.stroke();
      const pattern = this.context.createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(1 / this.ratio));
      this.hatches.set(colour, pattern);
    }
    return this.hatches.get(colour);
  }

  line(points, colour, { line = 1, dash = [] } = {}) {
    const { context } = this;
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.setLineDash(dash);
    context.beginPath();
    points.forEach(([x, y], k) => k ? context.lineTo(x, y) : context.moveTo(x, y));
    context.stroke();
    context.setLineDash([]);
  }

  polygon(points, fill) {
    const { context } = this;
    context.fillStyle = fill;
    context.beginPath();
    points.forEach(([x, y], k) => k ? context.lineTo(x, y) : context.moveTo(x, y));
    context.fill();
  }

  text(text, x, y, colour, { size = 11, align = "left", weight = "normal" } = {}) {
    const { context } = this;
    context.font = `${weight} ${size}px ${FONT}`;
    context.fillStyle = colour;
    context.textAlign = align;
    context.fillText(text, x, y);
  }

  textWidth(text, size = 11, weight = "normal") {
    this.context.font = `${weight} ${size}px ${FONT}`;
    return this.context.measureText(text).width;
  }

  clip(x, y, width, height) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
  }

  unclip() {
    this.context.restore();
  }

  /** Pixels of the canvas in the width of a column of `occupancy`. */
  get columnWidth() {
    return 1 / this.ratio;
  }

  /**
   * Draw columns of stacked shares, from the bottom up.
   * @param {number} x Left edge of the first column.
   * @param {number} y Top of the columns.
   * @param {number} height
   * @param {number} n Number of columns, each `columnWidth` wide.
   * @param {Float64Array} shares Shape (n, colours).
   * @param {string[]} colours
   * @param {string} background
   */
  occupancy(x, y, height, n, shares, colours, background) {
    const { ratio } = this;
    const rows = Math.max(1, Math.round(height * ratio));
    const image = this.context.createImageData(n, rows),
      pixels = new Uint32Array(image.data.buffer);
    const values = [...colours, background].map((colour) => {
      const [red, green, blue] = channels(colour);
      return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
    });
    const nColours = colours.length;
    pixels.fill(values[nColours]);
    for (let column = 0; column < n; column++) {
      let reached = 0, bottom = rows;
      for (let k = 0; k < nColours; k++) {
        const share = shares[column * nColours + k];
        if (!share) continue;
        reached += share;
        const top = Math.max(0, Math.round(rows * (1 - reached)));
        for (let row = top; row < bottom; row++) pixels[row * n + column] = values[k];
        bottom = Math.min(bottom, top);
      }
    }
    this.context.putImageData(image, Math.round(x * ratio), Math.round(y * ratio));
  }
}

/** Collects the elements of an SVG. Text stays text. */
export class SvgPainter {
  constructor(measure) {
    this.parts = [];
    this.definitions = [];
    this.hatches = new Map();
    this.measure = measure;
    this.depth = 0;
  }

  clear(width, height, colour) {
    this.rect(0, 0, width, height, colour);
  }

  rect(x, y, width, height, fill) {
    this.parts.push(
      `<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${
        short(height)
      }" fill="${fill}"/>`,
    );
  }

  frame(x, y, width, height, stroke, { line = 1, dash = [] } = {}) {
    this.parts.push(
      `<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" ` +
        `fill="none" stroke="${stroke}" stroke-width="${line}"${dashes(dash)}/>`,
    );
  }

  hatch(x, y, width, height, colour) {
    if (!this.hatches.has(colour)) {
      const id = `hatch${this.hatches.size}`;
      this.hatches.set(colour, id);
      this.definitions.push(
        `<pattern id="${id}" width="4" height="4" patternUnits="userSpaceOnUse">` +
          `<path d="M-1,1 l2,-2 M0,4 l4,-4 M3,5 l2,-2" stroke="${colour}" stroke-width="0.6"/></pattern>`,
      );
    }
    this.rect(x, y, width, height, `url(#${this.hatches.get(colour)})`);
  }

  line(points, colour, { line = 1, dash = [] } = {}) {
    this.parts.push(
      `<polyline points="${path(points)}" fill="none" stroke="${colour}" stroke-width="${line}"${
        dashes(dash)
      }/>`,
    );
  }

  polygon(points, fill) {
    this.parts.push(`<polygon points="${path(points)}" fill="${fill}"/>`);
  }

  text(text, x, y, colour, { size = 11, align = "left", weight = "normal" } = {}) {
    const anchor = { left: "start", center: "middle", right: "end" }[align];
    this.parts.push(
      `<text x="${short(x)}" y="${
        short(y + 0.35 * size)
      }" font-size="${size}" text-anchor="${anchor}" ` +
        `font-weight="${weight}" fill="${colour}">${escapeXml(text)}</text>`,
    );
  }

  textWidth(text, size = 11, weight = "normal") {
    return this.measure(text, size, weight);
  }

  clip(x, y, width, height) {
    const id = `clip${this.definitions.length}`;
    this.definitions.push(
      `<clipPath id="${id}"><rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${
        short(height)
      }"/></clipPath>`,
    );
    this.parts.push(`<g clip-path="url(#${id})">`);
  }

  unclip() {
    this.parts.push("</g>");
  }

  get columnWidth() {
    return 0.5;
  }

  occupancy(x, y, height, n, shares, colours, background) {
    const width = this.columnWidth;
    this.rect(x, y, n * width, height, background);
    colours.forEach((colour, k) => {
      // One outline for the tops of all columns of this colour and those below it.
      let path = "", isOpen = false;
      for (let column = 0; column < n; column++) {
        let low = 0;
        for (let below = 0; below < k; below++) low += shares[column * colours.length + below];
        const high = low + shares[column * colours.length + k];
        if (high > low) {
          const left = short(x + column * width), right = short(x + (column + 1) * width);
          const top = short(y + height * (1 - Math.min(1, high))),
            bottom = short(y + height * (1 - low));
          path += `M${left},${bottom}V${top}H${right}V${bottom}Z`;
          isOpen = true;
        }
      }
      if (isOpen) this.parts.push(`<path d="${path}" fill="${colour}"/>`);
    });
  }

  /** The whole SVG, `width` and `height` in CSS pixels; 96 of them are an inch. */
  toString(width, height, title) {
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${short(width / 96)}in" height="${
      short(height / 96)
    }in" ` +
      `viewBox="0 0 ${short(width)} ${
        short(height)
      }" font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif">` +
      `<title>${escapeXml(title)}</title><defs>${this.definitions.join("")}</defs>` +
      `${this.parts.join("\n")}</svg>\n`;
  }
}

function short(value) {
  return String(Number(value.toFixed(2)));
}

function path(points) {
  return points.map(([x, y]) => `${short(x)},${short(y)}`).join(" ");
}

function dashes(dash) {
  return dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : "";
}
