// Attributions as images: colours of features, sparsity, smoothing, opacity, and the frame in the
// background.
//
// Attributions of a feature to a cell whose size is below a percentile of the layer are not drawn.
// A cell's strength is the sum of the sizes of the others; its colour is the mean of the features'
// colours, weighted by these sizes. Both are smoothed over cells. The opacity of a cell is the
// square root of its strength, as a share of the strength with full colour.

const ANCHORS = [[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 1], [0, 0, 1], [1, 0, 1]]
// Colours whose smallest distance in CIELAB, among each other and to white, is large for readers
// with and without each kind of colour blindness (tests/test_attribution_page.py).
const APART = ['fb3401', 'f4d730', '3177e7', '1bff81', 'b9affe', 'ce5a4a', '7bcc98', 'bd689c']
export const [GAIN, SMOOTHING, ABOVE] = [1, 0, 99]
const RADIUS = 7 // largest distance of smoothing, in cells
export const PALETTES = { apart: 'colour-blind safe', hues: 'hues' }
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
  const mixed = from.map((value, i) => (1 - weight) * value + weight * to[i])
  return mixed.map((value) => value / Math.max(...mixed))
}

/** Return the colours of `count` features, red, green and blue from 0 to 1, and white for the
 * residual. */
export function palette(name, count) {
  const features = Array.from({ length: count }, (_, f) => {
    if (name !== 'apart') return hue(f / count)
    const hex = APART[f % APART.length]
    return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
  })
  return [...features, [1, 1, 1]]
}

/** Return a colour as CSS. */
export const css = (colour) => `rgb(${colour.map((value) => Math.round(255 * value)).join(' ')})`

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

/** Compute red, green and blue of every cell, times its strength, and its strength, before
 * smoothing. cells: quantised attributions at one step, features fastest; colours: by feature; on:
 * whether each feature is included; kind: positive, negative, combined or signed; scale: {least,
 * full}, the smallest drawn attribution and the strength with full colour, quantised. */
export function coloured(cells, colours, on, kind, { least, full }) {
  const width = colours.length
  const count = cells.length / width
  const found = new Float32Array(4 * count)
  for (let cell = 0, at = 0; cell < count; cell++) {
    let [r, g, b, strength, sum] = [0, 0, 0, 0, 0]
    for (let f = 0; f < width; f++, at++) {
      const value = cells[at]
      if (value === 0 || !on[f] || Math.abs(value) < least) continue
      sum += value
      const size = kind === 'positive' ? Math.max(value, 0)
        : kind === 'negative' ? Math.max(-value, 0) : Math.abs(value)
      const colour = colours[f]
      strength += size
      r += size * colour[0]
      g += size * colour[1]
      b += size * colour[2]
    }
    if (kind === 'signed') {
      strength = Math.abs(sum)
      ;[r, g, b] = (sum > 0 ? RAISES : LOWERS).map((value) => strength * value)
    }
    found.set([r / full, g / full, b / full, strength / full], 4 * cell)
  }
  return found
}

/** Smooth colours and strengths over the cells of a grid. */
export function smoothed(colours, [high, wide], weights) {
  if (weights.length === 1) return colours
  const found = new Float32Array(colours.length)
  for (let k = 0; k < weights.length; k++) { // weights in the outer loop, so that whole rows are added
    const [down, right, weight] = weights[k]
    const first = Math.max(0, right)
    const count = 4 * (wide - Math.abs(right))
    for (let y = Math.max(0, down); y < Math.min(high, high + down); y++) {
      const to = 4 * (y * wide + first)
      const from = 4 * ((y - down) * wide + first - right)
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
    const cell = 4 * places[pixel]
    const strength = cell < 0 ? 0 : colours[cell + 3]
    const opacity = Math.min(1, Math.sqrt(strength))
    for (let c = 0; c < 3; c++) {
      const own = strength > 0 ? 255 * opacity * colours[cell + c] / strength : 0
      found[at + c] = own + (1 - opacity) * grey
    }
    found[at + 3] = 255
  }
  return found
}
