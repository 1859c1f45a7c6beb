// Reader of the data files of a page; common/page_files.py describes and writes the format.

const TYPES = { float32: Float32Array, int8: Int8Array, int16: Int16Array, int32: Int32Array,
  uint8: Uint8Array, uint32: Uint32Array }

/** Convert numbers in half precision, as Uint16, to a Float32Array. */
function halves(codes) {
  const found = new Float32Array(codes.length)
  for (let i = 0; i < codes.length; i++) {
    const exponent = (codes[i] >> 10) & 31
    const fraction = codes[i] & 1023
    const size = exponent === 0 ? fraction * 2 ** -24 : exponent === 31 ? (fraction ? NaN : Infinity)
      : (1024 + fraction) * 2 ** (exponent - 25)
    found[i] = codes[i] >> 15 ? -size : size
  }
  return found
}

const array = (type, buffer) => (type === 'float16' ? halves(new Uint16Array(buffer)) : new TYPES[type](buffer))

const arrived = new Map()
globalThis.panelData = (name, content) => arrived.set(name, content)
const read = new Set()
const inside = () => document.querySelector('script[type="application/json"]') !== null

/** Return the names of the data files that were read. */
export const filesRead = () => [...read]

/** Return the content of a data file that was read, as JSON. */
export const ownText = async (name) => JSON.stringify(await load(name))

/** Load the content of a data file. It is a script, which also loads from disk, where fetch() is
 * forbidden. A page that was saved as one file contains it. */
export async function load(name) {
  const own = document.getElementById(`data/${name}`)
  if (!own && inside()) throw new Error(`This saved page does not contain data/${name}.js.`)
  const content = own ? JSON.parse(own.textContent) : await loadScript(name)
  read.add(name)
  return content
}

function loadScript(name) {
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

/** Load the manifest, and throw an error if the data has another format version. */
export async function loadManifest(format) {
  const manifest = await load('manifest')
  if (manifest.format !== format) {
    throw new Error('This data is of another version than the page; export this page again.')
  }
  return manifest
}

const [BITS, FIRST_LETTER] = [15, 0x4000]

/** Decode bytes from text: two letters with the number of bytes, then 15 bits per letter. */
export function bytes(letters) {
  const code = (i) => letters.charCodeAt(i) - FIRST_LETTER
  const found = new Uint8Array((code(0) << BITS) | code(1))
  let [held, bits, next] = [0, 0, 2]
  for (let i = 0; i < found.length; i++) {
    if (bits < 8) {
      held = ((held & 0xff) << BITS) | code(next++) // fewer than 8 bits were left
      bits += BITS
    }
    bits -= 8
    found[i] = held >> bits
  }
  return found
}

/** Decode arrays by name from [type, letters]; float16 becomes a Float32Array. */
export function arrays(content) {
  return Object.fromEntries(Object.entries(content).map(
    ([name, [type, letters]]) => [name, array(type, bytes(letters).buffer)]))
}

async function inflated(letters) {
  const stream = new Blob([bytes(letters)]).stream().pipeThrough(new DecompressionStream('gzip'))
  return new Response(stream).arrayBuffer()
}

/** Decode and decompress arrays by name from [type, letters, 'gzip']. */
export async function unpacked(content) {
  return Object.fromEntries(await Promise.all(Object.entries(content).map(
    async ([name, [type, letters]]) => [name, array(type, await inflated(letters))])))
}
