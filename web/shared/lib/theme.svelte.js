// Theme of a page: the theme of the browser, or the user's choice, which is remembered per page.

import { coloursOf } from './draw.js'

export const THEMES = ['auto', 'light', 'dark']

export class Theme {
  chosen = $state('auto')
  colours = $state.raw({}) // colours of the current theme, for canvases

  #more

  /** Must be called while a component is initialised. page: name under which the choice is stored;
   * more: names of further colours of the page. */
  constructor(page, more = []) {
    this.#more = more
    const key = `${page}-theme`
    try {
      const found = localStorage.getItem(key)
      if (THEMES.includes(found)) this.chosen = found
    } catch { /* some browsers store nothing for pages from disk */ }
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
    this.colours = coloursOf(document.documentElement, this.#more)
  }
}
