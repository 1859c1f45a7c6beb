// Reader of the data that analysis/panel_files.py writes; the format is described there.

const FORMAT = 1
const TYPES = { float32: Float32Array, int16: Int16Array, uint8: Uint8Array }

const arrived = new Map()
globalThis.panelData = (name, content) => arrived.set(name, content)

/** The content of a file of data. A script works from disk as well, where fetch() is not allowed. */
function load(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement('script')
    script.src = `data/${name}.js`
    const end = () => {
      script.remove()
      const content = arrived.get(name)
      arrived.delete(name)
      if (content === undefined) {
        reject(new Error(`data/${name}.js is missing or damaged; export the panel again`))
      } else resolve(content)
    }
    script.onload = end
    script.onerror = end
    document.head.append(script)
  })
}

function bytes(base64) {
  const text = atob(base64)
  const found = new Uint8Array(text.length)
  for (let i = 0; i < text.length; i++) found[i] = text.charCodeAt(i)
  return found
}

function arrays(content) {
  return Object.fromEntries(Object.entries(content).map(
    ([name, [type, base64]]) => [name, new TYPES[type](bytes(base64).buffer)]))
}

/** A strip of pictures. It comes from the script's own bytes, so that canvases stay exportable. */
async function strip(base64) {
  return createImageBitmap(new Blob([bytes(base64)], { type: 'image/webp' }))
}

const two = (number) => String(number).padStart(2, '0')
const five = (number) => String(number).padStart(5, '0')

export async function loadManifest() {
  const manifest = await load('manifest')
  if (manifest.format !== FORMAT) {
    throw new Error('This data is of another version than the page; export the panel again.')
  }
  return manifest
}

export const loadSteps = async () => arrays(await load('steps'))
export const loadRecorded = async () => arrays(await load('recorded'))
export const loadGradients = async (type) => arrays(await load(`gradients_${two(type)}`)).gradients

const KEPT = 24 // samples whose pictures stay in memory

/** The pictures of samples; strips are decoded when they are first asked for. */
export class Pictures {
  #samples = new Map()

  /** {frames, saliency(type)}: promises of strips, null where the sample lacks the type. */
  of(sample) {
    let found = this.#samples.get(sample)
    if (found) this.#samples.delete(sample) // and comes last again
    else {
      const content = load(`pictures_${five(sample)}`)
      const strips = new Map()
      const once = (key, base64) => {
        if (!strips.has(key)) strips.set(key, base64 === null ? null : strip(base64))
        return strips.get(key)
      }
      found = {
        frames: async () => once('frames', (await content).frames),
        saliency: async (type) => once(type, (await content).saliency[type])
      }
      content.catch(() => this.#samples.delete(sample))
    }
    this.#samples.set(sample, found)
    if (this.#samples.size > KEPT) this.#samples.delete(this.#samples.keys().next().value)
    return found
  }
}
