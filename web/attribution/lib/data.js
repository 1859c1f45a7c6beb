// Reader of the data that attribution/page_files.py writes; the format is described there.

import { arrays, bytes, load, unpacked } from '../../shared/lib/data.js'

export const FORMAT = 5

const picture = (letters) => createImageBitmap(new Blob([bytes(letters)], { type: 'image/webp' }))
const digits = (number, many) => String(number).padStart(many, '0')

export const loadSteps = async () => arrays(await load('steps'))
export const loadStrips = async () => Promise.all((await load('strips')).strips.map(picture))

export const framesName = (trajectory, sheet) => `frames_${digits(trajectory, 5)}_${digits(sheet, 3)}`
export const attributionName = (layer, output, trajectory) =>
  `attribution_${digits(layer, 2)}_${digits(output, 2)}_${digits(trajectory, 5)}`
export const memoryName = (layer, output, trajectory) =>
  `memory_${digits(layer, 2)}_${digits(output, 2)}_${digits(trajectory, 5)}`
export const examplesName = (layer) => `examples_${digits(layer, 2)}`
export const observationsName = (layer, sheet) => `observations_${digits(layer, 2)}_${digits(sheet, 3)}`

async function examples({ thumbnails, spatial, seen }) {
  const one = async (each) => each && { ...each, ...(await unpacked(each.arrays)) }
  return { thumbnails: await one(thumbnails), spatial: await Promise.all(spatial.map(one)), ...(await unpacked(seen)) }
}

/** Load a data file and decode its images and arrays. */
export async function read(name) {
  const content = await load(name)
  if ('sheet' in content) return picture(content.sheet)
  return 'spatial' in content ? examples(content) : unpacked(content)
}

const sizeOf = (content) => content.width ? 4 * content.width * content.height
  : Object.values(content).reduce((sum, each) => sum + (each?.byteLength ?? 0), 0)

// Number of arrivals of files after which a file that was not requested again is unused; views
// request all files that they show after each arrival.
const IN_USE = 8

/** Cache of decoded files: the most recently requested ones, up to `most` bytes, and all that are
 * in use. */
export class Kept {
  #found = new Map()
  #bytes = 0
  #arrivals = 0

  constructor(most) {
    this.most = most
  }

  get(name) {
    const found = this.#found.get(name)
    if (!found) return null
    this.#found.delete(name) // reinserted as the most recent one
    this.#found.set(name, found)
    found.asked = this.#arrivals
    return found.content
  }

  put(name, content) {
    this.#arrivals += 1
    this.#found.set(name, { content, asked: this.#arrivals })
    this.#bytes += sizeOf(content)
    for (const [first, { content: old, asked }] of this.#found) {
      if (this.#bytes <= this.most || asked > this.#arrivals - IN_USE) break
      this.#found.delete(first)
      this.#bytes -= sizeOf(old)
      old.close?.() // frees the memory of an image at once
    }
  }
}
