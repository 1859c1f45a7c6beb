// State of the page: loaded data, the dream and the one without edits, and the mode of play.

import { Address } from '../../shared/lib/address.js'
import { read, write } from './address.js'
import { imageOf, loadManifest, loadPrograms, loadStart } from './data.js'
import { Dream, parting } from './dream.svelte.js'
import { Engine } from './engine.js'
import { uniform } from './random.js'
import { noiseOf } from './world.js'

const ENDED = 0.5 // probability of an end at which the episode counts as ended
const MOST_STEPS = 2000
const [CELL, STRIDE, FRAME] = [8, 4, 64] // pixels

const START = { start: 0, world: 0, mode: 'sampled', seed: 0, step: 0, speed: 12, saliency: 'none', notes: '' }

/** Return the initial frames of a start, [{frame, displacement}]; undefined without a world. */
function pastOf({ frames, displacements }) {
  if (!frames) return undefined
  const size = 3 * FRAME ** 2
  return Array.from({ length: frames.length / size }, (_, i) => ({ displacement: Array.from(displacements.subarray(2 * i, 2 * i + 2)),
    frame: Float32Array.from(frames.subarray(i * size, (i + 1) * size), (each) => each / 255) }))
}

export class Page {
  manifest = $state.raw(null)
  error = $state('') // message about an error that prevents the page from showing anything
  problem = $state('') // message about something that failed
  view = $state({ ...START })
  dream = $state.raw(null)
  plain = $state.raw(null) // the dream without edits; null without edits
  edits = $state.raw([]) // [{axis, hold, amount, from, to}]; to: null if it lasts
  paints = $state.raw([]) // [{squares, seed, from}]; seed: null for empty squares, see worker.js
  erasing = $state(false) // whether squares can be marked
  marks = $state.raw([]) // marked squares, [[right, down]]
  cursor = $state.raw([0, 0]) // square that the keyboard marks
  truth = $state.raw(null) // image of what followed in the game
  previews = $state.raw(null)
  playing = $state(false)
  busy = $state('') // what the page waits for
  working = $state(true)
  rate = $state(0) // steps per second while playing
  saliency = $state.raw(null) // {record, side, value, logProbs}
  held = new Set() // directions of the arrow keys that are pressed, such as 'left'

  #address = new Address()
  engine = new Engine((message) => { this.error = message })
  loaded = null // {number, arrays, world} of the shown start
  #surround = null // promise of the programs that change worlds
  #line = Promise.resolve() // the tasks run one after the other
  #changed = [] // first steps of edits that have been changed since the last computation
  #repainted = false // whether the dream without edits has changed, too
  #live = 0 // number of the newest view; tasks of older ones stop

  start = $derived(this.manifest?.starts[this.view.start])
  record = $derived(this.dream?.steps[this.view.step] ?? null)
  plainRecord = $derived(this.plain?.steps[this.view.step] ?? null)
  length = $derived(this.dream?.steps.length ?? 0)
  parted = $derived(this.plain && this.dream ? parting(this.dream, this.plain) : null)
  /** First step at which the episode has probably ended; null before. */
  ended = $derived.by(() => {
    const step = this.dream?.steps.findIndex(({ end }) => end > ENDED) ?? -1
    return step < 0 ? null : step
  })

  get title() {
    const { agent, game } = this.manifest
    return `The dream of ${agent}${game && !agent.includes(game) ? ` (${game})` : ''}`
  }

  /** What an episode with a reward ends with. */
  get goal() {
    return { coinrun: 'the coin', maze: 'the cheese' }[this.manifest.game] ?? 'the reward'
  }

  /** Whether an episode of the game can end with a death. */
  get hasDeaths() {
    return !['maze', 'heist'].includes(this.manifest.game)
  }

  /** Whether any start has a recording of what followed. */
  get isRecorded() {
    return this.manifest.starts.some(({ actions }) => actions)
  }

  get hasWorlds() {
    return this.manifest.world !== null
  }

  async load() {
    try {
      this.manifest = await loadManifest()
      document.title = this.title
      const programs = loadPrograms()
      this.previews = await imageOf(this.manifest.previews)
      await this.engine.run('load', { loaded: await programs, world: this.manifest.world })
      if (!this.fromAddress()) await this.open(START)
      // After the first frame, because it is large.
      if (this.hasWorlds) this.#sampler()
    } catch (error) {
      this.error = error.message
    }
  }

  /** Load the programs that change worlds, once. */
  #sampler() {
    this.#surround ??= loadPrograms('worlds').then((loaded) => this.engine.run('load', { loaded }))
    return this.#surround
  }

  /** Show what the address holds, unless the page itself wrote it; return whether it did. */
  fromAddress() {
    const fragment = this.#address.brought()
    if (!fragment) return false
    const { view, actions, edits, paints } = read(fragment, START, this.manifest)
    this.open(view, actions, edits, paints)
    return true
  }

  #fragment() {
    return write(this.view, this.dream.steps, this.edits, this.paints)
  }

  toAddress() {
    if (this.dream?.steps.length && !this.playing) this.#address.put(this.#fragment())
  }

  address() {
    return this.#address.whole(this.#fragment())
  }

  /** Run tasks one after the other; those of a view that is not shown any more do nothing. */
  #do(task) {
    const live = this.#live
    this.working = true
    this.#line = this.#line.then(async () => {
      if (live !== this.#live) return
      try {
        await task(() => live === this.#live)
      } catch (error) {
        this.playing = false
        this.problem = error.message
      }
      if (live === this.#live) this.working = false
    })
    return this.#line
  }

  /** Show a start, and take steps with given actions, [{action, own}]. */
  open(view, actions = [], edits = [], paints = []) {
    this.#live++
    this.playing = false
    this.saliency = null
    this.problem = ''
    return this.#do(async (isLive) => {
      await this.#openStart(view.start)
      const world = await this.#worldOf(view.world)
      if (!isLive()) return
      this.edits = edits
      this.paints = paints
      this.erasing = false
      const begun = await this.#begin(world)
      // In one update: without a dream, Svelte would remove the controls and the focus with them.
      this.view = { ...this.view, ...view, step: 0 }
      if (this.view.mode === 'recorded' && !this.start.actions) this.view.mode = 'sampled';
      [this.dream, this.plain] = begun
      for (const [i, { action, own }] of actions.slice(0, MOST_STEPS).entries()) {
        if (actions.length > 20) this.busy = `repeating step ${i + 1} of ${actions.length}`
        await this.#extend(action, own)
        if (!isLive()) break
      }
      this.busy = ''
      if (isLive()) this.view.step = Math.min(view.step, this.dream.last)
    })
  }

  async #openStart(number) {
    if (this.loaded?.number === number) return
    const { arrays, truth } = await loadStart(number)
    const world = await this.engine.run('begin', { arrays, seed: this.manifest.starts[number].seed })
    this.truth = truth
    this.loaded = { number, arrays, world, worlds: new Map(), past: pastOf(arrays) }
  }

  /** Return the number of the world with a seed, 0 for that of the start. */
  async #worldOf(seed) {
    const { arrays, world, worlds } = this.loaded
    if (!seed || !this.hasWorlds) return world
    if (!worlds.has(seed)) {
      this.busy = 'imagining another world'
      await this.#sampler()
      worlds.set(seed, await this.engine.run('another', { number: world, known: arrays.known, h: arrays.h, seed }))
      this.busy = ''
    }
    return worlds.get(seed)
  }

  /** Return the noise of squares of the start's world, moved on by some squares; for tests. */
  noise(origin) {
    return Object.fromEntries(Object.entries(noiseOf(this.start.seed, origin, this.manifest.world)).map(
      ([name, numbers]) => [name, Array.from(numbers)]))
  }

  /** Return the dream in a world, and the one without changes or null, with their first steps. */
  async #begin(world) {
    const { arrays: { h, hidden, action }, past } = this.loaded
    const holes = this.#holes(0)
    if (holes) await this.#sampler()
    const begun = async (edits, painted) => {
      const dream = new Dream(this.engine, { h, hidden, action, past }, world)
      await dream.take(0, null, false, edits, painted)
      return dream
    }
    const isChanged = this.edits.length || this.paints.length
    return [await begun(this.#inForce(0), holes), isChanged ? await begun([], holes && []) : null]
  }

  /** Return the edits of the hidden state after a step, as the worker needs them. */
  #inForce(step) {
    return this.edits.filter(({ from, to }) => step >= from && (to === null || step <= to)).map(({ axis, hold, amount }) => {
      const { vector, mean, sd } = this.manifest.axes[axis]
      return { vector: Float32Array.from(vector), hold, amount: hold ? mean + amount * sd : amount * sd }
    })
  }

  /** Return what is painted at a step, or null. */
  #holes(step) {
    const found = this.paints.filter(({ from }) => from === step)
    return found.length ? found.map(({ squares, seed }) => ({ squares, ...(seed === null ? {} : { seed }) })) : null
  }

  /** Append a step to both dreams. */
  async #extend(action, own, length = this.dream.steps.length) {
    const holes = this.#holes(length)
    if (this.hasWorlds) await this.#sampler() // the world may move on
    await this.dream.take(length, action, own, this.#inForce(length), holes)
    if (!this.plain) return
    // The agent without edits chooses for itself, unless the person or the recording does.
    const chosen = own || this.view.mode === 'recorded' ? action : this.choose(this.plain.steps[length - 1], length)
    await this.plain.take(length, chosen, own, [], holes && [])
  }

  /** Return the agent's most likely action in a record. */
  likely({ logProbs }) {
    return logProbs.indexOf(Math.max(...logProbs))
  }

  /** Return the action that the agent takes in a record, which leads to a step. */
  choose({ logProbs }, step) {
    if (this.view.mode === 'likely') return this.likely({ logProbs })
    let left = uniform(this.view.seed, step)
    const action = logProbs.findIndex((log) => (left -= Math.exp(log)) < 0)
    return action < 0 ? logProbs.length - 1 : action
  }

  // Playing.

  go(step) {
    this.view.step = Math.max(0, Math.min(step, this.dream.last))
  }

  /** Act: take the person's action at the shown step. What came after it is dropped. */
  act(action) {
    if (this.working && !this.playing) return
    this.view.mode = 'you'
    this.saliency = null
    return this.#do(async () => {
      await this.#extend(action, true, this.view.step + 1)
      this.view.step += 1
    })
  }

  /** Return the action of the pressed arrow keys. */
  get pressed() {
    const way = (less, more) => Number(this.held.has(more)) - Number(this.held.has(less))
    const [right, up] = [way('left', 'right'), way('down', 'up')]
    return this.manifest.directions.findIndex(([x, y]) => x === right && y === up)
  }

  /** Take a step: show the next one, or let the agent, the recording or the pressed keys act. */
  async forward() {
    if (this.view.step < this.dream.last && this.view.mode !== 'you') {
      this.view.step += 1
      return
    }
    const next = this.view.step + 1
    const { mode } = this.view
    const recorded = mode === 'recorded' ? this.start.actions[this.view.step] : null
    if (next > MOST_STEPS || recorded === undefined) {
      this.playing = false
      return
    }
    const action = mode === 'you' ? this.pressed : recorded ?? this.choose(this.record, next)
    await this.#do(async () => {
      await this.#extend(action, mode === 'you', next)
      this.view.step = next
    })
  }

  async play() {
    if (this.playing) {
      this.playing = false
      return
    }
    this.playing = true
    this.saliency = null
    const live = this.#live
    const times = []
    while (this.playing && live === this.#live) {
      const begin = performance.now()
      const before = this.view.step
      await this.forward()
      if (this.record.end > ENDED && before < this.view.step && this.ended === this.view.step) this.playing = false
      times.push(performance.now() - begin)
      const rest = 1000 / this.view.speed - (performance.now() - begin)
      await new Promise((then) => setTimeout(then, Math.max(rest, 0)))
      this.rate = 1000 / (performance.now() - begin)
    }
  }

  restart() {
    this.playing = false
    this.view.step = 0
  }

  /** Drop all steps after the shown one. */
  cut() {
    this.dream.cut(this.view.step + 1)
    this.plain?.cut(this.view.step + 1)
  }

  another() {
    return this.open({ ...this.view, world: this.view.world + 1, step: 0 })
  }

  show(start) {
    const count = this.manifest.starts.length
    return this.open({ ...this.view, start: (start + count) % count, world: 0, step: 0 })
  }

  chooseMode(mode) {
    this.view.mode = mode
    // The agent goes on from here, not along what another mode has played.
    if (!this.playing) this.#do(async () => { this.cut() })
    else this.cut()
  }

  // Edits and saliency.

  /** Replace edits and paints, and compute all steps from the first changed one again, with the same
   * actions. */
  edit(edits, paints = this.paints) {
    this.#changed.push(...[...this.edits, ...edits, ...this.paints, ...paints].map(({ from }) => from))
    this.#repainted ||= paints !== this.paints
    this.playing = false
    this.saliency = null
    this.edits = edits
    this.paints = paints
    return this.#do(async () => {
      if (this.edits !== edits || this.paints !== paints) return // a newer change follows
      const { step } = this.view
      this.cut()
      if (!edits.length && !paints.length) this.plain = null
      else if (!this.plain) {
        this.plain = new Dream(this.engine, this.dream.first, this.dream.world)
        this.plain.steps = this.dream.steps
      }
      const taken = this.dream.steps
      const others = this.#repainted && this.plain?.steps
      this.#repainted = false
      if (paints.length) {
        this.busy = 'painting'
        await this.#sampler()
      }
      for (let i = Math.min(step, ...this.#changed.splice(0)); i <= step; i++) {
        const holes = this.#holes(i)
        await this.dream.take(i, i ? taken[i].action : null, taken[i].own, this.#inForce(i), holes)
        if (others) await this.plain.take(i, i ? others[i].action : null, others[i].own, [], holes && [])
      }
      this.busy = ''
    })
  }

  // Painting.

  /** Let squares be marked, or stop it. */
  erase(on = !this.erasing) {
    this.erasing = on && this.hasWorlds
    this.playing = false
    this.marks = []
    this.cursor = this.squareAt([FRAME / 2, FRAME / 2])
  }

  /** Return the upper left corner of a square in the shown frame, in pixels. */
  cornerOf(square, { displacement } = this.record) {
    return square.map((at, axis) => this.loaded.arrays.corner[axis] + at * this.manifest.world.size - displacement[axis])
  }

  /** Return the square at a place in the shown frame, in pixels. */
  squareAt(place) {
    const corner = this.cornerOf([0, 0])
    return place.map((at, axis) => Math.floor((Math.max(0, Math.min(FRAME - 1, at)) - corner[axis]) / this.manifest.world.size))
  }

  isMarked([right, down]) {
    return this.marks.some(([x, y]) => x === right && y === down)
  }

  mark(square, on) {
    if (this.isMarked(square) === on) return
    this.marks = on ? [...this.marks, square] : this.marks.filter(([x, y]) => x !== square[0] || y !== square[1])
    this.cursor = square
  }

  /** Move the cursor by some squares within the view. */
  point(right, up) {
    const [x, y] = this.cornerOf(this.cursor)
    const { size } = this.manifest.world
    this.cursor = this.squareAt([x + (right + 0.5) * size, y + (0.5 - up) * size])
  }

  /** Paint the marked squares at the shown step: let the prior fill them, or empty them. */
  paint(isFilled) {
    if (!this.marks.length || this.working) return
    const seed = isFilled ? 1 + this.paints.length : null
    const paint = { squares: this.marks, seed, from: this.view.step }
    this.marks = []
    return this.edit(this.edits, [...this.paints, paint])
  }

  /** Effects of the cells in view on the chosen output. */
  get effects() {
    const { value, logProbs } = this.saliency
    return this.view.saliency === 'value' ? value : Float32Array.from(logProbs, (each) => each[this.likely(this.record)])
  }

  async showSaliency(of) {
    this.view.saliency = of
    if (of === 'none') return
    this.playing = false
    const { record } = this
    if (this.saliency?.record === record) return
    await this.#do(async () => {
      this.busy = 'blurring one cell after another'
      const found = await this.engine.run('occlude', { frame: record.frame, hidden: record.entering,
        edits: this.#inForce(this.view.step), size: CELL, stride: STRIDE })
      this.busy = ''
      if (this.record === record) this.saliency = { record, ...found }
    })
  }
}
