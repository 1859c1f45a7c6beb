// Samples in which a coordinate is extreme.

/** Find the samples in which a coordinate is highest, nearest to the median, and lowest. With a
 * `step`, its value at this step counts; if it is null, the largest, median and smallest value of
 * each sample. chosen: indices of the samples to consider; width: number of coordinates. Returns
 * {high, middle, low}: lists of {sample, step, value}, the most extreme first, of at most `most`
 * samples and at most a third of the considered ones. Samples in `middle` are in no other list. */
export function extremes(samples, coordinates, width, ic, chosen, step, most) {
  const places = []
  for (const sample of chosen) {
    const length = samples.steps[sample]
    if (step !== null && step >= length) continue
    const here = []
    for (let t = step ?? 0; t < (step === null ? length : step + 1); t++) {
      here.push({ sample, step: t, value: coordinates[(samples.begin[sample] + t) * width + ic] })
    }
    here.sort((a, b) => a.value - b.value || a.step - b.step)
    places.push(here)
  }
  if (!places.length) return { high: [], middle: [], low: [] }
  const middles = places.map((here) => here[(here.length - 1) >> 1])
  const sorted = middles.map(({ value }) => value).sort((a, b) => a - b)
  const half = sorted.length >> 1
  const median = sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2
  const first = (list, distance) => list.toSorted(
    (a, b) => distance(a) - distance(b) || a.sample - b.sample).slice(0, Math.min(most, Math.ceil(places.length / 3)))
  const high = first(places.map((here) => here.at(-1)), ({ value }) => -value)
  const low = first(places.map((here) => here[0]), ({ value }) => value)
  const taken = new Set([...high, ...low].map(({ sample }) => sample))
  return { high, low,
    middle: first(middles.filter(({ sample }) => !taken.has(sample)), ({ value }) => Math.abs(value - median)) }
}
