// Where the samples of all folders, and their rows, lie in the arrays.

export class Samples {
  constructor(manifest) {
    this.sets = manifest.sets
    this.names = [] // {set, number} of each sample
    this.begin = [] // its first row
    this.steps = [] // how many it has
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

  /** The sample with a number in a set, or -1. */
  find(set, number) {
    const place = this.sets[set]?.numbers.indexOf(number) ?? -1
    return place < 0 ? -1 : this.first[set] + place
  }

  /** The same start in the paired set (altered beside unaltered), or -1. */
  pair(sample) {
    const { set, number } = this.names[sample]
    const { name, unaltered } = this.sets[set]
    const other = this.sets.findIndex((each) => each.name === unaltered || each.unaltered === name)
    return other < 0 ? -1 : this.find(other, number)
  }

  /** A sample's name where samples are listed. */
  short(sample) {
    const { set, number } = this.names[sample]
    return this.sets.length > 1 ? `${this.sets[set].name}/${number}` : String(number)
  }

  /** A sample's name in a sentence. */
  label(sample) {
    return this.sets.length > 1 ? this.short(sample) : `sample ${this.short(sample)}`
  }

  /** The row of a sample at a step; a shorter sample stays at its last one. */
  row(sample, step) {
    return this.begin[sample] + Math.min(step, this.steps[sample] - 1)
  }
}

/** Values of a column of an array at all steps of the chosen samples. */
export function column(samples, array, width, index, chosen) {
  const found = []
  for (const sample of chosen) {
    const end = samples.begin[sample] + samples.steps[sample]
    for (let row = samples.begin[sample]; row < end; row++) found.push(array[row * width + index])
  }
  return found
}
