// Video of a canvas: all steps once, at the speed of playback.

import {
  BufferTarget, CanvasSource, getFirstEncodableVideoCodec, Mp4OutputFormat, Output, QUALITY_HIGH
} from 'mediabunny'

const CODECS = ['avc', 'vp9', 'av1']

/** Whether the browser can encode videos: with WebCodecs, which is missing on pages from plain
 * http. */
export const encodes = 'VideoEncoder' in globalThis

/** Record steps as an MP4 video, and return a promise of a blob. width, height: size in pixels;
 * steps: number of steps; speed: steps per second; draw(ctx, step) draws the whole canvas and may
 * return a promise; onstep(step, last) is called before each step. */
export async function record({ width, height }, steps, speed, draw, onstep) {
  const canvas = document.createElement('canvas')
  canvas.width = width
  canvas.height = height
  const ctx = canvas.getContext('2d')
  const codec = await getFirstEncodableVideoCodec(CODECS, { width, height, bitrate: QUALITY_HIGH })
  if (codec === null) throw new Error('this browser has no encoder for it.')
  const output = new Output({ format: new Mp4OutputFormat(), target: new BufferTarget() })
  const source = new CanvasSource(canvas, { codec, bitrate: QUALITY_HIGH })
  output.addVideoTrack(source)
  await output.start()
  const seconds = 1 / speed
  for (let step = 0; step < steps; step++) {
    onstep(step, steps - 1)
    await draw(ctx, step)
    await source.add(step * seconds, seconds)
  }
  await output.finalize()
  return new Blob([output.target.buffer], { type: 'video/mp4' })
}

/** Offer a blob as a download with a file name. */
export function save(blob, name) {
  const link = document.createElement('a')
  link.href = URL.createObjectURL(blob)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 60000)
}
