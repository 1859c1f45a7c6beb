// A dream: the steps taken so far in one world, each with the outputs of simulator and agent.

const FRAME = 64

/** Return an image of a frame (3, 64, 64) in [0, 1]. */
function imageOf(frame) {
  const image = new ImageData(FRAME, FRAME)
  const count = FRAME * FRAME
  for (let i = 0; i < count; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = Math.round(255 * frame[c * count + i])
    image.data[4 * i + 3] = 255
  }
  return image
}

export const hot = (action, count) => Float32Array.from({ length: count }, (_, i) => Number(i === action))

export class Dream {
  /** Records of the steps: {action, own: whether the person chose it, image, reward, end, death,
   * hidden, logProbs, value, displacement (null without a world), world, h, entering, past: initial
   * frames with which a dream could start at this step, [{frame, displacement}]}. */
  steps = $state.raw([])
  #engine

  /** first: {h, hidden, action: vector (A,), past} before the first step; world: number of its
   * world. */
  constructor(engine, first, world) {
    this.#engine = engine
    this.first = first
    this.world = world
  }

  get last() {
    return this.steps.length - 1
  }

  /** Take a step after the first `length` ones; later ones are dropped. action: null for the first
   * step, whose action is given; edits: changes of the hidden state after this step; holes: squares
   * that are painted at this step, or null, see worker.js. */
  async take(length, action, own, edits, holes = null) {
    const before = length ? this.steps[length - 1] : { ...this.first, world: this.world }
    const num = this.first.action.length
    const vector = action === null ? this.first.action : hot(action, num)
    const past = length ? before.past?.slice(1) : before.past
    const { frame, ...found } = await this.#engine.run('step', { h: before.h, hidden: before.hidden, action: vector,
      step: length, world: before.world, edits,
      ...(holes ? { holes, past } : {}) })
    const now = { frame, displacement: found.displacement }
    this.steps = [...this.steps.slice(0, length), { past: past && (length ? [...past, now] : past), ...found, entering: before.hidden, image: imageOf(frame), frame,
      action: action ?? vector.indexOf(1), own }]
  }

  cut(length) {
    if (this.steps.length > length) this.steps = this.steps.slice(0, length)
  }
}

/** Return the first step at which two dreams take different actions, or null. */
export function parting(one, other) {
  const count = Math.min(one.steps.length, other.steps.length)
  for (let step = 1; step < count; step++) if (one.steps[step].action !== other.steps[step].action) return step
  return null
}
