// The page as one HTML file: script, style, the data files that were read, and the view.

import { filesRead, ownText } from './data.js'
import { save } from './video.js'

/** Return HTML that opens without any other file. */
export async function singleFile() {
  const { name, html, css, script } = globalThis.pageSource
  const files = await Promise.all(filesRead().map(async (file) => [file, await ownText(file)]))
  const data = files.map(([file, text]) => `<script type="application/json" id="data/${file}">${escaped(text)}</script>`)
  const view = document.createElement('html')
  view.dataset.view = location.hash.replace(/^#/, '')
  const [before, after] = html.split('</body>')
  return (before + data.join('\n') + `\n<script>${escaped(script)}</script>\n</body>` + after)
    .replace('<html', () => view.outerHTML.replace(/><.*/s, '').replace(/ lang="[^"]*"/, ''))
    .replace(`<link rel="stylesheet" href="${name}.css">`, () => `<style>${css}</style>`)
    .replace(`<script defer src="${name}.js"></script>`, '')
}

/** Escape text that would end or nest a script element; in strings of scripts and of JSON, the
 * escape stands for the same character. */
const escaped = (text) => text.replace(/<(?=!--|\/?script)/gi, '\\u003C')

/** Offer the page as one file; the name is its title. */
export async function saveSingleFile() {
  const title = document.title.replace(/[^\w-]+/g, '_').slice(0, 80)
  save(new Blob([await singleFile()], { type: 'text/html' }), `${title}.html`)
}
