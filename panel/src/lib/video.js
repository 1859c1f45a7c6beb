// A video of the views: all steps once, each as long as in playing.

import {
  cloudOf, drawCoordinates, drawObservation, drawSaliency, drawStates, sentence, SCATTER_ASPECT
} from './scene.js'

const SIZE = 320
const GAP = 16
const TITLE = 28
const KINDS = ['video/webm;codecs=vp9', 'video/webm;codecs=vp8', 'video/webm', 'video/mp4']

/** The kind of video that this browser writes, or null. */
export const videoKind = () => (globalThis.MediaRecorder
  ? KINDS.find((kind) => MediaRecorder.isTypeSupported(kind)) ?? null : null)

/** Record the views; rows: {sample, strips, colour}. Gives {blob, extension}. */
export async function record(panel, rows, onstep) {
  const kind = videoKind()
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

  draw(0)
  const stream = canvas.captureStream(30)
  const recorder = new MediaRecorder(stream, { mimeType: kind, videoBitsPerSecond: 8e6 })
  const parts = []
  recorder.ondataavailable = ({ data }) => parts.push(data)
  const stopped = new Promise((resolve) => { recorder.onstop = resolve })
  recorder.start()
  const wait = 1000 / panel.view.speed
  for (let step = 0; step < panel.length; step++) {
    onstep(step)
    // Drawn several times: a picture that does not change makes no frame.
    const end = performance.now() + Math.max(wait, 120)
    while (performance.now() < end) {
      draw(step)
      await new Promise((resolve) => setTimeout(resolve, 33))
    }
  }
  recorder.stop()
  await stopped
  for (const track of stream.getTracks()) track.stop()
  return { blob: new Blob(parts, { type: kind }), extension: kind.includes('mp4') ? 'mp4' : 'webm' }
}

/** Hand a file to the reader. */
export function save(blob, name) {
  const link = document.createElement('a')
  link.href = URL.createObjectURL(blob)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 60000)
}
