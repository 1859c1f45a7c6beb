// Reader of the data that analysis/panel_files.py writes; the format is described there.

import { arrays, bytes, load } from '../../shared/lib/data.js'

export const FORMAT = 2

/** A strip of pictures. It comes from the script's own bytes, so that canvases stay exportable. */
async function strip(letters) {
  return createImageBitmap(new Blob([bytes(letters)], { type: 'image/webp' }))
}

const two = (number) => String(number).padStart(2, '0')
const five = (number) => String(number).padStart(5, '0')

export const loadSteps = async () => arrays(await load('steps'))
export const loadRecorded = async () => arrays(await load('recorded'))
export const loadGradients = async (type) => arrays(await load(`gradients_${two(type)}`)).gradients

const KEPT = 24 // samples whose pictures stay in memory

/** The pictures of samples; strips are decoded when they are first asked for. */
export class Pictures {
  #samples = new Map()

  /** {frames, saliency(type)}: promises of strips, null where the sample lacks the type. */
  of(sample) {
    let found = this.#samples.get(sample)
    if (found) this.#samples.delete(sample) // and comes last again
    else {
      const content = load(`pictures_${five(sample)}`)
      const strips = new Map()
      const once = (key, letters) => {
        if (!strips.has(key)) strips.set(key, letters === null ? null : strip(letters))
        return strips.get(key)
      }
      found = {
        frames: async () => once('frames', (await content).frames),
        saliency: async (type) => once(type, (await content).saliency[type])
      }
      content.catch(() => this.#samples.delete(sample))
    }
    this.#samples.set(sample, found)
    if (this.#samples.size > KEPT) this.#samples.delete(this.#samples.keys().next().value)
    return found
  }
}
