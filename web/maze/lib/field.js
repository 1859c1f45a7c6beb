// Answers of an agent on the squares of a maze, as they come, and what follows from them.

import { DIRECTIONS } from './grid.js'

const ACTIONS = 15
// Directions of the actions: a diagonal moves the mouse sideways alone.
const GROUPS = [0, 0, 0, 1, 4, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4]
export const STAY = DIRECTIONS.indexOf('stay')

/** The field of an arm. Squares are numbers in the world. */
export class Field {
  of = null // all that decides it, as text

  constructor(squares) {
    this.known = new Uint8Array(squares) // 1 as it is, 2 of an earlier maze
    this.logProbs = new Float32Array(squares * ACTIONS)
    this.probs = new Float64Array(squares * 5)
    this.values = new Float32Array(squares)
  }

  /** What is known becomes old; that of squares that are none any more goes. */
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

  /** Probabilities of left, down, up, right, stay; null where they are not known. */
  at(square) {
    return this.known[square] === 1 ? this.probs.subarray(square * 5, square * 5 + 5) : null
  }

  /** The direction of the most likely action. */
  likely(square) {
    const ofActions = this.logProbs.subarray(square * ACTIONS, (square + 1) * ACTIONS)
    return GROUPS[ofActions.indexOf(Math.max(...ofActions))]
  }

  /** P(right) - P(left), P(up) - P(down). */
  arrow(square) {
    const [left, down, up, right] = this.probs.subarray(square * 5, square * 5 + 5)
    return [right - left, up - down]
  }
}

/** Half the sum of the changes of the five probabilities at a square. */
export function variation(one, other, square) {
  let sum = 0
  for (let i = square * 5; i < square * 5 + 5; i++) sum += Math.abs(one.probs[i] - other.probs[i])
  return sum / 2
}

/** Their mean over squares that both know; NaN if there is none. */
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

/** The mean probability of staying, over squares that are known. */
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

/** All answers as CSV. arms: [[name, field]]; actions: their names. */
export function toCsv(maze, arms, actions) {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`
  const lines = [['arm', 'row', 'column', 'value', ...actions.map((action) => `log_prob ${action}`)].map(quoted).join(',')]
  for (const [name, field] of arms) {
    field.known.forEach((known, square) => {
      if (known !== 1) return
      const row = Math.floor(square / maze.dim)
      lines.push([name, row, square - row * maze.dim, field.values[square],
        ...field.logProbs.subarray(square * ACTIONS, (square + 1) * ACTIONS)].join(','))
    })
  }
  return `${lines.join('\n')}\n`
}
