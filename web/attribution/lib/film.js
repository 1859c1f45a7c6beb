// All rows of the page, for one or two trajectories, as an image and as a video.

import { record } from '../../shared/lib/video.js'
import { sentence } from './moment.js'
import { chartOf, drawChart, PICTURES, picturesOf } from './rows.js'
import { drawAttribution, drawTile } from './scene.js'

const SIZE = 320
const GAP = 16
const TITLE = 24

/** Return the parts of a row from left to right, [{title, w, draw(ctx, box)}]; draw returns false
 * while data is loading. */
function partsOf(place, output, colours) {
  const { manifest, view } = place
  const chart = chartOf(place, output)
  const parts = [{ title: 'observation', w: SIZE, draw(ctx, box) {
    const [sheet, tile] = place.frame(view.trajectory, view.step)
    if (sheet) drawTile(ctx, box, sheet, tile, manifest.frame, manifest.tiles)
    return sheet !== null
  } }]
  if (!place.has(output)) return parts
  if (chart) {
    parts.push({ title: `${manifest.outputs[output].title} at ${place.layer.name}`, w: Math.round(1.35 * SIZE),
      draw: (ctx, box) => drawChart(ctx, box, place, output, chart, colours) })
  }
  for (const kind of picturesOf(place, output)) {
    parts.push({ title: PICTURES[kind][0], w: SIZE, draw: (ctx, box) => drawAttribution(ctx, box, place, output, kind) })
  }
  return parts
}

/** Lay out all rows of some places below each other: {width, height, draw(ctx)}; draw returns false
 * while data is loading. */
function sheetOf(places, colours) {
  const lines = places[0].view.rows.flatMap((output) => places.map(
    (place) => ({ place, parts: partsOf(place, output, colours) })))
  const width = Math.max(...lines.map(({ parts }) => parts.reduce((sum, { w }) => sum + w + GAP, GAP)))
  const height = lines.length * (SIZE + 2 * TITLE + GAP) + GAP

  function draw(ctx) {
    let whole = true
    ctx.fillStyle = colours.surface
    ctx.fillRect(0, 0, width, height)
    lines.forEach(({ place, parts }, line) => {
      const y = GAP + line * (SIZE + 2 * TITLE + GAP)
      const write = (text, x, top, w) => {
        ctx.globalAlpha = 1
        ctx.fillStyle = colours.ink
        ctx.font = '15px system-ui, sans-serif'
        ctx.textAlign = 'left'
        ctx.textBaseline = 'top'
        ctx.fillText(text, x, top, w)
      }
      write(sentence(place), GAP, y, width - 2 * GAP)
      let x = GAP
      for (const part of parts) {
        write(part.title, x, y + TITLE, part.w)
        whole = part.draw(ctx, { x, y: y + 2 * TITLE, w: part.w, h: SIZE }) && whole
        x += part.w + GAP
      }
    })
    return whole
  }

  return { width, height, draw }
}

async function drawn(page, sheet, ctx) {
  while (!sheet.draw(ctx)) await page.arrival()
}

/** Return a promise of an image of all rows, a blob. */
export async function picture(page, places, colours) {
  const sheet = sheetOf(places, colours)
  const canvas = document.createElement('canvas')
  canvas.width = sheet.width
  canvas.height = sheet.height
  await drawn(page, sheet, canvas.getContext('2d'))
  return new Promise((resolve) => canvas.toBlob(resolve))
}

/** Record a video of all rows over a number of steps, and return a promise of a blob. placesAt(k):
 * places at the k-th step; onstep: see `record`. */
export function film(page, placesAt, steps, colours, onstep) {
  const size = sheetOf(placesAt(0), colours)
  // Codecs require even side lengths.
  const even = { width: 2 * Math.ceil(size.width / 2), height: 2 * Math.ceil(size.height / 2) }
  return record(even, steps, page.view.speed || 12,
    (ctx, step) => drawn(page, sheetOf(placesAt(step), colours), ctx), onstep)
}
