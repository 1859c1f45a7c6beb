// Conversion of maze, patches and view to the fragment of the address and back.
//
// The agent is given by name, so that an address stays valid after another export; the maze is
// given cell by cell.

import { numberOf } from '../../shared/lib/address.js'
import {
  CHEESE, cheesesOf, columnOf, FREE, isInside, rowOf, squareAt, squaresWith, WALL, withMouse
} from './grid.js'

const DIGITS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_' // 6 cells each

const placeText = (maze, square) => `${rowOf(maze, square)}.${columnOf(maze, square)}`

/** Encode which cells are no walls: cells of the maze, or of the world if squares outside the maze
 * are free. */
function cellsText(maze) {
  const isWhole = squaresWith(maze, FREE, CHEESE).some((square) => !isInside(maze, square))
  const bits = Array.from(maze.cells.keys()).filter((square) => isWhole || isInside(maze, square))
    .map((square) => Number(maze.cells[square] !== WALL))
  let text = ''
  for (let i = 0; i < bits.length; i += 6) {
    text += DIGITS[[0, 1, 2, 3, 4, 5].reduce((sum, k) => 2 * sum + (bits[i + k] ?? 0), 0)]
  }
  return text
}

export function write(view, maze, patches, manifest) {
  const text = new URLSearchParams()
  text.set('agent', manifest.agents[view.agent].name)
  text.set('mode', maze.mode)
  text.set('size', maze.size)
  text.set('maze', cellsText(maze))
  text.set('mouse', placeText(maze, maze.mouse))
  const cheeses = cheesesOf(maze)
  if (cheeses.length) text.set('cheese', cheeses.map((square) => placeText(maze, square)).join('/'))
  if (maze.facing) text.set('facing', maze.facing)
  if (view.level !== null) text.set('level', view.level)
  if (view.show !== 'field') text.set('show', view.show)
  text.set('layer', view.layer)
  text.set('channel', view.channel)
  if (view.components) text.set('components', 1)
  if (view.world) text.set('world', 1)
  text.set('region', view.region)
  for (const { text: patch, on } of patches) text.append(on ? 'patch' : 'patch_off', patch)
  if (view.seed) text.set('seed', view.seed)
  if (view.likely) text.set('actions', 'likely')
  if (view.notes) text.set('notes', view.notes)
  return text.toString()
}

/** Return the content of a fragment, {view, maze, patches, problem}; parts that do not fit are
 * taken from `start`. */
export function read(fragment, start, manifest) {
  const text = new URLSearchParams(fragment.replace(/^#/, ''))
  const view = { ...start.view }
  const agent = manifest.agents.findIndex(({ name }) => name === text.get('agent'))
  if (agent >= 0) view.agent = agent
  let { maze } = start
  let problem = ''
  if (text.has('agent') && agent < 0) {
    problem = `The address asks for the agent '${text.get('agent')}', which is not on this page.`
  }
  if (text.has('maze')) {
    try {
      maze = mazeOf(text, manifest)
    } catch (error) {
      problem = `The maze in the address cannot be shown: ${error.message}.`
    }
  }
  view.level = text.has('maze') ? text.get('level') : start.view.level
  if (['field', 'value', 'channel'].includes(text.get('show'))) view.show = text.get('show')
  const { layers } = manifest.agents[view.agent]
  const named = (wanted) => layers.find(({ name }) => name === wanted)
  const layer = named(text.get('layer')) ?? named(view.layer) ?? layers[0]
  view.layer = layer.name
  view.channel = numberOf(text.get('channel'), layer.shape[0]) ?? 0
  view.components = text.get('components') === '1'
  view.world = text.get('world') === '1'
  view.region = numberOf(text.get('region'), maze.dim + 1) ?? manifest.agents[view.agent].region
  view.seed = numberOf(text.get('seed'), 1e6) ?? 0
  view.likely = text.get('actions') === 'likely'
  view.notes = text.get('notes') ?? ''
  const patches = [...text].filter(([key]) => key === 'patch' || key === 'patch_off')
    .map(([key, patch]) => ({ text: patch, on: key === 'patch' }))
  return { view, maze, patches, problem }
}

function mazeOf(text, manifest) {
  const mode = manifest.modes.find(({ name }) => name === text.get('mode'))
  if (!mode) throw new Error(`the mode '${text.get('mode')}' is not on this page`)
  const dim = mode.world_dim
  const size = numberOf(text.get('size'), dim + 1)
  if (size === null || size < 3 || size % 2 === 0) {
    throw new Error(`its size is '${text.get('size')}', and must be odd, from 3 to ${dim}`)
  }
  let maze = { mode: mode.name, dim, size, cells: new Uint8Array(dim * dim), mouse: 0, facing: text.get('facing') === '1' ? 1 : 0 }
  const bits = [...text.get('maze')].flatMap((digit) => {
    const number = DIGITS.indexOf(digit)
    if (number < 0) throw new Error(`'${digit}' is not a character of an encoded maze`)
    return [5, 4, 3, 2, 1, 0].map((k) => (number >> k) & 1)
  })
  const all = Array.from(maze.cells.keys())
  const within = all.filter((square) => isInside(maze, square))
  const squares = [within, all].find((each) => Math.ceil(each.length / 6) * 6 === bits.length)
  if (!squares) throw new Error(`it has ${bits.length} cells, and a maze of ${size} x ${size} has ${within.length}`)
  squares.forEach((square, i) => { maze.cells[square] = bits[i] ? FREE : WALL })
  for (const place of (text.get('cheese') ?? '').split('/').filter(Boolean)) {
    const square = squareOf(place, maze)
    if (maze.cells[square] === WALL) throw new Error(`the cheese cannot be at ${place}, which is a wall`)
    maze.cells[square] = CHEESE
  }
  maze = withMouse(maze, squareOf(text.get('mouse'), maze))
  return maze
}

function squareOf(text, maze) {
  const [row, column, more] = (text ?? '').split('.')
  const place = [numberOf(row, maze.dim), numberOf(column, maze.dim)]
  if (place.includes(null) || more !== undefined) {
    throw new Error(`'${text}' is not a square: rows and columns of the world are 0 to ${maze.dim - 1}`)
  }
  return squareAt(maze, ...place)
}
