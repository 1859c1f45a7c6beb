import { mount } from 'svelte'
import App from './App.svelte'
import '../shared/page.css'
import './dream.css'

mount(App, { target: document.getElementById('dream') })
