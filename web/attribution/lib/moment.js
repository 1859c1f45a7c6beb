// Actions, rewards and end of the shown step, and the whole step in one sentence.

import { rounded, shown } from '../../shared/lib/statistics.js'

/** Return the action taken at the shown step, and the probability of every action by its number. */
export function actionsAt(page) {
  const { manifest, steps, row } = page
  const count = manifest.actions.length
  const probabilities = Array.from(steps.probabilities.subarray(row * count, (row + 1) * count))
  return { taken: steps.action[row], probabilities }
}

/** Return the reward of the previous action, and whether the frame begins an episode. */
export function arrivedWith(page) {
  const { steps, row, view } = page
  return {
    reward: view.step > 0 ? steps.earned[row - 1] : 0,
    isNew: view.step === 0 || steps.episode[row] !== steps.episode[row - 1]
  }
}

/** Return null if the action does not end its episode; otherwise {cause} of the failure, which is
 * null if unknown or if the episode did not fail. */
export function endOf(page) {
  const { steps, row, view } = page
  if (!steps.ended[row]) return null
  return { cause: page.failuresOf(view.trajectory).get(view.step) ?? null }
}

const RARE = 0.05 // probability below which an action without a direction is not named

/** Arrange probabilities by direction: `cells`, [{right, up, action, probability}] of the nine
 * directions; `others`, [{action, probability}] of the other actions that are taken or not rare, the
 * most likely first; and `rest`, the summed probability of all others. */
export function pad(actions, probabilities, taken) {
  const cells = []
  for (const up of [1, 0, -1]) {
    for (const right of [-1, 0, 1]) {
      const action = actions.findIndex(({ direction }) => direction[0] === right && direction[1] === up)
      cells.push({ right, up, action, probability: probabilities[action] ?? 0 })
    }
  }
  const own = new Set(cells.map(({ action }) => action))
  const more = probabilities.map((probability, action) => ({ action, probability })).filter(({ action }) => !own.has(action))
  const isNamed = ({ action, probability }) => action === taken || probability >= RARE
  return { cells, others: more.filter(isNamed).sort((a, b) => b.probability - a.probability),
    rest: more.reduce((sum, each) => (isNamed(each) ? sum : sum + each.probability), 0) }
}

export function sentence(page) {
  const { manifest, steps, row, view } = page
  const { taken, probabilities } = actionsAt(page)
  const { reward, isNew } = arrivedWith(page)
  const end = endOf(page)
  return `${page.trajectoryName(view.trajectory)}, frame ${view.step + 1}: ${isNew ? 'new episode, ' : ''}`
    + `${reward ? `reward ${rounded(reward)}, ` : ''}action ${manifest.actions[taken].name} `
    + `(${Math.round(probabilities[taken] * 100)} %), value ${shown(steps.value[row])}, `
    + `advantage ${shown(steps.advantage[row])}`
    + (end === null ? '' : end.cause === null ? ', the episode ends' : `, the episode fails: ${end.cause}`)
}
