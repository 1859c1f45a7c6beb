// The pictures of the sample and saliency type that are shown, as they arrive.

export class Strips {
  frames = $state.raw(null)
  saliency = $state.raw(null)
  problem = $state('')
  loading = $state(true)
  #frames = null // promises in use
  #saliency = null

  /** Take others; what is shown stays until they are there, so that nothing flickers. */
  async take(panel, sample, type) {
    const pictures = panel.pictures.of(sample)
    this.problem = ''
    this.loading = true
    const frames = pictures.frames()
    const saliency = panel.has(sample, type) ? pictures.saliency(type) : null
    this.#frames = frames
    this.#saliency = saliency
    try {
      const [strip, map] = await Promise.all([frames, saliency])
      if (this.#frames === frames && this.#saliency === saliency) {
        this.frames = strip
        this.saliency = map
        this.loading = false
        panel.pictures.of(panel.neighbour(sample, 1)) // begins to load what may come next
      }
    } catch (error) {
      if (this.#frames === frames) {
        this.frames = this.saliency = null
        this.problem = error.message
        this.loading = false
      }
    }
  }
}
