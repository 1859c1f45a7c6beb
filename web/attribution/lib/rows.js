// Content of the row of an output, for the page, its image and its video.

import { barRange, drawBars, drawWaterfall, totalsAt, waterfallLevels, waterfallRange } from './scene.js'

/** Titles and explanations of the images. */
export const PICTURES = {
  positive: ['Positive attribution', 'Where the frame raises the output, in the colours of the responsible features. The scale is below; weaker cells are not drawn.'],
  negative: ['Negative attribution', 'Where the frame lowers the output, in the colours of the responsible features. The scale is below; weaker cells are not drawn.'],
  combined: ['Absolute attribution', 'Where the frame raises or lowers the output, in the colours of the responsible features.'],
  active: ['Activation', 'Where the features are active, whatever their effect on the output.'],
  signed: ['Signed attribution', 'The sum over the selected features: blue where it raises the output, red where it lowers it.'],
  gradient: ['Gradient', 'Derivative of the output with respect to a pixel\'s brightness: blue if brightening raises the output, red if it lowers it. Plain gradients have no baseline and no completeness check.']
}

/** Return whether the attributions of an output sum to the output minus its baseline. */
export const isSum = ({ manifest, layer }, output) =>
  manifest.outputs[output].kind === 'attribution' && !layer.gradients

/** Return the kinds of images of an output, keys of PICTURES. */
export function picturesOf({ manifest, layer, view }, output) {
  if (layer.stride === null) return []
  if (layer.gradients) return ['gradient']
  if (manifest.outputs[output].kind === 'activation') return ['active']
  return view.sign === 'two' ? ['positive', 'negative'] : [view.sign]
}

/** Return the kind of chart of an output, 'waterfall' or 'bars'; null for no chart. */
export function chartOf(page, output) {
  if (page.layer.gradients) return null
  return !isSum(page, output) ? 'bars' : page.view.chart
}

const ranges = new WeakMap() // axis ranges by data file, because they are those of a whole trajectory

function rangeOf(found, chart, width) {
  let own = ranges.get(found)
  if (!own) ranges.set(found, own = {})
  own[chart] ??= chart === 'bars' ? barRange(found.totals, width) : waterfallLevels(found, width)
  return own[chart]
}

/** Return the attributions of an output at the shown step; null while they are loading. */
export function numbersOf(page, output) {
  const found = page.has(output) ? page.attribution(output) : null
  if (!found) return null
  const { step } = page.view
  return { found, totals: found.totals ? Array.from(totalsAt(found, step, page.features.length + 1)) : [],
    baseline: found.baseline?.[step], output: found.output?.[step], gap: found.gap?.[step] }
}

/** Draw the chart of an output; return false while its data is loading. */
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
