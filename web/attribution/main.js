import { mount } from 'svelte'
import App from './App.svelte'
import '../shared/page.css'
import './attribution.css'

mount(App, { target: document.getElementById('page') })
