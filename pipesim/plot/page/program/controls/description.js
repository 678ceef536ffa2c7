// What a page shows, as plain values.

/** A task or gap as plain values; null for neither. */
export function selectionOf(page, item) {
  if (!item) return null;
  const { track } = item, panel = page.panels.find(({ tracks }) => tracks.includes(track));
  const place = { panel: panel.name, role: track.role };
  if (item.type === "task") return { ...place, task: item.task };
  const { device, since, until } = item.gap;
  return { ...place, device, since, until };
}

/** What the page shows, for tests. */
export function describe(page) {
  const { state, view, scene, selection } = page;
  return {
    from: state.from,
    to: state.to,
    scroll: state.scroll,
    laneHeight: state.laneHeight,
    theme: state.theme,
    show: { ...state.show },
    size: view.size,
    step: page.step,
    rows: scene.rows.map(({ type, device, y, height, lane, track, panel }) => ({
      type,
      device,
      y: y - state.scroll,
      height,
      stream: lane?.stream,
      role: track?.role,
      panel: panel.name,
    })),
    selected: selectionOf(page, selection),
    found: page.search.isActive ? page.search.found.map(({ task }) => task) : null,
    makespans: scene.panels.flatMap(({ tracks }) =>
      tracks.map(({ timeline }) => timeline.makespan)
    ),
    nFrames: view.nFrames,
    ruler: view.ruler.map(({ time }) => time),
  };
}
