// A video of the views: all steps once, each as long as in playing.

import {
  BufferTarget, CanvasSource, getFirstEncodableVideoCodec, Mp4OutputFormat, Output, QUALITY_HIGH
} from 'mediabunny'
import {
  cloudOf, drawCoordinates, drawObservation, drawSaliency, drawStates, sentence, SCATTER_ASPECT
} from './scene.js'

const SIZE = 320
const GAP = 16
const TITLE = 28
const CODECS = ['avc', 'vp9', 'av1']

/** Whether this browser encodes videos here: with WebCodecs, which pages over plain http do not have. */
export const encodes = 'VideoEncoder' in globalThis

/** Record the views as mp4; rows: {sample, strips, colour}. Gives a blob. */
export async function record(panel, rows, onstep) {
  const plot = { w: Math.round(SIZE * SCATTER_ASPECT), h: SIZE }
  const canvas = document.createElement('canvas')
  canvas.width = 2 * SIZE + 2 * plot.w + 5 * GAP
  canvas.height = rows.length * (SIZE + TITLE + GAP) + GAP
  const ctx = canvas.getContext('2d')
  const cloud = cloudOf(panel, plot, 1)

  const draw = (step) => {
    ctx.fillStyle = panel.colours.surface
    ctx.fillRect(0, 0, canvas.width, canvas.height)
    rows.forEach(({ sample, strips, colour }, row) => {
      const y = GAP + row * (SIZE + TITLE + GAP)
      ctx.fillStyle = panel.colours.ink
      ctx.font = '15px system-ui, sans-serif'
      ctx.textAlign = 'left'
      ctx.textBaseline = 'top'
      const of = panel.type ? `; saliency: ${panel.type.title}` : ''
      ctx.fillText(sentence(panel, sample, step) + of, GAP, y, canvas.width - 2 * GAP)
      const at = (x, w) => ({ x, y: y + TITLE, w, h: SIZE })
      drawObservation(ctx, at(GAP, SIZE), strips, panel, step)
      drawSaliency(ctx, at(2 * GAP + SIZE, SIZE), strips, panel, sample, step)
      drawStates(ctx, at(3 * GAP + 2 * SIZE, plot.w), cloud, panel, sample, step, colour)
      drawCoordinates(ctx, at(4 * GAP + 2 * SIZE + plot.w, plot.w), panel, sample, step)
    })
  }

  const { width, height } = canvas
  const codec = await getFirstEncodableVideoCodec(CODECS, { width, height, bitrate: QUALITY_HIGH })
  if (codec === null) throw new Error('this browser has no encoder for it.')
  const output = new Output({ format: new Mp4OutputFormat(), target: new BufferTarget() })
  const source = new CanvasSource(canvas, { codec, bitrate: QUALITY_HIGH })
  output.addVideoTrack(source)
  await output.start()
  const seconds = 1 / panel.view.speed
  for (let step = 0; step < panel.length; step++) {
    onstep(step)
    draw(step)
    await source.add(step * seconds, seconds)
  }
  await output.finalize()
  return new Blob([output.target.buffer], { type: 'video/mp4' })
}

/** Hand a file to the reader. */
export function save(blob, name) {
  const link = document.createElement('a')
  link.href = URL.createObjectURL(blob)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 60000)
}
