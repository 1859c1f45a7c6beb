// Targets: the squares at which patches act, moved on the maze.

import { parsePatch, placeOf } from './patches.js'

/** Move the target of a patch from a square to another. */
export function moveTarget(page, square, from, tag) {
  const { maze } = page
  const was = from === null ? null : placeOf(maze, from).join('.')
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
    square: patch.words.square.map((each) => (each.join('.') === was ? placeOf(maze, square) : each)) } }), tag)
}
