// Index of the samples of all folders and of their rows in the arrays.

export class Samples {
  constructor(manifest) {
    this.sets = manifest.sets
    this.names = [] // {set, number} of each sample
    this.begin = [] // first row of each sample
    this.steps = [] // number of steps of each sample
    this.first = [] // first sample of each set
    let row = 0
    manifest.sets.forEach((set, index) => {
      this.first.push(this.names.length)
      for (const number of set.numbers) {
        this.names.push({ set: index, number })
        this.begin.push(row)
        this.steps.push(set.num_steps)
        row += set.num_steps
      }
    })
    this.rows = row
    this.longest = Math.max(...manifest.sets.map((set) => set.num_steps))
  }

  get count() {
    return this.names.length
  }

  /** Return the sample with a number in a set; -1 if there is none. */
  find(set, number) {
    const place = this.sets[set]?.numbers.indexOf(number) ?? -1
    return place < 0 ? -1 : this.first[set] + place
  }

  /** Return the sample with the same start in the paired set, with or without the swap; -1 if there
   * is none. */
  pair(sample) {
    const { set, number } = this.names[sample]
    const { name, unaltered } = this.sets[set]
    const other = this.sets.findIndex((each) => each.name === unaltered || each.unaltered === name)
    return other < 0 ? -1 : this.find(other, number)
  }

  /** Return the samples of a set with the same start as a sample, which are more than one. */
  sameStart(sample) {
    const { set } = this.names[sample]
    const { starts } = this.sets[set]
    const own = starts[sample - this.first[set]]
    const found = starts.flatMap((start, place) => (own !== null && start === own ? [this.first[set] + place] : []))
    return found.length > 1 ? found : []
  }

  /** Return the difference of a sample from others of its start; empty if unknown. */
  variant(sample) {
    const { set } = this.names[sample]
    return this.sets[set].variants[sample - this.first[set]]
  }

  /** Return the name of a sample in lists. */
  short(sample) {
    const { set, number } = this.names[sample]
    return this.sets.length > 1 ? `${this.sets[set].name}/${number}` : String(number)
  }

  /** Return the name of a sample in sentences. */
  label(sample) {
    return this.sets.length > 1 ? this.short(sample) : `sample ${this.short(sample)}`
  }

  /** Return the row of a sample at a step, or its last row if the sample is shorter. */
  row(sample, step) {
    return this.begin[sample] + Math.min(step, this.steps[sample] - 1)
  }
}

/** Return the values of a column of an array with `width` columns at all steps of the chosen
 * samples. */
export function column(samples, array, width, index, chosen) {
  const found = []
  for (const sample of chosen) {
    const end = samples.begin[sample] + samples.steps[sample]
    for (let row = samples.begin[sample]; row < end; row++) found.push(array[row * width + index])
  }
  return found
}
