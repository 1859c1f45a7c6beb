// Film of a dream, from its first to its last step.

import { record } from '../../shared/lib/video.js'
import { drawFrame, drawTile } from './scene.js'
import { TILES } from './data.js'

const [SIDE, BELOW] = [384, 28] // pixels

/** Record all steps of the page's dream, next to the dream without edits or the recording if there
 * are any. */
export function film(page, colours, onstep) {
  const { dream, plain, truth, start } = page
  const titles = [plain ? 'dream with the change' : 'dream', ...(plain ? ['without it'] : []), ...(truth ? ['game'] : [])]
  const size = { width: titles.length * SIDE, height: SIDE + BELOW }
  return record(size, dream.steps.length, Math.min(page.view.speed, 24), (ctx, step) => {
    ctx.fillStyle = colours.surface
    ctx.fillRect(0, 0, size.width, size.height)
    titles.forEach((title, i) => {
      const box = { x: i * SIDE, y: BELOW, w: SIDE, h: SIDE }
      if (title === 'game') drawTile(ctx, box, truth, Math.min(step, start.actions.length - 1), TILES)
      else drawFrame(ctx, box, (i ? plain : dream).steps[step], true)
      ctx.fillStyle = colours.ink
      ctx.font = '15px system-ui, sans-serif'
      ctx.textBaseline = 'middle'
      const over = title === 'game' && step >= start.actions.length ? ' (over)' : ''
      ctx.fillText(i ? `${title}${over}` : `${title}, step ${step}, value ${dream.steps[step].value.toFixed(1)}`, box.x + 8, BELOW / 2)
    })
  }, onstep)
}
