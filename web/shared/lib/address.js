// Reading and writing of a page's view in the fragment of its address.

const DELAY = 200 // ms; browsers reject more frequent changes of the address

/** The page's address, with fragments that come from the user and fragments that the page
 * writes. */
export class Address {
  #written = ''
  #timer = null

  /** Return the fragment in the address, or the view with which the page was saved as one file; null
   * if there is none, or if the page itself wrote it. */
  brought() {
    const fragment = location.hash.replace(/^#/, '') || (document.documentElement.dataset.view ?? '')
    return fragment && fragment !== this.#written ? fragment : null
  }

  /** Write a fragment after DELAY, unless the user changes the address before. */
  put(fragment) {
    clearTimeout(this.#timer)
    const before = location.hash
    this.#timer = setTimeout(() => {
      if (location.hash !== before) return
      this.#written = fragment
      history.replaceState(null, '', `#${fragment}`)
    }, DELAY)
  }

  /** Return the whole address with a fragment. */
  whole(fragment) {
    return `${location.href.replace(/#.*/s, '')}#${fragment}`
  }
}

/** Parse a whole number from 0 to below `below`; return null if the text is anything else. */
export function numberOf(text, below) {
  const value = /^\d+$/.test(text ?? '') ? Number(text) : -1
  return value >= 0 && value < below ? value : null
}
