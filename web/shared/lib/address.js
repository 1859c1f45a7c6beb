// The view of a page in the fragment of its address.

const DELAY = 200 // ms; browsers refuse quicker changes of the address

/** The address in use: fragments that the reader brings, and those that the page puts there. */
export class Address {
  #written = ''
  #timer = null

  /** The fragment that the reader brought; null if there is none, or the page put it there itself. */
  brought() {
    const fragment = location.hash.replace(/^#/, '')
    return fragment && fragment !== this.#written ? fragment : null
  }

  /** Put a fragment there, a moment later, unless the reader brings another until then. */
  put(fragment) {
    clearTimeout(this.#timer)
    const before = location.hash
    this.#timer = setTimeout(() => {
      if (location.hash !== before) return
      this.#written = fragment
      history.replaceState(null, '', `#${fragment}`)
    }, DELAY)
  }

  /** The whole address with a fragment. */
  whole(fragment) {
    return `${location.href.replace(/#.*/s, '')}#${fragment}`
  }
}

/** A whole number from 0 on and smaller than `below`; null if the text is none. */
export function numberOf(text, below) {
  const value = /^\d+$/.test(text ?? '') ? Number(text) : -1
  return value >= 0 && value < below ? value : null
}
