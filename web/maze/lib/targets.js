// Targets: the squares at which patches act, moved on the maze.

import { parsePatch } from './patches.js'
import { columnOf, rowOf } from './grid.js'

const place = (maze, square) => [rowOf(maze, square), columnOf(maze, square)]

/** Move the target of a patch from a square to another. */
export function moveTarget(page, square, from, tag) {
  const { maze } = page
  const was = from === null ? null : place(maze, from).join('.')
  const number = page.patches.findIndex(({ text, on }) => {
    if (!on) return false
    try {
      return parsePatch(text).words.square?.some((each) => each.join('.') === was)
    } catch {
      return false
    }
  })
  if (number < 0) return
  page.changePatch(number, (patch) => ({ ...patch, words: { ...patch.words,
    square: patch.words.square.map((each) => (each.join('.') === was ? place(maze, square) : each)) } }), tag)
}
