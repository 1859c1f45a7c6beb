// Attributions as images: colours of features, smoothing, brightness, and the frame in the
// background.
//
// A cell's vector is the sum of the features' colours (unit vectors), weighted by their
// attributions, and is then smoothed over cells. Its length is the brightness of the cell, its
// direction the colour.

const ANCHORS = [[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 1], [0, 0, 1], [1, 0, 1]]
// Okabe and Ito's palette for colour-blind readers, without black.
const APART = ['e69f00', '56b4e9', '009e73', 'f0e442', '0072b2', 'd55e00', 'cc79a7', '999999']
// Defaults that keep all but the strongest cells of an ordinary frame dark.
export const [GAIN, SMOOTHING] = [0.3, 0.5]
const RADIUS = 7 // largest distance of smoothing, in cells
export const PALETTES = { hues: 'hues', apart: 'colour-blind safe' }
export const SIGNS = { two: 'positive and negative', combined: 'absolute', signed: 'signed (blue +, red −)' }
const RAISES = [0.08, 0.24, 1]
const LOWERS = [0.88, 0.13, 0.04]

const unit = (vector) => {
  const length = Math.hypot(...vector)
  return vector.map((value) => value / length)
}

function hue(share) {
  const at = 6 * share
  const n = Math.floor(at)
  const d = at - n
  const weight = n % 2 ? 1 - Math.sin(Math.PI * (1 - d) / 2) : Math.sin(Math.PI * d / 2)
  const [from, to] = [unit(ANCHORS[n % 6]), unit(ANCHORS[(n + 1) % 6])]
  return unit(from.map((value, i) => (1 - weight) * value + weight * to[i]))
}

/** Return the colours of `count` features as vectors of length 1, and white for the residual. */
export function palette(name, count) {
  const features = Array.from({ length: count }, (_, f) => {
    if (name !== 'apart') return hue(f / count)
    const hex = APART[f % APART.length]
    return unit([0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255))
  })
  return [...features, [1, 1, 1]]
}

/** Return a CSS colour of a feature for bars and text, at full brightness. */
export function css(vector) {
  const most = Math.max(...vector)
  return `rgb(${vector.map((value) => Math.round(255 * value / most)).join(' ')})`
}

/** Return the weights of smoothing with a length of `cells`, [[down, right, weight]], with
 * weight = e^(−distance / cells) up to the distance RADIUS; 0 cells: no smoothing. */
export function kernel(cells) {
  if (!(cells > 0)) return [[0, 0, 1]]
  const found = []
  for (let i = -RADIUS; i <= RADIUS; i++) {
    for (let j = -RADIUS; j <= RADIUS; j++) {
      const distance = Math.hypot(i, j)
      if (distance <= RADIUS) found.push([i, j, Math.exp(-distance / cells)])
    }
  }
  return found
}

/** Return the number of the cell that each pixel of a frame belongs to: the cell with the nearest
 * centre, if that is at most half a stride away, else −1. */
export function cellsOfPixels(layer, frame) {
  const [high, wide] = layer.grid
  const along = (size) => Array.from({ length: frame }, (_, pixel) => {
    const cell = Math.floor((pixel - layer.first_pixel) / layer.stride + 0.5)
    return cell >= 0 && cell < size ? cell : -1
  })
  const rows = along(high)
  const columns = along(wide)
  const found = new Int32Array(frame * frame)
  for (let i = 0; i < frame; i++) {
    for (let j = 0; j < frame; j++) {
      found[i * frame + j] = rows[i] < 0 || columns[j] < 0 ? -1 : rows[i] * wide + columns[j]
    }
  }
  return found
}

/** Compute red, green and blue of every cell, before smoothing. cells: quantised attributions at
 * one step, features fastest; colours: by feature; on: whether each feature is included; kind:
 * positive, negative, combined or signed; factor: from quantised attributions to brightness. */
export function coloured(cells, colours, on, kind, factor) {
  const width = colours.length
  const count = cells.length / width
  const found = new Float32Array(3 * count)
  for (let cell = 0, at = 0; cell < count; cell++) {
    let r = 0
    let g = 0
    let b = 0
    let sum = 0
    for (let f = 0; f < width; f++, at++) {
      const value = cells[at]
      if (value === 0 || !on[f]) continue
      sum += value
      const size = kind === 'positive' ? Math.max(value, 0)
        : kind === 'negative' ? Math.max(-value, 0) : Math.abs(value)
      const colour = colours[f]
      r += size * colour[0]
      g += size * colour[1]
      b += size * colour[2]
    }
    if (kind === 'signed') {
      const colour = sum > 0 ? RAISES : LOWERS
      r = Math.abs(sum) * colour[0]
      g = Math.abs(sum) * colour[1]
      b = Math.abs(sum) * colour[2]
    }
    found[3 * cell] = r * factor
    found[3 * cell + 1] = g * factor
    found[3 * cell + 2] = b * factor
  }
  return found
}

/** Smooth the colours of the cells of a grid. */
export function smoothed(colours, [high, wide], weights) {
  if (weights.length === 1) return colours
  const found = new Float32Array(colours.length)
  for (let k = 0; k < weights.length; k++) { // weights in the outer loop, so that whole rows are added
    const [down, right, weight] = weights[k]
    const first = Math.max(0, right)
    const count = 3 * (wide - Math.abs(right))
    for (let y = Math.max(0, down); y < Math.min(high, high + down); y++) {
      const to = 3 * (y * wide + first)
      const from = 3 * ((y - down) * wide + first - right)
      for (let i = 0; i < count; i++) found[to + i] += weight * colours[from + i]
    }
  }
  return found
}

const DIM = 0.6 // brightness of the frame in the background, so that colours stand out

/** Draw the colours of cells over a frame in grey, or over black if `frame` is null; return pixels
 * in the order of ImageData. places: result of cellsOfPixels. */
export function composed(colours, places, frame) {
  const found = new Uint8ClampedArray(4 * places.length)
  for (let pixel = 0; pixel < places.length; pixel++) {
    const at = 4 * pixel
    const grey = frame === null ? 0
      : DIM * (0.299 * frame[at] + 0.587 * frame[at + 1] + 0.114 * frame[at + 2])
    const cell = 3 * places[pixel]
    const length = cell < 0 ? 0 : Math.sqrt(colours[cell] ** 2 + colours[cell + 1] ** 2 + colours[cell + 2] ** 2)
    const bright = Math.min(1, length)
    for (let c = 0; c < 3; c++) {
      const own = length > 0 ? 255 * bright * colours[cell + c] / length : 0
      found[at + c] = own + (1 - bright) * grey
    }
    found[at + 3] = 255
  }
  return found
}
