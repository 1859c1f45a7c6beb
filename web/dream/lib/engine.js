// Calls of the worker.

import Worker from './worker.js?worker&inline'

export class Engine {
  #worker = new Worker()
  #waiting = new Map()
  #count = 0

  /** onfatal(message): called if the worker ends. */
  constructor(onfatal) {
    this.#worker.onmessage = ({ data: { id, result, problem } }) => {
      const { resolve, reject } = this.#waiting.get(id)
      this.#waiting.delete(id)
      if (problem === undefined) resolve(result)
      else reject(new Error(problem))
    }
    this.#worker.onerror = (event) => onfatal(`The worker of this page ended: ${event.message}`)
  }

  /** Run one of the worker's calls. */
  run(call, given) {
    return new Promise((resolve, reject) => {
      const id = this.#count++
      this.#waiting.set(id, { resolve, reject })
      this.#worker.postMessage({ id, call, given })
    })
  }
}
