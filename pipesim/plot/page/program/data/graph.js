// Task graphs, from their columns.

/** Offsets of rows, from their lengths. */
export function offsets(lengths) {
  const ptr = new Int32Array(lengths.length + 1);
  for (let k = 0; k < lengths.length; k++) ptr[k + 1] = ptr[k] + lengths[k];
  return ptr;
}

/** Rows of ids, from the row of each id: ids of a row are in rising order. */
export function grouped(rowOf, nRows) {
  const ptr = new Int32Array(nRows + 1);
  for (const row of rowOf) ptr[row + 1]++;
  for (let row = 0; row < nRows; row++) ptr[row + 1] += ptr[row];
  const cursor = ptr.slice(), values = new Int32Array(rowOf.length);
  for (let k = 0; k < rowOf.length; k++) values[cursor[rowOf[k]]++] = k;
  return { ptr, values };
}

/** A task graph: one entry a task in each column, and one a kind in the columns of kinds. */
export class Graph {
  constructor(spec, columns, ops) {
    const read = (column) => columns.read(column);
    this.name = spec.name;
    this.n = spec.n;
    this.nDevices = spec.n_devices;
    this.nStages = spec.n_stages;
    this.nReplicas = spec.n_replicas;
    this.nMicrobatches = spec.n_microbatches;
    this.rendezvous = spec.rendezvous;
    this.ops = ops;
    this.kinds = Object.fromEntries(
      Object.entries(spec.kinds).map(([name, column]) => [name, read(column)]),
    );
    this.look = { fill: spec.look.fill, text: spec.look.text, ofKind: read(spec.look.of_kind) };
    this.streamOfKind = read(spec.stream_of_kind);
    this.streamDevice = read(spec.stream_device);
    this.streamName = Array.from(read(spec.stream_name), (k) => spec.stream_names[k]);
    this.kind = read(spec.kind);
    this.microbatch = read(spec.microbatch);
    this.needsPtr = offsets(read(spec.n_needs));
    this.needs = read(spec.needs_back).slice();
    for (let task = 0; task < this.n; task++) {
      for (let k = this.needsPtr[task]; k < this.needsPtr[task + 1]; k++) {
        this.needs[k] = task - this.needs[k];
      }
    }
    this.pair = new Int32Array(this.n).fill(-1);
    const back = read(spec.pair_back);
    read(spec.paired).forEach((task, k) => this.pair[task] = task - back[k]);
    this.host = read(spec.host);
    this.partial = spec.partial ? read(spec.partial) : null;
    this.membersPtr = spec.members ? offsets(read(spec.n_members)) : new Int32Array(1);
    this.members = spec.members ? read(spec.members) : new Int32Array(0);
    this.group = new Int32Array(spec.members ? this.n : 0).fill(-1);
    for (let number = 0; number + 1 < this.membersPtr.length; number++) {
      for (let k = this.membersPtr[number]; k < this.membersPtr[number + 1]; k++) {
        this.group[this.members[k]] = number;
      }
    }
    /** @type {{ptr: Int32Array, values: Int32Array}} */
    this._queues = null;
    this.roleOfKind = Array.from(this.kinds.op, (op) => ops[op].role);
  }

  op(task) {
    return this.kinds.op[this.kind[task]];
  }

  role(task) {
    return this.roleOfKind[this.kind[task]];
  }

  device(task) {
    return this.kinds.device[this.kind[task]];
  }

  stage(task) {
    return this.kinds.stage[this.kind[task]];
  }

  replica(task) {
    return this.kinds.replica[this.kind[task]];
  }

  stream(task) {
    return this.streamOfKind[this.kind[task]];
  }

  /** Whether a task is on its device's compute stream. */
  isOnCompute(task) {
    return this.streamName[this.stream(task)] === "compute";
  }

  fill(task) {
    return this.look.fill[this.look.ofKind[this.kind[task]]];
  }

  textColour(task) {
    return this.look.text[this.look.ofKind[this.kind[task]]];
  }

  /** The text form of a task's action, such as `2F0` or `0SEND_F3>2`. */
  taskName(task) {
    const microbatch = this.microbatch[task] < 0 ? "" : this.microbatch[task];
    const op = this.ops[this.op(task)];
    return `${this.stage(task)}${op.name}${microbatch}${this.#suffix(task, op)}`;
  }

  /** The text in a task's box: its micro-batch, and what tells it from others of its kind. */
  boxLabel(task) {
    const microbatch = this.microbatch[task] < 0 ? "" : String(this.microbatch[task]);
    const op = this.ops[this.op(task)], part = this.kinds.part[this.kind[task]];
    if (op.segmented && part >= 0) return microbatch;
    if (part >= 0 && op.parts.length) return microbatch + this.#partName(part, op)[0];
    return microbatch + this.#suffix(task, op);
  }

  /** The name of a part of an operation: those of a layer with experts follow the others. */
  #partName(part, op) {
    const more = part - op.parts.length, n = op.layer_parts.length;
    if (more < 0 || !n) return op.parts[part] ?? String(part);
    return op.layer_parts[more % n] + Math.floor(more / n);
  }

  #suffix(task, op) {
    const part = this.kinds.part[this.kind[task]], peer = this.kinds.peer_stage[this.kind[task]];
    if (part >= 0) return `.${this.#partName(part, op)}`;
    return peer < 0 ? "" : `${op.role === "send" ? ">" : "<"}${peer}`;
  }

  /** Tasks of each stream, in order of ids. */
  get queues() {
    if (!this._queues) {
      const stream = new Int32Array(this.n);
      for (let task = 0; task < this.n; task++) stream[task] = this.streamOfKind[this.kind[task]];
      this._queues = grouped(stream, this.streamDevice.length);
    }
    return this._queues;
  }

  /** The task before each on its stream, or -1. */
  get queuePredecessor() {
    if (!this._predecessor) {
      const { ptr, values } = this.queues;
      this._predecessor = new Int32Array(this.n).fill(-1);
      for (let stream = 0; stream + 1 < ptr.length; stream++) {
        for (let k = ptr[stream] + 1; k < ptr[stream + 1]; k++) {
          this._predecessor[values[k]] = values[k - 1];
        }
      }
    }
    return this._predecessor;
  }

  /** Tasks that a task needs whole or in part. */
  needsOf(task) {
    return this.needs.subarray(this.needsPtr[task], this.needsPtr[task + 1]);
  }

  /** Tasks that need a task; of a SEND, its RECV. */
  neededBy(task) {
    if (!this._users) {
      const rows = new Int32Array(this.needs.length);
      for (let t = 0; t < this.n; t++) rows.fill(t, this.needsPtr[t], this.needsPtr[t + 1]);
      const { ptr, values } = grouped(this.needs, this.n);
      this._users = { ptr, values: values.map((k) => rows[k]) };
    }
    const { ptr, values } = this._users;
    const users = Array.from(values.subarray(ptr[task], ptr[task + 1]));
    return this.role(task) === "send" && this.pair[task] >= 0 ? [this.pair[task], ...users] : users;
  }
}
