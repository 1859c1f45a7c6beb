// Random numbers that depend on whole numbers only.

/** Return a random number between 0 and 1, exclusive, for whole numbers such as a seed and a
 * place. */
export function uniform(...numbers) {
  let state = 0x9e3779b9
  for (const number of numbers) {
    state = Math.imul(state ^ number, 0x85ebca6b)
    state = Math.imul(state ^ (state >>> 13), 0xc2b2ae35)
    state ^= state >>> 16
  }
  state = Math.imul(state ^ (state >>> 15), 0x2c1b3c6d)
  state = Math.imul(state ^ (state >>> 12), 0x297a2d39)
  return (((state ^ (state >>> 15)) >>> 0) + 0.5) / 2 ** 32
}

/** Return a normally distributed random number for whole numbers (Box and Muller 1958). */
export const normal = (...numbers) =>
  Math.sqrt(-2 * Math.log(uniform(...numbers, 1))) * Math.cos(2 * Math.PI * uniform(...numbers, 2))
