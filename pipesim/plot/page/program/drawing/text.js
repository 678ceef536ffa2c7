// Numbers as text, in fitting units: as pipesim.utils.texts writes them.

/** @type {[string, number][]} */
const TIME_UNITS = [["s", 1], ["ms", 1e3], ["µs", 1e6], ["ns", 1e9]];
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** A value with three digits, without an exponent. */
export function significant(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return value.toFixed(0);
  if (size >= 9.995) return value.toFixed(1);
  if (size >= 0.9995) return value.toFixed(2);
  return value === 0 ? "0" : String(Number(value.toPrecision(3)));
}

/** The sign of the unit that fits some seconds, and its number in a second. */
export function timeUnit(seconds) {
  const size = Math.abs(seconds);
  if (!size) return TIME_UNITS[0];
  return TIME_UNITS.find(([, scale]) => size * scale >= 0.9995) ?? TIME_UNITS[3];
}

/** Seconds, or cycles and the like, as text. */
export function formatTime(time, unit = "s") {
  if (Number.isNaN(time)) return "n/a";
  if (unit !== "s") return `${Number(time.toPrecision(6))} ${unit}${time === 1 ? "" : "s"}`;
  const [sign, scale] = timeUnit(time);
  return `${significant(time * scale)} ${sign}`;
}

/** Seconds with enough digits to tell apart times that differ by `step`. */
export function formatTimeTo(time, step, unit = "s") {
  if (Number.isNaN(time)) return "n/a";
  if (unit !== "s") return `${Number(time.toPrecision(9))}`;
  const [sign, scale] = timeUnit(Math.max(Math.abs(time), step));
  const digits = Math.min(9, Math.max(0, Math.ceil(-Math.log10(step * scale) - 1e-9)));
  return `${(time * scale).toFixed(digits)} ${sign}`;
}

/** Bytes as text, such as `3.25 GiB`. */
export function formatBytes(nbytes) {
  let power = 0;
  while (Math.abs(nbytes) >= 1023.5 * 1024 ** power && power < BYTE_UNITS.length - 1) power++;
  return `${significant(nbytes / 1024 ** power)} ${BYTE_UNITS[power]}`;
}

/** A share with its sign, such as `+1.7%`. */
export function formatError(share) {
  if (!Number.isFinite(share)) return "n/a";
  return `${share < 0 ? "\u2212" : "+"}${(100 * Math.abs(share)).toFixed(1)}%`;
}

/** A share as text, such as `12.3%`. */
export function formatShare(share) {
  return `${(100 * share).toFixed(1)}%`;
}

/** Steps of a time axis: 1, 2 or 5 times a power of ten, at least `least` apart. */
export function tickStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999999);
}
