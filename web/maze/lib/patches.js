// Patches: with the syntax of interventions/patch_text.py, the options of
// interventions/maze_words.py, and the effects of interventions/patches.py. Kinds and options that
// need files or reference frames are missing. `add` takes a vector of the maze on the page: cheese
// or top_right.
//
//     kind @ layer [: channels] [= value] {, word = value}

import {
  cheesePair, columnOf, decisionOf, pathBetween, rowOf, squareAt, startOf, topRightPair, cheesesOf
} from './grid.js'

export const KINDS = ['add', 'set', 'multiply', 'clamp', 'zero']
export const VECTORS = { cheese: cheesePair, top_right: topRightPair }
export const MAPPINGS = ['published', 'centred']
export const PLACES = ['decision_square', 'path', 'off_path']
const ELSEWHERE = {
  mean: 'reference frames', resample: 'reference frames', noise: 'draws of random numbers',
  project: 'a file with a vector', shift: 'reference frames', interchange: 'pairs of frames'
}
const EPISODES = ['steps', 'levels', 'condition']
const NUMBERS = /^\d+(-\d+)?$/
const ALL = 'all' // all layers except HEADS
const HEADS = ['fc_policy', 'fc_value', 'hidden_state']

const TAKES = {
  set: 'a number', multiply: 'a number, or positive:a,negative:b', clamp: 'low:high, of which one may be left out',
  add: 'cheese or top_right, a vector of the maze on this page'
}
const WORDS_OF = { set: ['others', 'override'], add: ['coefficient'] }
const WORDS = ['cell', 'square', 'mapping', 'squares', 'at', 'facing']

class Unfit extends Error {}

function number(text) {
  const value = text.trim() === '' ? NaN : Number(text)
  if (!Number.isFinite(value)) throw new Unfit('a number')
  return value
}

function channels(text) {
  const found = []
  for (const part of text.split(/[,/]/)) {
    const [first, last = first] = part.trim().split('-').map(Number)
    if (!NUMBERS.test(part.trim()) || last - first + found.length >= 100000) {
      throw new Unfit('whole numbers and ranges such as 8,55,70-77, in options 8/55/70-77')
    }
    for (let i = first; i <= last; i++) found.push(i)
  }
  if (!found.length) throw new Unfit('ranges from a smaller to a larger number')
  return found
}

function places(example) {
  return (text) => text.split('/').map((part) => {
    const found = /^(\d{1,3})\.(\d{1,3})$/.exec(part)
    if (!found) throw new Unfit(`row.column${example}`)
    return [Number(found[1]), Number(found[2])]
  })
}

const oneOf = (...choices) => (text) => {
  if (!choices.includes(text)) throw new Unfit(choices.join(' or '))
  return text
}

const VALUES = {
  set: number,
  add: oneOf(...Object.keys(VECTORS)),
  multiply(text) {
    const both = /^positive:([^,]+),negative:([^,]+)$/.exec(text)
    return both ? [number(both[1]), number(both[2])] : [number(text), null]
  },
  clamp(text) {
    const [low, high, more] = text.split(':')
    if (high === undefined || more !== undefined || !(low || high)) throw new Unfit(TAKES.clamp)
    return [low ? number(low) : null, high ? number(high) : null]
  }
}
const OF_WORD = {
  others: number, coefficient: number, override: oneOf('yes', 'no'), facing: oneOf('0', '1'),
  mapping: oneOf(...MAPPINGS), at: oneOf(...PLACES),
  cell: places(' from the top left, such as 5.10, or several, 5.10/5.11'),
  square: places(' of a square, such as 12.10, or several, 12.10/13.10'),
  squares: places(' of a square, such as 12.10, or several, 12.10/13.10')
}

const shownNumber = (value) => String(value)
const ranges = (list) => {
  const parts = []
  for (let i = 0, j; i < list.length; i = j) {
    for (j = i + 1; j < list.length && list[j] === list[j - 1] + 1;) j++
    parts.push(...(j - i < 3 ? list.slice(i, j) : [`${list[i]}-${list[j - 1]}`]))
  }
  return parts.join('/')
}
const WRITTEN = {
  set: shownNumber,
  add: (name) => name,
  multiply: ([positive, negative]) => (negative === null ? shownNumber(positive)
    : `positive:${positive},negative:${negative}`),
  clamp: ([low, high]) => `${low ?? ''}:${high ?? ''}`
}

const MOST_CHOICES = 12

/** Return a hint: the most similar of several names, or all names if they are few. */
export function nearest(name, choices) {
  const distance = (a, b) => {
    let row = Array.from({ length: b.length + 1 }, (_, j) => j)
    for (let i = 1; i <= a.length; i++) {
      const next = [i]
      for (let j = 1; j <= b.length; j++) {
        next.push(Math.min(next[j - 1] + 1, row[j] + 1, row[j - 1] + (a[i - 1] !== b[j - 1])))
      }
      row = next
    }
    return row[b.length]
  }
  const like = choices.map((each) => [distance(name, each), each]).sort((a, b) => a[0] - b[0])[0]
  if (like[0] <= like[1].length / 2) return ` (did you mean '${like[1]}'?)`
  return choices.length > MOST_CHOICES ? ' (the list of layers has its names)' : ` (choose from ${choices.join(', ')})`
}

/** Parse the text of a patch: {kind, layer, channels, value, words}; words: parsed values of the
 * options by name. Throws an error that names the invalid part. */
export function parsePatch(text) {
  const where = `the patch '${text}'`
  const fail = (reason) => { throw new Error(`${where}${reason}`) }
  const [kind, ...behind] = text.split('@')
  if (!behind.length) {
    fail(' has no @; a patch is kind@layer[:channels][=value]{,option=value}, such as zero@embedder.block2.res1.resadd:55')
  }
  const [head, ...parts] = behind.join('@').split(',')
  const cut = (each, sign) => {
    const at = each.indexOf(sign)
    return at < 0 ? [each, false, ''] : [each.slice(0, at), true, each.slice(at + 1)]
  }
  let [place, hasValue, value] = cut(head, '=')
  let [layer, hasChannels, ofChannels] = cut(place, ':')
  const words = new Map()
  for (const part of parts) {
    const [word, equals, ofWord] = cut(part, '=')
    if (hasChannels && !hasValue && NUMBERS.test(word.trim())) {
      ofChannels = `${ofChannels},${word}`
      hasValue = equals
      value = ofWord
    } else if (equals) {
      if (words.has(word.trim())) fail(` has '${word.trim()}' twice`)
      words.set(word.trim(), ofWord.trim())
    } else if (hasValue && !words.size) value += `,${part}`
    else fail(`: '${part}' is neither a channel nor an option with a value, such as cell=5.10`)
  }
  const name = kind.trim()
  if (Object.hasOwn(ELSEWHERE, name)) {
    fail(` needs ${ELSEWHERE[name]}, which this page does not have; use python -m maze.fields --patch`)
  }
  if (!KINDS.includes(name)) fail(`: there is no kind of patch '${name}'${nearest(name, KINDS)}`)
  const read = (part, as, reader) => {
    try {
      return reader(part)
    } catch (error) {
      if (error instanceof Unfit) fail(`: '${part}' as ${as} is not ${error.message}`)
      throw error
    }
  }
  const takes = TAKES[name] ? `${name} takes ${TAKES[name]}, as in ${name}@layer=value` : `${name} takes no value`
  if (TAKES[name] && !value.trim()) fail(` lacks its value: ${takes}`)
  if (!TAKES[name] && hasValue) fail(` has the value '${value.trim()}', but ${takes}`)
  if (!layer.trim()) fail(' names no layer')
  const known = [...WORDS, ...(WORDS_OF[name] ?? [])]
  for (const word of words.keys()) {
    if (EPISODES.includes(word)) {
      fail(` has the option '${word}', which is for episodes and sources; use python -m maze.fields --patch`)
    }
    if (!known.includes(word)) fail(`: ${name} has no option '${word}'${nearest(word, known)}`)
  }
  return {
    kind: name, layer: layer.trim(),
    channels: hasChannels ? read(ofChannels.trim(), 'channels', channels) : null,
    value: TAKES[name] ? read(value.trim(), 'value', VALUES[name]) : null,
    words: Object.fromEntries([...words].map(([word, ofWord]) => [word, read(ofWord, word, OF_WORD[word])]))
  }
}

/** Return the text of a patch, the inverse of parsePatch. */
export function toText({ kind, layer, channels: ofChannels, value, words }) {
  const head = `${kind}@${layer}${ofChannels ? `:${ranges(ofChannels)}` : ''}${TAKES[kind] ? `=${WRITTEN[kind](value)}` : ''}`
  const written = Object.entries(words).map(([word, ofWord]) =>
    `${word}=${Array.isArray(ofWord) ? ofWord.map((each) => each.join('.')).join('/') : ofWord}`)
  return [head, ...written].join(',')
}

// Layers: {name, shape, stride, first_pixel}, as in the manifest.

const isMap = (layer) => layer.stride !== null

/** Return the layers with a given name, or all layers; see agents/layers.py. */
export function layersNamed(layers, name) {
  if (name === ALL) return layers.filter((layer) => !HEADS.includes(layer.name))
  const path = name.replace(/_out$/, '')
  const found = layers.filter((layer) => layer.name === path || (path && layer.name.startsWith(`${path}.`)))
  if (found.length) return [found.at(-1)]
  throw new Error(`the agent has no layer '${name}'${nearest(name, layers.map((layer) => layer.name))}`)
}

/** Round to the nearest integer, halves to even. */
function roundEven(value) {
  const below = Math.floor(value)
  return value - below === 0.5 ? below + (below % 2 === 0 ? 0 : 1) : Math.round(value)
}

/** Return the cell of a layer, [row, column] from the top left, that shows a square of a world of
 * `dim` squares. */
export function cellOf(layer, dim, row, column, mapping = 'published') {
  const square = 64 / dim
  return [dim - 1 - row + 0.5, column + 0.5].map((place, axis) => {
    const pixel = place * square
    const cell = mapping === 'published' ? Math.floor(pixel / layer.stride)
      : roundEven((pixel - 0.5 - layer.first_pixel) / layer.stride)
    return Math.min(Math.max(cell, 0), layer.shape[1 + axis] - 1)
  })
}

/** Return the entries of a layer on which a patch acts, {channels, cells}; null for all. */
function entriesOf(patch, layer, dim) {
  const what = isMap(layer) ? 'channels' : 'units'
  for (const channel of patch.channels ?? []) {
    if (channel >= layer.shape[0]) {
      throw new Error(`${layer.name} has no ${what.slice(0, -1)} ${channel}: its ${what} are numbered 0 to ${layer.shape[0] - 1}`)
    }
  }
  const { square, cell, mapping } = patch.words
  if (mapping && !square) throw new Error(`mapping=${mapping} selects the cell of a square, so it needs square=`)
  if (!square && !cell) return { channels: patch.channels, cells: null }
  if (!isMap(layer)) {
    throw new Error(`${layer.name} has no cells: it is ${layer.shape[0]} units; leave cells and squares out, or name a layer with a map`)
  }
  if (square && cell) throw new Error(`the patch of ${layer.name} has cells and squares; leave one out`)
  if (square && patch.layer === ALL) {
    throw new Error(`square=${square.map((each) => each.join('.')).join('/')} needs one layer, not all, whose maps differ`)
  }
  for (const [row, column] of cell ?? []) {
    if (row >= layer.shape[1] || column >= layer.shape[2]) {
      throw new Error(`${layer.name} has no cell ${row}.${column}: its rows go from 0 to ${layer.shape[1] - 1}, its columns to ${layer.shape[2] - 1}`)
    }
  }
  checkSquares('square', square, dim)
  return {
    channels: patch.channels,
    cells: cell ?? square.map(([row, column]) => cellOf(layer, dim, row, column, mapping))
  }
}

function checkSquares(word, squares, dim) {
  for (const [row, column] of squares ?? []) {
    if (Math.max(row, column) >= dim) {
      throw new Error(`${word}=${row}.${column} lies outside the world: rows and columns go from 0 to ${dim - 1}`)
    }
  }
}

/** Return a function of the mouse's square and facing that tells whether the patch is active. */
function conditionOf({ words }, maze) {
  checkSquares('squares', words.squares, maze.dim)
  const holds = []
  if (words.squares) {
    const chosen = new Set(words.squares.map(([row, column]) => squareAt(maze, row, column)))
    holds.push((square) => chosen.has(square))
  }
  if (words.facing) holds.push((square, facing) => facing === Number(words.facing))
  if (words.at) {
    const decision = decisionOf(maze)
    const cheeses = cheesesOf(maze)
    const found = words.at === 'decision_square' ? [decision.square]
      : (cheeses.length === 1 && pathBetween(maze, startOf(maze), cheeses[0])) || []
    holds.push((square) => found.includes(square) !== (words.at === 'off_path'))
  }
  return (square, facing) => holds.every((each) => each(square, facing))
}

const meet = (a, b, same) => a === null || b === null || a.some((one) => b.some((other) => same(one, other)))

/** Check patches against the layers and the maze, and find where they act. Returns [{patch,
 * inForce(square, facing), sites: [{layer, channels, cells}]}]; throws an error about the first
 * patch that cannot act. */
export function openPatches(patches, layers, maze) {
  const opened = []
  for (const patch of patches) {
    const sites = layersNamed(layers, patch.layer).map((layer) => ({ layer, ...entriesOf(patch, layer, maze.dim) }))
    if (patch.kind === 'set') checkSet(patch, sites, opened)
    if (patch.kind === 'clamp' && patch.value[0] !== null && patch.value[1] !== null && patch.value[0] > patch.value[1]) {
      throw new Error(`clamp has a lower bound, ${patch.value[0]}, above its upper bound, ${patch.value[1]}`)
    }
    opened.push({ patch, sites, inForce: conditionOf(patch, maze) })
  }
  return opened
}

function checkSet(patch, sites, earlier) {
  const isConditional = ({ words }) => words.squares || words.at || words.facing
  for (const { layer, channels: of, cells } of sites) {
    if (patch.words.others !== undefined && cells === null) {
      throw new Error(`others=${patch.words.others} sets all other cells, but the patch of ${layer.name} names no cell; add cell=row.column`)
    }
    for (const { patch: other, sites: places } of earlier) {
      if (other.kind !== 'set' || patch.words.override === 'yes' || isConditional(patch) || isConditional(other)) continue
      for (const site of places) {
        const entries = (each, ofPatch) => (ofPatch.words.others === undefined ? each : null)
        if (site.layer === layer && meet(of, site.channels, (a, b) => a === b)
          && meet(entries(cells, patch), entries(site.cells, other), (a, b) => a[0] === b[0] && a[1] === b[1])) {
          throw new Error(`two patches set the same entries of ${layer.name}; to let the second replace the first, give it 'override'`)
        }
      }
    }
  }
}

/** Return a function of the mouse's square and facing that returns the changes of a network's
 * layers, for Network.run(). vectors: Float32Array in the order of the layer's shape, by `<name>
 * <layer>`. */
export function changesOf(opened, network, vectors) {
  const all = opened.map(({ patch, sites, inForce }) => ({
    inForce,
    changes: sites.map(({ layer, channels: of, cells }) => [
      network.index.get(layer.name), change(patch, of, cells, vectors.get(`${patch.value} ${layer.name}`))])
  }))
  return (square, facing) => {
    const found = new Map()
    for (const { inForce, changes } of all) {
      if (!inForce(square, facing)) continue
      for (const [index, does] of changes) found.set(index, [...(found.get(index) ?? []), does])
    }
    return found
  }
}

/** Return a function of a layer and its output that changes the output in place. */
function change(patch, channels, cells, vector) {
  const { kind, value, words } = patch
  const within = cells && new Set(cells.map((each) => each.join('.')))
  const becomes = {
    zero: () => 0,
    set: (a, i, isInside) => (isInside ? value : words.others),
    multiply: (a) => (a > 0 ? value[0] : value[1] ?? value[0]) * a,
    clamp: (a) => Math.min(Math.max(a, value[0] ?? -Infinity), value[1] ?? Infinity),
    add: (a, i) => a + (words.coefficient ?? 1) * vector[i]
  }[kind]
  return ({ isMap: hasCells, channels: count, height, width, stride }, numbers) => {
    const chosen = channels ?? Array.from({ length: count }, (_, channel) => channel)
    for (let y = 0; y < (hasCells ? height : 1); y++) {
      for (let x = 0; x < (hasCells ? width : 1); x++) {
        const isInside = !within || within.has(`${y}.${x}`)
        if (!isInside && words.others === undefined) continue
        const from = hasCells ? ((y + 1) * (width + 2) + x + 1) * stride : 0
        for (const channel of chosen) {
          const at = from + channel
          numbers[at] = becomes(numbers[at], hasCells ? (channel * height + y) * width + x : channel, isInside)
        }
      }
    }
  }
}

/** Return the squares in the `square` options of patches, to be marked in images. */
export const markedSquares = (patches, maze) => patches.flatMap(({ words }) =>
  (words.square ?? []).filter(([row, column]) => Math.max(row, column) < maze.dim)
    .map(([row, column]) => squareAt(maze, row, column)))

export const placeOf = (maze, square) => [rowOf(maze, square), columnOf(maze, square)]
