import { mount } from 'svelte'
import App from './App.svelte'
import '../shared/page.css'
import './clarity.css'

mount(App, { target: document.getElementById('clarity') })
