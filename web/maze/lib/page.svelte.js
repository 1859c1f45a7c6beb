// The state of the page: what is loaded, the maze and the patches with their history, and the answers.

import { Address } from '../../shared/lib/address.js'
import { read, write } from './address.js'
import { loadManifest, loadStamps, loadWeights } from './data.js'
import { Field } from './field.js'
import { FREE, fromLevel, cheesesOf, decisionOf } from './grid.js'
import { openPatches, parsePatch, toText, VECTORS } from './patches.js'
import { framesOf } from './stamps.js'
import wasm from './network.ts?wasm'
import Worker from './worker.js?worker&inline'

const MOST_EDITS = 500
const STARTING_SIZE = 11 // the first level that is shown is a fork of at least this size
const STARTING_LAYERS = ['embedder.block2.res1.resadd', 'embedder.block3.res2.resadd']

export class Page {
  manifest = $state.raw(null)
  error = $state('') // that leaves nothing to show
  problem = $state('') // of an edit, or the address
  view = $state({ agent: 0, show: 'field', layer: '', channel: 0, components: false, world: false, region: 0, level: null, notes: '' })
  maze = $state.raw(null)
  patches = $state.raw([]) // {text, on}
  stamps = $state.raw(new Map()) // by mode, those that have been needed
  answers = $state.raw({ original: null, patched: null }) // fields; set again when they have grown
  maps = $state.raw(null) // of the layer that is shown: {layer, original, patched}
  took = $state(null) // ms, once all is computed
  working = $state(true)
  past = $state.raw([])
  future = $state.raw([])

  #theme
  #worker = new Worker()
  #told = new Set() // agents and stamps that the worker has
  #job = 0
  #tag = null // of the last edit: edits with the same one are one
  #start = null
  #address = new Address()

  #modeName = $derived(this.maze?.mode) // the same after most edits, so what follows from it is, too
  mode = $derived(this.manifest?.modes.find(({ name }) => name === this.#modeName))
  layers = $derived(this.manifest?.agents[this.view.agent].layers ?? [])
  layer = $derived(this.layers.find(({ name }) => name === this.view.layer))
  levels = $derived(this.manifest?.levels.filter(({ mode }) => mode === this.#modeName) ?? [])
  decision = $derived(this.maze ? decisionOf(this.maze) : null)
  /** Of each patch: {patch, or problem: why there is none}. */
  read = $derived(this.maze ? this.#readPatches() : [])
  inForce = $derived(this.read.filter(({ on, patch }) => on && patch).map(({ patch }) => patch))
  broken = $derived(this.read.some(({ on, problem }) => on && problem))
  frame = $derived(this.stamps.has(this.maze?.mode)
    ? framesOf(this.stamps.get(this.maze.mode), this.maze)(this.maze.mouse, this.maze.facing) : null)
  isPatched = $derived(this.inForce.length > 0)

  constructor(theme) {
    this.#theme = theme
    this.#worker.onmessage = ({ data }) => this.#hear(data)
    this.#worker.onerror = (event) => { this.error = `The worker of this page ended: ${event.message}` }
    const code = Uint8Array.from(atob(wasm), (each) => each.charCodeAt(0))
    this.#worker.postMessage({ wasm: code.buffer })
  }

  get colours() {
    return this.#theme.colours
  }

  async load() {
    try {
      this.manifest = await loadManifest()
      const { agents, levels, modes } = this.manifest
      const names = agents[0].layers.map(({ name }) => name)
      const layer = STARTING_LAYERS.find((name) => names.includes(name)) ?? names[0]
      const level = levels.find((each) => each.mode === modes[0].name && each.maze_dim >= STARTING_SIZE
        && decisionOf(this.#mazeOf(each)).kind === 'fork') ?? levels[0]
      this.#start = { view: { ...this.view, layer, level: level.name }, maze: this.#mazeOf(level) }
      this.#set({ ...this.#start, patches: [] })
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

  /** Take maze, patches and view from the address, unless they are those that were written there. */
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

  /** Change the maze: edit(maze) gives another one, or throws an error with a sentence. Edits that follow
   * each other with the same tag are undone at once. */
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

  /** The next edit is one of its own, whatever its tag. */
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

  /** Show a level that was exported, by its name and mode. */
  showLevel(name, mode = this.maze.mode) {
    const level = this.manifest.levels.find((each) => each.name === name && each.mode === mode)
    if (level) this.edit(() => this.#mazeOf(level))
    this.view.level = level ? name : null
  }

  /** Show a maze that is none of the exported levels. */
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
    // A patch is wrong by itself, or with those before it.
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

  /** Change a patch by its parts: change(patch) gives another one. */
  changePatch(number, change, tag = null) {
    const patch = change(parsePatch(this.patches[number].text))
    this.patch(this.patches.with(number, { ...this.patches[number], text: toText(patch) }), tag)
  }

  // Answers.

  /** Have all computed that the view shows. What it reads before it waits decides when that is due. */
  async compute() {
    const job = ++this.#job
    const { maze, isPatched, view } = this
    const layer = view.show === 'channel' ? view.layer : null
    const content = { job, agent: view.agent, maze: $state.snapshot(maze), patches: $state.snapshot(this.inForce), layer }
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
    const of = `${view.agent} ${maze.mode} ${maze.size} ${maze.facing} ${maze.cells.join('')}`
    this.answers = {
      original: this.#begun(this.answers.original, of),
      patched: isPatched ? this.#begun(this.answers.patched, `${of} ${JSON.stringify(content.patches)}`) : null
    }
    this.#worker.postMessage(content)
  }

  /** The field to go on with. What an old one knows is shown until it is known again; that of the same
   * agent, maze and patches stays. */
  #begun(field, of) {
    if (field?.of === of) return field
    const { maze } = this
    const begun = field?.known.length === maze.cells.length ? field : new Field(maze.cells.length)
    begun.age((square) => maze.cells[square] === FREE)
    begun.of = of
    return begun
  }

  /** Tell the worker something once. */
  async #tell(name, content) {
    if (this.#told.has(name)) return
    this.#worker.postMessage(await content())
    this.#told.add(name)
  }

  #hear({ fatal, job, arm, squares, logProbs, values, maps, done, problem }) {
    if (fatal) this.error = `The networks cannot run in this browser: ${fatal}`
    if (job !== this.#job) return
    if (squares) {
      this.answers[arm].take(squares, logProbs, values)
      this.answers = { ...this.answers }
    } else if (maps) this.maps = { layer: this.view.layer, original: maps[0], patched: maps[1] }
    if (done !== undefined || problem) {
      this.took = done ?? null
      this.working = false
      if (problem) this.problem = problem
    }
  }

  get cheeses() {
    return cheesesOf(this.maze)
  }
}
