// Video of the views of the shown samples.

import { record } from '../../shared/lib/video.js'
import {
  cloudOf, drawCoordinates, drawObservation, drawSaliency, drawStates, sentence, SCATTER_ASPECT
} from './scene.js'

const SIZE = 320
const GAP = 16
const TITLE = 28

/** Record the views of all steps, and return a promise of a blob. rows: [{sample, strips, colour}];
 * onstep: see `record`. */
export function film(panel, rows, onstep) {
  const plot = { w: Math.round(SIZE * SCATTER_ASPECT), h: SIZE }
  const width = 2 * SIZE + 2 * plot.w + 5 * GAP
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
      drawObservation(ctx, at(GAP, SIZE), strips, panel, step)
      drawSaliency(ctx, at(2 * GAP + SIZE, SIZE), strips, panel, sample, step)
      drawStates(ctx, at(3 * GAP + 2 * SIZE, plot.w), cloud, panel, sample, step, colour)
      drawCoordinates(ctx, at(4 * GAP + 2 * SIZE + plot.w, plot.w), panel, sample, step)
    })
  }

  return record({ width, height }, panel.length, panel.view.speed, draw, onstep)
}
