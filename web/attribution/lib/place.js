// A frame of a trajectory beside the one that the page shows, as the views read it.

// What is the same everywhere on the page; `AttributionPage` has it.
const SAME = ['manifest', 'steps', 'strips', 'labels', 'begins', 'layer', 'features', 'colours', 'weights',
  'places', 'on', 'summary', 'has', 'featureName', 'failuresOf', 'trajectoryName', 'observation', 'frame']

export class Place {
  #page

  /** trajectory() and step(): of the place. */
  constructor(page, trajectory, step) {
    this.#page = page
    this.view = Object.create(page.view, { trajectory: { get: trajectory }, step: { get: step } })
    for (const name of SAME) {
      Object.defineProperty(this, name, { get() {
        const found = page[name]
        return typeof found === 'function' ? found.bind(page) : found
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
    return this.#page.attribution(output, this.view.trajectory)
  }

  memory(output) {
    return this.#page.memory(output, this.view.trajectory)
  }

  /** Both places go on together. */
  go(step) {
    this.#page.go(this.#page.view.step + step - this.view.step)
  }

  set playing(value) {
    this.#page.playing = value
  }
}
