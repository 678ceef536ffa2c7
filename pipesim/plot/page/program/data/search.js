// Search tasks by name, operation, stage, micro-batch, device or stream.

const NAME = /^([0-9]*)([A-Z][A-Z_]*?)([0-9]*)$/;
const FIELD = /^(device|d|stage|s|microbatch|mb|m|replica|r)[:=]?([0-9]+)$/;

/**
 * Return the tasks of a graph that match all words of a query, or null for an empty one.
 *
 * A word is the name of a task (`1F4`), or a part of it (`F`, `1F`, `F4`); or `device:2`,
 * `stage:1`, `mb:4`, `replica:0`, `stream:send`.
 * @param {object} graph A `Graph`.
 * @param {string} query
 * @returns {Set<number> | null}
 */
export function findTasks(graph, query) {
  const words = query.trim().split(/\s+/).filter(Boolean);
  if (!words.length) return null;
  const tests = words.map((word) => testOf(graph, word));
  const matches = new Set();
  for (let task = 0; task < graph.n; task++) {
    if (tests.every((test) => test(task))) matches.add(task);
  }
  return matches;
}

function testOf(graph, word) {
  const stream = /^stream[:=](.+)$/i.exec(word);
  if (stream) return (task) => graph.streamName[graph.stream(task)].startsWith(stream[1]);
  const field = FIELD.exec(word.toLowerCase());
  if (field) {
    const value = Number(field[2]);
    if (field[1].startsWith("d")) return (task) => graph.device(task) === value;
    if (field[1].startsWith("s")) return (task) => graph.stage(task) === value;
    if (field[1].startsWith("r")) return (task) => graph.replica(task) === value;
    return (task) => graph.microbatch[task] === value;
  }
  const name = NAME.exec(word.toUpperCase());
  if (!name) return (task) => graph.taskName(task).toUpperCase() === word.toUpperCase();
  const [, stage, op, microbatch] = name;
  return (task) =>
    graph.ops[graph.op(task)].name === op &&
    (!stage || graph.stage(task) === Number(stage)) &&
    (!microbatch || graph.microbatch[task] === Number(microbatch));
}

/** The tasks that a query finds in the timelines of a scene. */
export class Search {
  constructor() {
    this.set("", null);
  }

  /** Find the tasks that match a query. */
  set(query, scene) {
    this.isActive = query.trim() !== "";
    /** Matches of each shown track. */
    this.ofTrack = new Map();
    /** Matches that started, as items in order of time. */
    this.found = [];
    if (!this.isActive) return;
    for (const { tracks } of scene.panels) {
      for (const track of tracks) {
        const tasks = findTasks(track.graph, query);
        this.ofTrack.set(track, tasks);
        for (const task of tasks) {
          if (!Number.isNaN(track.timeline.start[task])) {
            this.found.push({ type: "task", track, task });
          }
        }
      }
    }
    const startOf = ({ track, task }) => track.timeline.start[task];
    this.found.sort((a, b) => startOf(a) - startOf(b));
  }

  /** The match `step` places after an item; the first or last if the item is none. */
  next(item, step) {
    const { found } = this;
    const at = found.findIndex(({ track, task }) => track === item?.track && task === item?.task);
    if (at < 0) return found.at(step > 0 ? 0 : -1);
    return found[(at + step + found.length) % found.length];
  }
}
