// Images of the shown sample and saliency type, updated as they are loaded.

export class Strips {
  frames = $state.raw(null)
  recorded = $state.raw(null)
  saliency = $state.raw(null)
  problem = $state('')
  loading = $state(true)
  #wanted = 0

  /** Switch to other images; the old ones are shown until they are loaded, to avoid flicker. */
  async take(panel, sample, type, map) {
    const wanted = ++this.#wanted
    const { pictures } = panel
    this.problem = ''
    this.loading = true
    try {
      const found = await Promise.all([pictures.frames(sample), pictures.recorded(sample),
        panel.has(sample, type) ? pictures.saliency(sample, type, map) : null])
      if (wanted !== this.#wanted) return
      ;[this.frames, this.recorded, this.saliency] = found
      pictures.frames(panel.neighbour(sample, 1)).catch(() => {}) // preloaded: may be shown next
    } catch (error) {
      if (wanted !== this.#wanted) return
      this.frames = this.recorded = this.saliency = null
      this.problem = error.message
    }
    this.loading = false
  }
}
