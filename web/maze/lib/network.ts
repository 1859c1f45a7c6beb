// Arithmetic of a network, in AssemblyScript, because it takes nearly all of the time.
//
// A map is a float32 array of cells by row, with the channels of a cell fastest. The number of
// channels is padded with zeros to a multiple of 8, and the map has a border of one cell of zeros,
// so a map of H x W cells with S channels has (H + 2) (W + 2) S numbers. Addresses are in bytes.

/** Convolution 3x3, stride 1, padding 1. weights: (output channels / 8, 9 taps by row, input
 * `channels`, 8 output channels). bias: a number per output channel. width: a multiple of 4.
 * Strides are padded numbers of channels. */
export function convolve(input: usize, weights: usize, bias: usize, output: usize, height: i32,
  width: i32, channels: i32, inputStride: i32, outputStride: i32): void {
  const cell: usize = <usize>inputStride << 2
  const outputCell: usize = <usize>outputStride << 2
  const row: usize = cell * (width + 2)
  const outputRow: usize = outputCell * (width + 2)
  const block: usize = <usize>(channels * 9 * 8) << 2
  for (let first = 0; first < outputStride; first += 8) {
    const b0 = v128.load(bias + (<usize>first << 2))
    const b1 = v128.load(bias + (<usize>first << 2), 16)
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x += 4) {
        let a00 = b0, a01 = b1, a10 = b0, a11 = b1, a20 = b0, a21 = b1, a30 = b0, a31 = b1
        let w = weights
        for (let dy = 0; dy < 3; dy++) {
          for (let dx = 0; dx < 3; dx++) {
            let p0: usize = input + row * (y + dy) + cell * (x + dx)
            let p1: usize = p0 + cell, p2: usize = p1 + cell, p3: usize = p2 + cell
            const end = p0 + (<usize>channels << 2)
            while (p0 < end) {
              const w0 = v128.load(w), w1 = v128.load(w, 16)
              let v = v128.load32_splat(p0)
              a00 = f32x4.add(a00, f32x4.mul(v, w0))
              a01 = f32x4.add(a01, f32x4.mul(v, w1))
              v = v128.load32_splat(p1)
              a10 = f32x4.add(a10, f32x4.mul(v, w0))
              a11 = f32x4.add(a11, f32x4.mul(v, w1))
              v = v128.load32_splat(p2)
              a20 = f32x4.add(a20, f32x4.mul(v, w0))
              a21 = f32x4.add(a21, f32x4.mul(v, w1))
              v = v128.load32_splat(p3)
              a30 = f32x4.add(a30, f32x4.mul(v, w0))
              a31 = f32x4.add(a31, f32x4.mul(v, w1))
              w += 32
              p0 += 4
              p1 += 4
              p2 += 4
              p3 += 4
            }
          }
        }
        let o: usize = output + outputRow * (y + 1) + outputCell * (x + 1) + (<usize>first << 2)
        v128.store(o, a00)
        v128.store(o, a01, 16)
        o += outputCell
        v128.store(o, a10)
        v128.store(o, a11, 16)
        o += outputCell
        v128.store(o, a20)
        v128.store(o, a21, 16)
        o += outputCell
        v128.store(o, a30)
        v128.store(o, a31, 16)
      }
    }
    weights += block
  }
}

/** Max-pooling 3x3, stride 2, padding 1, of a map with even sides. */
export function pool(input: usize, output: usize, height: i32, width: i32, stride: i32): void {
  const cell: usize = <usize>stride << 2
  const row: usize = cell * (width + 2)
  const outputRow: usize = cell * ((width >> 1) + 2)
  for (let y = 0; y < height; y += 2) {
    for (let x = 0; x < width; x += 2) {
      const o: usize = output + outputRow * ((y >> 1) + 1) + cell * ((x >> 1) + 1)
      for (let c: usize = 0; c < cell; c += 16) {
        let most = v128.load(input + row * (y + 1) + cell * (x + 1) + c)
        for (let dy = y ? 0 : 1; dy < 3; dy++) {
          for (let dx = x ? 0 : 1; dx < 3; dx++) {
            most = f32x4.max(most, v128.load(input + row * (y + dy) + cell * (x + dx) + c))
          }
        }
        v128.store(o + c, most)
      }
    }
  }
}

/** ReLU of `count` numbers, a multiple of 4. */
export function relu(input: usize, output: usize, count: i32): void {
  const zero = f32x4.splat(0)
  for (let i: usize = 0, bytes: usize = <usize>count << 2; i < bytes; i += 16) {
    v128.store(output + i, f32x4.max(v128.load(input + i), zero))
  }
}

/** Element-wise sum of two arrays of `count` numbers, a multiple of 4. */
export function add(one: usize, other: usize, output: usize, count: i32): void {
  for (let i: usize = 0, bytes: usize = <usize>count << 2; i < bytes; i += 16) {
    v128.store(output + i, f32x4.add(v128.load(one + i), v128.load(other + i)))
  }
}

/** output = weights input + bias; weights: a row of `inputs` numbers, a multiple of 4, per
 * output. */
export function multiply(input: usize, weights: usize, bias: usize, output: usize, inputs: i32,
  outputs: i32): void {
  const bytes: usize = <usize>inputs << 2
  for (let unit: usize = 0; unit < <usize>outputs; unit++) {
    let sum = f32x4.splat(0)
    for (let i: usize = 0; i < bytes; i += 16) {
      sum = f32x4.add(sum, f32x4.mul(v128.load(input + i), v128.load(weights + i)))
    }
    f32.store(output + (unit << 2), f32.load(bias + (unit << 2)) + f32x4.extract_lane(sum, 0)
      + f32x4.extract_lane(sum, 1) + f32x4.extract_lane(sum, 2) + f32x4.extract_lane(sum, 3))
    weights += bytes
  }
}
