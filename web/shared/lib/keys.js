// Whether a key belongs to the focused control or to the page.
//
// Controls that are operated with a pointer keep the focus, but the keys after a click are meant
// for the page. Controls reached with the Tab key keep their keys.

const CONTROLS = 'input, select, textarea, button, summary, a, video'
const PLAIN = 'button, summary, a' // controls that are operated with Space and Enter alone
const MOVED = 'input[type=radio], input[type=range]' // and with arrows, Home and End
let pointed = null // control that was used last, if it was used with a pointer

addEventListener('pointerdown', ({ target }) => {
  pointed = target.closest?.('label')?.control ?? target.closest?.(CONTROLS) ?? null
}, true)
addEventListener('keydown', ({ key }) => { if (key === 'Tab') pointed = null }, true)
addEventListener('change', ({ target }) => { // otherwise, arrows would change a closed list again
  if (target === pointed && target.matches('select')) target.blur()
}, true)

/** Return whether the focused control needs the key of a keydown event. */
export function needsKey({ target, key }) {
  if (target.closest?.('dialog')) return true
  const control = target.closest?.(CONTROLS)
  if (!control) return false
  const isMoved = control.matches(MOVED)
  if (!isMoved && !control.matches(`${PLAIN}, input[type=checkbox]`)) return true
  if (control === pointed) {
    if (key !== 'Enter') control.blur() // Space would press a button again
    return key === 'Enter'
  }
  return key === ' ' || key === 'Enter' || (isMoved && /^(Arrow|Home|End|Page)/.test(key))
}
