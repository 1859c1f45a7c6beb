// Drawing of the page's views on canvases.

import { shown, ticks } from '../../shared/lib/statistics.js'
import { coloured, composed, css, smoothed } from './paint.js'

const FONT = 'system-ui, sans-serif'
const scratch = (size) => {
  const canvas = document.createElement('canvas')
  canvas.width = canvas.height = size
  return canvas.getContext('2d', { willReadFrequently: true })
}
let small = null // canvas of one frame in its own resolution

/** Draw a tile of a sheet without interpolation. frame: side of a tile in pixels; tiles: tiles per
 * row. */
export function drawTile(ctx, { x, y, w, h }, sheet, tile, frame, tiles) {
  ctx.imageSmoothingEnabled = false
  ctx.drawImage(sheet, (tile % tiles) * frame, Math.floor(tile / tiles) * frame, frame, frame, x, y, w, h)
}

/** Return the pixels of a tile, in the order of ImageData. */
export function pixelsOf(sheet, tile, frame, tiles) {
  small ??= scratch(frame)
  small.clearRect(0, 0, frame, frame)
  drawTile(small, { x: 0, y: 0, w: frame, h: frame }, sheet, tile, frame, tiles)
  return small.getImageData(0, 0, frame, frame).data
}

/** Return the scale of the images of an output at the shown step, in the unit of the output: the
 * smallest drawn attribution `least`, the strength with full colour `full`, and `unit`, the size of
 * a quantisation step; null while data is loading. Full colour is the frame's largest shown
 * attribution, or, in weaker frames, the median over frames of the largest ones. */
export function scaleOf(page, output) {
  const found = page.attribution(output)
  if (!found) return null
  const { manifest, view, on } = page
  const { quantiles, scales } = page.summary(output)
  const unit = found.peak[view.step] / manifest.levels
  const cells = cellsAt(page, found)
  let most = 0
  for (let at = 0; at < cells.length; at++) {
    if (on[at % on.length]) most = Math.max(most, Math.abs(cells[at]))
  }
  const usual = Math.max(...scales.map((scale, feature) => (on[feature] ? scale : 0)))
  return { least: quantiles[view.above] ?? 0, full: (Math.max(most * unit, usual) || 1) / view.gain, unit }
}

function cellsAt({ layer, colours, view }, found) {
  const size = layer.grid[0] * layer.grid[1] * colours.length
  return found.cells.subarray(view.step * size, (view.step + 1) * size)
}

/** Return the attributions of the shown features to the cell at a place in an image, each from 0 to
 * 1: {row, column, parts: [[feature, value]]}, largest first; null if there is no cell. */
export function valuesAt(page, output, x, y) {
  const found = page.attribution(output)
  const scale = scaleOf(page, output)
  const { frame } = page.manifest
  const cell = page.places[Math.floor(y * frame) * frame + Math.floor(x * frame)]
  if (!found || cell === undefined || cell < 0) return null
  const width = page.colours.length
  const parts = Array.from(cellsAt(page, found).subarray(cell * width, (cell + 1) * width),
    (value, feature) => [feature, value * scale.unit]).filter(([feature]) => page.on[feature])
  parts.sort(([, a], [, b]) => Math.abs(b) - Math.abs(a))
  const wide = page.layer.grid[1]
  return { row: Math.floor(cell / wide), column: cell % wide, parts }
}

/** Draw the attributions of an output at the shown step as an image; return false while data is
 * loading. */
export function drawAttribution(ctx, box, page, output, kind) {
  const { manifest, view, layer } = page
  const found = page.attribution(output)
  const [sheet, tile] = page.frame(view.trajectory, view.step)
  if (!found || !sheet) return false
  const { least, full, unit } = scaleOf(page, output)
  const colours = smoothed(coloured(cellsAt(page, found), page.colours, page.on,
    kind === 'gradient' ? 'signed' : kind, unit > 0 ? { least: least / unit, full: full / unit } : { least: 0, full: 1 }),
  layer.grid, page.weights)
  const frame = view.overlay ? pixelsOf(sheet, tile, manifest.frame, manifest.tiles) : null
  small ??= scratch(manifest.frame)
  small.putImageData(new ImageData(composed(colours, page.places, frame), manifest.frame), 0, 0)
  ctx.imageSmoothingEnabled = false
  ctx.drawImage(small.canvas, box.x, box.y, box.w, box.h)
  return true
}

/** Return the totals of one step by feature, the residual last; count: features plus 1. */
export function totalsAt(found, step, count) {
  return found.totals.subarray(step * count, (step + 1) * count)
}

/** Compute a quantile by linear interpolation. */
export function quantile(values, share) {
  const sorted = Float64Array.from(values).sort()
  const at = share * (sorted.length - 1)
  const below = Math.floor(at)
  return sorted[below] + (at - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below])
}

/** Return the range of the bar chart's axis for a whole trajectory, [lowest, highest], as
 * published. */
export function barRange(totals, count) {
  const highest = []
  const depths = []
  for (let begin = 0; begin < totals.length; begin += count) {
    const step = totals.subarray(begin, begin + count)
    highest.push(Math.max(...step))
    depths.push(-Math.min(...step))
  }
  const reach = (values) => Math.max(0, quantile(values, 0.9), rangeOf(values)[1] / 5)
  const [bottom, top] = [0 - reach(depths), reach(highest)]
  return top > bottom ? [bottom, top] : [-1, 1]
}

const ORDINARY = 0.8 // quantile of a trajectory's steps that fits into the range of a chart

/** Compute the lowest and the highest level of the waterfall at each step of a trajectory, between
 * baseline and output, and the range of ordinary steps. */
export function waterfallLevels({ totals, baseline, output }, count) {
  const lowest = new Float32Array(output.length)
  const highest = new Float32Array(output.length)
  for (let t = 0; t < output.length; t++) {
    let level = baseline[t]
    let low = Math.min(level, output[t])
    let high = Math.max(level, output[t])
    for (let f = 0; f < count; f++) {
      level += totals[t * count + f]
      low = Math.min(low, level)
      high = Math.max(high, level)
    }
    lowest[t] = low
    highest[t] = high
  }
  return { lowest, highest, range: [quantile(lowest, 1 - ORDINARY), quantile(highest, ORDINARY)] }
}

/** Return the range of the waterfall's axis at one step: of ordinary steps and the step's own
 * levels. */
export function waterfallRange({ lowest, highest, range }, step) {
  const [low, high] = [Math.min(range[0], lowest[step]), Math.max(range[1], highest[step])]
  return high > low ? [low, high] : [low - 1, low + 1]
}

const LEFT = 42
const BOTTOM = 18

function axis(ctx, { x, y, w, h }, [low, high], colours) {
  const top = y + 8
  const bottom = y + h - BOTTOM
  const pad = (high - low) * 0.03
  const sy = (value) => bottom + (value - low + pad) / (high - low + 2 * pad) * (top - bottom)
  ctx.font = `11px ${FONT}`
  ctx.textAlign = 'right'
  ctx.textBaseline = 'middle'
  ctx.lineWidth = 1
  for (const value of ticks(low, high, 5)) {
    const at = Math.round(sy(value)) + 0.5
    ctx.strokeStyle = value === 0 ? colours.muted : colours.line
    line(ctx, x + LEFT, at, x + w, at)
    ctx.fillStyle = colours.muted
    ctx.fillText(String(value).replace('-', '−'), x + LEFT - 5, at)
  }
  return sy
}

function line(ctx, x0, y0, x1, y1) {
  ctx.beginPath()
  ctx.moveTo(x0, y0)
  ctx.lineTo(x1, y1)
  ctx.stroke()
}

/** Clip a value to a range, so that values beyond a chart are drawn at its edge. */
const within = ([low, high], value) => Math.max(low, Math.min(high, value))

/** Mark a bar that is longer than drawn: a gap near its end, and its value. */
function breakMark(ctx, x, w, end, inward, value, colours) {
  const at = end + 14 * inward
  ctx.fillStyle = colours.surface
  ctx.strokeStyle = colours.ink
  ctx.lineWidth = 1
  ctx.beginPath()
  ctx.moveTo(x - 2, at + 4)
  ctx.lineTo(x + w + 2, at - 2)
  ctx.lineTo(x + w + 2, at + 2)
  ctx.lineTo(x - 2, at + 8)
  ctx.fill()
  line(ctx, x - 2, at + 4, x + w + 2, at - 2)
  line(ctx, x - 2, at + 8, x + w + 2, at + 2)
  const text = shown(value)
  ctx.font = `bold 11px ${FONT}`
  const wide = ctx.measureText(text).width + 4
  const middle = end + 30 * inward
  ctx.fillStyle = colours.surface
  ctx.fillRect(x + w / 2 - wide / 2, middle - 7, wide, 14)
  ctx.fillStyle = colours.ink
  ctx.textAlign = 'center'
  ctx.textBaseline = 'middle'
  ctx.fillText(text, x + w / 2, middle)
}

function bar(ctx, x, w, from, to, fill, colours, dashed) {
  ctx.fillStyle = fill
  const box = [x, Math.min(from, to), w, Math.max(Math.abs(to - from), 1)]
  ctx.fillRect(...box)
  ctx.setLineDash(dashed ? [3, 2] : [])
  ctx.strokeStyle = colours.muted
  ctx.lineWidth = dashed ? 1 : 0.75
  ctx.strokeRect(...box)
  ctx.setLineDash([])
}

function under(ctx, text, middle, bottom, colours, bold, room = 60) {
  ctx.fillStyle = bold ? colours.ink : colours.muted
  ctx.font = `${bold ? 'bold ' : ''}11px ${FONT}`
  ctx.textAlign = 'center'
  ctx.textBaseline = 'top'
  ctx.fillText(text, middle, bottom + 4, room)
}

/** Draw one bar per feature and one for the residual; bars that leave the range are broken. */
export function drawBars(ctx, box, totals, range, on, features, colours) {
  const sy = axis(ctx, box, range, colours)
  const width = (box.w - LEFT) / totals.length
  totals.forEach((total, f) => {
    const last = f === totals.length - 1
    const x = box.x + LEFT + f * width
    ctx.globalAlpha = on[f] || last ? 1 : 0.25
    bar(ctx, x + width * 0.14, width * 0.72, sy(0), sy(within(range, total)),
      last ? colours.surface : css(features[f]), colours, last)
    ctx.globalAlpha = 1
    const end = within(range, total)
    if (end !== total) breakMark(ctx, x + width * 0.14, width * 0.72, sy(end), total > 0 ? 1 : -1, total, colours)
    under(ctx, last ? 'res.' : f + 1, x + width / 2, box.y + box.h - BOTTOM, colours, on[f])
  })
}

/** Draw a waterfall from the baseline, feature by feature, to the output. */
export function drawWaterfall(ctx, box, { baseline, totals, output }, range, on, features, colours) {
  const onAxis = axis(ctx, box, range, colours)
  const sy = (value) => onAxis(within(range, value))
  const width = (box.w - LEFT) / (totals.length + 2)
  const bottom = box.y + box.h - BOTTOM
  const place = (k) => box.x + LEFT + (k + 0.5) * width
  const stop = (k, level, text) => {
    ctx.strokeStyle = colours.ink
    ctx.lineWidth = 2.5
    line(ctx, place(k) - width * 0.42, sy(level), place(k) + width * 0.42, sy(level))
    under(ctx, text, place(k), bottom, colours, true, width - 3)
  }
  stop(0, baseline, 'G(0)')
  let level = baseline
  totals.forEach((total, f) => {
    const last = f === totals.length - 1
    ctx.strokeStyle = colours.muted
    ctx.lineWidth = 0.75
    line(ctx, place(f) + width * 0.36, sy(level), place(f + 1) + width * 0.36, sy(level))
    ctx.globalAlpha = on[f] || last ? 1 : 0.25
    bar(ctx, place(f + 1) - width * 0.36, width * 0.72, sy(level), sy(level + total),
      last ? colours.surface : css(features[f]), colours, last)
    ctx.globalAlpha = 1
    level += total
    under(ctx, last ? 'res.' : f + 1, place(f + 1), bottom, colours, on[f], width - 3)
  })
  ctx.strokeStyle = colours.muted
  ctx.lineWidth = 0.75
  line(ctx, place(totals.length) + width * 0.36, sy(level), place(totals.length + 1), sy(level))
  stop(totals.length + 1, output, 'G(a)')
}

export const LANE = 44
export const STRIP_LANE = 56

/** Return the height of a timeline with a number of curves, in pixels. */
export const timelineHeight = (curves) => STRIP_LANE + curves * LANE + 6

/** Return the step at the left edge of the timeline, `begin`, and the width of a step, `pixels`. */
export function timelineScale({ window, length, step }, width) {
  if (window >= length) return { begin: 0, pixels: width / length }
  return { begin: step + 0.5 - window / 2, pixels: width / window }
}

/** Draw a strip of the frames of a trajectory, and curves below it. data: {strip: image; lines:
 * {columns, steps} of the strip; frame: side of a frame; length: number of steps; step: shown step;
 * window: visible steps; ends: last steps of episodes; marks: marked steps; failed: [[step, cause]]
 * in order; curves: [{title, colour, values, range}], with values of the whole trajectory}. */
export function drawTimeline(ctx, { x, y, w }, data, colours) {
  const { begin, pixels } = timelineScale(data, w)
  const from = Math.max(0, Math.floor(begin))
  const to = Math.min(data.length, Math.ceil(begin + w / pixels))
  const at = (t) => x + (t - begin) * pixels
  ctx.fillStyle = colours.line
  ctx.fillRect(x, y, w, STRIP_LANE - 8)
  ctx.imageSmoothingEnabled = pixels < 2
  const { columns, steps } = data.lines
  for (let first = Math.floor(from / steps) * steps; first < to && data.strip; first += steps) {
    const [a, b] = [Math.max(from, first), Math.min(to, first + steps)]
    ctx.drawImage(data.strip, (a - first) * columns, first / steps * data.frame, (b - a) * columns,
      data.frame, at(a), y, (b - a) * pixels, STRIP_LANE - 8)
  }
  for (const t of data.marks) {
    if (t < from || t >= to) continue
    ctx.fillStyle = colours.accent
    ctx.beginPath()
    ctx.moveTo(at(t + 0.5) - 5, y)
    ctx.lineTo(at(t + 0.5) + 5, y)
    ctx.lineTo(at(t + 0.5), y + 8)
    ctx.fill()
  }
  data.curves.forEach((curve, k) => drawCurve(ctx,
    { x, y: y + STRIP_LANE + k * LANE, w, h: LANE - 4 }, curve, { from, to, at, pixels }, data, colours))
  ctx.strokeStyle = colours.muted
  ctx.lineWidth = 1
  const height = timelineHeight(data.curves.length) - 6
  for (const t of data.ends) {
    if (t < from || t >= to) continue
    line(ctx, Math.round(at(t + 1)) + 0.5, y, Math.round(at(t + 1)) + 0.5, y + height)
  }
  data.failed.forEach(([t, cause], k) => {
    if (t < from || t >= to) return
    ctx.fillStyle = colours.lowers
    ctx.fillRect(at(t + 1) - 1, y, 3, height)
    const room = at(t + 1) - Math.max(x, k ? at(data.failed[k - 1][0] + 1) : x)
    ctx.font = `11px ${FONT}`
    const wide = ctx.measureText(cause).width + 8
    if (wide > room) return
    ctx.fillRect(at(t + 1) - wide, y + STRIP_LANE - 24, wide, 16)
    ctx.fillStyle = colours.surface
    ctx.textAlign = 'left'
    ctx.textBaseline = 'middle'
    ctx.fillText(cause, at(t + 1) - wide + 4, y + STRIP_LANE - 15)
  })
  ctx.strokeStyle = colours.ink
  ctx.lineWidth = 2
  const now = at(data.step + 0.5)
  line(ctx, now, y, now, y + height)
  ctx.strokeStyle = colours.surface
  ctx.lineWidth = 1
  ctx.strokeRect(now - Math.max(pixels, 3) / 2 - 1, y + 0.5, Math.max(pixels, 3) + 2, STRIP_LANE - 9)
}

function drawCurve(ctx, { x, y, w, h }, curve, { from, to, at, pixels }, data, colours) {
  const { values, colour, title } = curve
  ctx.strokeStyle = colours.line
  ctx.lineWidth = 1
  line(ctx, x, y + h + 1.5, x + w, y + h + 1.5)
  if (!values) {
    ctx.fillStyle = colours.muted
    ctx.font = `11px ${FONT}`
    ctx.textAlign = 'left'
    ctx.textBaseline = 'top'
    ctx.fillText(`${title}: not available for this layer, or still loading`, x + 4, y)
    return
  }
  const [low, high] = curve.range
  const sy = (value) => y + h - 3 - (value - low) / (high - low || 1) * (h - 18)
  if (low < 0 && high > 0) {
    ctx.strokeStyle = colours.line
    line(ctx, x, Math.round(sy(0)) + 0.5, x + w, Math.round(sy(0)) + 0.5)
  }
  ctx.strokeStyle = colour
  ctx.lineWidth = 1.5
  ctx.beginPath()
  if (pixels >= 1) {
    for (let t = from; t < to; t++) ctx.lineTo(at(t + 0.5), sy(values[t]))
  } else { // the lowest and the highest value of all steps in a column of pixels
    for (let column = Math.floor(at(from)); column < at(to); column++) {
      const first = Math.max(from, Math.floor(from + (column - at(from)) / pixels))
      const last = Math.min(to, Math.max(first + 1, Math.floor(from + (column + 1 - at(from)) / pixels)))
      let [least, most] = [Infinity, -Infinity]
      for (let t = first; t < last; t++) {
        least = Math.min(least, values[t])
        most = Math.max(most, values[t])
      }
      if (most < least) continue
      ctx.lineTo(column + 0.5, sy(most))
      ctx.lineTo(column + 0.5, sy(least))
    }
  }
  ctx.stroke()
  ctx.fillStyle = colours.surface
  ctx.globalAlpha = 0.8
  ctx.font = `12px ${FONT}`
  const text = `${title} ${shown(values[data.step])}`
  ctx.fillRect(x, y, ctx.measureText(text).width + 8, 14)
  ctx.globalAlpha = 1
  ctx.fillStyle = colours.ink
  ctx.textAlign = 'left'
  ctx.textBaseline = 'top'
  ctx.fillText(text, x + 4, y + 1)
}

/** Return the lowest and the highest value of an array. */
export function rangeOf(values) {
  let [low, high] = [Infinity, -Infinity]
  for (const value of values) {
    if (value < low) low = value
    if (value > high) high = value
  }
  return [low, high]
}

/** Compute the opacity of each example from its strength, as published. */
export function opacities(strengths, thumbnail) {
  const all = Float64Array.from(strengths).sort()
  const most = all.at(-1)
  const at = 0.9 * (all.length - 1)
  const below = Math.floor(at)
  const quantile = all[below] + (at - below) * ((all[below + 1] ?? all[below]) - all[below])
  const full = Math.max(quantile, thumbnail ? most : most / 10)
  const least = 15 / 255
  return Array.from(strengths, (strength) => {
    if (!(full > 0) || (thumbnail && strength === 0)) return thumbnail ? 0 : least
    return Math.min(1, strength / full * (1 - least) + least)
  })
}

/** Draw the patches of observations in a grid; return false while data is loading. side: side of a
 * patch in pixels of the frame; thumbnail: whether it is the legend's thumbnail; solid: draw all
 * patches opaque. */
export function drawExamples(ctx, box, page, examples, feature, side, thumbnail, solid) {
  const { frame, tiles } = page.manifest
  const [rows, columns] = examples.grid
  const first = feature * rows * columns
  const last = first + rows * columns
  const alpha = opacities(examples.strength.subarray(first, last), thumbnail)
  const [w, h] = [box.w / columns, box.h / rows]
  let whole = true
  ctx.imageSmoothingEnabled = side / frame > 0.3
  for (let place = 0; place < rows * columns; place++) {
    const number = examples.observation[first + place]
    if (number < 0 || alpha[place] === 0) continue
    const [sheet, tile] = page.observation(number)
    if (!sheet) {
      whole = false
      continue
    }
    const [down, right] = examples.centre.subarray(2 * (first + place), 2 * (first + place) + 2)
    const target = { x: box.x + (place % columns) * w, y: box.y + Math.floor(place / columns) * h, w, h }
    ctx.globalAlpha = solid ? 1 : alpha[place]
    drawPatch(ctx, target, sheet, tile, down - side / 2 + 0.5, right - side / 2 + 0.5, side, frame, tiles)
  }
  ctx.globalAlpha = 1
  return whole
}

/** Draw a square part of an observation, with a checkerboard beyond the frame. */
function drawPatch(ctx, { x, y, w, h }, sheet, tile, top, left, side, frame, tiles) {
  const [y0, y1] = [Math.max(0, top), Math.min(frame, top + side)]
  const [x0, x1] = [Math.max(0, left), Math.min(frame, left + side)]
  if (top < 0 || left < 0 || top + side > frame || left + side > frame) {
    for (let i = 0; i < 4; i++) {
      for (let j = 0; j < 4; j++) {
        ctx.fillStyle = (i + j) % 2 ? '#fff' : '#bfbfbf'
        ctx.fillRect(x + j * w / 4, y + i * h / 4, w / 4, h / 4)
      }
    }
  }
  if (y1 <= y0 || x1 <= x0) return
  const scale = w / side
  ctx.drawImage(sheet, (tile % tiles) * frame + x0, Math.floor(tile / tiles) * frame + y0, x1 - x0, y1 - y0,
    x + (x0 - left) * scale, y + (y0 - top) * (h / side), (x1 - x0) * scale, (y1 - y0) * (h / side))
}

/** Compute the lowest and the highest end of the stacked bars at each step, and the range of
 * ordinary steps. width: features plus 1. */
export function stackLevels({ totals, older }, width) {
  const size = totals.length / older.length
  const lowest = new Float32Array(older.length)
  const highest = new Float32Array(older.length)
  older.forEach((value, t) => {
    let low = Math.min(value, 0)
    let high = Math.max(value, 0)
    for (let from = t * size; from < (t + 1) * size; from += width) {
      let down = 0
      let up = 0
      for (let f = from; f < from + width; f++) {
        if (totals[f] < 0) down += totals[f]
        else up += totals[f]
      }
      low = Math.min(low, down)
      high = Math.max(high, up)
    }
    lowest[t] = low
    highest[t] = high
  })
  return { lowest, highest, range: [quantile(lowest, 1 - ORDINARY), quantile(highest, ORDINARY)] }
}

/** Return the lag, in steps, at a horizontal position in the chart of the last steps; null for
 * older memory. */
export function lagAt(x, width, lags) {
  const column = Math.floor((x - LEFT) / (width - LEFT) * (lags + 1))
  return column < 1 ? null : Math.min(lags - column, lags - 1)
}

/** Draw a bar for older memory, and stacked bars of the features for each of the last steps up to
 * this one. */
export function drawLags(ctx, box, { older, totals }, lags, chosen, range, on, features, colours) {
  const sy = axis(ctx, box, range, colours)
  const width = (box.w - LEFT) / (lags + 1)
  const bottom = box.y + box.h - BOTTOM
  const count = features.length
  const at = (column) => box.x + LEFT + column * width
  bar(ctx, at(0) + width * 0.14, width * 0.72, sy(0), sy(older), colours.neutral, colours, false)
  under(ctx, 'older', at(0.5), bottom, colours, false)
  for (let lag = 0; lag < lags; lag++) {
    const column = lags - lag
    if (lag === chosen) {
      ctx.fillStyle = colours.line
      ctx.fillRect(at(column), box.y, width, box.h)
    }
    let [down, up] = [0, 0]
    for (let f = 0; f < count; f++) {
      const total = totals[lag * count + f]
      const from = total < 0 ? down : up
      ctx.globalAlpha = on[f] || f === count - 1 ? 1 : 0.25
      bar(ctx, at(column) + width * 0.14, width * 0.72, sy(from), sy(from + total),
        f === count - 1 ? colours.surface : css(features[f]), colours, f === count - 1)
      ctx.globalAlpha = 1
      if (total < 0) down += total
      else up += total
    }
    under(ctx, lag ? `−${lag}` : 'now', at(column + 0.5), bottom, colours, lag === chosen)
  }
}

/** Draw a histogram, labelled with its lowest and its highest value. */
export function drawCounts(ctx, { x, y, w, h }, { low, high, counts }, colour, colours) {
  const most = Math.max(...counts, 1)
  const bottom = y + h - BOTTOM
  counts.forEach((count, k) => {
    const tall = count / most * (h - BOTTOM - 4)
    ctx.fillStyle = colour
    ctx.fillRect(x + k * w / counts.length, bottom - tall, w / counts.length - 1, tall)
  })
  ctx.strokeStyle = colours.muted
  ctx.lineWidth = 1
  line(ctx, x, bottom + 0.5, x + w, bottom + 0.5)
  ctx.fillStyle = colours.muted
  ctx.font = `11px ${FONT}`
  ctx.textBaseline = 'top'
  for (const [align, at, value] of [['left', x, low], ['right', x + w, high]]) {
    ctx.textAlign = align
    ctx.fillText(shown(value), at, bottom + 4)
  }
}
