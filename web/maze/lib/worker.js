// Web worker that runs agents on mazes, square by square, and posts the outputs while it computes.
//
// It receives {wasm: bytes}, {agent: number, layers, weights}, {stamps: mode, arrays}, and jobs,
// {job: number, agent, maze, patches, layer}; a newer job cancels an older one. It posts {job,
// maps}; {job, condition, facing, squares, logProbs, values}, first for the maze's facing; {job, shown:
// milliseconds} when this facing is complete; {job, complete: true}; {job, problem: message}; and
// {fatal: message}.

import { squaresWith, distancesFrom, decisionOf, startOf, FREE } from './grid.js'
import { Kernel, Network } from './network.js'
import { changesOf, openPatches, VECTORS } from './patches.js'
import { framesOf } from './stamps.js'

const SLICE = 24 // ms of work between checks for new messages
const KEPT = 60 // number of cached fields
const MOST_SAVED = 2e8 // bytes of saved partial forward passes
const ACTIONS = 15

let kernel = null
const stamps = new Map()
const agents = new Map() // {layers, network} by number
const fields = new Map() // by key (agent, maze, facing, patches): a Map of outputs by square
let newest = -1
// Forward passes up to the first changed layer, by this layer, square and facing, for the latest
// maze. While a coefficient is adjusted, only the layers after it are computed.
let saved = { of: null, at: new Map(), bytes: 0 }

const channel = new MessageChannel()
let resume = null
channel.port1.onmessage = () => resume()
/** Yield to the event loop, so that new messages are received. */
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

/** Return the cached outputs with a key, as a Map by square, and mark them as most recently
 * used. */
function fieldOf(key) {
  const found = fields.get(key) ?? new Map()
  fields.delete(key)
  fields.set(key, found)
  if (fields.size > KEPT) fields.delete(fields.keys().next().value)
  return found
}

/** Return the free squares without cheese in order of computation: the mouse's square, the decision
 * square, then by distance from the mouse. */
function inOrder(maze) {
  const far = distancesFrom(maze, maze.mouse)
  const { square } = decisionOf(maze)
  const rank = (each) => (each === maze.mouse ? -2 : each === square ? -1 : far[each] < 0 ? Infinity : far[each])
  return squaresWith(maze, FREE).sort((a, b) => rank(a) - rank(b) || a - b)
}

/** Compute the vectors that patches add, by `<name> <layer>`. */
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
    const conditions = [['original', fieldOf(`${key} ${facing}`)]]
    if (patches.length) conditions.push(['patched', fieldOf(`${key} ${facing} ${JSON.stringify(patches)}`)])
    let fresh = []
    const tell = () => {
      for (const [condition, known] of conditions) {
        const logProbs = new Float32Array(fresh.length * ACTIONS)
        fresh.forEach((square, n) => logProbs.set(known.get(square).logProbs, n * ACTIONS))
        postMessage({ job, condition, facing, squares: fresh, logProbs, values: fresh.map((square) => known.get(square).value) })
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
      run(network, () => frameOf(square, facing), () => changes(square, facing), conditions.map(([, known]) => known), square, facing)
      fresh.push(square)
    }
    tell()
    if (facing === maze.facing) postMessage({ job, shown: performance.now() - begin })
  }
  postMessage({ job, complete: true })
}

/** Compute the missing outputs at a square, without and with changes, and store them in the Maps
 * `original` and `patched`. */
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

/** Return the output of a layer for a frame, without and with changes: [original, patched or
 * null]. */
function mapsOf(network, frame, name, changes) {
  if (!name) return null
  network.see(frame)
  network.run()
  const original = network.outputs(network.layer(name))
  if (!changes) return [original, null]
  if (changes.size) network.run(changes, Math.min(...changes.keys()), true)
  return [original, network.outputs(network.layer(name))]
}
