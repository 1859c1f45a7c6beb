// Conversion of the view to the fragment of the address and back.
//
// Sets and saliency types are given by name, so that an address stays valid after another export.

import { numberOf } from '../../shared/lib/address.js'

const sampleText = (samples, sample) => {
  const { set, number } = samples.names[sample]
  return `${samples.sets[set].name}/${number}`
}

function sampleOf(samples, text) {
  const match = /^(.*)\/(\d+)$/.exec(text ?? '')
  if (!match) return -1
  return samples.find(samples.sets.findIndex(({ name }) => name === match[1]), Number(match[2]))
}

const bound = (value) => (value === null ? '' : String(value))

function boundOf(text) {
  const value = text === '' ? null : Number(text)
  return Number.isNaN(value) ? null : value
}

export function write(view, manifest, samples) {
  const text = new URLSearchParams()
  text.set('sample', sampleText(samples, view.sample))
  if (view.other !== null) text.set('beside', sampleText(samples, view.other))
  text.set('step', view.step)
  if (view.type !== null) text.set('saliency', manifest.saliency[view.type].name)
  if (view.map) text.set('map', manifest.maps[view.map])
  text.set('x', view.x)
  text.set('y', view.y)
  text.set('ic', view.ic)
  if (view.at !== null) text.set('at', view.at)
  if (view.cloud !== 'both') text.set('cloud', view.cloud)
  if (view.colouring !== null) text.set('colouring', view.colouring)
  if (view.speed !== 4) text.set('speed', view.speed)
  if (view.behaviour !== null) text.set('behaviour', view.behaviour)
  for (const { ic, of, low, high, step } of view.filters) {
    const what = of === 'coordinate' ? of : `gradient ${manifest.saliency[of].name}`
    text.append('filter', [ic, bound(low), bound(high), step ?? 'any', what].join(','))
  }
  if (view.feature !== null) text.set('feature', view.feature)
  if (view.failure !== null) text.set('failure', view.failure)
  if (view.notes) text.set('notes', view.notes)
  return text.toString()
}

/** Return the view in a fragment; parts that do not fit this panel are taken from the view
 * `start`. */
export function read(fragment, start, manifest, samples) {
  const text = new URLSearchParams(fragment.replace(/^#/, ''))
  const view = { ...start }
  const sample = sampleOf(samples, text.get('sample'))
  if (sample >= 0) view.sample = sample
  const other = sampleOf(samples, text.get('beside'))
  view.other = other >= 0 ? other : null
  const typeOf = (name) => manifest.saliency.findIndex((each) => each.name === name)
  if (typeOf(text.get('saliency')) >= 0) view.type = typeOf(text.get('saliency'))
  view.map = Math.max(manifest.maps.indexOf(text.get('map')), 0)
  const { longest } = samples
  view.step = numberOf(text.get('step'), longest) ?? start.step
  for (const key of ['x', 'y', 'ic']) {
    view[key] = numberOf(text.get(key), manifest.num_ics) ?? start[key]
  }
  if (text.has('at') || text.has('sample')) view.at = numberOf(text.get('at'), longest)
  if (['recorded', 'simulated', 'both'].includes(text.get('cloud'))) view.cloud = text.get('cloud')
  const names = manifest.recorded.positions ?? []
  if (names.includes(text.get('colouring'))) view.colouring = text.get('colouring')
  if (['1', '2', '4', '8'].includes(text.get('speed'))) view.speed = Number(text.get('speed'))
  const behaviour = /^-?\d+$/.test(text.get('behaviour') ?? '') ? Number(text.get('behaviour')) : null
  view.behaviour = manifest.behaviours ? behaviour : null
  view.filters = text.getAll('filter').flatMap((each) => {
    const [ic, low, high, step, ...rest] = each.split(',')
    const what = rest.join(',')
    const of = what === 'coordinate' ? what : typeOf(what.replace(/^gradient /, ''))
    const component = numberOf(ic, manifest.num_ics)
    const at = step === 'any' ? null : numberOf(step, longest)
    if (component === null || of === -1 || (at === null && step !== 'any')) return []
    return [{ ic: component, of, low: boundOf(low), high: boundOf(high), step: at }]
  })
  const feature = numberOf(text.get('feature'), Infinity)
  if (manifest.features.includes(feature)) view.feature = feature
  const failure = numberOf(text.get('failure'), Infinity)
  if (manifest.failures.some(({ number }) => number === failure)) view.failure = failure
  view.notes = text.get('notes') ?? ''
  return view
}
