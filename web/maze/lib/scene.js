// Drawing of the views of a maze on canvases.

import { gradientColour } from '../../shared/lib/draw.js'
import { variation } from './field.js'
import {
  CHEESE, columnOf, FREE, isInside, marginOf, rowOf, squaresWith, STEPS, WALL
} from './grid.js'

const FONT = 'system-ui, sans-serif'
const OLD = 0.3 // opacity of outputs that were computed for an earlier maze
const SMALL_ARROW = 0.06
// Viridis (van der Walt and Smith, 2015) without its darkest colours, which are invisible in one
// theme.
const VIRIDIS = [[72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142], [33, 145, 140], [34, 168, 132],
  [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37]]

/** Return the shown part of the world: its first row and column, `from`, and their number,
 * `side`. */
export function windowOf(maze, isWhole) {
  const all = isWhole || squaresWith(maze, FREE, CHEESE).some((square) => !isInside(maze, square))
  return all ? { from: 0, side: maze.dim } : { from: marginOf(maze), side: maze.size }
}

/** Return positions on a canvas: {cell: side of a square; x(square), y(square): centre of a square;
 * at(x, y): square at a position, -1 for none}. */
export function placesOf(maze, { from, side }, { w }) {
  const cell = w / side
  return {
    cell,
    x: (square) => (columnOf(maze, square) - from + 0.5) * cell,
    y: (square) => (from + side - 1 - rowOf(maze, square) + 0.5) * cell,
    at(x, y) {
      const [column, row] = [from + Math.floor(x / cell), from + side - 1 - Math.floor(y / cell)]
      const isThere = Math.min(column, row) >= from && Math.max(column, row) < from + side
      return isThere ? row * maze.dim + column : -1
    }
  }
}

/** Draw walls and floor; fill(square): colour of a free square, or null for the colour of the
 * floor. */
export function drawMaze(ctx, maze, part, box, colours, fill = () => null) {
  const { cell, x, y } = placesOf(maze, part, box)
  ctx.fillStyle = colours.wall
  ctx.fillRect(0, 0, box.w, box.h)
  const last = part.from + part.side
  for (let row = part.from; row < last; row++) {
    for (let column = part.from; column < last; column++) {
      const square = row * maze.dim + column
      if (maze.cells[square] === WALL) continue
      const [left, top] = [x(square) - cell / 2, y(square) - cell / 2]
      const [l, t] = [Math.round(left), Math.round(top)]
      ctx.fillStyle = fill(square) ?? colours.floor
      ctx.fillRect(l, t, Math.round(left + cell) - l, Math.round(top + cell) - t)
    }
  }
  if (part.side > maze.size) { // border of the maze in the world
    const [a, side] = [(marginOf(maze) - part.from) * cell, maze.size * cell]
    ctx.strokeStyle = colours.muted
    ctx.setLineDash([4, 4])
    ctx.lineWidth = 1
    ctx.strokeRect(a, a, side, side)
    ctx.setLineDash([])
  }
}

/** Draw a piece of cheese. */
function drawCheese(ctx, x, y, cell, colours) {
  const r = cell * 0.36
  ctx.beginPath()
  ctx.moveTo(x - r, y + r * 0.62)
  ctx.lineTo(x + r, y + r * 0.62)
  ctx.lineTo(x + r, y - r * 0.28)
  ctx.lineTo(x - r * 0.1, y - r * 0.72)
  ctx.closePath()
  ctx.fillStyle = colours.cheese
  ctx.strokeStyle = colours['cheese-edge']
  ctx.lineWidth = Math.max(cell * 0.05, 0.8)
  ctx.lineJoin = 'round'
  ctx.fill()
  ctx.stroke()
  ctx.fillStyle = colours['cheese-edge']
  for (const [dx, dy, size] of [[-0.2, 0.3, 0.14], [0.42, 0.16, 0.17], [0.12, -0.12, 0.11]]) {
    ctx.beginPath()
    ctx.arc(x + dx * r, y + dy * r, size * r, 0, 2 * Math.PI)
    ctx.fill()
  }
}

/** Draw a mouse from the side; facing 1 looks to the right, 0 to the left. */
function drawMouse(ctx, x, y, cell, facing, colours) {
  const r = cell * 0.4
  ctx.save()
  ctx.translate(x, y)
  ctx.scale(facing ? r : -r, r)
  ctx.lineJoin = ctx.lineCap = 'round'
  ctx.strokeStyle = colours.mouse
  ctx.lineWidth = 0.13
  ctx.beginPath() // tail
  ctx.moveTo(-0.55, 0.5)
  ctx.bezierCurveTo(-0.95, 0.62, -0.8, 0.05, -1.05, -0.05)
  ctx.stroke()
  ctx.fillStyle = colours.mouse
  ctx.beginPath() // body, from the nose over the back
  ctx.moveTo(1, 0.38)
  ctx.bezierCurveTo(0.75, -0.2, 0.4, -0.4, 0.05, -0.4)
  ctx.bezierCurveTo(-0.55, -0.4, -0.85, 0.1, -0.8, 0.58)
  ctx.lineTo(0.85, 0.58)
  ctx.closePath()
  ctx.fill()
  ctx.strokeStyle = colours.floor
  ctx.lineWidth = 0.09
  ctx.beginPath() // ear
  ctx.arc(0.32, -0.42, 0.27, 0, 2 * Math.PI)
  ctx.fill()
  ctx.stroke()
  ctx.fillStyle = colours.floor
  ctx.beginPath() // eye
  ctx.arc(0.6, 0.12, 0.1, 0, 2 * Math.PI)
  ctx.fill()
  ctx.restore()
}

/** Draw cheese, mouse and marks. decision: its square is framed in forks; targets: squares of
 * patches, drawn as crosses; region: rows and columns of the top right region, drawn as a dashed
 * line; walker: {square, facing, trail} of a walking mouse. */
export function drawThings(ctx, maze, part, box, { decision, targets = [], region = 0, walker = null }, colours) {
  const { cell, x, y } = placesOf(maze, part, box)
  if (region) {
    const side = Math.min(region, maze.size) * cell
    const right = (marginOf(maze) + maze.size - part.from) * cell
    const top = box.w - right
    ctx.strokeStyle = colours.other
    ctx.lineWidth = 2
    ctx.setLineDash([6, 4])
    ctx.strokeRect(right - side + 1, top + 1, side - 2, side - 2)
    ctx.setLineDash([])
  }
  const isShown = (square) => Math.min(rowOf(maze, square), columnOf(maze, square)) >= part.from
    && Math.max(rowOf(maze, square), columnOf(maze, square)) < part.from + part.side
  for (const square of squaresWith(maze, CHEESE)) {
    if (isShown(square)) drawCheese(ctx, x(square), y(square), cell, colours)
  }
  if (walker) {
    ctx.strokeStyle = colours.mouse
    ctx.globalAlpha = 0.55
    ctx.lineWidth = Math.max(cell * 0.16, 2)
    ctx.lineJoin = ctx.lineCap = 'round'
    ctx.beginPath()
    for (const square of walker.trail) ctx.lineTo(x(square), y(square))
    ctx.stroke()
    ctx.globalAlpha = 1
    ctx.lineCap = 'butt'
  }
  const { square: mouse, facing } = walker ?? { square: maze.mouse, facing: maze.facing }
  if (isShown(mouse)) drawMouse(ctx, x(mouse), y(mouse), cell, facing, colours)
  if (decision?.kind === 'fork') {
    ctx.strokeStyle = colours.simulated
    ctx.lineWidth = Math.max(cell * 0.07, 1.5)
    ctx.strokeRect(x(decision.square) - cell * 0.46, y(decision.square) - cell * 0.46, cell * 0.92, cell * 0.92)
  }
  for (const square of targets) {
    if (!isShown(square)) continue
    ctx.lineCap = 'round'
    for (const [colour, wide] of [[colours.surface, 0.18], [colours.lowers, 0.1]]) {
      ctx.strokeStyle = colour
      ctx.lineWidth = Math.max(cell * wide, colour === colours.surface ? 3.5 : 2)
      ctx.beginPath()
      for (const [dx, dy] of [[1, 1], [1, -1]]) {
        ctx.moveTo(x(square) - dx * cell * 0.3, y(square) - dy * cell * 0.3)
        ctx.lineTo(x(square) + dx * cell * 0.3, y(square) + dy * cell * 0.3)
      }
      ctx.stroke()
    }
    ctx.lineCap = 'butt'
  }
}

/** Draw an arrow with its middle at (x, y) and the components (right, up), in pixels. */
function drawArrow(ctx, x, y, right, up, cell, colour) {
  const length = Math.hypot(right, up)
  if (length < cell * SMALL_ARROW) {
    ctx.fillStyle = colour
    ctx.beginPath()
    ctx.arc(x, y, Math.max(cell * 0.045, 0.9), 0, 2 * Math.PI)
    ctx.fill()
    return
  }
  const [ux, uy] = [right / length, -up / length]
  const wide = Math.max(cell * 0.075, 1)
  const head = Math.min(cell * 0.26, length * 0.62)
  const [tailX, tailY] = [x - ux * length / 2, y - uy * length / 2]
  const [tipX, tipY] = [x + ux * length / 2, y + uy * length / 2]
  const [neckX, neckY] = [tipX - ux * head, tipY - uy * head]
  const half = Math.min(head * 0.62, cell * 0.17)
  ctx.fillStyle = colour
  ctx.beginPath()
  ctx.moveTo(tailX - uy * wide / 2, tailY + ux * wide / 2)
  ctx.lineTo(neckX - uy * wide / 2, neckY + ux * wide / 2)
  ctx.lineTo(neckX - uy * half, neckY + ux * half)
  ctx.lineTo(tipX, tipY)
  ctx.lineTo(neckX + uy * half, neckY - ux * half)
  ctx.lineTo(neckX + uy * wide / 2, neckY - ux * wide / 2)
  ctx.lineTo(tailX + uy * wide / 2, tailY - ux * wide / 2)
  ctx.closePath()
  ctx.fill()
}

/** Draw a vector field, or its difference from the field `other`. */
export function drawField(ctx, box, { maze, part, field, other = null, components, marks }, colour, colours) {
  const changed = (square) => (other && field.known[square] && other.known[square]
    ? `color-mix(in srgb, ${colours.other} ${(70 * variation(field, other, square)).toFixed(1)}%, ${colours.floor})` : null)
  drawMaze(ctx, maze, part, box, colours, changed)
  const { cell, x, y } = placesOf(maze, part, box)
  const longest = 0.86 * cell
  for (const square of squaresWith(maze, FREE)) {
    if (!field.known[square] || (other && !other.known[square])) continue
    if (!other && square === (marks.walker?.square ?? maze.mouse)) continue // the mouse is drawn there
    ctx.globalAlpha = field.known[square] === 1 && (!other || other.known[square] === 1) ? 1 : OLD
    const probs = (each) => each.probs.subarray(square * 5, square * 5 + 4)
    if (components) {
      const before = other ? probs(other) : [0, 0, 0, 0]
      probs(field).forEach((prob, direction) => {
        const size = (prob - before[direction]) * longest / 2
        const [up, right] = STEPS[direction]
        if (Math.abs(size) > cell * SMALL_ARROW) {
          drawArrow(ctx, x(square) + right * size / 2, y(square) - up * size / 2, right * size, up * size, cell, colour)
        }
      })
    } else {
      let [right, up] = field.arrow(square)
      if (other) {
        const [r, u] = other.arrow(square)
        right -= r
        up -= u
      }
      const shrink = Math.min(1, 1 / Math.max(Math.hypot(right, up), 1e-9))
      drawArrow(ctx, x(square), y(square), right * shrink * longest, up * shrink * longest, cell, colour)
    }
  }
  ctx.globalAlpha = 1
  drawThings(ctx, maze, part, box, marks, colours)
}

/** Return the heat-map colour of a number from 0 (dark) to 1 (light). */
export function heat(share) {
  const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1)
  const [low, high] = [VIRIDIS[Math.floor(at)], VIRIDIS[Math.ceil(at)]]
  return `rgb(${low.map((from, i) => Math.round(from + (high[i] - from) * (at % 1))).join(',')})`
}

/** Return a text colour that is readable on the colour heat(share). */
const inkOn = (share) => (share > 0.55 ? '#1b1f24' : '#fff')

/** Draw the values of squares, or their differences from the field `other`. range: [low, high] of
 * values, or the largest |difference|. */
export function drawValues(ctx, box, { maze, part, field, other = null, range, marks }, colours) {
  const share = (square) => (field.values[square] - range[0]) / (range[1] - range[0] || 1)
  const change = (square) => field.values[square] - other.values[square]
  const isKnown = (square) => maze.cells[square] === FREE && field.known[square] && (!other || other.known[square])
  drawMaze(ctx, maze, part, box, colours, (square) => {
    if (!isKnown(square)) return null
    const isOld = field.known[square] === 2 || other?.known[square] === 2
    const full = other ? gradientColour(change(square), range, colours) : heat(share(square))
    return isOld ? `color-mix(in srgb, ${full} 35%, ${colours.floor})` : full
  })
  const { cell, x, y } = placesOf(maze, part, box)
  if (cell >= 30) {
    ctx.font = `${Math.min(cell * 0.3, 12)}px ${FONT}`
    ctx.textAlign = 'center'
    ctx.textBaseline = 'middle'
    for (const square of squaresWith(maze, FREE)) {
      if (!isKnown(square) || square === (marks.walker?.square ?? maze.mouse)) continue
      ctx.fillStyle = other ? colours.ink : inkOn(share(square))
      ctx.fillText(brief(other ? change(square) : field.values[square]), x(square), y(square))
    }
  }
  drawThings(ctx, maze, part, box, marks, colours)
}

const brief = (value) => (Math.abs(value) < 0.05 ? '0' : value.toFixed(1).replace('-', '−'))

/** Arrange the cells of a channel, or all units of a layer, in a grid: {rows, columns, number(row,
 * column)}, with the index of a cell in `numbers`. */
function cellsOfLayer(layer, numbers, channel) {
  if (layer.stride !== null) {
    const [, rows, columns] = layer.shape
    return { rows, columns, number: (row, column) => (channel * rows + row) * columns + column, numbers }
  }
  const columns = Math.ceil(Math.sqrt(layer.shape[0]))
  return { rows: Math.ceil(layer.shape[0] / columns), columns, number: (row, column) => row * columns + column, numbers }
}

/** Draw a channel of a map with the walls of the maze, or the units of a layer. full: number with
 * full colour; before: numbers to subtract, or null; cells: cells to mark. */
export function drawChannel(ctx, box, { maze, layer, channel, numbers, before = null, full, cells: marked = [] }, colours) {
  const { rows, columns, number } = cellsOfLayer(layer, numbers, channel)
  ctx.fillStyle = colours.surface
  ctx.fillRect(0, 0, box.w, box.h)
  const [wide, tall] = [box.w / columns, box.h / rows]
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const i = number(row, column)
      if (i >= numbers.length) continue
      const [l, t] = [Math.round(column * wide), Math.round(row * tall)]
      ctx.fillStyle = gradientColour(numbers[i] - (before ? before[i] : 0), full, colours)
      ctx.fillRect(l, t, Math.round((column + 1) * wide) - l, Math.round((row + 1) * tall) - t)
    }
  }
  ctx.strokeStyle = colours.ink
  if (layer.stride === null) {
    ctx.lineWidth = 2
    ctx.strokeRect((channel % columns) * wide + 1, Math.floor(channel / columns) * tall + 1, wide - 2, tall - 2)
    return
  }
  drawWalls(ctx, maze, box, colours)
  ctx.lineWidth = 2
  for (const [row, column] of marked) {
    ctx.strokeStyle = colours.ink
    ctx.strokeRect(column * wide + 1, row * tall + 1, wide - 2, tall - 2)
  }
}

/** Draw lines between walls and free squares of the whole world, cheese and mouse. */
function drawWalls(ctx, maze, box, colours) {
  const whole = { from: 0, side: maze.dim }
  const { cell, x, y } = placesOf(maze, whole, box)
  ctx.strokeStyle = colours.ink
  ctx.globalAlpha = 0.55
  ctx.lineWidth = 1
  ctx.beginPath()
  for (let row = 0; row < maze.dim; row++) {
    for (let column = 0; column < maze.dim; column++) {
      const square = row * maze.dim + column
      const isWall = (r, c) => r < 0 || c < 0 || r >= maze.dim || c >= maze.dim || maze.cells[r * maze.dim + c] === WALL
      if (isWall(row, column)) continue
      const [left, right, top, bottom] = [x(square) - cell / 2, x(square) + cell / 2, y(square) - cell / 2, y(square) + cell / 2]
      for (const [r, c, ax, ay, bx, by] of [[row, column - 1, left, top, left, bottom], [row, column + 1, right, top, right, bottom],
        [row + 1, column, left, top, right, top], [row - 1, column, left, bottom, right, bottom]]) {
        if (!isWall(r, c)) continue
        ctx.moveTo(ax, ay)
        ctx.lineTo(bx, by)
      }
    }
  }
  ctx.stroke()
  ctx.globalAlpha = 1
  drawThings(ctx, maze, whole, box, {}, colours)
}

/** Draw a frame, Uint8 (64 * 64, 3), without interpolation. */
export function drawFrame(ctx, box, frame) {
  const small = document.createElement('canvas')
  small.width = small.height = 64
  const image = new ImageData(64, 64)
  for (let i = 0; i < 4096; i++) {
    image.data.set(frame.subarray(3 * i, 3 * i + 3), 4 * i)
    image.data[4 * i + 3] = 255
  }
  small.getContext('2d').putImageData(image, 0, 0)
  ctx.imageSmoothingEnabled = false
  ctx.drawImage(small, 0, 0, box.w, box.h)
}

/** Format a probability as a percentage. */
export const percent = (value) => (value === null || Number.isNaN(value) ? '–' : `${(100 * value).toFixed(1)} %`)

/** Format a change of a probability, in percentage points. */
export function points(value) {
  const text = Math.abs(100 * value).toFixed(1)
  return Number.isNaN(value) ? '–' : `${text === '0.0' ? '' : value < 0 ? '−' : '+'}${text}`
}
