if (!matchMedia('(prefers-reduced-motion: reduce)').matches) {
  for (const film of document.querySelectorAll('video[data-autoplay]')) film.play().catch(() => {})
}
// A link to a figure or a table that is folded opens it; so does printing.
const unfold = () => document.getElementById(location.hash.slice(1))?.querySelector('details')
addEventListener('hashchange', () => { if (location.hash === '#stages') unfold().open = true })
addEventListener('beforeprint', () => {
  for (const details of document.querySelectorAll('details')) details.open = true
})
