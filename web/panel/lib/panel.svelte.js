// State of the panel: loaded data and the shown view.

import { Address } from '../../shared/lib/address.js'
import { loadManifest } from '../../shared/lib/data.js'
import { ranges } from '../../shared/lib/statistics.js'
import { read, write } from './address.js'
import { FORMAT, loadFeatures, loadGradients, loadRecorded, loadSteps, Pictures } from './data.js'
import { passing, waits } from './filters.js'
import { Samples } from './samples.js'

export class Panel {
  manifest = $state.raw(null)
  error = $state('')
  steps = $state.raw(null)
  recorded = $state.raw(null)
  positions = $state.raw({}) // player positions at the recorded states, by name
  gradients = $state.raw(new Map()) // loaded gradients, by saliency type
  view = $state({ sample: 0, other: null, step: 0, type: null, map: 0, x: 0, y: 1, ic: 0, at: null,
    cloud: 'both', colouring: null, speed: 4, behaviour: null, filters: [], feature: null, failure: null, notes: '' })
  features = $state.raw(null) // sparse features, strongest first
  featureImages = $state.raw(null) // {feature, examples, dream, problem} of the shown feature
  playing = $state(false)
  pictures = new Pictures()
  samples = null

  passing = $derived(this.steps && !this.waiting ? passing(this.samples, this.steps, this.gradients,
    this.manifest.num_ics, this.view.filters, this.view.behaviour) : [])
  waiting = $derived(this.view.filters.some((filter) => waits(filter, this.gradients)))
  shown = $derived(this.view.other === null ? [this.view.sample]
    : [this.view.sample, this.view.other])
  length = $derived(this.samples ? Math.max(...this.shown.map((each) => this.samples.steps[each])) : 1)
  type = $derived(this.view.type === null ? null : this.manifest.saliency[this.view.type])
  /** Title of the saliency type, and of the part of the simulator's state if its map is shown. */
  saliencyTitle = $derived(this.type
    ? this.type.title + (this.view.map ? ` (${this.manifest.maps[this.view.map]})` : '') : '')
  limits = $derived(this.#limits())
  /** Reward of a full bar, in the game's unit: the largest |reward| of any step, at least 1. */
  mostReward = $derived((this.steps?.rewards ?? []).reduce((most, reward) => Math.max(most, Math.abs(reward)), 1))

  #theme
  #start = null
  #address = new Address()

  constructor(theme) {
    this.#theme = theme
  }

  get colours() {
    return this.#theme.colours
  }

  get title() {
    const { agent, game, experiment } = this.manifest
    return [agent, game, 'imagined episodes', experiment].filter(Boolean).join(' · ')
  }

  async load() {
    try {
      this.manifest = await loadManifest(FORMAT)
      this.samples = new Samples(this.manifest)
      const types = this.manifest.saliency
      const value = types.findIndex(({ name }) => name === 'value')
      const type = types.length ? Math.max(value, 0) : null
      this.#start = { ...this.view, sample: this.manifest.start, y: Math.min(1, this.manifest.num_ics - 1),
        feature: this.manifest.features[0] ?? null, failure: this.manifest.failures[0]?.number ?? null, type, at: type === null ? null : types[type].steps[0] ?? null }
      this.view = this.#start
      this.fromAddress()
      document.title = this.title
      this.steps = await loadSteps()
      const { coordinates, ...positions } = await loadRecorded()
      this.recorded = coordinates
      this.positions = positions
      if (this.manifest.features.length) this.features = await loadFeatures()
    } catch (error) {
      this.error = error.message
    }
  }

  /** Take the view from the address, unless the panel itself wrote it there. */
  fromAddress() {
    const fragment = this.#address.brought()
    if (fragment) this.view = read(fragment, this.#start, this.manifest, this.samples)
    this.#clamp()
  }

  /** Write the view to the address after a short delay. */
  toAddress() {
    this.#address.put(write(this.view, this.manifest, this.samples))
  }

  address() {
    return this.#address.whole(write(this.view, this.manifest, this.samples))
  }

  /** Load the gradients of a saliency type, unless they are loaded. */
  async need(type) {
    if (type === null || type === 'coordinate' || this.gradients.has(type)) return
    try {
      const found = await loadGradients(type)
      this.gradients = new Map(this.gradients).set(type, found)
    } catch (error) {
      this.error = error.message
    }
  }

  /** Load the examples of a sparse feature and the frames of its dream. */
  async needFeature({ number, dream }) {
    const images = { feature: number, examples: null, dream: null, problem: '' }
    try {
      [images.examples, images.dream] = await Promise.all([this.pictures.examples(number),
        typeof dream?.sample === 'number' ? this.pictures.frames(dream.sample) : null])
    } catch (error) {
      images.problem = error.message
    }
    if (number === this.view.feature) this.featureImages = images
  }

  has(sample, type) {
    return type !== null && this.steps !== null
      && this.steps.has_saliency[sample * this.manifest.saliency.length + type] === 1
  }

  /** Return the coordinates or gradients of a sample at a step, one number per component. */
  at(array, sample, step) {
    const width = this.manifest.num_ics
    const row = this.samples.row(sample, step)
    return array.subarray(row * width, (row + 1) * width)
  }

  /** Return the gradients of the chosen saliency type at a step of a sample; null if there are
   * none. */
  gradientsAt(sample, step) {
    if (this.type?.counterfactual) return null
    const array = this.gradients.get(this.view.type)
    return array && this.has(sample, this.view.type) ? this.at(array, sample, step) : null
  }

  go(step) {
    this.view.step = Math.max(0, Math.min(step, this.length - 1))
  }

  show(sample, beside = false) {
    if (beside) this.view.other = sample
    else this.view.sample = sample
    this.#clamp()
  }

  /** Return the next sample (direction 1) or the previous one (-1) that passes the filters; the
   * same sample if there is none. */
  neighbour(sample, direction) {
    const list = direction > 0 ? this.passing : this.passing.toReversed()
    return list.find((each) => (each - sample) * direction > 0) ?? sample
  }

  tick() {
    this.view.step = this.view.step + 1 < this.length ? this.view.step + 1 : 0
  }

  reset() {
    this.view.filters = []
    this.view.behaviour = null
  }

  #clamp() {
    this.go(this.view.step)
  }

  /** Return the smallest and the largest coordinate of each component over recorded and simulated
   * states. */
  #limits() {
    if (!this.steps) return null
    const width = this.manifest.num_ics
    const all = ranges(this.steps.coordinates, width)
    if (this.recorded) {
      const more = ranges(this.recorded, width)
      all.low = all.low.map((value, i) => Math.min(value, more.low[i]))
      all.high = all.high.map((value, i) => Math.max(value, more.high[i]))
    }
    return all
  }
}
