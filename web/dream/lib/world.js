// Worlds around the view, as in generative/prior.py: what is not known is sampled, and a world whose
// edge comes near the view moves on.
//
// A world: {squares: class probabilities (n, n, K), places, velocities, looks (n, n), corner (2),
// clock (1), seed, origin (2), since, moved (2)}, see `World` in generative/squares.py; since: step at
// which the dream started from it, moved: displacement of the camera at that step. settings: `world`
// in the manifest.

import { normal, uniform } from './random.js'

const FRAME = 64

/** Return the camera in a state: {phase (4), velocity (2), displacement (2)}. */
export function cameraOf(h) {
  const end = h.length - 1
  return { phase: h.subarray(end - 8, end - 4), velocity: h.subarray(end - 4, end - 2), displacement: h.subarray(end - 2, end) }
}

/** Draw the noise of squares, and places, velocities and looks of objects. They depend on the seed
 * and the place of a square only. */
export function noiseOf(seed, [right, down], settings) {
  const { squares: n, channels, looks: most, turns, kept } = settings
  const noise = { squares: new Float32Array(channels * n * n), places: new Float32Array(n * n),
    velocities: new Float32Array(n * n), looks: new Float32Array(n * n) }
  for (let y = 0, i = 0; y < n; y++) {
    for (let x = 0; x < n; x++, i++) {
      const place = [seed, x + right, y + down]
      for (let c = 0; c < channels; c++) noise.squares[c * n * n + i] = normal(...place, c)
      noise.places[i] = uniform(...place, channels)
      noise.looks[i] = Math.floor(uniform(...place, channels + 1) * most)
      const speed = kept ** turns.filter((turn) => turn < noise.looks[i] / most).length
      noise.velocities[i] = uniform(...place, channels + 2) < 0.5 ? -speed : speed
    }
  }
  return noise
}

/** Sample the squares of a world that are not known. known: 1 for known squares (n, n); h: state;
 * surround: the program of a step of sampling. */
export function completed(world, known, { phase, velocity }, noise, surround, settings) {
  const { times, sharpness, fastest } = settings
  const camera = Float32Array.of(...phase, velocity[0] / fastest, velocity[1] / fastest)
  let [x, squares] = [noise.squares, null]
  times.forEach((time, i) => {
    const after = times[i + 1] ?? 1
    const found = surround.run({ x, squares: world.squares, known, camera, time,
      share: (after - time) / (1 - time), sharpness: after < 1 ? 1 : sharpness })
    x = found.x.slice()
    squares = found.squares
  })
  const chosen = (name) => world[name].map((value, i) => (known[i] ? value : noise[name][i]))
  return { ...world, squares: squares.slice(), places: chosen('places'), velocities: chosen('velocities'), looks: chosen('looks') }
}

/** Let the prior fill a hole, as `filling.generate`. hole: 1 for squares to fill (n, n). */
export function filled(world, hole, camera, noise, surround, settings) {
  const sampled = completed(world, hole.map((each) => 1 - each), camera, noise, surround, settings)
  const classes = sampled.squares.length / hole.length
  const squares = world.squares.slice()
  hole.forEach((inside, i) => {
    if (!inside) return
    const own = sampled.squares.subarray(i * classes, (i + 1) * classes)
    squares.fill(0, i * classes, (i + 1) * classes)[i * classes + own.indexOf(Math.max(...own))] = 1
  })
  return { ...sampled, squares }
}

/** Return a world without anything in a hole, as `filling.empty`. */
export function emptied(world, hole, { empty }) {
  const classes = world.squares.length / hole.length
  return { ...world, squares: world.squares.map((value, i) => (
    hole[Math.floor(i / classes)] ? Number(i % classes === empty) : value)) }
}

/** Return the camera's phase (4) in the middle of the view of a world with a corner. */
export const phaseOf = (corner, { size }) => Float32Array.from([0, 1].flatMap((axis) => {
  const angle = 2 * Math.PI / size * (FRAME / 2 - corner[axis])
  return [Math.cos(angle), Math.sin(angle)]
}))

const MOST_TURNS = 8
/** Return column and velocity of object i after some steps, as `SpriteStates.after`. */
function walked({ columns, velocities, begins, ends, kept }, i, left) {
  let [column, velocity] = [columns[i], velocities[i]]
  for (let turn = 0; turn < MOST_TURNS; turn++) {
    const goal = velocity > 0 ? ends[i] : begins[i]
    const needed = (goal - column) / velocity
    if (needed >= left) return [column + velocity * left, velocity]
    ;[column, left] = [goal, left - needed]
    velocity *= -(velocity > 0 ? kept[columns.length + i] : kept[i])
  }
  return [column, velocity]
}

/** Return a world as it is at a later step, from which the dream can start: in coordinates of the
 * view, with its moving objects in the squares that they have reached. sprites: objects of the drawn
 * world; displacement: that of the camera since the start. */
export function reached(world, sprites, step, { displacement }, { squares: n, period, empty }) {
  const [steps, classes] = [step - world.since, world.squares.length / (n * n)]
  const found = { ...world, since: step, moved: displacement, clock: Float32Array.of((world.clock[0] + steps) % period),
    corner: Float32Array.from(world.corner, (at, axis) => at - displacement[axis] + world.moved[axis]) }
  if (!steps || !sprites.weights) return found
  const places = []
  for (const name of ['squares', 'places', 'velocities', 'looks']) found[name] = world[name].slice()
  sprites.weights.forEach((weight, i) => {
    if (weight < 0.5 || !sprites.velocities[i]) return
    const row = Math.floor(sprites.rows[i]) * n
    const home = row + Math.floor(sprites.columns[i])
    places.push({ i, row, home })
    found.squares.fill(0, home * classes, (home + 1) * classes)[home * classes + empty] = 1
  })
  for (const { i, row, home } of places) {
    const [column, velocity] = walked(sprites, i, steps)
    const to = row + Math.floor(column)
    found.squares.set(world.squares.subarray(home * classes, (home + 1) * classes), to * classes)
    found.places[to] = column - Math.floor(column)
    found.velocities[to] = world.velocities[home] * velocity / sprites.velocities[i]
    found.looks[to] = world.looks[home]
  }
  return found
}

/** Return a world that has moved on by whole squares if its edge is near the view in state h, or the
 * world itself. */
export function continued(world, h, surround, settings) {
  const { squares: n, size, margin } = settings
  const camera = cameraOf(h)
  const view = [0, 1].map((axis) => camera.displacement[axis] - world.corner[axis])
  if (view.every((at) => at >= margin && at <= n * size - FRAME - margin)) return world
  const [right, down] = view.map((at) => Math.floor((at + FRAME / 2) / size) - Math.floor(n / 2))
  const classes = world.squares.length / (n * n)
  const known = new Float32Array(n * n)
  const moved = (name, width) => {
    const found = new Float32Array(n * n * width)
    for (let y = 0, i = 0; y < n; y++) {
      for (let x = 0; x < n; x++, i++) {
        const [row, column] = [y + down, x + right]
        known[i] = Number(row >= 0 && row < n && column >= 0 && column < n)
        const from = (row * n + column) * width
        if (known[i]) found.set(world[name].subarray(from, from + width), i * width)
      }
    }
    return found
  }
  const shifted = { ...world, squares: moved('squares', classes), places: moved('places', 1),
    velocities: moved('velocities', 1), looks: moved('looks', 1),
    corner: Float32Array.of(world.corner[0] + size * right, world.corner[1] + size * down),
    origin: [world.origin[0] + right, world.origin[1] + down] }
  const phase = new Float32Array(4)
  for (const axis of [0, 1]) {
    const angle = 2 * Math.PI / size * camera.displacement[axis]
    const [cosine, sine] = camera.phase.subarray(2 * axis)
    phase[2 * axis] = cosine * Math.cos(angle) - sine * Math.sin(angle)
    phase[2 * axis + 1] = sine * Math.cos(angle) + cosine * Math.sin(angle)
  }
  return completed(shifted, known, { phase, velocity: camera.velocity }, noiseOf(world.seed, shifted.origin, settings),
    surround, settings)
}
