// A step of any trajectory, with the interface that the views read from the page.

// Members of `AttributionPage` that are the same for all places.
const SAME = ['manifest', 'steps', 'strips', 'labels', 'begins', 'layer', 'features', 'colours', 'weights',
  'places', 'on', 'summary', 'has', 'featureName', 'failuresOf', 'trajectoryName', 'observation', 'frame']

export class Place {
  #page

  /** trajectory(), step(): return the trajectory and the step of the place. */
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

  /** Go to a step of this place, and move the page by the same number of steps. */
  go(step) {
    this.#page.go(this.#page.view.step + step - this.view.step)
  }

  set playing(value) {
    this.#page.playing = value
  }
}
