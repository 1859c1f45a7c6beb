// Drawing of the four views of a sample, for the page and the video.

import {
  gradientColour, drawBars, drawCloud, drawGradientKey, drawMessage, drawPath, drawPicture, scatterScales
} from '../../shared/lib/draw.js'
import { ranges, rounded, shown } from '../../shared/lib/statistics.js'

export const SCATTER_ASPECT = 1.12
const KEY_HEIGHT = 30
const SHADES = 15

/** Return ranges and titles of the chosen axes. */
export function axesOf(panel) {
  const { view, limits } = panel
  const range = (ic) => [limits.low[ic], limits.high[ic]]
  return { rangeX: range(view.x), rangeY: range(view.y), x: `IC ${view.x}`, y: `IC ${view.y}` }
}

/** Return a canvas with the axes and the cloud of states, which do not depend on sample and
 * step. */
export function cloudOf(panel, box, ratio) {
  const { manifest, steps, samples, recorded, view, colours } = panel
  const width = manifest.num_ics
  const clouds = []
  const chosen = panel.positions[view.colouring]
  if (chosen && view.cloud !== 'simulated') {
    const { low, high } = ranges(chosen, 1)
    const shades = Array.from(chosen, (value) => Math.min(
      Math.floor((value - low[0]) / (high[0] - low[0] || 1) * SHADES), SHADES - 1))
    for (let shade = 0; shade < SHADES; shade++) {
      const colour = gradientColour(2 * shade / (SHADES - 1) - 1, 1, colours)
      clouds.push({ colour, alpha: 0.8, size: 2.2, points: (add) => {
        for (let i = 0; i < shades.length; i++) {
          if (shades[i] === shade) add(recorded[i * width + view.x], recorded[i * width + view.y])
        }
      } })
    }
  } else if (recorded && view.cloud !== 'simulated') {
    clouds.push({ colour: colours.recorded, alpha: 0.35, size: 1.6, points: (add) => {
      for (let i = 0; i < recorded.length; i += width) add(recorded[i + view.x], recorded[i + view.y])
    } })
  }
  if (view.cloud !== 'recorded') {
    const few = panel.passing.length < samples.count
    clouds.push({ colour: colours.simulated, alpha: few ? 0.9 : 0.5, size: few ? 3 : 1.8, points: (add) => {
      for (const sample of panel.passing) {
        const end = samples.begin[sample] + samples.steps[sample]
        for (let row = samples.begin[sample]; row < end; row++) {
          add(steps.coordinates[row * width + view.x], steps.coordinates[row * width + view.y])
        }
      }
    } })
  }
  const canvas = document.createElement('canvas')
  canvas.width = Math.max(Math.round(box.w * ratio), 1)
  canvas.height = Math.max(Math.round(box.h * ratio), 1)
  const ctx = canvas.getContext('2d')
  ctx.scale(ratio, ratio)
  const axes = axesOf(panel)
  const inside = { x: 0, y: 0, w: box.w, h: box.h }
  drawCloud(ctx, inside, scatterScales(inside, axes.rangeX, axes.rangeY), axes, clouds, colours)
  return canvas
}

export function drawObservation(ctx, box, strips, panel, step) {
  if (strips.frames) drawPicture(ctx, box, strips.frames, step, panel.manifest.frame)
  else drawMessage(ctx, box, strips.problem || 'loading…', panel.colours)
}

export const ENDED = 'The recorded episode has ended.'

/** Return whether the recorded episode ends before a step. */
export const hasEnded = (strips, panel, step) => step * panel.manifest.frame[1] >= strips.recorded.width

export function drawRecorded(ctx, box, strips, panel, step) {
  if (hasEnded(strips, panel, step)) drawMessage(ctx, box, ENDED, panel.colours)
  else drawPicture(ctx, box, strips.recorded, step, panel.manifest.frame)
}

export function drawSaliency(ctx, box, strips, panel, sample, step) {
  if (strips.saliency) {
    drawPicture(ctx, box, strips.saliency, step, panel.manifest.frame)
    const { until, ended } = saliencyEnd(panel)
    if (step < until) return // otherwise, the image is empty
    ctx.fillStyle = panel.colours.surface
    ctx.fillRect(box.x, box.y + box.h - 24, box.w, 24)
    drawMessage(ctx, { ...box, y: box.y + box.h - 24, h: 24 }, ended, panel.colours)
  } else {
    drawMessage(ctx, box, withoutSaliency(panel, sample, strips) || strips.problem || 'loading…', panel.colours)
  }
}

/** Return the number of steps with saliency, and why the later ones have none. */
export function saliencyEnd({ type: { steps, counterfactual } }) {
  const last = steps.length ? Math.max(...steps) : Infinity
  return { until: last + 1, ended: counterfactual ? `not computed after step ${last}` : 'after the read-out: no effect' }
}

/** Return the reason why a sample has no saliency to show; empty if it has saliency. */
export function withoutSaliency(panel, sample, strips) {
  if (!panel.type) return 'This panel has no saliency.'
  if (panel.steps && !panel.has(sample, panel.view.type)) {
    return `No saliency of ${panel.type.title} was computed for this sample.`
  }
  if (panel.view.map && strips.frames && !strips.saliency && !strips.loading) {
    return `This sample has no map of the simulator's ${panel.manifest.maps[panel.view.map]}.`
  }
  return ''
}

export function drawStates(ctx, box, cloud, panel, sample, step, colour) {
  ctx.drawImage(cloud, box.x, box.y, box.w, box.h)
  const axes = axesOf(panel)
  const scales = scatterScales(box, axes.rangeX, axes.rangeY)
  const points = []
  for (let t = 0; t < panel.samples.steps[sample]; t++) {
    const at = panel.at(panel.steps.coordinates, sample, t)
    points.push([at[panel.view.x], at[panel.view.y]])
  }
  drawPath(ctx, scales, points, Math.min(step, points.length - 1), colour, panel.colours)
}

/** Return the gradient with the full colour: the largest |gradient| in the shown samples. */
export function fullGradient(panel) {
  let full = 0
  for (const sample of panel.shown) {
    for (let t = 0; t < panel.samples.steps[sample]; t++) {
      for (const value of panel.gradientsAt(sample, t) ?? []) full = Math.max(full, Math.abs(value))
    }
  }
  return full
}

/** Return the end of the bars' axis: the largest |coordinate| in all steps of the shown samples. */
function fullCoordinate(panel) {
  let full = 0
  for (const sample of panel.shown) {
    for (let t = 0; t < panel.samples.steps[sample]; t++) {
      for (const value of panel.at(panel.steps.coordinates, sample, t)) full = Math.max(full, Math.abs(value))
    }
  }
  return 1.12 * full || 1
}

export function drawCoordinates(ctx, box, panel, sample, step) {
  const full = fullGradient(panel)
  const gradients = panel.gradientsAt(sample, step)
  const values = panel.at(panel.steps.coordinates, sample, step)
  const bars = { ...box, h: box.h - KEY_HEIGHT }
  const axes = { range: fullCoordinate(panel), x: 'independent component', y: 'coordinate' }
  drawBars(ctx, bars, values, gradients, full, axes, [panel.view.x, panel.view.y], panel.colours)
  const key = { x: box.x + 40, y: box.y + bars.h + 6, w: box.w - 48, h: KEY_HEIGHT - 6 }
  if (gradients && full > 0) drawGradientKey(ctx, key, full, panel.colours)
  else drawMessage(ctx, key, gradients ? 'all gradients are 0' : panel.type?.counterfactual ? 'counterfactual maps have no gradients' : 'no gradients to colour by', panel.colours)
}

/** Return the agent's most likely action at a step, and the action that led to the step. */
export function actionsAt(panel, sample, step) {
  const { steps, manifest } = panel
  const row = panel.samples.row(sample, step)
  const named = (number) => manifest.actions[number] ?? null
  return {
    answer: named(steps.answers[row]), probability: steps.probabilities[row],
    entered: steps.entered[row] === manifest.not_recorded ? null : named(steps.entered[row])
  }
}

/** Return the probability that a sample's episode has ended by a step, in the simulator. */
export function endedBy(panel, sample, step) {
  const from = panel.samples.begin[sample]
  const row = panel.samples.row(sample, step)
  return 1 - panel.steps.terminals.subarray(from, row + 1).reduce((alive, end) => alive * (1 - end), 1)
}

/** Describe a step in one sentence, for screen readers and the video. */
export function sentence(panel, sample, step) {
  const row = panel.samples.row(sample, step)
  const { steps } = panel
  const { answer, probability } = actionsAt(panel, sample, step)
  return `${panel.samples.label(sample)}, step ${Math.min(step, panel.samples.steps[sample] - 1)}: `
    + `agent's action ${answer?.name ?? 'unknown'} (${Math.round(probability * 100)} %), `
    + `value ${shown(steps.values[row])}, reward ${rounded(steps.rewards[row])}, `
    + `terminal ${Math.round(steps.terminals[row] * 100)} %`
}
