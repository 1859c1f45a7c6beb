// Drawing of frames and of the course of a dream.

import { gradientColour } from '../../shared/lib/draw.js'

const FRAME = 64
const HATCH = 9 // pixels between two lines

const canvases = new WeakMap()
/** Return a canvas with an image. */
function canvasOf(image) {
  if (!canvases.has(image)) {
    const canvas = document.createElement('canvas')
    canvas.width = canvas.height = FRAME
    canvas.getContext('2d').putImageData(image, 0, 0)
    canvases.set(image, canvas)
  }
  return canvases.get(image)
}

/** Return the part of the first frame that is in view: {left, top, right, bottom} in pixels of the
 * frame; its right may be left of its left. */
export function seenPart([right, down]) {
  return { left: Math.max(0, -right), top: Math.max(0, -down), right: Math.min(FRAME, FRAME - right), bottom: Math.min(FRAME, FRAME - down) }
}

/** Return the share of the view that was not in the first frame; 0 if the camera is not known. */
export function imaginedShare(displacement) {
  if (!displacement) return 0
  const { left, top, right, bottom } = seenPart(displacement)
  return 1 - Math.max(0, right - left) * Math.max(0, bottom - top) / FRAME ** 2
}

/** Draw the frame of a record. marked: hatch what was not in the first frame. */
export function drawFrame(ctx, { x, y, w, h }, record, marked) {
  ctx.imageSmoothingEnabled = false
  ctx.drawImage(canvasOf(record.image), x, y, w, h)
  if (!marked || imaginedShare(record.displacement) < 0.01) return
  const seen = seenPart(record.displacement)
  const [left, top] = [x + seen.left * w / FRAME, y + seen.top * h / FRAME]
  const [wide, tall] = [Math.max(0, seen.right - seen.left) * w / FRAME, Math.max(0, seen.bottom - seen.top) * h / FRAME]
  ctx.save()
  ctx.beginPath()
  ctx.rect(x, y, w, h)
  if (wide && tall) ctx.rect(left, top, wide, tall)
  ctx.clip('evenodd')
  ctx.strokeStyle = 'rgb(255 255 255 / 0.28)'
  ctx.lineWidth = 1
  ctx.beginPath()
  for (let at = -h; at < w; at += HATCH) {
    ctx.moveTo(x + at, y + h)
    ctx.lineTo(x + at + h, y)
  }
  ctx.stroke()
  ctx.restore()
  if (!wide || !tall) return
  ctx.save()
  ctx.setLineDash([6, 4])
  ctx.lineWidth = 2
  ctx.strokeStyle = 'rgb(255 255 255 / 0.85)'
  ctx.beginPath()
  for (const [is, ...line] of [[seen.left > 0, left, top, left, top + tall], [seen.right < FRAME, left + wide, top, left + wide, top + tall],
    [seen.top > 0, left, top, left + wide, top], [seen.bottom < FRAME, left, top + tall, left + wide, top + tall]]) {
    if (!is) continue
    ctx.moveTo(line[0], line[1])
    ctx.lineTo(line[2], line[3])
  }
  ctx.stroke()
  ctx.restore()
}

/** Draw tile `number` of an image of frames with `tiles` per row. */
export function drawTile(ctx, { x, y, w, h }, image, number, tiles) {
  ctx.imageSmoothingEnabled = false
  ctx.drawImage(image, number % tiles * FRAME, Math.floor(number / tiles) * FRAME, FRAME, FRAME, x, y, w, h)
}

/** Draw outlines of squares, given by their corners in pixels of the frame. */
export function drawSquares(ctx, { x, y, w, h }, corners, size, { colour, dash = [], fill = null, width = 2 }) {
  ctx.save()
  ctx.beginPath()
  ctx.rect(x, y, w, h)
  ctx.clip()
  const scale = w / FRAME
  for (const [pass, style] of [[1, 'rgb(0 0 0 / 0.6)'], [0, colour]]) {
    ctx.strokeStyle = style
    ctx.lineWidth = width + 2 * pass
    ctx.setLineDash(pass ? [] : dash)
    for (const [left, top] of corners) {
      const box = [x + left * scale, y + top * scale, size * scale, size * scale]
      if (fill && pass) {
        ctx.fillStyle = fill
        ctx.fillRect(...box)
      }
      ctx.strokeRect(...box)
    }
  }
  ctx.restore()
}

/** Draw the effects of cells of the frame, side² numbers, over it. Cells are `size` pixels wide, and
 * their centres `stride` pixels apart. */
export function drawCells(ctx, { x, y, w, h }, effects, side, size, stride, full, colours) {
  const scale = w / FRAME
  ctx.save()
  ctx.globalAlpha = 0.75
  effects.forEach((effect, i) => {
    if (Math.abs(effect) < 0.12 * full) return
    const [row, column] = [Math.floor(i / side), i % side]
    const cell = stride * scale
    ctx.fillStyle = gradientColour(effect, full, colours)
    const radius = Math.min(Math.abs(effect) / full, 1) * cell * 0.45
    ctx.beginPath()
    ctx.arc(x + (column * stride + size / 2) * scale, y + (row * stride + size / 2) * scale, radius, 0, 2 * Math.PI)
    ctx.fill()
    ctx.lineWidth = 1
    ctx.strokeStyle = colours.surface
    ctx.stroke()
  })
  ctx.restore()
}

const MARGIN = { left: 44, right: 10 }
export const ROWS = [['value', 74], ['P(end)', 52], ['reward', 40]]
const [FIRST, GAP] = [18, 22]

export const courseHeight = FIRST + ROWS.reduce((sum, [, tall]) => sum + tall + GAP, 0)

/** Return the step at a horizontal position in a course of `most` steps. */
export const stepAt = (x, width, most) =>
  Math.max(0, Math.min(most - 1, Math.round((x - MARGIN.left) / (width - MARGIN.left - MARGIN.right) * (most - 1))))

/** Draw value, probability of the end, and reward of each step. dreams: [{steps, colour}], the first
 * one is that in view; truth: recorded values, or null. */
export function drawCourse(ctx, { x, w }, { dreams, truth, step, most, ended }, colours) {
  const left = x + MARGIN.left
  const right = x + w - MARGIN.right
  const sx = (at) => left + (right - left) * at / (most - 1)
  ctx.font = '11px system-ui, sans-serif'
  let top = FIRST
  for (const [name, tall] of ROWS) {
    const lines = dreams.map(({ steps, colour }) => ({ colour, values: steps.map((each) => valueOf(each, name)) }))
    if (name === 'value' && truth) lines.push({ colour: colours.recorded, values: truth.slice(0, most), dashed: true })
    const all = lines.flatMap(({ values }) => values)
    const [low, high] = name === 'P(end)' ? [0, 1] : [Math.min(0, ...all), Math.max(name === 'reward' ? 1 : 0.1, ...all)]
    const sy = (value) => top + tall - (value - low) / (high - low) * tall
    ctx.strokeStyle = colours.line
    ctx.lineWidth = 1
    ctx.fillStyle = colours.muted
    ctx.textAlign = 'right'
    ctx.textBaseline = 'middle'
    for (const value of [low, high]) {
      line(ctx, left, sy(value), right, sy(value))
      ctx.fillText(String(Number(value.toFixed(1))).replace('-', '−'), left - 5, sy(value))
    }
    ctx.textAlign = 'left'
    ctx.textBaseline = 'bottom'
    ctx.fillText(name, left + 2, top - 3)
    for (const { colour, values, dashed } of lines.toReversed()) {
      ctx.strokeStyle = colour
      ctx.lineWidth = 1.75
      ctx.setLineDash(dashed ? [4, 3] : [])
      ctx.beginPath()
      values.forEach((value, at) => (at ? ctx.lineTo(sx(at), sy(value)) : ctx.moveTo(sx(at), sy(value))))
      ctx.stroke()
      ctx.setLineDash([])
      if (!dashed && values.length > step) {
        ctx.beginPath()
        ctx.arc(sx(step), sy(values[step]), 3.5, 0, 2 * Math.PI)
        ctx.fillStyle = colour
        ctx.fill()
      }
    }
    top += tall + GAP
  }
  ctx.strokeStyle = colours.accent
  ctx.lineWidth = 1
  line(ctx, sx(step), 0, sx(step), top - GAP)
  if (ended !== null) {
    ctx.strokeStyle = colours.lowers
    ctx.setLineDash([2, 3])
    line(ctx, sx(ended), 0, sx(ended), top - GAP)
    ctx.setLineDash([])
  }
  ctx.fillStyle = colours.muted
  ctx.textBaseline = 'top'
  const gap = most > 200 ? 50 : most > 60 ? 20 : 10
  for (let at = 0; at < most; at += gap) {
    ctx.textAlign = at ? 'center' : 'left'
    ctx.fillText(at ? at : 'step 0', sx(at), top - GAP + 5)
  }
}

const valueOf = (record, name) => (name === 'value' ? record.value : name === 'P(end)' ? record.end : record.reward)

function line(ctx, ax, ay, bx, by) {
  ctx.beginPath()
  ctx.moveTo(ax, ay)
  ctx.lineTo(bx, by)
  ctx.stroke()
}
