// The worker: runs agents on mazes, square by square, and answers as it goes.
//
// It is told {agent: number, layers, weights}, {stamps: mode, arrays}, {wasm: bytes}, and {job: number,
// ...} with what to compute; a newer job ends an older one. It answers {job, arm, facing, squares, logProbs,
// values}, first for the maze's facing, {job, maps}, {job, shown: milliseconds} once that facing is complete,
// {job, complete: true}, {job, problem: message}, and {fatal: message}.

import { squaresWith, distancesFrom, decisionOf, startOf, FREE } from './grid.js'
import { Kernel, Network } from './network.js'
import { changesOf, openPatches, VECTORS } from './patches.js'
import { framesOf } from './stamps.js'

const SLICE = 24 // ms of work between looks at what was said
const KEPT = 60 // fields
const MOST_SAVED = 2e8 // bytes of networks half run
const ACTIONS = 15

let kernel = null
const stamps = new Map()
const agents = new Map() // {layers, network}
const fields = new Map() // by all that decides them: {squares: Map of answers}
let newest = -1
// Networks run up to the first changed layer, by that layer and square, of the latest maze: while a
// coefficient is turned, only what lies behind is computed.
let saved = { of: null, at: new Map(), bytes: 0 }

const channel = new MessageChannel()
let resume = null
channel.port1.onmessage = () => resume()
/** Let messages in. */
const pause = () => new Promise((resolve) => {
  resume = resolve
  channel.port2.postMessage(null)
})

onmessage = async ({ data }) => {
  try {
    if (data.wasm) kernel = Kernel.of(data.wasm)
    const ready = await kernel
    if (data.stamps) stamps.set(data.stamps, data.arrays)
    else if (data.weights) {
      agents.set(data.agent, { layers: data.layers, network: new Network(ready, data.layers, data.weights) })
    }
  } catch (error) { // no WebAssembly with SIMD, or no memory
    postMessage({ fatal: error.message })
    return
  }
  if (data.job === undefined) return
  newest = data.job
  try {
    await work(data)
  } catch (error) {
    postMessage({ job: data.job, problem: error.message })
  }
}

/** The answers to a maze that are known, which are kept as the youngest. */
function fieldOf(key) {
  const found = fields.get(key) ?? new Map()
  fields.delete(key)
  fields.set(key, found)
  if (fields.size > KEPT) fields.delete(fields.keys().next().value)
  return found
}

/** Free squares without cheese: the mouse's first, then that of the decision, then by their distance. */
function inOrder(maze) {
  const far = distancesFrom(maze, maze.mouse)
  const { square } = decisionOf(maze)
  const rank = (each) => (each === maze.mouse ? -2 : each === square ? -1 : far[each] < 0 ? Infinity : far[each])
  return squaresWith(maze, FREE).sort((a, b) => rank(a) - rank(b) || a - b)
}

/** The vectors that patches add, by name and layer. */
function vectorsOf(opened, network, maze, frames) {
  const vectors = new Map()
  opened.forEach(({ patch, sites }) => {
    if (patch.kind !== 'add' || vectors.has(`${patch.value} ${sites[0].layer.name}`)) return
    let pair
    try {
      pair = VECTORS[patch.value](maze)
    } catch (error) {
      throw new Error(`there is no ${patch.value} vector: ${error.message}`)
    }
    const [shown, lacking] = pair.map((each) => {
      network.see(framesOf(frames, each)(startOf(each), 0))
      network.run()
      return sites.map(({ layer }) => network.outputs(network.layer(layer.name)))
    })
    sites.forEach(({ layer }, i) => vectors.set(
      `${patch.value} ${layer.name}`, shown[i].map((value, k) => value - lacking[i][k])))
  })
  return vectors
}

async function work({ job, agent, maze, patches, layer }) {
  const begin = performance.now()
  const { layers, network } = agents.get(agent)
  const ofMode = stamps.get(maze.mode)
  const frameOf = framesOf(ofMode, maze)
  const opened = openPatches(patches, layers, maze)
  const changes = changesOf(opened, network, vectorsOf(opened, network, maze, ofMode))
  const key = `${agent} ${maze.mode} ${maze.size} ${maze.cells.join('')}`
  postMessage({ job, maps: mapsOf(network, frameOf(maze.mouse, maze.facing), layer,
    patches.length ? changes(maze.mouse, maze.facing) : null) })

  if (saved.of !== key) saved = { of: key, at: new Map(), bytes: 0 }
  let last = begin
  for (const facing of [maze.facing, 1 - maze.facing]) {
    const arms = [['original', fieldOf(`${key} ${facing}`)]]
    if (patches.length) arms.push(['patched', fieldOf(`${key} ${facing} ${JSON.stringify(patches)}`)])
    let fresh = []
    const tell = () => {
      for (const [arm, known] of arms) {
        const logProbs = new Float32Array(fresh.length * ACTIONS)
        fresh.forEach((square, n) => logProbs.set(known.get(square).logProbs, n * ACTIONS))
        postMessage({ job, arm, facing, squares: fresh, logProbs, values: fresh.map((square) => known.get(square).value) })
      }
      fresh = []
    }
    for (const square of inOrder(maze)) {
      if (performance.now() - last > SLICE) {
        tell()
        await pause()
        if (job !== newest) return
        last = performance.now()
      }
      run(network, () => frameOf(square, facing), () => changes(square, facing), arms.map(([, known]) => known), square, facing)
      fresh.push(square)
    }
    tell()
    if (facing === maze.facing) postMessage({ job, shown: performance.now() - begin })
  }
  postMessage({ job, complete: true })
}

/** The answers at a square, without and with changes, as far as they are not known. */
function run(network, frame, changes, [original, patched], square, facing) {
  const isKnown = original.has(square)
  if (isKnown && (!patched || patched.has(square))) return
  const found = patched ? changes() : new Map()
  const first = Math.min(...found.keys())
  const place = `${first} ${square} ${facing}`
  const before = saved.at.get(place)
  if (isKnown && before) network.restore(first, before)
  else if (!isKnown || found.size) {
    network.see(frame())
    network.run()
    original.set(square, network.answer())
    if (found.size && !before && saved.bytes < MOST_SAVED) {
      const numbers = network.saved(first)
      saved.at.set(place, numbers)
      saved.bytes += numbers.reduce((sum, { byteLength }) => sum + byteLength, 0)
    }
  }
  if (!patched) return
  if (found.size) network.run(found, first, true)
  patched.set(square, found.size ? network.answer() : original.get(square))
}

/** A layer's output with the mouse where it is, without and with changes: [original, patched or null]. */
function mapsOf(network, frame, name, changes) {
  if (!name) return null
  network.see(frame)
  network.run()
  const original = network.outputs(network.layer(name))
  if (!changes) return [original, null]
  if (changes.size) network.run(changes, Math.min(...changes.keys()), true)
  return [original, network.outputs(network.layer(name))]
}
