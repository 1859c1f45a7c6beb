import { svelte } from '@sveltejs/vite-plugin-svelte'
import { createHash } from 'node:crypto'
import { readdirSync, readFileSync } from 'node:fs'
import { defineConfig } from 'vite'

const SOURCES = ['package-lock.json', 'package.json', 'public', 'src', 'vite.config.js']

/** Checksum of all that is built, by which a test knows whether the built files are up to date. */
function checksum() {
  const files = SOURCES.flatMap((name) => (name.includes('.') ? [name]
    : readdirSync(name, { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile()).map((entry) => `${entry.parentPath}/${entry.name}`)))
  const all = createHash('sha256')
  for (const file of files.sort()) {
    all.update(`${file} ${createHash('sha256').update(readFileSync(file)).digest('hex')}\n`)
  }
  return all.digest('hex')
}

const signed = {
  name: 'signed',
  generateBundle(_, bundle) {
    bundle['panel.js'].code = `/* built from sources ${checksum()} */\n${bundle['panel.js'].code}`
  }
}

// A page that is opened from disk may load classic scripts alone, no modules; so all of it becomes
// one, and index.html is written by hand. Names without a hash keep the built files comparable.
export default defineConfig({
  plugins: [svelte(), signed],
  build: {
    outDir: 'built',
    emptyOutDir: true,
    lib: {
      entry: 'src/main.js',
      name: 'interpretabilityPanel',
      formats: ['iife'],
      fileName: () => 'panel.js',
      cssFileName: 'panel'
    }
  }
})
