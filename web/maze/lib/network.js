// Forward pass of an agent: IMPALA without memory, as in agents/networks.py.

const FRAME = 64
const BEGIN = 1024 // bytes of memory that are reserved for the compiler

const multipleOf = (number, value) => Math.ceil(value / number) * number

/** WebAssembly of network.ts, with memory that is allocated and never freed. */
export class Kernel {
  static async of(bytes) {
    const { instance } = await WebAssembly.instantiate(bytes, { env: { abort() {} } })
    return new Kernel(instance.exports)
  }

  constructor(exports) {
    this.does = exports
    this.end = BEGIN
  }

  /** Allocate `count` float32 numbers, all 0, and return their address. */
  numbers(count) {
    const address = this.end
    this.end += multipleOf(16, 4 * count)
    const lacking = this.end - this.does.memory.buffer.byteLength
    if (lacking > 0) this.does.memory.grow(Math.ceil(lacking / 65536) + 256)
    return address
  }

  at(address, count) {
    return new Float32Array(this.does.memory.buffer, address, count)
  }
}

/** Return name, kind and inputs of all layers, in order of computation. */
function plan() {
  const layers = []
  const add = (name, kind, ...inputs) => {
    layers.push({ name, kind, inputs })
    return name
  }
  let last = 'frame'
  for (const block of ['embedder.block1', 'embedder.block2', 'embedder.block3']) {
    last = add(`${block}.maxpool`, 'pool', add(`${block}.conv`, 'convolve', last))
    for (const unit of [`${block}.res1`, `${block}.res2`]) {
      const first = add(`${unit}.conv1`, 'convolve', add(`${unit}.relu1`, 'relu', last))
      const second = add(`${unit}.conv2`, 'convolve', add(`${unit}.relu2`, 'relu', first))
      last = add(`${unit}.resadd`, 'add', second, last)
    }
  }
  last = add('embedder.flatten', 'flatten', add('embedder.relu3', 'relu', last))
  last = add('embedder.relufc', 'relu', add('embedder.fc', 'multiply', last))
  last = add('hidden_state', 'copy', last)
  add('fc_policy', 'multiply', last)
  add('fc_value', 'multiply', last)
  return layers
}

/** Network of an agent. layers: layers in the manifest; weights: arrays by their names in the
 * agent's file. */
export class Network {
  constructor(kernel, layers, weights) {
    this.kernel = kernel
    const shapes = new Map(layers.map(({ name, shape }) => [name, shape]))
    this.places = new Map([['frame', this.#place([3, FRAME, FRAME])]])
    this.layers = plan().map((layer) => {
      const place = this.#place(shapes.get(layer.name))
      this.places.set(layer.name, place)
      return { ...layer, ...place, numbers: this.#weights(layer, weights) }
    })
    this.index = new Map(this.layers.map(({ name }, i) => [name, i]))
  }

  /** Allocate memory for an output of a shape: cells of maps by row, with a border, channels
   * fastest. */
  #place(shape) {
    const [channels, height = 0, width = 0] = shape
    const isMap = shape.length > 1
    const stride = isMap ? multipleOf(8, channels) : 1
    const count = isMap ? (height + 2) * (width + 2) * stride : multipleOf(4, channels)
    return { shape, isMap, channels, height, width, stride, count, address: this.kernel.numbers(count) }
  }

  /** Copy weights and bias of a layer to memory, in the order in which network.ts reads them. */
  #weights({ name, kind, inputs }, weights) {
    if (kind !== 'convolve' && kind !== 'multiply') return null
    const [from, to] = [this.places.get(inputs[0]), this.places.get(name)]
    const matrix = weights[`${name}.weight`]
    const bias = this.kernel.numbers(multipleOf(8, to.channels))
    this.kernel.at(bias, to.channels).set(weights[`${name}.bias`])
    const count = kind === 'convolve' ? to.stride * 9 * from.channels : to.channels * from.count
    const address = this.kernel.numbers(count)
    const packed = this.kernel.at(address, count)
    if (kind === 'multiply') {
      for (let unit = 0; unit < to.channels; unit++) {
        packed.set(matrix.subarray(unit * from.channels, (unit + 1) * from.channels), unit * from.count)
      }
    } else {
      for (let out = 0; out < to.channels; out++) {
        const block = Math.floor(out / 8) * 9 * from.channels * 8 + (out % 8)
        for (let c = 0; c < from.channels; c++) {
          for (let tap = 0; tap < 9; tap++) {
            packed[block + (tap * from.channels + c) * 8] = matrix[(out * from.channels + c) * 9 + tap]
          }
        }
      }
    }
    return { address, bias }
  }

  /** Write a frame, Uint8 (64 * 64, 3), to the input of the first layer. */
  see(frame) {
    const { address, count, stride } = this.places.get('frame')
    const numbers = this.kernel.at(address, count)
    for (let y = 0, pixel = 0; y < FRAME; y++) {
      let at = ((y + 1) * (FRAME + 2) + 1) * stride
      for (let x = 0; x < FRAME; x++, pixel += 3, at += stride) {
        numbers[at] = frame[pixel] / 255
        numbers[at + 1] = frame[pixel + 1] / 255
        numbers[at + 2] = frame[pixel + 2] / 255
      }
    }
  }

  /** Compute all layers from the number `from` on. changes: lists of functions by the number of a
   * layer, which are called with the layer and its output after it is computed, and change this
   * output. isThere: whether the output of the first layer has been computed already. */
  run(changes = new Map(), from = 0, isThere = false) {
    for (let i = from; i < this.layers.length; i++) {
      const layer = this.layers[i]
      if (!isThere || i > from) this.#compute(layer)
      for (const change of changes.get(i) ?? []) change(layer, this.kernel.at(layer.address, layer.count))
    }
  }

  #compute({ kind, inputs, address, count, channels, stride, numbers }) {
    const { does } = this.kernel
    const [from, other] = inputs.map((name) => this.places.get(name))
    switch (kind) {
      case 'convolve':
        does.convolve(from.address, numbers.address, numbers.bias, address, from.height, from.width,
          from.channels, from.stride, stride)
        break
      case 'pool':
        does.pool(from.address, address, from.height, from.width, stride)
        break
      case 'relu':
        does.relu(from.address, address, count)
        break
      case 'add':
        does.add(from.address, other.address, address, count)
        break
      case 'multiply':
        does.multiply(from.address, numbers.address, numbers.bias, address, from.count, channels)
        break
      case 'flatten':
        this.kernel.at(address, count).set(this.outputs(from))
        break
      case 'copy':
        this.kernel.at(address, count).set(this.kernel.at(from.address, count))
        break
    }
  }

  /** Return the places of all outputs that layers after a layer read, including the output of this
   * layer. */
  #reads(first) {
    const later = this.layers.slice(first + 1).flatMap(({ inputs }) => inputs)
    const isThere = (name) => name === 'frame' || this.index.get(name) <= first
    return [...new Set([this.layers[first].name, ...later.filter(isThere)])].map((name) => this.places.get(name))
  }

  /** Copy all outputs that `run(changes, first, true)` needs. */
  saved(first) {
    return this.#reads(first).map(({ address, count }) => this.kernel.at(address, count).slice())
  }

  /** Restore outputs that `saved` copied. */
  restore(first, saved) {
    this.#reads(first).forEach(({ address, count }, i) => this.kernel.at(address, count).set(saved[i]))
  }

  /** Return a copy of the output of a layer, in the order of its shape. */
  outputs({ address, count, isMap, channels, height, width, stride }) {
    const numbers = this.kernel.at(address, count)
    if (!isMap) return numbers.slice(0, channels)
    const found = new Float32Array(channels * height * width)
    for (let c = 0, i = 0; c < channels; c++) {
      for (let y = 0; y < height; y++) {
        let at = ((y + 1) * (width + 2) + 1) * stride + c
        for (let x = 0; x < width; x++, at += stride) found[i++] = numbers[at]
      }
    }
    return found
  }

  layer(name) {
    return this.layers[this.index.get(name)]
  }

  /** Return the log-probabilities of the actions, and the value. */
  answer() {
    const logits = this.outputs(this.layer('fc_policy'))
    const most = Math.max(...logits)
    const log = most + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0))
    return { logProbs: logits.map((logit) => logit - log), value: this.outputs(this.layer('fc_value'))[0] }
  }
}
