// Matrix products of programs, in AssemblyScript, because they take most of the time.
//
// The right matrix is processed in tiles of 8 columns, which are first copied to a buffer, so that
// the innermost loop reads it in order. Addresses are in bytes, other numbers count float32 numbers.

/** Multiply a matrix (rows, inner) by a tile (inner, 8), and store the first `count` columns in a
 * matrix with `columns` columns. bias: a number per row, or 0 for none. */
function multiply(a: usize, tile: usize, bias: usize, c: usize, rows: i32, inner: i32, columns: i32,
  count: i32): void {
  const row: usize = <usize>inner << 2
  const next: usize = <usize>columns << 2
  const zero = f32x4.splat(0)
  let r = 0
  for (; r + 4 <= rows; r += 4) {
    let c00 = zero, c10 = zero, c20 = zero, c30 = zero
    if (bias) {
      c00 = v128.load32_splat(bias)
      c10 = v128.load32_splat(bias, 4)
      c20 = v128.load32_splat(bias, 8)
      c30 = v128.load32_splat(bias, 12)
      bias += 16
    }
    let c01 = c00, c11 = c10, c21 = c20, c31 = c30
    let b = tile, a0 = a, a1 = a + row, a2 = a1 + row, a3 = a2 + row
    const end = a1
    while (a0 < end) {
      const b0 = v128.load(b), b1 = v128.load(b, 16)
      let v = v128.load32_splat(a0)
      c00 = f32x4.add(c00, f32x4.mul(v, b0))
      c01 = f32x4.add(c01, f32x4.mul(v, b1))
      v = v128.load32_splat(a1)
      c10 = f32x4.add(c10, f32x4.mul(v, b0))
      c11 = f32x4.add(c11, f32x4.mul(v, b1))
      v = v128.load32_splat(a2)
      c20 = f32x4.add(c20, f32x4.mul(v, b0))
      c21 = f32x4.add(c21, f32x4.mul(v, b1))
      v = v128.load32_splat(a3)
      c30 = f32x4.add(c30, f32x4.mul(v, b0))
      c31 = f32x4.add(c31, f32x4.mul(v, b1))
      b += 32
      a0 += 4
      a1 += 4
      a2 += 4
      a3 += 4
    }
    a = a3
    put(c, c00, c01, count)
    put(c + next, c10, c11, count)
    put(c + 2 * next, c20, c21, count)
    put(c + 3 * next, c30, c31, count)
    c += 4 * next
  }
  for (; r < rows; r++) {
    let c0 = bias ? v128.load32_splat(bias) : zero
    if (bias) bias += 4
    let c1 = c0, b = tile
    const end = a + row
    while (a < end) {
      const v = v128.load32_splat(a)
      c0 = f32x4.add(c0, f32x4.mul(v, v128.load(b)))
      c1 = f32x4.add(c1, f32x4.mul(v, v128.load(b, 16)))
      b += 32
      a += 4
    }
    put(c, c0, c1, count)
    c += next
  }
}

/** Store the first `count` of 8 numbers. */
function put(c: usize, first: v128, second: v128, count: i32): void {
  if (count == 8) {
    v128.store(c, first)
    v128.store(c, second, 16)
    return
  }
  for (let i = 0; i < count; i++) {
    f32.store(c + (<usize>i << 2), f32x4.extract_lane(i < 4 ? first : second, 0))
    if (i < 4) first = i8x16.shuffle(first, first, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3)
    else second = i8x16.shuffle(second, second, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3)
  }
}

/** c (rows, columns) = a (rows, inner) b (inner, columns). buffer: room for 8 inner numbers. */
export function matmul(a: usize, b: usize, c: usize, buffer: usize, rows: i32, inner: i32,
  columns: i32): void {
  for (let first = 0; first < columns; first += 8) {
    const count = min(columns - first, 8)
    let from: usize = b + (<usize>first << 2)
    for (let k = 0, to = buffer; k < inner; k++, to += 32, from += <usize>columns << 2) {
      if (count == 8) {
        v128.store(to, v128.load(from))
        v128.store(to, v128.load(from, 16), 16)
      } else {
        for (let i: usize = 0; i < 8; i++) {
          f32.store(to + (i << 2), <i32>i < count ? f32.load(from + (i << 2)) : 0)
        }
      }
    }
    multiply(a, buffer, 0, c + (<usize>first << 2), rows, inner, columns, count)
  }
}

/** Convolution of an image (channels, height, width), which already has its padding. weights:
 * (outputs, channels, kernelHeight, kernelWidth). output: (outputs, rows, columns). buffer: room for
 * 8 channels kernelHeight kernelWidth numbers. */
export function convolve(image: usize, weights: usize, bias: usize, output: usize, buffer: usize,
  channels: i32, height: i32, width: i32, outputs: i32, kernelHeight: i32, kernelWidth: i32,
  stride: i32, rows: i32, columns: i32): void {
  const pixels = rows * columns
  const inner = channels * kernelHeight * kernelWidth
  const places = buffer + (<usize>inner << 5) // of the 8 pixels
  for (let first = 0; first < pixels; first += 8) {
    const count = min(pixels - first, 8)
    const inRow = stride == 1 && count == 8 && first % columns + 8 <= columns
    for (let i = 0; i < 8; i++) {
      const pixel = first + min(i, count - 1)
      i32.store(places + (<usize>i << 2),
        ((pixel / columns) * stride * width + (pixel % columns) * stride) << 2)
    }
    const start: usize = image + <usize>i32.load(places)
    let to = buffer
    for (let c = 0; c < channels; c++) {
      for (let y = 0; y < kernelHeight; y++) {
        for (let x = 0; x < kernelWidth; x++, to += 32) {
          const offset: usize = <usize>((c * height + y) * width + x) << 2
          if (inRow) {
            v128.store(to, v128.load(start + offset))
            v128.store(to, v128.load(start + offset, 16), 16)
          } else {
            for (let i: usize = 0; i < 32; i += 4) {
              f32.store(to + i, f32.load(image + offset + <usize>i32.load(places + i)))
            }
          }
        }
      }
    }
    multiply(weights, buffer, bias, output + (<usize>first << 2), outputs, inner, pixels, count)
  }
}
