// Drawing on canvases, for the page and the video.

import { shown, ticks } from './statistics.js'

const FONT = 'system-ui, sans-serif'
const PATH_ALPHA = 0.9

const COLOURS = ['ink', 'muted', 'line', 'surface', 'accent', 'other', 'recorded', 'simulated', 'neutral',
  'raises', 'lowers']

/** Return the colours of the current theme by name, from the style sheet; more: names of further
 * colours. */
export function coloursOf(element, more = []) {
  const style = getComputedStyle(element)
  return Object.fromEntries([...COLOURS, ...more].map(
    (name) => [name, style.getPropertyValue(`--${name}`).trim()]))
}

const mixed = (share, from, to) => `color-mix(in srgb, ${to} ${(share * 100).toFixed(1)}%, ${from})`

/** Return the colour of a gradient: blue raises, red lowers, as in saliency images; `full` has full
 * colour. */
export function gradientColour(gradient, full, colours) {
  if (!Number.isFinite(gradient) || !(full > 0)) return colours.neutral
  const share = Math.min(Math.abs(gradient) / full, 1) ** 0.7
  return mixed(share, colours.neutral, gradient > 0 ? colours.raises : colours.lowers)
}

/** Draw one image of a strip without interpolation. */
export function drawPicture(ctx, { x, y, w, h }, strip, step, [high, wide]) {
  ctx.imageSmoothingEnabled = false
  const last = strip.width / wide - 1
  ctx.drawImage(strip, Math.min(step, last) * wide, 0, wide, high, x, y, w, h)
}

/** Draw a message in an empty view, broken into lines. */
export function drawMessage(ctx, { x, y, w, h }, text, colours) {
  ctx.fillStyle = colours.muted
  ctx.font = `13px ${FONT}`
  ctx.textAlign = 'center'
  ctx.textBaseline = 'middle'
  const lines = []
  for (const word of text.split(' ')) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word
    if (lines.length && ctx.measureText(longer).width < w - 24) lines[lines.length - 1] = longer
    else lines.push(word)
  }
  lines.forEach((line, i) => {
    ctx.fillText(line, x + w / 2, y + h / 2 + (i - (lines.length - 1) / 2) * 18)
  })
}

function linear(from, to, a, b) {
  const factor = (b - a) / (to - from || 1)
  return (value) => a + (value - from) * factor
}

const MARGIN = { left: 40, right: 8, top: 8, bottom: 34 }

/** Return the scales of a scatter plot, {sx, sy}, from values to positions in a box. */
export function scatterScales({ x, y, w, h }, rangeX, rangeY) {
  const pad = (range) => (range[1] - range[0] || 1) * 0.04
  return {
    sx: linear(rangeX[0] - pad(rangeX), rangeX[1] + pad(rangeX), x + MARGIN.left, x + w - MARGIN.right),
    sy: linear(rangeY[0] - pad(rangeY), rangeY[1] + pad(rangeY), y + h - MARGIN.bottom, y + MARGIN.top)
  }
}

/** Draw axes and clouds of a scatter plot. clouds: [{points(add), colour, alpha, size}], where
 * points calls add(x, y) for every point. */
export function drawCloud(ctx, box, scales, axes, clouds, colours) {
  const { x, y, w, h } = box
  const bottom = y + h - MARGIN.bottom
  const left = x + MARGIN.left
  ctx.font = `11px ${FONT}`
  ctx.lineWidth = 1
  ctx.textBaseline = 'top'
  ctx.textAlign = 'center'
  for (const value of ticks(axes.rangeX[0], axes.rangeX[1], 6)) {
    const at = Math.round(scales.sx(value)) + 0.5
    ctx.strokeStyle = value === 0 ? colours.muted : colours.line
    line(ctx, at, y + MARGIN.top, at, bottom)
    ctx.fillStyle = colours.muted
    ctx.fillText(shortNumber(value), at, bottom + 4)
  }
  ctx.textAlign = 'right'
  ctx.textBaseline = 'middle'
  for (const value of ticks(axes.rangeY[0], axes.rangeY[1], 6)) {
    const at = Math.round(scales.sy(value)) + 0.5
    ctx.strokeStyle = value === 0 ? colours.muted : colours.line
    line(ctx, left, at, x + w - MARGIN.right, at)
    ctx.fillStyle = colours.muted
    ctx.fillText(shortNumber(value), left - 5, at)
  }
  for (const { points, colour, alpha, size } of clouds) {
    ctx.fillStyle = colour
    ctx.globalAlpha = alpha
    points((a, b) => ctx.fillRect(scales.sx(a) - size / 2, scales.sy(b) - size / 2, size, size))
  }
  ctx.globalAlpha = 1
  ctx.fillStyle = colours.ink
  ctx.font = `12px ${FONT}`
  ctx.textAlign = 'center'
  ctx.textBaseline = 'bottom'
  ctx.fillText(axes.x, (left + x + w - MARGIN.right) / 2, y + h - 1)
  ctx.save()
  ctx.translate(x + 10, (y + MARGIN.top + bottom) / 2)
  ctx.rotate(-Math.PI / 2)
  ctx.textBaseline = 'middle'
  ctx.fillText(axes.y, 0, 0)
  ctx.restore()
}

/** Draw the trajectory of a sample, with a large point at the current step; later points are
 * hollow. */
export function drawPath(ctx, scales, points, current, colour, colours) {
  const at = points.map(([a, b]) => [scales.sx(a), scales.sy(b)])
  ctx.lineJoin = 'round'
  ctx.strokeStyle = colours.surface
  ctx.lineWidth = 4
  polyline(ctx, at)
  ctx.strokeStyle = colour
  ctx.globalAlpha = PATH_ALPHA
  ctx.lineWidth = 1.75
  polyline(ctx, at)
  ctx.globalAlpha = 1
  at.forEach(([px, py], t) => dot(ctx, px, py, 2.5, t <= current ? colour : colours.surface, colour, 1.25))
  dot(ctx, ...at[current], 6.5, colour, colours.surface, 2)
}

/** Draw bars of values, coloured by gradients, with their indices below; indices in `marked` are
 * bold. axes: {range, x, y}, for values from -range to range, and titles; full: gradient with full
 * colour. */
export function drawBars(ctx, { x, y, w, h }, values, gradients, full, axes, marked, colours) {
  const { range } = axes
  const left = x + MARGIN.left
  const right = x + w - MARGIN.right
  const bottom = y + h - MARGIN.bottom
  const sy = linear(-range, range, bottom, y + MARGIN.top)
  ctx.font = `11px ${FONT}`
  ctx.textAlign = 'right'
  ctx.textBaseline = 'middle'
  ctx.lineWidth = 1
  for (const value of ticks(-range, range, 6)) {
    const at = Math.round(sy(value)) + 0.5
    ctx.strokeStyle = value === 0 ? colours.muted : colours.line
    line(ctx, left, at, right, at)
    ctx.fillStyle = colours.muted
    ctx.fillText(shortNumber(value), left - 5, at)
  }
  const width = (right - left) / values.length
  values.forEach((value, index) => {
    const from = sy(0)
    const to = sy(Math.max(-range, Math.min(range, value)))
    const middle = left + (index + 0.5) * width
    const gradient = gradients ? gradients[index] : NaN
    ctx.fillStyle = gradientColour(gradient, full, colours)
    ctx.strokeStyle = colours.muted
    const box = [middle - width * 0.34, Math.min(from, to), width * 0.68, Math.max(Math.abs(to - from), 1)]
    ctx.fillRect(...box)
    ctx.lineWidth = 0.75
    ctx.strokeRect(...box)
    // The sign, for colour-blind readers.
    if (Math.abs(gradient) > 0.1 * full) {
      ctx.fillStyle = colours.ink
      ctx.font = `bold 12px ${FONT}`
      ctx.textAlign = 'center'
      ctx.textBaseline = 'middle'
      ctx.fillText(gradient > 0 ? '+' : '−', middle, to + (value >= 0 ? -7 : 8))
    }
    const isMarked = marked.includes(index)
    ctx.fillStyle = isMarked ? colours.ink : colours.muted
    ctx.font = `${isMarked ? 'bold ' : ''}11px ${FONT}`
    ctx.textAlign = 'center'
    ctx.textBaseline = 'top'
    ctx.fillText(index, middle, bottom + 4)
  })
  ctx.fillStyle = colours.ink
  ctx.font = `12px ${FONT}`
  ctx.textBaseline = 'bottom'
  ctx.fillText(axes.x, (left + right) / 2, y + h - 1)
  ctx.save()
  ctx.translate(x + 10, (y + MARGIN.top + bottom) / 2)
  ctx.rotate(-Math.PI / 2)
  ctx.textBaseline = 'middle'
  ctx.fillText(axes.y, 0, 0)
  ctx.restore()
}

/** Draw the colour key of the bars. */
export function drawGradientKey(ctx, { x, y, w, h }, full, colours) {
  const steps = 64
  for (let i = 0; i < steps; i++) {
    ctx.fillStyle = gradientColour((2 * i / (steps - 1) - 1) * full, full, colours)
    ctx.fillRect(x + (i / steps) * w, y, w / steps + 1, h * 0.4)
  }
  ctx.fillStyle = colours.muted
  ctx.font = `11px ${FONT}`
  ctx.textBaseline = 'bottom'
  for (const [align, at, text] of [['left', x, `− ${shown(full)} lowers`], ['center', x + w / 2, '0'],
    ['right', x + w, `raises + ${shown(full)}`]]) {
    ctx.textAlign = align
    ctx.fillText(text, at, y + h)
  }
}

const THUMBNAIL = 60
const BELOW_THUMBNAILS = 56
const NAMES = 60 // width of the names of the strips
const thumbnailSize = (width, columns) => Math.min((width - NAMES) / columns - 4, THUMBNAIL)

/** Return the step at a horizontal position in a timeline of this width. */
export const timelineStep = (x, width, columns) =>
  Math.max(0, Math.floor((x - NAMES) / (width - NAMES) * columns))

/** Return the height of a timeline of this width with a number of strips. */
export const timelineHeight = (width, columns, strips) =>
  Math.round(strips * (thumbnailSize(width, columns) + 3) + BELOW_THUMBNAILS)

/** Draw all steps of a sample: strips of images, the curve of the value, and bars of rewards and
 * terminal probabilities. strips: [{title, images, ended, until}], with null for images that are
 * missing, and `ended`, text from the step on at which the images end, or from `until` on; mostReward: reward of a full bar. */
export function drawTimeline(ctx, box, data, colours) {
  const { strips, frame, length, columns, current, readAt, values, rewards, terminals, mostReward } = data
  const { y, h } = box
  const x = box.x + NAMES
  const w = box.w - NAMES
  const width = w / columns
  const size = thumbnailSize(box.w, columns)
  strips.forEach(({ title, images, ended, until = Infinity }, row) => {
    const high = y + 3 + row * (size + 3)
    ctx.fillStyle = colours.muted
    ctx.font = `11px ${FONT}`
    ctx.textAlign = 'left'
    ctx.textBaseline = 'middle'
    ctx.fillText(title, box.x, high + size / 2, NAMES - 4)
    if (!images) return
    const there = Math.min(length, until, Math.floor(images.width / frame[1]))
    for (let t = 0; t < there; t++) {
      drawPicture(ctx, { x: x + t * width + (width - size) / 2, y: high, w: size, h: size }, images, t, frame)
    }
    if (there >= length || !ended) return
    const rest = { x: x + there * width + 2, y: high, w: (length - there) * width - 4, h: size }
    ctx.save()
    ctx.beginPath()
    ctx.rect(rest.x, rest.y, rest.w, rest.h)
    ctx.clip()
    ctx.strokeStyle = colours.line
    ctx.lineWidth = 1
    for (let at = -rest.h; at < rest.w; at += 8) line(ctx, rest.x + at, rest.y + rest.h, rest.x + at + rest.h, rest.y)
    ctx.strokeStyle = colours.muted
    ctx.strokeRect(rest.x + 0.5, rest.y + 0.5, rest.w - 1, rest.h - 1)
    drawMessage(ctx, rest, ended, { muted: colours.ink })
    ctx.restore()
  })
  const top = y + strips.length * (size + 3) + 18
  const bottom = y + h - 7
  const low = Math.min(...values)
  const high = Math.max(...values)
  const sy = linear(low, high, bottom, top)
  const at = Array.from(values, (value, t) => [x + (t + 0.5) * width, high > low ? sy(value) : (top + bottom) / 2])
  for (let t = 0; t < length; t++) {
    const left = x + t * width
    for (const [share, colour, side] of [[Math.min(Math.abs(rewards[t]) / mostReward, 1), colours.other, 0.62],
      [terminals[t], colours.neutral, 0.74]]) {
      const tall = share * (bottom - top)
      ctx.fillStyle = colour
      if (tall > 0.5) ctx.fillRect(left + width * side, bottom - tall, width * 0.1, tall)
    }
  }
  ctx.strokeStyle = colours.accent
  ctx.lineWidth = 1.5
  polyline(ctx, at)
  at.forEach(([px, py], t) => dot(ctx, px, py, t === current ? 4 : 2, colours.accent, colours.surface, 1))
  ctx.fillStyle = colours.muted
  ctx.font = `11px ${FONT}`
  ctx.textAlign = 'center'
  ctx.textBaseline = 'bottom'
  values.forEach((value, t) => {
    if (width > 34 || t === current) ctx.fillText(shown(value), at[t][0], at[t][1] - 4)
  })
  for (const t of readAt) {
    ctx.setLineDash([3, 3])
    ctx.strokeStyle = colours.ink
    ctx.lineWidth = 1
    ctx.strokeRect(x + t * width + 0.5, y + 0.5, width - 1, h - 1)
    ctx.setLineDash([])
  }
  ctx.strokeStyle = colours.accent
  ctx.lineWidth = 2
  ctx.strokeRect(x + Math.min(current, length - 1) * width + 1, y + 1, width - 2, h - 2)
}

/** Draw histograms of all samples, pale, and of those that pass the filters, and a mark at `place`
 * (0 to 1, or null). */
export function drawHistogram(ctx, { x, y, w, h }, all, left, place, colours) {
  const most = Math.max(...all, 1)
  const width = w / all.length
  for (const [counts, colour] of [[all, colours.neutral], [left, colours.simulated]]) {
    ctx.fillStyle = colour
    counts.forEach((count, bin) => {
      const tall = (count / most) * (h - 2)
      ctx.fillRect(x + bin * width, y + h - tall, Math.max(width - 0.5, 0.5), tall)
    })
  }
  if (place !== null) {
    ctx.fillStyle = colours.accent
    ctx.fillRect(x + place * w - 1, y, 2, h)
  }
}

const shortNumber = (value) => String(value).replace('-', '−')

function line(ctx, ax, ay, bx, by) {
  ctx.beginPath()
  ctx.moveTo(ax, ay)
  ctx.lineTo(bx, by)
  ctx.stroke()
}

function polyline(ctx, points) {
  ctx.beginPath()
  points.forEach(([px, py], i) => (i ? ctx.lineTo(px, py) : ctx.moveTo(px, py)))
  ctx.stroke()
}

function dot(ctx, px, py, radius, fill, stroke, width) {
  ctx.beginPath()
  ctx.arc(px, py, radius, 0, 2 * Math.PI)
  ctx.fillStyle = fill
  ctx.fill()
  ctx.strokeStyle = stroke
  ctx.lineWidth = width
  ctx.stroke()
}
