// Filters of samples.
//
// A filter is {ic, of, low, high, step}; of: 'coordinate', or the index of the saliency type whose
// gradient is meant; low, high: bounds, null for none; step: null if any step may pass. A sample
// without that saliency passes no gradient filter.

/** Return whether a filter needs an array of gradients that has not been loaded yet. */
export const waits = (filter, gradients) =>
  filter.of !== 'coordinate' && !gradients.has(filter.of)

/** Return the indices of the samples that pass all filters and, if `behaviour` is not null, show
 * it. */
export function passing(samples, steps, gradients, numIcs, filters, behaviour) {
  const found = []
  for (let sample = 0; sample < samples.count; sample++) {
    if (behaviour !== null && steps.behaviours[sample] !== behaviour) continue
    if (filters.every((filter) => passes(samples, steps, gradients, numIcs, filter, sample))) {
      found.push(sample)
    }
  }
  return found
}

function passes(samples, steps, gradients, numIcs, { ic, of, low, high, step }, sample) {
  const array = of === 'coordinate' ? steps.coordinates : gradients.get(of)
  const length = samples.steps[sample]
  if (step !== null && step >= length) return false
  const from = step ?? 0
  const to = step === null ? length : step + 1
  for (let t = from; t < to; t++) {
    const value = array[(samples.begin[sample] + t) * numIcs + ic]
    // NaN, which stands for missing saliency, fails the third comparison.
    if ((low === null || value >= low) && (high === null || value <= high) && value === value) {
      return true
    }
  }
  return false
}
