// Video of the views of the shown samples.

import { record } from '../../shared/lib/video.js'
import {
  cloudOf, drawCoordinates, drawObservation, drawRecorded, drawSaliency, drawStates, sentence, SCATTER_ASPECT
} from './scene.js'

const SIZE = 320
const GAP = 16
const TITLE = 28

/** Record the views of all steps, and return a promise of a blob. rows: [{sample, strips, colour}];
 * onstep: see `record`. */
export function film(panel, rows, onstep) {
  const plot = { w: Math.round(SIZE * SCATTER_ASPECT), h: SIZE }
  const images = rows.some(({ strips }) => strips.recorded) ? 3 : 2
  const width = images * SIZE + 2 * plot.w + (images + 3) * GAP
  const height = rows.length * (SIZE + TITLE + GAP) + GAP
  const cloud = cloudOf(panel, plot, 1)

  const draw = (ctx, step) => {
    ctx.fillStyle = panel.colours.surface
    ctx.fillRect(0, 0, width, height)
    rows.forEach(({ sample, strips, colour }, row) => {
      const y = GAP + row * (SIZE + TITLE + GAP)
      ctx.fillStyle = panel.colours.ink
      ctx.font = '15px system-ui, sans-serif'
      ctx.textAlign = 'left'
      ctx.textBaseline = 'top'
      const of = panel.type ? `; saliency: ${panel.saliencyTitle}` : ''
      ctx.fillText(sentence(panel, sample, step) + of, GAP, y, width - 2 * GAP)
      const at = (x, w) => ({ x, y: y + TITLE, w, h: SIZE })
      const x = (place) => GAP + place * (SIZE + GAP)
      drawObservation(ctx, at(x(0), SIZE), strips, panel, step)
      if (strips.recorded) drawRecorded(ctx, at(x(1), SIZE), strips, panel, step)
      drawSaliency(ctx, at(x(images - 1), SIZE), strips, panel, sample, step)
      drawStates(ctx, at(x(images), plot.w), cloud, panel, sample, step, colour)
      drawCoordinates(ctx, at(x(images) + plot.w + GAP, plot.w), panel, sample, step)
    })
  }

  return record({ width, height }, panel.length, panel.view.speed, draw, onstep)
}
