// Outputs of an agent on the squares of a maze, filled in as they are computed, and statistics of
// them.

import { DIRECTIONS } from './grid.js'

const ACTIONS = 15
// Direction in which each action moves the mouse; diagonals move it sideways.
const GROUPS = [0, 0, 0, 1, 4, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4]
export const STAY = DIRECTIONS.indexOf('stay')

/** Field of a condition, with arrays by the number of the square in the world. */
export class Field {
  of = null // key: agent, maze, facing and patches, as text

  constructor(squares) {
    this.known = new Uint8Array(squares) // 0: unknown, 1: known, 2: from an earlier maze
    this.logProbs = new Float32Array(squares * ACTIONS)
    this.probs = new Float64Array(squares * 5)
    this.values = new Float32Array(squares)
  }

  /** Mark known squares as from an earlier maze; squares that are no longer free become unknown. */
  age(isSquare) {
    this.known.forEach((known, square) => { if (known) this.known[square] = isSquare(square) ? 2 : 0 })
  }

  take(squares, logProbs, values) {
    squares.forEach((square, i) => {
      const ofActions = logProbs.subarray(i * ACTIONS, (i + 1) * ACTIONS)
      this.logProbs.set(ofActions, square * ACTIONS)
      const probs = this.probs.subarray(square * 5, square * 5 + 5).fill(0)
      ofActions.forEach((logProb, action) => { probs[GROUPS[action]] += Math.exp(logProb) })
      const sum = probs.reduce((a, b) => a + b, 0)
      probs.forEach((prob, direction) => { probs[direction] = prob / sum })
      this.values[square] = values[i]
      this.known[square] = 1
    })
  }

  /** Return the probabilities of left, down, up, right and stay at a square; null if they are
   * unknown. */
  at(square) {
    return this.known[square] === 1 ? this.probs.subarray(square * 5, square * 5 + 5) : null
  }

  /** Return the direction of the most likely action at a square. */
  likely(square) {
    const ofActions = this.logProbs.subarray(square * ACTIONS, (square + 1) * ACTIONS)
    return GROUPS[ofActions.indexOf(Math.max(...ofActions))]
  }

  /** Return the net arrow at a square: [P(right) - P(left), P(up) - P(down)]. */
  arrow(square) {
    const [left, down, up, right] = this.probs.subarray(square * 5, square * 5 + 5)
    return [right - left, up - down]
  }
}

/** Return the total variation between two fields at a square: half the summed |change| of
 * probabilities. */
export function variation(one, other, square) {
  let sum = 0
  for (let i = square * 5; i < square * 5 + 5; i++) sum += Math.abs(one.probs[i] - other.probs[i])
  return sum / 2
}

/** Return the mean total variation over the squares that both fields know; NaN if there are
 * none. */
export function meanVariation(one, other) {
  let [sum, count] = [0, 0]
  one.known.forEach((known, square) => {
    if (known === 1 && other.known[square] === 1) {
      sum += variation(one, other, square)
      count++
    }
  })
  return sum / count
}

/** Return the mean probability of staying over the known squares. */
export function meanStay(field) {
  let [sum, count] = [0, 0]
  field.known.forEach((known, square) => {
    if (known === 1) {
      sum += field.probs[square * 5 + STAY]
      count++
    }
  })
  return sum / count
}

/** Return all known outputs as CSV. conditions: [[name, field]]; actions: names of the actions. */
export function toCsv(maze, conditions, actions) {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`
  const lines = [['condition', 'row', 'column', 'value', ...actions.map((action) => `log_prob ${action}`)].map(quoted).join(',')]
  for (const [name, field] of conditions) {
    field.known.forEach((known, square) => {
      if (known !== 1) return
      const row = Math.floor(square / maze.dim)
      lines.push([name, row, square - row * maze.dim, field.values[square],
        ...field.logProbs.subarray(square * ACTIONS, (square + 1) * ACTIONS)].join(','))
    })
  }
  return `${lines.join('\n')}\n`
}
