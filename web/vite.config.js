import { svelte } from '@sveltejs/vite-plugin-svelte'
import asc from 'assemblyscript/asc'
import { createHash } from 'node:crypto'
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import { defineConfig } from 'vite'

// Pages: folders with main.js and index.html.
const PAGES = readdirSync('.').filter((name) => existsSync(`${name}/main.js`))

/** Return the checksum of all sources of a page, by which a test checks that the built files are up
 * to date. */
function checksum(page) {
  const sources = ['package-lock.json', 'package.json', page, 'shared', 'vite.config.js']
  const files = sources.flatMap((name) => (name.includes('.') ? [name]
    : readdirSync(name, { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile()).map((entry) => `${entry.parentPath}/${entry.name}`)))
  const all = createHash('sha256')
  for (const file of files.sort()) {
    all.update(`${file} ${createHash('sha256').update(readFileSync(file)).digest('hex')}\n`)
  }
  return all.digest('hex')
}

// A page from disk cannot read its own files. For "Save as one HTML file", each script therefore
// holds index.html and the style sheet, and is a function, whose source text it can read.
const signed = {
  name: 'signed',
  generateBundle: {
    order: 'post', // after the style sheet has been added
    handler(_, bundle) {
      const page = this.environment.name
      const html = readFileSync(`${page}/index.html`, 'utf8')
      const script = bundle[`${page}.js`]
      const own = JSON.stringify({ name: page, html, css: String(bundle[`${page}.css`].source) })
      script.code = `/* built from sources ${checksum(page)} */\n`
        + `(function run() {\nglobalThis.pageSource = { ...${own}, script: \`(\${run})()\` };\n${script.code}})()\n`
      this.emitFile({ type: 'asset', fileName: 'index.html', source: html })
    }
  }
}

/** Plugin for `import base64 from './x.ts?wasm'`: compiles AssemblyScript to WebAssembly with SIMD,
 * in base64. */
const wasm = {
  name: 'wasm',
  enforce: 'pre',
  async load(id) {
    const [file, query] = id.split('?')
    if (query !== 'wasm') return null
    let binary
    const { error, stderr } = await asc.main([
      'source.ts', '--outFile', 'x.wasm', '--runtime', 'stub', '--enable', 'simd', '-O3', '--noAssert'
    ], {
      readFile: (name) => (name === 'source.ts' ? readFileSync(file, 'utf8') : null),
      writeFile: (_, content) => { binary = content },
      listFiles: () => []
    })
    if (error) throw new Error(`${error.message}\n${stderr}`)
    return `export default ${JSON.stringify(Buffer.from(binary).toString('base64'))}`
  }
}

// A page that is opened from disk can load classic scripts but no modules. Each page is therefore
// built into a single script, and index.html is written by hand. File names without a hash keep the
// built files comparable. One build produces one script, so every page is a separate environment. A
// page from disk cannot run a worker from a file either: `import Worker from
// './x.js?worker&inline'` creates it from a blob.
const environments = Object.fromEntries(PAGES.map((page) => [page, {
  consumer: 'client',
  build: {
    outDir: `built/${page}`,
    emptyOutDir: true,
    lib: {
      entry: `${page}/main.js`,
      name: page,
      formats: ['iife'],
      fileName: () => `${page}.js`,
      cssFileName: page
    }
  }
}]))

export default defineConfig({
  plugins: [svelte(), wasm, signed],
  publicDir: false,
  worker: { format: 'iife', plugins: () => [wasm] },
  environments,
  builder: {
    async buildApp(builder) {
      for (const page of PAGES) await builder.build(builder.environments[page])
    }
  }
})
