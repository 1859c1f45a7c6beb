// Reader of the data that maze/field/page_export.py writes; the format is described there.

import { arrays, load, loadManifest as manifestOf } from '../../shared/lib/data.js'

const two = (number) => String(number).padStart(2, '0')

const FORMAT = 3

export const loadManifest = () => manifestOf(FORMAT)
export const loadStamps = async (mode) => arrays(await load(`stamps_${mode}`))
export const loadWeights = async (agent) => arrays(await load(`agent_${two(agent)}`))
