// Reader of a page's data; common/page_files.py describes the format and writes it.

const TYPES = { float32: Float32Array, int8: Int8Array, int16: Int16Array, int32: Int32Array,
  uint8: Uint8Array, uint32: Uint32Array }

const arrived = new Map()
globalThis.panelData = (name, content) => arrived.set(name, content)

/** The content of a file of data. A script works from disk as well, where fetch() is not allowed. */
export function load(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement('script')
    script.src = `data/${name}.js`
    const end = () => {
      script.remove()
      const content = arrived.get(name)
      arrived.delete(name)
      if (content === undefined) {
        reject(new Error(`data/${name}.js is missing or damaged; export this page again`))
      } else resolve(content)
    }
    script.onload = end
    script.onerror = end
    document.head.append(script)
  })
}

/** The manifest of data in a format that the page reads. */
export async function loadManifest(format) {
  const manifest = await load('manifest')
  if (manifest.format !== format) {
    throw new Error('This data is of another version than the page; export this page again.')
  }
  return manifest
}

export function bytes(base64) {
  const text = atob(base64)
  const found = new Uint8Array(text.length)
  for (let i = 0; i < text.length; i++) found[i] = text.charCodeAt(i)
  return found
}

/** Arrays by name, from [type, base64]. */
export function arrays(content) {
  return Object.fromEntries(Object.entries(content).map(
    ([name, [type, base64]]) => [name, new TYPES[type](bytes(base64).buffer)]))
}

async function inflated(base64) {
  const stream = new Blob([bytes(base64)]).stream().pipeThrough(new DecompressionStream('gzip'))
  return new Response(stream).arrayBuffer()
}

/** Arrays by name, from [type, base64, 'gzip']. */
export async function unpacked(content) {
  return Object.fromEntries(await Promise.all(Object.entries(content).map(
    async ([name, [type, base64]]) => [name, new TYPES[type](await inflated(base64))])))
}
