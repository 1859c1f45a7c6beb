import { mount } from 'svelte'
import App from './App.svelte'
import '../shared/page.css'
import './panel.css'

mount(App, { target: document.getElementById('panel') })
