// Read the columns of a page: the counterpart of columns.py.

/**
 * Decompress bytes in the zlib format.
 * @param {Uint8Array<ArrayBuffer>} bytes
 * @returns {Promise<Uint8Array>}
 */
export async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const DIGITS =
  "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;.=/?@^_:{|}~";

/**
 * Decode text of 85 digits: five of them are four bytes. html.py encodes.
 * @param {string} text
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function bytesOfText(text) {
  const n = text.length - Math.ceil(text.length / 5), bytes = new Uint8Array(n + 4);
  const view = new DataView(bytes.buffer), values = new Uint8Array(128).fill(84);
  for (let k = 0; k < 85; k++) values[DIGITS.charCodeAt(k)] = k;
  for (let k = 0, at = 0; k < text.length; k += 5, at += 4) {
    let number = 0;
    for (let place = 0; place < 5; place++) {
      number = 85 * number + values[text.charCodeAt(k + place) & 127];
    }
    view.setUint32(at, number);
  }
  return bytes.slice(0, n);
}

/** Columns of numbers in one block of bytes. */
export class Columns {
  /** @param {Uint8Array} bytes */
  constructor(bytes) {
    this.bytes = bytes;
  }

  /**
   * Return the values of a column.
   * @param {any} spec Place and encoding, as columns.py writes them.
   * @returns {Int32Array | Float64Array | Uint8Array}
   */
  read(spec) {
    switch (spec.type) {
      case "constant": {
        const small = Math.abs(spec.value) < 2 ** 31;
        return new (small ? Int32Array : Float64Array)(spec.n).fill(spec.value);
      }
      case "bytes":
        return this.bytes.subarray(spec.offset, spec.offset + spec.n);
      case "integers":
        return this.#integers(spec);
      case "floats":
        return this.#floats(spec);
      case "decimals":
        return this.#decimals(spec);
      case "table": {
        const table = this.read(spec.values), index = this.read(spec.index);
        const values = new Float64Array(index.length);
        for (let k = 0; k < index.length; k++) values[k] = table[index[k]];
        return values;
      }
      default:
        throw new Error(`this page has a column of an unknown type: ${spec.type}`);
    }
  }

  #integers({ n, width, offset }) {
    const values = new Float64Array(n);
    let value = 0, isSmall = true;
    for (let k = 0; k < n; k++) {
      let code = 0;
      for (let place = width - 1; place >= 0; place--) {
        code = code * 256 + this.bytes[offset + place * n + k];
      }
      value += code % 2 ? -(code + 1) / 2 : code / 2;
      isSmall &&= Math.abs(value) < 2 ** 31;
      values[k] = value;
    }
    return isSmall ? new Int32Array(values) : values;
  }

  #floats({ n, offset }) {
    const bytes = new Uint8Array(8 * n);
    for (let place = 0; place < 8; place++) {
      for (let k = 0; k < n; k++) bytes[8 * k + place] = this.bytes[offset + place * n + k];
    }
    return new Float64Array(bytes.buffer);
  }

  #decimals(spec) {
    const scale = 10 ** spec.digits;
    const values = Float64Array.from(this.read(spec.integers), (ticks) => ticks / scale);
    if (spec.missing) { for (const k of this.read(spec.missing)) values[k] = NaN; }
    return values;
  }
}
