// Films without native controls, which would cover small frames: a click plays or pauses.
for (const film of document.querySelectorAll('video')) {
  const bar = document.createElement('div')
  const button = document.createElement('button')
  const place = document.createElement('input')
  bar.className = 'bar'
  button.type = 'button'
  Object.assign(place, { type: 'range', min: 0, max: 1, step: 'any', value: 0 })
  place.setAttribute('aria-label', 'Position in the film')
  const show = () => {
    button.textContent = film.paused ? '▶' : '❚❚'
    button.setAttribute('aria-label', film.paused ? 'Play' : 'Pause')
  }
  const toggle = () => (film.paused ? film.play() : film.pause())
  button.addEventListener('click', toggle)
  film.addEventListener('click', toggle)
  film.addEventListener('play', show)
  film.addEventListener('pause', show)
  film.addEventListener('timeupdate', () => { place.value = film.currentTime / film.duration || 0 })
  place.addEventListener('input', () => { film.currentTime = place.value * film.duration || 0 })
  film.controls = false
  const box = document.createElement('div')
  box.className = `film ${film.className}`
  film.replaceWith(box)
  bar.append(button, place)
  box.append(film, bar)
  show()
}
