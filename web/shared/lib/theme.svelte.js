// The theme in use: that of the browser, or the reader's choice, which is kept for a page.

import { coloursOf } from './draw.js'

export const THEMES = ['auto', 'light', 'dark']

export class Theme {
  chosen = $state('auto')
  colours = $state.raw({}) // of the theme in use, for canvases

  /** Page: its name, under which the choice is kept. To be made while a component is. */
  constructor(page) {
    const key = `${page}-theme`
    try {
      const found = localStorage.getItem(key)
      if (THEMES.includes(found)) this.chosen = found
    } catch { /* the browser keeps nothing for pages from disk */ }
    $effect(() => {
      document.documentElement.dataset.theme = this.chosen
      try {
        localStorage.setItem(key, this.chosen)
      } catch { /* as above */ }
      this.#recolour()
    })
    $effect(() => {
      const dark = matchMedia('(prefers-color-scheme: dark)')
      const recolour = () => this.#recolour()
      dark.addEventListener('change', recolour)
      return () => dark.removeEventListener('change', recolour)
    })
  }

  #recolour() {
    this.colours = coloursOf(document.documentElement)
  }
}
