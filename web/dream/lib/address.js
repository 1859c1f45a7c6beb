// Conversion of the view to the fragment of the address and back.
//
// Actions are letters, a for action 0; capital ones were chosen by the person. An edit is written as
// axis.hold or add.amount.first step.last step, with axes from 1, and without a last step if it
// lasts. A paint is written as step_seed_squares, a square as right.down; without a seed, the squares
// are empty.

import { numberOf } from '../../shared/lib/address.js'

export const MODES = ['sampled', 'likely', 'you', 'recorded']
const A = 'a'.charCodeAt(0)

export function write(view, steps, edits, paints) {
  const text = new URLSearchParams()
  text.set('start', view.start + 1)
  if (view.world) text.set('world', view.world)
  text.set('mode', view.mode)
  if (view.seed) text.set('seed', view.seed)
  const actions = steps.slice(1).map(({ action, own }) => {
    const letter = String.fromCharCode(A + action)
    return own ? letter.toUpperCase() : letter
  }).join('')
  if (actions) text.set('actions', actions)
  text.set('step', view.step)
  for (const { axis, hold, amount, from, to } of edits) {
    text.append('edit', [axis + 1, hold ? 'hold' : 'add', amount, from, to ?? ''].join('_'))
  }
  for (const { squares, seed, from } of paints) {
    text.append('paint', [from, seed ?? '', ...squares.map((square) => square.join('.'))].join('_'))
  }
  if (view.speed !== 12) text.set('speed', view.speed)
  if (view.saliency !== 'none') text.set('saliency', view.saliency)
  if (view.notes) text.set('notes', view.notes)
  return text.toString()
}

/** Return {view, actions: [{action, own}], edits, paints} of a fragment; parts that do not fit this page are
 * taken from the view `start`. */
export function read(fragment, start, manifest) {
  const text = new URLSearchParams(fragment)
  const number = numberOf(text.get('start'), manifest.starts.length + 1)
  const actions = /^[a-zA-Z]*$/.test(text.get('actions') ?? '') ? [...(text.get('actions') ?? '')].map((letter) => ({
    action: letter.toLowerCase().charCodeAt(0) - A, own: letter !== letter.toLowerCase()
  })).filter(({ action }) => action < manifest.actions.length) : []
  const edits = text.getAll('edit').flatMap((word) => {
    const [axis, kind, amount, from, to] = word.split('_')
    const at = numberOf(axis, manifest.axes.length + 1)
    const begin = numberOf(from, 1e6)
    if (!at || !['add', 'hold'].includes(kind) || amount === '' || !Number.isFinite(Number(amount)) || begin === null) return []
    return [{ axis: at - 1, hold: kind === 'hold', amount: Number(amount), from: begin, to: numberOf(to, 1e6) }]
  })
  const paints = manifest.world === null ? [] : text.getAll('paint').flatMap((word) => {
    const [step, seed, ...squares] = word.split('_')
    const from = numberOf(step, 1e6)
    if (from === null || !squares.length || !squares.every((square) => /^-?\d{1,4}\.-?\d{1,4}$/.test(square))) return []
    return [{ squares: squares.map((square) => square.split('.').map(Number)), seed: numberOf(seed, 1e6), from }]
  })
  const mode = text.get('mode')
  const view = { ...start, start: number ? number - 1 : start.start, world: numberOf(text.get('world'), 1e6) ?? 0,
    mode: MODES.includes(mode) ? mode : start.mode, seed: numberOf(text.get('seed'), 1e6) ?? 0,
    step: Math.min(numberOf(text.get('step'), 1e6) ?? 0, actions.length),
    speed: numberOf(text.get('speed'), 100) || start.speed,
    saliency: ['value', 'action'].includes(text.get('saliency')) ? text.get('saliency') : 'none',
    notes: text.get('notes') ?? '' }
  if (view.mode === 'recorded' && !manifest.starts[view.start].actions) view.mode = 'sampled'
  return { view, actions, edits, paints }
}
