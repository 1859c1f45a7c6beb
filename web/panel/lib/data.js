// Reader of the data that analysis/panel_files.py writes; the format is described there.

import { arrays, bytes, load } from '../../shared/lib/data.js'

export const FORMAT = 7

/** Decode a strip of images. The image comes from the bytes of the script, so that canvases stay
 * exportable. */
async function strip(letters) {
  return createImageBitmap(new Blob([bytes(letters)], { type: 'image/webp' }))
}

const two = (number) => String(number).padStart(2, '0')
const three = (number) => String(number).padStart(3, '0')
const five = (number) => String(number).padStart(5, '0')

export const loadSteps = async () => arrays(await load('steps'))
export const loadRecorded = async () => arrays(await load('recorded'))
export const loadFeatures = async () => (await load('features')).features
export const loadFilm = async (failure) => new Blob(
  [bytes((await load(`failure_${five(failure)}`)).film)], { type: 'video/mp4' })
export const loadGradients = async (type) => arrays(await load(`gradients_${two(type)}`)).gradients

const KEPT = { frames: 80, pictures: 24 } // number of samples whose images are cached

/** Cache of the images of samples; strips are decoded when they are first requested. */
export class Pictures {
  #files = { frames: new Map(), pictures: new Map() }
  #examples = new Map()

  /** Return a promise of a strip, or of null if the sample lacks it. */
  async #strip(kind, sample, pick) {
    const files = this.#files[kind]
    const file = files.get(sample) ?? { content: load(`${kind}_${five(sample)}`), strips: new Map() }
    files.delete(sample) // reinserted as the most recent one
    files.set(sample, file)
    if (files.size > KEPT[kind]) files.delete(files.keys().next().value)
    file.content.catch(() => files.delete(sample))
    const letters = pick(await file.content)
    if (!letters) return null
    if (!file.strips.has(letters)) file.strips.set(letters, strip(letters))
    return file.strips.get(letters)
  }

  frames = (sample) => this.#strip('frames', sample, ({ frames }) => frames)
  recorded = (sample) => this.#strip('frames', sample, ({ recorded }) => recorded)
  saliency = (sample, type, map) => this.#strip('pictures', sample, ({ saliency }) => saliency[type]?.[map])

  /** Return a promise of the examples of a sparse feature, or of null if it has none. */
  examples(feature) {
    if (!this.#examples.has(feature)) {
      this.#examples.set(feature, load(`feature_${three(feature)}`).then(
        ({ examples }) => examples && strip(examples)))
    }
    return this.#examples.get(feature)
  }
}
