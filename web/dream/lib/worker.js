// Web worker that runs agent and simulator.
//
// It receives {id, call, given} and posts {id, result} or {id, problem}; `calls` below has the
// calls. Worlds stay in the worker and have numbers.

import { Program } from '../../shared/lib/program.js'
import { cameraOf, completed, continued, emptied, filled, noiseOf, phaseOf, reached } from './world.js'

const KEPT = 4 // number of drawn worlds that are kept
const BLURS = 12 // repetitions of a blur over 3 x 3 pixels
const SIDE = 64

const programs = {}
let settings = null
const worlds = [] // null: a simulator without worlds
let drawn = [] // {number, scenery}, the latest last

/** Draw a world, or find it among the latest ones. */
function sceneryOf(number) {
  if (worlds[number] === null) return {}
  let found = drawn.find((each) => each.number === number)
  if (!found) {
    const { squares, places, velocities, looks, corner, clock } = worlds[number]
    const outputs = programs.paint.run({ squares, places, velocities, looks, corner, clock })
    const copies = Object.entries(outputs).map(([name, array]) => [name, array.slice()])
    found = { number, scenery: { ...Object.fromEntries(copies), corner } }
  }
  drawn = [...drawn.filter((each) => each !== found), found].slice(-KEPT)
  return found.scenery
}

const held = new Map() // the scenery that each program has
/** Run a program in a world. */
function runIn(name, number, given) {
  const scenery = sceneryOf(number)
  const more = held.get(name) === scenery ? {} : scenery
  held.set(name, scenery)
  return programs[name].run({ ...more, ...given })
}

const add = (world) => worlds.push(world) - 1

function changed(hidden, edits) {
  for (const { vector, hold, amount } of edits) {
    const along = vector.reduce((sum, value, i) => sum + value * hidden[i], 0)
    const by = hold ? amount - along : amount
    vector.forEach((value, i) => { hidden[i] += by * value })
  }
  return hidden
}

function act(frame, entering, edits) {
  const hidden = changed(programs.agent.run({ frame, hidden: entering }).hidden.slice(), edits)
  const { log_probs: logProbs, value } = programs.heads.run({ hidden })
  return { hidden, logProbs: logProbs.slice(), value: value[0] }
}

/** Move the environment on by a step; see `calls.step`. */
function move(h, action, step, world) {
  // Simulators without worlds have no input `step`.
  const given = worlds[world] ? { step: step - worlds[world].since } : {}
  const next = runIn('cell', world, { h, action, ...given }).h.slice()
  if (programs.surround && worlds[world]) {
    const moved = continued(worlds[world], next, programs.surround, settings)
    if (moved !== worlds[world]) world = add(moved)
  }
  const { frame, reward, end, death } = runIn('decode', world, { h: next, ...given })
  const displacement = worlds[world] && Array.from(cameraOf(next).displacement, (at, axis) => at + worlds[world].moved[axis])
  return { h: next, frame: frame.slice(), reward: reward[0], end: end[0], death: death ? death[0] : null, displacement, world }
}

/** Start a dream again at a step with other squares, as in generative/filling.py.
 *
 * h: state before the step; found: what `move` found at the step. holes: [{squares, seed, noise}],
 * squares: [[right, down]] from the corner of the start's world, the prior fills them; without a
 * seed they become empty; noise: see `calls.another`. Without holes, the dream starts again from
 * the same frames. Returns {h, world, past}. */
function repaint(h, found, step, past, holes) {
  const before = reached(worlds[found.world], sceneryOf(found.world), step, found, settings)
  const camera = { phase: phaseOf(before.corner, settings), velocity: cameraOf(found.h).velocity }
  const hole = new Float32Array(settings.squares ** 2)
  let after = before
  for (const { squares, seed, noise } of holes) {
    const own = new Float32Array(hole.length)
    for (const [right, down] of squares) {
      const [x, y] = [right - before.origin[0], down - before.origin[1]]
      if (Math.min(x, y) >= 0 && Math.max(x, y) < settings.squares) own[y * settings.squares + x] = hole[y * settings.squares + x] = 1
    }
    after = seed === undefined ? emptied(after, own, settings)
      : filled(after, own, camera, noise ?? noiseOf(seed, after.origin, settings), programs.surround, settings)
  }
  const numbers = holes.length ? [add(before), add(after)] : Array(2).fill(add(before))
  const frames = past.length < settings.frames ? [...past, found] : past
  const given = { images: joined(frames.map(({ frame }) => frame)), h, hole, corner: before.corner, velocity: camera.velocity,
    displacements: joined(frames.map(({ displacement }) => displacement.map((at, axis) => at - found.displacement[axis]))) }
  numbers.forEach((number, i) => {
    for (const [name, array] of Object.entries(sceneryOf(number))) {
      if (name !== 'first' && name !== 'corner') given[`${i ? 'after' : 'before'}_${name}`] = array
    }
  })
  const { h: start, images } = programs.repaint.run(given)
  const size = images.length / frames.length
  return { h: start.slice(), world: numbers[1],
    past: frames.map(({ displacement }, i) => ({ frame: images.slice(i * size, (i + 1) * size), displacement })) }
}

const joined = (arrays) => Float32Array.from(arrays.flatMap((array) => Array.from(array)))

const calls = {
  async load({ loaded, world }) {
    settings = world ?? settings
    for (const [name, { description, constants }] of Object.entries(loaded)) {
      programs[name] = await Program.of(description, constants)
    }
  },

  /** Add the world of a start; arrays: those of its file. */
  begin({ arrays, seed }) {
    const { squares, places, velocities, looks, corner, clock } = arrays
    return add(squares ? { squares, places, velocities, looks, corner, clock, seed, origin: [0, 0], since: 0, moved: [0, 0] } : null)
  },

  /** Add another world with the known squares of a world. h: state at the start; noise: noise of the
   * squares, and places, velocities and looks of objects; undefined for those of the seed. */
  another({ number, known, h, seed, noise }) {
    return add(completed({ ...worlds[number], seed }, known, cameraOf(h), noise ?? noiseOf(seed, [0, 0], settings),
      programs.surround, settings))
  },

  /** Take a step. h, hidden: states before the step; action: vector (A,); step: number of steps
   * since the start; world: its number; edits: [{vector, hold, amount}], changes of the agent's
   * hidden state after the step. With `holes` (see `repaint`), the dream starts again at this step
   * with other squares; past: [{frame, displacement}], the initial frames, the last of which may
   * be missing if it is that of this step. */
  step({ h, hidden, action, step, world, edits, holes = null, past }) {
    const begin = performance.now()
    let found = move(h, action, step, world)
    if (holes) {
      const start = repaint(h, found, step, past, holes)
      found = { ...move(start.h, action, step, start.world), past: start.past }
    }
    const agent = act(found.frame, hidden, edits)
    return { ...found, ...agent, ms: performance.now() - begin }
  },

  /** Compute what each cell of the frame does for the agent: value and log-probabilities with the
   * frame as it is, minus those if the cell is blurred (Greydanus et al. 2018). size, stride: of the
   * cells in pixels. Returns {side, value, logProbs}, with side² cells. */
  occlude({ frame, hidden, edits, size, stride }) {
    const base = act(frame, hidden, edits)
    const blurred = blur(frame)
    const side = (SIDE - size) / stride + 1
    const value = new Float32Array(side * side)
    const logProbs = []
    for (let i = 0; i < side * side; i++) {
      const [top, left] = [Math.floor(i / side) * stride, (i % side) * stride]
      const changedFrame = frame.slice()
      for (let c = 0; c < frame.length / SIDE ** 2; c++) {
        for (let y = top; y < top + size; y++) {
          const at = (c * SIDE + y) * SIDE + left
          changedFrame.set(blurred.subarray(at, at + size), at)
        }
      }
      const found = act(changedFrame, hidden, edits)
      value[i] = base.value - found.value
      logProbs.push(base.logProbs.map((each, action) => each - found.logProbs[action]))
    }
    return { side, value, logProbs }
  }
}

function blur(frame) {
  let now = frame
  for (let times = 0; times < BLURS; times++) {
    const before = now
    now = before.map((_, i) => {
      const [y, x] = [Math.floor(i / SIDE) % SIDE, i % SIDE]
      let [sum, count] = [0, 0]
      for (let dy = Math.max(-1, -y); dy <= Math.min(1, SIDE - 1 - y); dy++) {
        for (let dx = Math.max(-1, -x); dx <= Math.min(1, SIDE - 1 - x); dx++, count++) sum += before[i + dy * SIDE + dx]
      }
      return sum / count
    })
  }
  return now
}

onmessage = async ({ data: { id, call, given } }) => {
  try {
    postMessage({ id, result: await calls[call](given) })
  } catch (error) {
    postMessage({ id, problem: error.message })
  }
}
