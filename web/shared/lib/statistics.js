// Ranges, histograms, and numbers as text.

/** Return the smallest and the largest value of each column of an array with `width` columns: {low,
 * high}. */
export function ranges(array, width) {
  const low = new Array(width).fill(Infinity)
  const high = new Array(width).fill(-Infinity)
  for (let i = 0; i < array.length; i++) {
    const column = i % width
    if (array[i] < low[column]) low[column] = array[i]
    if (array[i] > high[column]) high[column] = array[i]
  }
  return { low, high }
}

/** Count the values in each of `bins` equal parts of [low, high]. */
export function histogram(values, low, high, bins) {
  const counts = new Array(bins).fill(0)
  const scale = bins / (high - low || 1)
  for (const value of values) {
    const bin = Math.floor((value - low) * scale)
    if (bin >= 0 && bin <= bins) counts[Math.min(bin, bins - 1)] += 1
  }
  return counts
}

/** Return about `most` round numbers within [low, high], for the ticks of an axis. */
export function ticks(low, high, most) {
  const rough = (high - low) / most || 1
  const power = 10 ** Math.floor(Math.log10(rough))
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power
  const found = []
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(12)))
  }
  return found
}

/** Format a number with at most two decimals. */
export const rounded = (value) =>
  String(Number(value.toFixed(2)) || 0).replace('-', '−')

/** Format a number with three significant digits and a true minus sign. */
export function shown(value) {
  if (!Number.isFinite(value)) return '–'
  if (value === 0) return '0'
  const size = Math.abs(value)
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(1) : size >= 100
    ? value.toFixed(0) : value.toPrecision(3)
  return text.replace(/-/g, '−')
}
