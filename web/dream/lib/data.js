// Reader of the data that generative/dream_page_files.py writes; the format is described there.

import { load, loadManifest as manifestOf, unpacked } from '../../shared/lib/data.js'

const FORMAT = 3
export const TILES = 10 // frames per row of an image of frames

export const loadManifest = () => manifestOf(FORMAT)

const opened = async ({ constants, ...description }) => ({ description, constants: await unpacked(constants) })

/** Load the programs of a step, or with the name `worlds` those that change worlds:
 * {description, constants} by name. */
export async function loadPrograms(name = 'programs') {
  const content = await load(name)
  return Object.fromEntries(await Promise.all(Object.entries(content).map(
    async ([name, program]) => [name, await opened(program)])))
}

/** Load the arrays of a start, and an image of what followed in the game, or null. */
export async function loadStart(number) {
  const { arrays, truth } = await load(`start_${String(number).padStart(3, '0')}`)
  return { arrays: await unpacked(arrays), truth: truth && await imageOf(truth) }
}

export async function imageOf(url) {
  const image = new Image()
  image.src = url
  await image.decode()
  return image
}
