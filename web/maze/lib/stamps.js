// Frames of mazes composed from stamps, as in maze/field/stamps.py, which describes the arrays.

import { CHEESE, WALL } from './grid.js'

const PIXELS = 64 * 64

/** Return the frame of a maze without the mouse, Uint8 (64 * 64, 3). */
function withoutMouse(stamps, maze) {
  const { cells, colours } = stamps
  const number = cells.length / PIXELS // number of cells that may be visible at a pixel
  const frame = new Uint8Array(PIXELS * 3)
  for (let pixel = 0; pixel < PIXELS; pixel++) {
    let colour = 0
    for (let k = 0; k < number; k++) {
      const cell = maze.cells[cells[k * PIXELS + pixel]] // undefined for padding after the last cell
      const content = cell === WALL ? 1 : cell === CHEESE ? 2 : 0
      colour = colours[(content * number + k) * PIXELS + pixel] || colour
    }
    frame[3 * pixel] = colour & 255
    frame[3 * pixel + 1] = (colour >> 8) & 255
    frame[3 * pixel + 2] = (colour >> 16) & 255
  }
  return frame
}

/** Return a function of the mouse's square and facing that returns a frame, Uint8 (64 * 64, 3). */
export function framesOf(stamps, maze) {
  const empty = withoutMouse(stamps, maze)
  const { mouse_pixels: pixels, mouse_colours: colours, mouse_opacity: opacity } = stamps
  const number = pixels.length / (2 * maze.dim ** 2)
  return (square, facing) => {
    const frame = empty.slice()
    const from = (square * 2 + facing) * number
    for (let i = from; i < from + number; i++) {
      for (let c = 0; c < 3; c++) {
        const at = 3 * pixels[i] + c
        const product = empty[at] * (255 - opacity[i])
        frame[at] = colours[3 * i + c] + ((product + (product >> 8) + 128) >> 8)
      }
    }
    return frame
  }
}
