// State of the page: loaded data, maze and patches with their history, and the outputs of the
// agent.

import { Address } from '../../shared/lib/address.js'
import { read, write } from './address.js'
import { loadManifest, loadStamps, loadWeights } from './data.js'
import { Field } from './field.js'
import { FREE, fromLevel, cheesesOf, decisionOf } from './grid.js'
import { openPatches, parsePatch, placeOf, toText, VECTORS } from './patches.js'
import { framesOf } from './stamps.js'
import { Walk } from './walk.svelte.js'
import wasm from './network.ts?wasm'
import Worker from './worker.js?worker&inline'

const MOST_EDITS = 500
const STARTING_LAYER = 'embedder.block2.res1.resadd'

export class Page {
  manifest = $state.raw(null)
  error = $state('') // message about an error that prevents the page from showing anything
  problem = $state('') // message about an invalid edit or address
  view = $state({ agent: 0, show: 'field', layer: '', channel: 0, components: false, world: false, region: 0, level: null, seed: 0, likely: false, notes: '' })
  maze = $state.raw(null)
  patches = $state.raw([]) // {text, on}
  stamps = $state.raw(new Map()) // loaded stamps, by mode
  answers = $state.raw({ original: null, patched: null }) // fields; reassigned when squares are added
  turned = $state.raw({ original: null, patched: null }) // fields with the other facing
  completed = $state.raw(null) // {agent, maze, inForce} for which both facings are computed
  maps = $state.raw(null) // outputs of the shown layer: {layer, original, patched}
  took = $state(null) // time of the computation in ms; null before its end
  working = $state(true)
  past = $state.raw([])
  future = $state.raw([])

  #theme
  #worker = new Worker()
  #told = new Set() // agents and stamps that the worker has
  #job = 0
  #wanted = null // {agent, maze, inForce} of the job
  #tag = null // tag of the last edit; successive edits with the same tag are undone together
  #start = null
  #address = new Address()

  #modeName = $derived(this.maze?.mode) // separate, because most edits do not change it
  mode = $derived(this.manifest?.modes.find(({ name }) => name === this.#modeName))
  layers = $derived(this.manifest?.agents[this.view.agent].layers ?? [])
  layer = $derived(this.layers.find(({ name }) => name === this.view.layer))
  levels = $derived(this.manifest?.levels.filter(({ mode }) => mode === this.#modeName) ?? [])
  decision = $derived(this.maze ? decisionOf(this.maze) : null)
  /** Parsed patches: [{text, on, patch, problem}]; problem: the reason why patch is null or cannot
   * act. */
  read = $derived(this.maze ? this.#readPatches() : [])
  inForce = $derived(this.read.filter(({ on, patch }) => on && patch).map(({ patch }) => patch))
  broken = $derived(this.read.some(({ on, problem }) => on && problem))
  frame = $derived(this.stamps.has(this.maze?.mode)
    ? framesOf(this.stamps.get(this.maze.mode), this.maze)(this.maze.mouse, this.maze.facing) : null)
  isPatched = $derived(this.inForce.length > 0)
  walk = new Walk(this)

  constructor(theme) {
    this.#theme = theme
    this.#worker.onmessage = ({ data }) => this.#hear(data)
    this.#worker.onerror = (event) => { this.error = `The worker of this page ended: ${event.message}` }
    const code = Uint8Array.from(atob(wasm), (each) => each.charCodeAt(0))
    this.#worker.postMessage({ wasm: code.buffer })
  }

  get title() {
    return `${this.manifest.agents.map(({ name }) => name).join(', ')} · Procgen maze · vector fields and patches`
  }

  get colours() {
    return this.#theme.colours
  }

  async load() {
    try {
      this.manifest = await loadManifest()
      const { agents, levels, start } = this.manifest
      document.title = this.title
      const level = levels.find(({ name, mode }) => name === start.level && mode === start.mode)
      this.#start = { view: { ...this.view, layer: STARTING_LAYER, level: level.name, region: agents[0].region }, maze: this.#mazeOf(level) }
      this.#set({ ...this.#start, patches: start.patches.map((text) => ({ text, on: true })) })
      this.fromAddress()
      this.past = []
    } catch (error) {
      this.error = error.message
    }
  }

  #mazeOf(level) {
    const { world_dim: dim } = this.manifest.modes.find(({ name }) => name === level.mode)
    if (level.rows.length !== dim) throw new Error('This data is damaged; export this page again.')
    return fromLevel(level)
  }

  #set({ view, maze, patches }) {
    if (view) this.view = view
    this.maze = maze
    this.patches = patches
  }

  /** Take maze, patches and view from the address, unless the page itself wrote them there. */
  fromAddress() {
    const fragment = this.#address.brought()
    if (!fragment) return
    const { problem, ...found } = read(fragment, this.#start, this.manifest)
    this.#remember(null)
    this.#set(found)
    this.problem = problem
  }

  toAddress() {
    this.#address.put(write(this.view, this.maze, this.patches, this.manifest))
  }

  address() {
    return this.#address.whole(write(this.view, this.maze, this.patches, this.manifest))
  }

  // Edits.

  #remember(tag) {
    const { maze, patches } = this
    if (tag === null || tag !== this.#tag) {
      this.past = [...this.past.slice(-MOST_EDITS), { maze, patches, level: this.view.level }]
    }
    this.#tag = tag
    this.future = []
  }

  /** Change the maze: edit(maze) returns a new one, or throws an error with a message. Successive
   * edits with the same tag are undone together. */
  edit(edit, tag = null) {
    try {
      const edited = edit(this.maze)
      if (edited !== this.maze) {
        this.#remember(tag)
        this.maze = edited
      }
      this.problem = ''
      return true
    } catch (error) {
      this.problem = `${error.message[0].toUpperCase()}${error.message.slice(1)}.`
      return false
    }
  }

  /** End a group of edits: the next edit is undone separately, whatever its tag. */
  endEdit() {
    this.#tag = null
  }

  /** Change the patches, a list of {text, on}. */
  patch(patches, tag = null) {
    this.#remember(tag)
    this.patches = patches
  }

  undo() {
    this.#move('past', 'future')
  }

  redo() {
    this.#move('future', 'past')
  }

  #move(from, to) {
    if (!this[from].length) return
    const { maze, patches, level } = this[from].at(-1)
    this[to] = [...this[to], { maze: this.maze, patches: this.patches, level: this.view.level }]
    this[from] = this[from].slice(0, -1)
    this.view.level = level
    this.#set({ maze, patches })
    this.#tag = null
    this.problem = ''
  }

  /** Show an exported level, given its name and mode. */
  showLevel(name, mode = this.maze.mode) {
    const level = this.manifest.levels.find((each) => each.name === name && each.mode === mode)
    if (level) this.edit(() => this.#mazeOf(level))
    this.view.level = level ? name : null
  }

  /** Show a maze that is not an exported level; make(maze) returns it. */
  showMaze(make) {
    if (this.edit(make)) this.view.level = null
  }

  #readPatches() {
    const read = this.patches.map(({ text, on }) => {
      try {
        return { text, on, patch: parsePatch(text), problem: '' }
      } catch (error) {
        return { text, on, patch: null, problem: error.message }
      }
    })
    // A patch can be invalid alone, or in combination with earlier ones.
    const before = []
    for (const each of read) {
      if (!each.patch) continue
      try {
        openPatches(each.on ? [...before, each.patch] : [each.patch], this.layers, this.maze)
        if (each.patch.kind === 'add' && each.on) this.#checkVector(each.patch.value)
        if (each.on) before.push(each.patch)
      } catch (error) {
        each.patch = each.on ? null : each.patch
        each.problem = error.message
      }
    }
    return read
  }

  #checkVector(name) {
    try {
      VECTORS[name](this.maze)
    } catch (error) {
      throw new Error(`there is no ${name} vector: ${error.message}`)
    }
  }

  /** Change a parsed patch: change(patch) returns a new one. */
  changePatch(number, change, tag = null) {
    const patch = change(parsePatch(this.patches[number].text))
    this.patch(this.patches.with(number, { ...this.patches[number], text: toText(patch) }), tag)
  }

  /** Move a square of the first active patch that has the square `from` to another square; null: no
   * square. */
  moveTarget(square, from, tag) {
    const text = (of) => placeOf(this.maze, of).join('.')
    const was = from === null ? null : text(from)
    const number = this.read.findIndex(({ on, patch }) => on && patch?.words.square?.some((each) => each.join('.') === was))
    if (number < 0) return
    this.changePatch(number, (patch) => ({ ...patch, words: { ...patch.words,
      square: patch.words.square.map((each) => (each.join('.') === was ? placeOf(this.maze, square) : each)) } }), tag)
  }

  // Outputs of the agent.

  /** Let the worker compute all that the view shows. It is called again when state changes that it
   * reads before its first await. */
  async compute() {
    const job = ++this.#job
    const { maze, isPatched, inForce, view } = this
    this.#wanted = { agent: view.agent, maze, inForce }
    const layer = view.show === 'channel' ? view.layer : null
    const content = { job, agent: view.agent, maze: $state.snapshot(maze), patches: $state.snapshot(inForce), layer }
    this.working = true
    this.took = null
    try {
      await this.#tell(`agent ${view.agent}`, async () => {
        const weights = await loadWeights(view.agent)
        return { agent: view.agent, layers: this.manifest.agents[view.agent].layers, weights }
      })
      await this.#tell(`stamps ${maze.mode}`, async () => {
        const arrays = await loadStamps(maze.mode)
        this.stamps = new Map(this.stamps).set(maze.mode, arrays)
        return { stamps: maze.mode, arrays }
      })
    } catch (error) {
      this.error = error.message
      return
    }
    if (job !== this.#job) return
    const of = `${view.agent} ${maze.mode} ${maze.size} ${maze.cells.join('')}`
    const begun = (fields, facing) => ({
      original: this.#begun(fields.original, `${of} ${facing}`),
      patched: isPatched ? this.#begun(fields.patched, `${of} ${facing} ${JSON.stringify(content.patches)}`) : null
    })
    this.answers = begun(this.answers, maze.facing)
    this.turned = begun(this.turned, 1 - maze.facing)
    this.#worker.postMessage(content)
  }

  /** Return the field to fill: the old one if its key is the same; otherwise a field whose outputs
   * are marked as from an earlier maze, and shown until they are computed again. */
  #begun(field, of) {
    if (field?.of === of) return field
    const { maze } = this
    const begun = field?.known.length === maze.cells.length ? field : new Field(maze.cells.length)
    begun.age((square) => maze.cells[square] === FREE)
    begun.of = of
    return begun
  }

  /** Send a message to the worker, unless it was sent before. content(): returns a promise of the
   * message. */
  async #tell(name, content) {
    if (this.#told.has(name)) return
    this.#worker.postMessage(await content())
    this.#told.add(name)
  }

  #hear({ fatal, job, condition, facing, squares, logProbs, values, maps, shown, complete, problem }) {
    if (fatal) this.error = `The networks cannot run in this browser: ${fatal}`
    if (job !== this.#job) return
    if (squares && facing !== this.maze.facing) this.turned[condition].take(squares, logProbs, values)
    else if (squares) {
      this.answers[condition].take(squares, logProbs, values)
      this.answers = { ...this.answers }
    } else if (maps) this.maps = { layer: this.view.layer, original: maps[0], patched: maps[1] }
    if (complete) this.completed = this.#wanted
    if (shown !== undefined || problem) {
      this.took = shown ?? null
      this.working = false
      if (problem) this.problem = problem
    }
  }

  get cheeses() {
    return cheesesOf(this.maze)
  }
}
