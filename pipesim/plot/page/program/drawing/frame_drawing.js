// Draw what is around the lanes: the time axis, names of devices, and the minimap.

import { axisUnit, fitted, MINIMAP, ticks } from "./geometry.js";

/** Draw the lines of the time axis behind all lanes. */
export function drawGrid(painter, view, top, bottom) {
  for (const { x } of ticks(view)) painter.line([[x, top], [x, bottom]], view.theme.grid);
}

/** Draw the time axis above the lanes. */
export function drawAxis(painter, view, top) {
  const [sign] = axisUnit(view);
  painter.line([[view.left, top - 0.5], [view.right, top - 0.5]], view.theme.soft);
  const { size } = view.fonts;
  for (const { x, text } of ticks(view)) {
    painter.line([[x, top - 4], [x, top]], view.theme.soft);
    painter.text(text, x, top - 12, view.theme.soft, { size, align: "center" });
  }
  painter.text(sign, view.left - 16, top - 12, view.theme.soft, { size, align: "right" });
}

/** Mark the end of each timeline. */
export function drawMakespans(painter, scene, view, state, top, bottom) {
  for (const panel of scene.panels) {
    const rows = scene.rows.filter((row) => row.panel === panel);
    if (!rows.length) continue;
    const from = Math.max(top, rows[0].y - state.scroll);
    const to = Math.min(bottom, rows.at(-1).y + rows.at(-1).height - state.scroll);
    if (to <= from) continue;
    for (const { timeline, role } of panel.tracks) {
      const x = view.x(timeline.makespan);
      if (x < view.left || x > view.right + 1) continue;
      const dash = role === "predicted" ? [4, 3] : [];
      painter.line([[x, from], [x, to]], view.theme.ink, { line: 0.8, dash });
    }
  }
}

/** Name devices, streams and panels. */
export function drawGutter(painter, scene, state, view, top, bottom) {
  const { theme, fonts, size } = view;
  painter.rect(0, top, size.gutter, bottom - top, theme.surface);
  painter.rect(size.width - size.right, top, size.right, bottom - top, theme.surface);
  const labelled = scene.rows.filter((row) => row.label !== undefined);
  const height = labelled.length > 1 ? labelled[1].y - labelled[0].y : Infinity;
  const every = Math.max(
    1,
    [1, 2, 4, 8, 16, 32, 64].find((step) => step * height >= fonts.size + 2) ?? 128,
  );
  for (const row of scene.rows) {
    const y = row.y - state.scroll;
    if (y > bottom || y + (row.block ?? row.height) < top) continue;
    if (row.type === "heading") {
      painter.rect(0, y, size.width, row.height, theme.band);
      painter.text(
        fitted(painter, scene.headingOf(row.panel), size.width - 12, fonts.size),
        6,
        y + row.height / 2,
        theme.ink,
        {
          size: fonts.size,
          weight: "600",
        },
      );
    } else if (row.label !== undefined && row.label % every === 0) {
      const center = y + Math.min(row.block, Math.max(row.height, fonts.size)) / 2;
      const middle = y < top ? center : Math.max(center, top + fonts.size / 2 + 1);
      const isShort = size.gutter < 60 || height < fonts.size + 2;
      painter.text(
        isShort ? String(row.label) : `device ${row.label}`,
        size.gutter - 8,
        middle,
        theme.ink,
        {
          size: fonts.size,
          align: "right",
        },
      );
    } else if (row.type === "lane" && !row.isCompute && row.height >= 9) {
      const small = Math.min(9, fonts.size);
      const name = fitted(painter, row.lane.stream, size.gutter - 9, small);
      painter.text(name, size.gutter - 8, y + row.height / 2, theme.soft, {
        size: small,
        align: "right",
      });
    }
    if (
      row.type === "lane" && row.isCompute && scene.isComparison(row.panel) && row.height >= 9 &&
      row.label === undefined
    ) {
      painter.text(row.track.role, size.gutter - 8, y + row.height / 2, theme.soft, {
        size: Math.min(9, fonts.size),
        align: "right",
      });
    }
  }
}

/** Draw the whole step in small, with the part that is in view. */
export function drawMinimap(painter, scene, state, view) {
  const { theme } = view, [first, last] = scene.extent;
  const width = view.right - view.left, height = MINIMAP - 8, y = 4;
  const n = Math.max(1, Math.round(width));
  const key = `${n} ${state.theme}`;
  if (scene.mapKey !== key) {
    scene.mapKey = key;
    scene.map = mapColumns(scene, first, last, n);
  }
  const x = (time) => view.left + (time - first) / (last - first) * width;
  painter.rect(view.left, y, width, height, theme.bubble);
  scene.map.forEach((parts, column) => {
    let top = y + height;
    for (const [op, share] of parts) {
      top -= share * height;
      painter.rect(
        view.left + column * width / n,
        top,
        width / n + 0.2,
        share * height,
        scene.ops[op].colour,
      );
    }
  });
  const from = Math.max(x(view.from), view.left), to = Math.min(x(view.to), view.right);
  const veil = state.theme === "dark" ? "rgba(0,0,0,0.55)" : "rgba(255,255,255,0.65)";
  painter.rect(view.left, y, from - view.left, height, veil);
  painter.rect(to, y, view.right - to, height, veil);
  painter.frame(from, y, Math.max(2, to - from), height, theme.select, { line: 1.5 });
}

/** Share of each operation over all devices, in columns of time. */
function mapColumns(scene, first, last, n) {
  const columns = Array.from({ length: n }, () => new Float64Array(scene.ops.length));
  let nLanes = 0;
  for (const { tracks } of scene.panels) {
    const track = tracks.at(-1), { graph } = track;
    for (const lanes of track.lanes) {
      for (const lane of lanes) {
        if (lane.stream !== "compute" || !lane.tasks.length) continue;
        nLanes++;
        const opOfSlot = new Int32Array(lane.looks.length);
        lane.tasks.forEach((task, k) => opOfSlot[lane.slot[k]] = graph.op(task));
        const shares = new Float64Array(n * lane.looks.length);
        lane.occupancy(first, (last - first) / n, n, shares);
        for (let column = 0; column < n; column++) {
          for (let slot = 0; slot < opOfSlot.length; slot++) {
            columns[column][opOfSlot[slot]] += shares[column * opOfSlot.length + slot];
          }
        }
      }
    }
  }
  return columns.map((sums) =>
    Array.from(sums.entries()).filter(([, sum]) => sum > 0).map(([op, sum]) => [op, sum / nLanes])
  );
}
