// State of the page: loaded data and the shown view.

import { SvelteSet } from 'svelte/reactivity'
import { Address } from '../../shared/lib/address.js'
import { loadManifest } from '../../shared/lib/data.js'
import { published, read as readAddress, readNames, write as writeAddress } from './address.js'
import {
  attributionName, examplesName, FORMAT, framesName, Kept, loadSteps, loadStrips, memoryName, observationsName, read
} from './data.js'
import { ABOVE, cellsOfPixels, GAIN, kernel, palette, SMOOTHING } from './paint.js'
import { Place } from './place.js'

const MOST_BYTES = 50e6 // size of the cache of decoded files
const MOST_ROWS = 8

export class AttributionPage {
  manifest = $state.raw(null)
  steps = $state.raw(null)
  strips = $state.raw(null)
  error = $state('')
  problem = $state('') // message about a file that could not be loaded
  view = $state({ layer: 0, trajectory: 0, step: 0, rows: [0], gain: GAIN, smoothing: SMOOTHING, above: ABOVE, sign: 'two',
    overlay: true, residual: false, chart: 'waterfall', alone: [], palette: 'apart', curves: [],
    window: 256, speed: 12, marks: [], keys: true, notes: '', beside: null, ahead: 0, sameLevel: false })
  playing = $state(false)
  direction = $state(1)
  hovered = $state(null) // feature under the pointer, which is temporarily shown alone
  opened = $state(null) // feature whose examples are open
  labels = $state([]) // names given by the user, by layer and feature
  #kept = new Kept(MOST_BYTES)
  #pending = new SvelteSet()
  #failed = new Set()
  #arrivals = $state(0)
  #waiting = []
  #address = new Address()

  layer = $derived(this.manifest?.layers[this.view.layer] ?? null)
  length = $derived(this.manifest?.trajectories[this.view.trajectory] ?? 0)
  begins = $derived.by(() => {
    const found = [0]
    for (const length of this.manifest?.trajectories ?? []) found.push(found.at(-1) + length)
    return found
  })
  row = $derived(this.begins[this.view.trajectory] + this.view.step) // index in the arrays of all steps
  colours = $derived(this.layer ? palette(this.view.palette, this.layer.num_features) : [])
  weights = $derived(kernel(this.view.smoothing))
  places = $derived(this.layer ? cellsOfPixels(this.layer, this.manifest.frame) : null)
  features = $derived(Array.from({ length: this.layer?.num_features ?? 0 }, (_, f) => f))
  /** Whether each feature, and last the residual, is included in the images. */
  on = $derived.by(() => {
    const count = this.features.length
    const { alone, residual } = this.view
    if (this.layer?.gradients) return [true]
    if (this.hovered !== null) return this.#only([this.hovered])
    if (alone.length) return this.#only(alone)
    return [...new Array(count).fill(true), residual]
  })
  busy = $derived(this.#pending.size > 0)
  /** Place in a second trajectory, synchronised with the shown one; or null. */
  beside = $derived(this.view.beside === null ? null : this.#besideOf(this.view.beside, () => this.view.step))

  #besideOf(trajectory, step) {
    const last = this.manifest.trajectories[trajectory] - 1
    const at = (now) => (this.view.sameLevel ? this.#sameLevel(trajectory, now) : null) ?? now + this.view.ahead
    return new Place(this, () => trajectory, () => Math.max(0, Math.min(at(step()), last)))
  }

  /** Return the step of another trajectory at the same number of steps after the start of the same
   * level, or its last step in this level if it is shorter; null if the trajectory does not contain
   * the level. */
  #sameLevel(trajectory, step) {
    const { episode, level } = this.steps
    const now = this.begins[this.view.trajectory] + step
    let start = now
    while (start > this.begins[this.view.trajectory] && episode[start - 1] === episode[now]) start -= 1
    const [from, to] = [this.begins[trajectory], this.begins[trajectory + 1]]
    const first = level.indexOf(level[now], from)
    if (first < 0 || first >= to) return null
    let found = first
    while (found < first + now - start && found + 1 < to && episode[found + 1] === episode[first]) found += 1
    return found - from
  }

  /** Show another trajectory for comparison; null for none. */
  chooseBeside(trajectory) {
    this.view.beside = trajectory
    const { agent_of: agentOf } = this.manifest
    if (trajectory !== null) this.view.sameLevel = agentOf[trajectory] !== agentOf[this.view.trajectory]
  }

  /** Return the displayed name of a trajectory, with the name of its agent if there are several
   * agents. */
  trajectoryName(trajectory) {
    const { agents, agent_of: agentOf } = this.manifest
    return `trajectory ${trajectory + 1}${agents.length > 1 ? ` of ${agents[agentOf[trajectory]]}` : ''}`
  }

  /** Return the places that are shown at a step: of the chosen trajectory, and of the second one if
   * any. */
  placesAt(step) {
    const { trajectory, beside } = this.view
    return [new Place(this, () => trajectory, () => step),
      ...(beside === null ? [] : [this.#besideOf(beside, () => step)])]
  }

  #only(chosen) {
    return Array.from({ length: this.features.length + 1 }, (_, f) => chosen.includes(f))
  }

  async load() {
    try {
      this.manifest = await loadManifest(FORMAT)
      this.labels = this.manifest.labels.map((names) => [...names])
      const { feature, ...start } = this.manifest.start
      Object.assign(this.view, start)
      this.view.rows = [this.layer.outputs[0]]
      if (feature !== null && !location.search) this.view.alone = [feature]
      const brought = this.#address.brought()
      if (brought !== null) this.#open(brought)
      else this.#show(published(location.search, $state.snapshot(this.view), this))
      document.title = this.title
      const [steps, strips] = await Promise.all([loadSteps(), loadStrips()])
      this.steps = steps
      this.strips = strips
    } catch (error) {
      this.error = error.message
    }
  }

  get title() {
    const { agents, game, experiment } = this.manifest
    return `${agents.join(' and ')} · ${game} · attribution · ${experiment}`
  }

  #show(view) {
    Object.assign(this.view, view)
    this.go(this.view.step)
  }

  fromAddress() {
    const brought = this.#address.brought()
    if (brought !== null) this.#open(brought)
  }

  #open(fragment) {
    this.labels = readNames(fragment, this.manifest)
    this.#show(readAddress(fragment, $state.snapshot(this.view), this))
  }

  toAddress() {
    this.#address.put(writeAddress(this.view, this.manifest, this.labels))
  }

  address() {
    return this.#address.whole(writeAddress(this.view, this.manifest, this.labels))
  }

  /** Return the content of a file, or null while it is loading. */
  content(name) {
    this.#arrivals // read, so that callers are updated when a file arrives
    const found = this.#kept.get(name)
    if (!found && !this.#failed.has(name)) queueMicrotask(() => this.#need(name))
    return found
  }

  async #need(name) {
    if (this.#pending.has(name) || this.#kept.get(name)) return
    this.#pending.add(name)
    try {
      this.#kept.put(name, await read(name))
    } catch (error) {
      this.problem = error.message
      this.#failed.add(name)
    }
    this.#pending.delete(name)
    this.#arrivals += 1
    for (const resolve of this.#waiting.splice(0)) resolve()
  }

  /** Wait until a file arrives; throw an error if a file could not be loaded. */
  async arrival() {
    if (!this.problem) await new Promise((resolve) => this.#waiting.push(resolve))
    if (this.problem) throw new Error(this.problem)
  }

  tilesOf(step) {
    const many = this.manifest.tiles ** 2
    return [Math.floor(step / many), step % many]
  }

  /** Return the sheet that contains a frame, null while it is loading, and the number of its
   * tile. */
  frame(trajectory, step) {
    const [sheet, tile] = this.tilesOf(step)
    return [this.content(framesName(trajectory, sheet)), tile]
  }

  observation(number) {
    const [sheet, tile] = this.tilesOf(number)
    return [this.content(observationsName(this.view.layer, sheet)), tile]
  }

  /** Return the attributions of an output to the shown layer in a trajectory; null while
   * loading. */
  attribution(output, trajectory = this.view.trajectory) {
    return this.content(attributionName(this.view.layer, output, trajectory))
  }

  /** Return the attributions of an output over the last steps; null if there are none, or while
   * loading. */
  memory(output, trajectory = this.view.trajectory) {
    return this.summary(output)?.lags ? this.content(memoryName(this.view.layer, output, trajectory)) : null
  }

  examples() {
    return this.layer?.examples ? this.content(examplesName(this.view.layer)) : null
  }

  summary(output, layer = this.view.layer) {
    return this.manifest.summaries.find((each) => each.layer === layer && each.output === output) ?? null
  }

  has(output) {
    return this.layer.outputs.includes(output)
  }

  go(step) {
    this.view.step = Math.max(0, Math.min(step, this.length - 1))
  }

  show(trajectory, step) {
    if (trajectory < 0 || trajectory >= this.manifest.trajectories.length) return
    this.view.trajectory = trajectory
    this.go(step)
  }

  chooseLayer(layer) {
    if (layer < 0 || layer >= this.manifest.layers.length) return
    this.view.layer = layer
    this.view.alone = []
    this.hovered = this.opened = null
  }

  tick() {
    const next = this.view.step + this.direction
    if (next < 0 || next >= this.length) this.playing = false
    else this.go(next)
  }

  /** Play or pause in a direction; at the end, start again from the other end. */
  play(direction) {
    if (!this.playing && direction > 0 && this.view.step === this.length - 1) this.go(0)
    if (!this.playing && direction < 0 && this.view.step === 0) this.go(this.length - 1)
    this.playing = !(this.playing && this.direction === direction)
    this.direction = direction
  }

  isolate(feature) {
    if (this.layer.gradients) return
    const { alone } = this.view
    this.view.alone = alone.includes(feature) ? alone.filter((each) => each !== feature)
      : [...alone, feature].sort((a, b) => a - b)
  }

  addRow() {
    if (this.view.rows.length >= MOST_ROWS) return
    const unused = this.layer.outputs.find((each) => !this.view.rows.includes(each))
    this.view.rows.push(unused ?? this.layer.outputs[0])
  }

  get full() {
    return this.view.rows.length >= MOST_ROWS
  }

  mark() {
    const here = [this.view.trajectory, this.view.step]
    const { marks } = this.view
    const same = ([trajectory, step]) => trajectory === here[0] && step === here[1]
    this.view.marks = marks.some(same) ? marks.filter((each) => !same(each)) : [...marks, here]
  }

  /** Return the kind of object that a feature is named after; '' for none. */
  objectName(feature) {
    return this.layer.objects?.names[feature].replaceAll('_', ' ') ?? ''
  }

  /** Return the causes of the failed episodes of a trajectory, a Map by their last step. */
  failuresOf(trajectory) {
    return new Map(this.manifest.failures.flatMap(({ cause, steps }) => steps
      .filter(([of]) => of === trajectory).map(([, step]) => [step, cause.replaceAll('_', ' ')])))
  }

  /** Return the displayed name of a feature, with its number from 1, or of the residual. */
  featureName(feature) {
    if (feature === this.features.length) return 'residual'
    const name = this.labels[this.view.layer]?.[feature] || this.objectName(feature)
    return name ? `${feature + 1} ${name}` : `feature ${feature + 1}`
  }
}
