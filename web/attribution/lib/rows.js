// What a row shows of an output, on the page, in a picture of it and in a video.

import { barRange, drawBars, drawWaterfall, totalsAt, waterfallLevels, waterfallRange } from './scene.js'

/** Titles and explanations of the pictures. */
export const PICTURES = {
  positive: ['Raises it', 'Where the frame raises the output, in the colours of the features that do. Brightness is on one scale for all frames of this layer and output.'],
  negative: ['Lowers it', 'Where the frame lowers the output, in the colours of the features that do. Brightness is on one scale for all frames of this layer and output.'],
  combined: ['Raises or lowers it', 'Where the frame raises or lowers the output, in the colours of the features that do.'],
  active: ['Where they are active', 'Where the features are active, whatever that does to an output.'],
  signed: ['Blue raises, red lowers', 'The sum of the chosen features: blue where it raises the output, red where it lowers it.'],
  gradient: ['Brighter: blue raises, red lowers', 'How the output changes when a pixel gets a little brighter: blue if it rises, red if it falls. This is the gradient, and no attribution: it starts from no baseline and adds up to nothing.']
}

/** Whether an output is its baseline and what the features add. */
export const isSum = ({ manifest, layer }, output) =>
  manifest.outputs[output].kind === 'attribution' && !layer.gradients

/** Kinds of pictures of an output. */
export function picturesOf({ manifest, layer, view }, output) {
  if (layer.stride === null) return []
  if (layer.gradients) return ['gradient']
  if (manifest.outputs[output].kind === 'activation') return ['active']
  return view.sign === 'two' ? ['positive', 'negative'] : [view.sign]
}

/** Kind of the chart of an output; null without one. */
export function chartOf(page, output) {
  if (page.layer.gradients) return null
  return !isSum(page, output) ? 'bars' : page.view.chart
}

const ranges = new WeakMap() // of files, since they are of a whole trajectory

function rangeOf(found, chart, width) {
  let own = ranges.get(found)
  if (!own) ranges.set(found, own = {})
  own[chart] ??= chart === 'bars' ? barRange(found.totals, width) : waterfallLevels(found, width)
  return own[chart]
}

/** The numbers of an output in the frame that is shown; null while they are on their way. */
export function numbersOf(page, output) {
  const found = page.has(output) ? page.attribution(output) : null
  if (!found) return null
  const { step } = page.view
  return { found, totals: found.totals ? Array.from(totalsAt(found, step, page.features.length + 1)) : [],
    baseline: found.baseline?.[step], output: found.output?.[step], gap: found.gap?.[step] }
}

/** The chart of an output. Gives false while it is on its way. */
export function drawChart(ctx, box, page, output, chart, colours) {
  const numbers = numbersOf(page, output)
  if (!numbers) return false
  const range = rangeOf(numbers.found, chart, page.features.length + 1)
  if (chart === 'bars') drawBars(ctx, box, numbers.totals, range, page.on, page.colours, colours)
  else {
    drawWaterfall(ctx, box, numbers, waterfallRange(range, page.view.step), page.on, page.colours, colours)
  }
  return true
}
