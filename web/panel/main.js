import { mount } from 'svelte'
import App from './App.svelte'
import './panel.css'

mount(App, { target: document.getElementById('panel') })
