import { mount } from 'svelte'
import App from './App.svelte'
import '../shared/page.css'
import './maze.css'

mount(App, { target: document.getElementById('maze') })
