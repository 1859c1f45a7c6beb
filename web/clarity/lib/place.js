// A frame of a trajectory beside the one that the page shows, as the views read it.

// What is the same everywhere on the page; `Clarity` has it.
const SAME = ['manifest', 'steps', 'strips', 'labels', 'begins', 'layer', 'features', 'colours', 'weights',
  'places', 'on', 'summary', 'has', 'featureName', 'failuresOf', 'trajectoryName', 'observation', 'frame']

export class Place {
  #clarity

  /** trajectory() and step(): of the place. */
  constructor(clarity, trajectory, step) {
    this.#clarity = clarity
    this.view = Object.create(clarity.view, { trajectory: { get: trajectory }, step: { get: step } })
    for (const name of SAME) {
      Object.defineProperty(this, name, { get() {
        const found = clarity[name]
        return typeof found === 'function' ? found.bind(clarity) : found
      } })
    }
  }

  get length() {
    return this.manifest.trajectories[this.view.trajectory]
  }

  get row() {
    return this.begins[this.view.trajectory] + this.view.step
  }

  attribution(output) {
    return this.#clarity.attribution(output, this.view.trajectory)
  }

  memory(output) {
    return this.#clarity.memory(output, this.view.trajectory)
  }

  /** Both places go on together. */
  go(step) {
    this.#clarity.go(this.#clarity.view.step + step - this.view.step)
  }

  set playing(value) {
    this.#clarity.playing = value
  }
}
