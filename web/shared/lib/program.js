// Programs: PyTorch functions that common/traced.py has traced. All values are contiguous float32
// arrays; their shapes are known, so memory is allocated once, when a program is loaded.

import wasm from './program.ts?wasm'

const PAGE = 65536 // bytes
const BEGIN = 1024 // bytes of memory that are reserved for the compiler
const UNIT = 64 // bytes to which sizes are rounded up

const code = Uint8Array.from(atob(wasm), (each) => each.charCodeAt(0))

// Operations on single numbers, as JavaScript expressions of the numbers a, b and c.
const EACH = {
  neg: '-a', cos: 'Math.cos(a)', sin: 'Math.sin(a)', abs: 'Math.abs(a)', exp: 'Math.exp(a)', log: 'Math.log(a)',
  log1p: 'Math.log1p(a)', sqrt: 'Math.sqrt(a)', floor: 'Math.floor(a)', trunc: 'Math.trunc(a)',
  silu: 'a / (1 + Math.exp(-a))', relu: 'a > 0 ? a : 0', sigmoid: '1 / (1 + Math.exp(-a))', tanh: 'Math.tanh(a)',
  softplus: 'a > 20 ? a : Math.log1p(Math.exp(a))', not: 'a === 0 ? 1 : 0',
  add: 'a + b', sub: 'a - b', mul: 'a * b', div: 'a / b', gt: 'a > b ? 1 : 0', lt: 'a < b ? 1 : 0',
  ge: 'a >= b ? 1 : 0', le: 'a <= b ? 1 : 0', eq: 'a === b ? 1 : 0', ne: 'a !== b ? 1 : 0',
  max: 'Math.max(a, b)', min: 'Math.min(a, b)', floor_div: 'Math.floor(a / b)', remainder: 'a - Math.floor(a / b) * b',
  pow: 'a ** b', logaddexp: 'Math.max(a, b) + Math.log1p(Math.exp(-Math.abs(a - b)))',
  where: 'a !== 0 ? b : c', clamp: 'Math.min(Math.max(a, b), c)'
}

const loops = new Map()
/** Return the loop of an operation on single numbers: loop(out, count, a, b, c). Inputs with one
 * number apply to all. */
function loopOf(name, inputs, count) {
  const single = inputs.map((input) => input.length === 1 && count !== 1)
  const key = `${name} ${single}`
  if (!loops.has(key)) {
    const of = Object.fromEntries(['a', 'b', 'c'].map((letter, i) => [letter, single[i] ? `${letter}0` : `${letter}[i]`]))
    const expression = EACH[name].replace(/\b[abc]\b/g, (letter) => of[letter])
    const first = single.map((is, i) => (is ? `const ${'abc'[i]}0 = ${'abc'[i]}[0];` : '')).join('')
    loops.set(key, new Function('out', 'count', 'a', 'b', 'c', `${first} for (let i = 0; i < count; i++) out[i] = ${expression}`))
  }
  return loops.get(key)
}

function reducer(start, combine, finish = (value) => value) {
  return (out, [from], count, rows, length) => () => {
    for (let row = 0, at = 0; row < rows; row++) {
      let value = start
      for (let i = 0; i < length; i++) value = combine(value, from[at++])
      out[row] = finish(value, length)
    }
  }
}

function cumulative(combine) {
  return (out, [from], count, rows, length) => () => {
    for (let at = 0; at < count; at++) out[at] = at % length ? combine(out[at - 1], from[at]) : from[at]
  }
}

function copyStrided(out, from, offset, sizes, strides) {
  const last = sizes.length - 1
  let to = 0
  const copy = (dim, at) => {
    const size = sizes[dim]
    const stride = strides[dim]
    if (dim === last) for (let i = 0; i < size; i++, at += stride) out[to++] = from[at]
    else for (let i = 0; i < size; i++, at += stride) copy(dim + 1, at)
  }
  copy(0, offset)
}

function softmax(isLog) {
  return (out, [from], count, rows, length) => () => {
    for (let begin = 0; begin < count; begin += length) {
      let most = -Infinity
      for (let i = begin; i < begin + length; i++) most = Math.max(most, from[i])
      let sum = 0
      for (let i = begin; i < begin + length; i++) sum += Math.exp(from[i] - most)
      const log = most + Math.log(sum)
      for (let i = begin; i < begin + length; i++) out[i] = isLog ? from[i] - log : Math.exp(from[i] - log)
    }
  }
}

/** Return the position of a number from -1 to 1 among pixels, rounded as in PyTorch. */
const placeOf = (at, size) =>
  Math.min(Math.max(Math.fround(Math.fround(at + 1) * Math.fround((size - 1) / 2)), 0), size - 1)

const sum = (a, b) => a + b

// Other operations: op(out, inputs, count, ...settings) returns a function that computes `out`. `this` is the program.
const OPERATIONS = {
  part: (out, [from], count, offset) => () => out.set(from.subarray(offset, offset + count)),
  strided: (out, [from], count, offset, sizes, strides) => () => copyStrided(out, from, offset, sizes, strides),
  take: (out, [from, places], count) => () => {
    for (let i = 0; i < count; i++) out[i] = places[i] < 0 ? 0 : from[places[i]]
  },
  cat: (out, parts, count, outer, lengths) => () => {
    for (let row = 0, at = 0; row < outer; row++) {
      parts.forEach((part, i) => {
        out.set(lengths[i] === part.length ? part : part.subarray(row * lengths[i], (row + 1) * lengths[i]), at)
        at += lengths[i]
      })
    }
  },
  sum: reducer(0, sum),
  mean: reducer(0, sum, (value, length) => value / length),
  amax: reducer(-Infinity, Math.max),
  amin: reducer(Infinity, Math.min),
  argmax: (out, [from], count, rows, length) => () => {
    for (let row = 0; row < rows; row++) {
      let best = row * length
      for (let i = best + 1; i < (row + 1) * length; i++) if (from[i] > from[best]) best = i
      out[row] = best - row * length
    }
  },
  cummax: cumulative(Math.max),
  cummin: cumulative(Math.min),
  softmax: softmax(false),
  log_softmax: softmax(true),
  topk: ([values, places], [from], count, rows, length, k) => () => {
    for (let row = 0; row < rows; row++) {
      const order = Array.from({ length }, (_, i) => i).sort((i, j) => from[row * length + j] - from[row * length + i] || i - j)
      for (let i = 0; i < k; i++) {
        places[row * k + i] = order[i]
        values[row * k + i] = from[row * length + order[i]]
      }
    }
  },
  gather: (out, [from, places], count, outer, size, chosen, inner) => () => {
    for (let i = 0; i < count; i++) {
      out[i] = from[(Math.floor(i / (chosen * inner)) * size + places[i]) * inner + i % inner]
    }
  },
  index: (out, [from, ...places], count, sizes, inner) => () => {
    for (let i = 0; i < count / inner; i++) {
      let at = 0
      places.forEach((place, dim) => { at = at * sizes[dim] + place[place.length === 1 ? 0 : i] })
      for (let j = 0; j < inner; j++) out[i * inner + j] = from[at * inner + j]
    }
  },
  group_norm: (out, [from, weight, bias], count, num, channels, size, groups, epsilon) => () => {
    const length = channels / groups * size
    for (let group = 0; group < num * groups; group++) {
      let total = 0
      let squares = 0
      for (let i = group * length; i < (group + 1) * length; i++) total += from[i]
      const mean = total / length
      for (let i = group * length; i < (group + 1) * length; i++) squares += (from[i] - mean) ** 2
      const scale = 1 / Math.sqrt(squares / length + epsilon)
      for (let i = group * length; i < (group + 1) * length; i++) {
        const channel = Math.floor(i / size) % channels
        out[i] = (from[i] - mean) * scale * weight[channel] + bias[channel]
      }
    }
  },
  max_pool: (out, [from], count, maps, height, width, kernel, stride, padding, rows, columns) => () => {
    for (let map = 0, to = 0; map < maps; map++) {
      for (let y = 0; y < rows; y++) {
        for (let x = 0; x < columns; x++) {
          let most = -Infinity
          for (let i = Math.max(y * stride - padding, 0); i < Math.min(y * stride - padding + kernel, height); i++) {
            for (let j = Math.max(x * stride - padding, 0); j < Math.min(x * stride - padding + kernel, width); j++) {
              const value = from[(map * height + i) * width + j]
              if (value > most) most = value
            }
          }
          out[to++] = most
        }
      }
    }
  },
  // Bilinear, with positions from -1 to 1 at the centres of the outermost pixels, and without end
  // beyond them.
  grid_sample: (out, [image, grid], count, num, channels, height, width, rows, columns) => () => {
    const pixels = rows * columns
    for (let n = 0; n < num; n++) {
      for (let i = 0; i < pixels; i++) {
        const x = placeOf(grid[2 * (n * pixels + i)], width)
        const y = placeOf(grid[2 * (n * pixels + i) + 1], height)
        const [left, top] = [Math.min(Math.floor(x), width - 2), Math.min(Math.floor(y), height - 2)]
        const [right, down] = [x - left, y - top]
        for (let c = 0; c < channels; c++) {
          const at = ((n * channels + c) * height + top) * width + left
          out[(n * channels + c) * pixels + i] = (image[at] * (1 - right) + image[at + 1] * right) * (1 - down)
            + (image[at + width] * (1 - right) + image[at + width + 1] * right) * down
        }
      }
    }
  },
  matmul(out, [one, other], count, batch, rows, inner, columns) {
    const { kernel, buffer } = this
    if (rows === 1 || inner === 1) {
      return () => {
        out.fill(0)
        for (let b = 0; b < batch; b++) {
          for (let r = 0; r < rows; r++) {
            const to = (b * rows + r) * columns
            for (let k = 0; k < inner; k++) {
              const factor = one[(b * rows + r) * inner + k]
              const at = (b * inner + k) * columns
              for (let i = 0; i < columns; i++) out[to + i] += factor * other[at + i]
            }
          }
        }
      }
    }
    return () => {
      for (let b = 0; b < batch; b++) {
        kernel.matmul(one.byteOffset + 4 * b * rows * inner, other.byteOffset + 4 * b * inner * columns,
          out.byteOffset + 4 * b * rows * columns, buffer.byteOffset, rows, inner, columns)
      }
    }
  },
  conv(out, [from, weights, bias], count, num, channels, height, width, outputs, kernelHeight, kernelWidth, stride,
    padding, rows, columns) {
    const { kernel, buffer, padded } = this
    const [tall, wide] = [height + 2 * padding, width + 2 * padding]
    return () => {
      for (let n = 0; n < num; n++) {
        let image = from.byteOffset + 4 * n * channels * height * width
        if (padding) {
          padded.fill(0, 0, channels * tall * wide)
          for (let row = 0; row < channels * height; row++) {
            const at = (n * channels * height + row) * width
            padded.set(from.subarray(at, at + width),
              ((Math.floor(row / height) * tall) + row % height + padding) * wide + padding)
          }
          image = padded.byteOffset
        }
        kernel.convolve(image, weights.byteOffset, bias ? bias.byteOffset : 0,
          out.byteOffset + 4 * n * outputs * rows * columns, buffer.byteOffset, channels, tall, wide, outputs,
          kernelHeight, kernelWidth, stride, rows, columns)
      }
    }
  }
}

/** Numbers of a matrix product's buffer, and of a padded image, that an instruction needs. */
function roomOf([name, , , , ...settings]) {
  if (name === 'matmul') return [8 * settings[2], 0]
  if (name !== 'conv') return [0, 0]
  const [, channels, height, width, , kernelHeight, kernelWidth, , padding] = settings
  return [8 * channels * kernelHeight * kernelWidth + 8, channels * (height + 2 * padding) * (width + 2 * padding)]
}

export class Program {
  /** description: the fields of a `Program` in common/traced.py apart from its constants;
   * constants: Float32Arrays, or Int32Arrays of places, by number. */
  static async of(description, constants) {
    const { instance } = await WebAssembly.instantiate(code, { env: { abort() {} } })
    return new Program(instance.exports, description, constants)
  }

  constructor(kernel, { inputs, outputs, shapes, instructions }, constants) {
    this.kernel = kernel
    let end = BEGIN
    const allocate = (count) => {
      const begin = end
      end += Math.ceil(Math.max(count, 1) * 4 / UNIT) * UNIT
      return begin
    }
    // Addresses and sizes by number. Memory is used again after the last use of a value.
    const places = new Map()
    const sizeOf = (name) => shapes[name].reduce((product, size) => product * size, 1)
    for (const [name, number] of Object.entries(inputs)) places.set(number, [allocate(sizeOf(name)), sizeOf(name)])
    for (const [number, array] of Object.entries(constants)) places.set(Number(number), [allocate(array.length), array.length])
    const kept = new Set([...places.keys(), ...Object.values(outputs)])
    const lastUse = new Map()
    instructions.forEach(([, , , given], i) => given.forEach((number) => lastUse.set(number, i)))
    const free = new Map() // addresses by size
    instructions.forEach(([, results, count, given], i) => {
      for (const number of results) places.set(number, [free.get(count)?.pop() ?? allocate(count), count])
      for (const number of new Set([...given, ...results])) {
        if (Array.isArray(number) || kept.has(number) || (lastUse.get(number) ?? i) !== i) continue
        const [address, size] = places.get(number)
        if (!free.has(size)) free.set(size, [])
        free.get(size).push(address)
      }
    })
    const rooms = instructions.map(roomOf)
    const [buffer, padded] = [0, 1].map((which) => {
      const count = Math.max(0, ...rooms.map((room) => room[which]))
      return [allocate(count), count]
    })
    const { memory } = kernel
    memory.grow(Math.max(0, Math.ceil((end - memory.buffer.byteLength) / PAGE)))
    const at = ([address, count]) => new Float32Array(memory.buffer, address, count)
    this.buffer = at(buffer)
    this.padded = at(padded)
    const values = new Map([...places].map(([number, place]) => [number, at(place)]))
    for (const [number, array] of Object.entries(constants)) {
      if (array instanceof Int32Array) values.set(Number(number), array)
      else values.get(Number(number)).set(array)
    }
    const named = (numbers) => Object.fromEntries(Object.entries(numbers).map(([name, number]) => [name, values.get(number)]))
    /** Arrays of inputs and outputs by name. Inputs keep what is written into them. */
    this.inputs = named(inputs)
    this.outputs = named(outputs)
    this.steps = instructions.map(([name, results, count, given, ...settings]) => {
      const arrays = given.map((number) => (Array.isArray(number) ? Float32Array.from(number) : values.get(number)))
      const outs = results.map((number) => values.get(number))
      if (name in EACH) {
        const loop = loopOf(name, arrays, count)
        return () => loop(outs[0], count, ...arrays)
      }
      return OPERATIONS[name].call(this, outs.length > 1 ? outs : outs[0], arrays, count, ...settings)
    })
  }

  /** Compute the outputs, arrays by name that the next run overwrites. given: arrays or numbers by
   * the name of an input; other inputs keep their values. */
  run(given = {}) {
    for (const [name, value] of Object.entries(given)) {
      const input = this.inputs[name]
      if (typeof value === 'number') input.fill(value)
      else if (value.length === input.length) input.set(value)
      else throw new Error(`${name} has ${value.length} numbers instead of ${input.length}`)
    }
    for (const step of this.steps) step()
    return this.outputs
  }
}
