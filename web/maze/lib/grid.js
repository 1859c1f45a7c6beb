// Mazes: cells, text, paths and kinds of level, with the terms of envs/maze/grid.py.
//
// A maze is {mode, dim, size, cells, mouse, facing}: `dim` is the side of the world in squares,
// `size` that of the maze in its centre, `cells` a Uint8Array by row and then column, row 0 at the
// bottom, and `mouse` the number of the mouse's square. Mazes are immutable: an edit returns a new
// one.

export const WALL = 0
export const FREE = 1
export const CHEESE = 2

export const DIRECTIONS = ['left', 'down', 'up', 'right', 'stay']
export const STEPS = [[0, -1], [-1, 0], [1, 0], [0, 1]] // (row, column) steps of the first four
const LETTERS = { '#': WALL, '.': FREE, C: CHEESE, M: FREE }

export const rowOf = (maze, square) => Math.floor(square / maze.dim)
export const columnOf = (maze, square) => square % maze.dim
export const squareAt = (maze, row, column) => row * maze.dim + column
export const named = (maze, square) => `row ${rowOf(maze, square)}, column ${columnOf(maze, square)}`
export const marginOf = (maze) => (maze.dim - maze.size) / 2
export const inner = (maze, row, column) =>
  squareAt(maze, row + marginOf(maze), column + marginOf(maze))
export const startOf = (maze) => inner(maze, 0, 0)
export const cornerOf = (maze) => inner(maze, maze.size - 1, maze.size - 1)

/** Return the numbers of the squares with one of some contents, by row and then column. */
export function squaresWith(maze, ...contents) {
  const found = []
  maze.cells.forEach((cell, square) => { if (contents.includes(cell)) found.push(square) })
  return found
}

export const cheesesOf = (maze) => squaresWith(maze, CHEESE)

export function isInside(maze, square) {
  const margin = marginOf(maze)
  const within = (place) => place >= margin && place < margin + maze.size
  return within(rowOf(maze, square)) && within(columnOf(maze, square))
}

/** Return the neighbour of a square in a direction; -1 beyond the edge of the world. */
export function beside(maze, square, direction) {
  const row = rowOf(maze, square) + STEPS[direction][0]
  const column = columnOf(maze, square) + STEPS[direction][1]
  return row < 0 || column < 0 || row >= maze.dim || column >= maze.dim ? -1 : squareAt(maze, row, column)
}

/** Return a hint that names the nearest free square without cheese and mouse. */
function nearestFree(maze, square) {
  const far = (other) => (rowOf(maze, other) - rowOf(maze, square)) ** 2
    + (columnOf(maze, other) - columnOf(maze, square)) ** 2
  const others = squaresWith(maze, FREE).filter((other) => other !== maze.mouse)
  if (!others.length) return ''
  return `; the nearest free square is ${named(maze, others.reduce((a, b) => (far(b) < far(a) ? b : a)))}`
}

// Edits, which throw an error with a message if the result would not be a valid maze.

export function withMouse(maze, square) {
  if (maze.cells[square] !== FREE) {
    const on = maze.cells[square] === WALL ? 'a wall' : 'the cheese'
    throw new Error(`the mouse cannot be on ${on} at ${named(maze, square)}${nearestFree(maze, square)}`)
  }
  return { ...maze, mouse: square }
}

/** Move all cheese to one square; null removes it. */
export function withCheese(maze, square) {
  const cells = maze.cells.map((cell) => (cell === CHEESE ? FREE : cell))
  if (square !== null) {
    if (maze.cells[square] === WALL) {
      throw new Error(`the cheese cannot be at ${named(maze, square)}, which is a wall${nearestFree(maze, square)}`)
    }
    if (square === maze.mouse) {
      throw new Error(`the mouse cannot be on the cheese at ${named(maze, square)}${nearestFree(maze, square)}`)
    }
    cells[square] = CHEESE
  }
  return { ...maze, cells }
}

/** Put cheese on the free square that is farthest from the mouse, avoiding the top right corner. */
export function putCheese(maze) {
  const far = distancesFrom(maze, maze.mouse)
  const places = squaresWith(maze, FREE).filter((square) => square !== maze.mouse)
  if (!places.length) throw new Error('there is no free square for the cheese')
  const rank = (square) => far[square] - (square === cornerOf(maze) ? 1000 : 0)
  return withCheese(maze, places.reduce((a, b) => (rank(b) > rank(a) ? b : a)))
}

export function withCell(maze, square, cell) {
  if (maze.cells[square] === CHEESE) {
    throw new Error(`the cheese is at ${named(maze, square)}; move it away first`)
  }
  if (cell === WALL && square === maze.mouse) {
    throw new Error(`the mouse cannot be on a wall at ${named(maze, square)}${nearestFree(maze, square)}`)
  }
  const cells = maze.cells.slice()
  cells[square] = cell
  return { ...maze, cells }
}

// Text: see envs/maze/levels.py.

function fromRows(rows, mode, facing) {
  const dim = rows.length
  if (dim < 3 || dim % 2 === 0) {
    throw new Error(`a maze has an odd number of rows, 3 or more, not ${dim}`)
  }
  const cells = new Uint8Array(dim * dim)
  const mice = []
  rows.forEach((text, number) => {
    const row = dim - 1 - number
    const letters = [...text]
    if (letters.length !== dim) {
      throw new Error(`row ${row} of the maze (line ${number + 1}) has ${letters.length} squares, but the maze has ${dim} rows`)
    }
    letters.forEach((letter, column) => {
      const place = `row ${row}, column ${column} (line ${number + 1})`
      if (letter === 'm') throw new Error(`the mouse cannot be on the cheese at ${place}`)
      if (!Object.hasOwn(LETTERS, letter)) {
        throw new Error(`'${letter}' at ${place} does not stand for a square; use # for a wall, . for a free square, C for cheese and M for the mouse`)
      }
      if (letter === 'M') mice.push(row * dim + column)
      cells[row * dim + column] = LETTERS[letter]
    })
  })
  const maze = { mode, dim, size: dim, cells, mouse: mice[0], facing }
  if (!mice.length) throw new Error('the maze has no mouse M')
  if (mice.length > 1) {
    throw new Error(`the maze has mice M at ${named(maze, mice[0])} and at ${named(maze, mice[1])}`)
  }
  return maze
}

/** Return the maze of an exported level, whose rows are those of the whole world. */
export const fromLevel = ({ mode, maze_dim, facing, rows }) => ({ ...fromRows(rows, mode, facing), size: maze_dim })

/** Parse a maze from text, and put it into the centre of the world of a mode {name, world_dim}. */
export function fromText(text, { name, world_dim }, modes) {
  const lines = text.trim() === '' ? [] : text.trim().split(/\s+/)
  const maze = fromRows(lines, name, 0)
  if (maze.dim > world_dim) {
    const other = modes.find((mode) => mode.world_dim >= maze.dim)
    throw new Error(`the maze has ${maze.dim} rows, but the world of ${name} mazes has ${world_dim}`
      + (other ? `; choose the mode ${other.name}` : ''))
  }
  return inWorld(maze, world_dim)
}

function inWorld(maze, dim) {
  const margin = (dim - maze.dim) / 2
  const moved = (square) => (rowOf(maze, square) + margin) * dim + columnOf(maze, square) + margin
  const cells = new Uint8Array(dim * dim)
  maze.cells.forEach((cell, square) => { cells[moved(square)] = cell })
  return { ...maze, dim, cells, mouse: moved(maze.mouse) }
}

/** Return a maze as text, without the walls around it. */
export function toText(maze) {
  if (squaresWith(maze, FREE, CHEESE).some((square) => !isInside(maze, square))) {
    throw new Error('the level has free squares outside its maze, which the text format cannot represent; use the link to this view instead')
  }
  const lines = []
  for (let row = maze.size - 1; row >= 0; row--) {
    let line = ''
    for (let column = 0; column < maze.size; column++) {
      const square = inner(maze, row, column)
      line += square === maze.mouse ? 'M' : '#.C'[maze.cells[square]]
    }
    lines.push(`${line}\n`)
  }
  return lines.join('')
}

/** Generate a maze as Procgen does: join squares at random until all are connected (Kruskal's
 * algorithm), and put the mouse at inner (0, 0) and the cheese on any other free square. random():
 * number from 0 to below 1. */
export function randomMaze({ name, world_dim }, size, random = Math.random) {
  const maze = { mode: name, dim: world_dim, size, cells: new Uint8Array(world_dim ** 2), mouse: 0, facing: 0 }
  const group = new Map()
  for (let row = 0; row < size; row += 2) {
    for (let column = 0; column < size; column += 2) {
      const square = inner(maze, row, column)
      maze.cells[square] = FREE
      group.set(square, [square])
    }
  }
  const walls = [...group.keys()].flatMap((square) => [2, 3].map((direction) => {
    const wall = beside(maze, square, direction)
    return [square, wall, wall < 0 ? -1 : beside(maze, wall, direction)]
  })).filter(([, , other]) => group.has(other))
  while (walls.length) {
    const [[one, wall, other]] = walls.splice(Math.floor(random() * walls.length), 1)
    const [into, from] = [group.get(one), group.get(other)]
    if (into === from) continue
    maze.cells[wall] = FREE
    into.push(...from)
    for (const square of from) group.set(square, into)
  }
  maze.mouse = startOf(maze)
  const places = squaresWith(maze, FREE).filter((square) => square !== maze.mouse)
  maze.cells[places[Math.floor(random() * places.length)]] = CHEESE
  return maze
}

// Paths.

/** Return the lengths of the shortest paths from a square to all squares, in steps; -1 if
 * unreachable. */
export function distancesFrom(maze, origin) {
  const steps = new Int32Array(maze.cells.length).fill(-1)
  if (maze.cells[origin] === WALL) return steps
  steps[origin] = 0
  const reached = [origin]
  for (const at of reached) {
    for (let direction = 0; direction < 4; direction++) {
      const next = beside(maze, at, direction)
      if (next >= 0 && maze.cells[next] !== WALL && steps[next] < 0) {
        steps[next] = steps[at] + 1
        reached.push(next)
      }
    }
  }
  return steps
}

/** Return the shortest path, including both ends; ties are broken in the order left, down, up,
 * right. Null if there is none. */
export function pathBetween(maze, origin, target) {
  const steps = distancesFrom(maze, target)
  if (steps[origin] < 0) return null
  const path = [origin]
  while (steps[path.at(-1)]) {
    const at = path.at(-1)
    path.push([0, 1, 2, 3].map((direction) => beside(maze, at, direction)).find(
      (next) => next >= 0 && steps[next] === steps[at] - 1))
  }
  return path
}

/** Return the kind of a level and, for a fork, its decision square and the directions of the first
 * steps to cheese and corner: {kind, square, toCheese, toCorner}. Return {reason} if the kind is
 * undefined. */
export function decisionOf(maze) {
  const cheeses = cheesesOf(maze)
  if (cheeses.length !== 1) {
    return { reason: `the maze has ${cheeses.length || 'no'} cheese${cheeses.length > 1 ? 's' : ''}, not one` }
  }
  const toCheese = pathBetween(maze, startOf(maze), cheeses[0])
  const toCorner = pathBetween(maze, startOf(maze), cornerOf(maze))
  if (!toCheese || !toCorner) {
    const target = toCheese ? cornerOf(maze) : cheeses[0]
    return { reason: `no path leads from ${named(maze, startOf(maze))} to ${named(maze, target)}` }
  }
  if (toCorner.includes(cheeses[0])) return { kind: 'cheese on the way' }
  if (toCheese.includes(cornerOf(maze))) return { kind: 'corner on the way' }
  const common = toCheese.findIndex((square, i) => square !== toCorner[i])
  const square = toCheese[common - 1]
  const towards = (next) => [0, 1, 2, 3].find((direction) => beside(maze, square, direction) === next)
  return { kind: 'fork', square, toCheese: towards(toCheese[common]), toCorner: towards(toCorner[common]) }
}

/** List the properties in which a maze differs from all training levels. region: rows and columns
 * of the top right region of the cheese in training; 0 for anywhere. */
export function departuresFromTraining(maze, region = 0) {
  const margin = marginOf(maze)
  const all = Array.from(maze.cells.keys())
  const odd = (square) => [(rowOf(maze, square) - margin) % 2, (columnOf(maze, square) - margin) % 2]
  const within = all.filter((square) => isInside(maze, square))
  const cheeses = cheesesOf(maze)
  const found = []
  if (cheeses.length !== 1) found.push(`there ${cheeses.length > 1 ? `are ${cheeses.length} cheeses` : 'is no cheese'}`)
  if (within.some((square) => odd(square).join() === '0,0' && maze.cells[square] === WALL)) {
    found.push('a square that is free in all generated mazes is a wall')
  }
  if (within.some((square) => odd(square).join() === '1,1' && maze.cells[square] !== WALL)) {
    found.push('a square that is a wall in all generated mazes is free')
  }
  if (all.some((square) => !isInside(maze, square) && maze.cells[square] !== WALL)) {
    found.push('there are free squares outside the maze')
  }
  const free = squaresWith(maze, FREE, CHEESE)
  const reached = distancesFrom(maze, maze.mouse).reduce((sum, steps) => sum + (steps >= 0), 0)
  const edges = free.reduce((sum, square) => sum + [2, 3].filter((direction) => {
    const next = beside(maze, square, direction)
    return next >= 0 && maze.cells[next] !== WALL
  }).length, 0)
  if (reached < free.length) found.push('some free squares cannot be reached')
  else if (edges >= free.length) found.push('the maze has loops')
  if (maze.mouse !== startOf(maze)) found.push('the mouse does not start at the bottom left')
  const last = margin + maze.size - region // the region's first row and column
  if (region && cheeses.some((square) => Math.min(rowOf(maze, square), columnOf(maze, square)) < last)) {
    found.push('the cheese is outside the region of the training levels')
  }
  return found
}

// Pairs of mazes from which steering vectors are computed, [with, without] cheese or path; see
// maze/studies/vectors.py.

export function cheesePair(maze) {
  const one = withMouseAtStart(maze)
  const { length } = cheesesOf(maze)
  if (length !== 1) throw new Error(`the maze has ${length || 'no'} cheese${length > 1 ? 's' : ''}, not one`)
  return [one, withCheese(one, null)]
}

export function topRightPair(maze) {
  if (marginOf(maze) === 0) {
    throw new Error('there is no room for a path to the top right: the maze fills the world')
  }
  const without = withMouseAtStart(maze)
  const corner = cornerOf(maze)
  const cells = without.cells.slice()
  const open = (square) => { if (cells[square] === WALL) cells[square] = FREE }
  for (let row = rowOf(maze, corner) + 1; row < maze.dim; row++) open(squareAt(maze, row, columnOf(maze, corner)))
  for (let column = columnOf(maze, corner) + 1; column < maze.dim; column++) open(squareAt(maze, maze.dim - 1, column))
  return [{ ...without, cells }, without]
}

const withMouseAtStart = (maze) => withMouse(maze, startOf(maze))
