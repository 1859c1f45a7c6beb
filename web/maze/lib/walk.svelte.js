// Episodes of an agent in the maze, with and without the patches.
//
// The policy has no memory and the game is deterministic, so the outputs of the agent on every
// square, in both facings, define a Markov chain over (square, facing), as in
// maze/field/outcomes.py. A state has the number 2 * square + facing.

import { STAY } from './field.js'
import { beside, CHEESE, cheesesOf, cornerOf, FREE, squaresWith, WALL } from './grid.js'

export const MOST_STEPS = 500 // steps after which Procgen ends an episode

/** Return the state after a move. A move into a wall can turn the mouse, but leaves it on its
 * square. */
export function nextState(maze, state, direction) {
  const square = state >> 1
  const next = direction === STAY ? square : beside(maze, square, direction)
  const facing = direction === 0 ? 0 : direction === 3 ? 1 : state & 1
  return 2 * (next >= 0 && maze.cells[next] !== WALL ? next : square) + facing
}

/** Return a generator of random numbers from 0 to below 1 (mulberry32). */
function randomNumbers(seed) {
  let state = seed
  return () => {
    state = (state + 0x6d2b79f5) | 0
    let value = Math.imul(state ^ (state >>> 15), state | 1)
    value ^= value + Math.imul(value ^ (value >>> 7), value | 61)
    return ((value ^ (value >>> 14)) >>> 0) / 2 ** 32
  }
}

/** Play an episode, and return {states, moves}, with one state more than moves. An episode that does
 * not reach the cheese is cut at its arrival in the top right corner. fields: fields with facing 0
 * and 1; likely: take the most likely actions instead of sampled ones. */
function episode(maze, fields, seed, likely) {
  const random = randomNumbers(seed)
  const states = [2 * maze.mouse + maze.facing]
  const moves = []
  while (moves.length < MOST_STEPS && maze.cells[states.at(-1) >> 1] !== CHEESE) {
    const [square, field] = [states.at(-1) >> 1, fields[states.at(-1) & 1]]
    let left = random()
    const sampled = field.at(square).findIndex((prob) => (left -= prob) < 0)
    moves.push(likely ? field.likely(square) : sampled < 0 ? STAY : sampled)
    states.push(nextState(maze, states.at(-1), moves.at(-1)))
  }
  const arrival = states.findIndex((state) => state >> 1 === cornerOf(maze))
  if (arrival > 0 && maze.cells[states.at(-1) >> 1] !== CHEESE) {
    states.length = arrival + 1
    moves.length = arrival
  }
  return { states, moves }
}

/** Compute the exact probabilities of reaching the cheese and the top right corner within an
 * episode, and its expected length in steps: {cheese, corner, steps}. */
function forecast(maze, fields) {
  const begin = 2 * maze.mouse + maze.facing
  const moving = squaresWith(maze, FREE).flatMap((square) => [2 * square, 2 * square + 1])
  const next = moving.map((state) => [0, 1, 2, 3, STAY].map((direction) => nextState(maze, state, direction)))
  const probs = moving.map((state) => fields[state & 1].at(state >> 1))
  const expectation = (start, isFixed, added) => {
    let now = Float64Array.from({ length: 2 * maze.cells.length }, (_, state) => start(state >> 1))
    for (let step = 0; step < MOST_STEPS; step++) {
      const before = now
      now = before.slice()
      moving.forEach((state, i) => {
        if (isFixed(state >> 1)) return
        now[state] = added
        for (let k = 0; k < 5; k++) now[state] += probs[i][k] * before[next[i][k]]
      })
    }
    return now[begin]
  }
  const reaching = (target) => expectation((square) => Number(square === target), (square) => square === target, 0)
  const [cheese] = cheesesOf(maze)
  return { cheese: cheese === undefined ? NaN : expectation((square) => Number(maze.cells[square] === CHEESE), () => false, 0),
    corner: reaching(cornerOf(maze)), steps: expectation(() => 0, () => false, 1) }
}

/** Episodes with and without patches, and the shown step; a player for Transport. */
export class Walk {
  view = $state({ step: 0, speed: 8 })
  playing = $state(false)
  #page

  constructor(page) {
    this.#page = page
  }

  /** Episodes and forecasts by condition, {states, moves, fields, forecast}; null until all outputs are
   * computed. */
  conditions = $derived.by(() => {
    const { maze, answers, turned, completed, inForce, view } = this.#page
    if (completed?.maze !== maze || completed.inForce !== inForce || completed.agent !== view.agent) return null
    const found = {}
    for (const condition of ['original', 'patched']) {
      if (!answers[condition]) continue
      const fields = maze.facing ? [turned[condition], answers[condition]] : [answers[condition], turned[condition]]
      found[condition] = { ...episode(maze, fields, view.seed, view.likely), fields, forecast: forecast(maze, fields) }
    }
    return found
  })
  length = $derived(this.conditions ? Math.max(...Object.values(this.conditions).map(({ states }) => states.length)) : 1)

  /** Return a condition at the shown step: {square, facing, move, step, probs, isOver, trail}; null if
   * unknown. */
  at(condition) {
    const walked = this.conditions?.[condition]
    if (!walked) return null
    const step = Math.min(this.view.step, walked.states.length - 1)
    const [square, facing] = [walked.states[step] >> 1, walked.states[step] & 1]
    return { square, facing, step, isOver: step === walked.moves.length, move: walked.moves[step] ?? null,
      probs: walked.fields[facing].at(square), trail: walked.states.slice(0, step + 1).map((state) => state >> 1) }
  }

  go(step) {
    this.view.step = Math.max(0, Math.min(step, this.length - 1))
  }

  tick() {
    if (this.view.step + 1 < this.length) this.go(this.view.step + 1)
    else this.playing = false
  }

  /** Start or pause; at the end, start again from the first step. */
  play() {
    if (!this.playing && this.view.step + 1 >= this.length) this.view.step = 0
    this.playing = !this.playing
  }

  reset() {
    this.playing = false
    this.view.step = 0
  }
}
