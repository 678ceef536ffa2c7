// The document of a page: its panels, each with one timeline or two.

import { Columns } from "./columns.js";
import { ShownTrack } from "../drawing/shown_track.js";
import { Graph } from "./graph.js";
import { Track } from "./track.js";

const FORMAT = 1;
/** A difference of durations beyond this share is marked, if it is also one of the makespan. */
const MARKED_SHARE = 0.1, MARKED_MAKESPAN = 0.002;

/** Read the document and the columns of a decompressed block. */
export function readBlock(bytes) {
  const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const text = new TextDecoder().decode(bytes.subarray(4, 4 + length));
  const document = JSON.parse(text);
  if (document.format !== FORMAT) {
    throw new Error(`the page's format ${document.format} is unknown`);
  }
  const columns = new Columns(bytes.subarray(4 + length));
  const graphs = document.graphs.map((spec) => new Graph(spec, columns, document.ops));
  const tracks = document.timelines.map((spec) => new Track(spec, graphs, columns));
  return { document, graphs, tracks };
}

/** The panels of a document, ready to be shown; `variants` are by their number of micro-batches. */
export function panelsOf(document, tracks) {
  return document.panels.map(({ name, tracks: parts, variants }) => {
    const shown = parts.map(({ role, timeline }) => new ShownTrack(tracks[timeline], role));
    if (shown.length > 1) markDifferences(shown);
    const others = new Map((variants ?? []).map((v) => [v.n_microbatches, tracks[v.timeline]]));
    return { name, tracks: shown, variants: others };
  });
}

/** Mark tasks whose measured durations differ from the predicted ones. */
function markDifferences(tracks) {
  const [first, second] = tracks, least = MARKED_MAKESPAN * second.track.timeline.makespan;
  for (const [track, other] of [[first, second], [second, first]]) {
    track.differs = (task) => {
      const [own, twin] = [track.timeline.duration(task), other.timeline.duration(task)];
      return Math.abs(own - twin) > Math.max(least, MARKED_SHARE * Math.min(own, twin));
    };
  }
}
