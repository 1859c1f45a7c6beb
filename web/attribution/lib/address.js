// Conversion of the view to the fragment of the address and back, and reading of the published
// query.
//
// Layers and outputs are given by name, so that an address stays valid after another export.
// Trajectories, frames and features are counted from 1, as on the page; 0 is the residual.

import { numberOf } from '../../shared/lib/address.js'
import { ABOVE, GAIN, PALETTES, SIGNS, SMOOTHING } from './paint.js'

const MAX_NAME = 60
const CHARTS = ['waterfall', 'bars']
const outputNamed = (manifest, name) => manifest.outputs.findIndex((each) => each.name === name)
const layerNamed = (manifest, name) => manifest.layers.findIndex((each) => each.name === name)
const fromOne = (text, count) => {
  const found = numberOf(text, count + 1)
  return found ? found - 1 : null
}
const between = (text, low, high) => {
  const value = text === null || text === '' ? NaN : Number(text)
  return value >= low && value <= high ? value : null
}

/** Return the fragment of a view. labels: names of features by layer; names that the page did not
 * come with are part of the view. */
export function write(view, manifest, labels) {
  const text = new URLSearchParams()
  const layer = manifest.layers[view.layer]
  const featureText = (feature) => (feature === layer.num_features ? 0 : feature + 1)
  text.set('layer', layer.name)
  text.set('trajectory', view.trajectory + 1)
  text.set('frame', view.step + 1)
  for (const output of view.rows) text.append('row', manifest.outputs[output].name)
  for (const [key, start] of [['gain', GAIN], ['smoothing', SMOOTHING], ['above', ABOVE], ['sign', 'two'],
    ['chart', 'waterfall'], ['palette', 'apart'], ['window', 256], ['speed', 12]]) {
    if (view[key] !== start) text.set(key, view[key])
  }
  if (!view.overlay) text.set('ground', 'black')
  if (view.residual) text.set('residual', 'shown')
  if (view.alone.length) text.set('alone', view.alone.map(featureText).join(','))
  for (const { output, feature } of view.curves) {
    text.append('curve', feature === null ? manifest.outputs[output].name
      : `${manifest.outputs[output].name},${featureText(feature)}`)
  }
  if (view.beside !== null) text.set('beside', view.beside + 1)
  if (view.sameLevel) text.set('level', 'same')
  if (view.ahead) text.set('ahead', view.ahead)
  for (const [trajectory, step] of view.marks) text.append('mark', `${trajectory + 1}.${step + 1}`)
  if (!view.keys) text.set('keys', 'off')
  labels.forEach((names, at) => names.forEach((name, feature) => {
    if (name !== manifest.labels[at][feature]) text.append('name', `${manifest.layers[at].name},${feature + 1},${name}`)
  }))
  if (view.notes) text.set('notes', view.notes)
  return text.toString()
}

/** Return the view in a fragment; parts that do not fit this page are taken from the view
 * `start`. */
export function read(fragment, start, { manifest }) {
  const text = new URLSearchParams(fragment.replace(/^#/, ''))
  const view = { ...start, ...placeOf(text, start, manifest) }
  const layer = manifest.layers[view.layer]
  const featureOf = (word) => {
    const number = numberOf(word, layer.num_features + 1)
    return number === null ? null : number === 0 ? layer.num_features : number - 1
  }
  const rows = text.getAll('row').map((name) => outputNamed(manifest, name)).filter((each) => each >= 0)
  view.rows = rows.length ? rows.slice(0, 8) : start.rows
  view.gain = between(text.get('gain'), 0.1, 10) ?? GAIN
  view.smoothing = between(text.get('smoothing'), 0, 3) ?? SMOOTHING
  view.above = numberOf(text.get('above'), 100) ?? ABOVE
  view.sign = Object.hasOwn(SIGNS, text.get('sign')) ? text.get('sign') : 'two'
  view.chart = CHARTS.includes(text.get('chart')) ? text.get('chart') : 'waterfall'
  view.palette = Object.hasOwn(PALETTES, text.get('palette')) ? text.get('palette') : 'apart'
  view.window = between(text.get('window'), 16, 1e6) ?? 256
  view.speed = between(text.get('speed'), 0, 100) ?? 12
  view.overlay = text.get('ground') !== 'black'
  view.residual = text.get('residual') === 'shown'
  view.alone = [...new Set((text.get('alone') ?? '').split(',').map(featureOf)
    .filter((each) => each !== null))]
  view.curves = text.getAll('curve').flatMap((each) => {
    const [name, word] = each.split(',')
    const output = outputNamed(manifest, name)
    const feature = word === undefined ? null : featureOf(word)
    return output < 0 || (word !== undefined && feature === null) ? [] : [{ output, feature }]
  })
  view.marks = text.getAll('mark').flatMap((each) => {
    const [one, two] = each.split('.')
    const trajectory = fromOne(one, manifest.trajectories.length)
    const step = trajectory === null ? null : fromOne(two, manifest.trajectories[trajectory])
    return step === null ? [] : [[trajectory, step]]
  })
  view.beside = fromOne(text.get('beside'), manifest.trajectories.length)
  view.sameLevel = text.get('level') === 'same'
  view.ahead = Math.round(between(text.get('ahead'), -1e6, 1e6) ?? 0)
  view.keys = text.get('keys') !== 'off'
  view.notes = text.get('notes') ?? ''
  return view
}

/** Return the names of features by layer: those in a fragment, and those that the page came with. */
export function readNames(fragment, manifest) {
  const labels = manifest.labels.map((names) => [...names])
  for (const each of new URLSearchParams(fragment.replace(/^#/, '')).getAll('name')) {
    const [name, word, ...rest] = each.split(',')
    const at = layerNamed(manifest, name)
    const feature = at < 0 ? null : fromOne(word, labels[at].length)
    if (feature !== null) labels[at][feature] = rest.join(',').slice(0, MAX_NAME)
  }
  return labels
}

function placeOf(text, start, manifest) {
  const { layers, trajectories } = manifest
  const named = layerNamed(manifest, text.get('layer'))
  const layer = named >= 0 ? named : fromOne(text.get('layer'), layers.length) ?? start.layer
  const trajectory = fromOne(text.get('trajectory'), trajectories.length) ?? start.trajectory
  const step = fromOne(text.get('frame'), trajectories[trajectory]) ?? (text.has('trajectory') ? 0 : start.step)
  return { layer, trajectory, step }
}

/** Return the view in a published query `?layer=&trajectory=&frame=`; layer: name, or number from
 * 1. */
export function published(query, start, { manifest }) {
  return { ...start, ...placeOf(new URLSearchParams(query), start, manifest) }
}
