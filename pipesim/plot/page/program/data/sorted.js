// Search in values that rise.

/** Index of the first value for which a test holds, if it holds for all later ones; else `high`. */
export function firstFor(test, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (test(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Index of the first value above `x`. */
export function firstAbove(values, x) {
  return firstFor((k) => values[k] > x, 0, values.length);
}

/** Index of the first value that is at least `x`. */
export function firstAtLeast(values, x) {
  return firstFor((k) => values[k] >= x, 0, values.length);
}

/** As `firstAtLeast`, from an index on, in growing steps: quick if the result is near. */
export function nextAtLeast(values, x, low) {
  let step = 1, high = low;
  while (high < values.length && values[high] < x) {
    low = high;
    high += step;
    step *= 2;
  }
  return firstFor((k) => values[k] >= x, low, Math.min(high, values.length));
}
